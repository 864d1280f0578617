"""Every strategy trains as the unsharded model and as DDP do, with and without micro-batches; a checkpoint of one loads into any."""

from __future__ import annotations

import contextlib
import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import fsdp2
from fsdp2 import FSDPModule, MixedPrecisionPolicy, accumulate, parallelize
from fsdp2.checkpoint import Checkpointer
from fsdp2.core.iteration.module_state import unit_of
from fsdp2.errors import OrderError
from fsdp2.strategy import STRATEGIES
from harness import device_type, on_ranks
from harness.models import batches, mlp, token_batches, transformer
from harness.sharding import shard_blocks
from harness.training import adamw, assert_equal_training, assert_trains_as, fed_own_chunk, fed_whole, own_chunk, sgd


def sharded(model: nn.Module, strategy: str, **options: Any) -> nn.Module:
    if STRATEGIES[strategy].is_hybrid:
        options.setdefault("shard_size", 2 if dist.get_world_size() % 2 == 0 else 1)
    return parallelize(model, strategy, **options)


def three_micro_batches(model: nn.Module, x: Tensor) -> Tensor:
    """Returns the mean loss; on an unsharded model there is nothing to tell."""
    losses = []
    parts = x.chunk(3)
    for index, part in enumerate(parts):
        telling = accumulate(model, last=index == len(parts) - 1) if isinstance(model, FSDPModule) else contextlib.nullcontext()
        with telling:
            loss = model(part).square().mean() / len(parts)
            loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


@pytest.mark.slow
@on_ranks(2, 3)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_training_on_other_numbers_of_ranks_equals_the_unsharded_model(strategy):
    trains_as_the_unsharded_model(strategy)


@on_ranks(4)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_training_equals_the_unsharded_model(strategy):
    trains_as_the_unsharded_model(strategy)


def trains_as_the_unsharded_model(strategy: str) -> None:
    assert_trains_as(sharded(transformer(tied=True), strategy), transformer(tied=True), token_batches())


@on_ranks(4)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_micro_batches_equal_the_unsharded_model(strategy):
    steps = fed_own_chunk(sharded(transformer(), strategy), token_batches(), iteration=three_micro_batches)
    expected = fed_whole(transformer(), token_batches())
    assert_equal_training(steps, expected, ulps=32)


@on_ranks(2, timeout=40)
@pytest.mark.parametrize("wrap", ["auto", None])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_training_is_bitwise_that_of_ddp(strategy, wrap):
    """Two ranks: a sum of two has one order. AdamW on sharded parameters is AdamW on whole ones."""
    reference = DistributedDataParallel(mlp())
    optimizer = torch.optim.AdamW(reference.parameters(), lr=0.01)
    model = sharded(mlp(), strategy, wrap=wrap)
    ours = torch.optim.AdamW(model.parameters(), lr=0.01)
    for x in batches():
        for each, its_optimizer in ((reference, optimizer), (model, ours)):
            each(own_chunk(x)).square().mean().backward()
            its_optimizer.step()
            its_optimizer.zero_grad()
        for name, param in model.named_parameters():
            assert isinstance(param, DTensor)
            assert torch.equal(param.full_tensor(), reference.module.get_parameter(name))


@on_ranks(2, timeout=40)
@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "zero3"])
def test_mixed_precision_is_bitwise_that_of_fully_shard(strategy):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    expected = mlp()
    shard_blocks(expected, mp_policy=policy)
    steps = fed_own_chunk(sharded(mlp(), strategy, mp_policy=policy), batches(), adamw)
    reference = fed_own_chunk(expected, batches(), adamw)
    for ours, theirs in zip(steps, reference, strict=True):
        assert torch.equal(ours.loss, theirs.loss)
        for name, param in ours.params.items():
            assert torch.equal(param.full_tensor(), theirs.params[name].full_tensor())


class HalfUsed(nn.Module):
    """``second`` takes part in a forward only where ``x`` has a positive first element."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(7, 7)
        self.second = nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.second(x) if self.used else x


@on_ranks(2, timeout=40)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parameters_used_in_some_micro_batches_only(strategy):
    """Used in the first micro-batch alone, and on rank 0 alone: the gradient comes with the last."""
    model = sharded(HalfUsed(), strategy, wrap=None)
    reference = HalfUsed()
    x = torch.ones(2, 7)
    for index in range(3):
        with accumulate(model, last=index == 2):
            model.used = index == 0 and dist.get_rank() == 0
            model(x * (index + 1)).square().mean().backward()
        for rank in range(2):
            reference.used = index == 0 and rank == 0
            (reference(x * (index + 1)).square().mean() / 2).backward()
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.grad.full_tensor(), reference.get_parameter(name).grad)


@on_ranks(2, timeout=40)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_exception_and_zero_grad_discard_what_was_accumulated(strategy):
    model = sharded(mlp(), strategy)
    reference = mlp()
    x, y = batches(2)
    with accumulate(model):
        model(own_chunk(y)).square().mean().backward()
    with pytest.raises(ZeroDivisionError), accumulate(model):
        _ = model(own_chunk(y)), 1 / 0
    model.reset_iter_state()
    with accumulate(model):
        model(own_chunk(y)).square().mean().backward()
    model.zero_grad()
    assert_trains_as(model, reference, [x])


@on_ranks(2, timeout=40)
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "hsdp_global"])
def test_evaluation_and_a_step_between_micro_batches_see_the_parameters_of_now(strategy):
    """What stays unsharded over micro-batches is out of date after an optimizer's step, annotated or not."""
    model, reference = sharded(mlp(), strategy, **({"shard_size": 1} if strategy == "hsdp_global" else {})), mlp()
    optimizers = [sgd(each.parameters()) for each in (model, reference)]
    x, y = batches(2)
    with accumulate(model):
        model(own_chunk(x)).square().mean().backward()
    model.zero_grad()
    for optimizer in optimizers:
        for param in optimizer.param_groups[0]["params"]:
            param.grad = torch.ones_like(param)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        torch.testing.assert_close(model(y), reference(y))
    assert_trains_as(model, reference, [x])


@on_ranks(2, timeout=40)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_before_the_last_micro_batch_is_refused(strategy):
    """The gradients are not there yet: the optimizer would do nothing, in silence."""
    model, other = sharded(mlp(), strategy), nn.Linear(7, 7)
    optimizer, others = sgd(model.parameters()), sgd(other.parameters())
    x = own_chunk(batches()[0])
    with accumulate(model):
        model(x).square().mean().backward()
    others.step()
    with pytest.raises(OrderError, match=r"SGD steps while gradients of 22 parameters wait for their last micro-batch\n  first.weight"):
        optimizer.step()
    with accumulate(model, last=True):
        model(x).square().mean().backward()
    optimizer.step()
    with accumulate(model):
        model(x).square().mean().backward()
    model.zero_grad()
    optimizer.step()


@on_ranks(4)
def test_global_hsdp_gathers_over_all_ranks_once_a_step():
    model = sharded(mlp(num_blocks=2), "hsdp_global")
    optimizer = sgd(model.parameters())
    sizes: list[int] = []

    def count() -> list[int]:
        sizes.clear()
        for index in range(3):
            with accumulate(model, last=index == 2):
                model(own_chunk(batches()[0])).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return list(sizes)

    from fsdp2.core.comm import collectives

    stock = collectives.all_gather

    def counted(outputs, inputs, process_group, *args):
        sizes.append(process_group.size())
        return stock(outputs, inputs, process_group, *args)

    collectives.all_gather = counted
    try:
        for _ in range(2):
            seen = count()
            groups = 3  # two blocks and the root
            assert seen.count(4) == groups
            assert seen.count(2) == 2 * 3 * groups - groups
            assert seen[:groups] == [4] * groups
    finally:
        collectives.all_gather = stock


@on_ranks(2, timeout=40)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_clipping_sees_the_norm_of_the_unsharded_model(strategy):
    x = batches(1)[0]
    reference = mlp()
    reference(x).square().mean().backward()
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    for clip in (torch.nn.utils.clip_grad_norm_, fsdp2.clip_grad_norm_):
        model = sharded(mlp(), strategy)
        model(own_chunk(x)).square().mean().backward()
        norm = clip(model.parameters(), 0.1)
        torch.testing.assert_close(norm.full_tensor() if isinstance(norm, DTensor) else norm, expected)
        for name, param in model.named_parameters():
            torch.testing.assert_close(param.grad.full_tensor(), reference.get_parameter(name).grad)


@on_ranks(2, timeout=40)
@pytest.mark.parametrize("strategy", ["ddp", "hsdp_global"])
def test_a_copy_trains_by_the_same_strategy(strategy):
    options = {"shard_size": 1} if strategy == "hsdp_global" else {}
    model = sharded(mlp(), strategy, **options)
    fed_own_chunk(model, batches(1))
    copied = copy.deepcopy(model)
    one, other = (fed_own_chunk(each, batches(2), iteration=three_micro_batches) for each in (model, copied))
    for ours, theirs in zip(one, other, strict=True):
        for name, param in ours.params.items():
            assert torch.equal(param.full_tensor(), theirs.params[name].full_tensor())
    assert unit_of(copied).options.accumulates_whole is (strategy == "ddp")


# --- checkpoints ----------------------------------------------------------------------------------------------------------------


def trained(strategy: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = sharded(mlp(seed=3), strategy)
    optimizer = adamw(model.parameters())
    fed_own_chunk(model, batches(2), optimizer=optimizer)
    return model, optimizer


def untrained(strategy: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = sharded(mlp(seed=4), strategy)
    return model, adamw(model.parameters())


def assert_goes_on_alike(one: tuple[Any, Any], other: tuple[Any, Any]) -> None:
    x = batches(1, seed=9)
    steps = [fed_own_chunk(model, x, optimizer=optimizer) for model, optimizer in (one, other)]
    for name, param in steps[0][0].params.items():
        torch.testing.assert_close(param.full_tensor(), steps[1][0].params[name].full_tensor(), atol=1e-6, rtol=1e-6)


def through_dcp(folder: Path, source: str, target: str) -> None:
    saved, loaded = trained(source), untrained(target)
    model_state, optimizer_state = get_state_dict(*saved)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    model_state, optimizer_state = get_state_dict(*loaded)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    set_state_dict(*loaded, model_state_dict=model_state, optim_state_dict=optimizer_state)
    assert_goes_on_alike(saved, loaded)


def through_checkpointer(folder: Path, source: str, target: str) -> None:
    saved, loaded = trained(source), untrained(target)
    with Checkpointer(folder, *saved, asynchronous=False) as checkpointer:
        checkpointer.save(7)
    with Checkpointer(folder, *loaded) as checkpointer:
        assert checkpointer.load().step == 7
    assert_goes_on_alike(saved, loaded)


@on_ranks(2, timeout=40)
@pytest.mark.parametrize("through", [through_dcp, through_checkpointer])
def test_a_checkpoint_of_each_strategy_loads_into_the_next(through, tmp_path):
    names = list(STRATEGIES)
    for source, target in zip(names, names[1:] + names[:1], strict=True):
        through(tmp_path / source, source, target)


@pytest.mark.full
@on_ranks(4, timeout=600)
@pytest.mark.parametrize("through", [through_dcp, through_checkpointer])
def test_a_checkpoint_of_any_strategy_loads_into_any_other(through, tmp_path):
    for source, target in itertools.permutations(STRATEGIES, 2):
        through(tmp_path / f"{source}_{target}", source, target)


@on_ranks(2, timeout=40)
def test_all_ranks_begin_with_the_values_of_the_first():
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(7, 7), nn.BatchNorm1d(7))
    model[1].running_mean.fill_(float(dist.get_rank()))
    torch.manual_seed(0)
    expected = nn.Linear(7, 7)
    parallelize(model, "ddp")
    assert torch.equal(model[0].weight.full_tensor(), expected.weight)
    assert model[1].running_mean.eq(0).all()
    assert model[0].weight.device.type == device_type()


@on_ranks(2, timeout=40)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_model_on_the_meta_device_is_materialized_afterwards(strategy):
    from fsdp2 import materialize

    expected = nn.Sequential(nn.Linear(7, 10), nn.Linear(10, 7))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(7, 10), nn.Linear(10, 7))
    sharded(model, strategy)
    torch.manual_seed(0)
    materialize(model)
    for name, param in model.named_parameters():
        assert torch.equal(param.full_tensor(), expected.get_parameter(name))
