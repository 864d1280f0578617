"""Why a run has ended, for the run that goes on: each rank that an error ends leaves a line in the folder of the checkpoints.

    runs/a/end_rank_0    [17, "a rank is gone, ...: the all-gather of blocks.1 has failed; rank 1: its process (71 on n0) has ended"]

A killed rank leaves nothing: the others tell what they have found. Rank 0 of the next run takes all notes.
"""

from __future__ import annotations

import contextlib
import json
import socket
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer

from ..durable import durable_file
from ..errors import FSDPError, LostRankError
from ..printable import counted, printable
from .file_reading import open_regular

_LOST = "a rank is gone"
_MAX_LENGTH = 500


class EndNotes:
    """The notes in ``folder``, and this rank's own. Nothing here is collective or raises: notes are not worth a run.

    at: the last step that this rank has made; None until a save or a load says which it was: this is no run that may go on then
    """

    def __init__(self, folder: Path, optimizer: Optimizer | None) -> None:
        """optimizer: each of its steps is one; None: of a run that does not train"""
        self.at: int | None = None
        self._folder = folder
        self._rank = dist.get_rank()
        self._counting: Any = None
        with contextlib.suppress(AttributeError):  # what wraps an optimizer may lack its hooks
            if optimizer is not None:
                self._counting = optimizer.register_step_post_hook(self._count)

    def _count(self, *_: object) -> None:
        if self.at is not None:
            self.at += 1

    def close(self) -> None:
        if self._counting is not None:
            self._counting.remove()

    def leave(self, error: BaseException) -> None:
        """This rank's run ends by ``error``."""
        if self.at is None or not isinstance(error, Exception | KeyboardInterrupt):  # SystemExit is no error
            return
        with contextlib.suppress(Exception):
            said = str(error)
            if isinstance(error, FSDPError):
                said = said.partition("the backend said")[0].partition("expected:")[0]
            text = "; ".join(filter(None, map(str.strip, said.splitlines())))
            if not isinstance(error, LostRankError):
                text = f"rank {self._rank} on {socket.gethostname()}: {type(error).__name__}: {text}"
            self._folder.mkdir(parents=True, exist_ok=True)
            with durable_file(self._folder / f"end_rank_{self._rank}") as file:
                file.write(json.dumps([self.at if self._counting else None, text[:_MAX_LENGTH]]).encode())

    def take(self, step: int) -> str:
        """In a line: why the run before has ended, and what is lost where this one goes on after ``step``. Removes the notes."""
        notes = self._remove()
        if not notes:
            return ""
        lost = max(reached for _, reached, _ in notes) - step
        return printable(max(notes)[2]) + (f"; {counted(lost, 'step')} lost" if lost >= 0 else "")

    def forget(self) -> None:
        """This run saves here now: notes are of runs that it does not continue."""
        self._remove()

    def _remove(self) -> list[tuple[int, int, str]]:
        notes: list[tuple[int, int, str]] = []
        with contextlib.suppress(OSError):
            for path in sorted(self._folder.glob("end_rank_*")):
                with contextlib.suppress(Exception), open_regular(path) as file:
                    reached, text = json.loads(file.read(12 * _MAX_LENGTH + 100))
                    # A rank's own error is the cause; then those count that name a rank.
                    how_sure = 2 if _LOST not in str(text) else int("; rank " in str(text))
                    notes.append((how_sure, -1 if reached is None else int(reached), str(text)))
                path.unlink()
        return notes
