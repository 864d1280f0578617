"""Ending an iteration by hand: the handle of ``finalize_backward(async_op=True)``, and which roots wait for it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from ...errors import OrderError
from ...torch_names import torch_modules


class CommContext:
    """For roots whose reductions must not mix: each has one of its own, or several share one (``share_comm_ctx``).

    handle: of a reduction that the user has not waited for yet
    roots:  the ``Schedule`` of each root that shares this object
    """

    def __init__(self) -> None:
        self.handle: GradientReductionHandle | None = None
        self.roots: weakref.WeakSet[Any] = weakref.WeakSet()

    def refuse_open(self, what: str) -> None:
        """Raise OrderError if a reduction is open."""
        if self.handle is not None:
            raise OrderError(
                f"the previous gradient reduction must be waited on before {what}",
                expected="wait() on what finalize_backward(async_op=True) returned, "
                "here or on a root that shares the context",
                fix="keep the handle, and wait for it before the next forward",
            )

    def refuse_others_work(self, root: object) -> None:
        """Raise OrderError if another root's iteration is open: its backward could precede the wait."""
        if any(other is not root and other.is_open for other in self.roots):
            raise OrderError(
                "asynchronous gradient finalization cannot overlap work of another root "
                "that shares the communication context",
                expected="finalize_backward(async_op=True) after the other roots' iterations have ended",
                fix="call finalize_backward() without async_op, or end the other roots' backwards first",
            )


class GradientReductionHandle(torch_modules.TorchGradientReductionHandle):
    """What ``FSDPModule.finalize_backward(async_op=True)`` returns."""

    def __init__(self, finish: Callable[[], None] | None = None, owner: object = None) -> None:
        self.owner = owner
        self._finish = finish
        self._is_valid = True

    def wait(self) -> None:
        """Make the gradients usable on the current stream, once. Raises: OrderError after ``reset_iter_state()``."""
        if not self._is_valid:
            raise OrderError(
                "this gradient reduction handle was invalidated",
                expected="wait() before reset_iter_state(), which drops what the handle stands for",
                fix="forget the handle, and begin the step again",
            )
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()

    def invalidate(self) -> None:
        self._is_valid = False
