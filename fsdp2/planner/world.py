"""W ranks in one process, which is the first of them: meshes and collectives work, nothing is sent, all is told to a listener.

Worked example: in ``world(64, "nccl", listener)`` an all-gather of 1 MB a rank
returns at once, has written nothing, and ``listener.communicated("all_gather", group, 64 MB)`` was called.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal, Protocol

import torch.distributed as dist
from torch import Tensor

from ..torch_names import torch_collectives
from . import torch_names

Backend = Literal["nccl", "gloo"]


class Listener(Protocol):
    def communicated(self, kind: str, group: dist.ProcessGroup | None, nbytes: int) -> None:
        """nbytes: of the gathered buffer, or of the one to be reduced; ``group`` None: all ranks.

        kind: "exchange" for an all-to-all of uneven pieces; nbytes are then those that leave this rank
        """

    def launched_together(self) -> contextlib.AbstractContextManager[None]:
        """Collectives inside are one launch."""


class _Sent:
    """A collective under way until it is waited for: no rank can count on one that is complete before."""

    def __init__(self) -> None:
        self._is_waited_for = False

    def wait(self, timeout: Any = None) -> bool:
        self._is_waited_for = True
        return True

    def is_completed(self) -> bool:
        return self._is_waited_for


@contextlib.contextmanager
def world(size: int, backend: Backend, listener: Listener) -> Iterator[None]:
    """backend: whose algorithms the library is to choose"""
    names = {  # by name: the kind, and which argument is the whole buffer
        "all_gather_single": ("all_gather", 0, "output"),
        "all_gather_into_tensor": ("all_gather", 0, "output_tensor"),
        "reduce_scatter_single": ("reduce_scatter", 1, "input"),
        "reduce_scatter_tensor": ("reduce_scatter", 1, "input"),
        "all_reduce": ("all_reduce", 0, "tensor"),
        "broadcast": ("broadcast", 0, "tensor"),
        "all_to_all_single": ("all_to_all", 1, "input"),
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch_names.world_of_its_own("fake" if backend == "nccl" else torch_names.GLOO_STAND_IN, size))
        for name, (kind, position, argument) in names.items():
            if hasattr(dist, name):
                stack.enter_context(torch_names.replaced(dist, name, _told(getattr(dist, name), kind, position, argument, listener)))
        stack.enter_context(torch_names.on_this_thread(torch_collectives, "one_launch", _one_launch(listener)))
        yield


def _one_launch(listener: Listener) -> Any:
    def one_launch(group: dist.ProcessGroup, device: Any) -> contextlib.AbstractContextManager[None]:
        return listener.launched_together()

    return one_launch


def _told(real: Any, kind: str, position: int, argument: str, listener: Listener) -> Any:
    """``real``, but for tensors without memory: their collectives are told."""

    def collective(*args: Any, group: dist.ProcessGroup | None = None, async_op: bool = False, **kwargs: Any) -> Any:
        whole: Tensor = args[position] if len(args) > position else kwargs[argument]
        if not isinstance(whole, torch_names.FakeTensor):
            return real(*args, group=group, async_op=async_op, **kwargs)
        splits = args[3] if len(args) > 3 else kwargs.get("input_split_sizes")
        if kind == "all_to_all" and splits:
            leaving = sum(splits) - splits[dist.get_rank(group)]
            listener.communicated("exchange", group, whole.nbytes // max(whole.shape[0], 1) * leaving)
        else:
            listener.communicated(kind, group, whole.nbytes)
        return _Sent() if async_op else None

    return collective
