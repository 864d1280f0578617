"""Which parameters an optimizer sees as one tensor: *runs*, neighbors in one flat shard that one group of hyperparameters has.

Between two parameters of a run may lie padding, which holds zeros, gets zeros for gradients, and concerns nobody. A parameter that lies
in no flat shard (a plain one, one with an all-gather extension) is a run by itself.

For an optimizer that quantizes blocks of its tensors, slots start at multiples of a block, a run ends with its last block, and
parameters that are too small to be quantized lie in runs that are too small as well.

Worked example, a block with weights that decay and biases that do not, slots in the order of the flat shard

    flat shard      [w1 | w2 | b1 . | b2 .]
    runs            [w1 | w2]   [b1 . | b2]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..clip import complete_locals
from ..core.group.param import ShardedParam, shard_view
from ..core.group.param_group import ParamGroup
from ..core.plan.layout import Slot, round_up
from ..core.plan.placement import in_dtype
from ..torch_names import torch_dtensors, torch_tensors
from .block_states import QUANTIZED_FROM_NUMEL
from .torch_names import first_byte_of


@dataclass(frozen=True)
class Piece:
    """One parameter's place in a run.

    param:   what the user's optimizer has: a DTensor, or any tensor
    sharded: and ``slot``, in elements from the beginning of the run, where it is a piece of a flat shard
    """

    param: Tensor
    sharded: ShardedParam | None = None
    slot: Slot | None = None

    def view_of(self, buffer: Tensor) -> Tensor:
        """This parameter's part of a tensor with an element for each of the run's, as a tensor of the parameter's kind."""
        if self.sharded is not None and self.slot is not None:
            local = shard_view(buffer, self.slot, self.sharded.spec, self.sharded.rank)
            return torch_dtensors.new_dtensor(local, in_dtype(self.sharded.spec.sharded, buffer.dtype))
        if isinstance(self.param, DTensor):
            return torch_dtensors.new_dtensor(buffer, in_dtype(self.param._spec, buffer.dtype))
        return buffer

    def place_in(self, buffer: Tensor) -> Tensor:
        """As ``view_of``, the local tensor alone, and without a storage object of its own."""
        if self.sharded is None or self.slot is None:
            return buffer
        spec = self.sharded.spec
        shape = spec.cut.shard_shape(self.sharded.rank)
        return spec.to_logical(buffer.narrow(0, self.slot.offset, math.prod(shape)).view(shape))


class Run:
    """Parameters that are one tensor to the optimizer.

    data:   (n,), their part of the flat shard; for a parameter by itself, its local tensor
    pieces: in the order of their slots
    block:  the number of elements is a multiple of it, and so is each offset
    """

    def __init__(self, data: Tensor, pieces: Sequence[Piece], block: int = 1) -> None:
        self.data = data
        self.pieces = list(pieces)
        self.block = block
        self._has_copies = False  # whether ``data.grad`` is a copy of the gradients of the parameters
        self._places = [(piece.slot.offset, piece.place_in(data).stride()) for piece in pieces if piece.slot is not None]

    def data_now(self) -> Tensor:
        """``data``, where the flat shard lies now."""
        first = self.pieces[0]
        home = None if first.sharded is None else first.sharded.home
        if first.slot is None or home is None:
            return _local(first.param).detach()
        flat, slot = home
        return flat[slot.offset : slot.offset + self.data.numel()].detach()

    def take_gradients(self) -> bool:
        """Let ``data.grad`` be the gradients of all, without a copy where they lie in one buffer as the parameters do.

        Returns: False if some of them have a gradient and others not
        """
        grads = [piece.param.grad for piece in self.pieces]
        there = complete_locals([grad for grad in grads if grad is not None])
        self.data.grad = None
        self._has_copies = False
        if len(there) < len(grads):
            return not there
        grad = self._where_they_lie(there) if self._places else there[0]
        if grad is None:
            grad = torch.zeros(self.data.shape, dtype=there[0].dtype, device=there[0].device)
            torch._foreach_copy_([piece.place_in(grad) for piece in self.pieces], there)
            self._has_copies = True
        if grad.dtype is not self.data.dtype:
            torch_tensors.allow_any_grad_dtype(self.data)
        self.data.grad = grad
        return True

    def copied_gradients(self) -> list[Tensor]:
        """The parameters' own gradients, local, if ``data.grad`` is a copy: the user reads these, so who changes that changes both."""
        if not self._has_copies:
            return []
        return complete_locals([piece.param.grad for piece in self.pieces if piece.param.grad is not None])

    def _where_they_lie(self, locals_: Sequence[Tensor]) -> Tensor | None:
        """The buffer that ``locals_`` are views of, if it is laid out like this run."""
        first: Tensor | None = None
        begin = 0
        first_byte = first_byte_of(locals_)
        for local, (offset, stride) in zip(locals_, self._places, strict=True):
            if local.numel() == 0:
                continue
            address = first_byte(local) - offset * local.element_size()
            if first is None:
                first, begin = local, address
            if address != begin or local.dtype is not first.dtype or local.stride() != stride:
                return None
        if first is None:
            return None
        start = first.storage_offset() - (first_byte(first) - begin) // first.element_size()
        end = start + self.data.numel()
        if start < 0 or end * first.element_size() > first.untyped_storage().nbytes():
            return None
        return first.as_strided((self.data.numel(),), (1,), start)

    def cut(self, differs: Callable[[Piece, Piece], bool]) -> list[tuple[Run, slice]]:
        """Shorter runs, a new one where ``differs`` says so of two neighbors; and which part of this one's elements each has."""
        stretches = [[self.pieces[0]]]
        for before, piece in zip(self.pieces, self.pieces[1:], strict=False):
            if differs(before, piece):
                stretches.append([])
            stretches[-1].append(piece)
        return [_run_in(self.data, pieces, self.block) for pieces in stretches]


def _run_in(buffer: Tensor, pieces: Sequence[Piece], block: int) -> tuple[Run, slice]:
    """The run of neighbors, whose slots are places in ``buffer``, and which part of ``buffer`` it is."""
    slots = [piece.slot for piece in pieces if piece.slot is not None]
    part = slice(slots[0].offset, slots[-1].offset + round_up(slots[-1].numel, block))
    moved = [replace(piece, slot=replace(slot, offset=slot.offset - part.start)) for piece, slot in zip(pieces, slots, strict=True)]
    return Run(buffer[part].detach(), moved, block), part


def runs_of(params: Iterable[Tensor], known: dict[int, tuple[ShardedParam, ParamGroup]], block: int) -> list[Run]:
    """The runs of the parameters of one group of hyperparameters.

    known: parameters of ``fully_shard``, by the id of what the user sees between steps
    block: elements that the optimizer quantizes together, to which the flat shards are aligned; 1 if it quantizes none
    """
    wanted = list(params)
    members = {id(known[id(param)][0]) for param in wanted if id(param) in known}
    runs = []
    done: set[int] = set()
    for param in wanted:
        found = known.get(id(param))
        if found is None or found[1].flat is None:
            runs.append(Run(_local(param).detach(), [Piece(param)]))
        elif id(found[1]) not in done:
            done.add(id(found[1]))
            runs += _runs_in(found[1], members, block)
    return runs


def _local(param: Tensor) -> Tensor:
    return torch_dtensors.local_tensor(param) if isinstance(param, DTensor) else param


def _runs_in(group: ParamGroup, members: set[int], block: int) -> list[Run]:
    assert group.flat is not None
    stretches: list[list[Piece]] = [[]]
    for param, slot in zip(group.plan.params, group.plan.layout.slots, strict=True):
        if id(param) not in members:
            stretches.append([])
            continue
        if block > 1 and stretches[-1] and not _are_quantized_alike(stretches[-1], slot, block):
            stretches.append([])
        stretches[-1].append(Piece(param.sharded, param, slot))
    return [_run_in(group.flat, pieces, block)[0] for pieces in stretches if pieces]


def _are_quantized_alike(pieces: Sequence[Piece], slot: Slot, block: int) -> bool:
    """Whether ``slot`` may follow ``pieces`` in a run: with them it is quantized, or left alone, as each would be by itself."""
    first = pieces[0].slot
    assert first is not None
    if round_up(first.numel, block) >= QUANTIZED_FROM_NUMEL:
        return round_up(slot.numel, block) >= QUANTIZED_FROM_NUMEL
    return slot.offset + round_up(slot.numel, block) - first.offset < QUANTIZED_FROM_NUMEL


def is_elementwise(key: str, value: Any, param: Tensor) -> bool:
    """Whether an entry of the state of ``param``, or of a run's tensor, has a value for each of its elements."""
    if isinstance(param, DTensor):
        return isinstance(value, DTensor)
    return isinstance(value, Tensor) and value.shape == param.shape and (value.dim() > 0 or key != "step")
