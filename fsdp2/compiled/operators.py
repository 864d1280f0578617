"""Our algorithms for gloo as operators that a graph can hold; the arithmetic around them is the graph's own.

Each operator starts a collective and returns its result, not valid yet: ``compiler.wait_for`` is the node that makes it so. Between
the two the compiler may compute, and may give memory that nothing reads any more to something else. So an operator's input has to
be read again after the wait, or, as with the gather's, be copied before the operator returns.

Worked example, ``reduce_scatter`` on rank 1 of 3, rows (3, n) in:

    received = wait(exchange_rows(rows, "pairwise"))    (2, n): row 1 of rank 0, row 1 of rank 2
    (received[0] + rows[1]) + received[1]               in ascending rank order, as eager mode adds
"""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.comm import collectives
from ..core.comm.backends import AllGatherAlgorithm, ReduceScatterAlgorithm
from . import torch_names as compiler


@torch.library.custom_op("fsdp2::all_gather", mutates_args=())
def _all_gather(shard: Tensor, num_ranks: int, group_name: str) -> Tensor:
    """shard: (n,), a dtype of ``collectives.SENDABLE``. Returns: (W * n,), the same dtype, rank-major."""
    process_group = compiler.process_group_named(group_name)
    gathered = shard.new_empty(num_ranks * shard.numel())
    rows = gathered.view(num_ranks, shard.numel()).unbind()
    rows[process_group.rank()].copy_(shard)
    _register(gathered, collectives.start_broadcasts(rows, process_group, True))
    return gathered


@_all_gather.register_fake
def _(shard: Tensor, num_ranks: int, group_name: str) -> Tensor:
    return shard.new_empty(num_ranks * shard.numel())


@torch.library.custom_op("fsdp2::exchange_rows", mutates_args=())
def _exchange_rows(rows: Tensor, pairwise: bool, group_name: str) -> Tensor:
    """rows: (W, n), row d for rank d. Returns: this rank's row of every rank, (W, n); pairwise of every other rank, (W - 1, n)."""
    process_group = compiler.process_group_named(group_name)
    received = _to_receive(rows, pairwise)
    if pairwise:
        rank, others = process_group.rank(), received.unbind()
        of_all = [*others[:rank], rows[rank], *others[rank:]]
        works = collectives.start_exchange(of_all, rows.unbind(), process_group, True)
    else:
        works = [dist.all_to_all_single(received, rows, group=process_group, async_op=True)]
    _register(received, works)
    return received


@_exchange_rows.register_fake
def _(rows: Tensor, pairwise: bool, group_name: str) -> Tensor:
    return _to_receive(rows, pairwise)


def _to_receive(rows: Tensor, pairwise: bool) -> Tensor:
    return rows.new_empty(rows.shape[0] - pairwise, rows.shape[1])


compiler.note_collective("fsdp2::all_gather", compiler.ALL_GATHER)
compiler.note_collective("fsdp2::exchange_rows", compiler.REDUCE_SCATTER)


def _register(result: Tensor, works: list[dist.Work | None]) -> None:
    for work in works:
        assert work is not None
        compiler.register_work(result, work)


def all_gather(shard: Tensor, process_group: dist.ProcessGroup, algorithm: AllGatherAlgorithm) -> Tensor:
    """(n,) of every rank, one after another: (W * n,). Collective: yes, as a node of the graph that is traced, or now."""
    if algorithm == "stock":
        return compiler.functional_all_gather(shard, process_group)
    return compiler.wait_for(_all_gather(shard, process_group.size(), process_group.group_name))


def reduce_scatter(tensor: Tensor, operation: str, process_group: dist.ProcessGroup, algorithm: ReduceScatterAlgorithm) -> Tensor:
    """This rank's (n,) of the reduced (W * n,). operation: "sum" or "avg" (stock only). Collective: as above."""
    if algorithm == "stock":
        return compiler.functional_reduce_scatter(tensor, operation, process_group)
    assert operation == "sum", operation
    rank = process_group.rank()
    rows = tensor.view(process_group.size(), -1)
    pairwise = algorithm == "pairwise"
    received = list(compiler.wait_for(_exchange_rows(rows, pairwise, process_group.group_name)).unbind())
    # The own row is read from the input, so that the compiler keeps the input until the exchange is over.
    received[rank : rank if pairwise else rank + 1] = [rows[rank]]
    return functools.reduce(torch.add, received)
