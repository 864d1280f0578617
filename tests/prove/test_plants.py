"""``fsdp2 prove`` finds and names each planted fault, and says nothing of healthy programs (plants/)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fsdp2.testing import pretend

HERE = Path(__file__).parent

KNOWN = {
    "whole values are written into .data": "torch ignores the write, and the reference begins with the run's values",
}
"""What is missed, and why."""
SLOW_PLANTS = [
    "one block has a divisor of its own",
    "each rank averages over its own tokens, and some are padding",
    "one rank drops the gradient of the head",
    "zero_grad is forgotten",
    "the all-reduce over replicas is left out",
    "two parameters get each other's gradient",
    "all ranks send old values",
    "gradients that wait are lost",
    "the head is ignored",
    "one rank freezes the embedding",
    "ranks keep each other's piece of the first values",
    "a rank breaks out of its uneven loop",
    "a rank leaves out a block that is not optional",
    "stand-ins contribute",
    "ranks of tensor parallelism have different data",
    "a teacher averages what fully_shard has replaced",
    "a guarded step clips twice",
    "gradients are divided twice after a load",
    "forward goes on with the values from before a load",
    "parked shards come back without a piece",
]


def assert_named(tables: list[str], names: list[str], part: str = "0/1", orders: int = 0) -> list[dict[str, Any]]:
    path = os.pathsep.join([str(HERE.parents[1]), str(HERE), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "plants", *tables, "--part", part, f"--orders={orders}", *(f"--only={name}" for name in names)]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    outcomes = json.loads(done.stdout)
    assert len(outcomes) >= len(names), outcomes
    wrong = [outcome for outcome in outcomes if not outcome["named"] and outcome["name"] not in KNOWN]
    assert not wrong, "\n".join(map(str, wrong))
    return outcomes


def test_a_fault_of_a_program_is_named() -> None:
    assert_named(["user"], ["losses of micro-batches are added up"])


@pytest.mark.slow
def test_some_planted_faults_are_named() -> None:
    assert_named(["user", "library"], SLOW_PLANTS)


@pytest.mark.slow
def test_some_healthy_programs_are_proven() -> None:
    assert_named(
        ["healthy"],
        [
            "the script as it is",
            "replicas",
            "tied weights",
            "a frozen base",
            "mixed precision",
            "two tasks with a backward each",
            "two predictions, and one weighs less",
            "examples/clients/experts.py",
            "a generator and its judge",
            "a generator and its judge, whose steps come last",
            "clipped by hand, if they are DTensors",
            "made on the meta device, and initialized on shards",
            "made on the meta device, and loaded",
            "a part of a block is computed again",
            "ranks with different numbers of batches",
            "a block that one rank leaves out",
            "a step that one rank refuses",
            "parked after each step",
        ],
    )


@pytest.mark.slow
@pytest.mark.skipif(bool(pretend.missing_tools()), reason=f"needs {', '.join(pretend.missing_tools())}")
def test_healthy_programs_keep_no_bytes_too_long() -> None:
    names = ["the script as it is", "mixed precision", "tied weights", "a moving average of the weights", "two replicas of two shards"]
    for outcome in assert_named(["healthy"], names, orders=1) + assert_named(["torchs"], names[:3], orders=1):
        assert "peak" not in outcome["not looked at"], outcome


@pytest.mark.slow
def test_some_faults_of_programs_on_torchs_fsdp2_are_named() -> None:
    names = ["losses of micro-batches are added up", "zero_grad is forgotten", "one rank alone steps", "tied weights", "a frozen base"]
    assert_named(["torchs"], [*names, "mixed precision", "two replicas of two shards"])


PARTS = 10  # a process that runs for more than 900 s is ended
EACH_PART = pytest.mark.parametrize("part", [f"{part}/{PARTS}" for part in range(PARTS)])


@pytest.mark.full
@EACH_PART
def test_every_planted_fault_is_named(part: str) -> None:
    assert_named(["user", "library"], [], part)


@pytest.mark.full
@EACH_PART
def test_every_program_on_torchs_fsdp2_is_judged_as_on_ours(part: str) -> None:
    assert_named(["torchs"], [], part)


@pytest.mark.full
@EACH_PART
def test_every_healthy_program_is_proven(part: str) -> None:
    assert_named(["healthy"], [], part)
