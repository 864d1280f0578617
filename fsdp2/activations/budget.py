"""As many modules as fit into a number of bytes save what their backward needs; the others are checkpointed.

A step in which all are checkpointed measures what each would save: a checkpoint sees every tensor that autograd wants to save. From
the next forward on, as many of the last modules as fit save everything.

Worked example, four blocks whose inputs have 1 MB and that save 4 MB more (without parameters, which are there anyway); 13 MB to save

    checkpointed    a, b    1 MB each
    not             c, d    5 MB each: 12 MB in all; when a and b are computed again in backward, d and c have freed theirs
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from ..core.iteration.module_state import units_below
from ..core.modules.tensors import find_tensors
from ..errors import OrderError
from ..torch_names import torch_autograd, torch_compiler, torch_tensors
from .around_forward import around_forward, own_forward
from .checkpoint import Checkpoint
from .storages import StorageMap, has_storage, parameter_storages
from .torch_names import hooks_for_saved_tensors, is_compiled_whole

_OUTSIDE = (
    "a budget of activations measures modules outside of the graph: compile without fullgraph, or use a policy without max_nbytes"
)


@dataclass
class Measured:
    """Bytes of a module's inputs, and of the other tensors that autograd would save of it."""

    inputs: int
    saved: int = 0


class Budget:
    """The modules of one ``apply_activation_checkpointing`` with ``max_nbytes``, and which may save everything in a forward.

    measured: of each module, in the order in which they ran
    """

    def __init__(self, max_nbytes: int) -> None:
        self.max_nbytes = max_nbytes
        self.measured: weakref.WeakKeyDictionary[nn.Module, Measured] = weakref.WeakKeyDictionary()
        self._is_chosen = True

    def __reduce__(self) -> tuple[Any, ...]:
        return Budget, (self.max_nbytes,)  # a copied or loaded model measures anew

    @torch_compiler.dynamo_skips
    def run(self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs around ``forward``, in which ``Checkpoint`` does as chosen: measure, without the compiler, or nothing."""
        if torch.is_grad_enabled() and self._is_to_measure(module, args, kwargs):
            return self._run_measured(module, args, kwargs)
        return forward(*args, **kwargs)

    @functools.partial(torch_compiler.dynamo_disabled, reason=_OUTSIDE)
    def _is_to_measure(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        known = self.measured.get(module)
        if known is None or _nbytes_of((args, kwargs)) > known.inputs:
            return True
        if not self._is_chosen and module is next(iter(self.measured)):
            self._choose()
        return False

    @torch_compiler.dynamo_disabled
    def _run_measured(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        _refuse_units_below(module)
        if is_compiled_whole(module):
            raise OrderError(
                f"a budget of activations is for {type(module).__name__}, which is compiled with fullgraph=True",
                expected="a module that may run without the compiler: what autograd saves in it is measured so",
                fix="compile it without fullgraph, or use a policy without max_nbytes",
            )
        for each in self.measured:
            checkpoint_of(each).saves_all = False
        self._is_chosen = False
        self.measured[module] = measured = Measured(_nbytes_of((args, kwargs)))
        forward = functools.partial(own_forward(module), **kwargs)
        measurement = _Measurement(measured, module, (args, kwargs))
        return checkpoint(functools.partial(measurement.run, forward), *args, use_reentrant=False)

    def _choose(self) -> None:
        modules = list(self.measured)
        for index in choose_last([self.measured[module] for module in modules], self.max_nbytes):
            checkpoint_of(modules[index]).saves_all = True
        self._is_chosen = True


def checkpoint_of(module: nn.Module) -> Checkpoint:
    """Runs right around the module's forward."""
    found = around_forward(module).inner
    assert isinstance(found, Checkpoint)
    return found


def choose_last(measured: Sequence[Measured], max_nbytes: int) -> list[int]:
    """Indices of the modules that may save everything, the last first, such that all together save at most ``max_nbytes``.

    All save their inputs in any case, even if these alone are more.
    """
    total = sum(each.inputs for each in measured)
    chosen = []
    for index in reversed(range(len(measured))):
        if total + measured[index].saved <= max_nbytes:
            total += measured[index].saved
            chosen.append(index)
    return chosen


class _Measurement:
    """Adds up in ``result`` the bytes that a checkpoint would save of ``module``, in addition to parameters and ``inputs``."""

    def __init__(self, result: Measured, module: nn.Module, inputs: Any) -> None:
        self._result = result
        self._there_anyway = parameter_storages(module)
        self._there_anyway |= {torch_tensors.storage_key(tensor) for tensor in _tensors_in(inputs) if has_storage(tensor)}
        self._seen: StorageMap[bool] = StorageMap()

    def run(self, forward: Callable[..., Any], *args: Any) -> Any:
        """``forward(*args)``, in a checkpoint; in its recomputation nothing is counted."""
        of_checkpoint = hooks_for_saved_tensors()
        if torch_autograd.current_graph_task() != -1 or of_checkpoint is None:
            return forward(*args)
        pack, unpack = of_checkpoint

        def count(tensor: Tensor) -> Any:
            self._count(tensor)
            return pack(tensor)

        with saved_tensors_hooks(count, unpack):
            return forward(*args)

    def _count(self, tensor: Tensor) -> None:
        if not has_storage(tensor):
            self._result.saved += tensor.nbytes
        elif torch_tensors.storage_key(tensor) not in self._there_anyway and not self._seen.get(tensor):
            self._seen.put(tensor, True)
            self._result.saved += tensor.untyped_storage().nbytes()


def _nbytes_of(tree: Any) -> int:
    return sum(tensor.nbytes for tensor in _tensors_in(tree))


def _tensors_in(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []
    find_tensors(tree, found)
    return found


def _refuse_units_below(module: nn.Module) -> None:
    """Let ranks agree: with different measures they would compute different modules again, and gather units in different orders."""
    below = [name for name, unit in units_below(module) if module not in unit.modules]
    if below:
        raise OrderError(
            f"a budget of activations is for {type(module).__name__}, below which fully_shard took {len(below)} modules",
            items=below,
            expected="no collective inside of a measured module: each rank checkpoints by its own measurement",
            fix="call fully_shard on the modules that are checkpointed, or use a policy without max_nbytes",
        )
