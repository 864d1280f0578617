"""A model's tensors that a checkpoint keeps: parameters and persistent buffers, each once, with all of its names.

Names are those of ``state_dict`` without wrappers' prefixes. This file knows which pieces a rank keeps
(``own_pieces``), and gives tensors on the meta device storage in place, so that optimizers and modules that hold them
see it.

Worked example: a tied ``Transformer`` has one ModelTensor with names ``["embedding.weight", "head.weight"]``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from ..core.group.param import ShardedParam
from ..core.group.param_group import ParamGroup
from ..core.iteration.call import next_moment
from ..core.iteration.module_state import sharded_parameters, unit_of, units_in
from ..core.iteration.unit import Unit
from ..errors import ArgumentError, ParameterError, got_object
from ..torch_names import torch_dtensors, torch_modules, torch_tensors
from .file_reading import ByteReader
from .lazy_tensors import NAMES, LazyTensor, Stored
from .shard_geometry import Box, Cut, Piece, in_order, local_shape_of, pieces_of

WRAPPERS = frozenset({"_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module"})
"""The names under which activation checkpointing, the compiler and FSDP1 keep the module that they wrap."""


@dataclass(eq=False)
class ModelTensor:
    """A parameter or buffer.

    names:      in the model's order; several if it is tied
    places:     where it is registered: ``module._parameters`` or ``module._buffers``, and the key
    persistent: whether a checkpoint has it; a parameter always
    """

    names: list[str] = field(default_factory=list)
    places: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    persistent: bool = False

    @property
    def tensor(self) -> Tensor:
        registry, name = self.places[0]
        tensor: Tensor = registry[name]
        return tensor

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def local(self) -> Tensor:
        """This rank's shard, without autograd."""
        tensor = self.tensor
        return (torch_dtensors.local_tensor(tensor) if isinstance(tensor, DTensor) else tensor).detach()

    @property
    def is_meta(self) -> bool:
        return self.local.is_meta

    @property
    def mesh(self) -> DeviceMesh | None:
        tensor = self.tensor
        return tensor.device_mesh if isinstance(tensor, DTensor) else None

    def problem(self) -> str | None:
        """Why it can be neither read nor written; None if it can."""
        tensor = self.tensor
        if isinstance(tensor, nn.UninitializedParameter):
            return "has no shape yet; run a forward pass first"
        if isinstance(tensor, DTensor):
            if any(placement.is_partial() for placement in tensor.placements):
                return f"waits for a reduction, with placements {tensor.placements}; redistribute it"
            coordinate = tensor.device_mesh.get_coordinate()
            if coordinate is None:
                return f"lies on a mesh without this rank: {tensor.device_mesh}"
            if (
                _has_own_order(tensor)
                or local_shape_of(tensor.shape, cuts_of(tensor, coordinate)) != torch_dtensors.local_tensor(tensor).shape
            ):
                return f"is sharded in a way that its placements {tensor.placements} do not describe; redistribute it"
            tensor = torch_dtensors.local_tensor(tensor)
        if tensor.layout is not torch.strided or torch_tensors.is_traceable_wrapper_subclass(tensor):
            return f"is not a dense tensor but a {type(tensor).__name__} with {tensor.layout}"
        return None


def own_pieces(tensor: Tensor) -> list[Piece]:
    """The pieces that this rank keeps of the whole tensor."""
    return pieces_of(tensor.shape, cuts_of(tensor, tensor.device_mesh.get_coordinate() or ()) if isinstance(tensor, DTensor) else ())


def cuts_of(tensor: DTensor, coordinate: Sequence[int]) -> list[Cut]:
    """The cuts by the placements of ``tensor`` on the rank at ``coordinate`` of its mesh, in the order in which they are made."""
    cuts = []
    for axis, placement in enumerate(tensor.placements):
        dim = torch_dtensors.shard_dim(placement)
        if dim is not None:
            split_factor = int(getattr(placement, "split_factor", 1))  # of a _StridedShard
            cuts.append(Cut(dim, tensor.device_mesh.size(axis), coordinate[axis], split_factor))
    return in_order(cuts)


def is_strided(placement: Placement) -> bool:
    """Whether later mesh axes cut its dim earlier."""
    return hasattr(placement, "split_factor")


def _has_own_order(tensor: DTensor) -> bool:
    """Whether mesh axes cut a dim out of order, which torch records next to the placements."""
    order = getattr(torch_dtensors.spec_of(tensor), "shard_order", None) or ()
    return any(list(entry.mesh_dims) != sorted(entry.mesh_dims) for entry in order)


def checked_model(model: Any, caller: str) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise ArgumentError(got_object(caller, model), expected="an nn.Module", fix="pass the model itself")
    return model


def model_tensors(model: nn.Module) -> list[ModelTensor]:
    """All parameters and buffers, sharded ones as shards: call ``reshard`` first.

    Raises: ParameterError naming the tensors that cannot be read or written
    """
    found: dict[int, ModelTensor] = {}
    for prefix, module in all_names(model):
        path = [part for part in prefix.split(".") if part and part not in WRAPPERS]
        for registry, is_buffer in ((module._parameters, False), (module._buffers, True)):
            for name, tensor in registry.items():
                if tensor is not None:
                    each = found.setdefault(id(tensor), ModelTensor())
                    each.names.append(".".join([*path, name]))
                    each.places.append((registry, name))
                    each.persistent |= not (is_buffer and name in module._non_persistent_buffers_set)
    tensors = list(found.values())
    problems = [f"{each.name}: {problem}" for each in tensors if (problem := each.problem()) is not None]
    if problems:
        raise ParameterError(
            f"{len(problems)} parameters or buffers cannot be written or sent whole",
            items=problems,
            expected="dense tensors, and DTensors that are replicated or sharded",
            fix="change them, or save them another way",
        )
    return tensors


def reshard(model: nn.Module) -> list[Unit]:
    """Make the modules show their sharded parameters; returns the units. Collective: no."""
    for module in model.modules():
        if isinstance(module, torch_modules.TorchFSDPModule) and unit_of(module) is None:
            module.reshard()
    units: list[Unit] = [*units_in(model.modules())]
    for unit in units:
        unit.reshard_for_all()
    return units


def note_load(tensors: Iterable[ModelTensor]) -> None:
    """Values are about to be written into ``tensors``: a backward of a graph from before, which has saved them, will raise."""
    known = sharded_parameters()
    loaded: dict[ParamGroup, list[ShardedParam]] = {}
    for each in tensors:
        if id(each.tensor) in known:
            param, group = known[id(each.tensor)]
            loaded.setdefault(group, []).append(param)
    now = next_moment()
    for group, params in loaded.items():
        group.note_write(now, params)


def meshes_of(model: nn.Module) -> list[DeviceMesh]:
    """The meshes of its sharded parameters and buffers, in order, even while it is unsharded. Collective: no."""
    sharded = [param.sharded for unit in units_in(model.modules()) for group in unit.groups for param in group.params]
    shown = itertools.chain.from_iterable((*each._parameters.values(), *each._buffers.values()) for each in model.modules())
    return [each.device_mesh for each in (*sharded, *shown) if isinstance(each, DTensor)]


# --- storage for tensors on the meta device ---------------------------------------------------------------------------------------


def give_storage(tensors: Iterable[ModelTensor], units: Sequence[Unit], device: torch.device) -> None:
    """Allocate those of ``tensors`` that are on the meta device, uninitialized; parameters keep their identity.

    device: for tensors that no unit manages and that lie on no mesh
    Memory: besides the storage itself, one group's shard
    """
    unit_of = {id(param.sharded): unit for unit in units for group in unit.groups for param in group.params}
    offloaded = {id(param.sharded) for unit in units for group in unit.groups if group.options.offload for param in group.params}
    by_unit: dict[Unit | None, list[ModelTensor]] = {}
    for each in tensors:
        if each.is_meta:
            by_unit.setdefault(unit_of.get(id(each.tensor)), []).append(each)
    for unit, together in by_unit.items():
        for each in together:
            if id(each.tensor) in offloaded:
                place = torch.device("cpu")
            elif unit is not None:
                place = unit.device
            else:
                place = device if each.mesh is None else torch_tensors.current_device(each.mesh.device_type)
            _allocate(each, place)
        if unit is not None:
            unit.notice_changes()


def take_storage(tensors: Iterable[ModelTensor], units: Sequence[Unit]) -> None:
    """Undo ``give_storage``: put ``tensors`` on the meta device again."""
    for each in tensors:
        if not each.is_meta:
            _allocate(each, torch.device("meta"))
    for unit in units:
        unit.notice_changes()


def _allocate(each: ModelTensor, device: torch.device) -> None:
    old = each.tensor
    new: Tensor
    if isinstance(old, DTensor):
        local = torch.empty_like(torch_dtensors.local_tensor(old), device=device, requires_grad=False)
        new = torch_dtensors.new_dtensor(local, torch_dtensors.spec_of(old))
        if isinstance(old, nn.Parameter):
            new = nn.Parameter(new, requires_grad=old.requires_grad)
    else:
        new = torch.Tensor._make_subclass(type(old), torch.empty_like(old, device=device, requires_grad=False), old.requires_grad)
    for name, value in vars(old).items():
        if name not in vars(new):  # a DTensor's own are there
            setattr(new, name, value)
    try:
        torch.utils.swap_tensors(old, new)  # type: ignore[no-untyped-call]
    except RuntimeError:  # somebody has a weak reference to it
        for registry, name in each.places:
            registry[name] = new


def still_on_meta(tensors: Iterable[ModelTensor]) -> Iterator[str]:
    """Names of the tensors that have no values yet."""
    return (each.name for each in tensors if each.is_meta)


def all_names(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every name of every module, even if a module contains itself, such as a block that refers to its owner.

    torch lists each module once, or, with ``remove_duplicate=False``, follows a cycle forever.

    Worked example: ``model.block.owner`` is ``model``; ``model.other`` is ``model.block``. The names are "", "block" and "other".
    """
    return _below(root, "", [])


def _below(module: nn.Module, name: str, above: list[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    if any(module is each for each in above):
        return
    yield name, module
    above.append(module)
    for key, child in module._modules.items():
        if child is not None:
            yield from _below(child, f"{name}.{key}" if name else key, above)
    above.pop()


# --- not read yet -----------------------------------------------------------------------------------------------------------------


class Wanted(ByteReader):
    """Records what would be read.

    parts: each a parameter, a box of it, and the view of the box's shape to fill
    """

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[tuple[ModelTensor, Box, Tensor]] = []


@dataclass(frozen=True, eq=False)
class LazyParameter(LazyTensor):
    """A whole parameter or buffer, for key maps, which then tell what goes where before any value moves.

    With ``Split`` of a fused (6, 8) parameter into k with rows [4, 6), reading all of k records rows [4, 6) of the
    parameter.
    """

    source: ModelTensor

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.source.tensor.shape)

    def stored(self) -> Iterator[Stored]:
        """The tensor as if stored in a file, for its dtype and for messages."""
        dtype = self.source.tensor.dtype
        yield Stored(Path(), self.source.name, NAMES.get(dtype, str(dtype)), self.shape, 0, 0)

    def read(self, box: Box, out: Tensor, reader: ByteReader) -> None:
        assert isinstance(reader, Wanted), "values of a model are brought by gather_to_writers.py"
        reader.parts.append((self.source, box, out))


def wanted(lazy: LazyTensor, box: Box, out: Tensor) -> list[tuple[ModelTensor, Box, Tensor]]:
    """The parts that make up ``box`` of ``lazy``, and the place of each in ``out``. Collective: no."""
    reader = Wanted()
    lazy.read(box, out, reader)
    return reader.parts
