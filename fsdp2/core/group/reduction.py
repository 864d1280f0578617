"""One reduction under way: reduce-scatter, perhaps all-reduce, then the sharded parameters get their gradients.

Note: buffer lifetime in backward. The reduce input is allocated on compute and read by the reduce stream, so it is held until compute
has been ordered after the reduce-scatter. The output is allocated on the reduce stream; the all-reduce stream reads it, so it is
held to the end of backward. Over one rank the input is the output: it is held until compute is after its last use. Gradients that
are copied to the host are held until the reduce stream is after the copy, which it waits for two reductions later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import torch_compat as compat
from ..comm import backends, collective_log, collectives
from ..comm.communicators import comm_reduce_scatter
from ..comm.division import Division, Divisions
from ..comm.lost_ranks import raise_lost
from ..comm.streams import Event, Stream, Streams
from ..plan.placement import in_dtype
from .flat_gradients import note_gradients
from .memory import GroupMemory
from .options import ReductionOptions
from .order_tags import TAG_NUMEL
from .reduce_plan import GradView, ReducePlan, strides_by_offset

ScatterLaunches = dict[dist.ProcessGroup, list[tuple[Tensor, Tensor, Division]]]
AllReduceLaunches = dict[dist.ProcessGroup, list[tuple[Tensor, Division]]]


class Reduction:
    """One reduction under way: reduce-scatter, perhaps all-reduce, then the sharded parameters get their gradients.

    It has three legs: reduce-scatter, all-reduce, handing out. On a stream device ``launch`` queues all of them at once. On the host
    the constructor issues the first, and ``advance`` and ``finish`` wait for each. Of its attributes half are its arguments; the others
    are the buffers, handles and events of its legs.

    copies_out: its gradients go to the host, on a stream of their own
    """

    __slots__ = (
        "_add_to_partial",
        "_advanced",
        "_all_reduce",
        "_divisions",
        "_dtypes",
        "_group",
        "_held",
        "_input",
        "_late",
        "_options",
        "_output",
        "_partial",
        "_pending",
        "_plan",
        "_reduced",
        "_reduced_on",
        "_scattered",
        "_tag",
        "_used",
        "copies_out",
        "has_run_hooks",
    )

    def __init__(
        self,
        group: GroupMemory,
        plan: ReducePlan,
        used: list[bool],
        buffer: Tensor,
        divisions: Divisions,
        options: ReductionOptions,
        partial: Tensor | None,
        add_to_partial: Callable[[Tensor], None] | None,
    ) -> None:
        """Prepare to reduce ``buffer``; on the host, start. Collective: on the host, over the shard axis; the other legs follow later.

        buffer:  (plan.layout.unsharded_numel,), reduce dtype, as ``plan`` lays it out
        used:    which of the plan's parameters have a gradient in it
        divisions: what each leg divides by, and where
        partial: the result of earlier reduce-scatters, which takes the remaining legs with this one
        add_to_partial: takes the result of the reduce-scatter; None: it goes on to the remaining legs
        """
        self._group = group
        self._plan = plan
        self._used = used
        self._divisions = divisions
        self._options = options
        self._input: Tensor | None = buffer
        self._output: Tensor | None = None
        self._held: tuple[Tensor, ...] = ()
        self._pending: collectives.Pending | None = None
        self._all_reduce: collectives.Pending | None = None
        self._add_to_partial = add_to_partial
        self._partial = partial
        self._scattered: Any = None  # after the reduce-scatter
        self._reduced: Event = None  # after all legs
        self._reduced_on: Stream = None
        self._late: list[int] = []
        self._dtypes = group.plan.gradients.kept if options.grad_dtype is None else None  # of the gradients, if not the parameters'
        self._advanced = False
        self.has_run_hooks = False
        self.copies_out = group.options.offload and not group.streams.host_waits
        self._tag: Tensor | None = None
        if group.streams.host_waits:
            self.scatter()

    @property
    def reduced(self) -> tuple[Stream, Event]:
        """The event after all legs, and its stream: the last such event of a stream is after all others of that stream."""
        return self._reduced_on, self._reduced

    # --- the legs, on the stream that is current ---

    @property
    def is_in_place(self) -> bool:
        """Whether the output is the input, whose memory is compute's: so it is over one rank."""
        return self._plan.num_shards == 1

    @property
    def replicate_group(self) -> dist.ProcessGroup | None:
        return self._group.mesh.replicate_group

    def mark_scattered(self, event: Event) -> None:
        """``event``: after the reduce-scatter, and after all legs if the gradients stay here."""
        self._scattered = self._reduced = event
        self._reduced_on = self._group.streams.reduce

    def scatter(self, together: ScatterLaunches | None = None) -> None:
        """Issue the reduce-scatter, or add it to ``together``. Collective: yes, over the shard axis."""
        group, plan, buffer = self._group, self._plan, self._input
        process_group = self._options.process_group or group.mesh.shard_group
        assert buffer is not None
        if process_group is None:  # parameters are replicated: the input is the only "shard"
            self._output = buffer
            return
        if collective_log.current is not None and plan.num_shards > 1:
            self._log_issued(collective_log.current, "reduce-scatter", buffer, process_group)
        comm = self._options.comm
        if comm is not None and plan.num_shards > 1:
            self._output = comm.allocate((plan.layout.shard_numel,), dtype=buffer.dtype, device=buffer.device)
            self._pending = comm_reduce_scatter(comm, self._output, buffer, process_group, self._divisions.reduce_scatter)
            return
        if self.is_in_place:
            self._output = output = buffer
        else:
            self._output = output = torch.empty(plan.layout.shard_numel, dtype=buffer.dtype, device=buffer.device)
        backend = backends.backend_of(process_group, buffer.device.type)
        algorithm = group.options.reduce_scatter or backends.choose_reduce_scatter(
            backend, plan.num_shards, buffer.nbytes, buffer.device.type
        )
        division, is_ordered = self._divisions.reduce_scatter, backends.is_stream_ordered(backend)
        if together is not None and is_ordered and algorithm == "stock" and plan.num_shards > 1:
            together.setdefault(process_group, []).append((output, buffer, division))
            return
        self._pending = collectives.reduce_scatter(output, buffer, process_group, division, algorithm, not is_ordered)

    def settle(self) -> bool:
        """After the reduce-scatter has been issued, wait for it and add up. Returns whether the gradients take the remaining legs."""
        log = collective_log.current
        if log is not None:
            log.waits(self, "reduce-scatter")
        if self._pending is not None:
            self._finish_pending()
        if log is not None:
            log.done(self, "reduce-scatter", self._group.streams, self._group.streams.reduce)
        output = self._output
        assert output is not None
        if self._add_to_partial is not None:
            self._add_to_partial(output)
            self._output = None
            return False
        if self._partial is not None:  # held as long as the input: over one rank it is an earlier input
            output.add_(self._partial)
        return True

    def all_reduce(self, process_group: dist.ProcessGroup, together: AllReduceLaunches | None = None) -> None:
        """Issue the all-reduce, or add it to ``together``. Collective: yes, over the replicate axis."""
        group, output = self._group, self._output
        assert output is not None
        instead = self._options.all_reduce_instead
        if instead is not None:
            flags = self._plan.flags_slot
            if flags is None:
                instead(output)
                return
            instead(output[: flags.offset])
            output = output[flags.offset :]
        if collective_log.current is not None and process_group.size() > 1:
            self._log_issued(collective_log.current, "all-reduce", output, process_group)
        backend = backends.backend_of(process_group, output.device.type)
        algorithm = group.options.all_reduce or backends.choose_all_reduce(
            backend, process_group.size(), output.nbytes, output.device.type
        )
        division, is_ordered = self._divisions.all_reduce, backends.is_stream_ordered(backend)
        if together is not None and is_ordered and algorithm == "stock" and process_group.size() > 1:
            together.setdefault(process_group, []).append((output, division))
            return
        self._all_reduce = collectives.all_reduce(output, process_group, division, algorithm, not is_ordered)

    def _log_issued(self, log: collective_log.CollectiveLog, kind: str, buffer: Tensor, process_group: dist.ProcessGroup) -> None:
        log.issued(self, kind, self._group.fqn or "the root", buffer.numel(), buffer.dtype, process_group)

    def poll(self) -> None:
        """On the host, free the reduce input if the reduce-scatter is complete. Local: nothing that other ranks see depends on it.

        On a device, events pass at times that differ between ranks and runs: the allocator would then give memory out in another order
        on each rank, which breaks symmetric memory. And a graph capture does not allow to query an event.
        """
        if not self._group.streams.host_waits:
            return
        if self._pending is None:
            self._input = None
        elif self._pending.is_completed():
            self._finish_pending()
            self._input = None

    def _finish_pending(self) -> None:
        if self._pending is not None:
            try:
                self._pending.finish()
            except RuntimeError as error:
                raise_lost(error, f"the reduce-scatter of {self._group.fqn or 'the root'}")
            self._pending = None

    def advance(self) -> None:
        """Wait for the reduce-scatter, or order compute after it: after this the reduce input may be freed."""
        if self._advanced:
            return
        self._advanced = True
        streams = self._group.streams
        if streams.host_waits:
            goes_on = self.settle()
            self._input = self._partial = None
            process_group = self._group.mesh.replicate_group
            if goes_on and process_group is not None:
                self.all_reduce(process_group)
            if goes_on and self._all_reduce is None:
                self.hand_out(None)
        else:
            streams.order(streams.compute, self._scattered)
            self._input = self._partial = None

    def finish(self) -> None:
        """Give the sharded parameters their gradients, but for those of ``late_flags``.

        On a stream device, the caller has ordered compute after ``reduced``.
        """
        streams = self._group.streams
        if streams.host_waits:
            self.advance()
            if self._all_reduce is not None:
                self.hand_out(None)
        self._input = self._partial = None
        if self._group.options.offload:
            streams.synchronize(self._reduced)  # the optimizer runs on the host
        if self._plan.flags_slot is None:  # its collective has no flags, so it does not know the parameters that only other ranks used
            self._late = []
        self._held = ()  # inline ``let_go``: that saves a call for each group
        if not self._late:
            self._output = None

    @property
    def group(self) -> GroupMemory:
        return self._group

    @property
    def buffer_nbytes(self) -> int:
        """Bytes of the buffers that it holds."""
        nbytes = 0
        for each in {self._input, self._output, self._partial, *self._held}:
            if each is not None:
                nbytes += each.nbytes
        return nbytes

    @property
    def number(self) -> int:
        """The number of its group."""
        return self._plan.number or 0

    def take_tag(self) -> Tensor | None:
        """(n,): the sum of the ranks' tags, if ranks compare late; on the device, or on its way to the host. A second call: None."""
        tag, self._tag = self._tag, None
        return tag

    @property
    def late_flags(self) -> Tensor | None:
        """(n,): which of the plan's parameters some rank had a gradient for, if this rank has none for some of them."""
        slot = self._plan.flags_slot
        if not self._late or self._output is None or slot is None:
            return None
        return self._output[slot.offset : slot.offset + len(self._plan.views)]

    def hand_out_late(self, flags: Sequence[float]) -> None:
        """Hand out gradients of parameters that only other ranks used. flags: ``late_flags``, on the host"""
        assert self._output is not None
        views = [self._plan.views[index] for index in self._late if flags[index] != 0]
        if self._dtypes is None:
            self._give(self._output, views)
        else:
            self._give_in_own_dtypes(self._output, views, self._group.streams.compute)
        self._late = []
        self._output = None

    def let_go(self) -> None:
        """Drop held memory, whose stream is ordered after all legs: the reduce stream, or compute if ``is_in_place``."""
        self._held = ()
        if not self._late:
            self._output = None

    def let_go_of_copies(self) -> None:
        """Order the streams to which the memory of the copies returns after them: the reduce stream, and compute if ``is_in_place``."""
        streams = self._group.streams
        streams.order(streams.reduce, self._reduced)
        if self.is_in_place:
            streams.order(streams.compute, self._reduced)
        self.let_go()

    def abandon(self) -> None:
        """Wait for the legs under way and forget them. Raises: LostRankError, when they are forgotten"""
        streams = self._group.streams
        pending = self._pending or self._all_reduce
        try:
            if pending is not None:
                pending.finish()
        except RuntimeError as error:
            raise_lost(error, f"the reduction of {self._group.fqn or 'the root'}")
        finally:
            streams.order(streams.compute, self._reduced)
            self._pending = self._all_reduce = self._input = self._output = self._partial = self._tag = None
            self._held = ()

    def hand_out(self, stream: Any) -> None:
        """Give the sharded parameters their gradients, on ``stream``, on which the last collective was issued."""
        group, plan, options = self._group, self._plan, self._options
        streams = group.streams
        log = collective_log.current
        if log is not None:
            log.waits(self, "all-reduce")
        if self._all_reduce is not None:
            try:
                self._all_reduce.finish()
            except RuntimeError as error:
                raise_lost(error, f"the all-reduce of {self._group.fqn or 'the root'}")
            self._all_reduce = None
        if log is not None:
            log.done(self, "all-reduce", streams, stream)
        output = self._output
        assert output is not None
        hook = options.all_reduce_hook
        if hook is not None:
            if options.all_reduce_hook_stream is not None:
                streams.order(options.all_reduce_hook_stream, streams.mark(stream))
                stream = options.all_reduce_hook_stream
            with streams.on(stream):
                hook(output if plan.flags_slot is None else output[: plan.flags_slot.offset])  # the part with the gradients
        with streams.on(stream):
            if not all(self._used) and not options.reduce_unused:
                self._late = [index for index, used in enumerate(self._used) if not used]
            late = set(self._late)
            views = [view for index, view in enumerate(plan.views) if index not in late] if late else plan.views
            had_gradient = plan.number is not None and plan.views[0].param.sharded.grad is not None
            if self._dtypes is None:
                reduced = self._cast(output, options.grad_dtype or group.plan.dtype, stream)
                self._give(reduced, views)
            else:
                self._give_in_own_dtypes(output, views, stream)
                reduced = output
            if plan.number is not None:
                self._keep_tag(output, reduced, had_gradient, streams.copy_out if self.copies_out else stream)
        if self.copies_out:
            stream = streams.copy_out
        self._reduced, self._reduced_on = streams.mark(stream), stream
        if output is self._input and group.mesh.replicate_group is None:
            self._scattered = self._reduced
        if stream is not streams.reduce:  # this stream may still read the output, which is not its own; the cast does not keep it alive
            self._held = (*self._held, output)
        # Without an all-reduce, only the gradients' own views need the output from here on.
        self._output = reduced if self._late or group.mesh.replicate_group is not None else None

    def _keep_tag(self, output: Tensor, reduced: Tensor, had_gradient: bool, stream: Stream) -> None:
        """Keep the tag: as a view where gradients hold ``reduced`` anyway, else as a copy on ``stream``: the output is freed soon."""
        offset = self._plan.tag_offset
        gets_view = not had_gradient and self._plan.views[0].param.sharded.grad is not None
        if gets_view and self._dtypes is None and reduced.device.type != "cpu":
            self._tag = reduced.narrow(0, offset, TAG_NUMEL)
        elif not self._group.streams.is_capturing():
            self._tag = torch.empty(TAG_NUMEL, dtype=output.dtype, device="cpu", pin_memory=True)
            with self._group.streams.on(stream):
                self._tag.copy_(output.narrow(0, offset, TAG_NUMEL), non_blocking=True)

    def _cast(self, output: Tensor, dtype: torch.dtype, stream: Any) -> Tensor:
        reduced = output.to(dtype)
        return self._offload(reduced, stream) if self._group.options.offload else reduced

    def _give_in_own_dtypes(self, output: Tensor, views: list[GradView], stream: Any) -> None:
        """As ``_give``, for a group in which some parameters have a ``grad_dtype``."""
        dtypes = self._dtypes
        assert dtypes is not None
        for dtype in dict.fromkeys(dtypes[view.param] for view in views):
            self._give(self._cast(output, dtype, stream), [view for view in views if dtypes[view.param] is dtype])

    def _offload(self, reduced: Tensor, stream: Any) -> Tensor:
        """Copy to the host, alongside the next reduction, and without waiting if the gradient is first read at the end of backward."""
        group = self._group
        streams = group.streams
        host = torch.empty(reduced.shape, dtype=reduced.dtype, device="cpu", pin_memory=group.options.pin_memory)
        streams.order(streams.copy_out, streams.mark(stream))
        with streams.on(streams.copy_out):
            host.copy_(reduced, non_blocking=group.options.pin_memory)
        if self.copies_out:
            self._held = (*self._held, reduced)
        reads_soon = self._dtypes is not None and len(self._late) > 0
        if reads_soon or any(v.param.sharded.grad is not None or v.param.sharded._post_accumulate_grad_hooks for v in self._plan.views):
            streams.synchronize(streams.mark(streams.copy_out))  # it is added to, or a hook reads it, right away
        return host

    def _give(self, reduced: Tensor, views: list[GradView]) -> None:
        """Give the sharded parameters of ``views`` their gradients, views of ``reduced``."""
        is_usual = reduced.dtype is self._group.plan.dtype
        for view in views:
            param = view.param
            sharded = param.sharded
            grad = reduced.as_strided(view.shape, view.strides, view.offset)
            before = sharded.grad
            if before is None:
                spec = param.spec.sharded
                if not is_usual and self._dtypes is None:
                    compat.allow_any_grad_dtype(sharded)
                sharded.grad = compat.new_dtensor(grad, spec if is_usual else in_dtype(spec, grad.dtype))
            else:
                compat.local_tensor(before).add_(grad)  # type: ignore[arg-type]
            if sharded._post_accumulate_grad_hooks:
                self.has_run_hooks = True
                self._run_hooks(sharded)
        if self._has_zeros_between():
            plan = self._plan
            assert plan.flags_slot is not None
            strides = plan.strides_by_offset if views is plan.views else strides_by_offset(views)
            note_gradients(reduced, strides, plan.flags_slot.offset)

    def _has_zeros_between(self) -> bool:
        """Whether only gradients were written into the output: no user's hook or communicator, and no gradients of another dtype."""
        options = self._options
        is_ours = options.comm is None and options.all_reduce_hook is None and options.all_reduce_instead is None
        return is_ours and self._dtypes is None and self._plan.flags_slot is not None

    def _run_hooks(self, sharded: nn.Parameter) -> None:
        self._group.wait()  # a hook may write the shard: close its lease
        with torch.enable_grad():
            for hook in tuple(sharded._post_accumulate_grad_hooks.values()):
                hook(sharded)


def launch(reductions: Sequence[Reduction], streams: Streams) -> Stream:
    """On a stream device, queue all legs of a unit's reductions; each leg is one launch for each process group.

    Collective: yes, over the shard axes, then over the replicate axes.
    Returns:    compute, whose memory the inputs are
    """
    several = len(reductions) > 1
    compute = streams.compute
    streams.order(streams.reduce, streams.mark(compute))
    with streams.on(streams.reduce):
        scatters: ScatterLaunches | None = {} if several else None
        for reduction in reductions:
            reduction.scatter(scatters)
        if scatters:
            for process_group, inputs in scatters.items():
                collectives.reduce_scatter_together(inputs, process_group)
        left = [reduction for reduction in reductions if reduction.settle()]
        scattered = streams.mark(streams.reduce)
        for reduction in reductions:
            reduction.mark_scattered(scattered)
        replicated = []
        for reduction in left:
            if reduction.replicate_group is None:
                reduction.hand_out(streams.reduce)
            else:
                replicated.append((reduction, reduction.replicate_group))
    if replicated:
        streams.order(streams.all_reduce, scattered)
        with streams.on(streams.all_reduce):
            all_reduces: AllReduceLaunches | None = {} if several else None
            for reduction, replicate_group in replicated:
                reduction.all_reduce(replicate_group, all_reduces)
            if all_reduces:
                for process_group, outputs in all_reduces.items():
                    collectives.all_reduce_together(outputs, process_group)
            for reduction, _ in replicated:
                reduction.hand_out(streams.all_reduce)
    return compute
