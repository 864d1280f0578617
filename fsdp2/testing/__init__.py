"""Tools for tests of sharded programs, which no training run imports: streams that record and are checked for races."""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    if name == "proves":
        return importlib.import_module("fsdp2.prove.command").proves
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
