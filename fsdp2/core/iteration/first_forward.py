"""The first forward of a root: all units below it share one schedule from then on; errors name what cannot work."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import OrderError, meta_error
from .backward_agreement import Agreement
from .module_state import ModuleState, units_below
from .schedule import Schedule
from .ties import adopt_late_ties
from .unit import Unit


def adopt(root: ModuleState) -> Schedule:
    """The first forward: ``root`` and all units below its module share one schedule from now on.

    Raises: OrderError if ``root`` is a list of modules; MaterializationError if parameters are on the meta device;
            what ``check_before_first_forward`` raises
    """
    if len(root.modules) > 1:
        raise OrderError(
            f"the root of a forward is a list of modules: {[type(module).__name__ for module in root.modules]}",
            expected="one root module, so that one forward has one beginning and one end",
            fix="call fully_shard on the module that holds them all, and run that",
        )
    found = units_below(root.modules[0])
    for name, unit in found:
        unit.fqn = name
        for group in unit.groups:
            group.fqn = name
    units = [unit for _, unit in found]
    adopt_late_ties(units)
    refuse_meta(units)
    _refuse_strange_ties(units)
    _refuse_manual_children(root, units)
    root.check_before_first_forward(units)
    schedule = Schedule(root, units)
    if root.schedule is not None:
        schedule.tree.holds_pending = root.schedule.tree.holds_pending
        schedule.share(root.schedule.comm_ctx)
    varying: set[str] = set()
    for unit in units:
        for group in unit.groups:
            varying |= group.gradients.varying
            group.gradients.varying = varying
        if unit.schedule is not None:
            schedule.is_last_backward &= unit.schedule.is_last_backward
            schedule.post_optim_event = schedule.post_optim_event or unit.schedule.post_optim_event
            schedule.tree.iteration.unsharded |= unit.schedule.tree.iteration.unsharded
            if unit.schedule.agreement is not None:
                unit.schedule.agreement.retire()
        unit.schedule = schedule
    schedule.agreement = Agreement(units, schedule.alive_logs)
    schedule.settled = True
    return schedule


def _refuse_strange_ties(units: Sequence[Unit]) -> None:
    own = {id(group) for unit in units for group in unit.groups}
    for unit in units:
        strange = [
            param.fqn for group in unit.uses if id(group) not in own for param in group.params if len(param.owners) > 1
        ]
        if strange:
            raise OrderError(
                f"{unit.fqn or 'the root'} is tied to parameters "
                f"that belong to a module outside of the root: {strange}",
                expected="all modules that share a parameter below one root, "
                "so that one backward has all its gradients",
                fix="call fully_shard on a module that holds them all, and run forward through it",
            )


def _refuse_manual_children(root: ModuleState, units: Sequence[ModuleState]) -> None:
    children = [
        unit.fqn
        for unit in units
        if unit is not root and unit.schedule is not None and unit.schedule.tree.holds_pending
    ]
    if children:
        raise OrderError(
            f"set_manual_backward_finalization was called on {children}, which are below the root of this forward",
            expected="set_manual_backward_finalization must be called on the root FSDP module",
            fix="call set_manual_backward_finalization(False) on them, "
            "and (True) on the module that you run forward with",
        )


def refuse_meta(units: Sequence[Unit]) -> None:
    """Raise MaterializationError naming every parameter that is still on the meta device."""
    for unit in units:
        if any(group.plan.is_meta for group in unit.groups):
            unit.notice_changes()  # ``load_state_dict(assign=True)`` may have replaced them by parameters with values
    missing = [name for unit in units for group in unit.groups for name in group.on_meta()]
    if missing:
        raise meta_error(missing, str(units[0].device))
