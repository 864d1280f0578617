"""What a ledger and a recording share: a file per rank that gets a line at optimizer steps until ``stop()`` or the end of a block."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..inspect import Listener, listen
from ..torch_names import torch_compiler
from .run_folder import Lines, drop_absent_ranks, rank_file

if TYPE_CHECKING:
    from typing_extensions import Self


class StepLines:
    """kind: of the file; an earlier run's files of ranks that this run does not have are removed"""

    def __init__(self, kind: str, folder: Path) -> None:
        self.folder = folder
        self._rank, self._num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        drop_absent_ranks(folder, kind, "jsonl", self._num_ranks)
        self._lines = Lines(rank_file(folder, kind, self._rank, "jsonl"))
        self._undo = contextlib.ExitStack()
        self._undo.callback(self._lines.close)

    def _begin(self, listener: Listener, optimizers: Sequence[Optimizer]) -> None:
        """optimizers: the last one's step ends a step; if there is none, that of any optimizer"""
        self._undo.callback(listen(listener))
        end_step = torch_compiler.dynamo_disabled(self._end_step)
        register = optimizers[-1].register_step_post_hook if optimizers else register_optimizer_step_post_hook
        self._undo.callback(register(end_step).remove)

    def _end_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        """End it; lines so far stay. A second call does nothing."""
        self._undo.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
