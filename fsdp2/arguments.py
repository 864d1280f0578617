"""Kinds of arguments that many calls have, and their check: switches, numbers, paths, dtypes, functions, process groups.

    require("plan", COUNT, batch=batch, sequence=sequence)
    # ArgumentError: plan got batch='x' of type str; expected: a whole number, 1 or more; fix: for instance batch=8

    parser.add_argument("--ranks", type=word_of(COUNT))

Checks of one call's own arguments stand next to the call.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from .errors import ArgumentError, got


@dataclass(frozen=True)
class Kind:
    """Values that ``holds`` is true of. expected: in words; example: how to write one."""

    holds: Callable[[Any], bool]
    expected: str
    example: str

    @property
    def or_none(self) -> Kind:
        return replace(self, holds=lambda value: value is None or self.holds(value), expected=f"{self.expected}, or None")


def _is_whole(value: Any, least: int) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= least


# 0 and 1 are bools to torch's own calls, too.
SWITCH = Kind(lambda value: isinstance(value, int) and value in (0, 1), "True or False", "True")
NATURAL = Kind(lambda value: _is_whole(value, 0), "a whole number, 0 or more", "0")
COUNT = Kind(lambda value: _is_whole(value, 1), "a whole number, 1 or more", "8")
POSITIVE = Kind(
    lambda value: isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0, "a number, more than 0", "60"
)
PATH = Kind(lambda value: isinstance(value, (str, os.PathLike)), "a path", '"run"')
EXISTING = Kind(os.path.exists, "a file or a folder that is there", "runs/a")
PLACE = Kind(lambda value: os.path.isdir(os.path.dirname(value) or "."), "a file in a folder that is there", "card.json")
WORD = Kind(lambda value: isinstance(value, str), "a str", '"model"')
DTYPE = Kind(lambda value: isinstance(value, torch.dtype), "a torch.dtype", "torch.bfloat16")
FUNCTION = Kind(callable, "a function", "my_function")
OPTIMIZER = Kind(lambda value: isinstance(value, Optimizer), "a torch.optim.Optimizer", "optimizer")
PROCESS_GROUP = Kind(
    lambda value: dist.is_available() and isinstance(value, dist.ProcessGroup), "a process group", 'mesh.get_group("dp")'
)


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
"""The words of the command line."""


def one_of(*values: object) -> Kind:
    return Kind(lambda value: value in values, f"one of {list(values)}", repr(values[-1]))


def require(caller: str, kind: Kind, **given: object) -> None:
    """Raises: ArgumentError for the first of ``given``, by name, that is not of ``kind``"""
    for name, value in given.items():
        if not kind.holds(value):
            raise ArgumentError(got(caller, name, value), expected=kind.expected, fix=f"for instance {name}={kind.example}")


def word_of(kind: Kind, read: Callable[[str], Any] = int) -> Callable[[str], Any]:
    """For ``type`` of argparse: ``read`` of a word of the command line, if that is of ``kind``."""

    def value_of(word: str) -> Any:
        try:
            value = read(word)
        except ValueError:
            value = None
        if not kind.holds(value):
            raise argparse.ArgumentTypeError(f"got {word!r}; expected: {kind.expected}; fix: for instance {kind.example}")
        return value

    return value_of


def dtype_option(said: str) -> dict[str, Any]:
    """What argparse is told of an option that takes a dtype. said: its help"""
    words = replace(DTYPE, expected=f"one of {list(DTYPES)}", example="bf16")
    return {"type": word_of(words, DTYPES.get), "metavar": f"{{{','.join(DTYPES)}}}", "help": said}


def add_format(parser: argparse.ArgumentParser) -> None:
    """How a command prints its result."""
    parser.add_argument("--format", choices=["text", "json"], default="text", help="of the result; json: one object (default: text)")
    parser.add_argument("--json", dest="format", action="store_const", const="json", help="the same as --format json")


def checked_path(caller: str, name: str, path: Any) -> Path:
    """``path`` as a Path. Raises: ArgumentError if it is none"""
    require(caller, PATH, **{name: path})
    return Path(path)
