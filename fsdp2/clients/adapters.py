"""PEFT's adapters: the entries of the model's state that their files need, and the prompt encoders that PEFT runs.

    with_lora.save_pretrained(folder)    # rank 0 gathers the adapter's 4e6 parameters, not the base model's 8e9

PEFT itself is asked, with tensors without memory in place of the model's. Nothing here gathers or writes.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..core.group.shown_parameters import set_parameter
from ..errors import ModuleError
from ..inspect import units

PROMPTS = "prompt_encoder"
"""The module in which PEFT keeps learned prompts."""


def entries_of_adapters(model: Any, bound: inspect.BoundArguments) -> frozenset[str] | None:
    """Names in ``model.state_dict()`` whose values ``save_pretrained``, called with ``bound``, writes; None: perhaps all.

    Collective: no; one rank may call it alone
    """
    peft = sys.modules.get("peft")
    if peft is None or not getattr(model, "peft_config", None):
        return None
    try:
        stand_ins = _on_one_element(model.state_dict())
        with warnings.catch_warnings(), torch.no_grad(), showing_prompts(model, stand_ins):
            warnings.simplefilter("ignore")  # the call itself repeats them
            written = [
                value
                for adapter in _selected(model, bound)
                for value in peft.get_peft_model_state_dict(model, dict(stand_ins), adapter, **_how(bound)).values()
            ]
    except Exception:  # the call itself raises it
        return None
    known = {_memory(value): name for name, value in stand_ins.items()}
    prompts = {name for name in stand_ins if name.startswith(f"{PROMPTS}.")}
    if not prompts and any(_memory(value) not in known for value in written):
        return None  # PEFT computes it, of entries that only PEFT knows
    return frozenset(prompts | {known[_memory(value)] for value in written if _memory(value) in known})


@contextlib.contextmanager
def showing_prompts(model: nn.Module, whole: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, the prompt encoders have the parameters of ``whole``: PEFT runs the module instead of reading a state.

    Collective: no. Raises: ModuleError if one of them is a unit of its own, which would gather its parameters on all ranks
    """
    encoders = getattr(model, PROMPTS, None) if getattr(model, "peft_config", None) else None
    if not isinstance(encoders, nn.Module):
        yield
        return
    if units(encoders):
        raise ModuleError(
            f"save_pretrained: fully_shard was called on {PROMPTS} itself",
            expected="prompts that belong to the unit of the whole model: PEFT runs their module on rank 0 alone",
            fix=f"call fully_shard on the layers and the whole model, not on {PROMPTS}",
        )
    sharded = {name: param for name, param in encoders.named_parameters() if f"{PROMPTS}.{name}" in whole}
    try:
        for name, param in sharded.items():
            _show(encoders, name, nn.Parameter(whole[f"{PROMPTS}.{name}"], param.requires_grad))
        yield
    finally:
        for name, param in sharded.items():
            _show(encoders, name, param)


def _show(encoders: nn.Module, name: str, param: nn.Parameter) -> None:
    path, _, last = name.rpartition(".")
    set_parameter(encoders.get_submodule(path), last, param)


def _selected(model: Any, bound: inspect.BoundArguments) -> list[str]:
    """The adapters to write: with PEFT those that the caller names, or all; with transformers the active ones."""
    if "selected_adapters" in bound.signature.parameters:
        return bound.arguments.get("selected_adapters") or list(model.peft_config)
    return list(model.active_adapters())


def _how(bound: inspect.BoundArguments) -> dict[str, Any]:
    return {name: value for name, value in bound.arguments.items() if name == "save_embedding_layers"}


def _on_one_element(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Tensors of these shapes, of one element's memory each."""
    return {
        name: torch.empty(1, dtype=value.dtype, device="cpu").expand(value.shape)
        for name, value in state.items()
        if isinstance(value, Tensor)
    }


def _memory(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()
