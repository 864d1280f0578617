"""``fsdp2.publish``: a sharded model's weights as a stream of whole tensors, for somebody who has another copy of the model."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .. import inspect
from ..arguments import FUNCTION, POSITIVE, one_of, require
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
from ..errors import ArgumentError, FSDPError, PublishError
from ..hangs.joint_calls import joint
from ..torch_names.torch_collectives import timeout_of_group
from .adapters import Adapters, Merges, adapted
from .consumer import FAILED, READY, Consumer, Named, Piece, Source, Stream, TensorMeta, failure_of
from .unit_gather import Gathering, Part, UnitGather

_NBYTES_OUTSIDE = 256 << 20
"""Of tensors that no unit manages, and that no unit is around, this much counts as one unit."""


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

    @torch.no_grad()
    def begin(self, factors: Mapping[ModelTensor, Tensor]) -> list[Gathering]:
        return [gather.begin(factors) for gather in self.gathers]

    @torch.no_grad()
    def made(self, gatherings: list[Gathering], kept: dict[ModelTensor, Tensor]) -> Named:
        """The tensors, by name. kept: those of earlier units, from call to call"""
        whole = _whole(gatherings)
        kept |= {source: whole[source].clone() for source in self.later}
        return [(output.meta.name, output.made(whole | kept)) for output in self.outputs]


def _piece_of(meta: TensorMeta, pieces: Callable[[str, tuple[int, ...]], Any]) -> Piece | None:
    """What ``pieces`` returns for a tensor. Raises: ArgumentError naming it, for what is no piece, and if ``pieces`` raises"""
    try:
        piece: Any = pieces(meta.name, meta.shape)
        if piece is None:
            return None
        if isinstance(piece, tuple) and all(isinstance(each, slice) for each in piece):
            torch.empty(meta.shape, device="meta")[piece]  # torch takes no step backwards, for instance
            return piece
        problem, cause = f"returned {piece!r}", None
    except Exception as error:
        problem, cause = f"failed: {type(error).__name__}: {error}", error
    raise ArgumentError(
        f"pieces, for {meta.name} of shape {meta.shape}, {problem}",
        expected="a tuple of slices, one for each of its first dims; () for all of it; None to leave it out",
        fix="return for instance (slice(0, 16),)",
    ) from cause


def _whole(gatherings: list[Gathering]) -> dict[ModelTensor, Tensor]:
    whole: dict[ModelTensor, Tensor] = {}
    while gatherings:
        whole |= gatherings.pop().whole()
    return whole


class Weights(Source):
    """What ``fsdp2.publish`` returns: an iterable of ``(name, tensor)``, again and again, each time of the model's current weights.

    version: how often the weights have been published, the same on all ranks; 1 during the first time. Set it on all ranks before a job
        that was restarted publishes again, for readers that compare versions
    """

    def __init__(self, model: nn.Module, units: list[_Unit], factors: _Unit, axes: list[Axis]) -> None:
        self._model = model
        self._units = units
        self._factors = factors  # of adapters, gathered before everything else
        self._axes = axes
        self._is_sending = False
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
        factors = _whole([each.finish() for each in self._issued(self._factors, {})])
        under_way = [self._issued(unit, factors) for unit in self._units[:1]]
        for unit, following in zip(self._units, [*self._units[1:], None], strict=True):
            ready = [unit.made([each.finish() for each in under_way.pop()], kept)]
            if following is not None:
                under_way.append(self._issued(following, factors))
            yield ready.pop()

    @joint
    def send(
        self,
        sink: Callable[[Stream], Any] | None = None,
        *,
        timeout: float | None = None,
        pieces: Callable[[str, tuple[int, ...]], Piece | None] | None = None,
    ) -> None:
        """Give the tensors to ``sink``, which runs on a thread, and may be slow or fail; return at its end.

        sink:    called on this rank with a ``Stream``, an iterable of ``(name, tensor)``: many engines' ``load_weights`` is one;
                 None: this rank only takes part. A sink that ends early leaves the rest
        timeout: seconds without a unit after which a sink has failed; None: as long as it takes
        pieces:  of a tensor's name and shape: the slices of it that this rank's sink gets, a view, ``()`` for all of it; None: not this
                 tensor. For a consumer that is itself cut: by tensor parallelism, or with some of the experts. None: all tensors, whole

        A sink that blocks delays all ranks here, and lets no collective wait for longer than a third of its process group's time-out.

        Collective: yes, over the meshes of the parameters; ranks may have different sinks, or none
        Memory:     two units on a rank with a sink, one on the others
        Raises:     PublishError on every rank if a sink fails on one; the model is as before, and may be trained and published again

        Example:
            weights = fsdp2.publish(model)
            weights.send(dict if dist.get_rank() == 0 else None)
        """

        self._refuse_within_a_send()

        def checked() -> dict[str, Piece | None]:
            require("send", FUNCTION.or_none, sink=sink)
            require("send", POSITIVE.or_none, timeout=timeout)
            require("send", FUNCTION.or_none, pieces=pieces)
            return {} if pieces is None else {meta.name: _piece_of(meta, pieces) for meta in self.metadata()}

        chosen, problem = tried("cannot publish", checked)
        agree_over(self._axes, problem)
        self._begin()
        self._is_sending = True
        device = self._units[0].gathers[0].device if self._units else torch.device("cpu")
        consumer = Consumer(sink, Stream(self, *chosen), device, math.inf if timeout is None else timeout)
        kept: dict[ModelTensor, Tensor] = {}
        try:
            factors = _whole([each.issue().finish() for each in self._once_all_are_ready(consumer, self._factors, {})])
            for unit in self._units:
                ready = self._once_all_are_ready(consumer, unit, factors)
                consumer.offer(functools.partial(unit.made, [each.issue().finish() for each in ready], kept))
                del ready
            consumer.finish()
            self._once_all_are_ready(consumer, None, {})
        finally:
            try:
                consumer.leave(self._wait_s)
            finally:
                self._is_sending = False  # now the sink has returned

    def _once_all_are_ready(self, consumer: Consumer, unit: _Unit | None, factors: Mapping[ModelTensor, Tensor]) -> list[Gathering]:
        """The shards of ``unit``, packed, when each rank has them. Collective: yes. Raises: the problem of one rank, on every rank"""
        packed: list[Gathering] | None = None
        problem: FSDPError | None = None
        while True:
            state = consumer.state(self._wait_s)
            if state == READY and packed is None:
                try:
                    packed = [] if unit is None else unit.begin(factors)
                except Exception as error:
                    state, problem = FAILED, failure_of("cannot publish", error)
            (state,) = largest_over(self._axes, state, what="agreement to publish")
            if state == FAILED:
                agree_over(self._axes, problem or consumer.problem)
            if state == READY:
                assert packed is not None
                return packed

    @functools.cached_property
    def _wait_s(self) -> float:
        timeouts = [timeout_of_group(group) for group, _ in self._axes]
        return min((each.total_seconds() for each in timeouts if each is not None), default=60.0) / 3

    def _refuse_within_a_send(self) -> None:
        """Other ranks are in that send, so that what a sink raises here reaches them all through it."""
        if self._is_sending:
            raise PublishError(
                "a sink has published the weights that it is being sent",
                expected="one send at a time",
                fix="read the stream that the sink was given; publish again after send has returned",
            )

    def _begin(self) -> None:
        self._refuse_within_a_send()
        reshard(self._model)
        self.version += 1

    def _issued(self, unit: _Unit, factors: Mapping[ModelTensor, Tensor]) -> list[Gathering]:
        return [each.issue() for each in unit.begin(factors)]


@joint
def publish(
    model: nn.Module, *, dtype: torch.dtype | None = None, key_map: KeyMap | None = None, adapters: Adapters = "merged"
) -> Weights:
    """The model's weights for a consumer: whole tensors, one unit after another, each with one all-gather.

    model:   sharded by fsdp2 or by torch's FSDP2, or a module with such modules inside
    dtype:   in which floating-point tensors are sent, before the all-gather; None: their own
    key_map: as for ``save_safetensors``: from the consumer's names to the model's, undone here
    adapters: of a model with LoRA layers of PEFT: "merged" into the weights, under the base model's names; "only" the active adapter,
        under the names in PEFT's files; "separate": all tensors as the model has them

    Parameters and persistent buffers come, tied ones once, under their first name. Each iteration takes the values of its moment.

    Collective: yes, over the meshes of the parameters, and so is each iteration
    Raises:     on every rank: ArgumentError, ParameterError, MaterializationError, CheckpointError for a key map that cannot be undone

    Example:
        weights = fsdp2.publish(model, dtype=torch.bfloat16)
        whole = dict(weights)
    """
    checked_model(model, "publish")
    axes = axes_of(meshes_of(model))
    planned, problem = tried("cannot publish the model", lambda: _planned(model, dtype, key_map, adapters))
    agree_over(axes, problem)
    units, factors, digest = planned[0]
    most, least = largest_over(axes, digest, -digest)
    if most != -least:
        raise ArgumentError(
            "publish got models with other names, shapes, dtypes or placements on other ranks, or other arguments",
            expected="the same model and arguments on every rank",
            fix="build the model and call publish in the same way on every rank",
        )
    return Weights(model, units, factors, axes)


def _planned(model: nn.Module, dtype: torch.dtype | None, key_map: KeyMap | None, adapters: Adapters) -> tuple[list[_Unit], _Unit, int]:
    """The units, the adapters to merge, and a number that two ranks share only if they made the same ones."""
    check_dtype(dtype)
    require("publish", one_of("only", "separate", "merged"), adapters=adapters)
    reshard(model)
    tensors = [each for each in model_tensors(model) if each.persistent]
    refuse_meta(tensors)
    tensors, merges = adapted(model, tensors, adapters)
    outputs = []
    for name, lazy in written_tensors(tensors, key_map).items():
        found = wanted(lazy, Box.whole(lazy.shape), torch.empty(lazy.shape, device="meta"))
        outputs.append(_Output(TensorMeta(name, converted(lazy, dtype), tuple(lazy.shape)), lazy, [source for source, _, _ in found]))
    used = dict.fromkeys(source for output in outputs for source in output.sources)
    units, number_of = _in_units(model, list(used), dtype, merges)
    in_merges = dict.fromkeys(each for listed in merges.values() for merge in listed for each in (merge.a, merge.b))
    factors = _Unit([gather for unit in _in_units(model, list(in_merges), None, {})[0] for gather in unit.gathers])
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
    scalings = [merge.scaling for listed in merges.values() for merge in listed]
    digest = hashlib.sha256(repr((said, scalings, [output.meta for output in outputs])).encode()).digest()
    return units, factors, int.from_bytes(digest[:7], "big")


def _in_units(
    model: nn.Module, tensors: list[ModelTensor], dtype: torch.dtype | None, merges: Merges
) -> tuple[list[_Unit], dict[ModelTensor, int]]:
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
        part = Part(each, wire, merges.get(each, ()))
        if key is None:
            outside += part.nbytes
            key = outside // _NBYTES_OUTSIDE
        by_place = found.setdefault(key, {})
        number_of[each] = list(found).index(key)
        by_place.setdefault(each.mesh if each.mesh is not None else each.local.device, []).append(part)
    return [_Unit([_gather_at(place, parts) for place, parts in each.items()]) for each in found.values()], number_of


def _gather_at(place: object, parts: list[Part]) -> UnitGather:
    return UnitGather(place if isinstance(place, DeviceMesh) else None, parts[0].source.local.device, parts)
