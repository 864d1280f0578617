"""Tools for tests of sharded programs, which no training run imports: a pretend accelerator, and a step on a clock."""

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "proves":
        from ..prove.command import proves  # pytest's door to what stands above

        return proves
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
