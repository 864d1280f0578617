"""``load_safetensors``: from files straight into shards; each rank reads the bytes that it keeps, and gets none from others.

It checks files, headers, names, shapes and dtypes, then gives parameters on the meta device storage, then reads the bytes; those of
parameters that have values into memory aside. Only when every rank has come so far it overwrites these: a disk may fail on one rank
alone, and the others would train on, or wait, without it.

Worked example, 4 ranks, an (8, 1024) fp32 parameter under Shard(0), stored in bf16: rank 1 reads the 4096 bytes of rows [2, 4), and
converts them on the way into its shard.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..arguments import FUNCTION, SWITCH, checked_path, require
from ..core import torch_compat as compat
from ..core.comm.agreement import agree_on_meshes, outermost
from ..core.iteration.unit import Unit
from ..errors import FSDPError, MaterializationError
from ..hangs.joint_calls import joint
from ..materialize import RESET_NAMES, materialize
from .digests import compared, safetensors_parts
from .failures import failure, tried
from .file_reading import ByteReader
from .key_map import KeyMap, Tensors, apply_key_map
from .lazy_tensors import DTYPES, LazyTensor, Stored
from .model_tensors import (
    ModelTensor,
    checked_model,
    give_storage,
    meshes_of,
    model_tensors,
    own_pieces,
    reshard,
    still_on_meta,
    take_storage,
)
from .progress import progress_bar
from .safetensors_files import open_checkpoint
from .shard_geometry import Piece


@dataclass(frozen=True)
class Mismatch:
    """A tensor of the checkpoint that does not fit the model's.

    name, shape, dtype: of the model's parameter or buffer
    stored_shape, stored_dtypes: of the checkpoint's, after the key map
    scale: of a float8 tensor that would be converted without it: the name of the tensor that it would have to be multiplied by
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    stored_shape: tuple[int, ...]
    stored_dtypes: tuple[str, ...]
    scale: str | None = None

    def __str__(self) -> str:
        return f"{self.name}: {self.difference}"

    @property
    def difference(self) -> str:
        ours, theirs = (str(self.dtype).removeprefix("torch."), "/".join(self.stored_dtypes))
        scaled = f", to be scaled by {self.scale}" if self.scale is not None else ""
        return f"{ours} {self.shape} in the model, {theirs} {self.stored_shape} in the checkpoint{scaled}"


@dataclass(frozen=True, repr=False)
class LoadReport:
    """Lists of a load, by the model's names (the first one of tied tensors); the same on every rank, except ``bytes_read``.

    loaded:        read from the checkpoint
    missing:       parameters and persistent buffers that the checkpoint does not have
    unexpected:    names that the checkpoint has after the key map, and the model has not
    mismatched:    of another shape, or of a dtype that cannot be converted
    initialized:   were on the meta device, not in the checkpoint, and have got values by ``init_fn`` or their module's own reset
    uninitialized: still are on the meta device: the first forward refuses them by name
    bytes_read:    of tensors, by this rank
    header_bytes:  of headers and index, by this rank
    """

    loaded: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[Mismatch] = field(default_factory=list)
    initialized: list[str] = field(default_factory=list)
    uninitialized: list[str] = field(default_factory=list)
    bytes_read: int = 0
    header_bytes: int = 0

    def __repr__(self) -> str:
        """Counts, and of what needs a look the first names: a model has hundreds."""
        parts = [f"{len(self.loaded)} loaded"]
        for kind in ("missing", "unexpected", "mismatched", "initialized", "uninitialized"):
            found = getattr(self, kind)
            if found:
                parts.append(f"{len(found)} {kind} ({', '.join(map(str, found[:3]))}{', ...' if len(found) > 3 else ''})")
        return f"LoadReport({'; '.join(parts)}; {self.bytes_read:,} bytes read by this rank)"


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Arguments of ``load_safetensors`` that ``load_checkpoint`` has as well."""

    key_map: KeyMap | None
    strict: bool
    ignore_mismatched: bool
    init_fn: Callable[[nn.Module], object] | None
    device: torch.device | str | None
    in_place: bool
    verify: bool
    progress: bool | None

    @classmethod
    def of(cls, caller: str, given: Mapping[str, Any]) -> LoadOptions:
        """Those among the arguments that ``caller`` was given. Raises: ArgumentError; others check the device and ``key_map``"""
        options = cls(**{each.name: given[each.name] for each in fields(cls)})
        switches = {name: given[name] for name in ("strict", "ignore_mismatched", "in_place", "verify")}
        require(caller, SWITCH, **switches)
        require(caller, SWITCH.or_none, progress=options.progress)
        require(caller, FUNCTION.or_none, init_fn=options.init_fn)
        return options


@joint
def load_safetensors(
    model: nn.Module,
    path_or_index: str | os.PathLike[str],
    *,
    key_map: KeyMap | None = None,
    strict: bool = True,
    ignore_mismatched: bool = False,
    init_fn: Callable[[nn.Module], object] | None = None,
    device: torch.device | str | None = None,
    in_place: bool = False,
    verify: bool = False,
    progress: bool | None = None,
) -> LoadReport:
    """Load a Hugging Face checkpoint into ``model``, sharded (by fsdp2, torch's FSDP2, any DTensors) or not, on the meta device or not.

    path_or_index:     a folder (``model.safetensors``, else ``model.safetensors.index.json`` and what it names), an index, or a file
    key_map:           from the checkpoint's names to the model's: a function, or rules: ``KeyRule``, or (pattern, replacement)
    strict:            raise if a key is missing or unexpected, as ``load_state_dict`` does; else report it
    ignore_mismatched: report tensors of another shape or inconvertible dtype as well, and leave the model's values
    init_fn:           as in ``materialize``: for what is on the meta device and does not come from the checkpoint, for instance
                       non-persistent buffers; None calls the modules' own ``reset_parameters``. Seed all ranks alike before.
                       (Of a transformers model: ``model._init_weights``.)
    device:            for parameters on the meta device that are not sharded; None: the mesh's device, or the default one
    in_place:          read over the values that the model has, without a copy aside: if reading fails, it is left partly loaded
    verify:            compare the checkpoint with its digests before, as ``verify`` does; the ranks of one mesh share that work
    progress:          a bar on rank 0; None: after a second, where there is a terminal and rich is installed

    Values are converted to the model's dtypes: floating-point ones to any, integers to wider ones; a float8 tensor with a scale next to
    it (``weight_scale_inv``) to none, since nothing here applies the scale: it is mismatched. Tied parameters are read once, under
    the first of their names that the checkpoint has.

    Reads:      the bytes of this rank's shards. Under Shard(0) exactly these; Shard(dim > 0) and strided shards
                have runs of bytes, of which those less than 16 KiB apart are read with what is between them. A replicated parameter is
                read whole by every rank. In addition, every rank reads all headers.
    Memory:     in addition to the model, two buffers of 16 MiB; while parameters come from the meta device, one group's shard; of what
                has values already, a copy of this rank's shards in host memory, unless ``in_place``.
                No full tensor on any rank, unless a placement replicates it or ``init_fn`` needs it whole
    Collective: yes, over the meshes that the parameters lie on, so that all ranks succeed or all fail: 8 bytes for each mesh axis when
                all has been read, and again when values that the model had are replaced or ``init_fn`` has run. No data travels
                between ranks. A model without DTensors: no.
                And where ``materialize`` is, for what does not come from the checkpoint
    Raises:     CheckpointError (with ``file``, ``key`` and ``report``) on all ranks, whichever it happened on, with the model
                unchanged: parameters on the meta device are there again.
                MaterializationError if strict and something is left that nothing initializes

    Example:
        fsdp2.checkpoint.save_safetensors(model, folder)
        report = fsdp2.checkpoint.load_safetensors(model, folder)
        report.bytes_read, report.missing
    """
    checked_model(model, "load_safetensors")
    options = LoadOptions.of("load_safetensors", locals())

    def opened() -> tuple[Path, Tensors, int]:
        if verify:
            path = checked_path("load_safetensors", "path_or_index", path_or_index)
            compared(path, "safetensors", safetensors_parts(path), share_of(model))
        checkpoint = open_checkpoint(path_or_index)
        return checkpoint.path, dict(checkpoint.tensors), checkpoint.header_bytes

    return load_opened(model, path_or_index, opened, options)


def share_of(model: nn.Module) -> tuple[int, int]:
    """This rank's place among the ranks that load ``model`` together, and their number; (0, 1) if they may not all be there."""
    outer = outermost(meshes_of(model))
    if len(outer) != 1:
        return 0, 1
    ranks = outer[0].mesh.flatten().tolist()
    return ranks.index(dist.get_rank()), len(ranks)


def load_opened(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    opened: Callable[[], tuple[Path, Tensors, int]],
    options: LoadOptions,
) -> LoadReport:
    """Load lazy tensors of any origin; everything else is as in ``load_safetensors``.

    opened: opens ``checkpoint``: its path, its tensors by key, and the number of bytes of headers that were read
    """
    meshes = meshes_of(model)

    def look() -> _Look:
        units = reshard(model)
        tensors = model_tensors(model)
        return _Look(units, tensors, [each for each in tensors if each.is_meta], _device(units, options.device))

    def read() -> tuple[LoadReport, list[tuple[ModelTensor, Tensor]]]:
        path, stored, header_bytes = opened()
        shapes = {name: tuple(each.tensor.shape) for each in at.tensors for name in each.names}
        report = LoadReport(header_bytes=header_bytes)
        matched = _match(at.tensors, apply_key_map(stored, shapes, options.key_map), scales_of(stored), report)
        _refuse(report, path, options)
        new = {id(each) for each in at.on_meta}
        give_storage([each for each, _ in matched], at.units, at.device)
        targets = [(each, lazy, _target(each, options.in_place or id(each) in new)) for each, lazy in matched]
        bytes_read = _read(targets, options.progress)
        return replace(report, bytes_read=bytes_read), [
            (each, to) for each, _, to in targets if not options.in_place and id(each) not in new
        ]

    def hand_out() -> LoadReport:
        with torch.inference_mode(False), torch.no_grad():
            for each, values in aside:
                each.local.copy_(values)
        return _with_the_rest(model, at, report, options)

    what = f"cannot load {checkpoint}"
    with torch.inference_mode(False), torch.no_grad():
        looked, problem = tried(what, look)
        result: list[tuple[LoadReport, list[tuple[ModelTensor, Tensor]]]] = []
        if looked:
            at = looked[0]
            result, problem = tried(what, read)
        try:
            agree_on_meshes(meshes, problem)
        except FSDPError:
            if looked:
                take_storage(at.on_meta, at.units)
            raise
    report, aside = result[0]
    if not aside and not any(still_on_meta(at.tensors)):
        return report
    done, problem = tried(f"{what}, or give the rest of the model values", hand_out)
    agree_on_meshes(meshes, problem)
    return done[0]


@dataclass(frozen=True)
class _Look:
    """The model's units and tensors; ``device`` is the device of tensors that are not sharded."""

    units: list[Unit]
    tensors: list[ModelTensor]
    on_meta: list[ModelTensor]
    device: torch.device


def _target(each: ModelTensor, in_place: bool) -> Tensor:
    """The tensor into which this rank's part is read: the part itself, or host memory aside."""
    return each.local if in_place else torch.empty_like(each.local, device="cpu")


def _match(
    tensors: Sequence[ModelTensor], stored: Tensors, scales: Mapping[Place, str], report: LoadReport
) -> list[tuple[ModelTensor, LazyTensor]]:
    """Which stored tensor goes into which of the model's; fills in all lists of names of ``report``."""
    matched = []
    unexpected = dict(stored)
    for each in tensors:
        if not each.persistent:
            continue
        known = [name for name in each.names if name in stored]
        for name in known:
            del unexpected[name]
        if not known:
            report.missing.append(each.name)
            continue
        lazy = stored[known[0]]
        dtypes = tuple(dict.fromkeys(part.entry.dtype for part in lazy.stored()))
        shape, dtype = tuple(each.tensor.shape), each.tensor.dtype
        scale = scale_lost(lazy, dtype, scales)
        if lazy.shape != shape or not all(can_convert(stored_dtype, dtype) for stored_dtype in dtypes) or scale is not None:
            report.mismatched.append(Mismatch(each.name, shape, dtype, lazy.shape, dtypes, scale))
            continue
        report.loaded.append(each.name)
        matched.append((each, lazy))
    report.unexpected.extend(unexpected)
    return matched


def can_convert(stored: str, dtype: torch.dtype) -> bool:
    """Whether values of the format's dtype ``stored`` may become ``dtype``: floats any floats, integers those that hold them all."""
    source = DTYPES.get(stored)
    if source is None or source is dtype:
        return source is not None
    if source.is_floating_point or dtype.is_floating_point:
        return source.is_floating_point and dtype.is_floating_point
    if source.is_complex or dtype.is_complex:
        return source.is_complex and dtype.is_complex
    if torch.bool in (source, dtype):
        return False
    narrow, wide = torch.iinfo(source), torch.iinfo(dtype)
    return wide.min <= narrow.min and narrow.max <= wide.max


def _refuse(report: LoadReport, path: Path, options: LoadOptions) -> None:
    problems = {} if options.ignore_mismatched else {each.name: each.difference for each in report.mismatched}
    if options.strict:
        problems |= dict.fromkeys(report.missing, "is not in the checkpoint") | dict.fromkeys(report.unexpected, "is not in the model")
    if not problems:
        return
    error = failure(
        f"{path} does not fit the model: {len(report.missing)} keys missing, {len(report.unexpected)} unexpected, "
        f"{len(report.mismatched)} of another shape or dtype, {len(report.loaded)} fit",
        problems=problems,
        expected="the model's names, shapes and kinds of dtype",
        fix="pass key_map to rename, strict=False to take what there is, or ignore_mismatched=True; nothing was changed",
        file=path,
    )
    error.report = report
    raise error


def _device(units: Sequence[Unit], device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    return units[0].device if units else torch.device(compat.default_device_type())


def _read(targets: Sequence[tuple[ModelTensor, LazyTensor, Tensor]], progress: bool | None) -> int:
    """Read this rank's pieces of each tensor into its target, in the order of the files; returns the number of bytes."""
    work: list[tuple[LazyTensor, Tensor, list[Piece]]] = [(lazy, local, own_pieces(each.tensor)) for each, lazy, local in targets]
    work.sort(key=lambda item: min((str(stored.path), stored.entry.offset) for stored in item[0].stored()))
    total = sum(piece.box.numel * local.itemsize for _, local, pieces in work for piece in pieces)
    with ByteReader() as reader, progress_bar("loading", total, progress) as advance:
        for lazy, local, pieces in work:
            for piece in pieces:
                lazy.read(piece.box, local[piece.local.slices], reader)
                advance(piece.box.numel * local.itemsize)
        return reader.bytes_read


def _with_the_rest(model: nn.Module, at: _Look, report: LoadReport, options: LoadOptions) -> LoadReport:
    """Let ``init_fn`` write what the checkpoint does not have."""
    todo = list(still_on_meta(at.tensors))
    if not todo:
        return report
    try:
        materialize(model, options.init_fn or _reset_if_it_can, device=at.device)
    except MaterializationError:
        if options.strict:
            raise
    left = set(still_on_meta(at.tensors))
    initialized = [name for name in todo if name not in left]
    return replace(report, initialized=initialized, uninitialized=[name for name in todo if name in left])


def _reset_if_it_can(module: nn.Module) -> None:
    """What ``materialize`` does by default, but for modules that cannot: what these own is named at the end."""
    for name in RESET_NAMES:
        method = getattr(module, name, None)
        if callable(method):
            method()
            return


# --- scales of float8 tensors -----------------------------------------------------------------------------------------------------


Place = tuple[str, int]
"""A file, and where in it a tensor begins."""


def place_of(stored: Stored) -> Place:
    return str(stored.path), stored.entry.offset


def scales_of(tensors: Mapping[str, LazyTensor]) -> dict[Place, str]:
    """The name of the scale of each float8 tensor that has one: programs name it in many ways, all with "scale", and in its module."""
    found: dict[Place, str] = {}
    scales: dict[str, list[str]] = {}  # by the module, or the tensor, that they are in
    for name in tensors:
        parent, _, last = name.rpartition(".")
        if "scale" in last.lower():
            scales.setdefault(parent, []).append(name)
    for name, lazy in tensors.items():
        near = [each for each in (*scales.get(name, ()), *scales.get(name.rpartition(".")[0], ())) if each != name]
        if near:
            scale = next((each for each in near if each.startswith(name)), near[0])
            found |= {place_of(part): scale for part in lazy.stored() if is_float8(DTYPES.get(part.entry.dtype))}
    return found


def is_float8(dtype: torch.dtype | None) -> bool:
    return dtype is not None and dtype.is_floating_point and dtype.itemsize == 1


def scale_lost(lazy: LazyTensor, dtype: torch.dtype, scales: Mapping[Place, str]) -> str | None:
    """The name of the scale without which ``lazy`` would be converted to ``dtype``, if there is one."""
    lost = (scales.get(place_of(part)) for part in lazy.stored() if DTYPES.get(part.entry.dtype) is not dtype)
    return next((scale for scale in lost if scale is not None), None)
