"""What a check is.

    @check("a sum is a sum", part=1)
    def sum_is_sum(device):
        assert device.ones(3).sum().item() == 3

The body runs on every rank, in a process group. What it returns, a dict of figures, is reported; an exception makes its row fail, and
``Skip`` with the name of what is missing makes it a skip.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Backend = Literal["nccl", "mixed", "none", "fake", "model"]
"""What ``init_process_group`` is given: the device's backend alone, ``"cpu:gloo,cuda:nccl"``, nothing, ranks that only pretend and
move no data, or modeled ones, which do (``modeled.py``)."""
PLAYED = ("fake", "model")
"""Backends with which one process plays the first of several ranks."""


class Skip(Exception):  # noqa: N818  # no error: a row that says what is missing
    """The check cannot be run here; the text names what is missing."""


@dataclass(frozen=True)
class Setup:
    """How the processes are started; checks of one setup share them.

    ranks:     how many; 0: one a device, several at least. One process plays the first of ``fake`` and ``model`` ranks
    device_id: ``init_process_group`` is told the device, so that communicators are made at once
    sanitizer: the CUDA sanitizer watches every kernel (torch starts it, by TORCH_CUDA_SANITIZER)
    """

    ranks: int = 1
    backend: Backend = "mixed"
    device_id: bool = False
    sanitizer: bool = False


@dataclass(frozen=True)
class Check:
    """name: how it is called on the command line; part: 1 one device, 2 several, 3 measurements; is_first: before all others;
    kind: the title without what makes this row special
    """

    name: str
    title: str
    part: int
    setup: Setup
    timeout_s: float
    run: Callable[..., Mapping[str, Any] | None]
    arguments: tuple[Any, ...] = ()
    is_first: bool = False
    kind: str = ""


CHECKS: dict[str, Check] = {}


def check(
    title: str,
    part: int,
    setup: Setup = Setup(),
    timeout_s: float = 120,
    each: Mapping[str, tuple[Any, ...]] | None = None,
    setups: Mapping[str, Setup] | None = None,
    is_first: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a check. each: one check for each name, with these arguments behind the device; setups: one for each name."""

    def register(run: Callable[..., Any]) -> Callable[..., Any]:
        for setup_name, one_setup in (setups or {"": setup}).items():
            for name, arguments in (each or {"": ()}).items():
                full = ":".join(filter(None, (run.__name__, name, setup_name)))
                long = ", ".join(filter(None, (title, name.replace("_", " "), setup_name)))
                CHECKS[full] = Check(full, long, part, one_setup, timeout_s, run, arguments, is_first, title)
        return run

    return register
