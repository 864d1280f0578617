"""One state out of the files of many ranks: FSDP1's sharded and local state dicts, FSDP2's, and full ones that every rank has saved.

A ShardedTensor tells where its shards lie, a DTensor its mesh, placements and coordinate; both are read as inert objects, without
process group or mesh. Plain tensors of several ranks stay a ``Ranks``, until the reader knows what they are parts of.

Worked example: rank 0 has rows [0, 5) of a (9, 4) ShardedTensor, rank 1 rows [5, 9): an Assembled (9, 4) of two stored boxes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..boxes import Box, Cut, cover_problem, in_order, local_shape_of, pieces_of
from ..failure import failure
from ..lazy import LazyTensor, Narrowed
from .inert_pickle import Inert
from .lazy_pieces import Assembled, Flat, dtype_of
from .source import named


@dataclass(frozen=True)
class Ranks:
    """Plain tensors that several ranks have saved under one name, in the order of the ranks."""

    values: tuple[LazyTensor, ...]

    @property
    def are_alike(self) -> bool:
        return len({value.shape for value in self.values}) == 1


@dataclass(frozen=True)
class _Shard:
    """A part of a tensor: its box, and its file."""

    box: Box
    value: LazyTensor
    path: Path


def is_sharded(value: Any) -> bool:
    return isinstance(value, Inert) and value.path.rpartition(".")[2] in ("ShardedTensor", "DTensor")


def merge(files: Sequence[tuple[Path, Any]], key: str = "") -> Any:
    """The trees of all ranks as one.

    files:  of each rank that has this key, in order
    Raises: CheckpointError naming key and file
    """
    first = files[0][1]
    if is_sharded(first):
        return _assembled(files, key)
    if isinstance(first, LazyTensor):
        values = tuple(named(value, key) for _, value in files if isinstance(value, LazyTensor))
        return values[0] if len(files) == 1 or not first.shape else Ranks(values)
    if isinstance(first, dict):
        together = [(path, value) for path, value in files if isinstance(value, dict)]
        keys = dict.fromkeys(each for _, value in together for each in value)
        return {
            each: merge([(path, value[each]) for path, value in together if each in value], f"{key}.{each}" if key else str(each))
            for each in keys
        }
    if isinstance(first, (list, tuple)):
        same = [(path, value) for path, value in files if isinstance(value, (list, tuple)) and len(value) == len(first)]
        return [merge([(path, value[index]) for path, value in same], f"{key}.{index}") for index in range(len(first))]
    return first


def resolve(value: Any, shape: tuple[int, ...] | None, key: str) -> Any:
    """The tensor that the ``Ranks`` are parts or copies of; anything else as it is.

    shape: of the whole tensor; None if it is unknown: then they have to be copies
    Raises: CheckpointError naming ``key``
    """
    if not isinstance(value, Ranks):
        return value
    first = value.values[0]
    if value.are_alike and shape in (None, first.shape):
        return first
    numels = [math.prod(each.shape) for each in value.values]
    if shape is not None and sum(numels) == math.prod(shape) and all(len(each.shape) == 1 for each in value.values):
        return Flat(tuple(each for each, numel in zip(value.values, numels, strict=True) if numel) or value.values[:1], 0, shape)
    path = next(first.stored()).path
    if shape is None:
        raise failure(
            f"{key} is {' and '.join(str(each.shape) for each in value.values)} in the ranks' files: parts of a flattened parameter",
            expected="the parameters' shapes, which a local state dict does not have",
            fix="pass shapes: the model (also on the meta device), or a JSON file of its names and shapes (write_shapes)",
            file=path,
            key=key,
        )
    raise failure(
        f"{key} has {sum(numels)} elements in {len(numels)} files",
        expected=f"{math.prod(shape)} elements, shape {shape}: the files of all ranks, and the shapes of this model",
        file=path,
        key=key,
    )


def _assembled(files: Sequence[tuple[Path, Any]], key: str) -> LazyTensor:
    shapes: dict[tuple[int, ...], Path] = {}
    shards: dict[Box, _Shard] = {}
    expected: dict[Box, str] = {}
    for path, value in files:
        if not is_sharded(value):
            raise _mixed(key, files, path, f"a {type(value).__name__} and no sharded tensor")
        shape, own, known = _of_sharded_tensor(value, path) if value.path.endswith(".ShardedTensor") else _of_dtensor(value, path, key)
        shapes.setdefault(shape, path)
        if len(shapes) > 1:
            raise _mixed(key, files, path, f"shape {shape}")
        expected |= known
        shards |= {each.box: each for each in own if each.box.numel > 0}
    shape = next(iter(shapes))
    dtypes = {dtype_of(each.value): each.path for each in shards.values()}
    if len(dtypes) > 1:
        raise _mixed(key, files, list(dtypes.values())[-1], f"dtype {list(dtypes)[-1]}")
    missing = [f"{box.start} to {box.stop}: {who}" for box, who in expected.items() if box.numel > 0 and box not in shards]
    problem = cover_problem(shape, list(shards))
    if missing or problem is not None:
        raise failure(
            f"{key} {shape} is not whole: {problem or 'parts are missing'} in {len(files)} files",
            items=missing or [f"{each.box.start} to {each.box.stop}: {each.path.name}" for each in shards.values()],
            expected="every element once: the files of all ranks of one save",
            fix="add the missing ranks' files, and remove those of other saves",
            file=files[0][0],
            key=key,
        )
    if not shards:
        raise failure(f"{key} {shape} has no elements", expected="at least one", fix="save the model without it", key=key)
    return Assembled(shape, tuple((box, named(each.value, key)) for box, each in shards.items()))


def _mixed(key: str, files: Sequence[tuple[Path, Any]], path: Path, got: str) -> Exception:
    return failure(
        f"{key} is not the same tensor in all files: {path} has {got}",
        expected=f"what {files[0][0].name} has: the files of all ranks of one save",
        fix="remove the files of other saves",
        file=path,
        key=key,
    )


_Found = tuple[tuple[int, ...], list[_Shard], dict[Box, str]]


def _of_sharded_tensor(value: Inert, path: Path) -> _Found:
    """The shape, the shards in this file, and the boxes of all ranks' shards with their ranks."""
    local, metadata = value.state[0], value.state[1].fields
    shards = [_Shard(_box(each.fields["metadata"]), each.fields["tensor"], path) for each in local]
    expected = {_box(each): f"of rank {each.fields['placement'].fields.get('_rank')}" for each in metadata["shards_metadata"]}
    return tuple(metadata["size"]), shards, expected


def _box(metadata: Inert) -> Box:
    start, sizes = metadata.fields["shard_offsets"], metadata.fields["shard_sizes"]
    return Box(tuple(start), tuple(at + size for at, size in zip(start, sizes, strict=True)))


def _of_dtensor(value: Inert, path: Path, key: str) -> _Found:
    spec = value.fields["_spec"].fields
    local = value.fields["_local_tensor"]
    shape = tuple(spec["tensor_meta"].args[0])
    coordinate, sizes = _coordinate(spec["mesh"])
    cuts = []
    for axis, placement in enumerate(spec["placements"]):
        kind = placement.path.rpartition(".")[2]
        if kind in ("Shard", "_StridedShard"):
            fields = placement.fields
            dim = fields["dim"] if "dim" in fields else placement.args[0]
            cuts.append(Cut(dim % len(shape), sizes[axis], coordinate[axis], fields.get("split_factor", 1)))
        elif kind != "Replicate":
            raise failure(f"{key} has placement {kind}", expected="Shard or Replicate", fix="redistribute it", file=path, key=key)
    ordered = in_order(cuts)
    if local_shape_of(shape, ordered) != local.shape:
        raise failure(
            f"{key} has a shard of shape {local.shape} in {path}",
            expected=f"{local_shape_of(shape, ordered)} at {coordinate} of a mesh {sizes}, as its placements say",
            file=path,
            key=key,
        )
    shards = [_Shard(piece.box, _part(local, piece.local), path) for piece in pieces_of(shape, ordered)]
    return shape, shards, {}


def _part(whole: LazyTensor, box: Box) -> LazyTensor:
    for dim, (start, stop) in enumerate(zip(box.start, box.stop, strict=True)):
        if stop - start < whole.shape[dim]:
            whole = Narrowed(whole, dim, start, stop - start)
    return whole


def _coordinate(mesh: Inert) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The saving rank's place in its mesh, and the mesh's shape, in the forms of several torch versions."""
    fields = mesh.fields
    coordinate = fields.get("_coordinate_on_dim")
    layout = fields.get("_layout")
    if isinstance(layout, Inert) and "axes" in layout.fields:
        sizes = tuple(math.prod(_flat(axis.fields["shape"])) for axis in layout.fields["axes"])
    elif isinstance(layout, Inert):
        found = layout.fields.get("shape", layout.args[0] if layout.args else None)
        sizes = tuple(math.prod(_flat(size)) for size in (found if isinstance(found, (tuple, list)) else (found,)))
    else:
        sizes = fields["mesh"].shape
    sizes = tuple(sizes)
    if not all(type(size) is int and size > 0 for size in sizes):
        raise failure(f"a DTensor was saved on a mesh of shape {str(sizes)[:100]}", expected="positive numbers of ranks")
    if coordinate is None:
        raise failure("a DTensor was saved by a rank outside of its mesh", expected="files of the ranks that hold the model")
    return tuple(coordinate), sizes


def _flat(value: Any) -> list[int]:
    return [each for part in value for each in _flat(part)] if isinstance(value, (tuple, list)) else [value]
