"""A model as wrap policies see it: modules with names, and the parameters that are still to be grouped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from ..core.iteration.module_state import unit_of
from ..core.plan.placement import is_lazy
from ..errors import ParameterError
from ..sharded_class import original_class
from ..torch_names import torch_modules

CONTAINERS = (nn.ModuleList, nn.ModuleDict)
OPAQUE = (nn.MultiheadAttention,)
"""Modules whose forward reads its children's parameters without calling the children, which therefore can't be groups."""


class ModuleTree:
    """``root`` and the modules below it, without those that an earlier ``fully_shard`` call took and without ``ignored`` parameters.

    through_sharded: with what an earlier call took
    candidates:      every module that may become a group, by its first name, children before their parents; the root is none
    """

    def __init__(self, root: nn.Module, ignored: Iterable[nn.Parameter] = (), through_sharded: bool = False) -> None:
        self.root = root
        self._through_sharded = through_sharded
        self._ignored = {id(param) for param in ignored}
        self._names: dict[int, str] = {}
        self.candidates: dict[str, nn.Module] = {}
        self._params: dict[int, list[nn.Parameter]] = {}
        self._visit(root, "")

    def _visit(self, module: nn.Module, name: str) -> None:
        if id(module) in self._names or self._is_taken(module):
            return
        self._names[id(module)] = name
        if not isinstance(module, OPAQUE):
            for child_name, child in module.named_children():
                self._visit(child, f"{name}.{child_name}" if name else child_name)
        if module is not self.root and self.params(module) and not isinstance(module, torch.jit.ScriptModule):
            self.candidates[name] = module

    def _is_taken(self, module: nn.Module) -> bool:
        return not self._through_sharded and is_sharded(module)

    def name_of(self, module: nn.Module) -> str:
        """The module's first name from the root, whose own is ""."""
        return self._names[id(module)]

    def params(self, module: nn.Module) -> list[nn.Parameter]:
        """The parameters in the module's tree that are to be grouped, each once, in the order of ``parameters()``."""
        found = self._params.get(id(module))
        if found is None:
            found = self._params[id(module)] = list(self._walk(module, set()))
        return found

    def _walk(self, module: nn.Module, seen: set[int]) -> Iterator[nn.Parameter]:
        if id(module) in seen or self._is_taken(module):
            return
        seen.add(id(module))
        for param in module.parameters(recurse=False):
            if id(param) not in seen and id(param) not in self._ignored:
                seen.add(id(param))
                yield param
        for child in module.children():
            yield from self._walk(child, seen)

    def numel(self, module: nn.Module) -> int:
        return sum(param.numel() for param in self.params(module))

    def children(self, module: nn.Module) -> list[nn.Module]:
        """Its children that may become groups, each once."""
        return [child for child in module.children() if self.candidates.get(self._names.get(id(child), "")) is child]

    def users(self) -> dict[int, int]:
        """How many modules have each parameter, by its id: more than one if it is tied."""
        count: dict[int, int] = {}
        for module in self.root.modules():
            for param in module._parameters.values():
                if param is not None:
                    count[id(param)] = count.get(id(param), 0) + 1
        return count


def class_of(module: nn.Module) -> type[nn.Module]:
    """The class that it had before ``fully_shard``."""
    return original_class(type(module)) if unit_of(module) is not None else type(module)


def refuse_lazy_parameters(model: nn.Module) -> None:
    """Raise ParameterError naming each parameter of a lazy module that has not run yet."""
    lazy = [name for name, param in model.named_parameters() if is_lazy(param)]
    if lazy:
        raise ParameterError(
            f"{len(lazy)} parameters have no shape yet",
            items=lazy,
            expected="a model whose lazy modules have run once",
            fix="run a forward pass with an input of the right shape before",
        )


def is_sharded(module: nn.Module) -> bool:
    """Whether a data-parallel API took ``module`` before."""
    return bool({"fully_shard", "replicate"} & set(torch_modules.applied_apis(module)))
