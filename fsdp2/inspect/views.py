"""What ``fsdp2.inspect`` shows: a parameter, a group, a unit.

Fields are values of the moment at which they were asked for; what changes from step to step is a function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..core.group.own_memory import leaves_of
from ..core.group.param import Owner
from ..torch_names import torch_dtensors

Kind = Literal["parameters", "unsharded", "gradients"]
"""What memory is for: shards, unsharded copies of them, or gradients that wait for another micro-batch or for the optimizer."""


@dataclass(frozen=True, eq=False)
class Parameter:
    """One parameter.

    fqn:        its name from the model that was inspected
    owners:     where it is registered: ``owner.module._parameters[owner.name]``; several if it is tied
    sharded:    what optimizers hold, and users see between steps
    shape:      unsharded; under tensor parallelism, of this rank's piece
    dim:        the dim that is cut over ``num_shards`` ranks; None: every rank has it whole
    unsharded:  returns what forward computes with, whose memory may be free; None before the first unshard
    piece_of:   returns the elements that this rank keeps of a tensor of ``shape``
    """

    fqn: str
    owners: Sequence[Owner]
    sharded: nn.Parameter
    shape: tuple[int, ...]
    dim: int | None
    num_shards: int
    unsharded: Callable[[], nn.Parameter | None]
    piece_of: Callable[[Tensor], Tensor]

    @property
    def dtype(self) -> torch.dtype:
        return self.sharded.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def local(self) -> Tensor:
        """This rank's shard, as it is now."""
        return local_of(self.sharded)

    @property
    def grad(self) -> Tensor | None:
        """This rank's shard of the gradient; the host has waited for it."""
        grad = self.sharded.grad
        return None if grad is None else torch_dtensors.waited_for(local_of(grad)).detach()


@dataclass(frozen=True, eq=False)
class Group:
    """Parameters of one dtype and mesh, which are gathered and reduced together. Its attributes are what a table of groups shows.

    name:          that of the unit that shows it
    ranks:         all that train these parameters on different data, this rank among them
    num_shards, num_replicas: ranks on the axis that cuts, and on the one that copies; None: the mesh has no such axis
    param_dtype, reduce_dtype: in which parameters are gathered and computed with, and in which gradients are reduced
    chosen_dtype:  the ``param_dtype`` of the user's policy
    is_offloaded:  shards and gradients are on the host
    sharded_nbytes, padding_nbytes: of this rank's shards, and of what lies between them
    unsharded_nbytes: while all of it is unsharded, with padding
    divide_factor: returns the divisor of gradients that was set in place of the number of ranks; None: none was
    has_unreduced: returns whether gradients of earlier micro-batches wait to be reduced
    memory:        returns the storages that it keeps allocated on this rank now, by kind; one may come twice
    """

    name: str
    params: Sequence[Parameter]
    device: torch.device
    ranks: frozenset[int]
    num_shards: int | None
    num_replicas: int | None
    shard_group: dist.ProcessGroup | None
    replicate_group: dist.ProcessGroup | None
    dtype: torch.dtype
    param_dtype: torch.dtype
    reduce_dtype: torch.dtype
    chosen_dtype: torch.dtype | None
    is_offloaded: bool
    sharded_nbytes: int
    padding_nbytes: int
    unsharded_nbytes: int
    divide_factor: Callable[[], float | None]
    has_unreduced: Callable[[], bool]
    memory: Callable[[], Iterable[tuple[Kind, torch.UntypedStorage]]]


@dataclass(frozen=True, eq=False)
class Unit:
    """What one ``fully_shard`` call made.

    name:            of its first module, from the model that was inspected; "" is that model
    event_name:      returns its name in events: from the root whose forward began, and "the root" for that one
    made_by:         "fsdp2" or "torch's FSDP2"
    borrowed:        groups of other units that it unshards as well, since parameters are tied
    mp_policy:       as the user gave it
    reshard_after_forward: whether it is resharded after forward, or over how many ranks
    is_kept_as_root: the user has not chosen ``reshard_after_forward``, so that the unit stays unsharded if it is the root
    reduces:         returns whether the next backward reduces its gradients over the shard axis
    all_reduces:     returns False if the user has switched off the all-reduce over replicas, and did not ask to add up shards instead
    accumulates:     returns whether the user has said that gradients of the next backward wait for those of a later one
    on_backward_end: calls its argument at the end of each backward that this unit ends, until the function that it returns is called.
                     The root ends fsdp2's backwards, the unit whose gradients come first torch's: register it on each
    reshards:        returns whether the next backward reshards it
    contributes:     returns False while this rank runs a stand-in for a batch that it does not have, whose gradients are dropped
    """

    name: str
    event_name: Callable[[], str]
    made_by: str
    modules: Sequence[nn.Module]
    groups: Sequence[Group]
    borrowed: Sequence[Group]
    mp_policy: Any
    reshard_after_forward: bool | int
    is_kept_as_root: bool
    reduces: Callable[[], bool]
    all_reduces: Callable[[], bool]
    accumulates: Callable[[], bool]
    on_backward_end: Callable[[Callable[[], None]], Callable[[], None]]
    reshards: Callable[[], bool]
    contributes: Callable[[], bool] = lambda: True

    @property
    def ranks(self) -> frozenset[int]:
        """All that hold pieces of its parameters, over the mesh axes of tensor parallelism as well."""
        meshes = {param.sharded.device_mesh for group in self.groups for param in group.params if isinstance(param.sharded, DTensor)}
        return frozenset(rank for mesh in meshes for rank in mesh.mesh.flatten().tolist())

    @property
    def unsharded_nbytes(self) -> int:
        return sum(group.unsharded_nbytes for group in (*self.groups, *self.borrowed))


def storages_of(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """Those of a tensor, of the tensors that a subclass is made of, or of a DTensor's local tensor; none on the meta device."""
    local = torch_dtensors.local_tensor(tensor) if isinstance(tensor, DTensor) else tensor  # not detached: some subclasses cannot be
    if not local.is_meta:
        yield from (leaf.untyped_storage() for leaf in leaves_of(local))


def local_of(tensor: Tensor) -> Tensor:
    """A DTensor's local tensor; another tensor itself, without autograd."""
    return torch_dtensors.local_tensor(tensor) if isinstance(tensor, DTensor) else tensor.detach()
