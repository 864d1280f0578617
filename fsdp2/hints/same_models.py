"""Before a first forward communicates, each rank checks that its neighbors gather the same, and will reduce the same.

Otherwise gloo aborts, and NCCL computes nonsense.

A rank writes into the store what its groups gather, and reads what the rank before it and the one after it have written
so far. It waits for none of them. Of two neighbors at least the later one has both; it raises, its program ends, and
the other one, which is in the first all-gather by then, raises a LostRankError that quotes it (``lost_ranks.py``).

Worked example: on rank 1 of 2, blocks.0.up.weight has a row more

    rank 0    writes; nothing of rank 1 is there; waits in its first all-gather
    rank 1    writes, reads; ModuleError: models differ between ranks: blocks.0.up.weight
                               rank 0: blocks.0.up.weight: (13, 10), torch.float32, gathered in torch.float32
                               rank 1: blocks.0.up.weight: (14, 10), torch.float32, gathered in torch.float32
    rank 0    LostRankError: rank 1: its program has ended with ModuleError: models differ between ranks: blocks.0.up...
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import zlib
from collections.abc import Sequence

import torch.distributed as dist

from ..core.comm import backends
from ..core.iteration.unit import Unit
from ..errors import ModuleError
from ..lost_ranks import number_of_world
from ..torch_names import torch_collectives

_num_models: collections.Counter[str] = collections.Counter()
"""How many models have begun to run over a process group: first forwards gather, so its ranks run them in one order."""


def require_same_as_neighbors(units: Sequence[Unit]) -> None:
    """Raise ModuleError if a neighbor has written another model. Collective: no; at most five requests to the store.

    Only ranks that gather together are compared: a forward over a shard axis of one sends nothing, and may run on one
    rank alone. Groups over other ranks than the first group's are not compared, nor are names, which no rank gathers.
    """
    first = next((unit.groups[0] for unit in units if unit.groups), None)
    process_group = None if first is None else first.mesh.shard_group
    if first is None or process_group is None or process_group.size() == 1:
        return
    if not backends.moves_data(backends.backend_of(process_group, first.mesh.device_type)):
        return
    facts = [
        (
            param.fqn,
            f"{tuple(param.sharded.shape)}, {param.dtype}, gathered in {group.plan.param_dtype}, "
            f"reduced in {group.plan.reduce_dtype}, cut as {param.spec.sharded.placements}"
            + ("" if param.sharded.requires_grad else ", frozen")
            + (", optional" if unit.options.optional else ""),
        )
        for unit in units
        for group in unit.groups
        if group.mesh.ranks == first.mesh.ranks
        for param in group.params
    ]
    number = _num_models[process_group.group_name] = _num_models[process_group.group_name] + 1
    ranks, rank = dist.get_process_group_ranks(process_group), dist.get_rank()
    at = ranks.index(rank)
    written: dict[int, bytes] = {}
    with contextlib.suppress(RuntimeError):  # a store that keeps nothing, or that is gone: the next collective tells
        store = torch_collectives.keys_of_the_store(f"fsdp2_models_{number_of_world()}/{process_group.group_name}/{number}")
        store.set(str(rank), zlib.compress(json.dumps(facts).encode()))
        for neighbor in {ranks[at - 1], ranks[(at + 1) % len(ranks)]} - {rank}:
            if store.check([str(neighbor)]):
                written[neighbor] = store.get(str(neighbor))
    for neighbor, packed in written.items():
        _compare(neighbor, json.loads(zlib.decompress(packed)), rank, facts)


def _compare(neighbor: int, theirs: Sequence[Sequence[str]], rank: int, ours: Sequence[Sequence[str]]) -> None:
    nothing = ("nothing", "no more parameters")
    for their, our in itertools.zip_longest(theirs, ours, fillvalue=nothing):
        if their[1] != our[1]:
            raise ModuleError(
                f"models differ between ranks: {our[0] if our is not nothing else their[0]}",
                items=[f"rank {number}: {': '.join(fact)}" for number, fact in sorted([(neighbor, their), (rank, our)])],
                expected="on all ranks the same shapes, dtypes, placements and requires_grad, in the same order",
                fix="build the same model on every rank, and call fully_shard on the same modules",
            )
