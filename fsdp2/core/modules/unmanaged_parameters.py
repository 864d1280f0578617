"""Parameters that no unit has: registered after ``fully_shard`` was called on a module above them, or held by others beside
the shards that were cut from them.

fsdp2 looks for the former at the first forward, and again at the first forward after something was registered on a managed module.
It notices the latter when they get a gradient. This file refuses to know what is done with parameters that a unit has.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_module_registration_hook, register_module_parameter_registration_hook

from ...errors import OrderError, message
from ...user_warnings import warn
from .. import torch_compat as compat
from ..group.param import ShardedParam, sharded_from
from ..iteration.module_state import unit_of
from ..iteration.unit import Unit


class _Registrations:
    """How often something was registered on a managed module; our own exchanges of parameters do not count."""

    def __init__(self) -> None:
        self.count = 0
        self._watching = False

    def watch(self) -> None:
        """Count from the first ``fully_shard`` on. Compilers never see it: they do not trace code that builds sharded modules."""
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
    """Warn of parameters registered after ``fully_shard``, adapters for instance: no unit has them, each rank would train its own."""
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
        warn(
            message(
                f"{len(plain)} trainable parameters were registered below {type(root).__name__} after fully_shard was called on it",
                items=plain,
                expected="every trainable parameter sharded or in ignored_params; no gradient of these is reduced, ranks drift apart",
                fix="add them before fully_shard, call fully_shard on the modules that were added, or reduce their gradients yourself",
            ),
            ranks={rank for unit in units for rank in unit.ranks},
        )


def refuse_gradients(original: nn.Parameter, param: ShardedParam) -> None:
    """Let a backward that reaches ``original`` raise: ``param`` was cut from it, a module still has it, and both would drift apart."""
    if original.is_inference() or not (original.is_floating_point() or original.is_complex()):
        return  # it never gets a gradient
    reference = weakref.ref(param)

    def refuse(_: Tensor) -> None:
        cut = reference()
        name = "a parameter" if cut is None else cut.fqn
        raise OrderError(
            f"{name} was sharded while a module outside of any fully_shard call is tied to it, and has a gradient of its own now",
            expected="every module that shares a sharded parameter below a fully_shard call of its own or of a parent",
            fix="call fully_shard on the root as well, after its children, before the first forward",
        )

    trains = original.requires_grad
    original.requires_grad_(True)  # torch allows the hook on such a parameter only; the user may unfreeze it later
    original.register_post_accumulate_grad_hook(refuse)  # type: ignore[no-untyped-call]
    original.requires_grad_(trains)
