"""FSDP1's flat parameters: which elements of them are which parameter.

A local state dict has one 1-D tensor for each FSDP instance, ``<module>._flat_param``, without names and shapes. Both are those of
the module's parameters that no FSDP instance below it has, one after another, in the order of ``named_parameters``; so with the
model, or its names and shapes in this order, a reader can take the tensor apart. (The order matters, so the header of a safetensors
file, which is sorted, cannot stand for it.)

Worked example: parameters first.weight (10, 7), first.bias (10,), blocks.0.scale (1,), last.weight (5, 10), and flat parameters
``_flat_param`` and ``blocks.0._flat_param``: elements [0, 70) of the former are first.weight, [70, 80) first.bias, and so on.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ...arguments import checked_path
from ...errors import ArgumentError, got_object
from ..failure import failure
from ..lazy import LazyTensor
from ..named_state import State, clean_name
from .lazy_pieces import Flat, dtype_of
from .shards import Ranks, resolve
from .source import Shapes


@dataclass(frozen=True)
class Slot:
    """A parameter's place in a flat one: from element ``start`` on."""

    start: int
    shape: tuple[int, ...]


FLAT_NAMES = ("_flat_param", "flat_param")


def write_shapes(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write names and shapes of the model's parameters, in order, as JSON: what local state dicts of FSDP1 need to be read.

    model: not wrapped, as it was before FSDP1; may be on the meta device

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
    """``model`` with parameters in place of flat ones, in the order of ``shapes``; the rest behind them."""
    units = units_of(model, shapes)
    found: State = {name: Flat((model[flat],), slot.start, slot.shape) for flat, slots in units.items() for name, slot in slots.items()}
    found |= {name: resolve(each, shapes.get(name), name) for name, each in model.items() if name not in units and name not in found}
    return {name: found[name] for name in [*shapes, *found] if name in found}


def unflattened_optimizer(optimizer: State, model: State, shapes: Shapes) -> State:
    """The state by name, from each rank's ``optimizer.state_dict()``: of flat parameters, or of its parts of the original ones."""
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
            state[name] = {key: _part(value, slot, total, f"{name}.{key}") for key, value in values.items()}
    groups = [
        group | {"params": [name for number in group["params"] for name in slots_of[number]]} for group in optimizer["param_groups"]
    ]
    return {"state": state, "param_groups": groups}


def _part(value: Any, slot: Slot, total: int, key: str) -> Any:
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
    return Flat(tuple(part for part in parts if part.shape[0]), slot.start, slot.shape)
