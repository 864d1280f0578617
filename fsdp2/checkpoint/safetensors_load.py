"""``load_safetensors``: from files straight into shards. Each rank reads the bytes it keeps, and ranks send each other none.

It checks files, headers, names, shapes and dtypes, allocates parameters on the meta device, then reads. Parameters that
already have values are read into a copy first and overwritten only when every rank has read its own: a disk may fail on
one rank alone.

Worked example, 4 ranks, an (8, 1024) fp32 parameter under Shard(0), stored in bf16: rank 1 reads the 4096 bytes of rows [2, 4), and
converts them on the way into its shard.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..arguments import FUNCTION, SWITCH, checked_path, require
from ..core.comm.agreement import agree_on_meshes, outermost
from ..core.iteration.unit import Unit
from ..errors import FSDPError, MaterializationError
from ..hangs.joint_calls import joint
from ..materialize import RESET_NAMES, materialize
from ..torch_names import torch_tensors
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
    note_load,
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
    stored_shape, stored_dtypes: of the checkpoint's tensor, after the key map
    scale: for a float8 tensor that would be converted without its scale: the name of that scale
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
    """What a load did, by the model's names (the first of tied tensors); equal on all ranks, except ``bytes_read``.

    loaded:        read from the checkpoint
    missing:       parameters and persistent buffers that are not in the checkpoint
    unexpected:    names in the checkpoint, after the key map, that are not in the model
    mismatched:    with another shape, or a dtype that cannot be converted
    initialized:   on the meta device and not in the checkpoint: ``init_fn`` or the module's own reset gave them values
    uninitialized: still on the meta device: the first forward raises an error that names them
    bytes_read:    bytes of tensors that this rank read
    header_bytes:  bytes of headers and index that this rank read
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
        """Counts, and the first names of each list that needs a look."""
        parts = [f"{len(self.loaded)} loaded"]
        for kind in ("missing", "unexpected", "mismatched", "initialized", "uninitialized"):
            found = getattr(self, kind)
            if found:
                parts.append(f"{len(found)} {kind} ({', '.join(map(str, found[:3]))}{', ...' if len(found) > 3 else ''})")
        return f"LoadReport({'; '.join(parts)}; {self.bytes_read:,} bytes read by this rank)"


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """The arguments that ``load_safetensors`` and ``load_checkpoint`` share; the former documents them."""

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
        """Pick and check them among ``given``, the arguments of ``caller``. Raises: ArgumentError"""
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

    path_or_index:     a folder (with ``model.safetensors`` or ``model.safetensors.index.json``), an index, or a file
    key_map:           from the checkpoint's names to the model's: a function, or rules: ``KeyRule``, or (pattern, replacement)
    strict:            raise an error if a key is missing or unexpected, as ``load_state_dict`` does; else report it
    ignore_mismatched: report tensors with another shape or an incompatible dtype too, and keep the model's values
    init_fn:           as in ``materialize``: for tensors on the meta device that are not in the checkpoint, such as
                       non-persistent buffers; None calls the modules' own ``reset_parameters``. Give all ranks the same
                       seed first. For a transformers model: ``model._init_weights``
    device:            for unsharded parameters on the meta device; None: the mesh's device, or the default one
    in_place:          read directly over the model's values, without a copy: a failed read leaves the model partly
                       loaded
    verify:            compare the checkpoint with its digests first, as ``verify`` does; the ranks of one mesh share
                       the work
    progress:          a bar on rank 0; None: after a second, on a terminal, if rich is installed

    Values are converted to the model's dtypes: floating-point ones to any, integers to wider ones. A float8 tensor with
    a scale next to it (``weight_scale_inv``) is never converted, because the scale would not be applied: it counts as
    mismatched. Tied parameters are read once, under the first of their names in the checkpoint.

    Reads:      this rank's shards and all headers. Shard(0) reads exactly its bytes; Shard(dim > 0) and strided shards
                also read gaps of less than 16 KiB between their runs. Every rank reads replicated parameters whole.
    Memory:     besides the model, two buffers of 16 MiB; one group's shard while parameters leave the meta device; a
                copy in host memory of this rank's shards that already have values, unless ``in_place``. No full tensor
                on any rank, unless a placement replicates it or ``init_fn`` needs it whole
    Collective: yes, over the parameters' meshes, so that all ranks succeed or all fail: 8 bytes per mesh axis after
                reading, and again after values are replaced or ``init_fn`` has run. No data travels between ranks. For
                a model without DTensors: no. As ``materialize``, for tensors that are not in the checkpoint
    Raises:     CheckpointError (with ``file``, ``key`` and ``report``) on all ranks, with the model unchanged:
                parameters that were on the meta device are there again. MaterializationError if strict and nothing
                initializes some tensor

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
    """This rank's index among the ranks that load ``model`` together, and their number; (0, 1) if some may be absent."""
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
    """Load lazy tensors of any origin, otherwise as ``load_safetensors``.

    opened: opens ``checkpoint``; returns its path, its tensors by key, and the bytes of headers that were read
    """
    meshes = meshes_of(model)
    units: list[Unit] = []
    tensors: list[ModelTensor] = []
    on_meta: list[ModelTensor] = []
    aside: list[tuple[ModelTensor, Tensor]] = []  # values in host memory, where the model has some already

    def read() -> LoadReport:
        units.extend(reshard(model))
        tensors.extend(model_tensors(model))
        on_meta.extend(each for each in tensors if each.is_meta)
        device = _device(units, options.device)
        path, stored, header_bytes = opened()
        shapes = {name: tuple(each.tensor.shape) for each in tensors for name in each.names}
        report = LoadReport(header_bytes=header_bytes)
        named = apply_key_map(stored, shapes, options.key_map)
        taken = {part for name, lazy in named.items() if name in shapes for part in lazy.stored()}
        matched = _match(tensors, named, scales_of(stored, taken), report)
        _refuse(report, path, options)
        in_place = {id(each) for each in (tensors if options.in_place else on_meta)}
        give_storage([each for each, _ in matched], units, device)
        if options.in_place:
            note_load([each for each, _ in matched])
        targets = [
            (each, lazy, each.local if id(each) in in_place else torch.empty_like(each.local, device="cpu")) for each, lazy in matched
        ]
        bytes_read = _read(targets, options.progress)
        aside.extend((each, values) for each, _, values in targets if id(each) not in in_place)
        return replace(report, bytes_read=bytes_read)

    def hand_out() -> LoadReport:
        with torch.inference_mode(False), torch.no_grad():
            note_load([each for each, _ in aside])
            for each, values in aside:
                each.local.copy_(values)
        return _with_the_rest(model, tensors, _device(units, options.device), result[0], options)

    what = f"cannot load {checkpoint}"
    with torch.inference_mode(False), torch.no_grad():
        result, problem = tried(what, read)
        try:
            agree_on_meshes(meshes, problem)
        except FSDPError:
            take_storage(on_meta, units)
            raise
    if not aside and not any(still_on_meta(tensors)):
        return result[0]
    done, problem = tried(f"{what}, or give the rest of the model values", hand_out)
    agree_on_meshes(meshes, problem)
    return done[0]


def _match(
    tensors: Sequence[ModelTensor], stored: Tensors, scales: Mapping[Stored, str], report: LoadReport
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
        dtypes = tuple(dict.fromkeys(part.dtype for part in lazy.stored()))
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
        expected="the model's names and shapes, and dtypes that can be converted",
        fix="pass key_map to rename, strict=False to load what fits, or ignore_mismatched=True; nothing was changed",
        file=path,
    )
    error.report = report
    raise error


def _device(units: Sequence[Unit], device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    return units[0].device if units else torch.device(torch_tensors.default_device_type())


def _read(targets: Sequence[tuple[ModelTensor, LazyTensor, Tensor]], progress: bool | None) -> int:
    """Read this rank's pieces of each tensor into its target, in the order of the files; returns the number of bytes."""
    work: list[tuple[LazyTensor, Tensor, list[Piece]]] = [(lazy, local, own_pieces(each.tensor)) for each, lazy, local in targets]
    work.sort(key=lambda item: min((str(stored.path), stored.offset) for stored in item[0].stored()))
    total = sum(piece.box.numel * local.itemsize for _, local, pieces in work for piece in pieces)
    with ByteReader() as reader, progress_bar("loading", total, progress) as advance:
        for lazy, local, pieces in work:
            for piece in pieces:
                lazy.read(piece.box, local[piece.local.slices], reader)
                advance(piece.box.numel * local.itemsize)
        return reader.bytes_read


def _with_the_rest(
    model: nn.Module, tensors: Sequence[ModelTensor], device: torch.device, report: LoadReport, options: LoadOptions
) -> LoadReport:
    """Let ``init_fn`` initialize tensors that are not in the checkpoint."""
    todo = list(still_on_meta(tensors))
    if not todo:
        return report
    try:
        materialize(model, options.init_fn or _reset_if_it_can, device=device)
    except MaterializationError:
        if options.strict:
            raise
    left = set(still_on_meta(tensors))
    initialized = [name for name in todo if name not in left]
    return replace(report, initialized=initialized, uninitialized=[name for name in todo if name in left])


def _reset_if_it_can(module: nn.Module) -> None:
    """As ``materialize`` by default, but skip modules without a reset; the report lists their tensors."""
    for name in RESET_NAMES:
        method = getattr(module, name, None)
        if callable(method):
            method()
            return


# --- scales of float8 tensors -----------------------------------------------------------------------------------------------------


_NAMES_OF_SCALES = ("scale", "amax", "absmax")
_DTYPES_OF_SCALES = {"F64", "F32", "F16", "BF16", "F8_E8M0"}


def scales_of(tensors: Mapping[str, LazyTensor], taken: Collection[Stored] | None = None) -> dict[Stored, str]:
    """The name of each float8 tensor's scale, in the same module.

    It has one of the usual names, or begins with the tensor's own, or the model has no place for it and its shape is that of a scale.

    taken: the stored tensors that the model has a place for; None: there is no model
    """
    found: dict[Stored, str] = {}
    by_parent: dict[str, list[str]] = {}  # a module, or a tensor
    for name in tensors:
        by_parent.setdefault(name.rpartition(".")[0], []).append(name)
    for name, lazy in tensors.items():
        parts = [part for part in lazy.stored() if part.dtype in DTYPES and part.dtype.startswith("F8_")]
        if not parts:
            continue
        near = [*by_parent.get(name, ()), *by_parent.get(name.rpartition(".")[0], ())]
        usual = [each for each in near if any(word in each.rpartition(".")[2].lower() for word in _NAMES_OF_SCALES)]
        scales = [each for each in usual or near if each != name and (usual or _may_scale(tensors, each, name, taken))]
        if scales:
            found |= dict.fromkeys(parts, next((each for each in scales if each.startswith(name)), scales[0]))
    return found


def _may_scale(tensors: Mapping[str, LazyTensor], other: str, name: str, taken: Collection[Stored] | None) -> bool:
    """Whether the tensor called ``other``, of no usual name, may be the scale of that called ``name``."""
    parts = list(tensors[other].stored())
    is_its = other.startswith((f"{name}.", f"{name}_"))
    if any(part.dtype not in _DTYPES_OF_SCALES or (taken is not None and part in taken) for part in parts):
        return False
    if "bias" in other.rpartition(".")[2] or not (is_its or taken is not None):
        return False
    shape, dims = iter(tensors[name].shape), [dim for dim in tensors[other].shape if dim != 1]
    fits = all(any(dim == -(-size // -(-size // dim)) for size in shape) for dim in dims)  # rows, columns, or blocks of them
    return other.startswith(f"{name}.") or (fits and math.prod(dims) < math.prod(tensors[name].shape))


def scale_lost(lazy: LazyTensor, dtype: torch.dtype, scales: Mapping[Stored, str]) -> str | None:
    """The name of the scale that converting ``lazy`` to ``dtype`` would lose, if any."""
    lost = (scales.get(part) for part in lazy.stored() if DTYPES.get(part.dtype) is not dtype)
    return next((scale for scale in lost if scale is not None), None)
