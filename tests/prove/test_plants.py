"""``fsdp2 prove`` finds and names each planted fault, and says nothing of healthy programs (plants/)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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
    "parked shards come back without a piece",
]


def assert_named(tables: list[str], names: list[str], part: str = "0/1") -> None:
    path = os.pathsep.join([str(HERE.parents[1]), str(HERE), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "plants", *tables, "--part", part, *(f"--only={name}" for name in names)]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    outcomes = json.loads(done.stdout)
    assert len(outcomes) >= len(names), outcomes
    wrong = [outcome for outcome in outcomes if not outcome["named"] and outcome["name"] not in KNOWN]
    assert not wrong, "\n".join(map(str, wrong))


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


PARTS = 10  # a process that runs for more than 900 s is ended
EACH_PART = pytest.mark.parametrize("part", [f"{part}/{PARTS}" for part in range(PARTS)])


@pytest.mark.full
@EACH_PART
def test_every_planted_fault_is_named(part: str) -> None:
    assert_named(["user", "library"], [], part)


@pytest.mark.full
@EACH_PART
def test_every_healthy_program_is_proven(part: str) -> None:
    assert_named(["healthy"], [], part)
