"""The dry run: which groups a policy makes of a model, with the parameters and bytes of each. No process group, no change.

    >>> print(plan(gpt2))
    GPT2LMHeadModel: 13 groups, 148 parameters, 124,439,808 elements, 497.8 MB
      transformer.h.0 ... transformer.h.11  GPT2Block  12 groups of 12 parameters, 7,087,872 elements, 28.4 MB each
      (root)  GPT2LMHeadModel  4 parameters, 39,385,344 elements, 157.5 MB

A nested group is indented below the one that is around it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from torch import nn

from ..errors import ModuleError, got_object
from ..printable import counted, in_bytes
from ..tables import Shown
from .module_tree import CONTAINERS, ModuleTree, is_sharded, refuse_lazy_parameters
from .policies import Wrap, as_policy


@dataclass(frozen=True)
class PlannedGroup:
    """Parameters that will be gathered and reduced together.

    modules:    what ``fully_shard`` will be called on: one module, or the items of a container
    names:      of ``modules`` from the root; ("",) is the root
    params:     those that are in no earlier group; tied ones once
    depth:      how many other groups, the root left out, are around it
    """

    modules: tuple[nn.Module, ...]
    names: tuple[str, ...]
    params: tuple[nn.Parameter, ...]
    depth: int

    @property
    def numel(self) -> int:
        return sum(param.numel() for param in self.params)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole, unsharded parameters in their storage dtype."""
        return sum(param.numel() * param.element_size() for param in self.params)

    @property
    def is_root(self) -> bool:
        return self.names == ("",)


@dataclass(frozen=True, repr=False)
class Plan(Shown):
    """The steps of ``parallelize``, in its order: children before parents, the root last. ``print`` it."""

    groups: tuple[PlannedGroup, ...]

    @property
    def numel(self) -> int:
        return sum(group.numel for group in self.groups)

    @property
    def nbytes(self) -> int:
        return sum(group.nbytes for group in self.groups)

    @property
    def names(self) -> list[str]:
        """Names of the modules that become groups, without the root."""
        return [name for group in self.groups if not group.is_root for name in group.names]

    def __str__(self) -> str:
        root = self.groups[-1]
        params = sum(len(group.params) for group in self.groups)
        kind = type(root.modules[0]).__name__
        lines = [f"{kind}: {counted(len(self.groups), 'group')}, {_sizes(params, self.numel, self.nbytes)}"]
        position = {name: index for index, (name, _) in enumerate(root.modules[0].named_modules())}
        shown = sorted(self.groups[:-1], key=lambda group: position[group.names[0]])
        for _, members in groupby(shown, key=_looks):
            same = list(members)
            first = same[0]
            name = _joined(first.names) if len(same) == 1 else f"{_joined(first.names)} ... {_joined(same[-1].names)}"
            sizes = _sizes(len(first.params), first.numel, first.nbytes)
            kind = ", ".join(dict.fromkeys(type(module).__name__ for module in first.modules))
            each = sizes if len(same) == 1 else f"{len(same)} groups of {sizes} each"
            lines.append(f"{'  ' * (first.depth + 1)}{name}  {kind}  {each}")
        lines.append(f"  (root)  {type(root.modules[0]).__name__}  {_sizes(len(root.params), root.numel, root.nbytes)}")
        return "\n".join(lines)


def plan(model: nn.Module, policy: Wrap = "auto", *, ignored_params: Iterable[nn.Parameter] | None = None) -> Plan:
    """Which groups ``parallelize(model, wrap=policy)`` makes. Changes nothing, needs no process group, works on the meta device.

    policy:     a wrap policy or one of its shorthands, see ``fsdp2.wrap``
    ignored_params: parameters that stay outside of all groups
    Collective: no. All ranks must get the same plan, and do where model and policy are the same.
    Raises:     ModuleError if ``model`` is no module, or sharded; ParameterError for lazy ones; ArgumentError for a policy that is
                none, and for classes or names that match nothing.

    Example:
        print(fsdp2.wrap.plan(net, {nn.Linear}))
    """
    if not isinstance(model, nn.Module):
        raise ModuleError(got_object("plan", model), expected="an nn.Module", fix="pass the model itself")
    if is_sharded(model):
        raise ModuleError(
            f"plan got a {type(model).__name__} that is sharded already",
            expected="a model before parallelize or fully_shard, or one with only some modules sharded",
            fix="plan first",
        )
    tree = ModuleTree(model, ignored_params or ())
    refuse_lazy_parameters(model)
    order = {id(module): index for index, module in enumerate(tree.candidates.values())}
    chosen: list[list[nn.Module]] = []
    for modules in as_policy(policy).choose(tree):
        expanded = [each for module in modules for each in with_forward(tree, module)]
        if expanded:
            chosen.append(expanded)
    chosen.sort(key=lambda modules: max(order[id(module)] for module in modules))
    taken: set[int] = set()
    groups = []
    for modules in [*chosen, [model]]:
        params = [param for module in modules for param in tree.params(module) if id(param) not in taken]
        params = list(dict.fromkeys(params))
        if params or modules == [model]:
            taken.update(map(id, params))
            names = tuple(tree.name_of(module) for module in modules)
            groups.append((tuple(modules), names, tuple(params)))
    inside = [(module, set(map(id, module.modules()))) for modules, _, _ in groups[:-1] for module in modules]
    planned = [
        PlannedGroup(modules, names, params, sum(id(modules[0]) in below and module not in modules for module, below in inside))
        for modules, names, params in groups
    ]
    return Plan(tuple(planned))


def with_forward(tree: ModuleTree, module: nn.Module) -> list[nn.Module]:
    """``module``, or, for a container whose forward never runs, its items."""
    if isinstance(module, CONTAINERS) and type(module).forward is nn.Module.forward:
        return [each for child in tree.children(module) for each in with_forward(tree, child)]
    return [module]


def _looks(group: PlannedGroup) -> tuple[Any, ...]:
    parents = tuple(name.rpartition(".")[0] if name.rpartition(".")[2].isdigit() else name for name in group.names)
    kinds = tuple(type(module) for module in group.modules)
    return kinds, len(group.params), group.numel, group.nbytes, group.depth, parents


def _joined(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"[{', '.join(names)}]"


def _sizes(params: int, numel: int, nbytes: int) -> str:
    return f"{counted(params, 'parameter')}, {numel:,} elements, {in_bytes(nbytes)}"
