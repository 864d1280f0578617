"""``ignored_modules`` and ``ignored_states``: modules and parameters that an FSDP module leaves alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from ..core.iteration.module_state import unit_of, units_in
from ..errors import ArgumentError, got
from .settings import Options


def read_ignored(module: nn.Module, options: Options) -> tuple[set[nn.Module], set[nn.Parameter]]:
    """The modules in the trees of ignored modules, and all parameters to ignore: theirs, those named, those of FSDP modules below.

    FSDP modules inside of an ignored module are not ignored, and neither are the modules below them.
    Raises: ArgumentError if both arguments are given, or contain objects of another type, or an FSDP module.
    """
    if options.ignored_modules is not None and options.ignored_states is not None:
        raise ArgumentError(
            "FSDP got both ignored_modules and ignored_states",
            expected="at most one of them",
            fix="put the modules' parameters into ignored_states",
        )
    named_modules = _checked(options.ignored_modules, "ignored_modules", (nn.Module,))
    states = _checked(options.ignored_states, "ignored_states", (nn.Module, nn.Parameter))
    if len({isinstance(each, nn.Module) for each in states}) > 1:
        raise ArgumentError(
            "FSDP got ignored_states with modules and parameters",
            expected="modules only, or parameters only",
            fix="pass the parameters of the modules: module.parameters()",
        )
    params: set[nn.Parameter] = {each for each in states if isinstance(each, nn.Parameter)}
    modules: set[nn.Module] = set()
    for each in [*named_modules, *(each for each in states if isinstance(each, nn.Module))]:
        if unit_of(each) is not None:
            raise ArgumentError(
                f"FSDP was told to ignore a {type(each).__name__} to which FSDP was applied",
                expected="modules that are not FSDP modules themselves",
                fix="ignore the module before it is wrapped, in the call that would wrap it",
            )
        _collect(each, modules)
    for each in modules:
        params.update(each.parameters(recurse=False))
    for unit in units_in(module.modules()):
        found = [owner.module._parameters.get(owner.name) for owner in unit.ignored]
        params.update(param for param in found if param is not None)
    return modules, params


def _checked(given: Any, name: str, kinds: tuple[type, ...]) -> list[Any]:
    if given is not None and not isinstance(given, Iterable):
        raise ArgumentError(got("FSDP", name, given), expected="an iterable", fix="pass the objects themselves, in a list")
    found = [] if given is None else list(given)
    wrong = [each for each in found if not isinstance(each, kinds)]
    if wrong:
        raise ArgumentError(
            f"FSDP got {name} with a {type(wrong[0]).__name__}",
            expected=f"an iterable of {' or '.join(f'nn.{kind.__name__}' for kind in kinds)}",
            fix="pass the objects themselves, not their names",
        )
    return found


def _collect(module: nn.Module, into: set[nn.Module]) -> None:
    """Also what ``replicate`` manages, as in FSDP1."""
    if module not in into and unit_of(module) is None:
        into.add(module)
        for child in module.children():
            _collect(child, into)
