"""The reduce-scatter of a group's gradients as a plan: what lies where in its input and output, computed once.

The input has room for every trainable parameter of the group, in rank-major order, zeros where this rank has no
gradient: its size does not depend on the gradients that arrived. After the gradients each rank adds one *flag* per
parameter, 1 if it has a gradient. The sum of flags tells every rank, without another collective, which parameters were
used anywhere: one unused everywhere keeps ``grad = None``, as in the unsharded model. The group's tag (``tag_of``) may
follow, which shows each rank afterwards whether all reduced the same group (``iteration/late_comparison.py``).

Worked example, 2 ranks, parameters a (4,) and b (3,), align 32; b is unused on rank 1, which therefore sends

    row of rank 0: [a0 a1, 30 gap][0 0, 30 gap][1 0, 30 gap]   row of rank 1: [a2 a3, 30 gap][0 0, 30 gap][1 0, 30 gap]
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...errors import ParameterError
from ...torch_names import torch_dtensors, torch_tensors
from ..comm.division import Divisions
from ..plan.layout import Cut, group_layout
from ..plan.model_axes import local_gradient, varying_axes
from ..plan.placement import ShardSpec, in_dtype
from .group_plan import GroupPlan
from .options import ReductionOptions
from .param import ShardedParam
from .rank_pieces import disassemble

CAST_BEHIND_NBYTES = 256 << 10
"""On the CPU ``chunk_cat`` casts each piece by itself: up to this size, one cast of the whole buffer costs less."""

NUM_DIGITS = 10
"""Enough for 1024 groups over the same ranks; beyond, groups whose numbers differ by a multiple of 1024 share a tag.
A usual block's flags and a tag fit into the 32 elements that are free after fp32 gradients anyway."""

TAG_NUMEL = 2 * NUM_DIGITS


def tag_of(number: int) -> list[int]:
    """The digits of a group's number, in binary, then their complements: (TAG_NUMEL,) zeros and ones."""
    digits = [number >> place & 1 for place in reversed(range(NUM_DIGITS))]
    return [*digits, *(1 - digit for digit in digits)]


class ReducePlan:
    """The reduce-scatter of one set of trainable parameters, computed once.

    group:   the group's plan
    compact: without gaps and flags, as a custom communicator sees it
    number:  of the group, if its tag travels after the flags; -1: not known yet: the tag is zero, which tells nothing
    """

    def __init__(self, group: GroupPlan, params: list[ShardedParam], compact: bool, number: int | None = None) -> None:
        self.group = group
        self.params = params
        self.number = number
        tag_numel = 0 if number is None else TAG_NUMEL
        self.has_dtensors = any(param.spec.unsharded is not None for param in self.params)
        self.num_shards = group.mesh.shard_size
        cuts = [param.spec.cut for param in self.params]
        flags = Cut((self.num_shards * (len(cuts) + tag_numel),), 0, self.num_shards)
        self.layout = group_layout(
            cuts if compact else [*cuts, flags], num_shards=self.num_shards, align=1 if compact else group.align
        )
        self.flags_slot = None if compact else self.layout.slots[-1]
        # Gradients added up in another dtype are not cast back; None: they are.
        self._added_up_in = group.gradients.added_up_in if group.options.semantics == "2.15" else None
        self.input_numel = self.layout.unsharded_numel
        # The input of chunk_cat: room for each gradient and for the flags, and zeros for the gap after each.
        self._pieces: list[Tensor | None] = []
        self._piece_of_slot: list[int] = []
        for slot in self.layout.slots:
            self._piece_of_slot.append(len(self._pieces))
            if slot.numel > 0:
                self._pieces.append(None)
            if slot.gap > 0:
                self._pieces.append(
                    torch.zeros(self.num_shards, slot.gap, dtype=self.group.param_dtype, device=group.device)
                )
        self._all_used = torch.ones(
            self.num_shards, len(cuts) + tag_numel, dtype=self.group.param_dtype, device=group.device
        )
        if number is not None:
            self._all_used[:, len(cuts) :] = 0
            self.set_number(number)
        # For each parameter: index among the pieces (None: no elements), and how to arrange its gradient (None: as is).
        self._arrange = [
            (
                piece_index if cut.slot_numel > 0 else None,
                None if param.spec.order is None and cut.dim == 0 else param.spec,
            )
            for param, cut, piece_index in zip(self.params, cuts, self._piece_of_slot, strict=False)
        ]
        # An empty slot begins where another does. Its gradient lies after all others instead: no two have one offset.
        end = self.layout.shard_numel if self.flags_slot is None else self.flags_slot.offset
        self.views = [
            GradView(param, slot.offset if slot.numel > 0 else end)
            for param, slot in zip(self.params, self.layout.slots, strict=False)
        ]

    def set_number(self, number: int) -> None:
        """Let the tag be that of the group's number, if the plan has a tag."""
        if self.number is None or number < 0:
            return
        self.number = number
        # One by one: to copy a list of digits to the device, the host would wait.
        for index, digit in enumerate(tag_of(number)):
            if digit == 1:
                self._all_used[:, len(self.params) + index] = 1

    @property
    def tag_offset(self) -> int:
        """The offset of the tag in a row."""
        assert self.flags_slot is not None
        return self.flags_slot.offset + len(self.views)

    @functools.cached_property
    def strides_by_offset(self) -> dict[int, tuple[int, ...]]:
        """The strides of the gradients in an output, by offset."""
        return strides_by_offset(self.views)

    def to_local(self, grads: list[Tensor | None], varying: set[str], always_once: bool) -> None:
        """Replace gradients of DTensors by their local tensors. Collective: yes, over model axes.

        varying, always_once: see Note: gradients on a full SPMD mesh
        """
        for grad in grads:
            if grad is not None:
                varying.update(varying_axes(grad))
        for index, (grad, param) in enumerate(zip(grads, self.params, strict=True)):
            model = param.spec.unsharded
            if grad is None or model is None:
                continue
            names = model.mesh.mesh_dim_names or ()
            if param.spec.annotations is not None:
                grad = torch_dtensors.new_dtensor(
                    grad, replace(in_dtype(model, grad.dtype), placements=param.spec.annotations.gradient)
                )
            once = frozenset(axis for axis in param.spec.data_axes if always_once or names[axis] in varying)
            dtype = None if self._added_up_in is None else self._added_up_in(param)
            grads[index] = local_gradient(param.fqn, grad, model, param.spec.data_axes, once, dtype)

    def copy_in(self, grads: list[Tensor | None], out: Tensor) -> None:
        """Lay ``grads`` (logical, full shapes) and their flags into ``out`` (num_shards * n,), in its dtype."""
        pieces = self._pieces.copy()
        missing = []
        others: set[torch.dtype] = set()
        for index, (piece_index, spec) in enumerate(self._arrange):
            grad = grads[index]
            if grad is None:
                missing.append(index)
                numel = self.layout.slots[index].numel
                piece = torch.zeros(self.num_shards, numel, dtype=self.group.param_dtype, device=out.device)
            else:
                piece = grad if spec is None else _rank_major(grad, spec)
                if piece.dtype is not self.group.param_dtype:
                    if self._added_up_in is not None:
                        others.add(piece.dtype)
                    else:
                        piece = piece.to(self.group.param_dtype)
            if piece_index is not None:
                pieces[piece_index] = piece
        if self.flags_slot is not None:
            flags = self._all_used
            if missing:
                flags = flags.clone()
                for index in missing:  # one by one, as above
                    flags[:, index] = 0
            pieces[self._piece_of_slot[-1]] = flags
        dtype = self.group.param_dtype
        if others:
            dtype = functools.reduce(torch.promote_types, others, self.group.param_dtype)
            pieces = [None if piece is None else piece.to(dtype) for piece in pieces]
        try:
            if out.dtype is not dtype and out.device.type == "cpu" and out.nbytes <= CAST_BEHIND_NBYTES:
                laid = torch.empty(out.shape, dtype=dtype, device=out.device)
                torch_tensors.chunk_cat(pieces, self.num_shards, laid.view(self.num_shards, -1))  # type: ignore[arg-type]
                out.copy_(laid)
            else:
                torch_tensors.chunk_cat(pieces, self.num_shards, out.view(self.num_shards, -1))  # type: ignore[arg-type]
        except RuntimeError:
            self._refuse_sparse(grads)
            raise

    def moved(self, buffer: Tensor, before: ReducePlan, num_rows: int) -> Tensor:
        """Lay ``buffer`` (num_rows * n,) of the plan ``before`` out by this plan, with zeros for new parameters.

        before: it has flags, and no parameter that this plan lacks
        """
        old = buffer.view(num_rows, -1)
        new = torch.zeros(num_rows, self.layout.shard_numel, dtype=buffer.dtype, device=buffer.device)
        assert self.flags_slot is not None
        assert before.flags_slot is not None
        for index, (param, source) in enumerate(zip(before.params, before.layout.slots, strict=False)):
            index_here = self.params.index(param)
            target = self.layout.slots[index_here]
            new.narrow(1, target.offset, target.numel).copy_(old.narrow(1, source.offset, source.numel))
            new.select(1, self.flags_slot.offset + index_here).copy_(old.select(1, before.flags_slot.offset + index))
        if self.number is not None:
            new.narrow(1, self.tag_offset, TAG_NUMEL).copy_(old.narrow(1, before.tag_offset, TAG_NUMEL))
        return new.view(-1)

    def _refuse_sparse(self, grads: list[Tensor | None]) -> None:
        """Raise ParameterError if sparse gradients made ``chunk_cat`` fail: a check before costs every backward."""
        sparse = [
            f"{param.fqn} {grad.layout}"
            for param, grad in zip(self.params, grads, strict=True)
            if grad is not None and grad.layout is not torch.strided
        ]
        if sparse:
            raise ParameterError(
                f"{len(sparse)} parameters have sparse gradients",
                items=sparse,
                expected="dense gradients, which are reduced together",
                fix="build nn.Embedding and nn.EmbeddingBag with sparse=False, "
                "or pass their parameters in ignored_params",
            )


def _rank_major(grad: Tensor, spec: ShardSpec) -> Tensor:
    """A logical gradient as a tensor whose dim 0 is cut over the ranks."""
    physical = spec.to_physical(grad)
    return physical if spec.cut.dim == 0 else disassemble(physical, spec.cut)


def strides_by_offset(views: Sequence[GradView]) -> dict[int, tuple[int, ...]]:
    """Strides by offset of the gradients that can have elements, on this rank or another."""
    return {view.offset: view.strides for view in views if view.param.spec.cut.slot_numel > 0}


class GradView:
    """Where the gradient of one sharded parameter lies in a reduce-scatter output."""

    def __init__(self, param: ShardedParam, offset: int) -> None:
        self.param = param
        self.offset = offset
        physical = torch.empty(param.spec.cut.shard_shape(param.rank), device="meta")
        logical = param.spec.to_logical(physical)
        self.shape, self.strides = logical.shape, logical.stride()


@dataclass(frozen=True, slots=True)
class ReduceJob:
    """What one reduction does, fixed when it starts: later legs may run after the user has changed the group's options.

    fqn:         of the group
    used:        which of the plan's parameters this rank has a gradient for
    divisions:   what each leg divides by, and where
    hands_out:   all legs follow the reduce-scatter; False: its result stays in ``Reduction.sum``
    close_lease: lets the user write the shards, if a gather reads them
    """

    plan: ReducePlan
    fqn: str
    used: list[bool]
    divisions: Divisions
    options: ReductionOptions
    hands_out: bool
    close_lease: Callable[[], None]
