"""The work of ``FSDP(module, ...)``: reads its arguments, wraps the modules that the policy chooses, makes the values, shards in place.

Worked example: FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block})) calls itself on each Block, then
shards the remaining parameters.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch
from torch import nn

from ..clients.state import ClientState
from ..core.iteration.module_state import unit_of
from ..core.setup.build import build_unit
from ..errors import ArgumentError, got
from ..policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from ..sharded_class import sharded_class, swap_class
from ..sharding_arguments import check_policies, checked_modules
from ..torch_names import torch_tensors
from .api import BackwardPrefetch, MixedPrecision, ShardingStrategy, member
from .auto_wrap import chosen_modules
from .ignored import read_ignored
from .initial_values import Own, broadcast_own, cast_own_buffers, materialize_own
from .meshes import current, read_device, read_groups
from .settings import Options, Settings, give_settings, settings_of

KEEP_PARAMS = (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2, ShardingStrategy.NO_SHARD)
"""Strategies that keep the parameters from forward to backward."""


_PREFETCH: dict[BackwardPrefetch | None, Literal["pre", "post"] | None] = {
    BackwardPrefetch.BACKWARD_PRE: "pre",
    BackwardPrefetch.BACKWARD_POST: "post",
    None: None,
}


def wrap_module(module: nn.Module, options: Options, mixin: type, mixin_below: type) -> None:
    """Shard ``module`` by FSDP1's arguments, in place.

    mixin:       the class whose methods it gets
    mixin_below: the same for the modules that a policy chooses below it

    Collective: where process groups are made for the first time, and with ``sync_module_states``.
    Raises:     an FSDPError; before anything is changed, unless it is about one of the modules that a policy chose
    """
    checked_modules(module)
    sharded_class(module, mixin, prefix="")  # a class that refuses to be subclassed does so before anything is changed
    strategy = member(ShardingStrategy, options.sharding_strategy or ShardingStrategy.FULL_SHARD, "sharding_strategy")
    if options.backward_prefetch is not None:
        prefetch = member(BackwardPrefetch, options.backward_prefetch, "backward_prefetch")
        options = dataclasses.replace(options, backward_prefetch=prefetch)
    mixed_precision = _read_mixed_precision(options.mixed_precision)
    mp_policy, offload_policy = _policies(mixed_precision, options)
    ignored_modules, ignored_params = read_ignored(module, options)
    check_policies(mp_policy, offload_policy, ignored_params)
    device = read_device(options.device_id, options.device_mesh, (param for param in module.parameters() if unit_of(module) is None))
    with current(device):
        mesh = read_groups(strategy, options.process_group, options.device_mesh, device.type)
    settings = Settings(options, strategy, mesh, device)
    if options.auto_wrap_policy is not None:
        below = dataclasses.replace(options, auto_wrap_policy=None, ignored_modules=None, ignored_states=ignored_params)
        chosen = chosen_modules(module, options.auto_wrap_policy, ignored_modules, ignored_params, mixed_precision)
        for each, _ in chosen:
            sharded_class(each, mixin_below, prefix="")
        for each, overrides in chosen:
            wrap_module(each, _overridden(below, overrides), mixin_below, mixin_below)
            if mixed_precision is not None and isinstance(each, tuple(mixed_precision._module_classes_to_ignore)):
                _run_in_fp32(each)
    own = Own(module, ignored_modules, ignored_params)
    with current(device):
        materialize_own(own, options.param_init_fn, device)
        if options.sync_module_states:
            broadcast_own(own, mesh, device)
        settings.buffer_dtypes = cast_own_buffers(own, mixed_precision.buffer_dtype if mixed_precision else None)
        left_alone = [buffer for each in ignored_modules for buffer in each.buffers(recurse=False)]
        before = [buffer.data for buffer in left_alone]
        unit = build_unit(
            [module],
            mesh,
            reshard_after_forward=False if strategy in KEEP_PARAMS else None,
            shard_placement_fn=None,
            mp_policy=mp_policy,
            offload_policy=offload_policy,
            ignored_params=ignored_params,
            state_class=ClientState,
            semantics="2.13",  # FSDP1 reduces in ``param_dtype``, unlike torch's FSDP2 from 2.15 on
        )
    for buffer, data in zip(left_alone, before, strict=True):
        torch_tensors.set_data(buffer, data)
    swap_class(module, mixin, prefix="")  # type(model.module).__name__ is the user's, as in FSDP1
    give_settings(module, settings)
    _choose_casts(module)
    unit.choose(backward_prefetch=_PREFETCH[options.backward_prefetch])
    if mixed_precision is not None and mixed_precision.keep_low_precision_grads:
        for group in unit.groups:
            group.gradients.choose(grad_dtype=mixed_precision.param_dtype)


def _overridden(options: Options, overrides: dict[str, Any]) -> Options:
    known = {each.name for each in dataclasses.fields(Options)}
    unknown = sorted(set(overrides) - known)
    if unknown:
        raise ArgumentError(
            f"a wrap policy returned arguments that FSDP does not have: {', '.join(unknown)}",
            expected=f"some of {', '.join(sorted(known))}",
            fix="check their spelling",
        )
    if "ignored_modules" in overrides:
        options = dataclasses.replace(options, ignored_states=None)
    return dataclasses.replace(options, **overrides)


def _read_mixed_precision(given: Any) -> MixedPrecision | None:
    """``given``, or the values of torch's class of the same name; checked."""
    if given is None:
        return None
    names = [each.name for each in dataclasses.fields(MixedPrecision)]
    if isinstance(given, type) or not all(hasattr(given, name) for name in names):
        raise ArgumentError(
            got("FSDP", "mixed_precision", given),
            expected="a MixedPrecision, or None",
            fix="MixedPrecision(param_dtype=torch.bfloat16)",
        )
    policy = MixedPrecision(**{name: getattr(given, name) for name in names})
    dtype: Any = policy.buffer_dtype
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ArgumentError(
            f"MixedPrecision got buffer_dtype={dtype!r}",
            expected="a floating-point torch.dtype or None",
            fix="for instance buffer_dtype=torch.bfloat16",
        )
    return policy


def _policies(mixed_precision: MixedPrecision | None, options: Options) -> tuple[MixedPrecisionPolicy, OffloadPolicy]:
    offload: Any = getattr(options.cpu_offload, "offload_params", None)
    if not (isinstance(offload, bool) or options.cpu_offload is None):
        raise ArgumentError(
            got("FSDP", "cpu_offload", options.cpu_offload),
            expected="a CPUOffload, or None",
            fix="CPUOffload(offload_params=True)",
        )
    if mixed_precision is None:
        policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    else:
        reduce_dtype = mixed_precision.reduce_dtype or mixed_precision.param_dtype
        policy = MixedPrecisionPolicy(mixed_precision.param_dtype, reduce_dtype, cast_forward_inputs=False)
    return policy, CPUOffloadPolicy() if offload else OffloadPolicy()


def _choose_casts(root: nn.Module) -> None:
    """From now on ``root`` is the root, and the modules below it are not: each module casts its inputs accordingly."""
    for module in root.modules():
        settings, unit = settings_of(module), unit_of(module)
        if settings is None or unit is None:
            continue
        settings.is_root = module is root
        policy = settings.options.mixed_precision
        if policy is not None:
            casts = policy.cast_forward_inputs or (settings.is_root and policy.cast_root_forward_inputs)
            unit.hooks.cast_inputs_to(policy.param_dtype if casts else None)


def _run_in_fp32(module: nn.Module) -> None:
    """A module of a class to be ignored by mixed precision takes inputs of any dtype, and gives outputs of the same."""
    unit = unit_of(module)
    if unit is not None:
        unit.hooks.cast_inputs_to(torch.float32, and_back=True)
