"""Training on the pretend accelerator: ours, and torch's FSDP2 as the control, bitwise as on the CPU in any legal order."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch.distributed.fsdp as torch_fsdp

from fsdp2.core.comm import collectives
from fsdp2.testing import pretend
from fsdp2.torch_names import torch_collectives
from harness import on_ranks
from harness.pretend_training import (
    MORE_SCENARIOS,
    SCENARIOS,
    SCENARIOS_2D,
    SCENARIOS_OF_DEPTH,
    SCENARIOS_OF_SEVERAL_GROUPS,
    SCENARIOS_OF_SUMS,
    train,
    train_late,
    with_even_extensions,
)
from harness.training import assert_same_bits

NUM_SEEDS = int(os.environ.get("PRETEND_SEEDS", "2"))


def slow_but(names: Any, *quick: str) -> list[Any]:
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


@on_ranks(1, device="pretend")
@pytest.mark.parametrize("name", slow_but(SCENARIOS, "micro_batches", "offload"))
def test_on_one_rank_every_order_trains_bitwise_as_the_cpu_does(name):
    expected = train(SCENARIOS[name], "cpu")
    for seed in (None, *range(NUM_SEEDS)):
        assert_same_bits(train_late(seed, SCENARIOS[name]), expected)


@on_ranks(2, device="pretend")
@pytest.mark.parametrize(
    "name",
    slow_but(
        [*SCENARIOS, *SCENARIOS_2D, *SCENARIOS_OF_DEPTH, *SCENARIOS_OF_SUMS],
        "bf16_mixed",
        "hsdp",
        "replicated_partial",
        "depth_offload_bf16",
    ),
)
def test_on_two_ranks_every_order_trains_bitwise_as_the_cpu_does(name):
    scenario = {**SCENARIOS, **SCENARIOS_2D, **SCENARIOS_OF_DEPTH, **SCENARIOS_OF_SUMS}[name]
    expected = train(scenario, "cpu")
    for seed in (None, *range(NUM_SEEDS)):
        assert_same_bits(train_late(seed, scenario), expected)


ON_FOUR = {
    name: replace(scenario, mesh=(2, 2) if scenario.mesh else ())
    for name, scenario in {
        **SCENARIOS,
        **SCENARIOS_2D,
        **SCENARIOS_OF_DEPTH,
        **SCENARIOS_OF_SUMS,
        **MORE_SCENARIOS,
        **SCENARIOS_OF_SEVERAL_GROUPS,
    }.items()
}


@on_ranks(4, device="pretend", timeout=600)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=pytest.mark.slow if name in ("hsdp", "several_dtypes_hsdp", "beside_another_root") else pytest.mark.full
        )
        for name in ON_FOUR
    ],
)
def test_on_four_ranks_collectives_that_run_one_at_a_time_never_wait_for_each_other(name):
    """As on a GPU where the kernels of two communicators do not fit together: each rank issues all collectives in one order."""
    expected = train_late(None, ON_FOUR[name])
    with pretend.one_collective_at_a_time(300):
        for seed in range(NUM_SEEDS):
            assert_same_bits(train_late(seed, ON_FOUR[name]), expected)


@contextlib.contextmanager
def divides_before_the_launch() -> Iterator[None]:
    """A planted fault: the division is queued while the launch is put together."""

    def scatter(buffers: Any, process_group: Any) -> None:
        with torch_collectives.one_launch(process_group, buffers[0][0].device):
            for output, input_, division in buffers:
                torch_collectives.reduce_scatter_single(output, input_, division.op, process_group, False)
                if division.postdivide is not None:
                    output.div_(division.postdivide)

    with mock.patch.object(collectives, "reduce_together", scatter):
        yield


@on_ranks(2, device="pretend")
def test_a_division_that_is_queued_before_the_launch_is_caught():
    """In every order alike, so that only the CPU's results show it."""
    scenario = SCENARIOS_OF_SUMS["several_dtypes_summed"]
    expected = train(scenario, "cpu")
    with divides_before_the_launch(), pytest.raises(AssertionError):
        assert_same_bits(train_late(None, scenario), expected)


@on_ranks(2, device="pretend")
@pytest.mark.parametrize("name", slow_but(["plain", "bf16", "micro_batches", "offload", "hsdp"], "plain"))
def test_the_control_torchs_own_fsdp2_trains_bitwise_alike_in_every_order(name):
    scenario = {**SCENARIOS, **SCENARIOS_2D}[name]
    expected = train_late(None, scenario, fully_shard=torch_fsdp.fully_shard)
    for seed in range(NUM_SEEDS):
        assert_same_bits(train_late(seed, scenario, fully_shard=torch_fsdp.fully_shard), expected)


@on_ranks(2, device="pretend")
@pytest.mark.parametrize(
    "name", slow_but(["extensions", "extensions_direct", "extensions_direct_unshard_over_the_step"], "extensions_direct")
)
def test_what_extensions_send_trains_bitwise_alike_gathered_straight_into_place_and_packed(name):
    """On the CPU it is packed."""
    expected = train(MORE_SCENARIOS[name], "cpu")
    for seed in range(NUM_SEEDS):
        assert_same_bits(train_late(seed, MORE_SCENARIOS[name]), expected)


@pytest.mark.slow
@on_ranks(2, device="pretend")
def test_extensions_gathered_straight_into_place_train_bitwise_as_with_torchs_fsdp2():
    scenario = replace(MORE_SCENARIOS["extensions_direct"], model=with_even_extensions)
    expected = train_late(None, scenario, fully_shard=torch_fsdp.fully_shard)
    for seed in range(NUM_SEEDS):
        assert_same_bits(train_late(seed, scenario), expected)
