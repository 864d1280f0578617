"""Make a failing program smaller while it still fails in the same way.

A candidate is the program without a step, a micro-batch, an action, a module (with what is below it, or put in place of its parent), or
with one field set back to its default. Candidates are tried from the largest cut to the smallest, again from the start after each that
still fails, until none does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, replace
from typing import Any

from fuzz.program import Node, Program, default_of, tidy, walk


def shrink(program: Program, fails: Callable[[Program], bool], seconds: float) -> Program:
    """The smallest program found in this time for which ``fails`` still holds."""
    end = time.monotonic() + seconds
    tried = {repr(program)}
    smaller = True
    while smaller:
        smaller = False
        for candidate in map(tidy, candidates(program)):
            if time.monotonic() > end:
                return program
            if repr(candidate) in tried:
                continue
            tried.add(repr(candidate))
            if fails(candidate):
                program, smaller = candidate, True
                break
    return program


def candidates(program: Program) -> Iterator[Program]:
    """Programs with one thing less, the largest first."""
    for index in range(len(program.steps)):
        if len(program.steps) > 1:
            yield replace(program, steps=program.steps[:index] + program.steps[index + 1 :])
    for size in range(2, program.world):
        yield replace(program, world=size)
    for root in _smaller_trees(program.root):
        yield replace(program, root=root)
    for index, step in enumerate(program.steps):
        for number in range(len(step.micros)):
            if len(step.micros) > 1:
                yield _with_step(program, index, replace(step, micros=step.micros[:number] + step.micros[number + 1 :]))
    yield from (replace(program, **{name: value}) for name, value in _defaults(program, {"seed", "world", "root", "steps", "dim"}))
    for index, step in enumerate(program.steps):
        if step.clip:
            yield _with_step(program, index, replace(step, clip=False))
        for number, micro in enumerate(step.micros):
            simpler = [{name: value} for name, value in _defaults(micro, {"actions"})]
            if micro.forwards > 2:
                simpler.append({"forwards": 2})
            simpler += [{"actions": micro.actions[:at] + micro.actions[at + 1 :]} for at in range(len(micro.actions))]
            for changes in simpler:
                micros = list(step.micros)
                micros[number] = replace(micro, **changes)  # type: ignore[arg-type]
                yield _with_step(program, index, replace(step, micros=tuple(micros)))
    for node, _ in walk(program.root):
        for name, value in _defaults(node, {"name", "kind", "children"}):
            yield replace(program, root=_with_node(program.root, node.name, replace(node, **{name: value})))
        if node.times > 2:
            yield replace(program, root=_with_node(program.root, node.name, replace(node, times=2)))
        if node.unit is not None:
            for name, value in _defaults(node.unit, set()):
                changed = replace(node, unit=replace(node.unit, **{name: value}))
                yield replace(program, root=_with_node(program.root, node.name, changed))
        simplest = "chain" if node.children else "bare"
        if node.kind not in (simplest, "heads"):
            yield replace(program, root=_with_node(program.root, node.name, replace(node, kind=simplest)))


def _defaults(value: Any, but: set[str]) -> Iterator[tuple[str, Any]]:
    """Each field that is not what it is by default, with its default."""
    for each in fields(value):
        if each.name not in but and (each.default is not MISSING or each.default_factory is not MISSING):
            default = default_of(each)
            if getattr(value, each.name) != default:
                yield each.name, default


def _smaller_trees(root: Node) -> Iterator[Node]:
    for node, above in walk(root):
        if not above:
            continue
        parent = above[-1]
        if len(parent.children) > 1:
            yield _with_node(root, parent.name, replace(parent, children=tuple(c for c in parent.children if c is not node)))
        if node.children:
            # Its children in its place; then itself as a single linear layer.
            around = []
            for child in parent.children:
                around += list(node.children) if child is node else [child]
            yield _with_node(root, parent.name, replace(parent, children=tuple(around)))
            yield _with_node(root, node.name, replace(node, kind="bare", children=()))


def _with_node(node: Node, name: str, other: Node) -> Node:
    if node.name == name:
        return other
    return replace(node, children=tuple(_with_node(child, name, other) for child in node.children))


def _with_step(program: Program, index: int, step: object) -> Program:
    return replace(program, steps=(*program.steps[:index], step, *program.steps[index + 1 :]))  # type: ignore[arg-type]
