"""``if rank == 0: torch.save(model.state_dict())``: what DDP lets one rank do alone, all ranks have to do together.

The state is taken before the ``if``, on every rank, and used inside of it. It refuses to know state dicts.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import libcst as cst

from .editor import Editor
from .names import Names
from .trees import code, dotted

_A_RANK = r"(\w+\.)*\w*rank\w*(\(\))?"
_RANK = re.compile(rf"not {_A_RANK}|{_A_RANK} == 0|0 == {_A_RANK}|(\w+\.)*is_(main|master|rank\w*0|first)\w*(\(\))?")


def on_every_rank(editor: Editor, old: cst.Call, state: Callable[[bool], str], name: str) -> cst.BaseExpression:
    """The expression for the state, ``state(False)``; or a variable that ``state(True)``, which gives it to rank 0 alone, is assigned
    to before the guard around ``old``."""
    guard = _guard(editor, old)
    if guard is None:
        return editor.make(state(False))
    on_rank_0 = state(True)
    rest = _other_conditions(editor.names, guard.test)
    if rest is None:
        editor.left(old, f"a state dict under `if {code(guard.test)}`: call {on_rank_0} on every rank")
        return editor.make(on_rank_0)
    variable = _unused(editor, name)
    value = f"{on_rank_0} if {rest} else None" if rest else on_rank_0
    editor.before(f"{variable} = {value}", guard)
    return editor.make(variable)


def is_rank_test(names: Names, test: cst.BaseExpression) -> bool:
    """Whether ``test`` asks which rank this is, or is a name for the answer: ``writes = rank == 0``."""
    values = names.values_of(dotted(test)) if isinstance(test, (cst.Name, cst.Attribute)) else []
    return any(_RANK.fullmatch(code(each)) for each in [test, *values])


def _guard(editor: Editor, node: cst.CSTNode) -> cst.If | None:
    """The outermost ``if`` around ``node``, in the same function, that asks for a rank; the first one of its elif chain."""
    found: cst.If | None = None
    below, above = node, editor.names.parent_of(node)
    while above is not None and not isinstance(above, (cst.FunctionDef, cst.Lambda)):
        if isinstance(above, cst.If) and below is above.body and _is_rank_guard(editor.names, above):
            found = above
        below, above = above, editor.names.parent_of(above)
    return found


def _is_rank_guard(names: Names, guard: cst.If) -> bool:
    return any(is_rank_test(names, each) for each in _conjuncts(guard.test))


def _conjuncts(test: cst.BaseExpression) -> list[cst.BaseExpression]:
    if isinstance(test, cst.BooleanOperation) and isinstance(test.operator, cst.And):
        return [*_conjuncts(test.left), *_conjuncts(test.right)]
    return [test]


def _other_conditions(names: Names, test: cst.BaseExpression) -> str | None:
    """The test without the rank; None if it depends on the rank otherwise too."""
    rest = [code(each) for each in _conjuncts(test) if not is_rank_test(names, each)]
    return None if any("rank" in text for text in rest) else " and ".join(rest)


def _unused(editor: Editor, name: str) -> str:
    taken = editor.state.setdefault("taken", set())
    text = "\n".join(code(value) for _, value, _ in editor.names.facts.assigned)
    variable = name
    while variable in taken or re.search(rf"\b{variable}\b", text) or variable in editor.names.tags:
        variable += "_"
    taken.add(variable)
    return variable
