"""Wrap policies: values that choose which modules become groups of their own; the root takes what they leave.

Worked example, ``Sequential(Linear(4, 4), Sequential(Linear(4, 4), Linear(4, 4)))``:

    by_class(nn.Linear)      three groups of one Linear, and a root without parameters of its own
    by_size(40)              one group, the inner Sequential (2 x 20); each Linear is too small, and so is what is left for the root
"""

from __future__ import annotations

import difflib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from ..arguments import COUNT, require
from ..errors import ArgumentError
from .auto import auto_groups
from .module_tree import CONTAINERS, ModuleTree, class_of

Group = list[nn.Module]


class WrapPolicy(ABC):
    """Chooses groups. Subclass it for a policy of your own.

    Example:
        class EverySecond(fsdp2.wrap.WrapPolicy):
            def choose(self, tree):
                return [[module] for module in list(tree.root.children())[::2]]


        fsdp2.parallelize(net, wrap=EverySecond())
    """

    @abstractmethod
    def choose(self, tree: ModuleTree) -> list[Group]:
        """The groups, each a list of modules out of ``tree.candidates``, in any order, without the root."""


@dataclass(frozen=True)
class _Auto(WrapPolicy):
    def choose(self, tree: ModuleTree) -> list[Group]:
        return auto_groups(tree)


@dataclass(frozen=True)
class _RootOnly(WrapPolicy):
    def choose(self, tree: ModuleTree) -> list[Group]:
        return []


@dataclass(frozen=True)
class _ByClass(WrapPolicy):
    classes: tuple[type[nn.Module] | str, ...]

    def choose(self, tree: ModuleTree) -> list[Group]:
        types = tuple(each for each in self.classes if isinstance(each, type))
        names = {each for each in self.classes if isinstance(each, str)}
        found = [[module] for module in tree.candidates.values() if isinstance(module, types) or class_of(module).__name__ in names]
        if not found:
            present = sorted({class_of(module).__name__ for module in tree.candidates.values()})
            raise ArgumentError(
                f"by_class({', '.join(map(_class_name, self.classes))}) matches no module of {type(tree.root).__name__}",
                expected=f"classes of its modules that have parameters: {present}",
                fix='name one of these, or use wrap="auto"',
            )
        return found


@dataclass(frozen=True)
class _BySize(WrapPolicy):
    min_params: int
    leaves: tuple[type[nn.Module], ...]
    excluded: tuple[type[nn.Module], ...]

    def choose(self, tree: ModuleTree) -> list[Group]:
        groups: list[Group] = []
        self._visit(tree, tree.root, groups)
        return groups

    def _visit(self, tree: ModuleTree, module: nn.Module, groups: list[Group]) -> int:
        """Choose among ``module`` and the modules below; returns how many elements the chosen groups take."""
        total = tree.numel(module)
        if total < self.min_params or isinstance(module, self.leaves):
            return 0
        taken = sum(self._visit(tree, child, groups) for child in tree.children(module))
        if module is tree.root or total - taken < self.min_params or isinstance(module, self.excluded):
            return taken
        groups.append([module])
        return total


@dataclass(frozen=True)
class _ByPredicate(WrapPolicy):
    fn: Callable[[nn.Module], bool]

    def choose(self, tree: ModuleTree) -> list[Group]:
        return [[module] for module in tree.candidates.values() if self.fn(module)]


@dataclass(frozen=True)
class _ByName(WrapPolicy):
    names: tuple[str | re.Pattern[str], ...]

    def choose(self, tree: ModuleTree) -> list[Group]:
        chosen: dict[str, nn.Module] = {}
        unmatched = []
        for wanted in self.names:
            if isinstance(wanted, str) and wanted in tree.candidates:
                found = [wanted]
            else:
                found = [name for name in tree.candidates if re.fullmatch(wanted, name)]
            if not found:
                unmatched.append(_closest(wanted, tree.candidates))
            chosen.update((name, tree.candidates[name]) for name in found)
        if unmatched:
            raise ArgumentError(
                f"by_name: {len(unmatched)} names match no module of {type(tree.root).__name__}",
                items=unmatched,
                expected="a name as in model.named_modules(), or a regular expression for whole names, of modules with parameters",
                fix="print(fsdp2.wrap.plan(model, None)) and model.named_modules() show what there is",
            )
        return [[module] for module in chosen.values()]


Wrap = Literal["auto"] | type[nn.Module] | Collection[type[nn.Module]] | WrapPolicy | None
"""What ``wrap`` arguments take."""

auto = _Auto()
"""The repeated blocks of the model, found by themselves; also ``wrap="auto"``."""

root_only = _RootOnly()
"""One group; also ``wrap=None``."""


def by_class(*module_classes: type[nn.Module] | str) -> WrapPolicy:
    """Every module that is an instance of one of ``module_classes``; a string is the name of a class.

    A container without a forward (ModuleList, ModuleDict) becomes one group of its items.
    Raises: ArgumentError for anything else, and when planning if no module matches.
    Source: FSDP1's ModuleWrapPolicy and transformer_auto_wrap_policy.

    Example:
        fsdp2.parallelize(net, wrap=fsdp2.wrap.by_class(nn.Linear))
    """
    given: tuple[Any, ...] = module_classes
    if not given or not all(isinstance(each, str) or (isinstance(each, type) and issubclass(each, nn.Module)) for each in given):
        raise ArgumentError(
            f"by_class got {', '.join(map(repr, given)) or 'no class'}",
            expected="subclasses of nn.Module, or their names",
            fix="for instance by_class(Block)",
        )
    return _ByClass(module_classes)


def by_size(
    min_params: int = 100_000_000,
    *,
    leaves: Collection[type[nn.Module]] = (nn.MultiheadAttention,),
    excluded: Collection[type[nn.Module]] = CONTAINERS,
) -> WrapPolicy:
    """From the bottom up, every module whose parameters not in a group yet have at least ``min_params`` elements.

    leaves:   classes whose instances, and the modules inside of them, become no group
    excluded: classes whose instances become no group, while modules inside of them may
    Raises:   ArgumentError if ``min_params`` is no positive int, or the others are no classes.
    Source:   FSDP1's size_based_auto_wrap_policy, whose groups it makes.

    Example:
        fsdp2.parallelize(net, wrap=fsdp2.wrap.by_size(200))
    """
    require("by_size", COUNT, min_params=min_params)
    named: Any = (("leaves", leaves), ("excluded", excluded))
    for name, classes in named:
        if not isinstance(classes, Collection) or not all(isinstance(each, type) for each in classes):
            raise ArgumentError(
                f"by_size got {name}={classes!r}", expected="classes of modules", fix=f"for instance {name}=(nn.ModuleList,)"
            )
    return _BySize(min_params, tuple(leaves), tuple(excluded))


def by_predicate(fn: Callable[[nn.Module], bool]) -> WrapPolicy:
    """Every module for which ``fn(module)`` is true. ``fn`` must say the same on all ranks; it is not asked about the root.

    Source: FSDP1's lambda_auto_wrap_policy.

    Example:
        fsdp2.parallelize(net, wrap=fsdp2.wrap.by_predicate(lambda module: isinstance(module, nn.Linear)))
    """
    if not callable(fn):
        raise ArgumentError(
            f"by_predicate got {fn!r}",
            expected="a function from a module to a bool",
            fix="for instance by_predicate(lambda module: isinstance(module, Block))",
        )
    return _ByPredicate(fn)


def by_name(*names_or_regexes: str | re.Pattern[str]) -> WrapPolicy:
    """Modules by name, as ``model.named_modules()`` gives it; any other string is a regular expression for whole names.

    by_name("embedding", r"layers\\.\\d+") is the embedding and each layer, not what is inside of them.
    Raises: ArgumentError for anything else, and when planning for a name that matches nothing.

    Example:
        print(fsdp2.wrap.plan(net, fsdp2.wrap.by_name("0", r"1\\.\\d+")))
    """
    given: Any = names_or_regexes or [None]
    for each in given:
        try:
            re.compile(each)
        except (re.error, TypeError) as error:
            raise ArgumentError(
                f"by_name got {each!r}: {error}" if names_or_regexes else "by_name got no name",
                expected="names or regular expressions",
                fix=r'for instance by_name("embedding", r"layers\.\d+")',
            ) from None
    return _ByName(names_or_regexes)


def as_policy(wrap: Any) -> WrapPolicy:
    """The policy that the ``wrap`` argument of ``parallelize`` means. Raises: ArgumentError."""
    if isinstance(wrap, WrapPolicy):
        return wrap
    if wrap is None:
        return root_only
    if wrap == "auto":
        return auto
    if isinstance(wrap, type) and issubclass(wrap, nn.Module):
        return by_class(wrap)
    if isinstance(wrap, (set, frozenset, list, tuple)) and wrap:
        return by_class(*sorted(wrap, key=_class_name) if isinstance(wrap, (set, frozenset)) else wrap)
    raise ArgumentError(
        f"wrap={wrap!r} is no wrap policy",
        expected='"auto", None (the root alone), module classes, or by_class, by_size, by_predicate, by_name of fsdp2.wrap',
        fix="for instance wrap=fsdp2.wrap.by_class(Block)",
    )


def _class_name(each: object) -> str:
    return getattr(each, "__name__", str(each))


def _closest(wanted: str | re.Pattern[str], names: Iterable[str]) -> str:
    text = wanted if isinstance(wanted, str) else wanted.pattern
    close = difflib.get_close_matches(text, list(names), n=3)
    return f"{text!r}" + (f", did you mean {', '.join(map(repr, close))}?" if close else "")
