"""One program in many orders: each must compute what comes out when everything runs as it is queued."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed.fsdp as torch_fsdp

from fsdp2.testing import pretend
from harness.pretend_training import Scenario, train_late
from harness.training import assert_same_bits


@dataclass
class Verdict:
    """refusal: what the program raises in the order in which work is queued; else what went wrong, by seed."""

    refusal: str = ""
    wrong: dict[int, str] = field(default_factory=dict)

    def __str__(self) -> str:
        if self.refusal:
            return f"refused: {self.refusal}"
        return f"WRONG with seeds {list(self.wrong)}: {next(iter(self.wrong.values()))}" if self.wrong else "right"


def tried(program: Scenario, seeds: Iterable[int], fully_shard: Any = torch_fsdp.fully_shard) -> Verdict:
    """Raises nothing that the program raises: in order that is a refusal, in another order a fault."""
    try:
        expected = train_late(None, program, fully_shard=fully_shard)
    except Exception as error:
        _clear()
        return Verdict(refusal=_first_line(error))
    verdict = Verdict()
    for seed in seeds:
        try:
            assert_same_bits(train_late(seed, program, fully_shard=fully_shard), expected)
        except Exception as error:
            verdict.wrong[seed] = _first_line(error)
            _clear()
    return verdict


def _clear() -> None:
    with contextlib.suppress(RuntimeError):
        pretend.synchronize()


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
