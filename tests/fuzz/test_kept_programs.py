"""Programs that the fuzzer found to fail and made small: what failed then is right now. The newest come last.

To keep another: ``python tests/fuzz SEED`` prints it; paste it here with a name that says what was wrong.
"""

from __future__ import annotations

import pytest

from fuzz.body import run
from fuzz.program import Action, Failure, Micro, Node, Program, Step, Unit

KEPT = {
    "one rank looks at the state dict between two forwards, and gathered again alone": Program(
        root=Node("root", children=(Node("a", "bare"), Node("b", "linear", unit=Unit())), unit=Unit()),
        steps=(Step((Micro((Action("forward_only"), Action("state_dict", rank=0))),)),),
    ),
    "a list whose first module is called with what needs no gradient was reduced before that module's backward": Program(
        dim=6,
        root=Node(
            "root",
            children=(
                Node("a", "mlp", unit=Unit(label="list")),
                Node("b", "bare", unit=Unit(label="list")),
            ),
            unit=Unit(),
        ),
        steps=(Step(), Step()),
        unused=True,
    ),
    "weights written after a forward that raised, with no reset, were not seen by the next": Program(
        root=Node("root", children=(Node("a", "bare"),), unit=Unit()),
        steps=(Step((Micro((Action("write"),), failure=Failure("a", recovery="optimizer")),)),),
    ),
    "what was reduced before a backward raised came twice after zero_grad and a retry": Program(
        root=Node("root", children=(Node("a", "linear", unit=Unit()), Node("b", "bare", unit=Unit())), unit=Unit()),
        steps=(Step((Micro(failure=Failure("a", where="backward", recovery="optimizer")),)),),
    ),
}


@pytest.mark.parametrize("program", KEPT.values(), ids=KEPT.keys())
def test_what_failed_once_is_right(program):
    result = run(program)
    assert result.kind == "right", result.text
