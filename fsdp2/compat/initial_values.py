"""Values of a module before it is sharded: made where it is on the meta device, broadcast from the first rank, buffers cast.

One unit at a time, so that a whole model never has to fit on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from ..checkpoint.model_tensors import all_names
from ..checkpoint.training_state import clean_name
from ..core.group.param import sharded_from
from ..core.plan.mesh import DataParallelMesh
from ..core.setup.build import managed_modules
from ..errors import ArgumentError, MaterializationError, got
from ..strategy.same_start import broadcast


class Own:
    """The modules of one FSDP call: those below ``root`` that are in no unit yet, without the ignored ones.

    modules: ``root`` first, parents before children, in breadth: the order in which FSDP1 initializes
    """

    def __init__(self, root: nn.Module, ignored_modules: set[nn.Module], ignored_params: set[nn.Parameter]) -> None:
        inside = set(managed_modules([root])) - ignored_modules
        self.root = root
        self.modules = [module for module in _in_breadth(root) if module in inside]
        self._ignored = ignored_params

    def params(self) -> list[nn.Parameter]:
        """The parameters, each once, without those that are tied to a parameter of an earlier unit."""
        found = {param: None for module in self.modules for param in module.parameters(recurse=False)}
        return [param for param in found if param not in self._ignored and sharded_from(param) is None]

    def buffers(self) -> dict[str, Tensor]:
        """The buffers by name from ``root``, each once."""
        inside = set(self.modules)
        found: dict[int, tuple[str, Tensor]] = {}
        for module_name, module in self.root.named_modules():
            if module in inside:
                for name, buffer in module.named_buffers(module_name, recurse=False):
                    found.setdefault(id(buffer), (name, buffer))
        return dict(found.values())

    def has_meta(self) -> bool:
        return any(tensor.is_meta for tensor in (*self.params(), *self.buffers().values()))


def _in_breadth(root: nn.Module) -> list[nn.Module]:
    found = {root: None}
    level = [root]
    while level:
        level = [child for module in level for child in module.children() if child not in found]
        level = list(dict.fromkeys(level))
        found.update(dict.fromkeys(level))
    return list(found)


# --- the meta device ----------------------------------------------------------------------------------------------------------


def materialize_own(own: Own, param_init_fn: Callable[[nn.Module], None] | None, device: torch.device) -> None:
    """Give tensors on the meta device values, module by module: by ``param_init_fn``, or ``to_empty`` and ``reset_parameters``.

    Parameters stay the objects that they are, so that tied ones stay tied. Modules whose tensors have values are left alone.
    Raises: ArgumentError if ``param_init_fn`` is not a function; MaterializationError naming tensors that get no values.
    """
    if param_init_fn is not None and not callable(param_init_fn):
        raise ArgumentError(
            got("FSDP", "param_init_fn", param_init_fn),
            expected="a function of a module that gives its own tensors values",
            fix="for instance lambda module: module.to_empty(device=device, recurse=False)",
        )
    if not own.has_meta():
        return
    if param_init_fn is None:
        helpless = [type(each).__name__ for each in own.modules if _on_meta(each) and not hasattr(each, "reset_parameters")]
        if helpless:
            raise MaterializationError(
                f"{len(helpless)} modules with tensors on the meta device have no reset_parameters",
                items=sorted(set(helpless)),
                expected="a method reset_parameters() that initializes the module's own tensors",
                fix="pass param_init_fn, or shard with fsdp2.fully_shard and call fsdp2.materialize",
            )
    for module in own.modules:
        if not (_on_meta(module) or _has_none(module)):
            continue
        before = dict(module._parameters)
        if param_init_fn is not None:
            param_init_fn(module)
        elif _on_meta(module):
            with torch.no_grad():
                module.to_empty(device=device, recurse=False)
                module.reset_parameters()  # type: ignore[operator]
        _keep_identity(module, before)
    if own.has_meta():
        missing = [f"{name} {tuple(param.shape)}" for name, param in own.root.named_parameters() if param.is_meta]
        raise MaterializationError(
            f"{len(missing)} parameters are still on the meta device after param_init_fn",
            items=missing,
            expected="a function that gives the tensors of the module it gets values",
            fix="call module.to_empty(device=..., recurse=False) in it, and initialize",
        )


def _on_meta(module: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in _tensors(module))


def _has_none(module: nn.Module) -> bool:
    return next(_tensors(module), None) is None


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


def _keep_identity(module: nn.Module, before: dict[str, nn.Parameter | None]) -> None:
    for name, old in before.items():
        new = module._parameters.get(name)
        if old is not None and new is not None and new is not old and old.is_meta:
            torch.utils.swap_tensors(old, new)  # type: ignore[no-untyped-call]
            module._parameters[name] = old


# --- the same values on all ranks ---------------------------------------------------------------------------------------------


def broadcast_own(own: Own, mesh: DataParallelMesh, device: torch.device) -> None:
    """Give parameters and buffers the values of the mesh's first rank. Collective: yes, over ``mesh``."""
    broadcast(mesh.mesh, device, [*((f"parameter {at}", param) for at, param in enumerate(own.params())), *own.buffers().items()])


# --- buffers ------------------------------------------------------------------------------------------------------------------


def cast_own_buffers(own: Own, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    """Cast floating-point buffers to ``dtype``, in place; the dtypes that they had, under each of their names."""
    if dtype is None:
        return {}
    before = {id(buffer): buffer.dtype for buffer in own.buffers().values() if buffer.is_floating_point()}
    names = (
        named for prefix, module in all_names(own.root) for named in module.named_buffers(prefix, recurse=False, remove_duplicate=False)
    )
    dtypes = {clean_name(name): before[id(buffer)] for name, buffer in names if id(buffer) in before}
    for buffer in own.buffers().values():
        if id(buffer) in before:
            buffer.data = buffer.to(dtype)
    return dtypes
