"""Each check finds the fault that a test builds, by the names of its parameters and ranks; healthy programs have no finding."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp2
from fsdp2 import MixedPrecisionPolicy, doctor, fully_shard
from fsdp2.doctor.arguments import CHECKS
from fsdp2.doctor.environment import environment_findings
from fsdp2.errors import ArgumentError, DoctorError, ModuleError
from fsdp2.optim import AnyPrecisionAdamW, flat
from harness import cpu_mesh, on_ranks
from harness.models import mlp, transformer
from harness.sharding import shard_blocks

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
Built = tuple[nn.Module, Any, dict[str, Any]]


class Rotary(nn.Module):
    """A block with a table that no checkpoint has."""

    def __init__(self, dim: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim, dim))
        self.register_buffer("table", torch.empty(dim), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        self.table.fill_(2.0)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight * self.table


class Stack(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def with_unwritten_buffer() -> Built:
    with torch.device("meta"):
        model = Stack(Rotary(), Rotary())
    shard_blocks(model)
    with doctor.canaries():
        model.to_empty(device="cpu")
    model.load_state_dict({f"blocks.{index}.weight": torch.ones(4, 4) for index in (0, 1)})
    model.blocks[0].reset_parameters()
    return model, None, {}


def with_unwritten_parameter() -> Built:
    with torch.device("meta"):
        model = Stack(Rotary(), Rotary())
    shard_blocks(model)
    with doctor.canaries():
        model.to_empty(device="cpu")
    model.load_state_dict({"blocks.0.weight": torch.ones(4, 4)}, strict=False)
    for block in model.blocks:
        block.table.fill_(2.0)
    return model, None, {}


def on_meta() -> Built:
    with torch.device("meta"):
        model = Stack(Rotary())
    torch.manual_seed(dist.get_rank())
    return shard_blocks(model), None, {}


def with_cut_tie() -> Built:
    model = shard_blocks(transformer(tied=True))
    model.head.weight = nn.Parameter(model.embedding.weight.detach().clone())
    return model, None, {}


def tie_cut_by_loading() -> Built:
    model = transformer(tied=True)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    return shard_blocks(model), None, {"ties": [("embedding.weight", "head.weight")]}


def cut_before_sharding() -> Built:
    return shard_blocks(transformer(tied=False)), None, {"ties": [("embedding.weight", "head.weight")]}


def optimizer_of_whole() -> Built:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    return shard_blocks(model), optimizer, {}


def optimizer_of_dead() -> Built:
    model = shard_blocks(mlp())
    return model, torch.optim.AdamW([*model.parameters(), nn.Parameter(torch.ones(3))]), {}


def optimizer_of_some() -> Built:
    model = shard_blocks(mlp())
    return model, torch.optim.AdamW(model.blocks.parameters()), {}


def in_bf16() -> Built:
    model = shard_blocks(mlp().bfloat16())
    return model, torch.optim.AdamW(model.parameters()), {}


def norm_kept_wide() -> Built:
    model = mlp()
    for param in model.blocks[1].parameters():
        param.data = param.data.bfloat16()
    model.blocks[1].norm.float()
    model = shard_blocks(model, mp_policy=BF16)
    for param in model.blocks[1].parameters():
        param.requires_grad_(param.dtype is torch.float32)
    return model, None, {}


def norm_kept_wide_and_trained() -> Built:
    model = mlp().bfloat16()
    model.blocks[1].norm.float()
    model = shard_blocks(model, mp_policy=BF16)
    return model, None, {"ignore": ["pure-low-precision"]}


def frozen_cast_up() -> Built:
    model = mlp().bfloat16().requires_grad_(False)
    return shard_blocks(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32)), None, {}


def policy_forgotten_on_root() -> Built:
    model = mlp()
    for block in model.blocks:
        fully_shard(block, mesh=cpu_mesh(), mp_policy=BF16)
    return fully_shard(model, mesh=cpu_mesh()), None, {}


def of_different_shape() -> Built:
    model = mlp()
    model.last.weight.requires_grad_(dist.get_rank() == 0)
    return shard_blocks(model), None, {}


def replicas_of_different_seeds() -> Built:
    model = mlp(seed=0)
    if dist.get_rank() == 1:
        model.blocks[1].load_state_dict(mlp(seed=1).blocks[1].state_dict())
    return shard_blocks(model, mesh=cpu_mesh(2, 1)), None, {}


def buffers_of_different_values() -> Built:
    model = shard_blocks(Stack(Rotary()))
    model.blocks[0].table.fill_(dist.get_rank())
    return model, None, {}


def large_root() -> Built:
    with torch.device("meta"):
        model = Stack(*(nn.Sequential(nn.Linear(2048, 2048), nn.Linear(2048, 2048)) for _ in range(4)))
    return fully_shard(model, mesh=cpu_mesh()), None, {"ignore": ["on-meta-device"]}


def small_groups() -> Built:
    with torch.device("meta"):
        blocks = [nn.Sequential(nn.LayerNorm(2048), nn.Linear(2048, 2048)) for _ in range(5)]
        model = Stack(*blocks)
    for block in blocks:
        fully_shard(block[0], mesh=cpu_mesh())
    return shard_blocks(model), None, {"ignore": ["on-meta-device"]}


def padded() -> Built:
    with torch.device("meta"):
        block = nn.Linear(1 << 20, 3)
    return shard_blocks(Stack(block)), None, {"ignore": ["on-meta-device"]}


def forgotten_root() -> Built:
    model = mlp()
    for block in model.blocks:
        fully_shard(block, mesh=cpu_mesh())
    return model, torch.optim.AdamW(model.parameters()), {}


def added_behind() -> Built:
    model = shard_blocks(mlp())
    model.blocks[0].adapter = nn.Linear(2, 2)
    return model, torch.optim.AdamW(model.parameters()), {}


FAULTS: list[tuple[Callable[[], Built], list[tuple[str, str]]]] = [
    (with_unwritten_buffer, [("uninitialized", "blocks.1.table")]),
    (with_unwritten_parameter, [("uninitialized", "blocks.1.weight")]),
    (on_meta, [("on-meta-device", "blocks.0.weight blocks.0.table"), ("seeds-differ", "")]),
    (with_cut_tie, [("cut-tie", "embedding.weight head.weight")]),
    (tie_cut_by_loading, [("cut-tie", "embedding.weight head.weight")]),
    (cut_before_sharding, [("cut-tie", "embedding.weight head.weight")]),
    (optimizer_of_whole, [("optimizer-before-sharding", "first.weight")]),
    (optimizer_of_dead, [("optimizer-has-dead-parameters", "a parameter of shape (3,)")]),
    (optimizer_of_some, [("optimizer-misses-parameters", "first.weight first.bias last.weight last.bias")]),
    (forgotten_root, [("never-averaged", "first.weight first.bias last.weight last.bias")]),
    (added_behind, [("never-averaged", "blocks.0.adapter.weight blocks.0.adapter.bias")]),
    (in_bf16, [("pure-low-precision", "first.weight")]),
    (norm_kept_wide, []),
    (norm_kept_wide_and_trained, [("wide-parameters-cast-down", "blocks.1.norm.weight blocks.1.norm.bias")]),
    (frozen_cast_up, [("narrow-parameters-cast-up", "first.weight blocks.2.up.weight")]),
    (policy_forgotten_on_root, [("root-without-policy", "first.weight")]),
    (of_different_shape, [("models-differ", "last.weight")]),
    (replicas_of_different_seeds, [("replicas-differ", "blocks.1.up.weight")]),
    (buffers_of_different_values, [("buffers-differ", "blocks.0.table")]),
    (large_root, [("large-root", "blocks.0 blocks.1 blocks.2 blocks.3")]),
    (small_groups, [("small-groups", "blocks.0.0 blocks.1.0")]),
    (padded, [("padding", "blocks.0.weight")]),
]


@on_ranks(2)
def test_each_fault_is_the_only_finding_and_has_its_parameters():
    """All in one test: each takes milliseconds."""
    for build, expected in FAULTS:
        torch.manual_seed(0)
        model, optimizer, options = build()
        report = doctor.check(model, optimizer, **options)
        found = [finding.check for finding in report]
        assert sorted(found) == sorted(check for check, _ in expected), f"{build.__name__}:\n{report}"
        for check, names in expected:
            (finding, *_) = [each for each in report if each.check == check]
            for name in names.split() if not names.startswith("a ") else [names]:
                assert any(param.startswith(name) for param in finding.params), f"{build.__name__}:\n{report}"
            both = not check.endswith("differ")
            assert finding.ranks == ((0, 1) if both else finding.ranks[:1]), f"{build.__name__}:\n{report}"
            assert finding.why
            assert finding.fix


def healthy() -> dict[str, Built]:
    """Programs as people write them."""
    usual, mixed, hybrid, tied, lora = mlp(), mlp(), mlp(), transformer(tied=True), mlp()
    for param in lora.blocks.parameters():
        param.requires_grad_(False).data = param.data.bfloat16()
    with torch.device("meta"):
        deferred = Stack(Rotary(), Rotary())
    fsdp2.materialize(shard_blocks(deferred))
    found = {
        "alone": fully_shard(mlp(), mesh=cpu_mesh()),
        "blocks": shard_blocks(usual),
        "mixed precision": shard_blocks(mixed, mp_policy=BF16),
        "hybrid": shard_blocks(hybrid, mesh=cpu_mesh(2, 1)),
        "tied": shard_blocks(tied),
        "adapters on a frozen base": shard_blocks(lora, mp_policy=BF16),
        "materialized": deferred,
        "ddp": fsdp2.parallelize(mlp(), "ddp", mesh=cpu_mesh()),
        "one axis of a mesh": shard_blocks(mlp(), mesh=cpu_mesh(2, 1, names=("dp", "tp"))["dp"]),
    }
    built: dict[str, Built] = {name: (model, torch.optim.AdamW(model.parameters()), {}) for name, model in found.items()}
    of_bf16 = shard_blocks(mlp().bfloat16())
    built["bf16, compensated"] = of_bf16, AnyPrecisionAdamW(of_bf16.parameters(), use_kahan_summation=True), {}
    two = shard_blocks(mlp())
    ends = [param for name, param in two.named_parameters() if not name.startswith("blocks")]
    built["two optimizers"] = two, [flat(torch.optim.AdamW, two.blocks), torch.optim.SGD(ends, lr=0.1)], {}
    return built


@on_ranks(2)
def test_healthy_programs_have_no_finding_before_and_between_steps():
    for name, (model, optimizer, _) in healthy().items():
        assert not doctor.check(model, optimizer, strict=True), name
        if name in ("alone", "mixed precision", "ddp"):
            model(torch.ones(2, 7)).sum().backward()
            assert not doctor.check(model, optimizer, strict=True), name


@on_ranks(2)
def test_a_wrong_call_raises_on_all_ranks_and_strict_raises_what_is_found():
    everywhere = shard_blocks(mlp())  # units are numbered alike on all ranks, in the tests that follow as well
    model = everywhere if dist.get_rank() == 0 else mlp()
    with pytest.raises(ModuleError, match="is not sharded"):
        doctor.check(model)
    model = shard_blocks(mlp())
    optimizer = torch.optim.AdamW(model.blocks.parameters())
    with pytest.raises(DoctorError, match=r"optimizer-misses-parameters \(ranks 0, 1\)[\s\S]*first\.weight[\s\S]*why:[\s\S]*fix:"):
        doctor.check(model, optimizer, strict=True)
    out = io.StringIO()
    doctor.check(model, optimizer).show(out)
    assert "[warning] optimizer-misses-parameters (ranks 0, 1)" in out.getvalue()
    assert not doctor.check(model, optimizer, ignore=["optimizer-misses-parameters"])


WRONG: list[tuple[Callable[..., object], tuple[Any, ...], dict[str, Any], str]] = [
    (doctor.check, (), {"ignore": 3}, "ignore=3"),
    (doctor.check, (), {"ignore": "padding"}, "list of names of checks"),
    (doctor.check, (), {"ignore": ["paddin"]}, r"ignore=\['padding'\]"),
    (doctor.check, (), {"ties": 3}, "ties=3"),
    (doctor.check, (), {"ties": ["ab"]}, "sets of two or more names"),
    (doctor.watch, (), {"every": 0}, "every=0"),
    (doctor.watch, (), {"patience": "a"}, "patience='a'"),
    (doctor.watch, (), {"ignore": ["clip"]}, "no check has"),
    (doctor.gradient_scales, (3,), {}, "step=3"),
    (doctor.gradient_scales, (print,), {"declared": "a"}, "declared='a'"),
    (doctor.gradient_scales, (print,), {"tolerance": 0}, "tolerance=0"),
    (fsdp2.summary, (3,), {}, "summary got optimizer=3"),
]


@on_ranks(2)
def test_a_wrong_argument_is_our_error_on_every_rank_and_nobody_waits():
    model = shard_blocks(mlp())
    for call in (doctor.check, doctor.watch):
        for wrong in (3, "adam", [3]):
            with pytest.raises(ArgumentError, match="optimizer="):
                call(model, wrong)
    with pytest.raises(ModuleError, match="summary got an object of type int"):
        fsdp2.summary(3)
    for call, args, options, said in WRONG:
        given = (torch.optim.SGD(model.parameters(), lr=0.1),) if call is doctor.watch else args
        with pytest.raises(ArgumentError, match=said):
            call(model, *given, **options)
    with pytest.raises(ArgumentError, match="watch got no optimizer"):
        doctor.watch(model, None)


def test_checks_have_one_list_of_names_in_the_code_and_in_the_docs():
    package = Path(doctor.__file__).parent
    reported = {name for file in package.glob("*.py") for name in re.findall(r'Finding\(\s*"([a-z-]+)"', file.read_text())}
    explained = re.findall(
        r"^\| `([a-z-]+)` \| (?:error|warning|note)", (package.parents[1] / "docs/doctor.md").read_text(), re.MULTILINE
    )
    assert sorted(reported) == sorted(CHECKS)
    assert list(CHECKS) == explained


@on_ranks(2)
def test_a_setting_of_the_environment_is_a_finding_of_a_check():
    model = shard_blocks(Stack(Rotary()))
    with mock.patch.dict(os.environ, {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}):
        (finding,) = doctor.check(model)
    assert (finding.check, finding.what) == ("environment", "TORCH_DISTRIBUTED_DEBUG=DETAIL is set")


def test_settings_that_undo_overlap_are_found_on_devices():
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_P2P_DISABLE": "0", "TORCH_DISTRIBUTED_DEBUG": "detail"}
    found = [finding.what for finding in environment_findings(environment, "cuda")]
    assert found == ["CUDA_DEVICE_MAX_CONNECTIONS=1 is set", "TORCH_DISTRIBUTED_DEBUG=detail is set"]
    assert len([*environment_findings(environment, "cpu")]) == 1
