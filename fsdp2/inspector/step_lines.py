"""What a ledger and a recording share: a file per rank that gets a line at optimizer steps until ``stop()`` or the end of a block."""

from __future__ import annotations

import contextlib
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..arguments import NATURAL, require
from ..doctor.inspected import inspect
from ..inspect import Listener, listen
from ..lifecycle import UntilStopped
from ..torch_names import torch_compiler
from .run_folder import Lines, drop_absent_ranks, folder_of, rank_file


class StepLines(UntilStopped):
    """kind: of the file; an earlier run's files of ranks that this run does not have are removed. The others: arguments of both"""

    def __init__(self, kind: str, folder: Any, model: Any, optimizer: Any, first_step: int, listener: Listener) -> None:
        self.folder = folder_of(folder, kind)
        require(kind, NATURAL, first_step=first_step)
        self._inspected = inspect(model, optimizer, kind)
        self._kind, self._step, self._listener = kind, first_step, listener
        self._rank, self._num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        super().__init__()

    def _begin(self, undo: contextlib.ExitStack) -> None:
        drop_absent_ranks(self.folder, self._kind, "jsonl", self._num_ranks)
        self._lines = Lines(rank_file(self.folder, self._kind, self._rank, "jsonl"))
        undo.callback(self._lines.close)
        undo.callback(self._end)
        undo.callback(listen(self._listener))
        end_step = torch_compiler.dynamo_disabled(self._end_step)
        optimizers = self._inspected.optimizers
        register = optimizers[-1].register_step_post_hook if optimizers else register_optimizer_step_post_hook
        undo.callback(register(end_step).remove)

    def _end_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        raise NotImplementedError

    def _end(self) -> None:
        """Nobody listens any more."""
