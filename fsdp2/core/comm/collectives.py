"""All-gather, reduce-scatter and all-reduce of flat buffers, by the algorithm that suits the backend.

Each function issues a collective and returns its ``Works``; ``finish()`` makes the result valid. Where streams order
collectives it returns None: everything is queued on the current stream. The caller chooses the algorithm (backends.py)
and the division (division.py).

Worked example: reduce-scatter by "pairwise", 3 ranks, P = 2, averaged. Row d is for rank d, and rank 1 holds the rows
``[[1, 1], [5, 5], [2, 2]]``. It sends row 2 to rank 2 while it receives ``[4, 4]`` from rank 0 into its output, then
row 0 to rank 0 while it receives ``[3, 3]`` from rank 2 into scratch; meanwhile the caller computes. ``finish()`` adds
in ascending rank order, ``([4, 4] + [5, 5]) + [3, 3]``, and divides the 2 elements by 3: the output is ``[4, 4]``. No
rank sends a row to itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ...torch_names import torch_collectives, torch_tensors
from .backends import AllGatherAlgorithm, AllReduceAlgorithm, ReduceScatterAlgorithm
from .division import Division

ToReduce = tuple[Tensor, Tensor | None, Division]
"""Output, input and division of a reduce-scatter; without an input, of an all-reduce in place."""

# The dtypes that every backend knows; others travel as bytes.
SENDABLE = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8}
)


def all_gather(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    process_group: dist.ProcessGroup,
    algorithm: AllGatherAlgorithm,
    async_op: bool,
) -> Works | None:
    """Gather every ``inputs[i]`` into ``outputs[i]``.

    outputs:    (W * P_i,), any dtype, contiguous, rank-major
    inputs:     (P_i,), same dtype; may be this rank's own row of ``outputs[i]``: then nothing is copied
    async_op:   ``not is_stream_ordered(backend)``
    Collective: yes. Neither side may be written, nor ``outputs`` read, until ``finish``.
    """
    world_size = process_group.size()
    if world_size == 1:
        for output, input_ in zip(outputs, inputs, strict=True):
            _copy_unless_same(output, input_)
        return _issued(Works(()), async_op)
    for input_ in inputs:
        if input_.dtype not in SENDABLE:
            outputs = [output.view(torch.uint8) for output in outputs]
            inputs = [each.view(torch.uint8) for each in inputs]
            break
    if algorithm == "stock":
        gather = getattr(dist, torch_collectives.ALL_GATHER)
        if async_op:
            pairs = zip(outputs, inputs, strict=True)
            works = [gather(output, input_, group=process_group, async_op=True) for output, input_ in pairs]
            return Works(works, (outputs, inputs))
        if len(outputs) == 1:
            gather(outputs[0], inputs[0], group=process_group, async_op=False)
        else:
            with torch_collectives.one_launch(process_group, outputs[0].device):
                for output, input_ in zip(outputs, inputs, strict=True):
                    gather(output, input_, group=process_group, async_op=False)
        return None
    rank = process_group.rank()
    works = []
    for output, input_ in zip(outputs, inputs, strict=True):
        rows = output.view(world_size, input_.numel()).unbind()
        works += start_broadcasts([*rows[:rank], input_, *rows[rank + 1 :]], process_group, async_op)
        _copy_unless_same(rows[rank], input_)
    return _issued(Works(works, (outputs, inputs)), async_op)


def reduce_scatter(
    output: Tensor,
    input: Tensor,
    process_group: dist.ProcessGroup,
    division: Division,
    algorithm: ReduceScatterAlgorithm,
    async_op: bool,
) -> Works | None:
    """Reduce the rows of all ranks; rank r keeps row r. All but "stock" and "all_reduce" add in ascending rank order.

    output:     (P,), reduce dtype, contiguous; not a view of ``input``
    input:      (W * P,), same dtype, contiguous, rank-major; scratch: its values are lost
    async_op:   ``not is_stream_ordered(backend)``
    Collective: yes. Neither side may be touched until ``finish``.
    """
    world_size = process_group.size()
    if division.predivide is not None:
        input.div_(division.predivide)
    if world_size == 1:
        _copy_unless_same(output, input)
        if division.postdivide is not None:
            output.div_(division.postdivide)
        return _issued(Works(()), async_op)
    if algorithm == "stock":
        scatter = getattr(dist, torch_collectives.REDUCE_SCATTER)
        work = scatter(output, input, op=division.op, group=process_group, async_op=async_op)
        return _issued(Works([work], (input,), output, division.postdivide), async_op)
    rank = process_group.rank()
    rows = input.view(world_size, output.numel()).unbind()
    if algorithm == "all_reduce":
        work = dist.all_reduce(input, op=division.op, group=process_group, async_op=async_op)
        return _issued(Works([work], (), output, division.postdivide, (rows[rank],)), async_op)
    assert division.op == dist.ReduceOp.SUM, f"{algorithm!r} sums locally, but the reduction is {division}"
    if algorithm == "all_to_all":
        received = torch.empty_like(input)
        work = dist.all_to_all_single(received, input, group=process_group, async_op=async_op)
        received_rows: Sequence[Tensor] = received.view(world_size, output.numel()).unbind()
        return _issued(Works([work], (input,), output, division.postdivide, received_rows), async_op)
    # The lowest row of another rank needs no scratch: the output, where the sum will be, receives it.
    others = [output, *(torch.empty_like(output) for _ in range(world_size - 2))]
    received_rows = [*others[:rank], rows[rank], *others[rank:]]
    works = start_exchange(received_rows, rows, process_group, async_op)
    return _issued(Works(works, (input,), output, division.postdivide, received_rows), async_op)


def all_reduce(
    buffer: Tensor,
    process_group: dist.ProcessGroup,
    division: Division,
    algorithm: AllReduceAlgorithm,
    async_op: bool,
) -> Works | None:
    """Reduce ``buffer`` over all ranks in place, to the same bits on each. "all_gather" adds in ascending rank order.

    buffer:     (N,), reduce dtype, contiguous
    async_op:   ``not is_stream_ordered(backend)``
    Collective: yes. ``buffer`` may not be touched until ``finish``.
    """
    world_size = process_group.size()
    if division.predivide is not None:
        buffer.div_(division.predivide)
    if world_size == 1:
        if division.postdivide is not None:
            buffer.div_(division.postdivide)
        return _issued(Works(()), async_op)
    if algorithm == "stock":
        work = dist.all_reduce(buffer, op=division.op, group=process_group, async_op=async_op)
        return _issued(Works([work], (), buffer, division.postdivide), async_op)
    assert division.op == dist.ReduceOp.SUM, f"{algorithm!r} sums locally, but the reduction is {division}"
    gathered = buffer.new_empty(world_size * buffer.numel())
    work = torch_collectives.all_gather_single(gathered, buffer, process_group, async_op)
    rows = gathered.view(world_size, buffer.numel()).unbind()
    return _issued(Works([work], (), buffer, division.postdivide, rows), async_op)


def reduce_together(buffers: Sequence[ToReduce], process_group: dist.ProcessGroup) -> None:
    """``reduce_scatter`` or ``all_reduce`` of several, any dtypes, in one launch; stream-ordered backends only.

    Collective: yes. When it returns, all work is queued on the current stream.
    """
    for output, input_, division in buffers:
        if division.predivide is not None:
            (output if input_ is None else input_).div_(division.predivide)
    with torch_collectives.one_launch(process_group, buffers[0][0].device):
        for output, input_, division in buffers:
            if input_ is None:
                dist.all_reduce(output, op=division.op, group=process_group)
            else:
                torch_collectives.reduce_scatter_single(output, input_, division.op, process_group, False)
    for output, _, division in buffers:
        if division.postdivide is not None:
            output.div_(division.postdivide)


# --- the parts of these algorithms ------------------------------------------------------------------------------------


def start_broadcasts(
    rows: Sequence[Tensor], process_group: dist.ProcessGroup, async_op: bool
) -> list[dist.Work | None]:
    """All-gather by "broadcast": every rank sends its row to all others, which receive it in place. Collective: yes."""
    return [
        dist.broadcast(row, group=process_group, async_op=async_op, group_src=source) for source, row in enumerate(rows)
    ]


def start_exchange(
    received: Sequence[Tensor], rows: Sequence[Tensor], process_group: dist.ProcessGroup, async_op: bool
) -> list[dist.Work | None]:
    """For "pairwise": ``rows[d]`` goes to rank d, ``received[s]`` comes from rank s, nothing from a rank to itself.

    In round k every rank sends to the k-th rank after it. Collective: yes.
    """
    rank, world_size = process_group.rank(), process_group.size()
    works = []
    for step in range(1, world_size):
        target, source = (rank + step) % world_size, (rank - step) % world_size
        send_numels, receive_numels = [0] * world_size, [0] * world_size
        send_numels[target], receive_numels[source] = rows[target].numel(), received[source].numel()
        works.append(
            dist.all_to_all_single(
                received[source], rows[target], receive_numels, send_numels, group=process_group, async_op=async_op
            )
        )
    return works


def _issued(works: Works, async_op: bool) -> Works | None:
    """``works`` itself; where streams order collectives, its local part is queued after the collective now."""
    if async_op:
        return works
    works.finish()
    return None


def _copy_unless_same(target: Tensor, source: Tensor) -> None:
    if not torch_tensors.is_same_memory(target, source):
        assert target.numel() == source.numel(), f"{target.numel()} elements from {source.numel()}"
        target.copy_(source)


def _sum_rows(rows: Sequence[Tensor], output: Tensor, postdivide: float | None) -> None:
    """output = (rows[0] + rows[1] + ...) / postdivide, in that order. Overwrites rows[0]; ``output`` may be any row."""
    partial, *more = rows
    if more:
        for row in more[:-1]:
            partial.add_(row)
        torch.add(partial, more[-1], out=output)  # written last: it may be any of the rows
    else:
        output.copy_(partial)
    if postdivide is not None:
        output.div_(postdivide)


class Works:
    """A collective under way; after ``works``, ``output`` becomes the sum of ``rows``, if any, and is divided.

    buffers: kept alive until then, as is every other buffer that the collective reads or writes
    """

    def __init__(
        self,
        works: Sequence[dist.Work | None],
        buffers: Sequence[object] = (),
        output: Tensor | None = None,
        postdivide: float | None = None,
        rows: Sequence[Tensor] = (),
    ) -> None:
        self._works = works
        self._buffers = buffers
        self._output = output
        self._postdivide = postdivide
        self._rows = rows
        self._finished = False

    def is_completed(self) -> bool:
        """Whether ``finish`` would return at once. Local: nothing that other ranks see may depend on it."""
        return all(work is None or work.is_completed() for work in self._works)

    def finish(self) -> None:
        """Wait, then run the local part (sum, divide); afterwards the result is valid.

        Call it once, on the thread and stream that use the result. It blocks (with CUDA tensors: makes the current
        stream wait). A second call does nothing. If the wait raises, the result is invalid for good.
        """
        if self._finished:
            return
        self._finished = True
        for work in self._works:
            if work is not None:  # None: stream-ordered
                work.wait()
        if self._output is not None:
            if self._rows:
                _sum_rows(self._rows, self._output, self._postdivide)
            elif self._postdivide is not None:
                self._output.div_(self._postdivide)
        self._works = self._buffers = self._rows = ()
        self._output = None
