"""``fsdp2.publish``: a sharded model's weights as a stream of whole tensors, for somebody who has another copy of the model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .. import inspect
from ..checkpoint.failures import tried
from ..checkpoint.key_map import KeyMap
from ..checkpoint.lazy_tensors import LazyTensor, converted
from ..checkpoint.model_tensors import (
    WRAPPERS,
    LazyParameter,
    ModelTensor,
    checked_model,
    meshes_of,
    model_tensors,
    reshard,
    wanted,
)
from ..checkpoint.safetensors_plan import check_dtype, written_tensors
from ..checkpoint.safetensors_save import refuse_meta
from ..checkpoint.shard_geometry import Box
from ..core.comm.agreement import Axis, agree_over, axes_of, largest_over
from ..errors import ArgumentError
from ..hangs.joint_calls import joint
from .unit_gather import Gathering, Part, UnitGather

_NBYTES_OUTSIDE = 256 << 20
"""Of tensors that no unit manages, and that no unit is around, this much counts as one unit."""

Named = list[tuple[str, Tensor]]


class TensorMeta(NamedTuple):
    """What is known of a tensor before it is sent."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(eq=False)
class _Output:
    """A tensor that is sent. sources: the model's tensors that it is made of"""

    meta: TensorMeta
    lazy: LazyTensor
    sources: list[ModelTensor]

    def made(self, whole: dict[ModelTensor, Tensor]) -> Tensor:
        if isinstance(self.lazy, LazyParameter):
            return whole[self.lazy.source]
        out = torch.empty(self.meta.shape, dtype=self.meta.dtype, device=whole[self.sources[0]].device)
        for source, box, place in wanted(self.lazy, Box.whole(self.meta.shape), out):
            place.copy_(whole[source][box.slices])
        return out


@dataclass(eq=False)
class _Unit:
    """What is gathered together, one gather for each mesh, and sent together. later: what tensors of a later unit need as well"""

    gathers: list[UnitGather]
    outputs: list[_Output] = field(default_factory=list)
    later: list[ModelTensor] = field(default_factory=list)

    def begin(self) -> list[Gathering]:
        return [gather.begin() for gather in self.gathers]

    @torch.no_grad()
    def made(self, gatherings: list[Gathering], kept: dict[ModelTensor, Tensor]) -> Named:
        """The tensors, by name. kept: those of earlier units, from call to call"""
        whole: dict[ModelTensor, Tensor] = {}
        while gatherings:
            whole |= gatherings.pop().whole()
        kept |= {source: whole[source].clone() for source in self.later}
        return [(output.meta.name, output.made(whole | kept)) for output in self.outputs]


class Source:
    """Whole tensors by name; what ``Weights`` and a sink's argument have in common."""

    version: int = 0

    def metadata(self) -> list[TensorMeta]:
        raise NotImplementedError

    def groups(self) -> Iterator[Named]:
        raise NotImplementedError

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor with its name. The last one of a unit has memory of its own: a loop still holds it while the next unit comes."""
        for group in self.groups():
            group.reverse()
            while len(group) > 1:
                yield group.pop()
            while group:
                yield _alone(*group.pop())


def _alone(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    return name, tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


class Weights(Source):
    """What ``fsdp2.publish`` returns: an iterable of ``(name, tensor)``, again and again, each time of the model's current weights.

    version: how often the weights have been published, the same on all ranks; 1 during the first time
    """

    def __init__(self, model: nn.Module, units: list[_Unit], axes: list[Axis]) -> None:
        self._model = model
        self._units = units
        self._axes = axes
        self.version = 0

    def metadata(self) -> list[TensorMeta]:
        """Name, dtype and shape of each tensor, in the order in which they come. Collective: no"""
        return [output.meta for unit in self._units for output in unit.outputs]

    def groups(self) -> Iterator[Named]:
        """The tensors of one unit after another, views of one buffer: for transports that send large messages.

        Collective: yes, over the meshes of the parameters: every rank has to iterate to the end, and do nothing in between that other
            ranks wait for. ``send`` is for consumers that may be slow or fail
        Memory:     two units, if you keep none: the next one is on its way while you have one
        """
        self._begin()
        kept: dict[ModelTensor, Tensor] = {}
        under_way = [self._issued(unit) for unit in self._units[:1]]
        for unit, following in zip(self._units, [*self._units[1:], None], strict=True):
            ready = [unit.made([each.finish() for each in under_way.pop()], kept)]
            if following is not None:
                under_way.append(self._issued(following))
            yield ready.pop()

    def _begin(self) -> None:
        reshard(self._model)
        self.version += 1

    @torch.no_grad()
    def _issued(self, unit: _Unit) -> list[Gathering]:
        return [each.issue() for each in unit.begin()]


@joint
def publish(model: nn.Module, *, dtype: torch.dtype | None = None, key_map: KeyMap | None = None) -> Weights:
    """The model's weights for a consumer: whole tensors, one unit after another, each with one all-gather.

    model:   sharded by fsdp2 or by torch's FSDP2, or a module with such modules inside
    dtype:   in which floating-point tensors are sent, before the all-gather; None: their own
    key_map: as for ``save_safetensors``: from the consumer's names to the model's, undone here

    Parameters and persistent buffers come, tied ones once, under their first name. Each iteration takes the values of its moment.

    Collective: yes, over the meshes of the parameters, and so is each iteration
    Raises:     on every rank: ArgumentError, ParameterError, MaterializationError, CheckpointError for a key map that cannot be undone

    Example:
        weights = fsdp2.publish(model, dtype=torch.bfloat16)
        whole = dict(weights)
    """
    checked_model(model, "publish")
    axes = axes_of(meshes_of(model))
    planned, problem = tried("cannot publish the model", lambda: _planned(model, dtype, key_map))
    agree_over(axes, problem)
    units, digest = planned[0]
    most, least = largest_over(axes, digest, -digest)
    if most != -least:
        raise ArgumentError(
            "publish got models with other names, shapes, dtypes or placements on other ranks, or other arguments",
            expected="the same model and arguments on every rank",
            fix="build the model and call publish in the same way on every rank",
        )
    return Weights(model, units, axes)


def _planned(model: nn.Module, dtype: torch.dtype | None, key_map: KeyMap | None) -> tuple[list[_Unit], int]:
    """The units, and a number that two ranks share only if they made the same ones."""
    check_dtype(dtype)
    reshard(model)
    tensors = [each for each in model_tensors(model) if each.persistent]
    refuse_meta(tensors)
    outputs = []
    for name, lazy in written_tensors(tensors, key_map).items():
        found = wanted(lazy, Box.whole(lazy.shape), torch.empty(lazy.shape, device="meta"))
        outputs.append(_Output(TensorMeta(name, converted(lazy, dtype), tuple(lazy.shape)), lazy, [source for source, _, _ in found]))
    used = dict.fromkeys(source for output in outputs for source in output.sources)
    units, number_of = _in_units(model, list(used), dtype)
    for output in outputs:
        last = max((number_of[source] for source in output.sources), default=0)
        units[last].outputs.append(output)
        for source in output.sources:
            if number_of[source] < last and source not in units[number_of[source]].later:
                units[number_of[source]].later.append(source)
    said = [
        (number_of[each], each.name, each.tensor.shape, str(each.tensor.dtype), str(getattr(each.tensor, "placements", "")))
        for each in used
    ]
    digest = hashlib.sha256(repr((said, [output.meta for output in outputs])).encode()).digest()
    return units, int.from_bytes(digest[:7], "big")


def _in_units(model: nn.Module, tensors: list[ModelTensor], dtype: torch.dtype | None) -> tuple[list[_Unit], dict[ModelTensor, int]]:
    """The units of the model, and the number of each tensor's; tensors that none manages go with the innermost unit around them."""
    units = inspect.units(model)
    names = {unit.name: ".".join(part for part in unit.name.split(".") if part not in WRAPPERS) for unit in units}
    managed = {id(param.sharded): names[unit.name] for unit in units for group in unit.groups for param in group.params}
    number_of: dict[ModelTensor, int] = {}
    found: dict[object, dict[object, list[Part]]] = {}
    outside = 0
    for each in tensors:
        around = [name for name in names.values() if not name or each.name.startswith(f"{name}.")]
        key: object = managed.get(id(each.tensor), max(around, key=len, default=None))
        wire = dtype if dtype is not None and each.tensor.is_floating_point() else each.tensor.dtype
        part = Part(each, wire)
        if key is None:
            outside += part.nbytes
            key = outside // _NBYTES_OUTSIDE
        by_place = found.setdefault(key, {})
        number_of[each] = list(found).index(key)
        by_place.setdefault(each.mesh if each.mesh is not None else each.local.device, []).append(part)
    return [_Unit([_gather_at(place, parts) for place, parts in each.items()]) for each in found.values()], number_of


def _gather_at(place: object, parts: list[Part]) -> UnitGather:
    return UnitGather(place if isinstance(place, DeviceMesh) else None, parts[0].source.local.device, parts)
