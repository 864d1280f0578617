"""Parameters that no unit has: registered below a module after its ``fully_shard``, or next to units in a model whose root was
never sharded.

fsdp2 looks for the first at the first forward, and at the first one after something was registered on a managed module. It notices the
second at an optimizer's first step.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim import Optimizer

from ..core.group.param import sharded_from
from ..core.iteration.module_state import ModuleState, unit_of, units_in
from ..core.iteration.unit import Unit
from ..errors import message
from ..inspect import plain_parameters
from ..optimizer_steps import STEPS
from ..torch_names import torch_compiler
from ..user_warnings import warn


def watch_registrations() -> None:
    """Count registrations on managed modules from now on, but not our own exchanges of parameters; look at optimizers' steps, too.

    From the first ``fully_shard`` on: compilers do not trace code that builds sharded modules.
    """
    if warn_of_forgotten_root not in STEPS.at_checks:
        STEPS.at_checks.add(warn_of_forgotten_root)
        register_module_parameter_registration_hook(_note_parameter)
        register_module_module_registration_hook(_note_module)


def _note_parameter(module: nn.Module, name: str, param: Any) -> None:
    if "_is_fsdp_managed_module" in vars(module) and not (isinstance(param, DTensor) or sharded_from(param) is not None):
        ModuleState.num_registrations += 1


def _note_module(module: nn.Module, name: str, child: Any) -> None:
    if "_is_fsdp_managed_module" in vars(module):
        ModuleState.num_registrations += 1


def warn_of_plain_parameters(root: nn.Module, units: Sequence[Unit]) -> None:
    """Warn of parameters registered after ``fully_shard``, such as adapters: each rank would train its own."""
    plain = plain_parameters(root, units)
    if plain:
        warn(
            message(
                f"{len(plain)} trainable parameters were registered below {type(root).__name__} after fully_shard was called on it",
                items=[f"{name} {tuple(param.shape)}" for name, param in plain.items()],
                expected="every trainable parameter sharded or in ignored_params; no gradient of these is reduced, ranks drift apart",
                fix="add them before fully_shard, call fsdp2.adopt(model) before the optimizer is made, "
                "or reduce their gradients yourself",
            ),
            ranks={rank for unit in units for rank in unit.ranks},
        )


def warn_of_forgotten_root(optimizer: Optimizer, num_sharded: int) -> None:
    """Warn once for each model of parameters next to sharded ones: its blocks were sharded, the model was not.

    Those that have no gradient before this step are looked at again after it, and after later ones: a closure computes
    gradients inside the step.

    num_sharded: how many groups of parameters were sharded so far; modules are looked at once for each number
    """
    trained = [param for group in optimizer.param_groups for param in group["params"]]
    plain = [param for param in trained if not isinstance(param, DTensor) and sharded_from(param) is None]
    _warn_of(plain, num_sharded)
    later = [weakref.ref(param) for param in plain if param.grad is None]
    if later and optimizer not in _LATER:
        optimizer.register_step_post_hook(torch_compiler.dynamo_disabled(_look_again))
    if later or optimizer in _LATER:
        _LATER[optimizer] = num_sharded, later


_LATER: weakref.WeakKeyDictionary[Optimizer, tuple[int, list[weakref.ref[Tensor]]]] = weakref.WeakKeyDictionary()
"""Of an optimizer, how many groups were sharded at its last check, and plain parameters without a gradient so far."""


def _look_again(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    num_sharded, references = _LATER.get(optimizer, (0, []))  # several may share their hooks
    living = [param for each in references if (param := each()) is not None]
    trained = [param for param in living if param.grad is not None]
    if trained:
        _LATER[optimizer] = num_sharded, [weakref.ref(param) for param in living if param.grad is None]
        _warn_of(trained, num_sharded)


def _warn_of(trained: Sequence[Tensor], num_sharded: int) -> None:
    plain = {id(param) for param in trained if param.grad is not None}
    if not plain:
        return
    for reference, params, ranks in _partly_sharded(num_sharded):
        found = [f"{each.name} {each.shape}" for each in params if (param := each.param()) is not None and id(param) in plain]
        model = reference()
        if found and model is not None and model not in _WARNED_OF:
            root = type(model).__name__
            warn(
                message(
                    f"fully_shard was never called on {root}, which has sharded modules "
                    f"and {len(found)} plain parameters that an optimizer trains",
                    items=found,
                    expected="every trainable parameter in a sharded module; no gradient of these is reduced, ranks drift apart",
                    fix=f"call fully_shard on the {root} as well, after its blocks and before the first forward",
                ),
                ranks=ranks,
            )
            _WARNED_OF.add(model)


_WARNED_OF: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class _Plain(NamedTuple):
    name: str
    shape: tuple[int, ...]
    param: weakref.ref[nn.Parameter]


@functools.lru_cache(maxsize=1)
def _partly_sharded(num_sharded: int) -> list[tuple[weakref.ref[nn.Module], list[_Plain], set[int]]]:
    """The outermost living unsharded modules with units over several ranks; their plain parameters, those ranks.

    No module references its parent, so this asks the garbage collector for all modules, which takes a moment.
    """
    living: list[nn.Module] = [each for each in gc.get_objects() if issubclass(type(each), nn.Module) and "_modules" in vars(each)]
    inner = {child for module in living for child in module._modules.values()}
    found = []
    for root in living:
        units = [] if root in inner or unit_of(root) is not None else units_in(root.modules())
        ranks = {rank for unit in units for rank in unit.ranks}
        if len(ranks) > 1:
            plain = [
                _Plain(name, tuple(each.shape), weakref.ref(each)) for name, each in plain_parameters(root, units, frozen=True).items()
            ]
            found.append((weakref.ref(root), plain, ranks))
    return found
