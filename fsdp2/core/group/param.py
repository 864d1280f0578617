"""One parameter: its sharded DTensor, its unsharded tensor, and who owns it.

The user, the optimizer and checkpoints hold the sharded parameter, which is made once and keeps its identity. Its local
tensor has a storage object of its own over a piece of the group's flat shard, so it has its own version counter, saves
only its own bytes, and is not mistaken for tied with its neighbors. The unsharded parameter is made once as well, over
the group's unsharded storage.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...errors import ParameterError
from ...spmd_annotations import is_annotation
from ...torch_names import torch_autograd, torch_dtensors, torch_tensors
from ..plan.layout import Slot, contiguous_strides, rows_of
from ..plan.placement import ShardSpec, in_dtype, is_lazy

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Owner:
    """A place where a parameter is registered: ``module._parameters[name]``."""

    module: nn.Module
    name: str


class ShardedParam:
    """One parameter of a group.

    fqn:        its name from the module that was passed to ``fully_shard``; from the root after the first forward
    owners:     where it is registered; more than one if it is tied
    spec:       its placement
    rank:       this rank on the shard axis
    sharded:    what the user sees between steps; a DTensor
    local:      the local tensor that ``sharded`` should have: a piece of the flat shard (on meta, memory of its own)
    address:    of that piece in the host's memory; None where ``local`` is no such piece
    home:       the flat shard, and the slot there
    trainable:  whether it required a gradient when the sharded and the unsharded parameter were last compared
    unsharded:  what the user sees in forward and backward; made at the first unshard
    adds_up_in: a ``grad_dtype`` for the unsharded parameter; None: its own dtype
    version:    sum of the version counters of ``sharded`` and ``local`` when last read; -1: not yet
    kind:       the original's class if it is a user's subclass of ``nn.Parameter``; the unsharded parameter has it, too
    """

    def __init__(
        self, fqn: str, owners: list[Owner], spec: ShardSpec, rank: int, sharded: nn.Parameter, local: Tensor
    ) -> None:
        self.fqn = fqn
        self.owners = owners
        self.spec = spec
        self.rank = rank
        self.sharded = sharded
        self.local = local
        self.leave_flat()
        self.trainable = sharded.requires_grad
        self.unsharded: nn.Parameter | None = None
        self.adds_up_in: torch_tensors.GradDtype | None = None
        self.kind: type[nn.Parameter] | None = None
        self.version = -1

    @property
    def dtype(self) -> torch.dtype:
        return self.sharded.dtype

    def take_over_toggle(self) -> None:
        """Give both parameters the ``requires_grad`` of the one that the user has toggled since the last comparison."""
        now, unsharded = self.sharded.requires_grad, self.unsharded
        if unsharded is not None and unsharded.requires_grad is not now:
            now = not self.trainable
            self.sharded.requires_grad_(now)
            unsharded.requires_grad_(now)
        self.trainable = now

    def local_now(self) -> Tensor:
        """The local tensor of ``sharded`` as it is now: ``_apply`` and loading may have replaced it."""
        return torch_dtensors.local_tensor(self.sharded)  # type: ignore[arg-type]

    def move_to(self, local: Tensor) -> None:
        """Let ``sharded`` keep its data in ``local``."""
        torch_dtensors.set_local_tensor(self.sharded, local)  # type: ignore[arg-type]
        mesh = self.spec.sharded.mesh
        if self.sharded.device_mesh is not mesh:  # type: ignore[attr-defined]
            torch_dtensors.set_mesh(self.sharded, mesh)  # type: ignore[arg-type]
        self.local = local
        self.version = -1

    def leave_flat(self) -> None:
        """The group drops the flat shard that ``local`` is a piece of."""
        self.address: int | None = None
        self.home: tuple[Tensor, Slot] | None = None

    @torch.no_grad()
    def enter_flat(self, flat: Tensor, slot: Slot, has_values: bool = False) -> None:
        """Let ``sharded`` keep its data in ``slot`` of ``flat``: the values that it has now, or those there."""
        shard = shard_view(flat, slot, self.spec, self.rank)
        if not has_values:
            shard.copy_(self.local_now())
        self.move_to(shard)
        self.home = flat, slot
        self.address = shard.data_ptr() if shard.device.type == "cpu" and type(shard) is Tensor else None

    @torch.no_grad()
    def return_to_flat(self) -> None:
        """If somebody has moved ``local``, copy its values into the flat shard and let it lie there again.

        torch moves the memory of a CPU tensor that is sent to another process.
        """
        if self.address is None or self.local.data_ptr() == self.address:
            return
        assert self.home is not None
        shard = shard_view(*self.home, self.spec, self.rank)
        if self.local.dtype is not shard.dtype or self.local.shape != shard.shape:
            raise ParameterError(
                f"the shard of {self.fqn} was given data of another dtype or shape: {self.local.dtype}, "
                f"{tuple(self.local.shape)}",
                expected=f"{shard.dtype}, {tuple(shard.shape)}",
                fix="cast the model (model.to(dtype)), or copy values into the shard: param.to_local().copy_(values)",
            )
        shard.copy_(self.local)
        # No values changed, and whether this rank gathers again depends on the version.
        with torch_autograd.preserved_versions((self.local,)):
            self.local.set_(shard.untyped_storage(), shard.storage_offset(), shard.shape, shard.stride())


_MARK = "_fsdp2_sharded"
"""Attribute of an original and of an unsharded parameter: a weak reference to its ShardedParam."""


def whole_local(param: ShardedParam) -> Tensor:
    """The unsharded parameter, or its local tensor if it is a DTensor, without autograd."""
    assert param.unsharded is not None
    unsharded = param.unsharded
    return torch_dtensors.local_tensor(unsharded) if isinstance(unsharded, DTensor) else unsharded.detach()


@torch.no_grad()
def has_values_of_shard(param: ShardedParam) -> bool:
    """Whether this rank's piece of the unsharded parameter is its shard, in the dtype of the unsharded parameter."""
    local = param.local
    if type(local) is not Tensor:  # a fake tensor has no values
        return True
    piece = param.spec.to_logical(own_shard(whole_local(param), param.spec, param.rank))
    local = local.to(piece.dtype)
    return torch.equal(piece, local) or torch.allclose(piece, local, rtol=0, atol=0, equal_nan=True)


def sum_of_bits(tensor: Tensor) -> int:
    """The elements' bits, added up as integers: another number after almost every write. 0 for a fake tensor."""
    if type(tensor) is not Tensor:
        return 0
    tensor = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return int(tensor.view(_INTEGERS[tensor.dtype.itemsize]).sum().item())


def own_shard(original: Tensor, spec: ShardSpec, rank: int) -> Tensor:
    """The piece of ``original`` that ``rank`` keeps, as a view in physical order."""
    physical = spec.to_physical(original)
    cut = spec.cut
    if cut.dim is None:
        return physical
    rows = rows_of(cut.shape[cut.dim], rank, cut.num_shards)
    return physical.narrow(cut.dim, rows.start, len(rows))


def new_sharded_param(
    fqn: str,
    owners: list[Owner],
    original: nn.Parameter,
    spec: ShardSpec,
    rank: int,
    device: torch.device,
    shard: Tensor | None = None,
) -> ShardedParam:
    """Cut ``original`` (a DTensor's local tensor). The result shares its memory until it enters the flat shard.

    device: where the flat shard will be
    shard:  this rank's piece, if it was cut already
    """
    with torch.no_grad():
        if shard is None:
            whole = torch_dtensors.local_tensor(original) if isinstance(original, DTensor) else original.detach()
            shard = spec.to_logical(own_shard(whole, spec, rank))
        local = shard
        # A DTensor keeps the storage offset of its first local tensor, and ``deepcopy`` refuses it if that is not 0.
        at_zero = local.as_strided(local.shape, local.stride(), 0)
        # It keeps its device as well, and refuses a gradient on another device.
        if not local.is_meta and local.device != device:
            at_zero = torch.empty_like(at_zero, device=device) if type(local) is Tensor else local.to(device)
        sharded = nn.Parameter(torch_dtensors.new_dtensor(at_zero, spec.sharded), requires_grad=original.requires_grad)
    # Attributes that users set on parameters: no_weight_decay, tensor-parallel marks, ...
    for name, value in vars(original).items():
        # ``local`` has a subclass's inner tensors.
        if name != _MARK and name not in vars(local) and not is_annotation(value, original):
            setattr(sharded, name, value)
    param = ShardedParam(fqn, owners, spec, rank, sharded, local)
    cls: type[Tensor] = type(original)  # a DTensor's is none below nn.Parameter
    if issubclass(cls, nn.Parameter) and cls is not nn.Parameter and not is_lazy(original):
        param.kind = cls
    param.move_to(local)
    mark(original, param)
    return param


units: weakref.WeakKeyDictionary[ShardedParam, weakref.ref[Any]] = weakref.WeakKeyDictionary()
"""The unit of each parameter of ``fully_shard`` that lives."""


def shards() -> dict[int, ShardedParam]:
    """All living parameters, also those replaced since, by the id of the parameter that the user sees between steps."""
    return {id(param.sharded): param for param in list(units)}


def mark(whole: nn.Parameter, param: ShardedParam) -> None:
    """Let ``sharded_from(whole)`` return ``param``."""
    setattr(whole, _MARK, weakref.ref(param))


def sharded_from(whole: Tensor) -> ShardedParam | None:
    """The ShardedParam of an original or an unsharded parameter, if ``fully_shard`` made one that still exists."""
    mark = getattr(whole, _MARK, None)
    sharded = None if mark is None else mark()
    return sharded if isinstance(sharded, ShardedParam) else None


def as_sharded(params: Sequence[Tensor]) -> list[Tensor]:
    """``params``, with sharded parameters for original and unsharded ones."""
    found = []
    for param in params:
        sharded = sharded_from(param) if _MARK in vars(param) else None
        found.append(param if sharded is None else sharded.sharded)
    return found


def new_unsharded_param(param: ShardedParam, whole: Tensor) -> nn.Parameter:
    """The parameter over ``whole``, a view of the unsharded storage; a DTensor or annotated like the original."""
    requires_grad = param.sharded.requires_grad
    model = param.spec.unsharded
    if model is None or param.spec.annotations is not None:
        unsharded = (
            nn.Parameter(whole, requires_grad=requires_grad)
            if param.kind is None
            else _of_kind(param.kind, param, whole)
        )
        if param.spec.annotations is not None:
            param.spec.annotations.put_on(unsharded)
    else:
        unsharded = nn.Parameter(
            torch_dtensors.new_dtensor(whole, in_dtype(model, whole.dtype)), requires_grad=requires_grad
        )
        # nn.Parameter made an alias with the same counter.
        torch_dtensors.set_local_tensor(unsharded, whole)  # type: ignore[arg-type]
    mark(unsharded, param)
    if param.adds_up_in is not None:
        torch_tensors.set_grad_dtype(unsharded, param.adds_up_in)
    before = None if param.unsharded is None else param.unsharded.grad
    if before is not None and before.device == unsharded.device:  # accumulated without sync
        torch_tensors.set_grad_dtype(unsharded, torch_tensors.GradDtype(before.dtype))
        unsharded.grad = before
    return unsharded


def _of_kind(kind: type[nn.Parameter], param: ShardedParam, whole: Tensor) -> nn.Parameter:
    """``whole`` as a parameter of the original's class, with the attributes that users or the class have put on it.

    Quantized layers cannot compute without their weight's state (bitsandbytes' ``Params4bit.quant_state``).
    """
    unsharded: nn.Parameter = torch.Tensor._make_subclass(kind, whole, param.sharded.requires_grad)
    vars(unsharded).update({name: value for name, value in vars(param.sharded).items() if name != "_is_param"})
    return unsharded


def carry_grad_dtype(old: nn.Parameter, new: nn.Parameter) -> None:
    """``new`` takes the place of ``old``, and has no ``grad_dtype`` of its own."""
    grad_dtype = torch_tensors.grad_dtype_of(old)
    if grad_dtype is not None and torch_tensors.grad_dtype_of(new) is None:
        torch_tensors.set_grad_dtype(new, grad_dtype)


def let_add_up(param: ShardedParam) -> None:
    """Let autograd add up on the unsharded parameter, which has no gradient, in ``adds_up_in``."""
    if param.unsharded is not None:
        torch_tensors.set_grad_dtype(
            param.unsharded, param.adds_up_in or torch_tensors.GradDtype(param.unsharded.dtype)
        )


def shard_view(flat: Tensor, slot: Slot, spec: ShardSpec, rank: int) -> Tensor:
    """The logical local tensor of ``rank`` over its slot of ``flat`` (1-D), with its own storage and version counter.

    The storage object covers only the shard's bytes and keeps ``flat`` alive: imported through DLPack, without a copy.
    """
    shape = slot.cut.shard_shape(rank)
    numel = math.prod(shape)
    piece = flat[slot.offset : slot.offset + numel].view(torch.uint8)
    covered = torch_tensors.with_own_storage(piece)
    # 0, but for fake tensors: their storage is the whole of ``flat``'s.
    offset = covered.storage_offset() // flat.element_size()
    own = torch.empty(0, dtype=flat.dtype, device=flat.device)
    with torch.no_grad():
        own.set_(covered.untyped_storage(), offset, shape, contiguous_strides(shape))
        return spec.to_logical(own)


def storage_view(storage: torch.UntypedStorage, like: Tensor, offset: int, shape: tuple[int, ...]) -> Tensor:
    """A contiguous tensor of ``like``'s dtype over ``storage`` with a version counter of its own.

    ``storage`` must be allocated while this is called; it may be freed and allocated again afterwards.
    """
    view = torch.empty(0, dtype=like.dtype, device=like.device)
    with torch.no_grad():
        return view.set_(storage, offset, shape, contiguous_strides(shape))
