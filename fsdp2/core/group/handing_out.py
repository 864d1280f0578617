"""The last leg of a reduction: the sharded parameters get their gradients, views of the collectives' output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from ...torch_names import torch_dtensors, torch_tensors
from ..comm.streams import Stream
from ..plan.placement import in_dtype
from .reduce_plan import TAG_NUMEL, GradView, ReduceJob, strides_by_offset

GRADIENTS = "_fsdp2_gradients"
"""Attribute of a buffer of gradients: its ``PlacedGradients``."""

PlacedGradients: TypeAlias = tuple[dict[int, tuple[int, ...]], int]
"""The strides of each gradient in a buffer by its offset, in that order; and where the padding after the last one ends.

A plain tuple, because each group makes one in each backward.
"""


class HandedOut:
    """Gradients handed out to the sharded parameters, on ``stream``, and memory that others still read.

    job:           what it was handed out for
    stream, event: after all that was queued here
    held:          memory that belongs to another stream, until that stream is ordered after ``event``
    output:        where gradients lie that ``add_late`` may hand out; None: there are none
    tag:           the sum of the ranks' tags, if ranks compare late
    """

    def __init__(self, job: ReduceJob, output: Tensor, stream: Stream) -> None:
        """Hand out ``output`` on ``stream``. Parameters without a gradient get one only if the options say so."""
        plan, used, options = job.plan, job.used, job.options
        group, streams = plan.group, plan.group.streams
        self.job = job
        self._dtypes = group.gradients.kept if options.grad_dtype is None else None  # if not the parameters' own
        self._late: list[int] = []
        self.held: tuple[Tensor, ...] = ()
        self.output: Tensor | None = None
        self.tag: Tensor | None = None
        self.has_run_hooks = False
        hook = options.all_reduce_hook
        if hook is not None:
            if options.all_reduce_hook_stream is not None:
                streams.order(options.all_reduce_hook_stream, streams.mark(stream))
                stream = options.all_reduce_hook_stream
            with streams.on(stream):
                hook(output if plan.flags_slot is None else output[: plan.flags_slot.offset])  # without flags
        with streams.on(stream):
            views = plan.views
            if not options.reduce_unused and not all(used):
                views = [view for view, is_used in zip(plan.views, used, strict=True) if is_used]
                # Without flags, nothing tells the parameters that only other ranks used.
                if plan.flags_slot is not None:
                    self._late = [index for index, is_used in enumerate(used) if not is_used]
            had_gradient = plan.number is not None and plan.views[0].param.sharded.grad is not None
            if self._dtypes is None:
                reduced = output.to(options.grad_dtype or group.dtype)
                if group.options.offload:
                    reduced = self._offload(reduced, stream)
                self._give(reduced, views)
            else:
                self._give_in_own_dtypes(output, views, stream)
                reduced = output
            if plan.number is not None:
                self._keep_tag(output, reduced, had_gradient, streams.copy_out if group.options.offload else stream)
        # Another stream than the output's own may still read it, and the cast does not keep it alive.
        if stream is not streams.reduce or group.options.offload:
            self.held = (*self.held, output)
        if self._late:
            self.output = reduced
        if group.options.offload:
            stream = streams.copy_out
        self.stream, self.event = stream, streams.mark(stream)

    @property
    def late_flags(self) -> Tensor | None:
        """(n,): which of the plan's parameters some rank had a gradient for, if this rank has none for some of them."""
        slot = self.job.plan.flags_slot
        if self.output is None or slot is None:
            return None
        return self.output[slot.offset : slot.offset + len(self.job.plan.views)]

    def add_late(self, flags: Sequence[float]) -> None:
        """Hand out gradients of parameters that only other ranks used. flags: ``late_flags``, on the host"""
        assert self.output is not None
        views = [self.job.plan.views[index] for index in self._late if flags[index] != 0]
        if self._dtypes is None:
            self._give(self.output, views)
        else:
            self._give_in_own_dtypes(self.output, views, self.job.plan.group.streams.compute)
        self._late = []
        self.output = None

    def _keep_tag(self, output: Tensor, reduced: Tensor, had_gradient: bool, stream: Stream) -> None:
        """Keep the tag: a view if gradients keep ``reduced``, else a copy on ``stream``: the output is freed soon."""
        offset = self.job.plan.tag_offset
        gets_view = not had_gradient and self.job.plan.views[0].param.sharded.grad is not None
        if gets_view and self._dtypes is None and reduced.device.type != "cpu":
            self.tag = reduced.narrow(0, offset, TAG_NUMEL)
        elif not self.job.plan.group.streams.is_capturing():
            self.tag = torch.empty(TAG_NUMEL, dtype=output.dtype, device="cpu", pin_memory=True)
            with self.job.plan.group.streams.on(stream):
                self.tag.copy_(output.narrow(0, offset, TAG_NUMEL), non_blocking=True)

    def _give_in_own_dtypes(self, output: Tensor, views: list[GradView], stream: Stream) -> None:
        """As ``_give``, for a group in which some parameters have a ``grad_dtype``."""
        dtypes = self._dtypes
        assert dtypes is not None
        for dtype in dict.fromkeys(dtypes[view.param] for view in views):
            reduced = output.to(dtype)
            if self.job.plan.group.options.offload:
                reduced = self._offload(reduced, stream)
            self._give(reduced, [view for view in views if dtypes[view.param] is dtype])

    def _offload(self, reduced: Tensor, stream: Stream) -> Tensor:
        """Copy to the host alongside the next reduction; wait only if gradients are read before the end of backward."""
        group = self.job.plan.group
        streams = group.streams
        host = torch.empty(reduced.shape, dtype=reduced.dtype, device="cpu", pin_memory=group.options.pin_memory)
        streams.order(streams.copy_out, streams.mark(stream))
        with streams.on(streams.copy_out):
            host.copy_(reduced, non_blocking=group.options.pin_memory)
        self.held = (*self.held, reduced)
        shown = [view.param.sharded for view in self.job.plan.views]
        reads_soon = self._dtypes is not None and len(self._late) > 0
        if reads_soon or any(each.grad is not None or each._post_accumulate_grad_hooks for each in shown):
            streams.synchronize(streams.mark(streams.copy_out))  # it is added to, or a hook reads it, right away
        return host

    def _give(self, reduced: Tensor, views: list[GradView]) -> None:
        """Give the sharded parameters of ``views`` their gradients, views of ``reduced``."""
        give(reduced, views, self.job.plan.group.dtype, self._before_hooks, keeps_grad_dtype=self._dtypes is not None)
        plan, options = self.job.plan, self.job.options
        is_ours = options.comm is None and options.all_reduce_hook is None and options.all_reduce_instead is None
        # Only then nothing but zeros lies between the gradients.
        if is_ours and self._dtypes is None and plan.flags_slot is not None:
            strides = plan.strides_by_offset if views is plan.views else strides_by_offset(views)
            _note_gradients(reduced, strides, plan.flags_slot.offset)

    def _before_hooks(self) -> None:
        self.has_run_hooks = True
        self.job.close_lease()  # a hook may write the shard: close its lease


def give(
    reduced: Tensor,
    views: Sequence[GradView],
    usual: torch.dtype,
    before_hooks: Callable[[], object],
    keeps_grad_dtype: bool = False,
) -> None:
    """Give the sharded parameters of ``views`` their gradients, views of ``reduced``, and run their hooks.

    usual:            the parameters' dtype
    before_hooks:     is called before the hooks of each parameter that has some
    keeps_grad_dtype: each parameter's ``grad_dtype`` already allows the dtype of ``reduced``
    """
    is_usual = reduced.dtype is usual
    start = reduced.storage_offset()
    with torch_tensors.without_torch_function():
        for view in views:
            param = view.param
            sharded = param.sharded
            grad = reduced.as_strided(view.shape, view.strides, start + view.offset)
            before = sharded.grad
            if before is None:
                spec = param.spec.sharded
                if not is_usual and not keeps_grad_dtype:
                    torch_tensors.allow_any_grad_dtype(sharded)
                sharded.grad = torch_dtensors.new_dtensor(grad, spec if is_usual else in_dtype(spec, grad.dtype))
            else:
                torch_dtensors.local_tensor(before).add_(grad)  # type: ignore[arg-type]
            if sharded._post_accumulate_grad_hooks:
                before_hooks()
                with torch_tensors.with_torch_function(), torch.enable_grad():
                    for hook in tuple(sharded._post_accumulate_grad_hooks.values()):
                        hook(sharded)


def _note_gradients(buffer: Tensor, strides: dict[int, tuple[int, ...]], stop: int) -> None:
    """Add to earlier notes that ``buffer[:stop]`` is zero between the gradients at the keys of ``strides``."""
    before: PlacedGradients | None = vars(buffer).get(GRADIENTS)
    if before is not None:
        strides = dict(sorted((before[0] | strides).items()))
    setattr(buffer, GRADIENTS, (strides, stop))
