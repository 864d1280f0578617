"""Random programs in random orders: for 1 000 seeds, what is computed is what comes out when everything runs as it is queued.

A seed is the order in which the streams take turns, and each eight share a program, so that a failure comes again with its number:

    train_late(17, draw(17 // 8))
"""

from __future__ import annotations

import contextlib
import random
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

import fsdp2
from fsdp2.testing import pretend
from harness import on_ranks
from harness.models import mlp
from harness.pretend_training import (
    BF16,
    Scenario,
    halve_in_a_hook,
    in_partly_reduced_micro_batches,
    in_two_micro_batches,
    prefetch_two_deep,
    train_late,
    unsharded_over_the_step,
    with_a_shorter_evaluation,
    with_an_evaluation,
    with_extensions,
    written_on_a_side_stream,
)
from harness.training import assert_same_bits, forward_backward

NUM_SEEDS = 1000
SHARE = 8  # seeds of one program, whose right results are computed once
AT_ONCE = 200  # seeds in one test


def several_dtypes() -> nn.Module:
    model = mlp()
    for block in model.blocks:
        block.scale.data = block.scale.data.bfloat16()
    return model


def tied() -> nn.Module:
    model = mlp()
    model.blocks[2].up.weight = model.blocks[0].up.weight
    return model


def partly_frozen() -> nn.Module:
    model = mlp()
    model.blocks[1].requires_grad_(False)
    model.blocks[2].up.weight.requires_grad_(False)
    return model


def let_three_reductions_fly(model: Any) -> None:
    model.set_reduce_scatter_max_input_buffers(3)


def nothing(model: Any) -> None:
    pass


MODELS = (mlp, mlp, several_dtypes, tied, partly_frozen, with_extensions)
MESHES = ((), (), (2, 2), (4, 1))
POLICIES = ({}, BF16, {"mp_policy": fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16)})
ITERATIONS = (
    forward_backward,
    in_two_micro_batches,
    partial(in_two_micro_batches, reduce_first=False),
    in_partly_reduced_micro_batches,
    with_an_evaluation,
    with_a_shorter_evaluation,
    unsharded_over_the_step,
    written_on_a_side_stream,
)
PREPARATIONS = (nothing, nothing, prefetch_two_deep, let_three_reductions_fly, halve_in_a_hook)


def draw(number: int) -> Scenario:
    """A way to train that is right on any device."""
    chance = random.Random(number)
    model, mesh, policy = chance.choice(MODELS), chance.choice(MESHES), chance.choice(POLICIES)
    iteration, prepare = chance.choice(ITERATIONS), chance.choice(PREPARATIONS)
    if mesh != () and prepare is halve_in_a_hook:  # which has a stream of its own: refused where axes replicate
        prepare = nothing
    options: dict[str, Any] = {
        **policy,
        "reshard_after_forward": chance.choice([None, True, False, 2] if mesh == () else [None, True, False]),
    }
    on_host = iteration is not written_on_a_side_stream and chance.random() < 0.25  # whose optimizers run on the host
    if on_host and prepare is not halve_in_a_hook:
        options["offload_policy"] = fsdp2.CPUOffloadPolicy()
    if model is not with_extensions and chance.random() < 0.2:
        options["shard_placement_fn"] = lambda param: Shard(param.ndim - 1)
    private = {"gather": chance.choice(["direct", "packed", "mixed"])} if chance.random() < 0.5 else {}
    return Scenario(options, mesh, prepare, iteration, model, private, num_steps=2)


def failures(seeds: range) -> list[str]:
    """What went wrong, by seed."""
    found = []
    for number in range(seeds.start // SHARE, -(-seeds.stop // SHARE)):
        program = draw(number)
        expected = train_late(None, program)
        for seed in range(number * SHARE, (number + 1) * SHARE):
            try:
                assert_same_bits(train_late(seed, program), expected)
            except (AssertionError, RuntimeError) as error:
                found.append(f"seed {seed}: {str(error).splitlines()[0]}\n  {program}")
                with contextlib.suppress(RuntimeError):
                    pretend.synchronize()
    return found


@on_ranks(4, device="pretend_model")
def test_two_random_programs_compute_the_same_in_random_orders():
    assert failures(range(NUM_SEEDS, NUM_SEEDS + 2 * SHARE)) == []


@pytest.mark.slow
@on_ranks(4, device="pretend_model", timeout=600)
@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.full) for first in range(AT_ONCE, NUM_SEEDS, AT_ONCE))])
def test_random_programs_compute_the_same_in_random_orders(first):
    assert failures(range(first, first + AT_ONCE)) == []
