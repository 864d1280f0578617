"""Frozen parameters that stay gathered: how often they are gathered, what they compute, and when their memory goes."""

from __future__ import annotations

import copy
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
    model.blocks[1].unshard()
    model.blocks[1].reshard()  # the user may have written it
    assert unsharded_nbytes(model) == {"": 0, "blocks.0": one, "blocks.1": 0, "blocks.2": one}
    model.set_frozen_budget(0)
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


def on_rank_0(name: str, model: Any) -> None:
    if dist.get_rank() == 0:
        if name == "reset_iter_state":
            model.reset_iter_state()
        elif name == "reshard":
            model.blocks[1].reshard()
        elif name == "lists parameters":
            list(model.parameters())


def fails_in_forward_on_rank_0(model: Any, x: Any) -> None:
    """After the next block was prefetched, in an evaluation: the other rank goes on to the end."""
    block = model.blocks[len(model.blocks) - 2]
    handle = block.norm.register_forward_hook(lambda *args: 1 / 0) if dist.get_rank() == 0 else None
    with torch.no_grad():
        if handle is None:
            model(x)
        else:
            with pytest.raises(ZeroDivisionError):
                model(x)
            handle.remove()


@on_ranks(2)
@pytest.mark.parametrize("name", ["reset_iter_state", "reshard", "lists parameters", "nothing"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_rank_that_recovers_alone_gathers_as_the_others_do(name, fails):
    """Symptom: that rank freed frozen parameters which the others kept, and gathered alone in the next forward."""
    model, reference = with_reference(adapters(mlp()), kept)
    x = torch.ones(2, 7)
    model(x).sum().backward()
    model.zero_grad()
    if fails:
        fails_in_forward_on_rank_0(model, x)
    else:
        with torch.no_grad():
            model(x)
    on_rank_0(name, model)
    assert_close(model(x), reference(x))
    model.zero_grad()
    assert_trains_as(model, reference, batches())


@on_ranks(2)
def test_a_prefetched_group_that_nobody_uses_is_not_left_shown():
    model = kept(adapters(mlp()))
    x = torch.ones(2, 7)
    with torch.no_grad():
        model(x)
        model(x)
        blocks = model.blocks
        model.blocks = blocks[:1]
        model(x)
    assert all(hasattr(param, "placements") for param in blocks.parameters())


@on_ranks(2)
def test_a_step_of_an_optimizer_that_has_frozen_parameters_too_gathers_none_of_them():
    model = kept(adapters(mlp()))
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)

    def step() -> None:
        step_of(model)
        optimizer.step()
        optimizer.zero_grad()

    step()
    counts = gathers_of(step)
    assert [counts[f"blocks.{index}"] for index in range(3)] == [0, 0, 0]


BETWEEN = {
    "budget": lambda model: model.set_frozen_budget(ALL),
    "kept after backward": lambda model: model.set_reshard_after_backward(False),
    "nothing": lambda model: None,
}


@on_ranks(2)
@pytest.mark.parametrize("name", BETWEEN)
def test_a_write_is_used_whenever_it_comes(name):
    """Symptom: the versions that a write is told by were those of after it."""
    for moment in ("before backward", "after backward", "after a reset"):
        model, reference = with_reference(adapters(mlp()), kept)
        x = torch.ones(2, 7)
        loss, reference_loss = model(x).sum(), reference(x).sum()
        BETWEEN[name](model)
        if moment != "before backward":
            loss.backward()
        if moment == "after a reset":
            model.reset_iter_state()
        with torch.no_grad():
            for each in (model, reference):
                each.blocks[1].up.weight.mul_(2)
        if moment == "before backward":
            for each in (reference_loss, loss):
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    each.backward()
            model.reset_iter_state()
        assert_close(model(x), reference(x))


@on_ranks(2)
def test_what_the_user_writes_unsharded_is_forgotten_as_without_a_budget():
    model, plain = with_reference(adapters(mlp()))
    kept(model)
    shard_blocks(plain, True)
    x = torch.ones(2, 7)
    for each in (model, plain):
        each.blocks[1].unshard()
        with torch.no_grad():
            each.blocks[1].up.weight.mul_(3)
    for _ in range(3):
        with torch.no_grad():
            assert torch.equal(model(x), plain(x))


@on_ranks(2)
def test_an_embedding_that_forward_shrinks_is_gathered_each_time():
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Embedding(8, 6, max_norm=0.5), nn.Linear(6, 3))
    model[0].requires_grad_(False)
    model, reference = with_reference(model, lambda each: kept_parts(each))
    ids = torch.arange(8)
    for _ in range(4):
        assert_close(model(ids), reference(ids))


def kept_parts(model: Any) -> None:
    fsdp2.fully_shard(model[0], mesh=cpu_mesh())
    fsdp2.fully_shard(model, mesh=cpu_mesh())
    model.set_frozen_budget(ALL)


@on_ranks(2)
def test_a_copy_keeps_the_budget():
    model = copy.deepcopy(kept(adapters(mlp())))
    step_of(model)
    counts = gathers_of(lambda: step_of(model))
    assert [counts[f"blocks.{index}"] for index in range(3)] == [0, 0, 0]


@on_ranks(2)
def test_an_optional_module_that_runs_twice_is_shown_twice():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.tower = nn.Linear(7, 7), nn.Linear(7, 7)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.tower(self.tower(self.first(x)))

    torch.manual_seed(0)
    model: Any = Twice()
    model.tower.requires_grad_(False)

    def shard(each: Any) -> None:
        fsdp2.fully_shard(each.tower, mesh=cpu_mesh()).set_optional()
        fsdp2.fully_shard(each, mesh=cpu_mesh())
        each.set_frozen_budget(ALL)

    model, reference = with_reference(model, shard)
    x = torch.ones(2, 7)
    for _ in range(2):
        assert_close(model(x), reference(x))
        model(x).sum().backward()
