"""One state from the files of many ranks: FSDP1's local and sharded state dicts, FSDP2's, and full ones of every rank.

A ShardedTensor records the position of its shards, a DTensor its mesh, placements and coordinate; both are read as
inert objects, without process group or mesh. Plain tensors of several ranks stay ``Ranks`` until the whole tensor's
shape is known.

A local state dict of FSDP1 has one 1-D tensor per FSDP instance, ``<module>._flat_param``, without names and shapes. It
concatenates the module's parameters, except those of FSDP instances below it, in the order of ``named_parameters``; so
a reader needs the model, or its names and shapes in this order. (A safetensors header will not do, because it is
sorted.)

Worked examples: rank 0 has rows [0, 5) of a (9, 4) ShardedTensor, rank 1 rows [5, 9): an Assembled (9, 4) of two stored boxes. Of
parameters first.weight (10, 7), first.bias (10,), blocks.0.scale (1,), last.weight (5, 10), and flat parameters ``_flat_param`` and
``blocks.0._flat_param``, elements [0, 70) of the former are first.weight, [70, 80) first.bias, and so on.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ...arguments import checked_path
from ...errors import ArgumentError, got_object
from ..failures import failure
from ..inert_pickle import Inert
from ..lazy_tensors import Assembled, LazyTensor, Narrowed, State, dtype_of, slice_of
from ..shard_geometry import Box, Cut, cover_problem, in_order, local_shape_of, pieces_of
from ..training_state import clean_name
from .source import Shapes, named


@dataclass(frozen=True)
class Ranks:
    """Plain tensors that several ranks saved under one name, in order of rank."""

    values: tuple[LazyTensor, ...]

    @property
    def are_alike(self) -> bool:
        return len({value.shape for value in self.values}) == 1


@dataclass(frozen=True)
class _Shard:
    """A shard of a tensor: its box, values and file."""

    box: Box
    value: LazyTensor
    path: Path


def is_sharded(value: Any) -> bool:
    return isinstance(value, Inert) and value.path.rpartition(".")[2] in ("ShardedTensor", "DTensor")


def merge(files: Sequence[tuple[Path, Any]], key: str = "") -> Any:
    """Merge the trees of all ranks into one.

    files:  of each rank with this key, in order
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
    """The whole tensor of ``Ranks``, which are its parts or copies; anything else unchanged.

    shape: of the whole tensor; None if unknown: then they must be copies
    Raises: CheckpointError naming ``key``
    """
    if not isinstance(value, Ranks):
        return value
    first = value.values[0]
    if value.are_alike and shape in (None, first.shape):
        return first
    numels = [math.prod(each.shape) for each in value.values]
    if shape is not None and sum(numels) == math.prod(shape) and all(len(each.shape) == 1 for each in value.values):
        return slice_of(value.values, 0, shape)
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
        expected=f"the same as in {files[0][0].name}: the files of all ranks of one save",
        fix="remove the files of other saves",
        file=path,
        key=key,
    )


_Found = tuple[tuple[int, ...], list[_Shard], dict[Box, str]]


def _of_sharded_tensor(value: Inert, path: Path) -> _Found:
    """The shape, this file's shards, and the boxes of all ranks' shards with their ranks."""
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
    """The saving rank's coordinate in its mesh, and the mesh's shape, as several torch versions save them."""
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


# --- flat parameters --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slot:
    """A parameter's place in a flat parameter: from element ``start`` on."""

    start: int
    shape: tuple[int, ...]


FLAT_NAMES = ("_flat_param", "flat_param")


def write_shapes(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write names and shapes of the model's parameters, in order, as JSON, for reading local state dicts of FSDP1.

    model: unwrapped, as before FSDP1; may be on the meta device

    Example:
        if dist.get_rank() == 0:
            fsdp2.checkpoint.write_shapes(net, folder / "shapes.json")
    """
    given: Any = model
    if not isinstance(given, nn.Module):
        raise ArgumentError(got_object("write_shapes", model), expected="an nn.Module", fix="pass the model itself")
    checked_path("write_shapes", "path", path).write_text(
        json.dumps({name: list(shape) for name, shape in _of_model(model).items()}, indent=1) + "\n"
    )


def _of_model(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {clean_name(name): tuple(param.shape) for name, param in model.named_parameters()}


def shapes_of(given: nn.Module | Shapes | str | os.PathLike[str] | None) -> Shapes | None:
    """Names and shapes of parameters from a model, a mapping, or a JSON file. Raises: CheckpointError"""
    if given is None:
        return None
    if isinstance(given, nn.Module):
        return _of_model(given)
    fields: Any = given
    if isinstance(given, (str, os.PathLike)):
        try:
            fields = json.loads(Path(given).read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise failure(f"{given} cannot be read: {error}", expected="a JSON object of names to shapes", file=str(given)) from error
    if not isinstance(fields, dict) or not all(
        isinstance(shape, (list, tuple)) and all(type(size) is int and size >= 0 for size in shape) for shape in fields.values()
    ):
        raise failure(f"shapes are {str(fields)[:100]}", expected='names to shapes: {"head.weight": [10, 4]}', fix="see write_shapes")
    return {name: tuple(shape) for name, shape in fields.items()}


def has_flat_params(model: State) -> bool:
    return any(name.rpartition(".")[2] in FLAT_NAMES for name in model)


def units_of(model: State, shapes: Shapes) -> dict[str, dict[str, Slot]]:
    """Where the parameters of each flat parameter are in it. Raises: CheckpointError if they do not fill it"""
    prefixes = {name.rpartition(".")[0]: name for name in model if name.rpartition(".")[2] in FLAT_NAMES}
    owned: dict[str, Shapes] = {name: {} for name in prefixes.values()}
    for name, shape in shapes.items():
        parts = name.split(".")[:-1]
        owner = next((prefixes[each] for at in range(len(parts), -1, -1) if (each := ".".join(parts[:at])) in prefixes), None)
        if owner is not None:
            owned[owner] = {**owned[owner], name: shape}
    return {flat: _slots(flat, model[flat], params, model) for flat, params in owned.items()}


def _slots(flat: str, value: LazyTensor, params: Shapes, model: State) -> dict[str, Slot]:
    """The slots. With ``use_orig_params`` each begins at a multiple of 16 bytes, and the whole is padded to a multiple of the ranks."""
    # FSDP was told to ignore parameters that the model's state has as well.
    others = {name: shape for name, shape in params.items() if name not in model}
    aligned = _laid_out(params, 16 // dtype_of(value).itemsize)
    found = value.shape[0]
    for slots, padding in ((_laid_out(others, 1), 1), (_laid_out(params, 1), 1), (aligned, sum(1 for _ in value.stored()))):
        end = max((slot.start + math.prod(slot.shape) for slot in slots.values()), default=0)
        if end <= found < end + padding:
            return slots
    raise failure(
        f"{flat} has {found} elements, its parameters in the given shapes have {sum(map(math.prod, params.values()))}",
        items=[f"{name} {shape}" for name, shape in params.items()][:20],
        expected="the shapes of the model that was saved, in the order of named_parameters(), tied ones once",
        fix="pass the model as it was before FSDP1",
        key=flat,
    )


def _laid_out(params: Shapes, align: int) -> dict[str, Slot]:
    slots, at = {}, 0
    for name, shape in params.items():
        at = -(-at // align) * align
        slots[name] = Slot(at, shape)
        at += math.prod(shape)
    return slots


def unflattened(model: State, shapes: Shapes) -> State:
    """``model`` with parameters in place of flat ones, in the order of ``shapes``, then the rest."""
    units = units_of(model, shapes)
    placed = [(model[key], name, slot) for key, slots in units.items() for name, slot in slots.items()]
    found: State = {name: slice_of((whole,), slot.start, slot.shape) for whole, name, slot in placed}
    found |= {name: resolve(each, shapes.get(name), name) for name, each in model.items() if name not in units and name not in found}
    return {name: found[name] for name in [*shapes, *found] if name in found}


def unflattened_optimizer(optimizer: State, model: State, shapes: Shapes) -> State:
    """The state by name, from each rank's ``optimizer.state_dict()``, of flat parameters or shards of originals."""
    count = sum(len(group["params"]) for group in optimizer["param_groups"])
    if count == len(shapes):
        params_of = [{name: Slot(0, shape)} for name, shape in shapes.items()]
    else:
        params_of = list(units_of(model, shapes).values())
    if count != len(params_of):
        raise failure(
            f"the optimizer has {count} parameters, and the model {len(shapes)} in {len(params_of)} flat ones",
            expected="the optimizer of this model: one parameter for each of FSDP1's, in order",
            fix="save it with FSDP.optim_state_dict",
        )
    numbers = [number for group in optimizer["param_groups"] for number in group["params"]]
    slots_of = dict(zip(sorted(numbers), params_of, strict=True))
    state: State = {}
    for number, values in optimizer["state"].items():
        total = max(slot.start + math.prod(slot.shape) for slot in slots_of[number].values())
        for name, slot in slots_of[number].items():
            state[name] = {key: _part_of_flat(value, slot, total, f"{name}.{key}") for key, value in values.items()}
    groups = [
        group | {"params": [name for number in group["params"] for name in slots_of[number]]} for group in optimizer["param_groups"]
    ]
    return {"state": state, "param_groups": groups}


def _part_of_flat(value: Any, slot: Slot, total: int, key: str) -> Any:
    parts: tuple[LazyTensor, ...] = (value,) if isinstance(value, LazyTensor) else value.values if isinstance(value, Ranks) else ()
    if not parts or not parts[0].shape:
        return parts[0] if parts else value
    numel = sum(part.shape[0] for part in parts)
    if not total <= numel <= total + len(parts):  # the last ranks pad
        raise failure(
            f"{key} is in a flat tensor of {numel} elements in {len(parts)} files",
            expected=f"{total} elements: the files of all ranks",
            key=key,
        )
    return slice_of(parts, slot.start, slot.shape)
