"""Explains torch's error "got mixed torch.Tensor and DTensor": a sharded parameter met a plain tensor.

torch raises it in C++, for any operator. Nothing here runs before that: the hooks of a module whose forward failed
look at the error, and so does ``fsdp2 run`` when a program ends with one. The explanation is added to the error's text;
its type stays.

The frames that the error passed through show the parameter and the cause. Either a method other than ``forward`` was
called, which runs no hooks; or a module used a weight of another unit; or the program computes with parameters between
steps.
"""

from __future__ import annotations

import linecache
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..core.group.param import ShardedParam
from ..core.iteration.module_state import sharded_parameters, unit_of, unit_with
from ..errors import message

_TORCHS_WORDS = "got mixed torch.Tensor and DTensor"
EXPLAINED = "a sharded parameter met a plain tensor"
_NOT_A_METHOD_OF_THE_USER = ("_call_impl", "_wrapped_call_impl", "__call__", "forward")


def explain_mixed_tensors(error: BaseException | None) -> None:
    """If ``error`` is torch's about mixed tensors, add the parameter's name, why it is sharded now, and the fix."""
    text = str(error)
    if error is None or _TORCHS_WORDS not in text or EXPLAINED in text:
        return
    frames = list(_frames(error))
    sharded = sharded_parameters()
    found = next((sharded[id(each)][0] for frame in frames for each in _at_hand(frame) if id(each) in sharded), None)
    if found is None:
        return
    cause = _cause(found, frames)
    error.args = (
        f"{text}\n"
        + message(
            f"{EXPLAINED}: {found.fqn} {tuple(found.sharded.shape)}, {found.spec.sharded.placements} is sharded here",
            items=[cause.what],
            expected="parameters that are unsharded, as they are in their module's forward and backward, or DTensors on both sides",
            fix=cause.fix,
        ),
    )


_AS_IN_NAMES = str.maketrans({"[": ".", "]": None})
"""``self.layers[0].weight`` in a program is ``layers.0.weight`` among a module's names."""


@dataclass(frozen=True)
class _Cause:
    what: str
    fix: str


def _cause(found: ShardedParam, frames: list[types.FrameType]) -> _Cause:
    unit = unit_with(found)
    owner = type(unit.modules[0]).__name__
    place = unit.fqn or "the root"
    for frame in frames:
        module = frame.f_locals.get("self")
        name = frame.f_code.co_name
        is_method = isinstance(module, nn.Module) and (hasattr(type(module), name) or name in vars(module))
        if is_method and unit_of(module) is unit and name not in _NOT_A_METHOD_OF_THE_USER:  # other functions have a self, too
            return _Cause(
                f"{owner}.{name} of {place} uses it; forward gathers a module's parameters, other methods do not",
                f'fsdp2.register_fsdp_forward_method(module, "{name}") on that module, after fully_shard',
            )
    using = next((frame.f_locals["self"] for frame in frames if isinstance(frame.f_locals.get("self"), nn.Module)), None)
    if using is not None:
        return _Cause(
            f"{type(using).__name__} uses it, while the forward of its unit ({owner}, {place}) is not running",
            f"shard both with one call (fully_shard([a, b])), call {owner} itself, or put unshard() and reshard() of it around the use",
        )
    return _Cause(
        f"{frames[0].f_code.co_name} uses it outside of any module's forward",
        "param.to_local() on both sides to compute with this rank's shard (an EMA), param.full_tensor() for all of it, "
        "fsdp2.checkpoint to load values",
    )


def _frames(error: BaseException) -> Iterator[types.FrameType]:
    """The frames that ``error`` passed through, the innermost first, without ours."""
    traceback, passed = error.__traceback__, []
    while traceback is not None:
        passed.append(traceback.tb_frame)
        traceback = traceback.tb_next
    return reversed(passed)


def _at_hand(frame: types.FrameType) -> Iterator[Any]:
    """The objects that a frame may compute with: variables, items of lists, parameters that the line names."""
    variables = list(frame.f_locals.values())
    for value in variables:
        if isinstance(value, dict):
            yield from value.values()
        elif isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).translate(_AS_IN_NAMES)
    for module in variables:
        if isinstance(module, nn.Module):
            yield from (param for name, param in module.named_parameters() if f".{name}" in line)
