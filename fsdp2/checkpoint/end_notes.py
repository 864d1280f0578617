"""Why a run has ended, for the run that goes on: each rank that an error ends leaves a line in the folder of the checkpoints.

    runs/a/end_rank_0    [17, "a rank is gone, ...: the all-gather of blocks.1 has failed; rank 1: its process (71 on n0) has ended"]

A killed rank leaves nothing: the others tell what they have found. Rank 0 of the next run takes all notes.
"""

from __future__ import annotations

import contextlib
import json
import socket
from pathlib import Path

from torch.optim import Optimizer

from ..durable import durable_file
from ..errors import LostRankError
from ..printable import counted, printable
from .file_reading import open_regular

_LOST = "a rank is gone"
_MAX_LENGTH = 500


class MadeSteps:
    """at: the last step that this rank has made; None until a save or a load says which it was"""

    at: int | None = None

    def count(self, optimizer: Optimizer) -> None:
        """Each step of ``optimizer`` is one from now on."""
        optimizer.register_step_post_hook(self._made)

    def _made(self, *_: object) -> None:
        if self.at is not None:
            self.at += 1


def leave_note(folder: Path, rank: int, error: BaseException, step: int | None) -> None:
    """step: that this rank has made last, if it is known. Collective: no; where nothing can be written it does nothing"""
    said = str(error).partition("the backend said")[0].partition("expected:")[0]
    text = "; ".join(filter(None, map(str.strip, said.splitlines())))
    if not isinstance(error, LostRankError):
        text = f"rank {rank} on {socket.gethostname()}: {type(error).__name__}: {text}"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        with durable_file(folder / f"end_rank_{rank}") as file:
            file.write(json.dumps([step, text[:_MAX_LENGTH]]).encode())


def taken_note(folder: Path, step: int) -> str:
    """In a line: why the run before has ended, and what is lost where the next one goes on after ``step``. Removes the notes."""
    notes: list[tuple[int, int, str]] = []
    for path in sorted(folder.glob("end_rank_*")):
        with contextlib.suppress(OSError, ValueError, TypeError, RecursionError), open_regular(path) as file:
            reached, text = json.loads(file.read(12 * _MAX_LENGTH))
            # A rank's own error is the cause; then those count that name a rank.
            how_sure = 2 if _LOST not in str(text) else int("; rank " in str(text))
            notes.append((how_sure, -1 if reached is None else int(reached), str(text)))
        with contextlib.suppress(OSError):
            path.unlink()
    if not notes:
        return ""
    lost = max(reached for _, reached, _ in notes) - step
    return printable(max(notes)[2]) + (f"; {counted(lost, 'step')} lost" if lost >= 0 else "")
