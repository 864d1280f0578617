"""Programs that the fuzzer found to fail and made small: what failed then is right now. The newest come last.

To keep another: ``python tests/fuzz SEED`` prints it; paste it here with a name that says what was wrong.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from fuzz.body import run
from fuzz.program import Action, Failure, Micro, Node, Program, Step, Unit


def heads(*children: Node, **options: Any) -> Program:
    """A root of heads, which is a unit."""
    return Program(root=Node("root", "heads", children=children, unit=Unit()), **options)


def ignored(*children: Node, **options: Any) -> Program:
    """The loss of each rank ignores some heads."""
    return heads(*children, **options, ignores=True, unused=True)


KEPT = {
    "one rank looks at the state dict between two forwards, and gathered again alone": Program(
        root=Node("root", children=(Node("a", "bare"), Node("b", "linear", unit=Unit())), unit=Unit()),
        steps=(Step((Micro((Action("forward_only"), Action("state_dict", rank=0))),)),),
    ),
    "a list whose first module is called with what needs no gradient was reduced before that module's backward": Program(
        dim=6,
        root=Node(
            "root", children=(Node("a", "mlp", unit=Unit(label="list")), Node("b", "bare", unit=Unit(label="list"))), unit=Unit()
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
    "a weight frozen while unsharded parameters were shown, by reshard_after_backward=False, got a gradient": Program(
        root=Node("root", children=(Node("a", "bare"), Node("b", "bare")), unit=Unit()),
        steps=(Step((Micro(reshard=False),)), Step((Micro((Action("freeze", "a"),)),))),
    ),
    "a weight frozen and thawed between micro-batches of a kept unit lost a part of its gradient": Program(
        dim=6,
        root=Node("root", children=(Node("a", children=(Node("b", "bare"),), unit=Unit(), checkpoint="reentrant"),)),
        steps=(Step((Micro(), Micro((Action("freeze", "b"),), reshard=False), Micro((Action("thaw", "b"),)))),),
    ),
    "a unit is called twice in a graph that a backward keeps, which forgot both calls: the next freed it between them": heads(
        Node("a", "bare", unit=Unit()),
        Node("b", "again", borrows="a"),
        seed=7,
        dim=6,
        steps=(Step((Micro(input_grad=True, penalty=True),)),),
        losses="separate",
    ),
    "a rank that ignores a unit in both of two forwards took one for another backward's: no input needs a gradient": ignored(
        Node("a", "bare", unit=Unit()),
        Node("b", "bare"),
        Node("c", "bare", unit=Unit()),
        steps=(Step((Micro(forwards=2, order="sum"),)),),
    ),
    "an ignored unit that returns its input was gathered once more, by the hook on the node that made this input": ignored(
        Node("a", "bare", unit=Unit()), Node("b", "idle", unit=Unit()), Node("c", "mlp"), dim=3
    ),
    "the second module of a list runs a second time and stores a tensor: the backward that began there found freed parameters": ignored(
        Node("a", "bare", unit=Unit(label="list")),
        Node("b", "sum", children=(Node("c", "bare", stored=True),), unit=Unit(label="list"), times=2),
        dim=6,
    ),
    "a penalty on the gradient of what goes into the second module of a list found its parameters freed": heads(
        Node("a", "linear", unit=Unit(label="list"), detach="input"),
        Node("b", "bare", unit=Unit(label="list")),
        steps=(Step((Micro(input_grad=True, penalty=True),)),),
    ),
    "a unit in a checkpoint was gathered by the recomputation before the heads that this rank ignores and others gather first": ignored(
        Node("a", "sum", children=(Node("b", "bare"), Node("c", "linear", unit=Unit()), Node("d", "bare")), checkpoint="saved"),
        Node("e", "bare", unit=Unit()),
        Node("f", "bare", unit=Unit()),
    ),
    "unshard() of what was kept unsharded while its weights were written made that count as up to date": Program(
        root=Node("root", children=(Node("a", "linear", unit=Unit(reshard=False)),), unit=Unit()),
        steps=(Step((Micro((Action("evaluate"), Action("write"), Action("unshard", "a"))),)),),
    ),
    "a recomputation of a unit that gets plain data gathered it ahead of what other ranks gather before": ignored(
        Node(
            "a",
            children=(Node("b", children=(Node("d", "bare", unit=Unit()),), detach="output"), Node("f", "bare")),
            checkpoint="saved",
        ),
        Node("g", "bare", unit=Unit(), detach="output"),
        Node("l", "bare", unit=Unit()),
        seed=6925,
        dim=3,
        steps=(Step((Micro(reshard=False, forwards=2),)),),
    ),
    "a list was reduced behind a re-entrant checkpoint of the second of three modules, in the middle of its backward": heads(
        Node("a", "bare", unit=Unit(label="list", reshard=True)),
        Node("b", "bare", unit=Unit(label="list", reshard=True), checkpoint="reentrant"),
        Node("c", "bare", unit=Unit(label="list", reshard=True)),
        steps=(Step((Micro(input_grad=True),)), Step()),
        in_hooks=True,
        unused=True,
    ),
    "a list was reduced behind a re-entrant checkpoint of the first module, and again for the second, which is detached": heads(
        Node("a", children=(Node("b", "bare", unit=Unit()),), unit=Unit(label="list", reshard=True), checkpoint="reentrant"),
        Node("c", "linear", unit=Unit(label="list", reshard=True), detach="output"),
        steps=(Step((Micro(input_grad=True),)),),
        in_hooks=True,
        unused=True,
    ),
    "a rank that leaves a module out of the middle of a list, and gets plain data, gathered the list again": heads(
        Node("a", children=(Node("b", "bare", checkpoint="reentrant", skip="rank"),), unit=Unit(label="list", reshard=True)),
        Node(
            "c",
            "sum",
            children=(
                Node("d", "linear", unit=Unit(label="inner", reshard=True)),
                Node("e", "bare", unit=Unit(label="inner", reshard=True), checkpoint="reentrant"),
            ),
            unit=Unit(label="list", reshard=True),
            checkpoint="saved",
        ),
        in_hooks=True,
        unused=True,
    ),
    "a list was reduced once more, with zeros, behind a re-entrant checkpoint of its frozen module inside of another": heads(
        Node(
            "a",
            "sum",
            children=(
                Node("b", "linear", unit=Unit(label="list", reshard=True), frozen=True, checkpoint="reentrant"),
                Node("c", "bare", unit=Unit(label="list", reshard=True)),
            ),
            unit=Unit(),
            checkpoint="reentrant",
        ),
        steps=(Step((Micro(input_grad=True),)),),
        in_hooks=True,
        unused=True,
    ),
    "a unit of a checkpointed segment that ran again for the later of two forwards was taken for the earlier one's": ignored(
        Node("a", "bare"),
        Node("b", children=(Node("c", "bare", unit=Unit()),), checkpoint="saved"),
        Node("d", "bare"),
        dim=6,
        steps=(Step((Micro(forwards=2, order="sum", input_grad=True),)),),
    ),
    "a segment that some ranks' losses ignore has one unit with a graph, and inside of it one that runs under no_grad": ignored(
        Node("a", "bare"),
        Node(
            "b", "sum", children=(Node("c", "bare", unit=Unit(), detach="no_grad"), Node("d", "bare")), unit=Unit(), checkpoint="saved"
        ),
        Node("e", "bare", unit=Unit()),
        dim=6,
        steps=(Step(), Step()),
    ),
    "a list with a module under no_grad stayed unsharded between two forwards' backwards on those ranks that use it": ignored(
        Node("a", "bare"),
        Node("b", "bare", unit=Unit(label="list")),
        Node("c", "bare", unit=Unit(label="list"), detach="no_grad"),
        steps=(Step((Micro(forwards=2, order="sum"),)),),
    ),
    "the second module of a list is checkpointed, and its recomputation was taken for that of an earlier forward": ignored(
        Node("a", "bare"),
        Node("b", "bare", unit=Unit(label="list")),
        Node("c", "bare", unit=Unit(label="list"), checkpoint="saved", times=2),
        Node("d", "bare", unit=Unit()),
        steps=(Step((Micro(forwards=2, order="sum"),)),) * 2,
    ),
    "a tensor hook on what a child returned, which the child stores as well, was on another tensor behind a cast": Program(
        root=Node(
            "root",
            children=(
                Node("a", children=(Node("b", "linear", unit=Unit(output_dtype="float32"), stored=True),), unit=Unit(), hook="tensor"),
            ),
            unit=Unit(),
        )
    ),
    "a tensor hook on what may be the input itself was on a view of it": heads(
        Node("a", "norm"), Node("b", children=(Node("c", "idle", unit=Unit()),), unit=Unit(), hook="tensor")
    ),
    "a frozen unit that forward keeps is gathered again in a second backward, which reaches it on some ranks only": ignored(
        Node("a", "bare"),
        Node("b", children=(Node("c", "bare", frozen=True),), unit=Unit(reshard=False)),
        Node("d", "bare"),
        losses="separate",
    ),
}

REFUSED = {
    "a write to parameters that a plain root shows unsharded, whose state dict is then saved and loaded": Program(
        dim=6,
        root=Node("root", children=(Node("a", "bare", unit=Unit()),)),
        steps=(Step((Micro(actions=(Action("forward_only"), Action("write_shown"), Action("reload"))),)),),
    ),
    "a second backward recomputes a segment with a unit that forward kept, and that the first backward has resharded": ignored(
        Node("a", "bare"),
        Node("b", "bare"),
        Node("c", children=(Node("d", "bare", unit=Unit()), Node("e", "bare", unit=Unit(reshard=False))), checkpoint="saved"),
        losses="separate",
    ),
    "a segment that some ranks' losses ignore has a unit that runs under no_grad, which only the other ranks gathered again": ignored(
        Node("a", "bare", unit=Unit()),
        Node(
            "b", "sum", children=(Node("c", "bare", unit=Unit(), detach="no_grad"), Node("d", "bare", unit=Unit())), checkpoint="saved"
        ),
        Node("e", "bare"),
        dim=6,
    ),
    "a segment that some ranks' losses ignore has a frozen unit without inputs that need a gradient": ignored(
        Node("a", "bare"),
        Node(
            "b",
            "sum",
            children=(Node("c", "bare", unit=Unit(), frozen=True, detach="cut"), Node("d", "bare", unit=Unit())),
            checkpoint="saved",
        ),
        Node("e", "bare"),
        dim=6,
    ),
    "what a unit is called with twice needs a gradient on one rank alone, which gathered it twice, where the other hung": Program(
        root=Node("root", children=(Node("a", "bare", skip="rank"), Node("d", "bare", unit=Unit())), unit=Unit()),
        steps=(Step((Micro(forwards=2, order="sum"),)),),
        unused=True,
    ),
}


@pytest.mark.parametrize("program", KEPT.values(), ids=KEPT.keys())
def test_what_failed_once_is_right(program):
    result = run(program)
    assert result.kind == "right", result.text


@pytest.mark.parametrize("program", REFUSED.values(), ids=REFUSED.keys())
def test_what_ended_the_processes_once_is_refused_by_name(program):
    result = run(program)
    assert result.kind == "refused", result.text


MEMBERS = {
    "plain": {},
    "under no_grad": {"detach": "no_grad"},
    "checkpointed": {"checkpoint": "saved"},
    "checkpointed, twice": {"checkpoint": "saved", "times": 2},
    "twice": {"times": 2},
    "without inputs": {"detach": "cut"},
    "detached": {"detach": "output"},
    "frozen": {"frozen": True},
    "in odd steps": {"skip": "step"},
}


@pytest.mark.slow
def test_two_forwards_in_one_backward_of_lists_whose_modules_run_in_any_two_ways():
    for first, second in itertools.product(MEMBERS, MEMBERS):
        unit = Unit(label="list")
        members = (Node("b", "bare", unit=unit, **MEMBERS[first]), Node("c", "bare", unit=unit, **MEMBERS[second]))
        root = Node("root", "heads", (Node("a", "bare"), *members, Node("d", "bare", unit=Unit())), unit=Unit())
        result = run(Program(root=root, steps=(Step((Micro(forwards=2, order="sum"),)),) * 3, ignores=True, unused=True))
        assert result.kind == "right", f"{first}, {second}: {result.text}"
