"""One reduction under way: reduce-scatter, perhaps all-reduce, then the sharded parameters get their gradients.

Note: buffer lifetime in backward. The reduce input is allocated on compute and read by the reduce stream: it is held
until compute is ordered after the reduce-scatter. The output is allocated on the reduce stream and read by the
all-reduce stream: held to the end of backward. Over one rank the input is the output: held until compute is after its
last use. Gradients copied to the host are held until the reduce stream has waited for the copy, two reductions later.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ...lost_ranks import raise_lost
from ..comm import backends, collective_log, collectives
from ..comm.streams import Event, Stream, Streams
from .handing_out import HandedOut
from .reduce_plan import ReduceJob

Launches = dict[dist.ProcessGroup, list[collectives.ToReduce]]


class Reduction:
    """One reduction under way, in three legs: reduce-scatter, all-reduce, handing out.

    legs:       those of its unit (see ``legs_of``), from the moment when they start
    sum:        the result of a reduce-scatter that is not handed out, in reduce dtype
    handed_out: once the last leg has run
    """

    def __init__(self, job: ReduceJob, buffer: Tensor, before: Reduction | None) -> None:
        """Prepare to reduce ``buffer``.

        buffer: (plan.layout.unsharded_numel,), reduce dtype, as the job's plan lays it out
        before: its ``sum`` is added to this reduce-scatter's result; it has started earlier
        """
        self.job = job
        self._streams = job.plan.group.streams
        self._input: Tensor | None = buffer
        self._before = before
        self._partial: Tensor | None = None
        self._output: Tensor | None = None
        self._pending: collectives.Works | None = None  # of the leg under way
        self._is_scattered = False
        self._scattered: Event = None  # after the reduce-scatter
        self.handed_out: HandedOut | None = None
        self.sum: Tensor | None = None
        self.legs: Generator[None] | None = None

    @property
    def is_in_place(self) -> bool:
        """Whether the output is the input, whose memory belongs to compute, because there is one shard rank."""
        return self.job.plan.num_shards == 1

    @property
    def buffer_nbytes(self) -> int:
        """Bytes of the buffers that it holds."""
        held = {self._input, self._output, self._partial}
        if self.handed_out is not None:
            held |= {*self.handed_out.held, self.handed_out.output}
        nbytes = 0
        for each in held:
            if each is not None:
                nbytes += each.nbytes
        return nbytes

    @property
    def reduced(self) -> tuple[Stream, Event]:
        """The stream of the last leg, and the event after it, which a later reduction's event on that stream covers."""
        if self.handed_out is None:
            return self._streams.reduce, self._scattered
        return self.handed_out.stream, self.handed_out.event

    # --- the legs, on the stream that is current ---

    def scatter(self, together: Launches | None = None) -> None:
        """Issue the reduce-scatter, or add it to ``together``. Collective: yes, over the shard axis."""
        job, buffer = self.job, self._input
        group, plan, comm = job.plan.group, job.plan, job.options.comm
        process_group, several = job.options.process_group or group.mesh.shard_group, plan.num_shards > 1
        assert buffer is not None
        if process_group is None:  # parameters are replicated: the input is the only "shard"
            self._output = buffer
            return
        if collective_log.current is not None and several:
            self._log_issued(collective_log.current, "reduce-scatter", buffer, process_group)
        allocate = torch.empty if comm is None else comm.allocate
        size = (plan.layout.shard_numel,)
        self._output = output = allocate(size, dtype=buffer.dtype, device=buffer.device) if several else buffer
        division = job.divisions.reduce_scatter
        if comm is not None and several:
            if division.predivide is not None:
                buffer.div_(division.predivide)
            work = comm(output_tensor=output, input_tensor=buffer, group=process_group, op=division.op)
            self._pending = collectives.Works([work], (), output, division.postdivide)
            return
        backend = backends.backend_of(process_group, buffer.device.type)
        algorithm = group.options.reduce_scatter or backends.choose_reduce_scatter(
            backend, plan.num_shards, buffer.nbytes, buffer.device.type
        )
        is_ordered = backends.is_stream_ordered(backend)
        if together is not None and is_ordered and algorithm == "stock" and several:
            together.setdefault(process_group, []).append((output, buffer, division))
            return
        self._pending = collectives.reduce_scatter(output, buffer, process_group, division, algorithm, not is_ordered)

    def settle(self) -> None:
        """After the reduce-scatter has been issued, wait for it and add up."""
        log, streams = collective_log.current, self._streams
        self._is_scattered = True
        if log is not None:
            log.waits(self, "reduce-scatter")
        if self._pending is not None:
            self._finish_pending("reduce-scatter")
        if log is not None:
            log.done(self, "reduce-scatter", streams, streams.reduce)
        output = self._output
        assert output is not None
        before, self._before = self._before, None
        if before is not None:
            self._partial, before.sum = before.sum, None
        if self._partial is not None:  # held as long as the input: over one rank it is an earlier input
            output.add_(self._partial)
        if not self.job.hands_out:
            self.sum, self._output = output, None

    def all_reduce(self, process_group: dist.ProcessGroup, together: Launches | None = None) -> None:
        """Issue the all-reduce, or add it to ``together``. Collective: yes, over the replicate axis."""
        job, output = self.job, self._output
        assert output is not None
        instead = job.options.all_reduce_instead
        if instead is not None:
            flags = job.plan.flags_slot
            if flags is None:
                instead(output)
                return
            instead(output[: flags.offset])
            output = output[flags.offset :]
        if collective_log.current is not None and process_group.size() > 1:
            self._log_issued(collective_log.current, "all-reduce", output, process_group)
        backend = backends.backend_of(process_group, output.device.type)
        algorithm = job.plan.group.options.all_reduce or backends.choose_all_reduce(
            backend, process_group.size(), output.nbytes, output.device.type
        )
        division, is_ordered = job.divisions.all_reduce, backends.is_stream_ordered(backend)
        if together is not None and is_ordered and algorithm == "stock" and process_group.size() > 1:
            together.setdefault(process_group, []).append((output, None, division))
            return
        self._pending = collectives.all_reduce(output, process_group, division, algorithm, not is_ordered)

    def hand_out(self, stream: Stream) -> None:
        """Give the sharded parameters their gradients, on ``stream``, on which the last collective was issued."""
        job, log = self.job, collective_log.current
        if log is not None:
            log.waits(self, "all-reduce")
        if self._pending is not None:
            self._finish_pending("all-reduce")
        if log is not None:
            log.done(self, "all-reduce", job.plan.group.streams, stream)
        output, self._output = self._output, None
        assert output is not None
        self.handed_out = handed_out = HandedOut(job, output, stream)
        if output is self._input and job.plan.group.mesh.replicate_group is None:
            self._scattered = handed_out.event

    def _log_issued(
        self, log: collective_log.CollectiveLog, kind: str, buffer: Tensor, process_group: dist.ProcessGroup
    ) -> None:
        log.issued(self, kind, self.job.fqn or "the root", buffer.numel(), buffer.dtype, process_group)

    def _finish_pending(self, kind: str) -> None:
        pending, self._pending = self._pending, None
        try:
            if pending is not None:
                pending.finish()
        except RuntimeError as error:
            raise_lost(error, f"the {kind} of {self.job.fqn or 'the root'}")

    # --- from leg to leg ---

    def poll(self) -> None:
        """On the host, free the reduce input once the reduce-scatter is complete. Local: other ranks notice nothing.

        On a device, events pass at times that differ between ranks and runs: the allocator would give memory out in
        another order on each rank, which breaks symmetric memory. And a graph capture cannot query an event.
        """
        if not self._is_scattered and self._pending is not None:
            if not self._pending.is_completed():
                return
            try:
                self._finish_pending("reduce-scatter")
            except BaseException:
                if self.legs is not None:
                    self.legs.close()  # no leg follows one that failed: its output is no gradient
                raise
        self._input = None

    def advance(self) -> None:
        """Let compute, and the host, wait for the reduce-scatter: after this the reduce input may be freed."""
        if not self._is_scattered and self.legs is not None:
            next(self.legs, None)
        if self._input is not None:
            streams = self._streams
            streams.order(streams.compute, self._scattered)
        self._input = self._partial = None

    def finish(self) -> None:
        """Give the sharded parameters their gradients, but for those of ``late_flags``.

        The caller has ordered compute after ``reduced``.
        """
        legs = self.legs
        if legs is not None and not legs.gi_running:  # type: ignore[attr-defined]  # a hook that they run may call this
            for _ in legs:
                pass
        self._input = self._partial = None
        handed_out = self.handed_out
        if self.job.plan.group.options.offload:
            self._streams.synchronize(self.reduced[1])  # the optimizer runs on the host
        if handed_out is not None:  # inline ``let_go``: that saves a call for each group
            handed_out.held = ()

    def let_go(self) -> None:
        """Drop held memory; its stream is after all legs: the reduce stream, or compute if ``is_in_place``."""
        if self.handed_out is not None:
            self.handed_out.held = ()

    def let_go_of_copies(self) -> None:
        """Order the streams that get the copies' memory after the copies: reduce, and compute if ``is_in_place``."""
        streams = self._streams
        event = self.reduced[1]
        streams.order(streams.reduce, event)
        if self.is_in_place:
            streams.order(streams.compute, event)
        self.let_go()

    def abandon(self) -> None:
        """Wait for the leg under way and forget everything. Raises: LostRankError, when all is forgotten"""
        streams = self._streams
        try:
            self._finish_pending("reduction")
        finally:
            streams.order(streams.compute, self.reduced[1])
            self._input = self._output = self._partial = self._before = self.sum = self.handed_out = self.legs = None


def legs_of(reductions: Sequence[Reduction], streams: Streams, compute: Stream) -> Generator[None]:
    """All legs of a unit's reductions, each one launch for each process group; for ``Streams.run``.

    compute:    the stream whose memory the inputs are
    Collective: yes, over the shard axes, then over the replicate axes.
    """
    several = len(reductions) > 1
    streams.order(streams.reduce, streams.mark(compute))
    with streams.on(streams.reduce):
        scatters: Launches | None = {} if several else None
        for reduction in reductions:
            reduction.scatter(scatters)
        if scatters:
            for process_group, inputs in scatters.items():
                collectives.reduce_together(inputs, process_group)
        yield
        for reduction in reductions:
            reduction.settle()
        scattered = streams.mark(streams.reduce)
        for reduction in reductions:  # before any hook of the user can raise
            reduction._scattered = scattered
        replicated = []
        for reduction in reductions:
            replicate_group = reduction.job.plan.group.mesh.replicate_group
            if reduction.job.hands_out and replicate_group is not None:
                replicated.append((reduction, replicate_group))
            elif reduction.job.hands_out:
                reduction.hand_out(streams.reduce)
    if replicated:
        streams.order(streams.all_reduce, scattered)
        with streams.on(streams.all_reduce):
            all_reduces: Launches | None = {} if several else None
            for reduction, replicate_group in replicated:
                reduction.all_reduce(replicate_group, all_reduces)
            if all_reduces:
                for process_group, outputs in all_reduces.items():
                    collectives.reduce_together(outputs, process_group)
            yield
            for reduction, _ in replicated:
                reduction.hand_out(streams.all_reduce)
