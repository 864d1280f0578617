"""Frozen parameters that stay gathered: how often they are gathered, what they compute, and when their memory goes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close

import fsdp2
from fsdp2 import ArgumentError, MixedPrecisionPolicy
from harness import cpu_mesh, on_ranks
from harness.models import batches, mlp
from harness.sharding import shard_blocks, with_reference
from harness.training import adamw, assert_trains_as, forward_backward, micro_batches

ALL = 1 << 20
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


class Gathers(fsdp2.inspect.Listener):
    """How often each module has been gathered."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def issued(self, record: Any, owner: object, num_ranks: int) -> None:
        self.counts[record.unit] += record.kind == "all-gather"


def gathers_of(run: Any) -> Counter[str]:
    seen = Gathers()
    undo = fsdp2.inspect.listen(seen)
    run()
    undo()
    return seen.counts


def adapters(model: Any) -> Any:
    """Only the first layer and what follows the blocks train, so gradients pass through the blocks."""
    model.blocks.requires_grad_(False)
    return model


def kept(model: Any, max_nbytes: int = ALL, **options: Any) -> Any:
    shard_blocks(model, True, **options)
    model.set_frozen_budget(max_nbytes)
    return model


def unsharded_nbytes(model: nn.Module) -> dict[str, int]:
    """What each module's groups keep unsharded now."""
    return {
        unit.name: sum(storage.nbytes() for group in unit.groups for kind, storage in group.memory() if kind == "unsharded")
        for unit in fsdp2.inspect.units(model)
    }


def step_of(model: Any, number: int = 4) -> None:
    micro_batches(number, set_is_last_backward=[number - 1])(model, batches(1, shape=(2 * number, 7))[0]).detach()


@on_ranks(2, 3)
@pytest.mark.parametrize("recomputes", [False, True])
def test_a_frozen_group_is_gathered_once_for_all_steps(recomputes):
    model = kept(adapters(mlp()))
    if recomputes:
        fsdp2.apply_activation_checkpointing(model)
    frozen = [f"blocks.{index}" for index in range(3)]
    first = gathers_of(lambda: step_of(model))
    assert [first[name] for name in frozen] == [1, 1, 1]
    assert first["the root"] > 1
    later = gathers_of(lambda: [step_of(model), model(torch.ones(2, 7)), step_of(model)])
    assert [later[name] for name in frozen] == [0, 0, 0]


@on_ranks(2, 3)
@pytest.mark.parametrize("options", [{}, {"mp_policy": BF16}, {"offload_policy": fsdp2.CPUOffloadPolicy(pin_memory=False)}])
def test_it_trains_as_without_a_budget(options):
    model, plain = with_reference(adapters(mlp()))
    kept(model, **options)
    shard_blocks(plain, True, **options)
    optimizers = [adamw([p for p in each.parameters() if p.requires_grad]) for each in (model, plain)]
    for x in batches(3):
        losses = []
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            losses.append(forward_backward(each, x[: 4 + dist.get_rank()]).detach())
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(*losses)
    for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(param.to_local(), other.to_local()), name


@on_ranks(2)
def test_hsdp_and_fewer_ranks_after_forward_train_as_the_unsharded_model():
    for reshard, mesh in ((1, cpu_mesh()), (True, cpu_mesh(2, 1)), (True, cpu_mesh(1, 2))):
        model, reference = with_reference(adapters(mlp()))
        shard_blocks(model, reshard, mesh=mesh)
        model.set_frozen_budget(ALL)
        assert_trains_as(model, reference, batches())


@on_ranks(2, 3)
def test_the_first_groups_that_fit_stay_and_others_go():
    model = kept(adapters(mlp()), 0)
    one = fsdp2.inspect.units(model)[1].groups[0].unsharded_nbytes
    model.set_frozen_budget(2 * one + one // 2)
    step_of(model)
    assert unsharded_nbytes(model) == {"": 0, "blocks.0": one, "blocks.1": one, "blocks.2": 0}
    model.set_frozen_budget(0)
    assert set(unsharded_nbytes(model).values()) == {0}
    model.set_frozen_budget(ALL)
    step_of(model)
    model.blocks[1].reshard()
    assert unsharded_nbytes(model) == {"": 0, "blocks.0": one, "blocks.1": 0, "blocks.2": one}
    model.reset_iter_state()
    assert set(unsharded_nbytes(model).values()) == {0}


@on_ranks(2)
def test_modules_show_shards_between_steps_also_after_a_gather_that_nobody_used():
    model = kept(adapters(mlp()))
    for _ in range(2):
        step_of(model)
        assert all(hasattr(param, "placements") for param in model.parameters())
    model.set_prefetch_depth(3)
    skipped = model.blocks[2]
    model.blocks = model.blocks[:2]  # the next forward prefetches by the order of the last
    step_of(model)
    assert all(hasattr(param, "placements") for param in (*model.parameters(), *skipped.parameters()))


@on_ranks(2, 3)
def test_a_frozen_module_that_trains_again_is_resharded_and_trains_as_the_unsharded_model():
    model, reference = with_reference(adapters(mlp()), kept)
    for each in (model, reference):
        each.blocks[0].requires_grad_(True)
    assert_trains_as(model, reference, batches())
    for each in (model, reference):
        each.requires_grad_(True)
    assert_trains_as(model, reference, batches())
    assert set(unsharded_nbytes(model).values()) == {0}


@on_ranks(2)
def test_written_shards_are_gathered_anew_once():
    model, reference = with_reference(adapters(mlp()), kept)
    step_of(model)
    with torch.no_grad():
        model.blocks[1].up.weight.mul_(0.5)
        reference.blocks[1].up.weight.mul_(0.5)
    x = torch.ones(2, 7)
    counts = gathers_of(lambda: assert_close(model(x), reference(x)) or model(x))
    assert [counts[f"blocks.{index}"] for index in range(3)] == [0, 1, 0]


@on_ranks(2)
def test_what_is_no_number_of_bytes_is_refused():
    model = kept(adapters(mlp()))
    for wrong in (-1, 1.5, None, True):
        with pytest.raises(ArgumentError, match="max_nbytes"):
            model.set_frozen_budget(wrong)
