"""Bytes that this rank keeps for parameters and gradients, by kind, while steps run.

Only groups with a gather, or a reduction, since the last look are asked: the cost of a look does not grow with the model.
Activations are not listed; on accelerators the allocator knows their sum.

Worked example, two groups of 1 MB over 2 ranks in fp32: while the second is gathered after the first, packed, that is 2 MB of
"unsharded parameters" and 1 MB of "all-gather buffers".
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..core import torch_compat as compat
from ..core.group.all_gather import Gather
from ..core.group.memory import GroupMemory
from ..core.group.own_memory import leaves_of
from ..core.group.reduction import Reduction
from ..core.iteration.module_state import sharded_parameters
from ..core.modules.optimizer_steps import optimizers_that_stepped
from ..optim.flat import FlatOptimizer
from ..planner.recorder import GATHERING, GRADIENTS, OPTIMIZER, PARAMETERS, REDUCING, UNSHARDED
from ..state_bytes import measured_state_bytes


class MemoryNow:
    """The bytes of collectives. most: by kind, the most bytes at a time since ``forget_most``"""

    def __init__(self) -> None:
        self._groups: dict[int, GroupMemory] = {}
        self._reductions: dict[int, Reduction] = {}
        self.most: dict[str, int] = {}

    def note(self, owner: object) -> None:
        """``owner`` begins a collective: ask it from now on."""
        if isinstance(owner, GroupMemory):
            self._groups[id(owner)] = owner
        elif isinstance(owner, Reduction):
            self._reductions[id(owner)] = owner
            self.look()  # now: on a host its input is freed when the backend is done with it, which may be before the next look

    def look(self) -> dict[str, int]:
        """Bytes now; tensors without memory are not asked again."""
        unsharded = gathering = reducing = 0
        for key, group in list(self._groups.items()):
            made = group.unsharded
            nbytes = 0 if made is None or made.storage is None else made.storage.nbytes()
            buffers = made.gather.buffer_nbytes if made is not None and isinstance(made.gather, Gather) else 0
            if nbytes == buffers == 0:
                self._groups.pop(key, None)
            unsharded += nbytes
            gathering += buffers
        for key, reduction in list(self._reductions.items()):
            nbytes = reduction.buffer_nbytes
            if nbytes == 0:
                self._reductions.pop(key, None)
            reducing += nbytes
        now = {UNSHARDED: unsharded, GATHERING: gathering, REDUCING: reducing}
        for kind, nbytes in now.items():
            if nbytes > self.most.get(kind, 0):
                self.most[kind] = nbytes
        return now

    def forget_most(self) -> None:
        self.most = {}


def kept_bytes(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, int]:
    """The memory that lives through the step; call it between backward and the next forward."""
    states = [measured_state_bytes(model, each) for each in optimizers]
    return {
        PARAMETERS: int(states[0].master),
        GRADIENTS: int(states[0].gradients),
        OPTIMIZER: int(sum(state.optimizer for state in states)),
    }


def local_of(tensor: Tensor) -> Tensor:
    return compat.local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def all_kept_bytes() -> int:
    """The memory of everything in this process that was sharded, and of every optimizer that has stepped; not of a plan's rehearsal."""
    real = [group for param, group in sharded_parameters().values() if not isinstance(param.local, compat.FakeTensor)]
    groups = {id(group): group for group in real}.values()
    found: dict[int, int] = {}

    def add(tensor: Tensor) -> None:
        for leaf in leaves_of(local_of(tensor)):
            add_storage(leaf.untyped_storage())

    def add_storage(storage: torch.UntypedStorage) -> None:
        try:
            found[storage.data_ptr()] = storage.nbytes()
        except RuntimeError:  # a tensor without memory, traced by a compiler or a plan
            return

    for group in groups:
        for storage in () if group.unsharded is None else group.unsharded.storages():
            add_storage(storage)
        kept = [param.local for param in group.params] if group.flat is None else [group.flat]
        shown = [each for param in group.params for each in (param.sharded, param.unsharded) if each is not None]
        kept += [each.grad for each in shown if each.grad is not None]
        for tensor in [*kept, *group.gradients.unreduced]:
            add(tensor)
    for optimizer in optimizers_that_stepped():
        if isinstance(optimizer, FlatOptimizer):
            tensors = optimizer.state_tensors()
        else:
            tensors = [value for values in optimizer.state.values() for value in values.values() if isinstance(value, Tensor)]
        for tensor in tensors:
            if not isinstance(local_of(tensor), compat.FakeTensor):
                add(tensor)
    return sum(found.values())


def training_device() -> torch.device:
    """The device of the first unit; the CPU before there is one."""
    return next((group.device for _, group in sharded_parameters().values()), torch.device("cpu"))


def allocator_peak(device: torch.device) -> int | None:
    """Bytes at most since ``forget_allocator_peak``; None where no allocator counts (the CPU's)."""
    asks = getattr(compat.device_module(device.type), "max_memory_allocated", None)
    return None if asks is None else int(asks(device))


def forget_allocator_peak(device: torch.device) -> None:
    forgets = getattr(compat.device_module(device.type), "reset_peak_memory_stats", None)
    if forgets is not None:
        forgets(device)
