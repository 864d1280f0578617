"""fsdp2 in place of torch's FSDP2, for programs that stay as they are.

    with fsdp2.install():                       # or once, and never undone
        import their_training_program           # its ``from torch.distributed.fsdp import fully_shard`` gets ours

It rebinds names: in the modules of torch that programs import them from, and in every module that has imported them already.
``uninstall`` puts the old values back. A program that keeps torch's function elsewhere (in a default argument, a closure, a
list) still has torch's.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
import threading
import types
from collections.abc import Iterable
from typing import Any

from .arguments import SWITCH, require
from .clients import torch_names
from .core.iteration.module_state import unit_of
from .lifecycle import UntilStopped

FSDP2_NAMES = (
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
)

FSDP1_NAMES = (
    "BackwardPrefetch",
    "CPUOffload",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedGradScaler",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
)

_log = logging.getLogger("fsdp2")
_lock = threading.RLock()
_installed: list[Installation] = []


class Installation(UntilStopped):
    """The names that one ``install`` call has rebound, until ``stop()`` or ``uninstall()``, or the end of a ``with`` block."""

    def _begin(self, undo: contextlib.ExitStack) -> None:
        self._rebound: list[tuple[types.ModuleType, str, Any, Any]] = []
        undo.callback(self._put_back)

    def uninstall(self) -> None:
        """Put back what ``install`` replaced; a second time, nothing. A name that somebody else has rebound since stays as it is."""
        self.stop()

    def _put_back(self) -> None:
        with _lock:
            if self in _installed:
                _installed.remove(self)
            for module, name, theirs, ours in reversed(self._rebound):
                if vars(module).get(name) is ours:
                    setattr(module, name, theirs)
            self._rebound.clear()

    def __repr__(self) -> str:
        modules = {module.__name__ for module, *_ in self._rebound}
        return f"<fsdp2 in place of torch's FSDP: {len(self._rebound)} names in {len(modules)} modules>"

    def rebind(self, replacements: dict[int, tuple[Any, Any]], homes: Iterable[types.ModuleType]) -> None:
        """In ``homes``, and in the modules of programs. replacements: by the id of each object: the object, and what replaces it"""
        for module in dict.fromkeys(homes):
            self._rebind(replacements, module)
        loaded: dict[str, Any] = dict(sys.modules)  # programs put other objects than modules there, too
        for name, module in loaded.items():
            if isinstance(module, types.ModuleType) and not _stays(name):
                self._rebind(replacements, module)

    def _rebind(self, replacements: dict[int, tuple[Any, Any]], module: types.ModuleType) -> None:
        for name, value in list(vars(module).items()):
            found = replacements.get(id(value))
            if found is not None and not torch_names.is_needed_by_torch(module, name):
                setattr(module, name, found[1])
                self._rebound.append((module, name, *found))


def install(*, fsdp1: bool = False, reference: bool = False) -> Installation:
    """Let the names of torch's FSDP2 mean fsdp2's in this process, in modules imported before and after this call.

    It covers ``torch.distributed.fsdp``, ``torch.distributed._composable.fsdp``, the private modules in which torch defines the names,
    and all modules outside of torch that have imported them. Models that torch's own functions have sharded before, or that
    ``replicate`` shards later, go on with torch's.

    fsdp1:      FSDP1's names as well (``FullyShardedDataParallel`` and what belongs to it), by ``fsdp2.compat``
    reference:  ``fully_shard`` and ``FSDPModule``, torch's and fsdp2's, mean those of ``fsdp2.reference``; so does ``parallelize``
    Returns:    the handle that undoes it, by ``uninstall()`` or as a context manager. A second call changes nothing, and neither does
                its handle.
    Collective: no. Thread-safe.
    Raises:     ArgumentError if ``fsdp1`` or ``reference`` is no bool

    Example:
        with fsdp2.install():
            from torch.distributed.fsdp import fully_shard  # fsdp2's
    """
    require("install", SWITCH, fsdp1=fsdp1, reference=reference)
    installation = Installation()
    with _lock:
        replacements = _replacements("fsdp2", torch_names.FSDP2_HOMES, FSDP2_NAMES)
        replacements |= _replaced_lookup()
        if fsdp1:
            replacements |= _replacements("fsdp2.compat", torch_names.FSDP1_HOMES, FSDP1_NAMES)
        homes = torch_names.homes(torch_names.FSDP2_HOMES + (torch_names.FSDP1_HOMES if fsdp1 else ()))
        if reference:
            means = importlib.import_module("fsdp2.reference")
            found = {"fully_shard": means.fully_shard, "FSDPModule": means.ReferenceModule}
            ours = importlib.import_module("fsdp2")
            for home in homes:
                replacements |= {id(vars(home)[name]): (vars(home)[name], found[name]) for name in found if name in vars(home)}
            replacements |= {id(vars(ours)[name]): (vars(ours)[name], found[name]) for name in found}
            homes += [ours, importlib.import_module("fsdp2.strategy")]
        installation.rebind(replacements, [*homes, torch_names.state_module])
        if installation._rebound:
            _installed.append(installation)
            _log.info("%r", installation)
    return installation


def uninstall() -> None:
    """Undo every ``install`` of this process.

    Example:
        fsdp2.install()
        fsdp2.uninstall()
    """
    with _lock:
        for installation in reversed(_installed[:]):
            installation.uninstall()


def _stays(module_name: str) -> bool:
    """Whether a module keeps its names: fsdp2's modules do, and torch's, which need their own classes to tell the two kinds apart."""
    return module_name.split(".")[0] in ("fsdp2", "torch")


def _replacements(ours: str, homes: tuple[str, ...], names: tuple[str, ...]) -> dict[int, tuple[Any, Any]]:
    """Of each of torch's objects by these names, by its id, which no other object has while it is here: the object, and ours."""
    package = importlib.import_module(ours)
    found = {}
    for module in torch_names.homes(homes):
        for name in names:
            theirs, mine = vars(module).get(name), getattr(package, name, None)
            if theirs is not None and mine is not None and theirs is not mine:
                found[id(theirs)] = theirs, mine
    return found


def _replaced_lookup() -> dict[int, tuple[Any, Any]]:
    """torch's private function that finds a module's state, for those who import it from where it is defined."""
    theirs = torch_names.state_module._get_module_fsdp_state
    if getattr(theirs, "_finds_ours", False):
        return {}

    def _get_module_fsdp_state(module: Any) -> Any:
        return unit_of(module) or theirs(module)

    _get_module_fsdp_state._finds_ours = True  # type: ignore[attr-defined]
    return {id(theirs): (theirs, _get_module_fsdp_state)}
