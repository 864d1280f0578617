"""The methods of a sharded module: those of torch's FSDP2's ``FSDPModule``, and ours.

Each method checks its arguments and calls its unit, group or schedule; ``core/`` does the work.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.distributed as dist
from torch import nn

from .clients.pretrained import saving_whole_tensors
from .communicators import (
    OwnAllGather,
    OwnReduceScatter,
)
from .copying import deepcopy_module
from .core.comm import backends
from .core.comm.agreement import another_over
from .core.iteration.finalization import GradientReductionHandle
from .core.iteration.first_forward import refuse_meta
from .core.iteration.module_state import ModuleState, schedule_of, sharded_unit
from .errors import ArgumentError, ModuleError, OrderError
from .hints.missing_names import answer_for
from .policy import AllGather, ReduceScatter
from .sharded_class import original_class
from .sharding_arguments import (
    check_bool,
    check_divide_factor,
    check_max_input_buffers,
    checked_bool,
    checked_depth,
    checked_nbytes,
    checked_units,
    groups_of_one_mesh,
    refuse_custom,
    warn_of_ignored_prefetch,
)
from .torch_names import torch_collectives, torch_modules, torch_tensors
from .user_warnings import warn


class UnshardHandle(torch_modules.TorchUnshardHandle):
    """The handle that ``FSDPModule.unshard(async_op=True)`` returns."""

    def __init__(self, unit: ModuleState | None = None) -> None:
        self._unit = unit

    def wait(self) -> None:
        """Make the unsharded parameters usable on the current stream and register them; again: no-op."""
        if self._unit is not None:
            self._unit.wait()
            self._unit.await_host_reads()
            self._unit = None


class _NoDDP:
    """An attribute that modules lack. Where ``DistributedDataParallel`` asks for it, to wrap a sharded module, it raises OrderError."""

    def __get__(self, module: nn.Module | None, cls: type) -> Any:
        if module is not None and sys._getframe(1).f_code is nn.parallel.DistributedDataParallel.__init__.__code__:
            raise OrderError(
                f"DistributedDataParallel got a {original_class(cls).__name__} that fully_shard has sharded",
                expected="one of the two: fully_shard averages gradients itself",
                fix="leave DistributedDataParallel out; to replicate the model over nodes, pass a 2-D mesh",
            )
        raise AttributeError(f"{cls.__name__} has no such attribute")


# To type checkers a sharded module is an nn.Module; at run time ``FSDP<Name>`` descends from the user's class and from FSDPModule.
if TYPE_CHECKING:
    _Module = nn.Module
else:
    _Module = object


class FSDPModule(_Module):
    """The methods of a module that ``fully_shard`` has sharded. Methods marked *recursive* also apply to FSDP modules below."""

    _ddp_params_and_buffers_to_ignore = _NoDDP()  # a user who sets it wraps what is not sharded

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Making an instance of ``FSDP<Name>``, as slicing a Sequential does, makes one of the original class."""
        original: Any = original_class(cls)
        made = original.__new__(original)
        made.__init__(*args, **kwargs)
        return made

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Hugging Face's ``save_pretrained`` writes whole tensors where the user's class has it; names of DDP point to ours."""
        super().__init_subclass__(**kwargs)
        answer_for(cls)
        inherited = getattr(cls, "save_pretrained", None)
        if inherited is not None:
            cls.save_pretrained = saving_whole_tensors(inherited)  # type: ignore[attr-defined]

    # --- parameters ---

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """All-gather this module's parameters, in ``param_dtype`` if that is set, and register them. Not recursive.

        async_op:   return a handle at once. If the program does not wait for it, the forward of the module does.
        Collective: yes, over the shard axis.

        Example:
            handle = model[0].unshard(async_op=True)  # gathers while the host does something else
            handle.wait()
            model[0][0].weight.shape  # the whole weight
            model[0].reshard()
        """
        unit = sharded_unit(self)
        refuse_meta([unit])
        schedule = schedule_of(unit)
        tree = schedule.tree
        if schedule.forward is None and not schedule.backward:
            tree.reshard_what_is_out_of_date(unit.uses)  # else it would stay as it is, and count as up to date
        schedule.await_optimizer(on_compute=async_op)  # where an asynchronous unshard copies the shards
        unit.issue(copy=async_op)
        tree.leave_unsharded(unit, for_user=True)
        tree.iteration.left_by_forward.discard(unit)
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Register the sharded parameters and free the unsharded ones; waits for a pending unshard first. Not recursive.

        Example:
            model[0].unshard()
            model[0].reshard()
        """
        _reshard(sharded_unit(self))

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """``nn.Module.named_parameters``, and ``parameters()``, which show the parameters that gradients belong to.

        Where a forward has left parameters unsharded for a backward, they show the sharded ones if these have gradients, so that
        clipping or a step in between misses none. Between micro-batches (``set_is_last_backward(False)``) they show the unsharded
        ones, which zero-bubble schedules differentiate.
        Collective: no.

        Example:
            {name: param.shape for name, param in model.named_parameters()}
        """
        schedule = sharded_unit(self).schedule
        if schedule is not None:
            schedule.before_listing()
        named: Iterator[tuple[str, nn.Parameter]] = super().named_parameters(*args, **kwargs)
        return named

    # --- one iteration ---

    def reset_iter_state(self) -> None:
        """After an exception in forward or backward: make the next iteration valid. Call it on the root.

        Waits for collectives under way, reshards all parameters, and discards gradients accumulated without sync; after a failed
        backward, which may have added to some gradients, it discards all. You may call it twice, and before the first forward.
        Collective: no.
        Raises: OrderError on a module that is not the root of its last forward.

        Example:
            try:
                model(x).sum().backward()
            except torch.OutOfMemoryError:
                model.reset_iter_state()
        """
        unit = sharded_unit(self)
        if unit.schedule is None:
            unit.reshard()
        else:
            unit.schedule.check_root(unit, "reset_iter_state")
            unit.schedule.reset()

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backward is the last of this iteration: only then does the device's current stream wait for reductions.

        Parameters have their gradients after every backward. Where several roots train together, call it on one of them.
        Collective: as ``set_requires_gradient_sync``.

        Example:
            for index, batch in enumerate(x.chunk(2)):
                model.set_is_last_backward(index == 1)
                model(batch).sum().backward()
        """
        is_last_backward = checked_bool("set_is_last_backward", "is_last_backward", is_last_backward)
        schedule = schedule_of(sharded_unit(self))
        schedule.is_last_backward = is_last_backward
        schedule.unshard_for_weights()

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Let ``finalize_backward`` end each iteration, not the end of a backward (``set_is_last_backward`` is then void). Root only.

        A backward then reduces, if sync is on, the modules that its hooks reach. Gradients without sync, and those of modules whose
        inputs need no gradient, wait for ``finalize_backward``.
        Raises: OrderError on a module that is not the root, and between a backward and its ``finalize_backward``.

        Example:
            model.set_manual_backward_finalization(True)
            model(x).sum().backward()
            model.finalize_backward()
        """
        enabled = checked_bool("set_manual_backward_finalization", "enabled", enabled)
        unit = sharded_unit(self)
        schedule_of(unit).set_manual(unit, enabled)

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Reduce pending gradients, by the flags as they are now, reshard, and end the iteration. Root only; no-op before a forward.

        With sync off it reduces no gradients, and a later call with sync on reduces them.
        async_op:   return a handle at once. Until its ``wait()``, this root (and roots that share its communication context) may
                    neither run forward nor finalize again.
        Collective: yes, over the shard axis, then the replicate axis.
        Raises:     OrderError without ``set_manual_backward_finalization(True)``, inside of a backward, with all-reduce off; with
                    ``async_op``, while another root that shares the context is between its forward and the end of its iteration

        Example:
            model.set_manual_backward_finalization(True)
            model(x).sum().backward()
            handle = model.finalize_backward(async_op=True)
            handle.wait()
            optimizer.step()
        """
        unit = sharded_unit(self)
        schedule = unit.schedule
        if schedule is None or not schedule.settled:
            return GradientReductionHandle() if async_op else None
        schedule.check_root(unit, "finalize_backward")
        handle = schedule.finalize(async_op)
        if async_op:
            return handle
        handle.wait()
        return None

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients; if not they accumulate unsharded, in reduce dtype. Recursive.

        Collective: no; yes, over the shard axis, between a forward that resharded and a backward that is now neither the last nor
        reduces nor reshards, which is how a pipeline stage begins one: zero-bubble schedules differentiate what ``parameters()``
        shows, so this call unshards the parameters that such a backward keeps.

        Example:
            model.set_requires_gradient_sync(False)
            model(x).sum().backward()  # no communication of gradients
            model.set_requires_gradient_sync(True)
            model(x).sum().backward()  # reduces the sum of both
        """
        requires_gradient_sync = checked_bool("set_requires_gradient_sync", "requires_gradient_sync", requires_gradient_sync)
        for unit in _units(self, recurse):
            unit.set_micro_batch(replace(unit.micro_batch, reduces=requires_gradient_sync, all_reduces=requires_gradient_sync))
        _unshard_for_weights(self)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """HSDP: whether backward all-reduces after the reduce-scatter; if not, reduce-scattered gradients accumulate. Recursive.

        Example:
            mesh = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
            fsdp2.fully_shard(net, mesh=mesh)
            net.set_requires_all_reduce(False)
            net(x).sum().backward()
            net.set_requires_all_reduce(True)
            net(x).sum().backward()  # all-reduces the sum of both
        """
        requires_all_reduce = checked_bool("set_requires_all_reduce", "requires_all_reduce", requires_all_reduce)
        for unit in _units(self, recurse):
            unit.set_micro_batch(replace(unit.micro_batch, all_reduces=requires_all_reduce))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """``nn.Module.zero_grad``, also for parameters that are unsharded now, and for gradients accumulated without sync.

        Example:
            model(x).sum().backward()
            model.zero_grad()
        """
        for unit in _units(self, recurse=True):
            if unit.schedule is not None:
                unit.schedule.tree.reductions.finish()
            for group in unit.groups:
                group.gradients.zero(set_to_none)
        super().zero_grad(set_to_none)

    # --- memory against communication ---

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Change what ``fully_shard`` got as ``reshard_after_forward``, for the root as well. Recursive.

        Raises: ArgumentError for an int: 1 could mean one rank

        Example:
            model.set_reshard_after_forward(False)  # keeps parameters from forward to backward
        """
        check_bool("set_reshard_after_forward", "reshard_after_forward", reshard_after_forward)
        for unit in _units(self, recurse):
            unit.choose(reshard_after_forward=reshard_after_forward, reshard_is_default=False)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether parameters are resharded after backward; keeping them saves the next micro-batch's gather. Recursive.

        Collective: as ``set_requires_gradient_sync``.

        Example:
            model.set_reshard_after_backward(False)
            model(x).sum().backward()
            model.set_reshard_after_backward(True)
            model(x).sum().backward()  # forward gathers nothing
        """
        reshard_after_backward = checked_bool("set_reshard_after_backward", "reshard_after_backward", reshard_after_backward)
        for unit in _units(self, recurse):
            unit.set_micro_batch(replace(unit.micro_batch, reshards=reshard_after_backward))
        _unshard_for_weights(self)

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Whether reshard leaves the memory of unsharded parameters allocated, at addresses that stay (CUDA graphs). Recursive.

        A rank then keeps all unsharded parameters of these modules in memory, in ``param_dtype``.

        Example:
            model.set_keep_unsharded_storage(True)
            model(x).sum().backward()
        """
        keep = checked_bool("set_keep_unsharded_storage", "keep", keep)
        for unit in _units(self, recurse):
            for group in unit.groups:
                group.keep_storage(keep)

    def set_frozen_budget(self, max_nbytes: int) -> None:
        """Keep frozen parameters gathered, from one use to the next, up to this many bytes of unsharded parameters. Recursive.

        A group with only frozen parameters is then gathered once, and again after its shards were written, instead of in each
        forward, recomputation and backward of each micro-batch. Modules show the sharded parameters in between: write these, not
        their ``data``, which leaves no trace (on a CPU the next forward raises then). The groups that stay are those that come
        first in ``named_modules()`` and fit: with a group for each use in turn, dropping the least recently used one would drop
        each just before it is needed. Frozen and trained parameters of one module share a group if they have the same dtypes and
        mesh, and such a group never stays; neither do embeddings with ``max_norm``, and parameters that modules share.

        max_nbytes: of this rank, in the dtype that is gathered; 0: as before, and frees what has stayed
        Collective: no; all ranks must make the call, not within a forward or a backward. A parameter that is trained again leaves;
                    one that is frozen later stays out until the next call.
        Raises:     ArgumentError for what is no number of bytes

        Example:
            model[0].requires_grad_(False)
            model.set_frozen_budget(8 << 30)
        """
        left = checked_nbytes("set_frozen_budget", "max_nbytes", max_nbytes)
        for unit in dict.fromkeys(_units(self, recurse=True)):
            unit.kept_frozen = {}
            _reshard(unit)
            for group in unit.groups:
                is_frozen = not any(param.trainable for param in group.params)
                if is_frozen and group.holders is None and not unit.max_norm_weights and group.plan.unsharded_nbytes <= left:
                    left -= group.plan.unsharded_nbytes
                    unit.kept_frozen = {**unit.kept_frozen, group: None}

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether backward gathers the parameters; an embedding's backward does not need them.

        Example:
            embedding = nn.Embedding(100, 16)
            head = nn.Linear(16, 100)
            fsdp2.fully_shard(embedding).set_unshard_in_backward(False)
            fsdp2.fully_shard(head)(embedding(torch.arange(4))).sum().backward()
        """
        unshard_in_backward = checked_bool("set_unshard_in_backward", "unshard_in_backward", unshard_in_backward)
        sharded_unit(self).choose(unshard_in_backward=unshard_in_backward)

    # --- prefetch ---

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """In forward, gather ``modules`` as soon as this module has its parameters, instead of the next one of the recorded order.

        Raises: ModuleError if one of them is not sharded

        Example:
            model[0].set_modules_to_forward_prefetch([model[1]])
        """
        sharded_unit(self).choose(prefetch_forward=checked_units(modules, "set_modules_to_forward_prefetch"))

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """In backward, gather ``modules`` as soon as this module has its parameters, instead of the module that ran before it.

        A module without parameters of its own gathers nothing, unless it is the root; the first forward warns of that.

        Raises: ModuleError if one of them is not sharded

        Example:
            model[1].set_modules_to_backward_prefetch([model[0]])
        """
        unit = sharded_unit(self)
        unit.choose(prefetch_backward=checked_units(modules, "set_modules_to_backward_prefetch"))
        if unit.schedule is not None and unit.schedule.settled:
            warn_of_ignored_prefetch(unit, unit.schedule.tree.root)

    def set_prefetch_depth(
        self, forward: int = 1, backward: int | None = None, *, max_nbytes: int | None = None, recurse: bool = True
    ) -> None:
        """Gather this many modules ahead of the one that runs, in the recorded order, instead of one. Recursive.

        Each costs the memory of its unsharded parameters. More than one pays where a module computes for a shorter time than the
        gather of the next takes, or with CPU offload its copy to the device. ``set_modules_to_*_prefetch`` overrides it for a module.

        forward:    0: none
        backward:   None: as in forward
        max_nbytes: of the unsharded parameters that are gathered ahead; the next module is always gathered, even if it is larger

        Example:
            model.set_prefetch_depth(2, max_nbytes=4 << 30)
        """
        depths = [checked_depth(forward, max_nbytes), checked_depth(forward if backward is None else backward, max_nbytes)]
        for unit in _units(self, recurse):
            unit.choose(forward_depth=depths[0], backward_depth=depths[1])

    # --- reduction ---

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None], *, stream: Any = None) -> None:
        """Call ``hook(reduce_output)`` for each group after its reduction, before its gradients reach the parameters.

        hook:   gets this rank's reduced gradients of the group, 1-D, in the reduce dtype; it may change them in place
        stream: on which it runs; None: that of the reduction
        Raises: ArgumentError for a ``stream`` under HSDP

        Example:
            def count(reduce_output):
                print(reduce_output.numel())


            model[0].set_all_reduce_hook(count)
            model(x).sum().backward()
        """
        unit = sharded_unit(self)
        for group in unit.groups:
            gradients = group.gradients
            if stream is not None and group.mesh.replicate_group is not None:
                raise ArgumentError(
                    "set_all_reduce_hook got a stream for a module with native HSDP",
                    expected="stream cannot be set when using native HSDP",
                    fix="leave stream out: the hook runs on the all-reduce stream",
                )
            gradients.choose(all_reduce_hook=hook, all_reduce_hook_stream=stream)

    def set_gradient_divide_factor(self, factor: float | None) -> None:
        """Divide summed gradients by ``factor`` instead of the number of data-parallel ranks; None: by that number again.

        Raises: ArgumentError for a factor that is not positive

        Example:
            model[0].set_gradient_divide_factor(1.0)  # sums the ranks' gradients
        """
        check_divide_factor(factor)
        for group in sharded_unit(self).groups:
            group.gradients.choose(divide_factor=factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Use only SUM in collectives, and divide in kernels of our own.

        Example:
            model[0].set_force_sum_reduction_for_comms(True)
        """
        enable = checked_bool("set_force_sum_reduction_for_comms", "enable", enable)
        for group in sharded_unit(self).groups:
            group.gradients.choose(sum_only=enable)

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Give parameters that no rank used a zero gradient instead of None. Recursive.

        A parameter used on some ranks gets its gradient everywhere without this, if every rank's backward reaches its module. With it,
        every rank takes part in every reduction, so ranks may compute their loss from different outputs.

        Example:
            model.set_reduce_scatter_unused_params(True)
        """
        reduce_unused = checked_bool("set_reduce_scatter_unused_params", "reduce_scatter_unused_params", reduce_scatter_unused_params)
        for unit in _units(self, recurse):
            for group in unit.groups:
                group.gradients.choose(reduce_unused=reduce_unused)
            if unit.schedule is not None:
                unit.schedule.choose_logs()

    def set_optional(self, optional: bool = True) -> None:
        """Let any rank leave this module out of any forward, and of its backward: an image tower, on ranks that have only text.

        Its gradients are averaged over all ranks, and those that left it out count as zeros; if all of them did, there are none. As no
        rank knows who will run it, the begin of the root's forward gathers it, with all sharded modules inside of it. Call it on all
        ranks, before the first forward or between steps; see "Uneven work" in the docs.

        Raises: ArgumentError in the next forward, on all ranks, for what they cannot leave out: tied parameters, for instance

        Example:
            model[0].set_optional()
        """
        unit = sharded_unit(self)
        unit.choose(optional=checked_bool("set_optional", "optional", optional))
        if unit.schedule is not None:
            unit.schedule.choose_logs()

    def set_reduce_scatter_divide_factor(self, factor: float | None) -> None:
        """The old name of ``set_gradient_divide_factor``; warns.

        Example:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                model[0].set_reduce_scatter_divide_factor(2.0)
        """
        warn("Use `set_gradient_divide_factor` instead", FutureWarning)
        self.set_gradient_divide_factor(factor)

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """How many modules' reduce-scatter inputs may be in flight, which bounds their memory; the largest value below a root counts.

        With 1, the default, backward waits for a module's reduce-scatter after the backward of one more module. Recursive.

        Example:
            model.set_reduce_scatter_max_input_buffers(2)
        """
        check_max_input_buffers(max_input_buffers)
        for unit in _units(self, recurse):
            unit.choose(max_reductions=max_input_buffers)
            if unit.schedule is not None:
                unit.schedule.choose_max_reductions()

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Let reduce-scatters have a process group of their own, so that they run alongside all-gathers. Recursive.

        Collective: yes, over the shard axis, when it makes a group (one for each set of ranks).

        Example:
            model.set_separate_reduce_scatter_group()
        """
        enable = checked_bool("set_separate_reduce_scatter_group", "enable", enable)
        made: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for unit in _units(self, recurse):
            for group in unit.groups:
                gradients, shard_group = group.gradients, group.mesh.shard_group
                if shard_group is None:
                    continue
                if enable:
                    ranks = tuple(dist.get_process_group_ranks(shard_group))
                    if ranks not in made:
                        made[ranks] = gradients.options.process_group or another_over(shard_group, "reduce_scatter")
                    gradients.choose(process_group=made[ranks])
                else:
                    gradients.choose(process_group=None)
                if isinstance(gradients.options.comm, OwnReduceScatter):
                    gradients.choose(comm=gradients.options.comm.over(gradients.options.process_group or shard_group))

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """All-gather through ``comm`` (see ``AllGather``): it allocates the whole output, and the input is a slice of it.

        Collective: no; all ranks must make the call.
        Raises:     ArgumentError for a module whose groups communicate over different meshes

        Example:
            model[0].set_custom_all_gather(gather)  # an AllGather of yours
        """
        for group in groups_of_one_mesh(sharded_unit(self), "set_custom_all_gather"):
            group.set_all_gather_comm(comm)

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Reduce-scatter through ``comm`` (see ``ReduceScatter``): it allocates input and output.

        Collective: no; all ranks must make the call.
        Raises:     ArgumentError for a module whose groups communicate over different meshes

        Example:
            model[0].set_custom_reduce_scatter(scatter)  # a ReduceScatter of yours
        """
        for group in groups_of_one_mesh(sharded_unit(self), "set_custom_reduce_scatter"):
            group.gradients.choose(comm=comm)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Allocate communication buffers with the process group's own allocator, if its backend has one; not with a custom comm.

        Example:
            if dist.get_backend() == "nccl":
                model[0].set_allocate_memory_from_process_group_for_comm(True)
        """
        enable = checked_bool("set_allocate_memory_from_process_group_for_comm", "enable", enable)
        for group in sharded_unit(self).groups:
            gradients = group.gradients
            refuse_custom(group.all_gather_comm, gradients.options.comm, "set_allocate_memory_from_process_group_for_comm")
            process_group = group.mesh.shard_group
            if enable and (process_group is None or not torch_collectives.process_group_allocates(process_group, group.device)):
                _warn_without_effect(
                    "set_allocate_memory_from_process_group_for_comm",
                    f"the process group's backend allocates no tensors on {group.device}",
                )
                continue
            group.set_all_gather_comm(OwnAllGather(process_group) if enable and process_group else None)
            scatter_group = gradients.scatter_group
            gradients.choose(comm=OwnReduceScatter(scatter_group) if enable and scatter_group else None)

    def set_symm_mem_for_comm(self, backend: Literal["NCCL"] = "NCCL") -> None:
        """Allocate communication buffers in symmetric memory, for the collectives that can use it; not with a custom comm.

        Reduce-scatters use it only after ``set_force_sum_reduction_for_comms(True)``. Collective: yes, over the shard axis.

        Example:
            if dist.get_backend() == "nccl":
                model[0].set_symm_mem_for_comm()
        """
        for group in sharded_unit(self).groups:
            gradients = group.gradients
            refuse_custom(group.all_gather_comm, gradients.options.comm, "set_symm_mem_for_comm")
            process_group = group.mesh.shard_group
            carried_by = backends.backend_of(process_group, group.device.type)
            if process_group is None or group.device.type != "cuda" or carried_by != "nccl":
                _warn_without_effect("set_symm_mem_for_comm", f"symmetric memory needs CUDA and NCCL, and this is {group.device}")
                continue
            group.set_all_gather_comm(OwnAllGather(process_group, backend))
            if gradients.options.sum_only:
                gradients.choose(comm=OwnReduceScatter(gradients.options.process_group or process_group, backend))

    def set_post_optim_event(self, event: torch.Event) -> None:
        """An event after the optimizer step, for the all-gathers of the next forward or ``unshard`` to wait on; used once.

        Our all-gathers always run after what the current stream was given before them, because their memory is allocated there: the
        event is for an optimizer step on another stream. Call it on the root. While a graph is captured, an event from before
        the capture is dropped: a graph cannot wait for it, and ``torch.cuda.graph`` has waited for the device.

        Example:
            if torch.cuda.is_available():
                side = torch.cuda.Stream()
                with torch.cuda.stream(side):
                    optimizer.step()
                    model.set_post_optim_event(side.record_event())
        """
        unit = sharded_unit(self)
        schedule_of(unit).note_optimizer(event)
        if unit.device.type == "cpu":
            _warn_without_effect("set_post_optim_event", "the CPU has no streams")

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Upstream's switch for all-gathers on the current stream; ours always allocate there, so that it changes nothing."""

    # --- how others see it ---

    def _get_fsdp_state(self) -> ModuleState:
        return sharded_unit(self)

    def __deepcopy__(self, memo: dict[Any, Any]) -> Any:
        """An independent module on the same mesh, sharded in the same way; like any copied module it has no gradients."""
        return deepcopy_module(cast(nn.Module, self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises: ModuleError. A module is bound to process groups, which no pickle carries."""
        raise ModuleError(
            f"{type(self).__name__} cannot be pickled or copied with copy.copy",
            expected="its state_dict() to be saved, and copy.deepcopy() for a second module in this process",
            fix="save model.state_dict() with torch.distributed.checkpoint; load it into a model built and sharded anew",
        )

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        unit = sharded_unit(self)
        for group in unit.groups:
            group.refuse_parked()
        unit.reshard_for_all()  # nn.Module changes what is registered
        with _kept_grad_dtypes(unit):
            result = super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
            unit.notice_changes(more_may_come=len(unit.modules) > 1)
        return result


def _unshard_for_weights(module: Any) -> None:
    schedule = sharded_unit(module).schedule
    if schedule is not None:
        schedule.unshard_for_weights()


def _reshard(unit: ModuleState) -> None:
    for group in unit.uses:
        group.take_over_toggles()
    unit.reshard()
    unit.await_host_reads()


def _units(module: Any, recurse: bool) -> list[ModuleState]:
    if not recurse:
        return [sharded_unit(module)]
    return [sharded_unit(each) for each in cast(nn.Module, module).modules() if isinstance(each, FSDPModule)]


@contextlib.contextmanager
def _kept_grad_dtypes(unit: ModuleState) -> Iterator[None]:
    """Around ``_apply``, until the unit has noticed it: gradients whose dtype the user has chosen follow to the new device only."""
    aside = []
    for group in unit.groups:
        if group.options.semantics == "2.13":
            continue
        for param in group.params:
            grad_dtype = torch_tensors.grad_dtype_of(param.sharded)
            if grad_dtype is not None:
                aside.append((param, grad_dtype, param.sharded.grad))
                param.sharded.grad = None
    try:
        yield
    finally:
        for param, grad_dtype, grad in aside:
            torch_tensors.set_grad_dtype(param.sharded, grad_dtype)
            if grad is not None:
                param.sharded.grad = grad.to(param.sharded.device)


def _warn_without_effect(setter: str, why: str) -> None:
    """Warn once per process that ``setter`` does nothing here."""
    warn(f"{setter} has no effect here: {why}", once=setter)
