"""Warnings to the user: on one rank, at the line of the user's program that led to them.

    train.py:41: UserWarning: [rank 0] 6 trainable parameters were registered below FSDPGPT after fully_shard was called on it
      model(x)

Python's filters decide what a warning does, as for every other: by default each line of a program shows one text once. Where a
filter turns a warning into an error, every rank raises it: an error on rank 0 alone would leave the others waiting in the next
collective.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import threading
import warnings
from collections.abc import Collection
from types import FrameType

import torch
import torch.distributed as dist

_log = logging.getLogger("fsdp2")
_told: set[str] = set()
"""Names of what this process has told, and tells no more."""

_BETWEEN = (
    *(os.path.dirname(package) + os.sep for package in (__file__, torch.__file__)),
    *(str(module.__file__) for module in (contextlib, functools, threading)),
    "<eval_with_key>",  # code that torch.fx has made
)
"""How files begin that stand between a line of the user's and its warning: ours, torch's ``nn.Module.__call__``, context managers."""


def warn(text: str, category: type[Warning] = UserWarning, *, ranks: Collection[int] = (), once: str | None = None) -> None:
    """Warn of what is so on all ``ranks``: the lowest of them shows it.

    ranks: those on which the same is called; empty: all of the job. A fact of one rank alone: that rank
    once:  a name under which this process warns once, from any line
    """
    if once in _told:
        return
    line = line_of_the_user()
    # Recording what the other ranks would show keeps the filters, and thereby the errors.
    with contextlib.nullcontext() if _rank() == min(ranks, default=0) else warnings.catch_warnings(record=True):
        warnings.warn_explicit(
            text,
            category,
            line.f_code.co_filename,
            line.f_lineno,
            module=line.f_globals.get("__name__"),
            registry=line.f_globals.setdefault("__warningregistry__", {}),
        )
    if once is not None:
        _told.add(once)


def log_once(name: str, text: str) -> None:
    """Log a warning on rank 0, once a process: what no filter should turn into an error."""
    if name in _told:
        return
    _told.add(name)
    if _rank() == 0:
        _log.warning(text)


def was_told(name: str) -> bool:
    return name in _told


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def line_of_the_user() -> FrameType:
    """The innermost frame of this thread that is the user's, else of the main thread: a device's backward has a thread of its own."""
    here = sys._getframe()
    return _first_outside(here) or _first_outside(sys._current_frames().get(threading.main_thread().ident or 0)) or here


def _first_outside(frame: FrameType | None) -> FrameType | None:
    while frame is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        frame = frame.f_back
    return frame
