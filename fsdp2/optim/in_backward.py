"""Runs that are stepped on the host while backward still computes other units' gradients.

A run's turn comes when its last gradient has been reduced. The gradient goes to the host and leaves the device, a thread waits for the
copy and steps, and the parameters go back. Nobody can look at all gradients before: no clipping, no loss scaling, no sum over several
backwards. The first step is taken after its backward, as usual: it learns in which order gradients come, and finds those who changed
them meanwhile.

Worked example, units a, b, c

    device      c's backward | b's backward | a's backward |         |
    copies                   | c out        | b out        | a out   |
    the thread               | c's step     | b's step     | a's step|
    optimizer.step()                                       | waits for a's step, and lets the device wait for the last copy back
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..errors import OrderError
from ..torch_names import torch_compiler, torch_dtensors
from .host_runs import HostRun
from .runs import Run

_FIX = "leave step_in_backward out: the copies then overlap with the host's work, after backward"
_ON_THE_DEVICE = 2
"""How many runs' gradients may be on their way to the host: the lead that backward may have over the copies before it waits."""

Options = dict[str, Any]


class BackwardSteps:
    """See the file's docstring.

    order:    a number for each parameter, in the order in which gradients came first
    is_armed: steps are taken in the next backward; else after it
    """

    def __init__(self, begin: Callable[[], list[tuple[Run, HostRun]]], step: Callable[[HostRun], Options]) -> None:
        """begin: asked once in a backward: the runs to step. step: one of them, which was sent; called in the thread

        Both are methods, of an optimizer that this must not keep alive: parameters have the hooks.
        """
        self.order: dict[Tensor, int] = {}
        self.is_armed = False
        self._begin = weakref.WeakMethod(begin)
        self._step = weakref.WeakMethod(step)
        self._watched: dict[Tensor, Any] = {}
        self._seen: dict[Tensor, tuple[Tensor, int, Tensor]] = {}  # gradients of a backward without steps, their versions and norms
        # By parameter, with those whose gradient has not arrived.
        self._waiting: dict[Tensor, tuple[Run, HostRun, set[Tensor]]] | None = None
        self._stepped: set[Tensor] = set()
        self._leaving: deque[HostRun] = deque()
        self._under_way: list[tuple[HostRun, Future[Options]]] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fsdp2-step-in-backward")

    def watch(self, params: Iterable[Tensor]) -> None:
        """Be told of their gradients from now on, and of no others'."""
        wanted = dict.fromkeys(params)
        for param in [param for param in self._watched if param not in wanted]:
            self._watched.pop(param).remove()
        for param in wanted:
            if param not in self._watched and param.requires_grad:
                self._watched[param] = param.register_post_accumulate_grad_hook(self._arrived)  # type: ignore[no-untyped-call]

    @torch_compiler.dynamo_disabled
    def _arrived(self, param: Tensor) -> None:
        begin = self._begin()
        if begin is None:
            return
        self.order.setdefault(param, len(self.order))
        if not self.is_armed:
            self._see(param)
            return
        if self._waiting is None:
            self._waiting = {}
            for run, host in begin():
                params = {piece.param for piece in run.pieces}
                self._waiting.update(dict.fromkeys(params, (run, host, params)))
        if param in self._stepped:
            raise _second_backward()
        found = self._waiting.get(param)
        if found is None:
            return
        run, host, missing = found
        missing.discard(param)
        if not missing:
            self._send(run, host)

    def _see(self, param: Tensor) -> None:
        grad = param.grad
        assert grad is not None
        if param in self._seen and self._seen[param][0] is grad:
            raise _second_backward()
        self._seen[param] = (grad, _version(grad), _norm(grad))

    def _send(self, run: Run, host: HostRun) -> None:
        """Take a gradient, on the stream on which it was reduced."""
        run.take_gradients()
        host.send()
        for piece in run.pieces:
            piece.param.grad = None
            self._stepped.add(piece.param)
        self._leaving.append(host)
        while len(self._leaving) > _ON_THE_DEVICE:
            self._leaving.popleft().let_go()
        step = self._step()
        assert step is not None
        self._under_way.append((host, self._thread.submit(step, host)))

    def wait(self) -> list[tuple[HostRun, Options]]:
        """Wait for the steps of all runs sent so far: the runs, each once, and the options as the optimizer left them."""
        under_way, self._under_way = self._under_way, []
        return [(host, done.result()) for host, done in under_way]

    def end(self) -> None:
        """The step is taken: forget what belongs to its backward."""
        self._leaving.clear()
        self._waiting = None
        self._stepped.clear()

    def refuse_changed(self) -> None:
        """After a backward without steps: raise OrderError if gradients were changed since."""
        seen, self._seen = self._seen, {}
        changed = [
            param
            for param, (grad, version, norm) in seen.items()
            # torch's clipping leaves versions alone. Bits are compared, for NaN is not equal to itself.
            if param.grad is grad and (_version(grad) != version or not torch.equal(_norm(grad), norm))
        ]
        if changed:
            raise OrderError(
                f"gradients of {len(changed)} parameters were changed between backward and step, by clipping or loss scaling perhaps",
                items=[f"parameter {tuple(param.shape)}" for param in changed],
                expected="no clipping and no loss scaling with step_in_backward: they need all gradients before the first step",
                fix=_FIX,
            )


def _version(grad: Tensor) -> int:
    version: int = grad._version
    return version + torch_dtensors.local_tensor(grad)._version if isinstance(grad, DTensor) else version


@torch.no_grad()
def _norm(grad: Tensor) -> Tensor:
    """The bytes of the norm, in fp32 or wider."""
    local: Tensor = torch_dtensors.local_tensor(grad) if isinstance(grad, DTensor) else grad
    norm: Tensor = torch.linalg.vector_norm(local, dtype=torch.promote_types(local.dtype, torch.float32))
    return norm.view(1).view(torch.uint8)


def _second_backward() -> OrderError:
    return OrderError(
        "a second backward began before optimizer.step() of an optimizer that steps in backward",
        expected="one backward a step: the step has consumed the gradients of the first backward",
        fix="add up gradients inside fsdp2.accumulate(model, last=...), which reduces them once; or " + _FIX,
    )


def in_turn(runs: Sequence[Run], order: dict[Tensor, int]) -> list[Run]:
    """The runs, by when their last gradient comes; if that is unknown, after the others, the model's last ones first."""
    late = len(order)

    def turn(run: Run) -> int:
        return max(order.get(piece.param, late) for piece in run.pieces)

    found = list(runs)
    found.reverse()
    found.sort(key=turn)
    return found
