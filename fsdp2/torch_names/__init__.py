"""Every private torch name that several layers use, and every difference between torch 2.11 and 2.15, a file for each subject.

Nothing here has logic of its own: a name is re-exported, or wrapped so that its callers need not know the torch
version. When a torch release breaks fsdp2, these are the files to fix, and those named ``torch_names.py`` in other
folders. If a release drops a name, only the feature that uses it fails, not ``import fsdp2`` (``torch_name``). Next to
or above a name stands what happens if it is gone; where nothing stands, its first use raises.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from ..errors import FSDPError


class _Gone(type):
    """The type of a class that stands for a name that this torch lacks: it has no instances, and its use raises."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise _gone_error(cls.path)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):  # Python asks every class for some of these
            raise AttributeError(name)
        raise _gone_error(cls.path)


def _gone_error(path: str) -> FSDPError:
    return FSDPError(
        f"torch {torch.__version__} has no {path}, which this needs",
        expected="a version of torch that fsdp2 was tested with, 2.11 to 2.15",
        fix="install one of these, or a newer fsdp2",
    )


def torch_name(path: str, instead: Any = None) -> Any:
    """The private torch name ``path``; if it is gone: ``instead``, or a class whose every use raises an FSDPError."""
    home, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(home), name)
    except (ImportError, AttributeError):
        return _Gone(name, (), {"path": path}) if instead is None else instead
