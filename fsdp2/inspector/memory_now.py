"""Bytes that this rank keeps for parameters and gradients, by kind, while steps run.

Only groups with a gather, or a reduction, since the last look are asked: the cost of a look does not grow with the model.
Activations are not listed; on accelerators the allocator knows their sum.

Worked example, two groups of 1 MB over 2 ranks in fp32: while the second is gathered after the first, packed, that is 2 MB of
"unsharded parameters" and 1 MB of "all-gather buffers".
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ..inspect import buffers_of, groups_of_process, local_of, optimizers_that_stepped, state_tensors, storages_of
from ..planner.recorder import GATHERING, GRADIENTS, OPTIMIZER, PARAMETERS, REDUCING, UNSHARDED
from ..state_bytes import measured_state_bytes
from ..torch_names import torch_tensors

_KINDS = (UNSHARDED, GATHERING, REDUCING)


class MemoryNow:
    """The bytes of collectives. most: by kind, the most bytes at a time since ``forget_most``"""

    def __init__(self) -> None:
        self._owners: dict[int, object] = {}
        self.most: dict[str, int] = {}

    def note(self, owner: object) -> None:
        """``owner`` begins a collective: ask it from now on."""
        if buffers_of({0: owner})[2]:  # look now: on a host a reduction's input is freed when the backend is done with it
            self._owners[id(owner)] = owner
            self.look()
        self._owners[id(owner)] = owner

    def look(self) -> dict[str, int]:
        """Bytes now; owners without memory are not asked again."""
        now = dict(zip(_KINDS, buffers_of(self._owners), strict=True))
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


def all_kept_bytes() -> int:
    """The memory of everything in this process that was sharded, and of every optimizer that has stepped; not of a plan's rehearsal."""
    storages = [storage for group in groups_of_process() for _, storage in group.memory()]
    tensors = [each for optimizer in optimizers_that_stepped() for each in state_tensors(optimizer, of_any_shape=True)]
    storages += [
        storage for each in tensors if not isinstance(local_of(each), torch_tensors.FakeTensor) for storage in storages_of(each)
    ]
    return sum({torch_tensors.address_of(storage): storage.nbytes() for storage in storages}.values())


def training_device() -> torch.device:
    """The device of the first unit; the CPU before there is one."""
    return next((group.device for group in groups_of_process()), torch.device("cpu"))


def allocator_peak(device: torch.device) -> int | None:
    """Bytes at most since ``forget_allocator_peak``; None where no allocator counts (the CPU's)."""
    asks = getattr(torch.get_device_module(device.type), "max_memory_allocated", None)
    return None if asks is None else int(asks(device))


def forget_allocator_peak(device: torch.device) -> None:
    forgets = getattr(torch.get_device_module(device.type), "reset_peak_memory_stats", None)
    if forgets is not None:
        forgets(device)
