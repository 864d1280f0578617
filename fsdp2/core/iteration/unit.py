"""A unit: what one ``fully_shard`` call made, its modules and their parameter groups.

A group belongs to one unit. Another unit *borrows* it if one of its modules is tied to a parameter of the group; the
group is then unsharded from the first of its users to the last, and reduced once, at the end of backward, when all uses
have added their gradients.

Worked example: an embedding with a unit of its own, and a head in the root that is tied to it:

    the root borrows the embedding's group; ``model.head.weight is model.embedding.weight`` at every moment
    forward: the root unshards it, the embedding's end leaves it alone, and the root's end reshards it
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.profiler import record_function

from ...torch_names import torch_autograd
from ..comm.streams import streams_of
from ..group.all_gather import Gathering, send_together
from ..group.group_plan import have_mixed_dtypes
from ..group.options import MicroBatch
from ..group.param import Owner
from ..group.param_group import GroupState, ParamGroup
from ..group.shown_parameters import show
from .call import UnitCalls


@dataclass(frozen=True, slots=True)
class PrefetchDepth:
    """How many units are gathered ahead of the one that runs.

    units:      at most so many, 0 for none
    max_nbytes: a bound of their unsharded parameters together, though the next unit always fits

    Worked example: at most 3 units and 1000 bytes; the next ones have 400, 500, 300 bytes unsharded: 2 are gathered.
    """

    units: int = 1
    max_nbytes: int | None = None

    def reach(self, nbytes: Iterable[int]) -> int:
        """How many of the next units are gathered ahead. nbytes: of their unsharded parameters, in their order"""
        count = total = 0
        for each in nbytes:
            total += each
            if count == self.units or (count > 0 and self.max_nbytes is not None and total > self.max_nbytes):
                break
            count += 1
        return count


NEXT_ONE = PrefetchDepth()


@dataclass(frozen=True)
class UnitOptions:
    """When a unit is unsharded and resharded, as the user asked for it; setters replace the value as a whole.

    reshard_after_forward: True, False, or a number of ranks: then each group reshards to its own ``smaller`` mesh
    reshard_is_default:    the user did not choose: a root then keeps its parameters from forward to backward
    unshard_in_backward:   backward needs the parameters
    accumulates_whole:     over micro-batches gradients stay unsharded, without communication
    max_reductions:        reduce-scatter inputs in flight; the largest of all units under a root counts
    prefetch_forward, prefetch_backward: the units to gather after this one, instead of the next ones recorded
    forward_depth, backward_depth: how many units of that order to gather ahead
    backward_prefetch:     when to gather the unit before this one: before this one's gradients are computed, after
                           that, or not at all
    optional:              ranks may leave the unit, and those below it, out of any forward
    """

    reshard_after_forward: bool | int = True
    reshard_is_default: bool = False
    unshard_in_backward: bool = True
    accumulates_whole: bool = False
    max_reductions: int = 1
    prefetch_forward: Sequence[Unit] = ()
    prefetch_backward: Sequence[Unit] = ()
    forward_depth: PrefetchDepth = NEXT_ONE
    backward_depth: PrefetchDepth = NEXT_ONE
    backward_prefetch: Literal["pre", "post"] | None = "pre"
    optional: bool = False

    @property
    def prefetches_the_one_before(self) -> bool:
        """Whether the begin of its backward gathers the unit whose forward ended before its own."""
        return self.backward_prefetch == "pre" and self.backward_depth.units > 0 and not self.prefetch_backward


class Kept(NamedTuple):
    """A group that stays unsharded, as it was when that began.

    shards, unsharded: versions of its shards and of its unsharded parameters
    for_user:          the user called ``unshard``, and may write the unsharded parameters, until they are resharded
    in_graph:          and did so while a graph was captured
    """

    shards: tuple[int, int]
    unsharded: int
    for_user: bool = False
    in_graph: bool = False


class Unit:
    """What one ``fully_shard`` call made.

    groups:           its own groups
    uses:             its own groups and those it borrows
    max_norm_weights: embeddings that shrink their rows in forward; the ``write_back`` of each follows it
    ignored:          where the parameters are that the user manages
    fqn:              the name of its first module, from the root
    summoned:         its modules show whole parameters from ``summon_full_params``, which forward uses as they are
    kept_frozen:      groups that ``reshard`` only hides while all of their parameters are frozen, as they were when
                      gathered; None: not gathered yet, or by the user, who may have written the values
    watchers:         functions that a root calls at each end of backward
    guarded:          a rank whose pass an exception ends takes part in it all the same, by the log of forward
    num_served:       how many of its modules' forwards a guarded pass has served (``agreed/guarded_pass.py``)
    """

    guarded = False
    num_served = 0
    max_norm_weights: Sequence[Any] = ()
    kept_frozen: Mapping[ParamGroup, Kept | None] = MappingProxyType({})
    watchers: tuple[Callable[[], None], ...] = ()

    def __init__(
        self,
        modules: Sequence[nn.Module],
        groups: Iterable[ParamGroup],
        borrowed: Iterable[ParamGroup],
        device: torch.device,
        mp_policy: Any,
        options: UnitOptions,
    ) -> None:
        self.modules = tuple(modules)
        self.groups: list[ParamGroup] = []
        self.uses: list[ParamGroup] = []
        self.device = device
        self.mp_policy = mp_policy
        self.options = options
        self.micro_batch = MicroBatch()
        self.ignored: list[Owner] = []
        self.fqn = ""
        self.summoned = False
        self.calls = UnitCalls()
        self._streams = streams_of(device)
        self.extend(groups, borrowed)

    def extend(self, groups: Iterable[ParamGroup], borrowed: Iterable[ParamGroup]) -> None:
        """Take these groups too, between two iterations."""
        borrowed = [*self.borrowed, *borrowed]
        self.groups += groups
        self.uses = [*self.groups, *borrowed]
        for group in self.groups:
            group.gradients.set_micro_batch(self.micro_batch)
        for group in borrowed:
            group.holders = group.holders or set()

    @property
    def name(self) -> str:
        """For messages and logs."""
        return self.fqn or "the root"

    @property
    def borrowed(self) -> list[ParamGroup]:
        return self.uses[len(self.groups) :]

    @property
    def ranks(self) -> set[int]:
        """The ranks that have pieces of its parameters, over the mesh axes of the model as well."""
        meshes = {param.spec.sharded.mesh for group in self.groups for param in group.params}
        return {rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()}

    @property
    def unsharded_nbytes(self) -> int:
        return sum(group.plan.unsharded_nbytes for group in self.uses)

    def choose(self, **changes: Any) -> None:
        """Replace these ``UnitOptions`` from now on; the others stay."""
        self.options = replace(self.options, **changes)

    def set_micro_batch(self, micro_batch: MicroBatch) -> None:
        """Let the next backwards do as ``micro_batch`` says."""
        self.micro_batch = micro_batch
        for group in self.groups:
            group.gradients.set_micro_batch(micro_batch)

    def issue(self, copy: bool = False) -> None:
        """Start unsharding, in one launch for each process group. Collective: yes, over the shard axis."""
        together: list[Gathering] | None = [] if len(self.uses) > 1 else None
        profiled: Any = None
        if torch_autograd.profiler_is_on():
            profiled = record_function(f"FSDP::all_gather ({self.fqn or 'root'})")
            profiled.__enter__()
        kept = [group for group in self.kept_frozen if group.state is GroupState.SHARDED] if self.kept_frozen else ()
        try:
            for group in self.uses:
                group.issue(copy, together)
                if group.holders is not None:
                    group.holders.add(self)
        except BaseException:
            if (
                together and together[0].sender is not None and together[0].sender.packs
            ):  # other ranks may send more in that collective: send nothing
                together = None
                self.release()
            raise
        finally:  # on a stream device also if the gather of another group failed
            if kept:
                gathered = {group: Kept(group.shards_version(), group.unsharded_version()) for group in kept}
                self.kept_frozen = {**self.kept_frozen, **gathered}
            if together:
                self._send(together)
            if profiled is not None:
                profiled.__exit__(None, None, None)

    def _send(self, together: list[Gathering]) -> None:
        try:
            send_together(together, self._streams)
        except BaseException:  # out of memory for what is packed: nothing was sent
            for group in self.uses:
                group.cancel()
            raise

    def can_be_gathered_anew(self, versions: Sequence[tuple[int, int]]) -> bool:
        """Whether a gather needs no memory or values from what compute has done since its shards had ``versions``."""
        for group, version in zip(self.uses, versions, strict=True):
            stays = group.state is GroupState.HIDDEN and self.kept_frozen.get(group) is not None
            if (
                not (stays or group.state is GroupState.SHARDED)
                or group.keeps_storage
                or group.unsharded is None
                or group.holders is not None
                or group.is_out_of_date(version)
                or not group.registry.verify(group.plan.has_own_memory)
            ):
                return False
        return True

    def wait(self) -> None:
        for group in self.uses:
            group.wait()

    def release(self) -> None:
        """Wait for the gathers under way."""
        for group in self.uses:
            if group.holders is not None:
                group.holders.discard(self)
                if not group.holders:
                    group.reshard()
            elif group in self.kept_frozen:  # other ranks may use it, and keep it
                group.wait()
                if not self._keeps(group):
                    group.reshard()
            else:
                group.release()

    def reshard(self, to_smaller: bool = False) -> None:
        """Reshard the groups that no other unit holds. to_smaller: each to its smaller mesh, if it has one"""
        for group in self.uses:
            if group.holders is not None:
                group.holders.discard(self)
                if group.holders:
                    continue
            if self.kept_frozen and self._keeps(group):
                continue
            if to_smaller:
                group.reshard_to_smaller()
            else:
                group.reshard()

    def _keeps(self, group: ParamGroup) -> bool:
        """Hide ``group`` if it may stay unsharded. Return whether it does."""
        return self.kept_frozen.get(group) is not None and group.keep_if_frozen()

    def reshard_for_all(self) -> None:
        """Reshard the groups even if other units hold them: the user's modules must show sharded parameters now."""
        for group in self.uses:
            group.reshard_for_all()
        self.await_host_reads()

    def await_host_reads(self) -> None:
        """Block until the host may write offloaded shards."""
        for group in self.uses:
            group.await_host_read()

    def hide(self) -> None:
        """Let the user's modules show sharded parameters, and keep what is unsharded for a backward that may come."""
        for group in self.uses:
            group.hide()

    def drop(self) -> None:
        """After an exception: reshard, and forget every gradient that has not reached the sharded parameters."""
        for group in self.groups:
            group.gradients.discard()
            if group.holders:
                group.holders.clear()
            if not self._keeps(group):  # a rank may recover alone, and others keep what is frozen
                group.reshard()

    def has_gradients(self) -> bool:
        return any(param.sharded.grad is not None for group in self.groups for param in group.params)

    def notice_changes(self, more_may_come: bool = False) -> None:
        """Parameters may have been moved or cast: take them over now, so that memory holds at most one group more.

        more_may_come: the modules of a list are cast one after another; a group that is half cast waits for its last
                       module. If that never comes, the next unshard refuses it.
        Raises:        ParameterError naming the parameters of a group that is half cast
        """
        for group in self.groups:
            if not group.registry.verify(group.plan.has_own_memory) and not (
                more_may_come and have_mixed_dtypes(group.params)
            ):
                group.rebuild()
                show(group.params, [param.sharded for param in group.params])  # ``_apply`` unties what it replaces


def ahead(units: Sequence[Unit], depth: PrefetchDepth) -> Sequence[Unit]:
    """The first of ``units``, which come next, that are gathered while a unit runs; the same on all ranks.

    Frozen groups that stay unsharded take nothing more.
    """
    nbytes = (
        sum(group.plan.unsharded_nbytes for group in unit.uses if unit.kept_frozen.get(group) is None)
        for unit in units[: depth.units]
    )
    return units[: depth.reach(nbytes)]
