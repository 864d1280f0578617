"""How many bytes a rank keeps of parameters, gradients and optimizer state: measured, and by the formula of its strategy.

Both tell four categories apart: the *compute copy* (unsharded parameters in the compute dtype, or what is kept of them over a node),
*gradients*, the *master* (what ``model.parameters()`` shows between steps) and the *optimizer's* state. Activations, buffers in flight
and the group that runs just now are none of them.

Worked example, zero1, 1000 parameters, 4 ranks, bf16 compute and reduction, AdamW; between two micro-batches that accumulate:

    compute 2000, gradients 2000, master 4000 / 4, optimizer 8000 / 4: 7000 in all; the ZeRO paper's 2 + 2 + 12 / 4 a parameter
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn

from .arguments import COUNT, DTYPE, NATURAL, OPTIMIZER, WORD, require
from .errors import ArgumentError, ModuleError, got, got_object
from .inspect import Kind, state_tensors, storages_of, units
from .semantics import chosen_semantics
from .strategy import STRATEGIES
from .torch_names import torch_tensors

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

    Each storage counts once and in full, so gaps of alignment are included, and so is the flag per parameter after a group's gradients.
    An optimizer's state counts if it has its parameter's shape; step counters don't. Collective: no.

    Example:
        fsdp2.state_bytes.measured_state_bytes(model, optimizer).master  # bytes of this rank's parameters
    """
    given: Any = model
    if not isinstance(given, nn.Module):
        raise ModuleError(
            got_object("measured_state_bytes", model), expected="an nn.Module, sharded or not", fix="pass the model itself"
        )
    require("measured_state_bytes", OPTIMIZER.or_none, optimizer=optimizer)
    found: dict[Kind | None, dict[int, int]] = {"parameters": {}, "unsharded": {}, "gradients": {}, None: {}}
    kept: list[tuple[Kind | None, torch.UntypedStorage]] = []
    for unit in units(model):
        for group in unit.groups:
            kept += group.memory()
    if optimizer is not None:
        kept += [(None, storage) for each in state_tensors(optimizer) for storage in storages_of(each)]
    for kind, storage in kept:
        if storage.nbytes() > 0:
            found[kind][torch_tensors.address_of(storage)] = storage.nbytes()
    master = found["parameters"]
    compute = sum(nbytes for address, nbytes in found["unsharded"].items() if address not in master)
    return StateBytes(compute, sum(found["gradients"].values()), sum(master.values()), sum(found[None].values()))


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
