"""What a rank keeps, category by category, is what the formula of its strategy says: counted in storages, on real ranks.

    ddp 2 + r + 4 + 8 a parameter (bf16 compute, r the reduce dtype's bytes); zero1 shards master and Adam, zero2 gradients too, ...

Sizes are chosen such that nothing is padded; what is not a parameter's is the flags behind a group's gradients, which are stated.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp2 import MixedPrecisionPolicy, accumulate, parallelize
from fsdp2.state_bytes import StateBytes, expected_state_bytes, measured_state_bytes
from fsdp2.strategy import STRATEGIES
from harness import on_ranks
from harness.memory import PeakBytes, covered_bytes
from harness.training import own_chunk

DIM, BLOCKS = 128, 3
POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16, fp32 reduce": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
}
SLACK = 48 << 10  # activations, inputs, plans: none of them grows with the model


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 4 * DIM)
        self.down = nn.Linear(4 * DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


NUMEL = sum(param.numel() for param in Model().parameters())


def sharded(strategy: str, policy: MixedPrecisionPolicy, shard_size: int) -> tuple[Model, torch.optim.Optimizer]:
    """A model that has made one step, so that optimizer and plans are there."""
    size = shard_size if STRATEGIES[strategy].is_hybrid else None
    model = parallelize(Model(), strategy, shard_size=size, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    micro_batch(model, last=True)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def micro_batch(model: nn.Module, last: bool) -> None:
    with accumulate(model, last=last):
        model(own_chunk(torch.randn(8, DIM))).float().square().mean().backward()


def flags(strategy: str, policy: MixedPrecisionPolicy, world_size: int, stepping: bool) -> int:
    """Bytes of the flags behind the gradients, 128 bytes' worth of elements of the smallest dtype a group and rank."""
    smallest = min((policy.param_dtype or torch.float32).itemsize, (policy.reduce_dtype or torch.float32).itemsize)
    itemsize = 4 if stepping else (policy.reduce_dtype or policy.param_dtype or torch.float32).itemsize
    whole = strategy == "zero1" and not stepping
    return BLOCKS * (128 // smallest) * itemsize * (world_size if whole else 1)


def assert_bytes(measured: StateBytes, expected: StateBytes, flag_bytes: int) -> None:
    assert (measured.compute, measured.gradients, measured.master, measured.optimizer) == (
        expected.compute,
        expected.gradients + flag_bytes,
        expected.master,
        expected.optimizer,
    )


def assert_nothing_hides(live: PeakBytes, measured: StateBytes) -> None:
    """Beside the four categories there is nothing that grows with the model."""
    for _ in range(50):  # gloo's threads drop the buffers of a finished collective a moment after it is waited for
        too_much = torch.tensor(covered_bytes(live.now()) > measured.total + SLACK)
        dist.all_reduce(too_much, op=dist.ReduceOp.MAX)
        if not too_much:
            break
    assert measured.total <= covered_bytes(live.now()) <= measured.total + SLACK


@on_ranks(2, 4)
@pytest.mark.parametrize("policy", [pytest.param(name, marks=[pytest.mark.slow] if "," in name else []) for name in POLICIES])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rank_keeps_what_the_formula_says(strategy, policy, world_size):
    mp_policy = POLICIES[policy]
    shard_size = 2
    model, optimizer = sharded(strategy, mp_policy, shard_size)

    def expected(moment):
        return expected_state_bytes(
            strategy,
            NUMEL,
            world_size=world_size,
            shard_size=shard_size,
            param_dtype=mp_policy.param_dtype,
            reduce_dtype=mp_policy.reduce_dtype,
            moment=moment,
        )

    with PeakBytes() as live:
        live.touch([*model.parameters(), *(each for state in optimizer.state.values() for each in state.values())])
        for _ in range(2):  # one micro-batch more changes nothing
            micro_batch(model, last=False)
            assert all(param.grad is None for param in model.parameters())
            measured = measured_state_bytes(model, optimizer)
            assert_bytes(measured, expected("accumulating"), flags(strategy, mp_policy, world_size, stepping=False))
            assert_nothing_hides(live, measured)
        micro_batch(model, last=True)
        measured = measured_state_bytes(model, optimizer)
        assert_bytes(measured, expected("stepping"), flags(strategy, mp_policy, world_size, stepping=True))
        assert_nothing_hides(live, measured)
        optimizer.step()
        optimizer.zero_grad()
        assert measured_state_bytes(model, optimizer).gradients == 0


@on_ranks(4)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_between_forward_and_backward_parameters_are_resident_or_not(strategy):
    model, optimizer = sharded(strategy, POLICIES["bf16"], 2)
    loss = model(own_chunk(torch.randn(8, DIM))).float().square().mean()
    kept = {"nobody": 2 * NUMEL, "node": 0, "world": 0}[STRATEGIES[strategy].parameters]
    if strategy == "hsdp_global":
        kept = 2 * NUMEL // 2
    assert measured_state_bytes(model, optimizer).compute == kept
    loss.backward()


def test_bf16_gradients_are_the_zero_papers_2_2_12():
    """Rajbhandari et al., figure 1, for 7.5 billion parameters on 64 ranks: 120, 31.4, 16.6, 1.9 GB."""
    gigabytes = {
        strategy: expected_state_bytes(
            strategy, 7_500_000_000, world_size=64, param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16
        ).total
        / 1e9
        for strategy in ("ddp", "zero1", "zero2", "zero3")
    }
    transient = 2 * 7.5 / 64  # the paper counts zero3's shard of the compute copy, which here is a cast of the master's
    assert gigabytes["ddp"] == pytest.approx(120.0)
    assert gigabytes["zero1"] == pytest.approx(31.4, abs=0.05)
    assert gigabytes["zero2"] == pytest.approx(16.6, abs=0.05)
    assert gigabytes["zero3"] + transient == pytest.approx(1.9, abs=0.05)


@on_ranks(2)
def test_gradients_that_accumulate_without_accumulate_are_sharded_at_once():
    """Without ``accumulate`` every backward is the last: zero1 keeps shards too, at the price of a reduction a micro-batch."""
    model, optimizer = sharded("zero1", POLICIES["fp32"], 2)
    for _ in range(2):
        model(own_chunk(torch.randn(8, DIM))).square().mean().backward()
        measured = measured_state_bytes(model, optimizer)
        assert measured.compute == 0
        assert measured.gradients == 4 * NUMEL // 2 + flags("zero1", POLICIES["fp32"], 2, stepping=True)
