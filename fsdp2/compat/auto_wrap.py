"""Which modules an ``auto_wrap_policy`` chooses, and in which order they are wrapped: children before their parents.

Worked example, ``Sequential(Linear(4, 4), Sequential(Linear(4, 4), Linear(4, 4)))`` with
``size_based_auto_wrap_policy`` and ``min_num_params=40``: the inner Sequential alone, since each Linear has 20 elements; the root
takes the first Linear.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..core.iteration.module_state import unit_of
from ..errors import ArgumentError, ModuleError, got
from ..grouping.module_tree import CONTAINERS, OPAQUE
from .api import MixedPrecision

Chosen = list[tuple[nn.Module, dict[str, Any]]]


def chosen_modules(
    root: nn.Module,
    policy: Any,
    ignored_modules: set[nn.Module],
    ignored_params: set[nn.Parameter],
    mixed_precision: MixedPrecision | None,
) -> Chosen:
    """The modules below ``root`` to wrap, each with the arguments that differ from the root's.

    Containers without a forward and the children of MultiheadAttention are passed over: their forward never runs.
    Raises: ModuleError if there are FSDP modules below ``root`` already; ArgumentError if ``policy`` is not a policy.
    """
    wrapped = [name or "the root" for name, module in root.named_modules() if unit_of(module) is not None]
    if wrapped:
        raise ModuleError(
            f"FSDP got an auto_wrap_policy for a {type(root).__name__} with FSDP modules below it",
            items=wrapped,
            expected="either a policy or wrapping by hand",
            fix="leave auto_wrap_policy out, or wrap all of them by the policy",
        )
    in_fp32 = tuple(mixed_precision._module_classes_to_ignore) if mixed_precision is not None else ()
    if hasattr(policy, "_run_policy"):  # ours, torch's, or the user's
        found: dict[nn.Module, dict[str, Any]] = dict(policy._run_policy(root, ignored_modules, {}))
        for module in _from_below(root, ignored_modules):
            if isinstance(module, in_fp32):
                found.setdefault(module, {})
    elif callable(policy):
        found = {module: {} for module in _by_function(root, policy, in_fp32, ignored_modules, ignored_params)}
    else:
        raise ArgumentError(
            got("FSDP", "auto_wrap_policy", policy),
            expected="a function (module, recurse, nonwrapped_numel) -> bool, a ModuleWrapPolicy, or a CustomPolicy",
            fix="for instance ModuleWrapPolicy({Block})",
        )
    order = [module for module in _from_below(root, ignored_modules) if module in found and module is not root]
    return [
        (module, {**found[module], **({"mixed_precision": None} if isinstance(module, in_fp32) else {})})
        for module in order
        if _can_be_wrapped(module)
    ]


def _from_below(root: nn.Module, ignored: set[nn.Module]) -> Iterator[nn.Module]:
    """The modules below ``root`` that are not ignored, children before parents, each once, ``root`` last."""
    seen: set[nn.Module] = set()

    def visit(module: nn.Module) -> Iterator[nn.Module]:
        seen.add(module)
        for child in _parts(module):
            if child not in seen and child not in ignored:
                yield from visit(child)
        yield module

    return visit(root)


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    return iter(()) if isinstance(module, OPAQUE) else module.children()


def _can_be_wrapped(module: nn.Module) -> bool:
    if isinstance(module, torch.jit.ScriptModule):
        return False
    return not (isinstance(module, CONTAINERS) and type(module).forward is nn.Module.forward)


def _by_function(
    root: nn.Module,
    policy: Callable[..., bool],
    in_fp32: tuple[type[nn.Module], ...],
    ignored_modules: set[nn.Module],
    ignored_params: set[nn.Parameter],
) -> list[nn.Module]:
    found: list[nn.Module] = []
    seen: set[nn.Module] = set()

    def visit(module: nn.Module) -> int:
        """Choose among ``module`` and the modules below; returns how many elements are then in units."""
        seen.add(module)
        total = sum(param.numel() for param in module.parameters() if param not in ignored_params)
        if not (in_fp32 or policy(module=module, recurse=True, nonwrapped_numel=total)):
            return 0
        taken = sum(visit(child) for child in _parts(module) if child not in ignored_modules and child not in seen)
        if module is root or not _can_be_wrapped(module):
            return taken
        if isinstance(module, in_fp32) or policy(module=module, recurse=False, nonwrapped_numel=total - taken):
            found.append(module)
            return total
        return taken

    visit(root)
    return found
