"""``fsdp2.snapshot``: averages and older versions of the weights. The oracle is the unsharded model with copies of its own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fsdp2
from fsdp2.errors import ArgumentError, ModuleError, OrderError, ParkedError
from fsdp2.inspect import Listener, listen, units
from harness import on_ranks
from harness.models import batches, mlp
from harness.subclasses import RowInt8, wrap_weights

STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "hsdp", "hsdp_zero2", "hsdp_global")
BF16 = {"mp_policy": fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": BF16,
    "offload": {"offload_policy": fsdp2.CPUOffloadPolicy()},
}


def sharded(strategy: str = "zero3", device_type: str = "cpu", **options: Any) -> Any:
    model = mlp(num_blocks=2).to(device_type)
    shape = (1, 2) if strategy.startswith("hsdp") else (2,)
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    return fsdp2.parallelize(model, strategy, wrap=[type(model.blocks[0])], mesh=mesh, **options)


def whole(model: nn.Module) -> dict[str, Tensor]:
    values = {name: getattr(param, "full_tensor", lambda param=param: param)() for name, param in model.state_dict().items()}
    return {name: value.detach().cpu().clone() for name, value in values.items()}


def train(model: Any, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


@on_ranks(2)
@pytest.mark.parametrize(
    ("strategy", "options"),
    [(strategy, options) for strategy in STRATEGIES for options in OPTIONS if (strategy, options) != ("ddp", "offload")],  # refused
)
@pytest.mark.parametrize("flat", [False, True], ids=["torch's", "flat"])
def test_an_average_has_the_bits_of_an_average_of_whole_weights_and_the_model_goes_on_as_if_there_were_none(strategy, options, flat):
    model, oracle = (sharded(strategy, **OPTIONS[options]) for _ in range(2))
    optimizer, other = (
        fsdp2.optim.flat(torch.optim.AdamW, each, lr=0.1) if flat else torch.optim.AdamW(each.parameters(), lr=0.1)
        for each in (model, oracle)
    )
    average, first = fsdp2.snapshot(model), fsdp2.snapshot(model, "cpu")
    initial = whole(model)
    expected = copy.deepcopy(initial)
    for x in batches(3, (8, 7)):
        train(model, optimizer, x)
        train(oracle, other, x)
        average.average(0.75)
        for name, value in whole(oracle).items():
            expected[name].lerp_(value, 0.25)
        now = whole(oracle)
        with torch.no_grad():
            with average.applied():
                assert_same(whole(model), expected)
                averaged = model(x)
                model(x)
            with first.applied():
                assert_same(whole(model), initial)
                assert not torch.equal(model(x), averaged)
            assert_same(whole(model), now)
            assert torch.equal(model(x), oracle(x))
    assert_same(whole(model), whole(oracle))


@on_ranks(2)
@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_a_forward_inside_computes_what_a_model_with_those_values_computes(strategy):
    model, older = sharded(strategy), sharded(strategy)
    reference = fsdp2.snapshot(model, "cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x = batches(1, (8, 7))[0]
    train(model, optimizer, x)
    with reference.applied():
        loss = model(x).square().mean()  # with its gradients, into the same parameters
        loss.backward()
        older(x).square().mean().backward()
        for one, other in zip(model.parameters(), older.parameters(), strict=True):
            assert torch.equal(one.grad.to_local(), other.grad.to_local())
    reference.copy()
    with reference.applied():
        values = whole(model)
    assert_same(values, whole(model))


@on_ranks(2, device="pretend")
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("device", [None, "cpu"])
def test_on_an_accelerator_no_order_of_streams_changes_a_bit(seed, device):
    from fsdp2.testing import pretend

    def run() -> list[Tensor]:
        model = sharded("zero3", "pretend", **BF16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        kept = fsdp2.snapshot(model, device)
        found = []
        for x in batches(3, (8, 7)):
            train(model, optimizer, x.to("pretend"))
            kept.average(0.5)
            with kept.applied(), torch.no_grad():
                found.append(model(x.to("pretend")).cpu())
            with torch.no_grad():
                found.append(model(x.to("pretend")).cpu())
        return found

    expected = run()
    pretend.set_order(seed)
    for one, other in zip(run(), expected, strict=True):
        assert torch.equal(one, other)


@on_ranks(2)
@pytest.mark.parametrize("grad", [False, True], ids=["after an evaluation", "after a step"])
def test_a_plain_parent_whose_children_keep_their_parameters_unsharded_has_one(grad):
    """Symptom: parameters that were shown unsharded were taken for plain ones, and their memory had been freed when it was read."""
    model, oracle = mlp(num_blocks=2), mlp(num_blocks=2)
    for block in model.blocks:
        fsdp2.fully_shard(block, reshard_after_forward=False)
        block.set_reshard_after_backward(False)
    x = batches(1, (8, 7))[0]
    with torch.set_grad_enabled(grad):
        loss = model(x).square().mean()
    if grad:
        loss.backward()
    kept = fsdp2.snapshot(model)
    with torch.no_grad():
        for each in (model, oracle):
            for value in each.state_dict().values():
                value.mul_(0.5)
        halved = model(x)
        with kept.applied():
            assert_same(whole(model), whole(mlp(num_blocks=2)))
            assert torch.equal(model(x), mlp(num_blocks=2)(x))
        assert torch.equal(model(x), halved)
        assert_same(whole(model), whole(oracle))


@on_ranks(2)
@pytest.mark.parametrize("way", ["unsharded", "torch's FSDP2", "torch's FSDP2, kept unsharded"])
def test_models_that_fsdp2_did_not_shard_have_snapshots_too(way):
    model, oracle = mlp(num_blocks=2), mlp(num_blocks=2)
    if way != "unsharded":
        fully_shard(model, reshard_after_forward="kept" not in way)
    with torch.no_grad():
        model(torch.ones(2, 7))
    average, other = fsdp2.snapshot(model), copy.deepcopy(oracle)
    for each in (model, oracle):
        train(each, torch.optim.SGD(each.parameters(), lr=0.5), batches(1, (8, 7))[0])
    average.average(0.75)
    for param, now in zip(other.parameters(), oracle.parameters(), strict=True):
        param.data.lerp_(now.data, 0.25)
    with average.applied(), torch.no_grad():
        for one, two in zip(whole(model).values(), whole(other).values(), strict=True):
            torch.testing.assert_close(one, two)
        torch.testing.assert_close(model(torch.ones(2, 7)), other(torch.ones(2, 7)))
    with torch.no_grad():
        torch.testing.assert_close(model(torch.ones(2, 7)), oracle(torch.ones(2, 7)))


class Collectives(Listener):
    def __init__(self) -> None:
        self.num = 0

    def issued(self, record: Any, *rest: Any) -> None:
        self.num += 1


@on_ranks(2)
def test_averages_and_exchanges_communicate_nothing_and_take_one_tensor_per_group():
    model = sharded()
    heard = Collectives()
    undo = listen(heard)
    average = fsdp2.snapshot(model)
    average.average(0.9)
    with average.applied():
        pass
    undo()
    assert heard.num == 0
    assert len(average._kept) == len(average._groups) == 3
    assert average.nbytes == sum(group.sharded_nbytes for unit in units(model) for group in unit.groups)


@on_ranks(2)
def test_frozen_groups_are_left_out_and_quantized_weights_are_copied():
    model = mlp(num_blocks=2)
    for block in model.blocks:
        fsdp2.fully_shard(block.requires_grad_(False))
    fsdp2.fully_shard(model)
    assert len(fsdp2.snapshot(model)._kept) == 1
    model = mlp(num_blocks=2)
    wrap_weights(model, RowInt8)
    fsdp2.fully_shard(model)
    kept = fsdp2.snapshot(model)
    kept.average(0.5)
    with kept.applied(), torch.no_grad():
        model(batches(1, (8, 7))[0])


def fail(model: nn.Module, x: Tensor) -> None:
    model(x)
    raise ValueError("trap")


@on_ranks(2)
def test_what_is_wrong_is_refused_and_leaves_the_model_as_it_was():
    model = sharded()
    kept = fsdp2.snapshot(model)
    x = batches(1, (8, 7))[0]
    train(model, torch.optim.SGD(model.parameters(), lr=0.5), x)
    values = whole(model)
    with pytest.raises(ModuleError, match="of type int: 3"):
        fsdp2.snapshot(3)
    with pytest.raises(ArgumentError, match=r"decay=1.5"):
        kept.average(1.5)
    with pytest.raises(ArgumentError, match=r"device=3"):
        fsdp2.snapshot(model, 3)
    loss = model(x).sum()
    for call in (kept.copy, lambda: kept.average(0.5), lambda: kept.applied().__enter__(), lambda: fsdp2.snapshot(model)):
        with pytest.raises(OrderError, match="a backward to come"):
            call()
    loss.backward()
    model.zero_grad()
    with kept.applied(), pytest.raises(OrderError, match="inside of applied"):
        kept.average(0.5)
    with pytest.raises(OrderError, match=r"applied was left while .* backward to come"), kept.applied():
        model(x)
    assert_same(whole(model), values)
    with pytest.raises(ValueError, match="trap"), kept.applied():
        fail(model, x)
    assert_same(whole(model), values)
    fsdp2.park(model)
    with pytest.raises(ParkedError):
        kept.copy()
    fsdp2.unpark(model)
    kept.copy()
    with kept.applied():
        assert_same(whole(model), values)
