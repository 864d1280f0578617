"""``park`` and ``unpark``: a model's device memory is free for a while, and nothing else changes. The oracle never parks."""

from __future__ import annotations

import gc
import os
import tempfile
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fsdp2
from fsdp2.core.iteration.module_state import named_units
from fsdp2.errors import ArgumentError, ModuleError, OrderError, ParkedError
from fsdp2.testing import pretend
from harness import on_ranks
from harness.models import batches, mlp
from harness.subclasses import RowInt8, wrap_weights

BF16 = {"mp_policy": fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    "flat": lambda model: fsdp2.optim.flat(torch.optim.AdamW, model, lr=0.01),
    "narrow": lambda model: fsdp2.optim.AnyPrecisionAdamW(model.parameters(), lr=0.01),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
}


def made(device_type: str, strategy: str, options: dict[str, Any]) -> Any:
    options = dict(options)
    subclass = options.pop("subclass", None)
    model = mlp(num_blocks=3).to(device_type)
    if subclass is not None:
        wrap_weights(model, subclass)
    shape = (1, 2) if strategy.startswith("hsdp") else (2,)
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    return fsdp2.parallelize(model, strategy, wrap=[type(model.blocks[0])], mesh=mesh, **options)


def trained(model: Any, optimizer: Any, inputs: list[Tensor], around: Callable[[], None] = lambda: None) -> list[Tensor]:
    """Values of all that there is after the last step. around: called with gradients there, and between steps"""
    for x in inputs:
        model(x).square().mean().backward()
        around()
        fsdp2.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        around()
    state = [value for param in model.parameters() for value in optimizer.state[param].values() if isinstance(value, Tensor)]
    everything = [*(param.detach() for param in model.parameters()), *state]
    return [(each.to_local() if isinstance(each, DTensor) else each).cpu() for each in everything]


@on_ranks(2)
def test_nothing_keeps_the_flat_shards_of_a_parked_model():
    model = mlp(num_blocks=2)
    for block in model.blocks:
        fsdp2.fully_shard(block)
    fsdp2.fully_shard(model)
    model(batches(1)[0]).sum().backward()
    flats = [weakref.ref(group.flat) for _, unit in named_units(model) for group in unit.groups]
    with tempfile.TemporaryDirectory() as folder:
        fsdp2.park(model, to=folder)
        gc.collect()
        assert [flat() for flat in flats] == [None] * len(flats)
        fsdp2.unpark(model)


def allocated() -> int:
    gc.collect()
    pretend.synchronize()
    return int(torch.get_device_module("pretend").memory_allocated())


CASES = [(strategy, "adamw", {}) for strategy in ("ddp", "zero1", "zero2", "zero3", "hsdp", "hsdp_zero2", "hsdp_global")]
CASES += [("zero3", name, {}) for name in ("flat", "narrow", "sgd")]
CASES += [("ddp", "flat", {}), ("zero1", "flat", BF16), ("zero3", "adamw", BF16), ("ddp", "adamw", BF16)]
CASES += [("zero3", "adamw", {"offload_policy": fsdp2.CPUOffloadPolicy()}), ("zero3", "sgd", {"subclass": RowInt8})]


QUICK = [("ddp", "flat", {}), ("zero3", "adamw", {}), ("zero3", "flat", BF16)]


@on_ranks(2, device="pretend")
@pytest.mark.parametrize("all_cases", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_parked_models_leave_the_device_and_go_on_bit_for_bit(all_cases, tmp_path):
    """Every strategy; torch's optimizers and flat ones; mixed precision; to memory and to files."""
    inputs = [x.to("pretend") for x in batches(3, (8, 7))]
    for index, (strategy, optimizer_name, options) in enumerate(CASES if all_cases else QUICK):
        for to in ("cpu", str(tmp_path)) if index % 4 == 1 else ("cpu",):
            case = f"{strategy}, {optimizer_name}, {options}, {to}"
            oracle = made("pretend", strategy, options)
            expected = trained(oracle, OPTIMIZERS[optimizer_name](oracle), inputs)
            del oracle
            before = allocated()
            pretend.set_order(index)
            model = made("pretend", strategy, options)
            optimizer = OPTIMIZERS[optimizer_name](model)
            parameters = dict(model.named_parameters())
            left: list[int] = []

            def park_and_unpark(model: Any = model, optimizer: Any = optimizer, to: str = to, left: list[int] = left) -> None:
                grads = {name: param.grad for name, param in model.named_parameters()}
                fsdp2.park(model, optimizer, to=to)
                assert all(param.to_local().device.type == "cpu" for param in model.state_dict().values())
                assert {param.grad is None for param in model.parameters()} == {grad is None for grad in grads.values()}
                left.append(allocated())
                fsdp2.unpark(model, optimizer)
                assert all(param.grad is grads[name] for name, param in model.named_parameters())

            actual = trained(model, optimizer, inputs, park_and_unpark)
            assert all(param is parameters[name] for name, param in model.named_parameters()), case
            assert max(left) <= before, f"{case}: {before} bytes without a model, {left} with a parked one"
            assert len(actual) == len(expected), case
            for ours, theirs in zip(actual, expected, strict=True):
                assert torch.equal(ours, theirs), case
            pretend.set_order(None)
            del model, optimizer, parameters, park_and_unpark, actual


def sharded_mlp(**options: Any) -> Any:
    torch.manual_seed(0)
    model = mlp(num_blocks=2)
    for block in model.blocks:
        fsdp2.fully_shard(block, **options)
    return fsdp2.fully_shard(model, **options)


@on_ranks(2)
def test_what_is_parked_can_be_read_and_loaded_and_refuses_to_run(tmp_path):
    model = sharded_mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    flat = fsdp2.optim.flat(torch.optim.AdamW, model, lr=0.01)
    x = batches(1, (8, 7))[0]
    arrived: list[str] = []
    model.blocks[0].up.weight.register_post_accumulate_grad_hook(lambda param: arrived.append("gradient"))
    trained(model, optimizer, [x])
    trained(model, flat, [x])
    before = {name: value.full_tensor().clone() for name, value in model.state_dict().items()}
    states = {name: flat.state[param]["exp_avg"].full_tensor().clone() for name, param in model.named_parameters()}
    saved = flat.state_dict()["state"]
    fsdp2.park(model, [optimizer, flat], to=str(tmp_path))
    fsdp2.park(model, [optimizer, flat], to=str(tmp_path))  # changes nothing
    assert {name: value.full_tensor().tolist() for name, value in model.state_dict().items()} == {
        n: v.tolist() for n, v in before.items()
    }
    entries = flat.state_dict()["state"]
    for index, (name, param) in enumerate(model.named_parameters()):
        assert torch.equal(flat.state[param]["exp_avg"].full_tensor(), states[name])
        assert torch.equal(entries[index]["exp_avg"].full_tensor(), states[name])
    assert len(saved) == len(states)
    for use in (lambda: model(x), lambda: model.unshard(), optimizer.step, flat.step, lambda: model.to(torch.float64)):
        with pytest.raises(ParkedError, match=r"4 parameters of a group are parked(.|\n)*fsdp2\.unpark"):
            use()
    model.load_state_dict({name: 2 * value for name, value in before.items()})
    fsdp2.unpark(model, [optimizer, flat])
    fsdp2.unpark(model, [optimizer, flat])
    for name, value in model.state_dict().items():
        assert torch.equal(value.full_tensor(), 2 * before[name]), name
    arrived.clear()
    trained(model, optimizer, [x])
    trained(model, flat, [x])
    assert arrived == ["gradient"] * 2


@on_ranks(2)
def test_a_part_is_parked_alone(tmp_path):
    model, oracle = sharded_mlp(), sharded_mlp()
    optimizer, theirs = (torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, oracle))
    inputs = batches(2, (8, 7))

    def park_a_block() -> None:
        fsdp2.park(model.blocks[1], optimizer, to=str(tmp_path))
        with pytest.raises(ParkedError, match=r"blocks\.1\."):
            model(inputs[0])
        model.blocks[0].unshard()
        model.blocks[0].reshard()
        fsdp2.unpark(model, optimizer)

    model(inputs[0])  # names its units
    model.reset_iter_state()
    for ours, expected in zip(trained(model, optimizer, inputs, park_a_block), trained(oracle, theirs, inputs), strict=True):
        assert torch.equal(ours, expected)


@on_ranks(2)
def test_parking_refuses_what_it_would_break(tmp_path):
    model = sharded_mlp()
    x = batches(1, (8, 7))[0]
    loss = model(x).sum()
    with pytest.raises(OrderError, match="has a backward to come"):
        fsdp2.park(model)
    loss.backward()
    fsdp2.park(model)
    fsdp2.unpark(model)
    model.set_requires_gradient_sync(False)
    model(x).sum().backward()
    with pytest.raises(OrderError, match="wait for their last micro-batch"):
        fsdp2.park(model)
    model.set_requires_gradient_sync(True)
    model(x).sum().backward()
    model.set_keep_unsharded_storage(True)
    with pytest.raises(OrderError, match="must keep its address"):
        fsdp2.park(model)
    model.set_keep_unsharded_storage(False)
    for wrong in (str(tmp_path / "none"), "cuda", 3):
        with pytest.raises(ArgumentError, match="park got to="):
            fsdp2.park(model, to=wrong)
    with pytest.raises(ArgumentError, match="keeps its state on the host by itself"):
        fsdp2.park(model, fsdp2.optim.offloaded(torch.optim.SGD, model, fsdp2.CPUOffloadPolicy(pin_memory=False), lr=0.1))
    with pytest.raises(ModuleError, match=r"without parameters of fsdp2\.fully_shard"):
        fsdp2.park(nn.Linear(2, 2))


@on_ranks(2, device="pretend")
def test_parking_again_and_again_keeps_nothing():
    model = made("pretend", "zero3", {})
    optimizer = OPTIMIZERS["flat"](model)
    trained(model, optimizer, [batches(1, (8, 7))[0].to("pretend")])
    fsdp2.park(model, optimizer)
    parked = allocated()
    fsdp2.unpark(model, optimizer)
    there, tensors = allocated(), sum(isinstance(each, Tensor) for each in gc.get_objects())
    for _ in range(30):
        fsdp2.park(model, optimizer)
        fsdp2.unpark(model, optimizer)
    assert allocated() == there
    assert sum(isinstance(each, Tensor) for each in gc.get_objects()) <= tensors
    fsdp2.park(model, optimizer)
    assert allocated() == parked


@on_ranks(2, device="pretend")
def test_the_states_go_to_one_file_and_all_of_what_is_parked_in_several_calls_comes_back(tmp_path):
    for name in ("adamw", "flat"):
        model = made("pretend", "zero3", {})
        optimizer = OPTIMIZERS[name](model)
        before = trained(model, optimizer, [batches(1, (8, 7))[0].to("pretend")])

        def devices(model: Any = model, optimizer: Any = optimizer) -> set[str]:
            states = [optimizer.state[param]["exp_avg"] for param in model.parameters()]
            local = [each.to_local() if isinstance(each, DTensor) else each for each in states]
            return {each.device.type for each in local if each.numel() > 0}

        fsdp2.park(model)
        assert devices() == {"pretend"}
        files = len(os.listdir("/proc/self/fd"))
        fsdp2.park(model, optimizer, to=str(tmp_path))  # the shards are away already
        assert devices() == {"cpu"}
        assert len(os.listdir("/proc/self/fd")) <= files + 2, "the file, and mmap's descriptor of it"
        fsdp2.unpark(model)
        fsdp2.park(model, optimizer, to=str(tmp_path))  # the states are away already
        fsdp2.unpark(model)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("fsdp2.parking._move_states", no_room_for_states(fsdp2.parking._move_states))
            with pytest.raises(MemoryError):
                fsdp2.park(model, optimizer)
        assert devices() == {"cpu"}, "a park that failed brought back what an earlier one had moved"
        fsdp2.unpark(model, optimizer)
        assert devices() == {"pretend"}
        for one, other in zip(trained(model, optimizer, []), before, strict=True):
            assert torch.equal(one, other)


def no_room_for_states(move: Any) -> Any:
    def moved(states: Any, by: Any) -> None:
        if type(by).__name__ == "_Away":
            raise MemoryError
        move(states, by)

    return moved
