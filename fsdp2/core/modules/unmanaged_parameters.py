"""Parameters that no unit has: registered below a module after its ``fully_shard``, or held by other modules as well as
the shards cut from them, or next to units in a model whose root was never sharded.

fsdp2 looks for the first at the first forward, and at the first one after something was registered on a managed module.
It notices the second when they get a gradient, and the third at an optimizer's first step.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim import Optimizer

from ...errors import OrderError, message
from ...torch_names import torch_compiler, torch_modules
from ...user_warnings import warn
from ..group.param import ShardedParam, sharded_from
from ..iteration.module_state import unit_of, units_in
from ..iteration.unit import Unit


class _Registrations:
    """How often something was registered on a managed module; our own exchanges of parameters do not count."""

    def __init__(self) -> None:
        self.count = 0
        self._watching = False

    def watch(self) -> None:
        """Count from the first ``fully_shard`` on; compilers do not trace code that builds sharded modules."""
        if not self._watching:
            self._watching = True
            register_module_parameter_registration_hook(self._note_parameter)
            register_module_module_registration_hook(self._note_module)

    def _note_parameter(self, module: nn.Module, name: str, param: Any) -> None:
        if "_is_fsdp_managed_module" in vars(module) and not (
            isinstance(param, DTensor) or sharded_from(param) is not None
        ):
            self.count += 1

    def _note_module(self, module: nn.Module, name: str, child: Any) -> None:
        if "_is_fsdp_managed_module" in vars(module):
            self.count += 1


REGISTRATIONS = _Registrations()


def plain_parameters(root: nn.Module, units: Collection[Unit], frozen: bool = False) -> dict[str, nn.Parameter]:
    """The trainable parameters below ``root``, by name, that none of ``units`` has and no other torch API averages.

    frozen: as well as those that are frozen now
    """
    places = [owner for unit in units for owner in unit.ignored]
    places += [owner for unit in units for group in unit.groups for param in group.params for owner in param.owners]
    known = {(id(owner.module), owner.name) for owner in places}
    foreign = {
        below
        for module in root.modules()
        if isinstance(module, nn.parallel.DistributedDataParallel)
        or ({"fully_shard", "replicate"} & set(torch_modules.applied_apis(module)) and unit_of(module) is None)
        for below in module.modules()
    }
    return {
        f"{prefix}.{name}" if prefix else name: param
        for prefix, module in root.named_modules()
        if module not in foreign
        for name, param in module._parameters.items()
        if param is not None and (frozen or param.requires_grad) and (id(module), name) not in known
    }


def warn_of_plain_parameters(root: nn.Module, units: Sequence[Unit]) -> None:
    """Warn of parameters registered after ``fully_shard``, such as adapters: each rank would train its own."""
    plain = plain_parameters(root, units)
    if plain:
        warn(
            message(
                f"{len(plain)} trainable parameters were registered below {type(root).__name__} "
                "after fully_shard was called on it",
                items=[f"{name} {tuple(param.shape)}" for name, param in plain.items()],
                expected="every trainable parameter sharded or in ignored_params; "
                "no gradient of these is reduced, ranks drift apart",
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
        found = [
            f"{each.name} {each.shape}" for each in params if (param := each.param()) is not None and id(param) in plain
        ]
        model = reference()
        if found and model is not None and model not in _WARNED_OF:
            root = type(model).__name__
            warn(
                message(
                    f"fully_shard was never called on {root}, which has sharded modules "
                    f"and {len(found)} plain parameters that an optimizer trains",
                    items=found,
                    expected="every trainable parameter in a sharded module; "
                    "no gradient of these is reduced, ranks drift apart",
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
    living: list[nn.Module] = [
        each for each in gc.get_objects() if issubclass(type(each), nn.Module) and "_modules" in vars(each)
    ]
    inner = {child for module in living for child in module._modules.values()}
    found = []
    for root in living:
        units = [] if root in inner or unit_of(root) is not None else units_in(root.modules())
        ranks = {rank for unit in units for rank in unit.ranks}
        if len(ranks) > 1:
            plain = [
                _Plain(name, tuple(each.shape), weakref.ref(each))
                for name, each in plain_parameters(root, units, frozen=True).items()
            ]
            found.append((weakref.ref(root), plain, ranks))
    return found


def refuse_gradients(original: nn.Parameter, param: ShardedParam) -> None:
    """Let backward raise at ``original``: ``param`` was cut from it, a module still has it, both would drift apart."""
    if original.is_inference() or not (original.is_floating_point() or original.is_complex()):
        return  # it never gets a gradient
    reference = weakref.ref(param)

    def refuse(_: Tensor) -> None:
        cut = reference()
        name = "a parameter" if cut is None else cut.fqn
        raise OrderError(
            f"{name} was sharded while a module outside of any fully_shard call is tied to it, "
            "and has a gradient of its own now",
            expected="every module that shares a sharded parameter below a fully_shard call of its own or of a parent",
            fix="call fully_shard on the root as well, after its children, before the first forward",
        )

    trains = original.requires_grad
    original.requires_grad_(True)  # torch allows the hook on such a parameter only; the user may unfreeze it later
    original.register_post_accumulate_grad_hook(refuse)  # type: ignore[no-untyped-call]
    original.requires_grad_(trains)
