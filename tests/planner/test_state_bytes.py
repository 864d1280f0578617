"""What a plan says of a rank's bytes is what the runtime allocates, on real ranks, to the byte. The plan is made beside their world."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp2
from fsdp2 import MixedPrecisionPolicy, accumulate, parallelize
from fsdp2.core.iteration.module_state import units_in
from fsdp2.errors import ArgumentError, ParameterError
from fsdp2.optim import AnyPrecisionAdamW, Muon, flat, offloaded
from fsdp2.planner.memory import rounded_to_power_of_two
from fsdp2.planner.result import Plan
from fsdp2.state_bytes import measured_state_bytes
from fsdp2.strategy import STRATEGIES
from harness import on_ranks


class Block(nn.Module):
    """Rows that no number of ranks divides, and a parameter smaller than its alignment."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(37)
        self.up = nn.Linear(37, 131)
        self.down = nn.Linear(131, 37, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(37, 37)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def inputs(batch: int, sequence: int) -> tuple[Tensor]:
    return (torch.ones(batch, sequence, 37),)


def trained(strategy: str, policy: MixedPrecisionPolicy, micro_batches: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """After a step and the backward of a second one."""
    size = 2 if STRATEGIES[strategy].is_hybrid else None
    model = parallelize(Model(), strategy, shard_size=size, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for step in range(2):
        for index in range(micro_batches):
            with accumulate(model, last=index == micro_batches - 1):
                model(*inputs(2, 3)).float().mean().backward()
        if step == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizer


@on_ranks(2, 4)
@pytest.mark.parametrize("micro_batches", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "strategy", [pytest.param(name, marks=[] if name in ("zero1", "zero3", "hsdp") else pytest.mark.slow) for name in STRATEGIES]
)
def test_state_bytes_are_those_that_ranks_allocate(strategy, micro_batches, world_size):
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    planned = fsdp2.plan(
        Model(),
        world_size,
        strategy,
        shard_size=2 if STRATEGIES[strategy].is_hybrid else None,
        micro_batches=micro_batches,
        backend="gloo",
        inputs=inputs,
        batch=2,
        sequence=3,
        **dtypes,
    )
    model, optimizer = trained(strategy, MixedPrecisionPolicy(**dtypes), micro_batches)
    measured = measured_state_bytes(model, optimizer)
    groups = [group for unit in units_in(model.modules()) for group in unit.groups]
    for group in groups:
        group.issue()
        group.wait()
    if dist.get_rank() == 0:  # whose shards no other rank's exceed
        assert planned.state == measured
        assert [each.numel for each in planned.groups] == [sum(param.spec.cut.numel for param in group.params) for group in groups]
        assert [each.sharded for each in planned.groups] == [group.flat.nbytes for group in groups]
        assert [each.unsharded for each in planned.groups] == [group.unsharded.storage.nbytes() for group in groups]


OPTIMIZERS = {
    "flat": lambda params: flat(torch.optim.AdamW, params),
    "flat, fused": lambda params: flat(torch.optim.AdamW, params, fused=True),
    "AnyPrecisionAdamW": AnyPrecisionAdamW,
    "flat AnyPrecisionAdamW": lambda params: flat(AnyPrecisionAdamW, params),
    "offloaded": lambda params: offloaded(torch.optim.AdamW, params, fsdp2.CPUOffloadPolicy(pin_memory=False)),
    "Muon": Muon,
}


@on_ranks(2)
def test_the_memory_of_a_step_has_each_optimizers_state_once():
    """Views of a fake flat shard all began at its first byte: the second planned step took a flat optimizer's state for another.

    And the parameters of a second plan lay on the mesh of the first one's world, whose process groups Muon did not find.
    """
    for name, optimizer_of in OPTIMIZERS.items():
        planned = fsdp2.plan(Model(), 2, "zero3", backend="gloo", inputs=inputs, batch=2, sequence=3, optimizer=optimizer_of)
        model = parallelize(Model(), "zero3")
        optimizer = optimizer_of(model.parameters())
        model(*inputs(2, 3)).mean().backward()
        optimizer.step()
        measured = measured_state_bytes(model, optimizer).optimizer
        if dist.get_rank() == 0:
            numbers_of_steps = 4 * sum(1 for _ in model.parameters())
            assert planned.state.optimizer == measured, name
            assert 0 <= planned.memory.most["optimizer state"] - measured <= numbers_of_steps, name


def plan_beside(offload: Any, **options: Any) -> Plan:
    return fsdp2.plan(Model(), 2, "zero3", wrap=[Block], backend="gloo", inputs=inputs, batch=2, sequence=3, offload=offload, **options)


@on_ranks(2)
def test_states_on_the_host_are_those_that_an_offloaded_optimizer_has_there():
    """And the copies of two groups that are on their way: of a gradient and a parameter each."""
    model = parallelize(Model(), "zero3", wrap=[Block])
    optimizer = offloaded(torch.optim.AdamW, model, fsdp2.CPUOffloadPolicy())
    model(*inputs(2, 3)).square().mean().backward()
    optimizer.step()
    on_host = sum(value.nbytes for run in optimizer.host_runs for value in run.values().values())
    planned, resident = plan_beside("optimizer"), plan_beside(False)
    states, counters = planned.state.optimizer, 4 * len(optimizer.host_runs)
    first, second, *_ = sorted((run.data.nbytes for run in optimizer.host_runs), reverse=True)
    if dist.get_rank() == 0:
        assert on_host == states
        assert planned.memory.host == states + counters + 2 * (first + second)
        assert planned.memory.peak.nbytes == resident.memory.peak.nbytes - resident.memory.most["optimizer state"]


@on_ranks(1)
def test_page_locked_shards_and_gradients_count_as_torch_allocates_them():
    """Symptom: torch rounds each page-locked tensor up to a power of two, and plans counted what was asked for."""
    assert [rounded_to_power_of_two(nbytes) for nbytes in (0, 1, 8, 9, (4 << 20) + 1)] == [0, 1, 8, 16, 8 << 20]
    model = parallelize(Model(), "zero3", wrap=[Block])
    flats = [group.flat.nbytes for unit in units_in(model.modules()) for group in unit.groups]
    planned = fsdp2.plan(Model(), 1, "zero3", wrap=[Block], optimizer="sgd", inputs=inputs, batch=2, sequence=3, offload=True)
    asked_for = planned.memory.most["sharded parameters"] + planned.memory.most["sharded gradients"]
    rounded = 2 * sum(map(rounded_to_power_of_two, flats))
    assert asked_for < rounded <= planned.memory.host < rounded + asked_for


@on_ranks(2)
def test_files_are_those_that_the_runtime_makes(tmp_path):
    """And a plan of an optimizer that keeps its states in files is the plan with that ``offload``."""
    policy = fsdp2.DiskOffloadPolicy(tmp_path)
    for offload, of_parameters in (("disk", policy), ("optimizer-disk", None)):
        model = parallelize(Model(), "zero3", wrap=[Block], offload_policy=of_parameters)
        optimizer = offloaded(torch.optim.AdamW, model, policy, fused=True)
        for _ in range(2):
            optimizer.zero_grad()
            model(*inputs(2, 3)).square().mean().backward()
            kept = measured_state_bytes(model, optimizer)
            optimizer.step()
        groups = [group for unit in units_in(model.modules()) for group in unit.groups]
        files = [each.file for each in (*groups, *optimizer.host_runs) if each.file is not None]
        planned = plan_beside(offload)
        assert len(files) == len(optimizer.host_runs) + (len(groups) if of_parameters else 0)
        if dist.get_rank() == 0:
            assert planned.state == kept
            assert planned.memory.files == sum(file.nbytes for file in files)
    of_its_own = plan_beside(False, optimizer=lambda params: offloaded(torch.optim.AdamW, params, policy, fused=True))
    assert of_its_own.memory == planned.memory


def test_an_offloaded_shard_is_staged_on_the_device_while_it_is_gathered():
    """Gathers write into the unsharded storage, whose memory is there already: a copy of the shard is all that they need beside it."""
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(3)))
    options = {"wrap": [nn.Linear], "inputs": lambda batch, sequence: (torch.ones(batch, 1024),), "optimizer": "sgd"}
    staged, resident = (fsdp2.plan(model, 4, offload=offload, **options) for offload in (True, False))
    assert "all-gather buffers" not in resident.memory.most
    assert staged.memory.most["all-gather buffers"] == staged.groups[-1].sharded


class Adapted(nn.Module):
    """A base that does not learn, and a small layer beside it that does."""

    def __init__(self, base: torch.dtype) -> None:
        super().__init__()
        self.base = nn.Linear(37, 37, dtype=base).requires_grad_(False)
        self.down, self.up = nn.Linear(37, 4, bias=False), nn.Linear(4, 37, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def adapted(base: torch.dtype) -> nn.Module:
    return nn.Sequential(*(Adapted(base) for _ in range(3)))


DTYPES = {  # the model, and what the plan says of its dtypes
    "bf16": (lambda: Model().to(torch.bfloat16), "stored bfloat16"),
    "a frozen bf16 base with fp32 adapters": (lambda: adapted(torch.bfloat16), "stored 82.6% bfloat16 and 17.4% float32"),
    "fp64": (lambda: Model().double(), "stored float64"),
}


@on_ranks(2)
def test_a_model_is_planned_in_the_dtypes_that_its_parameters_have(world_size):
    for name, (made, said) in DTYPES.items():
        policy = {"param_dtype": torch.bfloat16}
        planned = fsdp2.plan(made(), 2, "zero3", backend="gloo", inputs=inputs, batch=2, sequence=3, **policy)
        model = parallelize(made(), "zero3", mp_policy=MixedPrecisionPolicy(**policy))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for step in range(2):
            model(*inputs(2, 3)).float().mean().backward()
            if step == 0:
                optimizer.step()
                optimizer.zero_grad()
        if dist.get_rank() == 0:
            assert planned.state == measured_state_bytes(model, optimizer), name
            assert said in str(planned), str(planned)
    cast = fsdp2.plan(Model().to(torch.bfloat16), 2, backend="gloo", inputs=inputs, batch=2, sequence=3, dtype=torch.float32)
    whole = fsdp2.plan(Model(), 2, backend="gloo", inputs=inputs, batch=2, sequence=3)
    assert cast.state == whole.state


def sparse() -> nn.Module:
    return nn.Sequential(nn.Embedding(64, 16, sparse=True), nn.Linear(16, 16))


def test_what_real_ranks_refuse_a_plan_refuses_with_the_same_words_or_with_what_to_take_instead():
    with pytest.raises(ParameterError, match=r"0.weight[\s\S]*build nn.Embedding and nn.EmbeddingBag with sparse=False"):
        fsdp2.plan(sparse(), 2, optimizer="sgd")
    with pytest.raises(
        ArgumentError, match=r"Adafactor, that raised RuntimeError when it stepped with zero3: [\s\S]*strategies.md#optimizers"
    ):
        fsdp2.plan(Model(), 2, inputs=inputs, optimizer=torch.optim.Adafactor)
