"""One group's gradients: collected from the unsharded parameters, accumulated, and sent to the sharded ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import ArgumentError, OrderError
from ...torch_names import torch_tensors
from ..comm import backends
from ..comm.division import Divisions, divisions_for
from .group_plan import GroupPlan
from .options import MicroBatch, ReductionOptions
from .param import let_add_up
from .reduce_plan import ReduceJob, ReducePlan
from .reduction import Reduction


@dataclass
class _Planned:
    """A plan, and the state of the parameters for which it was made.

    trainable:  for each parameter of the group
    has_frozen: a parameter of the plan is not trainable now, and was when the waiting gradients were added up
    compact:    plans for a custom communicator, by which parameters of the plan were used
    """

    plan: ReducePlan
    trainable: list[bool]
    has_frozen: bool
    compact: dict[tuple[bool, ...], ReducePlan] = field(default_factory=dict)


class Gradients:
    """The gradients of one group, from backward to the sharded parameters.

    fqn:  the group's
    plan: the group's as it is now
    """

    def __init__(self, close_lease: Callable[[], None]) -> None:
        """close_lease: see ``ReduceJob``"""
        self.fqn = ""
        self.plan: GroupPlan
        self._close_lease = close_lease
        self.options = ReductionOptions()
        self.micro_batch = MicroBatch()  # that of its unit
        self.number = -1  # among the groups over the same ranks, from the first backward on that reduces
        # Mesh axes over which an activation or gradient was seen to vary; shared by all units under a root.
        self.varying: set[str] = set()
        self.reached = False  # a backward has begun in a unit that uses the group, and nothing was reduced since
        self._planned: _Planned | None = None
        self._collected: ReducePlan | None = None  # that of the last ``collect``
        self._accumulated: Tensor | None = None
        self._on_leaves = False  # the unsharded parameters hold gradients of backwards that did not reduce
        self._used: list[bool] = []
        # Its ``sum`` is not all-reduced or handed out yet; the next reduction takes it.
        self._adding: Reduction | None = None
        self._divisions: tuple[object, Divisions] | None = None

    def set_number(self, number: int) -> None:
        """Set the number by which all ranks know the group, also in a plan that already laid out unsynced gradients."""
        self.number = number
        if self._planned is not None:
            self._planned.plan.set_number(number)

    def choose(self, **changes: Any) -> None:
        """Use these ``ReductionOptions`` from the next reduction on; the others stay."""
        self.options = replace(self.options, **changes)

    # --- before backward ---

    @property
    def adds_up_on_leaves(self) -> bool:
        """Whether the next backward leaves its gradients on the unsharded parameters, as with torch 2.15.

        Gradients of earlier versions, and those inside of ``fsdp2.accumulate``, are collected instead.
        """
        micro_batch = self.micro_batch
        return self.plan.options.semantics != "2.13" and not micro_batch.reduces and not micro_batch.accumulates_shards

    def set_micro_batch(self, micro_batch: MicroBatch) -> None:
        """Treat the next backward's gradients by ``micro_batch``.

        Gradients that will add up on unsharded parameters do so in their dtype from now on, not only after the next
        backward: pipeline schedules write gradients of weights there before it.
        """
        before = self.adds_up_on_leaves
        self.micro_batch = micro_batch
        if self.adds_up_on_leaves is before:
            return
        self.choose_leaf_dtypes()
        for param in self.plan.params:
            if param.unsharded is not None and param.unsharded.grad is not None:
                self._on_leaves = True
            else:
                let_add_up(param)

    def follow(self, plan: GroupPlan) -> None:
        """The group has a new plan."""
        self.plan = plan
        self.choose_leaf_dtypes()

    def choose_leaf_dtypes(self) -> None:
        """Choose the ``grad_dtype`` of unsharded parameters that are made later."""
        dtypes, adds_up = self.plan.gradients, self.adds_up_on_leaves
        for param in self.plan.params:
            param.adds_up_in = dtypes.of_unsharded(param, adds_up)

    # --- from backward ---

    def _current_plan(self) -> ReducePlan:
        """The plan for the parameters that are trainable now, and those with waiting gradients."""
        group, before = self.plan, self._planned
        with torch_tensors.without_torch_function():
            trainable = [param.sharded.requires_grad for param in group.params]
        if (
            before is not None
            and before.plan.group is group
            and before.trainable == trainable
            and (not before.has_frozen or self.has_unreduced)
        ):
            return before.plan
        waits = before if self.has_unreduced else None
        if waits is not None and (waits.plan.group is not group or self.options.comm is not None):
            self._refuse_change(waits, trainable)
        waiting = [] if waits is None else waits.plan.params
        params = [param for param in group.params if param.sharded.requires_grad or param in waiting]
        plan = ReducePlan(group, params, compact=False, number=self.number if self._compares_late() else None)
        self._planned = _Planned(plan, trainable, has_frozen=len(params) > sum(trainable))
        if waits is not None:
            self._move(waits.plan, plan)
        return plan

    def forget_plan(self) -> None:
        """Free the plan's constants, unless gradients wait in its layout. The next backward makes them again."""
        if not self.has_unreduced:
            self._planned = self._collected = None

    def _compares_late(self) -> bool:
        """Whether ranks compare afterwards which group each reduced: before, the host would wait for the device."""
        if self.plan.mesh.size == 1:
            return False
        return any(backends.is_stream_ordered(backend) and backends.moves_data(backend) for backend in self.backends)

    def _move(self, before: ReducePlan, plan: ReducePlan) -> None:
        """Lay the waiting gradients out as ``plan`` does, which has all parameters of ``before``."""
        if self._accumulated is not None:
            self._accumulated = plan.moved(self._accumulated, before, before.num_shards)
            used = dict(zip(before.params, self._used, strict=True))
            self._used = [used.get(param, False) for param in plan.params]
        if self._adding is not None:
            self._adding.advance()
            if self._adding.sum is not None:
                self._adding.sum = plan.moved(self._adding.sum, before, 1)

    def _refuse_change(self, before: _Planned, trainable: list[bool]) -> None:
        """Raise OrderError: the waiting gradients have the layout of the parameters as they were."""
        group = self.plan
        where = self.fqn or "the root"
        toggled = []
        what = f"dtype or memory of the parameters of {where}"
        if before.plan.group is group:
            pairs = zip(group.params, trainable, before.trainable, strict=True)
            toggled = [f"{param.fqn} requires_grad={now}" for param, now, was in pairs if now is not was]
            what = f"requires_grad of parameters of {where}"
        raise OrderError(
            f"{what} changed while gradients accumulate without sync",
            items=toggled or [f"{param.fqn} {param.dtype}" for param in group.params],
            expected="the same trainable parameters, as they were, from the first backward without sync "
            "to the one that reduces",
            fix="change them after that backward, or drop the accumulated gradients with model.zero_grad()",
        )

    def _compact_plan(self, used: list[bool]) -> ReducePlan:
        """The plan for a custom communicator: it has only the parameters that were used."""
        planned = self._planned
        assert planned is not None
        plan = planned.compact.get(tuple(used))
        if plan is None:
            params = [param for param, wanted in zip(planned.plan.params, used, strict=True) if wanted]
            plan = planned.compact[tuple(used)] = ReducePlan(self.plan, params, compact=True)
        return plan

    @property
    def hands_out(self) -> bool:
        """Whether a reduction ends at the sharded parameters; else its result is added up here."""
        return self.micro_batch.all_reduces or not (
            self.micro_batch.accumulates_shards or self.plan.mesh.replicate_group is not None
        )

    @property
    def unreduced(self) -> list[Tensor]:
        """Added-up gradients, whole or reduce-scattered, in reduce dtype, that have not reached sharded parameters."""
        leaves = (
            [param.unsharded for param in self.plan.params if param.unsharded is not None] if self._on_leaves else []
        )
        scattered = None if self._adding is None else self._adding.sum
        return [each for each in (self._accumulated, scattered, *(leaf.grad for leaf in leaves)) if each is not None]

    def is_waiting(self) -> bool:
        """At the end of backward: whether a gradient is not collected yet, or accumulated gradients are due."""
        if self.reached:
            return True
        if (self._accumulated is not None or self._on_leaves or self._adding is not None) and self.is_due:
            return True
        for param in self.plan.params:  # noqa: SIM110 (a generator costs every unit of every backward one more call)
            if param.unsharded is not None and param.unsharded.grad is not None:
                return True
        return False

    @property
    def is_due(self) -> bool:
        """Whether a backward reduces the gradients that accumulated before, even if it adds none."""
        if not self.micro_batch.reduces:
            return False
        return (
            self._accumulated is not None
            or self._on_leaves
            or (self._adding is not None and self.micro_batch.all_reduces)
        )

    @property
    def has_unreduced(self) -> bool:
        """Whether gradients that accumulated have not reached the sharded parameters yet."""
        return self._accumulated is not None or self._on_leaves or self._adding is not None

    def leave(self) -> bool:
        """Leave gradients on the unsharded parameters, if backward does not reduce; False: ``take`` must get them."""
        if self.micro_batch.reduces or not self.adds_up_on_leaves:  # usual, without a call
            return False
        # On all ranks, though some may have used no parameter; a frozen group has nothing that could wait.
        self._on_leaves |= self.reached and any(param.sharded.requires_grad for param in self.plan.params)
        self.reached = False
        self._current_plan()
        for param in self.plan.params:
            unsharded = param.unsharded
            grad = None if unsharded is None else unsharded.grad
            if unsharded is None or grad is None:
                continue
            self._on_leaves = True
            dtype = self.plan.gradients.added_up_in(param)
            if grad.requires_grad or grad.dtype is not (dtype or grad.dtype):
                unsharded.grad = None
                let_add_up(param)
                unsharded.grad = grad.detach().to(dtype)
        return True

    def take(self) -> list[Tensor | None]:
        """Take the gradients off the unsharded parameters, in the plan's order; empty if no parameter is trainable."""
        self.reached = False
        grads: list[Tensor | None] = []
        plan = self._current_plan()
        for param in plan.params:
            unsharded = param.unsharded  # None: only other ranks have ever run the parameter
            grad = None if unsharded is None else unsharded.grad
            if unsharded is not None and grad is not None:
                unsharded.grad = None
                if self._on_leaves:
                    let_add_up(param)
                if grad.requires_grad:  # from a backward with create_graph
                    grad = grad.detach()
            grads.append(grad)
        if plan.has_dtensors:
            plan.to_local(grads, self.varying, self.options.divide_factor is not None)
        return grads if self.micro_batch.contributes else [None] * len(grads)

    def collect(self, grads: list[Tensor | None]) -> Tensor | None:
        """Lay the result of ``take`` into a reduce-scatter input; clears ``grads``, which may hold the last references.

        With sync off they are added to the accumulated gradients, in reduce dtype, and stay here: returns None.
        """
        assert self._planned is not None
        plan = self._planned.plan
        if self.options.reduce_unused:
            self._refuse_zeros_of_no_dtype()
        used = [grad is not None for grad in grads]
        comm = self.options.comm if self.plan.mesh.shard_size > 1 else None
        if comm is None:
            dtype = plan.group.gradients.reduced
            if self._accumulated is not None and dtype.itemsize < plan.group.param_dtype.itemsize:
                dtype = plan.group.param_dtype  # added as they are, so that the sum alone is rounded
            buffer = torch.empty(plan.input_numel, dtype=dtype, device=self.plan.device)
        else:
            adds_up = not self.micro_batch.reduces or not self.hands_out or self.has_unreduced
            whole = adds_up or self.options.reduce_unused
            if not whole and not any(used):
                return None
            plan = self._compact_plan([True] * len(used) if whole else used)
            if not whole:
                grads[:] = [grad for grad in grads if grad is not None]
                used = [True] * len(grads)
            size = (plan.input_numel,)
            # the communicator sees no gradient that stays here
            allocate: Callable[..., Tensor] = comm.allocate if self.micro_batch.reduces else torch.empty
            buffer = allocate(size, dtype=plan.group.reduce_dtype, device=self.plan.device)
        plan.copy_in(grads, buffer)
        grads.clear()
        self._on_leaves = False
        self._collected = plan
        if self._accumulated is not None:
            buffer = buffer.add_(self._accumulated) if comm is not None else self._accumulated.add_(buffer)
            used = [a or b for a, b in zip(used, self._used, strict=True)]
        self._used = used
        if self.micro_batch.reduces:
            self._accumulated = None
            return buffer
        self._accumulated = buffer
        return None

    def _refuse_zeros_of_no_dtype(self) -> None:
        """Raise if the dtype of an unused parameter's gradient is told by no option. All ranks raise, or none."""
        names = [param.fqn for param, given in self.plan.gradients.added_up.items() if given.dtype is None]
        if names:
            raise ArgumentError(
                f"gradients of unused parameters are reduced, and {len(names)} parameters have grad_dtype=None",
                items=names,
                expected="MixedPrecisionPolicy(reduce_dtype=...), so that every rank makes zeros of one dtype",
                fix="set reduce_dtype, or another grad_dtype",
            )

    def discard(self) -> None:
        """Forget every gradient that has not reached the sharded parameters."""
        self._accumulated = None
        self._on_leaves = False
        self._adding = None
        self.reached = False
        for param in self.plan.params:
            if param.unsharded is not None:
                param.unsharded.grad = None
                let_add_up(param)

    @torch.no_grad()
    def zero(self, set_to_none: bool) -> None:
        """Do as ``zero_grad`` for the sharded parameters, shown or not, and for gradients not reduced yet."""
        self._accumulated = None
        self._adding = None
        with torch_tensors.without_torch_function():
            for param in self.plan.params:
                if self._on_leaves and param.unsharded is not None:
                    param.unsharded.grad = None
                    let_add_up(param)
                if set_to_none:
                    param.sharded.grad = None
                elif param.sharded.grad is not None:
                    param.sharded.grad.zero_()
        self._on_leaves = False

    # --- to the sharded parameters ---

    @property
    def scatter_group(self) -> dist.ProcessGroup | None:
        """The process group over which gradients are reduce-scattered; None: every rank has whole parameters."""
        return self.options.process_group or self.plan.mesh.shard_group

    @property
    def backends(self) -> tuple[str, str]:
        """The backends of reduce-scatter and all-reduce; "" for a collective that the group does not need."""
        groups = (self.scatter_group, self.plan.mesh.replicate_group)
        scatter, all_reduce = (backends.backend_of(group, self.plan.device.type) for group in groups)
        return scatter, all_reduce

    def divisions(self) -> Divisions:
        mesh, options = self.plan.mesh, self.options
        dtype = self.plan.reduce_dtype
        key = (options, dtype)
        if self._divisions is None or self._divisions[0] != key:
            backend, all_reduce_backend = self.backends
            if options.comm is not None and options.divide_factor is None:
                backend = "nccl"  # upstream shows its operation to a custom communicator on every backend
            divisions = divisions_for(
                mesh.shard_size,
                mesh.replicate_size,
                dtype,
                backend,
                options.divide_factor,
                options.sum_only,
                all_reduce_backend,
            )
            self._divisions = (key, divisions)
        return self._divisions[1]

    def reduce(self, buffer: Tensor) -> Reduction:
        """The reduction of the result of ``collect``, which has not started. See ``legs_of``."""
        plan, adding = self._collected, self._adding
        assert plan is not None
        hands_out = self.micro_batch.all_reduces or self.hands_out  # the usual case without a call
        job = ReduceJob(plan, self.fqn, self._used, self.divisions(), self.options, hands_out, self._close_lease)
        reduction = Reduction(job, buffer, adding)
        self._adding = None if job.hands_out else reduction
        return reduction
