"""Parameters that are nobody's: registered below a sharded module after ``fully_shard`` was called on it.

They are looked for at the first forward, and again at the first that follows when something was registered on a module that is managed.
It refuses to know what is done with parameters that are somebody's.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_module_registration_hook, register_module_parameter_registration_hook

from ...errors import message
from .. import torch_compat as compat
from ..group.param import sharded_from
from ..iteration.module_state import unit_of
from ..iteration.unit import Unit


class _Registrations:
    """How often something was registered on a managed module; our own exchanges of parameters do not count."""

    def __init__(self) -> None:
        self.count = 0
        self._watching = False

    def watch(self) -> None:
        """From the first ``fully_shard`` on. Compilers never see it: sharded modules are not built in what they trace."""
        if not self._watching:
            self._watching = True
            register_module_parameter_registration_hook(self._note_parameter)
            register_module_module_registration_hook(self._note_module)

    def _note_parameter(self, module: nn.Module, name: str, param: Any) -> None:
        if "_is_fsdp_managed_module" in vars(module) and not (isinstance(param, DTensor) or sharded_from(param) is not None):
            self.count += 1

    def _note_module(self, module: nn.Module, name: str, child: Any) -> None:
        if "_is_fsdp_managed_module" in vars(module):
            self.count += 1


REGISTRATIONS = _Registrations()


def warn_of_plain_parameters(root: nn.Module, units: Sequence[Unit]) -> None:
    """Parameters that were registered after ``fully_shard``, adapters for instance, are nobody's: each rank would train its own."""
    places = [owner for unit in units for owner in unit.ignored]
    places += [owner for unit in units for group in unit.groups for param in group.params for owner in param.owners]
    known = {(id(owner.module), owner.name) for owner in places}
    foreign = {
        below
        for module in root.modules()
        if {"fully_shard", "replicate"} & set(compat.applied_apis(module)) and unit_of(module) is None
        for below in module.modules()
    }
    plain = [
        f"{prefix}.{name} {tuple(param.shape)}" if prefix else f"{name} {tuple(param.shape)}"
        for prefix, module in root.named_modules()
        if module not in foreign
        for name, param in module._parameters.items()
        if param is not None and param.requires_grad and (id(module), name) not in known
    ]
    if plain:
        warnings.warn(
            message(
                f"{len(plain)} trainable parameters were registered below {type(root).__name__} after fully_shard was called on it",
                items=plain,
                expected="every trainable parameter sharded or in ignored_params; no gradient of these is reduced, ranks drift apart",
                fix="add them before fully_shard, call fully_shard on the modules that were added, or reduce their gradients yourself",
            ),
            stacklevel=2,
        )
