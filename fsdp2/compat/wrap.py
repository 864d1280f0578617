"""FSDP1's wrapping policies, ``enable_wrap`` and ``wrap``: the names of ``torch.distributed.fsdp.wrap``.

A policy is a function of ``(module, recurse, nonwrapped_numel)``: with ``recurse=True`` it says whether to look at the children, else
whether to wrap the module. ``ModuleWrapPolicy`` and ``CustomPolicy`` are values, which may give modules arguments of their own.
Which modules a policy chooses, and in which order they are wrapped, is ``auto_wrap.py``'s concern.

    functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={T5Block})
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

from torch import nn

from ..errors import ArgumentError, OrderError

# --- functions ----------------------------------------------------------------------------------------------------------------


def always_wrap_policy(*args: Any, **kwargs: Any) -> bool:
    """Wrap every module that has a forward of its own."""
    return True


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: int = 100_000_000,
    force_leaf_modules: set[type[nn.Module]] | None = None,
    exclude_wrap_modules: set[type[nn.Module]] | None = None,
) -> bool:
    """From the bottom up, modules with at least ``min_num_params`` elements that are in no unit yet.

    force_leaf_modules:   classes whose children are not looked at; None: the function's attribute FORCE_LEAF_MODULES
    exclude_wrap_modules: classes that are not wrapped themselves; None: its attribute EXCLUDE_WRAP_MODULES
    """
    this: Any = size_based_auto_wrap_policy
    leaves = this.FORCE_LEAF_MODULES if force_leaf_modules is None else force_leaf_modules
    excluded = this.EXCLUDE_WRAP_MODULES if exclude_wrap_modules is None else exclude_wrap_modules
    return nonwrapped_numel >= min_num_params and not isinstance(module, tuple(leaves if recurse else excluded))


size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES = {nn.ModuleList, nn.ModuleDict}  # type: ignore[attr-defined]
size_based_auto_wrap_policy.FORCE_LEAF_MODULES = {nn.MultiheadAttention}  # type: ignore[attr-defined]


default_auto_wrap_policy = size_based_auto_wrap_policy
"""Its name in torch 1.11."""


def transformer_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, transformer_layer_cls: Iterable[type[nn.Module]]
) -> bool:
    """Wrap every module of the classes ``transformer_layer_cls``."""
    return recurse or isinstance(module, tuple(transformer_layer_cls))


def lambda_auto_wrap_policy(module: nn.Module, recurse: bool, nonwrapped_numel: int, lambda_fn: Callable[[nn.Module], bool]) -> bool:
    """Wrap every module for which ``lambda_fn(module)`` is true."""
    return recurse or lambda_fn(module)


def _or_policy(module: nn.Module, recurse: bool, nonwrapped_numel: int, policies: Iterable[Callable[..., bool]]) -> bool:
    """Wrap what one of ``policies`` wraps. Private in FSDP1, though every recipe for adapters uses it."""
    return any(policy(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel) for policy in policies)


# --- values -------------------------------------------------------------------------------------------------------------------


class _Policy(abc.ABC):
    """A policy that is a value and no function. Private in FSDP1, and subclassed and tested for all the same."""

    @abc.abstractmethod
    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: dict[str, Any]
    ) -> dict[nn.Module, dict[str, Any]]:
        """The modules to wrap, each with its arguments: ``root_kwargs``, with the policy's changes."""


class ModuleWrapPolicy(_Policy):
    """Every module of ``module_classes``; also callable as a policy function."""

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        self.module_classes = tuple(dict.fromkeys(module_classes))

    def __call__(self, module: nn.Module, recurse: bool, *args: Any, **kwargs: Any) -> bool:
        return recurse or isinstance(module, self.module_classes)

    def __repr__(self) -> str:
        return f"ModuleWrapPolicy({{{', '.join(each.__name__ for each in self.module_classes)}}})"

    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: dict[str, Any]
    ) -> dict[nn.Module, dict[str, Any]]:
        chosen = (module for module in root_module.modules() if isinstance(module, self.module_classes))
        return {module: dict(root_kwargs) for module in chosen if module not in ignored_modules}


class CustomPolicy(_Policy):
    """``lambda_fn(module)`` is False (or {}), True, or a dict of FSDP arguments that differ from the root's."""

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | dict[str, Any]]) -> None:
        self.lambda_fn = lambda_fn

    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: dict[str, Any]
    ) -> dict[nn.Module, dict[str, Any]]:
        """Raises: ArgumentError if the function returns anything else."""
        chosen = {}
        for module in root_module.modules():
            result: Any = False if module in ignored_modules else self.lambda_fn(module)
            if not isinstance(result, (bool, dict)):
                raise ArgumentError(
                    f"the function of CustomPolicy returned {result!r} for a {type(module).__name__}",
                    expected="True, False, or a dict of FSDP arguments",
                    fix="return bool(...) of its present result",
                )
            if result:
                chosen[module] = {**root_kwargs, **(result if isinstance(result, dict) else {})}
        return chosen


# --- by hand ------------------------------------------------------------------------------------------------------------------

_enabled: ContextVar[tuple[Callable[..., nn.Module], dict[str, Any]] | None] = ContextVar("fsdp2_compat_wrap", default=None)


@contextlib.contextmanager
def enable_wrap(*, wrapper_cls: Callable[..., nn.Module], **wrapper_kwargs: Any) -> Iterator[None]:
    """Inside, ``wrap(module)`` is ``wrapper_cls(module, **wrapper_kwargs)``, in this thread alone.

    Raises: OrderError inside another ``enable_wrap``.
    """
    if _enabled.get() is not None:
        raise OrderError(
            "enable_wrap was called inside of enable_wrap",
            expected="one context at a time",
            fix="pass the arguments that differ to wrap(module, ...)",
        )
    token = _enabled.set((wrapper_cls, wrapper_kwargs))
    try:
        yield
    finally:
        _enabled.reset(token)


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Inside ``enable_wrap``: the wrapped module, with ``wrap_overrides`` before its arguments; elsewhere ``module`` itself."""
    enabled = _enabled.get()
    if enabled is None:
        return module
    wrapper, kwargs = enabled
    return wrapper(module, **{**kwargs, **wrap_overrides})
