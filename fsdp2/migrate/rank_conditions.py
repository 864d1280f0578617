"""Which rank an expression asks for: the first of all, or the first of each node or group; by where its value comes from.

    rank == 0                                        FIRST
    dist.get_node_local_rank() == 0                  SEVERAL: as many as there are nodes
    rank == 0, after rank = int(os.environ["LOCAL_RANK"])  SEVERAL
    lora_rank == 0                                   None: no rank of a process

What a name is worth is looked up where it is assigned in this file; where that says nothing, its words do.
"""

from __future__ import annotations

import re
from enum import Enum

import libcst as cst
from libcst import matchers

from .names import Names
from .syntax_trees import code, dotted, string_of


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
"""Ranks in the environment, and the ranks of which their 0 is the first."""

_OF_ALL = re.compile(r"rank|global|world|my|this|current|cur|dist|ddp|fsdp|process|proc|worker|mpi|get|is|main|trainer|the|self")
_OF_SOME = re.compile(
    r"local|node|group|intra|inter|[dtpces]p|data|tensor|pipeline|model|expert|sequence|context|shard|replica|replicate|mesh|parallel"
    r"|device|gpu|machine|host|stage|coord"
)
"""Words next to ``rank``; with any other it is the rank of a matrix, or of a search result."""

_FLAG = re.compile(r"is_(?P<local>local_)?(main|master|rank_?(zero|0)|first_(rank|process)|global_zero|chief)\w*|(main|master)_process")


def asks_for_first(names: Names, test: cst.BaseExpression, depth: int = 0) -> Which | None:
    """On which ranks ``test`` holds, if it asks for the first: ``rank == 0``, ``not rank``, ``rank in (-1, 0)``, ``is_master()``."""
    if isinstance(test, cst.UnaryOperation) and isinstance(test.operator, cst.Not):
        return rank_of(names, test.expression) or asks_for_all_but(names, test.expression, depth)
    if isinstance(test, cst.Comparison) and len(test.comparisons) == 1:
        left, operator, right = test.left, test.comparisons[0].operator, test.comparisons[0].comparator
        if isinstance(operator, cst.Equal) and _is_number(left, "0"):
            return rank_of(names, right)
        zero = isinstance(operator, (cst.Equal, cst.LessThanEqual, cst.Is)) and _is_number(right, "0")
        below = isinstance(operator, cst.LessThan) and _is_number(right, "1")
        among = isinstance(operator, cst.In) and _holds_first(right)
        return rank_of(names, left) if zero or below or among else None
    return _flag(names, test, depth)


def asks_for_all_but(names: Names, test: cst.BaseExpression, depth: int = 0) -> Which | None:
    """The same for a test that holds on all ranks but the first: ``rank != 0``, ``rank > 0``, ``rank``, ``not is_main_process()``."""
    if isinstance(test, cst.UnaryOperation) and isinstance(test.operator, cst.Not):
        return asks_for_first(names, test.expression, depth) if rank_of(names, test.expression) is None else None
    if isinstance(test, cst.Comparison) and len(test.comparisons) == 1:
        operator, right = test.comparisons[0].operator, test.comparisons[0].comparator
        but_zero = isinstance(operator, (cst.NotEqual, cst.GreaterThan)) and _is_number(right, "0")
        above = isinstance(operator, cst.GreaterThanEqual) and _is_number(right, "1")
        outside = isinstance(operator, cst.NotIn) and _holds_first(right)
        return rank_of(names, test.left) if but_zero or above or outside else None
    return rank_of(names, test)


def _flag(names: Names, test: cst.BaseExpression, depth: int) -> Which | None:
    """A name that holds the answer: by its assignment, or by its words."""
    of = test.func if isinstance(test, cst.Call) else test
    if not isinstance(of, (cst.Name, cst.Attribute)) or depth > 5:
        return None
    values = names.values_of(dotted(of)) if of is test else names.facts.returns.get(_last(of), [])
    for value in values:
        found = asks_for_first(names, value, depth + 1)
        if found is not None:
            return found
    match = _FLAG.fullmatch(_last(of))
    if match is None:
        return None
    return Which.SEVERAL if match["local"] else Which.FIRST


def rank_of(names: Names, node: cst.BaseExpression, depth: int = 0) -> Which | None:
    """If an expression is a rank: the ranks of which its 0 is the first. None: it is no rank of a process."""
    if depth > 5:
        return None
    if isinstance(node, cst.Call):
        return _of_call(names, node, depth)
    if isinstance(node, cst.Subscript) and names.origin_of(node.value) == "os.environ":
        index = node.slice[0].slice
        return _VARIABLES.get(string_of(index.value) or "") if isinstance(index, cst.Index) else None
    if isinstance(node, cst.BinaryOperation):
        return Which.SEVERAL if rank_of(names, node.left, depth + 1) is not None else None  # rank % ranks_of_a_node
    if isinstance(node, cst.IfExp):
        return rank_of(names, node.body, depth + 1) or rank_of(names, node.orelse, depth + 1)
    if isinstance(node, (cst.Name, cst.Attribute)):
        found = [kind for value in names.passed_or_assigned(node) if (kind := rank_of(names, value, depth + 1)) is not None]
        if found:
            return Which.SEVERAL if Which.SEVERAL in found else Which.FIRST
        return _by_words(_last(node))
    return None


def mentions_rank(names: Names, node: cst.BaseExpression) -> bool:
    """Whether some part of ``node`` is a rank, or asks for one."""
    parts = matchers.findall(node, matchers.Name() | matchers.Attribute() | matchers.Call() | matchers.Subscript())
    return any(rank_of(names, each) is not None or asks_for_first(names, each) is not None for each in parts)  # type: ignore[arg-type]


def _of_call(names: Names, call: cst.Call, depth: int) -> Which | None:
    made_by, name = names.origin_of(call.func), _last(call.func)
    if dotted(call.func) == "int" and call.args:
        return rank_of(names, call.args[0].value, depth + 1)
    if made_by in ("os.getenv", "os.environ.get") and call.args:
        return _VARIABLES.get(string_of(call.args[0].value) or "")
    if name == "get_rank":
        of_all = not call.args or all(isinstance(arg.value, cst.Name) and arg.value.value == "None" for arg in call.args)
        return Which.FIRST if of_all else Which.SEVERAL
    found = [kind for value in names.facts.returns.get(name, []) if (kind := rank_of(names, value, depth + 1)) is not None]
    if found:
        return Which.SEVERAL if Which.SEVERAL in found else Which.FIRST
    return _by_words(name)


def _by_words(name: str) -> Which | None:
    words = [word for word in re.split(r"_+|(?<=[a-z])(?=[A-Z])", name) if word]
    lower = [word.lower() for word in words]
    if "rank" not in lower:
        return Which.SEVERAL if "".join(lower) == "localrank" else None
    if not all(_OF_ALL.fullmatch(word) or _OF_SOME.fullmatch(word) for word in lower):
        return None
    return Which.SEVERAL if any(_OF_SOME.fullmatch(word) for word in lower) else Which.FIRST


def _last(node: cst.BaseExpression) -> str:
    return node.attr.value if isinstance(node, cst.Attribute) else dotted(node)


def _is_number(node: cst.BaseExpression, text: str) -> bool:
    return isinstance(node, cst.Integer) and node.value == text


def _holds_first(node: cst.BaseExpression) -> bool:
    """``[-1, 0]``, in scripts that have rank -1 where there is one process."""
    if not isinstance(node, (cst.List, cst.Tuple, cst.Set)):
        return False
    return {code(each.value) for each in node.elements} in ({"0"}, {"-1", "0"})
