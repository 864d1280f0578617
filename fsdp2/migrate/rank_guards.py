"""``if rank == 0: torch.save(model.state_dict())``: under DDP one rank can do it alone, here all ranks have to do it together.

The state is taken before the ``if``, on every rank, and used inside of it. Which ranks pass is read from where the value comes from
(``rank_conditions.py``): under ``if local_rank == 0`` one rank of each node does, so every rank gets the state.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import libcst as cst

from .editor import Editor
from .names import Names
from .rank_conditions import Which, asks_for, mentions_rank
from .syntax_trees import code, expression, last_name


@dataclass
class _Variables:
    taken: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class _Guard:
    """The statements that keep ``old`` from running on every rank.

    at:    the statement before which all ranks still are together; None: the open one
    which: rank 0 alone, or one rank of each of several
    test:  as it is written, in words
    rest:  what else has to hold, "" if nothing; None if that depends on the rank, too
    """

    at: cst.CSTNode | None
    which: Which
    test: str
    rest: str | None = ""


def on_every_rank(editor: Editor, old: cst.Call, state: Callable[[bool], str], name: str) -> cst.BaseExpression:
    """The expression for the state, ``state(False)``; or a variable that is assigned to before the guard around ``old``:
    ``state(True)``, which gives it to rank 0 alone, where rank 0 alone passes."""
    guard = _guard(editor.names, old)
    if guard is None:
        for call, outer in _guarded_callers(editor.names, old):
            editor.left(
                call,
                f"{code(call)} {outer.test} takes a state dict, which all ranks have to do together: call it on every rank, "
                "and put only the writing under the condition",
            )
        return expression(state(False))
    value = state(guard.which is Which.FIRST)
    if guard.rest is None:
        editor.left(old, f"a state dict {guard.test}: call {value} on every rank")
        return expression(value)
    if guard.which is Which.SEVERAL:
        editor.note(old, f"{guard.test} holds on several ranks, one in each node or group, so every rank gets the whole state.")
    variable = _unused(editor, name)
    editor.before(f"{variable} = {value} if {guard.rest} else None" if guard.rest else f"{variable} = {value}", guard.at)
    return expression(variable)


def _guard(names: Names, node: cst.CSTNode) -> _Guard | None:
    """The outermost guard around ``node``, in the same function."""
    found: _Guard | None = None
    below = node
    for above in names.ancestors(node):
        if isinstance(above, (cst.FunctionDef, cst.Lambda)):
            break
        if isinstance(above, (cst.If, cst.IfExp)):
            statement = above if isinstance(above, cst.If) else None
            if below is above.body:
                found = _of_test(names, above.test, statement) or found
            elif below is above.orelse and not isinstance(below, cst.If):
                found = _of_failed_test(names, above.test, statement) or found
        elif isinstance(above, cst.BooleanOperation) and below is above.right:  # rank == 0 and save()
            passes = isinstance(above.operator, cst.And)
            found = (_of_test if passes else _of_failed_test)(names, above.left, None) or found
        elif isinstance(above, (cst.IndentedBlock, cst.Module)):
            found = _of_those_that_left(names, above, below) or found
        below = above
    return found


def _guarded_callers(names: Names, node: cst.CSTNode, seen: frozenset[str] = frozenset()) -> list[tuple[cst.Call, _Guard]]:
    """The calls in this file that lead to the function around ``node`` on some ranks alone, each with its guard."""
    function = names.function_of(node)
    if not isinstance(function, cst.FunctionDef) or function.name.value in seen:
        return []
    found = []
    for call in names.calls:
        if last_name(call.func) == function.name.value:
            guard = _guard(names, call)
            found += [(call, guard)] if guard is not None else _guarded_callers(names, call, seen | {function.name.value})
    return found


def _of_test(names: Names, test: cst.BaseExpression, statement: cst.If | None) -> _Guard | None:
    parts = [(each, asks_for(names, each, first=True)) for each in _conjuncts(test)]
    kinds = [kind for _, kind in parts if kind is not None]
    rest = [each for each, kind in parts if kind is None]
    odd = any(mentions_rank(names, each) for each in rest)
    if not kinds and not odd:
        return None
    which = Which.FIRST if Which.FIRST in kinds else Which.SEVERAL
    if odd:
        return _Guard(statement, which, f"under `if {code(test)}`", None)
    return _Guard(statement, which, f"`{code(test)}`", " and ".join(code(each) for each in rest))


def _of_failed_test(names: Names, test: cst.BaseExpression, statement: cst.If | None) -> _Guard | None:
    """``if rank != 0: ... else: save()``, ``rank != 0 or save()``."""
    which = asks_for(names, test, first=False)
    return _Guard(statement, which, f"`not ({code(test)})`") if which is not None else None


def _of_those_that_left(names: Names, block: cst.IndentedBlock | cst.Module, node: cst.CSTNode) -> _Guard | None:
    """``if rank != 0: return`` further up in the block."""
    for each in block.body:
        if each is node:
            return None
        if isinstance(each, cst.If) and each.orelse is None and _leaves(each.body):
            which = asks_for(names, each.test, first=False)
            if which is not None:
                return _Guard(None, which, f"after `if {code(each.test)}`, where other ranks leave", None)
    return None


def _leaves(body: cst.BaseSuite) -> bool:
    last = body.body[-1] if body.body else None
    if isinstance(last, cst.SimpleStatementLine):
        last = last.body[-1]
    return isinstance(last, (cst.Return, cst.Continue, cst.Break, cst.Raise))


def _conjuncts(test: cst.BaseExpression) -> list[cst.BaseExpression]:
    if isinstance(test, cst.BooleanOperation) and isinstance(test.operator, cst.And):
        return [*_conjuncts(test.left), *_conjuncts(test.right)]
    return [test]


def _unused(editor: Editor, name: str) -> str:
    taken = editor.of(_Variables).taken
    text = "\n".join(code(value) for _, value, _ in editor.names.assigned)
    variable = name
    while variable in taken or re.search(rf"\b{variable}\b", text) or variable in editor.names.tags:
        variable += "_"
    taken.add(variable)
    return variable
