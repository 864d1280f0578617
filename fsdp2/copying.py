"""``copy.deepcopy`` of a sharded module: an independent one on the same mesh, with the same values and options.

The modules are copied as if they were not sharded, by the way that their classes define. Before that, ``deepcopy``'s
memo gets the parameters: each that a module shows, sharded or unsharded, becomes a sharded parameter of the copy. When
all modules are there, their units are made again, first the units from which others borrow. Like a plain copy, the copy
has no gradients. It has not run yet, so it is its own root, and the user makes its optimizer.

Worked example: root with blocks a and b, all of them units; ``copy.deepcopy(a)`` copies one unit, ``deepcopy(root)``
three, and ``deepcopy(nn.ModuleList([a, b]))``, where the list is plain, first a and its unit, then b and its unit.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .core.group.param import Owner, ShardedParam, carry_grad_dtype
from .core.group.param_group import GroupState, ParamGroup
from .core.iteration.module_state import ModuleState, unit_of, unit_with
from .core.modules.hooks import UnitHooks
from .sharded_class import set_class, unswap_class
from .torch_names import torch_dtensors, torch_modules

_PENDING = "fsdp2: units whose modules are being copied"
"""Key in the memo: present while an outer call is going to make the units."""


def deepcopy_module(module: nn.Module, memo: dict[Any, Any]) -> nn.Module:
    """``module.__deepcopy__(memo)``. A unit is copied with all modules of its list, and the units it borrows from.

    Memory: one group's shard next to the copy, as the values of a group move into its flat shard. Collective: no.
    """
    if _PENDING in memo:
        return _copy_module(module, memo)
    pending: list[ModuleState] = []
    memo[_PENDING] = pending
    try:
        new = _copy_module(module, memo)
        for unit in pending:  # the list grows meanwhile
            for other in (*unit.modules, *(each for lender in _lenders(unit) for each in lender.modules)):
                copy.deepcopy(other, memo)
    finally:
        del memo[_PENDING]
    copies: dict[ModuleState, ModuleState] = {}
    for unit in pending:
        _copy_unit(unit, memo, copies)
    for unit, made in copies.items():
        made.choose(
            prefetch_forward=[copies[other] for other in unit.options.prefetch_forward if other in copies],
            prefetch_backward=[copies[other] for other in unit.options.prefetch_backward if other in copies],
        )
    return new


def _lenders(unit: ModuleState) -> list[ModuleState]:
    return [unit_with(group.params[0]) for group in unit.borrowed]


def _copy_module(module: nn.Module, memo: dict[Any, Any]) -> nn.Module:
    unit = unit_of(module)
    assert unit is not None
    if unit not in memo[_PENDING]:
        memo[_PENDING].append(unit)
        for group in unit.uses:
            _remember_params(group, memo)
    sharded_class = type(module)
    with _as_if_plain(module):
        new = copy.deepcopy(module, memo)
    set_class(new, sharded_class)
    return new


@contextlib.contextmanager
def _as_if_plain(module: nn.Module) -> Iterator[None]:
    sharded_class = type(module)
    with torch_modules.without_module_state(module):
        unswap_class(module)
        try:
            yield
        finally:
            set_class(module, sharded_class)


def _remember_params(group: ParamGroup, memo: dict[Any, Any]) -> None:
    """Let the copy show sharded parameters of its own, whichever parameters the modules show now."""
    if group.state is GroupState.SHARDED and not group.registry.verify(group.plan.has_own_memory):
        group.rebuild()
    for param in group.params:
        new = memo.get(id(param.sharded))
        if new is None:
            new = memo[id(param.sharded)] = _copy_sharded(param, memo)
        for shown in (param.unsharded, *(owner.module._parameters.get(owner.name) for owner in param.owners)):
            if shown is not None:
                memo[id(shown)] = new


def _copy_sharded(param: ShardedParam, memo: dict[Any, Any]) -> nn.Parameter:
    with torch.no_grad():
        local = torch_dtensors.new_dtensor(param.local_now().clone(), torch_dtensors.spec_of(param.sharded))
        new = nn.Parameter(local, requires_grad=param.sharded.requires_grad)
    carry_grad_dtype(param.sharded, new)
    for name, value in vars(param.sharded).items():
        if name not in vars(new):  # attributes that users set on parameters
            setattr(new, name, copy.deepcopy(value, memo))
    return new


def _copy_unit(unit: ModuleState, memo: dict[Any, Any], copies: dict[ModuleState, ModuleState]) -> ModuleState:
    if unit in copies:
        return copies[unit]
    borrowed = []
    for group in unit.borrowed:
        lender = unit_with(group.params[0])
        index = lender.groups.index(group)
        borrowed.append(_copy_unit(lender, memo, copies).groups[index])
    new = copies[unit] = type(unit)(
        [memo[id(module)] for module in unit.modules],
        [_copy_group(group, memo) for group in unit.groups],
        borrowed,
        unit.device,
        unit.mp_policy,
        unit.options,
    )
    new.set_micro_batch(unit.micro_batch)
    new.ignored = [Owner(memo[id(owner.module)], owner.name) for owner in unit.ignored if id(owner.module) in memo]
    for group, made in zip(unit.groups, new.groups, strict=True):
        made.gradients.options = group.gradients.options
        if group in unit.kept_frozen:
            new.kept_frozen = {**new.kept_frozen, made: None}
    new.hooks = UnitHooks(new)
    new.hooks.cast_inputs_to(unit.hooks.input_dtype, unit.hooks.casts_back)
    new.hooks.install()
    _replace_copied_hooks(new, unit.hooks, memo)
    for module in new.modules:
        torch_modules.register_module_state(module, new)
    return new


def _copy_group(group: ParamGroup, memo: dict[Any, Any]) -> ParamGroup:
    params = []
    for param in group.params:
        owners = [Owner(memo[id(owner.module)], owner.name) for owner in param.owners if id(owner.module) in memo]
        sharded = memo[id(param.sharded)]
        params.append(ShardedParam(param.fqn, owners, param.spec, param.rank, sharded, torch_dtensors.local_tensor(sharded)))
        params[-1].kind = param.kind
    new = ParamGroup(params, group.mesh, group.device, group.options)
    new.fqn = group.fqn
    new.smaller_mesh = group.smaller_mesh
    new.keep_storage(group.keeps_storage)
    new.all_gather_comm = group.all_gather_comm
    return new


def _replace_copied_hooks(unit: ModuleState, originals: UnitHooks, memo: dict[Any, Any]) -> None:
    """Let the hooks of ``unit`` take the places of those copied with its modules: among the user's hooks, order matters."""
    num_forward = 2 * len(unit.modules)
    for index, original in enumerate(originals.handles):
        copied = memo.get(id(original.hooks_dict_ref()))
        if copied is None or original.id not in copied:
            continue
        if index >= num_forward:
            del copied[original.id]
            continue
        handle = unit.hooks.handles[index]
        copied[original.id] = copied.pop(handle.id)
        for flags in handle.extra_dict_ref:
            flags().pop(handle.id, None)  # ``deepcopy`` copied the flags under the original's id
        handle.id = original.id
