"""Watches optimizers: when they write parameters, and which parameters they were given.

An optimizer built before ``fully_shard``, or while parameters were unsharded, holds parameters that never get a
gradient: its steps would change nothing, without an error. At its first step, when it has no state yet, it gets the
sharded ones instead. Every step counts as a write to the groups of its parameters (``ParamGroup.written_at``).

FSDP1's files have one ``step`` for all parameters of a flat parameter. torch's optimizers load it as one tensor, and
each parameter counts in it: with twelve parameters it grows by twelve in a step. So each parameter gets a count of its
own after every load.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .core.group.gradients import Gradients
from .core.group.param import ShardedParam, sharded_from
from .core.group.param_group import ParamGroup
from .core.iteration.call import next_moment
from .core.iteration.module_state import sharded_parameters
from .errors import OrderError
from .torch_names import torch_autograd, torch_compiler


class _Checked(NamedTuple):
    """An optimizer at its last check.

    params:  the ids of its parameters
    sharded: how many groups were sharded by then
    groups:  the groups of its parameters, each with those parameters
    """

    params: tuple[int, ...]
    sharded: int
    groups: list[tuple[weakref.ref[ParamGroup], list[weakref.ref[ShardedParam]]]]


class _Steps:
    """The process's optimizers, as far as this file has seen them.

    sharded:  number of groups of parameters that were sharded so far
    checked:  each optimizer at its last check
    waiting:  groups' gradients that have waited for a last micro-batch; the next step forgets those that no longer wait
    with_closure: optimizers that were given a closure, which are looked at after their steps as well
    asked:    called before each step, with the optimizer; they may raise
    at_checks: called at each check, with the optimizer and ``sharded``
    begun:    number of steps of any optimizer that have begun, for records of a run; ranks must not decide by it,
              because one rank may step an optimizer of its own
    """

    def __init__(self) -> None:
        self.sharded = 0
        self.checked: weakref.WeakKeyDictionary[Optimizer, _Checked] = weakref.WeakKeyDictionary()
        self.waiting: weakref.WeakSet[Gradients] = weakref.WeakSet()
        self.with_closure: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.asked: set[Callable[[Optimizer], None]] = set()
        self.at_checks: set[Callable[[Optimizer, int], None]] = set()
        self.begun = 0


STEPS = _Steps()


def watch_optimizers() -> None:
    """Parameters were sharded: check every optimizer at its next step, and count steps from now on."""
    if STEPS.sharded == 0:
        register_optimizer_step_pre_hook(torch_compiler.dynamo_disabled(_before_step))
    STEPS.sharded += 1


def optimizers_that_stepped() -> list[Optimizer]:
    """The optimizers that have stepped and still exist."""
    return list(STEPS.checked)


def note_replayed_step(optimizer: Optimizer) -> None:
    """A graph will step ``optimizer``, as far as this file has seen it: what is unsharded is then out of date."""
    checked = STEPS.checked.get(optimizer)
    for reference, _ in () if checked is None else checked.groups:
        group = reference()
        if group is not None:
            group.note_write(next_moment(), group.params)
            group.hide()


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for ask in STEPS.asked:
        ask(optimizer)
    STEPS.begun += 1
    if STEPS.waiting:
        _refuse_incomplete(optimizer)
    checked = STEPS.checked.get(optimizer)
    if checked is None:
        optimizer.register_load_state_dict_post_hook(_part_step_counts)
        _part_step_counts(optimizer)  # a load before the first step had no hook yet
    if checked is None or checked.sharded != STEPS.sharded or checked.params != _ids(optimizer):
        _give_sharded(optimizer)
        for tell in STEPS.at_checks:
            tell(optimizer, STEPS.sharded)
        known = sharded_parameters()
        params = _ids(optimizer)
        groups: dict[ParamGroup, list[weakref.ref[ShardedParam]]] = {}
        for each in params:
            if each in known:
                sharded, group = known[each]
                groups.setdefault(group, []).append(weakref.ref(sharded))
        checked = STEPS.checked[optimizer] = _Checked(
            params, STEPS.sharded, [(weakref.ref(group), each) for group, each in groups.items()]
        )
    if _closure_of(args, kwargs) is not None and optimizer not in STEPS.with_closure:
        STEPS.with_closure.add(optimizer)
        optimizer.register_step_post_hook(torch_compiler.dynamo_disabled(_after_step))
    _note_write(checked)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """A closure ran within the step: gradients came then, and its forwards may have left parameters unsharded."""
    checked = STEPS.checked.get(optimizer)
    if checked is not None and _closure_of(args, kwargs) is not None:
        _note_write(checked)


def _closure_of(args: Any, kwargs: Any) -> Any:
    """The closure of a step; ``args`` begin with the optimizer."""
    return args[1] if len(args) > 1 else kwargs.get("closure")


def _note_write(checked: _Checked) -> None:
    """The optimizer writes its parameters that have gradients."""
    now = next_moment()
    in_backward = torch_autograd.current_graph_task() != -1
    for reference, members in checked.groups:
        its_group = reference()
        if its_group is not None:
            if its_group.is_parked:
                its_group.refuse_parked()
            living = [param for each in members if (param := each()) is not None]
            written = [param for param in living if param.sharded.grad is not None]
            if written or any(param.trainable for param in its_group.params):  # the same on all ranks
                its_group.note_write(now, written)
            if not in_backward:  # the host may write the shards now, and what is still unsharded is out of date
                its_group.hide()


def _ids(optimizer: Optimizer) -> tuple[int, ...]:
    return tuple([id(param) for group in optimizer.param_groups for param in group["params"]])


def _part_step_counts(optimizer: Optimizer) -> None:
    """Give each parameter a ``step`` tensor of its own; an optimizer not of torch may share one on purpose."""
    if not any(base.__module__.startswith("torch.optim.") for base in type(optimizer).__mro__ if base is not Optimizer):
        return
    counts: set[int] = set()
    for state in optimizer.state.values():
        count = state.get("step")
        if isinstance(count, Tensor):
            if id(count) in counts:
                state["step"] = count.clone()
            counts.add(id(count))


def _refuse_incomplete(optimizer: Optimizer) -> None:
    """Raise OrderError if gradients of its parameters wait for their last micro-batch: it would step without them."""
    for gradients in list(STEPS.waiting):
        if not gradients.has_unreduced:
            STEPS.waiting.discard(gradients)
    waiting = {id(param.sharded): param.fqn for gradients in STEPS.waiting for param in gradients.plan.params}
    incomplete = [waiting[id(param)] for group in optimizer.param_groups for param in group["params"] if id(param) in waiting]
    if incomplete:
        raise OrderError(
            f"{type(optimizer).__name__} steps while gradients of {len(incomplete)} parameters wait for their last micro-batch",
            items=incomplete,
            expected="a backward inside accumulate(model, last=True) before the step, which hands them to the parameters",
            fix="pass last=True for the last micro-batch, or drop them with model.zero_grad()",
        )


def _give_sharded(optimizer: Optimizer) -> None:
    """Replace originals and unsharded parameters by sharded ones.

    Raises: OrderError if the optimizer has state for such a parameter: the state belongs to the whole parameter.
    """
    too_late = []
    for group in optimizer.param_groups:
        params = group["params"]
        for index, param in enumerate(params):
            sharded = sharded_from(param)
            if sharded is None:
                continue
            if param in optimizer.state:
                too_late.append(f"{sharded.fqn} {tuple(param.shape)}")
            else:
                params[index] = sharded.sharded
    if too_late:
        raise OrderError(
            f"{type(optimizer).__name__} has state for {len(too_late)} parameters that were sharded since",
            items=too_late,
            expected="an optimizer that made no step before fully_shard",
            fix="build the optimizer after fully_shard, and load the state with torch.distributed.checkpoint.state_dict",
        )
