"""One rank of a run on the pretend accelerator: at once (seed None), or in an order of streams that a seed chooses.

The script finds no GPU and asks for the CPU; it gets the device (``testing/pretend/for_scripts.py``). What autograd and optimizers
are given is copied in the order of the script's own stream, and read when the last step has been made: to read
it earlier would make the host wait, and with that hide what the script has not ordered.

    {"kind": "seen", "step": 1, "what": "the gradient of 0.weight", "digest": 2774160823}
    {"kind": "captured", "step": 3, "problem": "aten::_local_scalar_dense makes the host wait for the device (train.py:23)"}
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..core.comm.streams import streams_of
from ..doctor.patient import _held
from ..doctor.replicas import digest
from ..ranks import Rank
from ..testing import pretend
from ..testing.pretend.for_scripts import in_place_of_the_cpu
from ..torch_names.torch_tensors import storage_key
from ..watched_operators import Watch
from .parts import local_of, plain_name
from .witness import Healthy, Program, run_rank


class OnDevice(Healthy):
    """seed: of the order; None: at once"""

    def __init__(self, seed: int | None, folder: Path, max_steps: int) -> None:
        super().__init__(folder, max_steps)
        self._seed = seed
        self._kept: list[tuple[int, str, Tensor]] = []
        self._watching = contextlib.ExitStack()
        self._watch: _Watch | None = None
        self._before: _Watch | None = None
        self._kept_storages: dict[int, torch.UntypedStorage] = {}

    def run(self, script: Callable[[], object]) -> None:
        pretend.activate()
        pretend.set_order(self._seed)
        super().run(script)

    def _names(self) -> contextlib.AbstractContextManager[Any]:
        return in_place_of_the_cpu()

    def _end(self, status: int, error: BaseException | None = None) -> None:
        if not self._has_ended and not status:
            try:
                pretend.synchronize()
                for step, what, tensor in self._kept:
                    self._tell("seen", step, what=what, digest=digest(tensor))
            except Exception as late:  # of an operator, or memory that was written after it was freed
                status, error = 1, late
        super()._end(status, error)

    # --- moments ---

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        super()._before_forward(module, args)
        if module is self._model and self._seed is None and self.record.num_steps and self._watch is None and torch.is_grad_enabled():
            self._kept_storages = self._kept_storages or {storage_key(each): each.untyped_storage() for each in self._state()}
            self._watch = self._watching.enter_context(_Watch(self._kept_storages))
            streams: Any = streams_of(torch.device(pretend.DEVICE_TYPE, 0))
            self._watching.enter_context(streams.as_in_capture())

    def _on_backward(self, tensors: Any) -> None:
        for each in [tensors] if isinstance(tensors, Tensor) else tensors:
            self._keep("the loss", each, self.record.num_steps + 1)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        super()._before_step(optimizer, args, kwargs)
        for name, param in self._held(optimizer):
            if param.grad is not None:
                self._keep(f"the gradient of {name}", param.grad)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for name, param in self._held(optimizer):
            self._keep(name, param)
        if self._watch is not None:
            self._watching.close()
            problem = self._watch.problem or (self._watch.changed_since(self._before) if self._before is not None else None)
            self._tell("captured", self.record.num_steps, problem=problem, is_compared=self._before is not None)
            self._before, self._watch = self._watch, None

    def _state(self) -> Iterator[Tensor]:
        """What lives from step to step."""
        found = [each for optimizer in self._num_steps for kept in optimizer.state.values() for each in kept.values()]
        found += [] if self._model is None else [*self._model.parameters(), *self._model.buffers()]
        return (local_of(each) for each in found if isinstance(each, Tensor))

    @torch.no_grad()
    def _keep(self, what: str, tensor: Tensor, step: int = 0) -> None:
        if not self._has_ended:
            self._kept.append((step or self.record.num_steps, what, local_of(tensor).clone()))

    def _held(self, optimizer: Optimizer) -> list[tuple[str, Tensor]]:
        model = self._model if self._model is not None else nn.Module()
        names = {id(param): plain_name(name) for name, param in model.named_parameters()}
        held = enumerate(_held(optimizer).items())
        return [(names.get(key, f"parameter {number} of the optimizer"), param) for number, (key, param) in held]


class _Watch(Watch):  # type: ignore[no-untyped-call]
    """A step without its data, which is new in each step: only the addresses of what lives from step to step must stay."""

    def __init__(self, kept: dict[int, torch.UntypedStorage]) -> None:
        super().__init__()
        self._kept = kept

    def _storage(self, tensor: Tensor) -> int | None:
        key = super()._storage(tensor)
        return key if key in self._kept else None


def device_rank(seed: int | None, program: Program, folder: Path, max_steps: int, rank: Rank) -> NoReturn:
    """One rank of a run; ends with the script's status."""
    run_rank(OnDevice(seed, folder, max_steps), program, rank)
