"""One rank of a run on the pretend accelerator: at once (seed None), or in an order of streams that a seed chooses.

The script finds no GPU and asks for the CPU; it gets the device (``testing/pretend/for_scripts.py``). What autograd and optimizers
are given is copied in the order of the script's own stream, and read when the last step has been made: to read
it earlier would make the host wait, and with that hide what the script has not ordered.

    {"kind": "seen", "step": 1, "what": "the gradient of 0.weight", "digest": 2774160823}
    {"kind": "captured", "step": 3, "problem": "aten::_local_scalar_dense makes the host wait for the device (train.py:23)"}
    {"kind": "memory", "step": 3, "peak": 34816, "kept": 12288, "where": "forward and backward", "twice": [], "unsharded": []}
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..core.comm.streams import streams_of
from ..doctor.patient import _held
from ..doctor.replicas import digest
from ..inspect import Unit, is_sharded, units
from ..ranks import Rank
from ..testing import pretend
from ..testing.pretend.for_scripts import in_place_of_the_cpu
from ..torch_names.torch_tensors import storage_key
from ..watched_operators import Watch
from .parts import local_of, plain_name
from .witness import Program, Teller, run_rank


class OnDevice(Teller):
    """No doctor looks at it. seed: of the order; None: at once"""

    def __init__(self, seed: int | None, folder: Path, max_steps: int) -> None:
        super().__init__(folder, max_steps)
        self._seed = seed
        self._kept: list[tuple[int, str, Tensor]] = []
        self._watching = contextlib.ExitStack()
        self._watch: _Watch | None = None
        self._before: _Watch | None = None
        self._kept_storages: dict[int, torch.UntypedStorage] = {}
        self._memory = _Memory()
        self._unsharded: dict[str, str] = {}

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
        if self._model is None and is_sharded(module):
            self._model = module
        if module is self._model and self._seed is None and self.record.num_steps and self._watch is None and torch.is_grad_enabled():
            self._kept_storages = self._kept_storages or {storage_key(each): each.untyped_storage() for each in self._state()}
            self._watch = self._watching.enter_context(_Watch(self._kept_storages))
            self._watch.refused = self._watching.enter_context(pretend.watching_streams())
            streams: Any = streams_of(torch.device(pretend.DEVICE_TYPE, 0))
            self._watching.enter_context(streams.as_in_capture())

    def _look(self, roots: list[nn.Module], optimizer: Optimizer) -> None: ...

    def _on_backward(self, tensors: Any) -> None:
        for each in [tensors] if isinstance(tensors, Tensor) else tensors:
            self._keep("the loss", each, self.record.num_steps + 1)
        self._look_for_unsharded("from forward to backward", self._reshards_after_forward)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        super()._before_step(optimizer, args, kwargs)
        self._memory.note("forward and backward")
        for name, param in self._held(optimizer):
            if param.grad is not None:
                self._keep(f"the gradient of {name}", param.grad)
        self._memory.begin()

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._memory.note("the optimizer's step")
        for name, param in self._held(optimizer):
            self._keep(name, param)
        if self._watch is not None:
            self._watching.close()
            problem = self._watch.problem or self._watch.stream_problem()
            problem = problem or (self._watch.changed_since(self._before) if self._before is not None else None)
            self._tell("captured", self.record.num_steps, problem=problem, is_compared=self._before is not None)
            self._before, self._watch = self._watch, None
        if self._seed is None and not self._has_ended:
            self._look_for_unsharded("after the step", lambda unit: unit.reshards())
            said = {"twice": self._held_twice(optimizer), "unsharded": dict(self._unsharded)}
            self._tell("memory", self.record.num_steps, **self._memory.end(), **said)
            self._memory.begin()

    def _reshards_after_forward(self, unit: Unit) -> bool:
        return unit.reshard_after_forward is True and not (unit.is_kept_as_root and self._model in unit.modules)

    def _look_for_unsharded(self, when: str, is_told_to_reshard: Callable[[Unit], bool]) -> None:
        for unit in units(self._model) if self._seed is None and self._model is not None else ():
            for group in unit.groups if is_told_to_reshard(unit) else ():
                kept = {kind for kind, storage in group.memory() if storage.nbytes()}
                if (group.num_shards or 1) > 1 and "unsharded" in kept:
                    self._unsharded.setdefault(unit.name or "the root", when)

    @torch.no_grad()
    def _held_twice(self, optimizer: Optimizer) -> list[str]:
        """Parameters of whose gradient another living tensor has the bits."""
        grads = {name: local_of(param.grad) for name, param in self._held(optimizer) if param.grad is not None}
        grads = {name: grad for name, grad in grads.items() if grad.numel() > 1 and bool(grad.any())}
        known = {storage_key(each) for each in (*grads.values(), *self._state(), *(kept for _, _, kept in self._kept))}
        living = [each for each in gc.get_objects() if type(each) is Tensor and each.device.type == pretend.DEVICE_TYPE]
        held = [each for each in living if each.layout is torch.strided and each.untyped_storage().nbytes()]
        others = [each for each in held if storage_key(each) not in known]
        return [name for name, grad in grads.items() if any(_is_same(grad, each) for each in others)]

    def _state(self) -> Iterator[Tensor]:
        """What lives from step to step."""
        found = [each for optimizer in self._num_steps for kept in optimizer.state.values() for each in kept.values()]
        found += [] if self._model is None else [*self._model.parameters(), *self._model.buffers()]
        return (local_of(each) for each in found if isinstance(each, Tensor))

    @torch.no_grad()
    def _keep(self, what: str, tensor: Tensor, step: int = 0) -> None:
        if not self._has_ended:
            copy = local_of(tensor).clone()
            self._kept.append((step or self.record.num_steps, what, copy))
            self._memory.ours += copy.nbytes

    def _held(self, optimizer: Optimizer) -> list[tuple[str, Tensor]]:
        model = self._model if self._model is not None else nn.Module()
        names = {id(param): plain_name(name) for name, param in model.named_parameters()}
        held = enumerate(_held(optimizer).items())
        return [(names.get(key, f"parameter {number} of the optimizer"), param) for number, (key, param) in held]


def _is_same(grad: Tensor, other: Tensor) -> bool:
    return other.shape == grad.shape and other.dtype == grad.dtype and torch.equal(other, grad)


class _Memory:
    """Bytes that a step asks the device for, which are rounded up there; without ours, the copies that ``_keep`` makes."""

    def __init__(self) -> None:
        self.ours = self._ours_before = 0
        self._peaks: list[tuple[int, str]] = []

    def begin(self) -> None:
        """Of a part of a step, in which nothing of ours is made but a loss."""
        self._ours_before = self.ours
        torch.get_device_module(pretend.DEVICE_TYPE).reset_peak_memory_stats()

    def note(self, where: str) -> None:
        self._peaks.append((pretend.memory_stats()["peak_requested"] - self._ours_before, where))

    def end(self) -> dict[str, Any]:
        peak, where = max(self._peaks)
        self._peaks.clear()
        return {"peak": peak, "where": where, "kept": pretend.memory_stats()["requested"] - self.ours}


class _Watch(Watch):  # type: ignore[no-untyped-call]
    """A step without its data, which is new in each step: only the addresses of what lives from step to step must stay."""

    def __init__(self, kept: dict[int, torch.UntypedStorage]) -> None:
        super().__init__()
        self._kept = kept
        self._last: dict[int, str] = {}
        self.refused: dict[int, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        number = len(self.lines)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if len(self.lines) > number:
            self._last[torch.accelerator.current_stream().stream_id] = f"{func} ({self.lines[-1]})"
        return result

    def _storage(self, tensor: Tensor) -> int | None:
        return super()._storage(tensor) if storage_key(tensor) in self._kept else None  # and keeps no other alive

    def stream_problem(self) -> str | None:
        """Of the streams that are not the step's own: what a capture refuses."""
        for stream, what in reversed(self.refused.items()):
            return f"on stream {stream}, {what}: the last is {self._last.get(stream, 'no operator of the script')}"
        return None


def device_rank(seed: int | None, program: Program, folder: Path, max_steps: int, rank: Rank) -> NoReturn:
    """One rank of a run; ends with the script's status."""
    run_rank(OnDevice(seed, folder, max_steps), program, rank)
