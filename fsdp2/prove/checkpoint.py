"""A checkpoint of the last step, loaded on another number of ranks: the state there must be bitwise what was saved.

A checkpoint has one place for each element, by name and index. Where ranks keep different values under one name (experts that are no
DTensors, say), it has one rank's. Model and optimizer travel by ``torch.distributed.checkpoint``. On the other number of ranks the
script first makes one step, so that its optimizer has a state to load into.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.optim import Optimizer

from .parts import fingerprints

_BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)


def save(model: nn.Module, optimizer: Optimizer, folder: Path) -> dict[str, Any]:
    """What an event says: fingerprints of tensors, other values as text, and why there are none. Collective: yes, of all ranks."""

    def write(state: dict[str, Any], group: Any) -> None:
        state_dict_saver.save(state, checkpoint_id=folder, process_group=group, no_dist=group is None)

    return _with_state(model, optimizer, write)


def load(model: nn.Module, optimizer: Optimizer, folder: Path) -> dict[str, Any]:
    """The same of the state after loading. Collective: yes, of all ranks."""

    def read(state: dict[str, Any], group: Any) -> None:
        state_dict_loader.load(state, checkpoint_id=folder, process_group=group, no_dist=group is None)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=_BY_NAME)
        state.update(_state(model, optimizer))

    return _with_state(model, optimizer, read)


def _state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    of_model, of_optimizer = get_state_dict(model, optimizer, options=_BY_NAME)
    return {"model": of_model, "optimizer": of_optimizer}


def _with_state(model: nn.Module, optimizer: Optimizer, use: Callable[[dict[str, Any], Any], None]) -> dict[str, Any]:
    state: dict[str, Any] = {}
    group = dist.new_group() if dist.is_initialized() else None  # threads of the script may use the others just now
    parts: tuple[Callable[[], None], ...] = (lambda: state.update(_state(model, optimizer)), lambda: use(state, group))
    for part in parts:
        failure = ""
        try:
            part()
        except Exception as error:  # the calls are torch's, and the modules the user's
            failure = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        failures = [failure]
        if group is not None:
            dist.all_gather_object(failures := [""] * group.size(), failure, group)
        if failure := next(filter(None, failures), ""):
            return {"failure": failure}
    values = {f"{kind} {name}": value for kind, each in state.items() for name, value in each.items()}
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor) and not value.is_complex()}
    numbers = {name: repr(values[name]) for name in values.keys() - tensors.keys()}
    return {"failure": "", "values": fingerprints(tensors.items()), "numbers": numbers}


__all__ = ["load", "save"]
