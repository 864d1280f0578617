"""How many bytes a rank keeps of parameters, gradients and optimizer state: measured, and by the formula of its strategy.

Both tell four categories apart: the *compute copy* (unsharded parameters in the compute dtype, or what is kept of them over a node),
*gradients*, the *master* (what ``model.parameters()`` shows between steps) and the *optimizer's* state. Activations, buffers in flight
and the group that runs just now are none of them.

Worked example, zero1, 1000 parameters, 4 ranks, bf16 compute and reduction, AdamW; between two micro-batches that accumulate:

    compute 2000, gradients 2000, master 4000 / 4, optimizer 8000 / 4: 7000 in all; the ZeRO paper's 2 + 2 + 12 / 4 a parameter
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .arguments import COUNT, DTYPE, NATURAL, OPTIMIZER, WORD, require
from .core import torch_compat as compat
from .core.group.own_memory import leaves_of
from .core.iteration.module_state import units_in
from .core.setup.semantics import chosen_semantics
from .errors import ArgumentError, ModuleError, got, got_object
from .optim.flat import FlatOptimizer
from .strategy import STRATEGIES

Moment = Literal["accumulating", "stepping"]


@dataclass(frozen=True)
class StateBytes:
    """Bytes on this rank, without activations, buffers of collectives and the group that runs just now.

    compute:   unsharded parameters that stay between their uses, in the dtype of forward
    gradients: those that wait for the optimizer, or for another micro-batch
    master:    the parameters that the optimizer sees
    optimizer: its state
    total:     the sum
    """

    compute: float
    gradients: float
    master: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.compute + self.gradients + self.master + self.optimizer


def measured_state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> StateBytes:
    """Bytes that ``model``, sharded by ``parallelize`` or ``fully_shard``, and ``optimizer`` keep on this rank now.

    Storages count in full, each once: with the gaps of alignment, and after the gradients of a group one flag per parameter. Of the
    optimizer, state of the shape of its parameter counts, not step counters. Collective: no.

    Example:
        fsdp2.state_bytes.measured_state_bytes(model, optimizer).master  # bytes of this rank's parameters
    """
    given: Any = model
    if not isinstance(given, nn.Module):
        raise ModuleError(
            got_object("measured_state_bytes", model), expected="an nn.Module, sharded or not", fix="pass the model itself"
        )
    require("measured_state_bytes", OPTIMIZER.or_none, optimizer=optimizer)
    compute, gradients, master = _Storages(), _Storages(), _Storages()
    for unit in units_in(model.modules()):
        for group in unit.groups:
            master.add(param.local if group.flat is None else group.flat for param in group.params)
            if group.unsharded is not None:
                for storage in group.unsharded.storages():
                    compute.add_storage(storage)
            gradients.add(group.gradients.unreduced)
            shown = [each for param in group.params for each in (param.sharded, param.unsharded) if each is not None]
            gradients.add(each.grad for each in shown)
    state = _Storages()
    if optimizer is not None:
        state.add(_state_tensors(optimizer))
    return StateBytes(compute.nbytes_beside(master), gradients.nbytes, master.nbytes, state.nbytes)


def _state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    if isinstance(optimizer, FlatOptimizer):  # as it keeps them: what it shows may be dequantized
        return optimizer.state_tensors()
    pairs = [(owner, each) for owner, values in optimizer.state.items() for each in values.values()]
    return [each for owner, each in pairs if isinstance(each, Tensor) and each.shape == owner.shape and each.ndim > 0]


def expected_state_bytes(
    strategy: str,
    numel: int,
    *,
    world_size: int,
    shard_size: int | None = None,
    dtype: torch.dtype = torch.float32,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    optimizer_nbytes: int = 8,
    moment: Moment = "accumulating",
) -> StateBytes:
    """Bytes by formula, for ``numel`` parameters that divide evenly; without alignment and flags.

    shard_size:             ranks of a node, for hybrid strategies
    dtype:                  of the parameters as they are stored
    param_dtype, reduce_dtype: as in MixedPrecisionPolicy
    optimizer_nbytes:       of state per parameter: AdamW's is 8 in fp32
    moment:                 "accumulating": after a micro-batch that is not the last; "stepping": after the last, before ``zero_grad``
    Raises:                 ArgumentError for an unknown strategy, or a hybrid one without ``shard_size``.

    Example:
        expected = fsdp2.state_bytes.expected_state_bytes("zero3", 7_000_000_000, world_size=64, param_dtype=torch.bfloat16)
        expected.total
    """
    require("expected_state_bytes", WORD, strategy=strategy)
    require("expected_state_bytes", NATURAL, numel=numel, optimizer_nbytes=optimizer_nbytes)
    require("expected_state_bytes", COUNT, world_size=world_size)
    require("expected_state_bytes", COUNT.or_none, shard_size=shard_size)
    require("expected_state_bytes", DTYPE, dtype=dtype)
    require("expected_state_bytes", DTYPE.or_none, param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    if moment not in get_args(Moment):
        raise ArgumentError(
            got("expected_state_bytes", "moment", moment), expected=f"one of {get_args(Moment)}", fix='moment="stepping"'
        )
    chosen = STRATEGIES.get(strategy)
    if chosen is None or (chosen.is_hybrid and shard_size is None):
        raise ArgumentError(
            f"expected_state_bytes got strategy={strategy!r} and shard_size={shard_size!r}",
            expected=f"one of {list(STRATEGIES)}, hybrid ones with shard_size",
            fix="pass the same as to parallelize",
        )
    ranks = {"nobody": 1, "node": shard_size or 1, "world": world_size}
    computes_in = param_dtype or dtype
    compute = 0.0
    if chosen.parameters == "nobody" and not (chosen.optimizer == "nobody" and computes_in is dtype):  # else the master is it
        compute = numel * computes_in.itemsize
    elif chosen.parameters == "node" and chosen.optimizer == "world" and shard_size != world_size:  # else it is zero3
        compute = numel * computes_in.itemsize / ranks["node"]
    reduces_in = reduce_dtype or (computes_in if chosen_semantics() == "2.13" else dtype)
    gradients = numel * reduces_in.itemsize / ranks[chosen.gradients]
    if moment == "stepping":
        compute = 0.0
        gradients = numel * dtype.itemsize / ranks[chosen.optimizer]
    owned = numel / ranks[chosen.optimizer]
    return StateBytes(compute, gradients, owned * dtype.itemsize, owned * optimizer_nbytes)


class _Storages:
    """Storages, each once."""

    def __init__(self) -> None:
        self._found: dict[int, int] = {}

    def add(self, tensors: Iterable[Tensor | None]) -> None:
        for tensor in tensors:
            if tensor is None or tensor.is_meta:
                continue
            for leaf in leaves_of(compat.local_tensor(tensor) if isinstance(tensor, DTensor) else tensor):
                self.add_storage(leaf.untyped_storage())

    def add_storage(self, storage: Any) -> None:
        if storage.nbytes() > 0:
            self._found[compat.address_of(storage)] = storage.nbytes()

    @property
    def nbytes(self) -> int:
        return sum(self._found.values())

    def nbytes_beside(self, other: _Storages) -> int:
        """Bytes that ``other`` does not count."""
        return sum(nbytes for address, nbytes in self._found.items() if address not in other._found)
