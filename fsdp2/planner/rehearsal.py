"""A workload, sharded by the library's own code and trained for two steps by rank 0 of a world that does not exist.

The first step is what every run begins with: gathers are not prefetched, the optimizer makes its state. The second is like all later
ones, and is the one that is written down.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.modules.module as module_hooks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_leaves

from ..activations import HEAVY_OPS, ActivationCheckpointPolicy, apply_activation_checkpointing
from ..core.comm.streams import use_streams
from ..core.iteration import reductions
from ..errors import ArgumentError, FSDPError, ModuleError, short
from ..grouping.planning import Plan as Wrapping
from ..grouping.planning import plan as plan_wrapping
from ..hints.mixed_tensors import EXPLAINED
from ..inspect import Group
from ..inspect import units as units_of
from ..optim import FlatOptimizer
from ..policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from ..state_bytes import StateBytes, measured_state_bytes
from ..strategy import accumulate, parallelize
from ..testing.clock.trace import Entry, Ranks
from ..torch_names import torch_tensors
from . import recorder as labels
from . import torch_names
from .memory import FileBytes
from .recorder import Block, Recorder
from .setting import OPTIMIZERS, Setting
from .streams import WrittenHost, WrittenStreams
from .tiers import (
    device_by_default,
    device_of,
    files_of,
    offload_by,
    policy_of_parameters,
    storages_in_files,
    with_states_there,
)
from .workload import Workload
from .world import world

SELECTIVE = ActivationCheckpointPolicy(save_ops=HEAVY_OPS)
"""Each block, but for the results of matrix products and attention."""


@dataclass(frozen=True)
class GroupFacts:
    """One parameter group, in bytes. dtype: in which it is stored; padding: of its unsharded storage, what is no parameter"""

    name: str
    dtype: torch.dtype
    numel: int
    sharded: int
    unsharded: int
    padding: int


@dataclass(frozen=True)
class Rehearsed:
    """What was written down.

    state:   kept between backward and optimizer step, after ``micro_batches``
    before:  the blocks that were there when the step began; entries: of the step
    units:   by autograd's sequence numbers, which unit's forward made a node
    files:   of parameters and states; ``blocks`` has what is in them as well
    """

    numel: int
    state: StateBytes
    groups: tuple[GroupFacts, ...]
    before: tuple[Block, ...]
    blocks: list[Block]
    entries: list[Entry]
    process_groups: list[Ranks]
    unit_of_node: Callable[[int], str]
    files: FileBytes


def rehearse(workload: Workload, setting: Setting) -> Rehearsed:
    """Raises: what ``parallelize`` and the workload raise; ArgumentError for an unknown optimizer. Collective: no."""
    device = device_of(setting.offload)
    recorder = Recorder(device)
    with contextlib.ExitStack() as stack:
        stack.enter_context(world(setting.world_size, setting.backend, recorder))
        stack.enter_context(torch_names.on_this_thread(torch_tensors, "current_device", lambda *_: device))
        is_device = setting.backend == "nccl"
        stack.enter_context(use_streams(device, WrittenStreams(recorder) if is_device else WrittenHost(recorder)))
        model = _sharded(workload, setting)
        stack.enter_context(torch_names.on_this_thread(reductions, "read_flags", _unused_everywhere))
        stack.enter_context(torch_names.fake_tensors_in_their_place())
        stack.enter_context(recorder)
        _materialize(model, device, policy_of_parameters(setting.offload))
        for block in recorder.alive():
            if block.label == labels.ACTIVATIONS:
                block.label = labels.BUFFERS
        make = OPTIMIZERS[setting.optimizer] if isinstance(setting.optimizer, str) else setting.optimizer
        optimizer = make(model.parameters())
        offload = offload_by(optimizer, setting.offload)
        if offload != setting.offload:
            stack.close()
            return rehearse(workload, replace(setting, offload=offload))
        optimizer = with_states_there(optimizer, offload)
        units = stack.enter_context(_units_named(model, recorder))
        with device_by_default(setting.offload):
            inputs = workload.inputs(setting.batch, setting.sequence)
        if not isinstance(inputs, (tuple, list)):
            raise ArgumentError(
                f"plan got inputs= that returned a {'Tensor' if isinstance(inputs, Tensor) else type(inputs).__name__}",
                expected="a function from batch and sequence to the tuple of the model's arguments",
                fix="return (x,) instead of x",
            )
        recorder.relabel(tree_leaves(inputs), labels.BUFFERS)
        # However many micro-batches a step has, one records the order of gathers and lets the optimizer make its state.
        _step(workload, replace(setting, micro_batches=1), model, optimizer, recorder, inputs)
        recorder.take()
        units.clear()
        for storage in storages_in_files(model, optimizer, offload):
            recorder.note_in_file(storage)
        before = tuple(recorder.alive())
        state = _step(workload, setting, model, optimizer, recorder, inputs)
        entries = recorder.take()
        return Rehearsed(
            numel=sum(param.numel() for param in model.parameters()),
            state=state,
            groups=tuple(_facts(group) for unit in units_of(model) for group in unit.groups),
            before=before,
            blocks=recorder.blocks,
            entries=entries,
            process_groups=recorder.groups,
            unit_of_node=units.unit_of,
            files=files_of(model, optimizer, offload),
        )


def _materialize(model: nn.Module, device: torch.device, policy: OffloadPolicy) -> None:
    if not isinstance(policy, CPUOffloadPolicy):
        model.to_empty(device=device)
        return
    model.to_empty(device="cpu")
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty_like(buffer, device=device))


def _unused_everywhere(flags: Sequence[Tensor]) -> list[float]:
    """Flags of use, none set: what this rank has not used, no rank has used, since all do the same."""
    return [0.0] * sum(each.numel() for each in flags)


def wrapping_of(workload: Workload, setting: Setting) -> Wrapping:
    """Which modules become groups."""
    return plan_wrapping(_built(workload, setting), setting.wrap)


def _built(workload: Workload, setting: Setting) -> nn.Module:
    with torch.device("meta"):
        model = workload.build()
    for param in model.parameters():
        if setting.dtype is not None and param.is_floating_point():
            param.data = param.data.to(setting.dtype)
    return model


def _sharded(workload: Workload, setting: Setting) -> Any:
    model = _built(workload, setting)
    if not any(param.requires_grad for param in model.parameters()):
        raise ModuleError(
            f"plan got a {workload.name} without parameters that train",
            expected="a model with at least one parameter that requires a gradient",
            fix="call requires_grad_() on what trains",
        )
    if setting.checkpointing != "none":
        apply_activation_checkpointing(model, SELECTIVE if setting.checkpointing == "selective" else setting.checkpointing)
    parallelize(
        model,
        setting.strategy,
        wrap=setting.wrap,
        mesh=init_device_mesh("cpu", (setting.world_size,)),
        shard_size=setting.node_size,
        mp_policy=MixedPrecisionPolicy(param_dtype=setting.param_dtype, reduce_dtype=setting.reduce_dtype),
        offload_policy=policy_of_parameters(setting.offload),
        sync_module_states=False,
    )
    if setting.prefetch != 1:
        model.set_prefetch_depth(setting.prefetch)  # type: ignore[operator]
    return model


def _step(
    workload: Workload,
    setting: Setting,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    recorder: Recorder,
    inputs: tuple[Any, ...],
) -> StateBytes:
    """One step of training. Returns what is kept between its last backward and the optimizer."""
    for index in range(setting.micro_batches):
        with device_by_default(setting.offload), accumulate(model, last=index == setting.micro_batches - 1):
            recorder.mark("forward")
            try:
                loss: Any = workload.loss(workload.call(model, inputs), inputs)
            except FSDPError:
                raise
            except Exception as error:
                raise _not_rehearsed(workload, inputs, error) from error
            if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
                raise ModuleError(
                    f"{workload.name} has a loss without a backward: {_described(loss)}",
                    expected="a tensor with one number that depends on parameters which train",
                    fix="pass loss=, a function from the model's result and its inputs to such a tensor",
                )
            recorder.mark("backward")
            loss.backward()  # type: ignore[no-untyped-call]
            del loss
    recorder.relabel((param.grad for param in model.parameters()), labels.GRADIENTS)
    state = measured_state_bytes(model, optimizer)
    recorder.mark("optimizer")
    try:
        optimizer.step()
    except FSDPError:
        raise
    except Exception as error:
        raise _not_stepped(setting, optimizer, error) from error
    if isinstance(optimizer, FlatOptimizer):  # its ``state`` would make views
        values: list[Any] = optimizer.state_tensors()
    else:
        values = [each for state in optimizer.state.values() for each in state.values()]
    recorder.relabel((each for each in values if isinstance(each, torch.Tensor)), labels.OPTIMIZER)
    optimizer.zero_grad()
    return StateBytes(state.compute, state.gradients, state.master, measured_state_bytes(model, optimizer).optimizer)


def _described(loss: object) -> str:
    if not isinstance(loss, Tensor):
        return f"it is a {type(loss).__name__}"
    return f"its shape is {tuple(loss.shape)}" if loss.numel() != 1 else "nothing that it depends on requires a gradient"


def _not_rehearsed(workload: Workload, inputs: tuple[Any, ...], error: Exception) -> ModuleError:
    """The user's forward, or loss, has raised."""
    given = ", ".join(f"{tuple(each.shape)} {each.dtype}" if isinstance(each, Tensor) else short(each) for each in inputs)
    if torch_names.reads_values(error):
        return ModuleError(
            f"{workload.name} reads values of tensors, which a plan does not have: {error}",
            expected="a forward whose Python does not depend on values (.item(), if mask.any(), boolean indexing)",
            fix="leave that out while planning, for instance by an option of the model",
        )
    _, was_explained, cause = str(error).partition(EXPLAINED)
    if was_explained:  # by a sharded module that it came through
        return ModuleError(
            f"{workload.name} in the units of this plan: {EXPLAINED}{cause.partition('expected:')[0].rstrip()}",
            expected="units under which each parameter is used in the forward of its own",
            fix="wrap=, with the classes of the blocks (fsdp2 plan --wrap Block): the root takes the rest",
        )
    return ModuleError(
        f"{workload.name} raised {type(error).__name__} when it was called with ({given}): {short(str(error))}",
        expected="a model that takes the tuple of inputs, and a loss that takes the model's result",
        fix="pass inputs=, a function from batch and sequence to the tuple of its arguments (fsdp2 plan --inputs "
        "package.module:function), and loss=",
    )


def _not_stepped(setting: Setting, optimizer: torch.optim.Optimizer, error: Exception) -> ArgumentError:
    name, reason = type(optimizer).__name__, str(error).partition(chr(10))[0]
    return ArgumentError(
        f"plan got an optimizer, {name}, that raised {type(error).__name__} when it stepped with {setting.strategy}: {short(reason)}",
        expected="one that steps on sharded parameters, which are DTensors, and decides nothing by their values",
        fix='optimizer="adamw", or another one of the table in docs/strategies.md#optimizers',
    )


def _facts(group: Group) -> GroupFacts:
    numel = sum(param.numel for param in group.params)
    return GroupFacts(
        name=group.name,
        dtype=group.dtype,
        numel=numel,
        sharded=group.sharded_nbytes,
        unsharded=group.unsharded_nbytes,
        padding=group.unsharded_nbytes - numel * group.param_dtype.itemsize,
    )


class _Units:
    """Which unit's forward made which of autograd's nodes."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._names: list[str] = []

    def clear(self) -> None:
        self._starts, self._names = [], []

    def begin(self, name: str) -> None:
        """Nodes made from now on are of ``name``."""
        self._starts.append(torch_names.sequence_number())
        self._names.append(name)

    def unit_of(self, node: int) -> str:
        index = bisect_right(self._starts, node) - 1
        return self._names[index] if index >= 0 else ""


@contextlib.contextmanager
def _units_named(model: nn.Module, recorder: Recorder) -> Iterator[_Units]:
    """Inside, the recorder knows which unit's forward runs."""
    sharded = {module for unit in units_of(model) for module in unit.modules}
    names = {id(module): name or "the root" for name, module in model.named_modules() if module in sharded}
    units, running = _Units(), [""]

    def begin(module: nn.Module, *_: Any) -> None:
        name = names.get(id(module))
        if name is not None:
            running.append(name)
            recorder.where = name
            units.begin(name)

    def end(module: nn.Module, *_: Any) -> None:
        if id(module) in names:
            running.pop()
            recorder.where = running[-1]
            units.begin(running[-1])

    handles = [
        module_hooks.register_module_forward_pre_hook(begin),
        module_hooks.register_module_forward_hook(end),
    ]
    try:
        yield units
    finally:
        for handle in handles:
            handle.remove()
