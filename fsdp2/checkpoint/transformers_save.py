"""The calls of transformers' ``save_pretrained`` that can stream: ``save_safetensors`` would write the same tensors.

transformers itself is asked, with tensors without memory, which tied names it keeps and whether it converts weights.
Any other case is left to transformers. Nothing here gathers or writes.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import FSDPError
from .model_tensors import ModelTensor, model_tensors, reshard
from .safetensors_plan import nbytes_of
from .safetensors_save import save_safetensors

_READ = frozenset({"self", "save_directory", "max_shard_size"})
_WITHOUT_EFFECT = frozenset({"token", "save_peft_format", "save_original_format"})
"""They change nothing about a model that has no adapters, is not converted, and not pushed to the hub."""


@dataclass(frozen=True)
class PlainCall:
    """A call that writes the model unchanged; all ranks run rank 0's."""

    folder: str
    max_shard_size: int | str

    def run(self, model: nn.Module) -> None:
        """Write it. Collective: yes, over all ranks. Raises: as ``save_safetensors``"""
        reshard(model)
        config: Any = model.config
        config.dtype = next((each.tensor.dtype for each in model_tensors(model) if each.tensor.is_floating_point()), None)
        save_safetensors(model, self.folder, self.max_shard_size, config=True)


def plain_call(model: nn.Module, inherited: Callable[..., Any], bound: inspect.BoundArguments) -> PlainCall | None:
    """``inherited``, called with ``bound``, as a stream; None if transformers must see whole tensors. Collective: no."""
    if (inherited.__module__, inherited.__qualname__) != ("transformers.modeling_utils", "PreTrainedModel.save_pretrained"):
        return None  # of a class that writes more, or of another library
    if hasattr(inherited, "__wrapped__") or _asks_for_more(bound) or _is_more_than_its_weights(model):
        return None
    bound.apply_defaults()
    folder, max_shard_size = bound.arguments["save_directory"], bound.arguments["max_shard_size"]
    if not isinstance(folder, str | os.PathLike) or os.path.isfile(folder):
        return None  # transformers says what is wrong with it
    try:
        nbytes_of(max_shard_size)
        reshard(model)
        tensors = [each for each in model_tensors(model) if each.persistent]
    except FSDPError:
        return None
    if not _are_written_as_they_are(model, tensors, converted=bool(bound.arguments["save_original_format"])):
        return None
    return PlainCall(os.fspath(folder), max_shard_size)


def _asks_for_more(bound: inspect.BoundArguments) -> bool:
    for name, value in bound.arguments.items():
        parameter = bound.signature.parameters[name]
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            if value not in ({}, {"safe_serialization": True}):
                return True
        elif name not in _READ | _WITHOUT_EFFECT and value is not parameter.default:
            return True
    return not {"save_directory", "max_shard_size", "save_original_format"} <= bound.signature.parameters.keys()


def _is_more_than_its_weights(model: Any) -> bool:
    """Whether it has adapters, quantized or offloaded weights, code of its own, or weights that transformers leaves out or has cut."""
    marks = ("hf_quantizer", "_hf_peft_config_loaded", "peft_config", "hf_device_map", "_keys_to_ignore_on_save", "_tp_size")
    return any(getattr(model, mark, None) for mark in marks) or model.is_remote_code()


def _are_written_as_they_are(model: nn.Module, tensors: list[ModelTensor], *, converted: bool) -> bool:
    """Whether transformers would write each of ``tensors`` once, by its first name."""
    theirs: Any = sys.modules["transformers.modeling_utils"]
    try:
        if sorted(name for each in tensors for name in each.names) != sorted(model.state_dict()):
            return False
        kept = theirs.remove_tied_weights_from_state_dict(_on_one_element(tensors), model)
        on_meta = {each.name: torch.empty(each.tensor.shape, dtype=each.tensor.dtype, device="meta") for each in tensors}
        reverted = theirs.revert_weight_conversion(model, dict(on_meta)) if converted else on_meta
    except Exception:  # an error, or other names in another version: leave the call to transformers
        return False
    same = kept.keys() == on_meta.keys() == reverted.keys()
    return same and all(reverted[name] is on_meta[name] for name in on_meta)


def _on_one_element(tensors: list[ModelTensor]) -> dict[str, Tensor]:
    """Tensors of these shapes under all names, tied where the model's are, of one element's memory each."""
    stand_ins = [torch.empty(1, dtype=each.tensor.dtype, device="cpu").expand(each.tensor.shape) for each in tensors]
    return {name: stand_in for each, stand_in in zip(tensors, stand_ins, strict=True) for name in each.names}
