"""What ``fully_shard`` leaves on a module: its unit, and the schedule that runs it.

torch and other libraries find the same object by ``fully_shard.state(module)``.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from ...torch_names import torch_modules
from ..group.param import ShardedParam, units
from ..group.param_group import ParamGroup
from .finalization import CommContext
from .schedule import Schedule
from .unit import Unit


class ModuleState(Unit, torch_modules.ModuleStateBase):
    """A unit, as its modules refer to it.

    schedule: that of the root above, or one of its own until the first forward; None until something needs it
    hooks:    its UnitHooks
    num_registrations: how often something was registered on a module that any unit has, if anybody counts
    """

    num_registrations = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        torch_modules.ModuleStateBase.__init__(self)
        self.schedule: Schedule | None = None
        self.hooks: Any = None
        Unit.__init__(self, *args, **kwargs)

    def extend(self, groups: Iterable[ParamGroup], borrowed: Iterable[ParamGroup]) -> None:
        super().extend(groups, borrowed)
        for group in self.groups:
            for param in group.params:
                units[param] = weakref.ref(self)
        if self.schedule is not None:
            self.schedule.settled = False

    def reduce_accumulated(self) -> None:
        if self.schedule is not None:  # the unit has run
            self.schedule.end_of_backward()

    def check_before_first_forward(self, units: Sequence[ModuleState]) -> None:
        """Raise if ``units``, this root and those below it, cannot run as they are. Collective: no."""

    def give_hints(self, is_compiled: bool) -> None:
        """The first forward begins. is_compiled: code that the compiler runs has called the root"""

    def look_at_registered(self) -> None:
        """A forward begins, and ``num_registrations`` has grown since the last one."""

    def explain(self, error: BaseException | None) -> None:
        """``error`` has ended a forward: add to its text what fsdp2 knows of the cause."""

    def shared_context(self) -> CommContext:
        return schedule_of(self).comm_ctx


def unit_with(param: ShardedParam) -> ModuleState:
    """The unit that ``param`` belongs to."""
    unit = units[param]()
    assert isinstance(unit, ModuleState)
    return unit


def group_with(param: ShardedParam) -> ParamGroup:
    """The group that ``param`` belongs to."""
    return next(group for group in unit_with(param).groups if param in group.params)


def sharded_parameters() -> dict[int, tuple[ShardedParam, ParamGroup]]:
    """All living parameters of ``fully_shard``, by the id of the parameter that the user sees between steps."""
    found = {}
    for param, reference in units.items():
        unit = reference()
        for group in () if unit is None else unit.groups:
            if param in group.params:
                found[id(param.sharded)] = (param, group)
    return found


def unit_of(module: Any) -> ModuleState | None:
    """The unit that the ``fully_shard`` call on ``module`` made, or None if there was no such call."""
    state = torch_modules.module_state(module) if hasattr(module, "__dict__") else None
    return state if isinstance(state, ModuleState) else None


def sharded_unit(module: Any) -> ModuleState:
    """The unit of an ``FSDPModule``."""
    unit = unit_of(module)
    assert unit is not None, f"{type(module).__name__} has lost its FSDP state"
    return unit


def units_in(modules: Iterable[nn.Module]) -> list[ModuleState]:
    """The units of ``modules``, each once."""
    return list(dict.fromkeys(unit for module in modules if (unit := unit_of(module)) is not None))


def named_units(root: nn.Module) -> list[tuple[str, ModuleState]]:
    """The units below ``root`` in the order of ``named_modules()``, each with the name of its first module."""
    found: dict[int, tuple[str, ModuleState]] = {}
    for name, module in root.named_modules():
        unit = unit_of(module)
        if unit is not None:
            found.setdefault(id(unit), (name, unit))
    return list(found.values())


def names_from(root: nn.Module, units: Iterable[tuple[str, ModuleState]]) -> dict[ShardedParam, str]:
    """The name from ``root`` of each parameter of ``units``; a parameter whose module is elsewhere keeps its own."""
    shown_names = {id(param): name for name, param in root.named_parameters()}
    prefixes = {id(module): f"{name}." if name else "" for name, module in root.named_modules()}
    names = {}
    for group in (group for _, unit in units for group in unit.groups):
        for param in group.params:
            shown = param.unsharded if group.is_unsharded else param.sharded
            place = param.owners[0]
            prefix = prefixes.get(id(place.module))
            names[param] = shown_names.get(id(shown)) or (param.fqn if prefix is None else prefix + place.name)
    return names


def units_below(root: nn.Module) -> list[tuple[str, ModuleState]]:
    """The ``named_units`` of ``root``, from where every parameter has its name now."""
    found = named_units(root)
    for param, name in names_from(root, found).items():
        param.fqn = name
    return found


def schedule_of(unit: ModuleState) -> Schedule:
    """The schedule of the root above, or one of its own until the first forward."""
    if unit.schedule is None:
        unit.schedule = Schedule(unit, [unit])
    return unit.schedule
