"""``fully_shard`` is no collective: a rank may make models that others lack, or make them in another order, and run what all run."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fsdp2 import OrderError, fully_shard
from fsdp2.core.iteration import late_comparison
from harness import cpu_mesh, on_ranks
from harness.models import mlp
from harness.sharding import shard_blocks
from harness.training import assert_equal_grads


def train_what_was_made_in_any_order(mesh: object, device: str) -> None:
    rank, x = dist.get_rank(), torch.randn(3, 7, generator=torch.Generator().manual_seed(0))
    reference, teacher = mlp(), mlp()
    if rank == 0:
        shard_blocks(mlp().to(device), mesh=mesh)  # a probe, which never runs
    made = {}
    for name in ("model", "teacher") if rank == 0 else ("teacher", "model"):
        made[name] = shard_blocks(copy.deepcopy(reference if name == "model" else teacher).to(device), mesh=mesh)
    single = fully_shard(copy.deepcopy(reference).to(device), mesh=mesh)
    copied = copy.deepcopy(single) if rank == 1 else None
    assert copied is None or copied is not single
    for _ in range(2):
        (single(x.to(device)).square().mean()).backward()
        (made["model"](x.to(device)) - made["teacher"](x.to(device))).square().mean().backward()
        late_comparison.compare()
    for _ in range(2):
        reference(x).square().mean().backward()
    found = {name: param.grad.full_tensor().cpu() for name, param in single.named_parameters()}
    assert_equal_grads(found, {name: param.grad for name, param in reference.named_parameters()}, ulps=32)


@on_ranks(2)
def test_models_of_one_rank_alone_change_nothing_for_those_that_all_run():
    train_what_was_made_in_any_order(cpu_mesh(), "cpu")


@on_ranks(2, device="pretend", timeout=60)
def test_no_rank_is_told_of_wrong_gradients_because_a_model_was_made_on_one_rank():
    try:
        train_what_was_made_in_any_order(init_device_mesh("pretend", (2,)), "pretend")
    except OrderError as error:
        pytest.fail(f"told wrongly: {error}")
