"""Which rank an expression asks for: the first of all, or the first of each node or group; by where its value comes from.

    rank == 0                                        FIRST
    dist.get_node_local_rank() == 0                  SEVERAL: one per node
    rank == 0, after rank = int(os.environ["LOCAL_RANK"])  SEVERAL
    lora_rank == 0                                   None: not the rank of a process

An assignment in this file decides about a name; without one, the words of the name do.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import Any

import libcst as cst
from libcst import matchers as m

from .names import Names
from .syntax_trees import dotted, is_none, key_of, last_name, string_of


class Which(Enum):
    """On which ranks a test for "the first" holds."""

    FIRST = "rank 0 of all"
    SEVERAL = "one of each node or group"


_VARIABLES = {
    "RANK": Which.FIRST,
    "SLURM_PROCID": Which.FIRST,
    "OMPI_COMM_WORLD_RANK": Which.FIRST,
    "PMI_RANK": Which.FIRST,
    "LOCAL_RANK": Which.SEVERAL,
    "GROUP_RANK": Which.SEVERAL,
    "NODE_RANK": Which.SEVERAL,
    "SLURM_LOCALID": Which.SEVERAL,
    "SLURM_NODEID": Which.SEVERAL,
    "OMPI_COMM_WORLD_LOCAL_RANK": Which.SEVERAL,
}
"""Ranks in the environment, and the ranks whose first has the value 0."""

_OF_ALL = re.compile(r"rank|global|world|my|this|current|cur|dist|ddp|fsdp|process|proc|worker|mpi|get|is|main|trainer|the|self")
_OF_SOME = re.compile(
    r"local|node|group|intra|inter|[dtpces]p|data|tensor|pipeline|model|expert|sequence|context|shard|replica|replicate|mesh|parallel"
    r"|device|gpu|machine|host|stage|coord"
)
"""Words next to ``rank``; with any other it is the rank of a matrix, or of a search result."""

_FLAG = re.compile(r"is_(?P<local>local_)?(main|master|rank_?(zero|0)|first_(rank|process)|global_zero|chief)\w*|(main|master)_process")


_ZERO, _ONE = m.Integer("0"), m.Integer("1")
_AT_0, _AT_NO_RANK = m.Element(_ZERO), m.Element(m.UnaryOperation(m.Minus(), _ONE))
_LISTS = ([_AT_0], [_AT_NO_RANK, _AT_0], [_AT_0, _AT_NO_RANK])
_AMONG = m.OneOf(*(kind(elements=each) for kind in (m.List, m.Tuple, m.Set) for each in _LISTS))
"""``[-1, 0]``, in scripts that have rank -1 where there is one process."""

_HOLDS: dict[bool, list[tuple[Any, Any]]] = {
    True: [(m.Equal() | m.LessThanEqual() | m.Is(), _ZERO), (m.LessThan(), _ONE), (m.In(), _AMONG)],
    False: [(m.NotEqual() | m.GreaterThan(), _ZERO), (m.GreaterThanEqual(), _ONE), (m.NotIn(), _AMONG)],
}
"""Operators and right sides of comparisons of a rank that hold for the first, and for all others."""


def asks_for(names: Names, test: cst.BaseExpression, *, first: bool, depth: int = 0) -> Which | None:
    """On which ranks ``test`` holds, if it asks for the first: ``rank == 0``, ``not rank``, ``rank in (-1, 0)``, ``is_master()``.

    first: if False, the same for a test that holds on all other ranks: ``rank != 0``, ``rank > 0``, ``rank``, ``not is_master()``
    """
    if isinstance(test, cst.UnaryOperation) and isinstance(test.operator, cst.Not):
        rank = rank_of(names, test.expression)
        if rank is not None:
            return rank if first else None
        return asks_for(names, test.expression, first=not first, depth=depth)
    if isinstance(test, cst.Comparison) and len(test.comparisons) == 1:
        operator, right = test.comparisons[0].operator, test.comparisons[0].comparator
        if first and isinstance(operator, cst.Equal) and m.matches(test.left, _ZERO):
            return rank_of(names, right)
        holds = any(m.matches(operator, kind) and m.matches(right, value) for kind, value in _HOLDS[first])
        return rank_of(names, test.left) if holds else None
    return _flag(names, test, depth) if first else rank_of(names, test)


def _flag(names: Names, test: cst.BaseExpression, depth: int) -> Which | None:
    """A name that holds the answer: by its assignment, or by its words."""
    of = test.func if isinstance(test, cst.Call) else test
    if not isinstance(of, (cst.Name, cst.Attribute)) or depth > 5:
        return None
    values = names.values_of(dotted(of)) if of is test else names.returns.get(last_name(of), [])
    found = (asks_for(names, value, first=True, depth=depth + 1) for value in values)
    which = next((each for each in found if each is not None), None)
    if which is None and (match := _FLAG.fullmatch(last_name(of))) is not None:
        which = Which.SEVERAL if match["local"] else Which.FIRST
    return which


def rank_of(names: Names, node: cst.BaseExpression, depth: int = 0) -> Which | None:
    """If an expression is a rank: the ranks whose first has its value 0. None: it is not the rank of a process."""
    if depth > 5:
        return None
    if isinstance(node, cst.Call):
        return _of_call(names, node, depth)
    if isinstance(node, cst.Subscript) and names.origin_of(node.value) == "os.environ":
        return _VARIABLES.get(key_of(node) or "")
    if isinstance(node, cst.BinaryOperation):
        return Which.SEVERAL if rank_of(names, node.left, depth + 1) is not None else None  # rank % ranks_of_a_node
    if isinstance(node, cst.IfExp):
        return rank_of(names, node.body, depth + 1) or rank_of(names, node.orelse, depth + 1)
    if isinstance(node, (cst.Name, cst.Attribute)):
        return _of_any(names, names.passed_or_assigned(node), depth) or _by_words(last_name(node))
    return None


def _of_any(names: Names, values: list[cst.BaseExpression], depth: int) -> Which | None:
    found = {rank_of(names, value, depth + 1) for value in values}
    return next((kind for kind in (Which.SEVERAL, Which.FIRST) if kind in found), None)


def mentions_rank(names: Names, node: cst.BaseExpression) -> bool:
    """Whether some part of ``node`` is a rank, or asks for one."""
    parts = m.findall(node, m.Name() | m.Attribute() | m.Call() | m.Subscript())
    return any(rank_of(names, each) is not None or asks_for(names, each, first=True) is not None for each in parts)  # type: ignore[arg-type]


def _of_call(names: Names, call: cst.Call, depth: int) -> Which | None:
    made_by, name = names.origin_of(call.func), last_name(call.func)
    if dotted(call.func) == "int" and call.args:
        return rank_of(names, call.args[0].value, depth + 1)
    if made_by in ("os.getenv", "os.environ.get") and call.args:
        return _VARIABLES.get(string_of(call.args[0].value) or "")
    if name == "get_rank":
        return Which.FIRST if all(is_none(arg.value) for arg in call.args) else Which.SEVERAL
    return _of_any(names, names.returns.get(name, []), depth) or _by_words(name)


def _by_words(name: str) -> Which | None:
    words = [word for word in re.split(r"_+|(?<=[a-z])(?=[A-Z])", name) if word]
    lower = [word.lower() for word in words]
    if "rank" not in lower:
        return Which.SEVERAL if "".join(lower) == "localrank" else None
    if not all(_OF_ALL.fullmatch(word) or _OF_SOME.fullmatch(word) for word in lower):
        return None
    return Which.SEVERAL if any(_OF_SOME.fullmatch(word) for word in lower) else Which.FIRST
