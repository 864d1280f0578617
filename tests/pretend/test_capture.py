"""``fsdp2.capture``: replays train as eager steps do, and what a graph cannot keep is refused by name, on all ranks."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from fsdp2.testing import pretend
from harness import on_ranks
from harness.models import Block, batches, mlp
from harness.pretend_training import BF16, in_partly_reduced_micro_batches, in_two_micro_batches
from harness.subclasses import RowInt8, wrap_weights
from harness.training import forward_backward, own_chunk, sgd, state_of


def adamw(params: Any) -> Any:
    return torch.optim.AdamW(params, lr=0.01, capturable=True)


def recomputed(model: nn.Module) -> nn.Module:
    fsdp2.apply_activation_checkpointing(model, [Block])
    return model


@dataclass(frozen=True)
class Way:
    strategy: str = "zero3"
    options: dict[str, Any] = field(default_factory=dict)
    iteration: Callable[[Any, Tensor], Tensor] = forward_backward
    prepare: Callable[[nn.Module], nn.Module] = lambda model: model
    optimizer: Callable[[Any], Any] = sgd
    clips: bool = False
    keeps: bool = False


WAYS = {
    "fp32": Way(),
    "bf16": Way(options=BF16),
    "bf16, clipped": Way(options=BF16, clips=True),
    "bf16, storage kept": Way(options=BF16, keeps=True),
    "hsdp": Way("hsdp", options=BF16),
    "ddp": Way("ddp"),
    "zero2": Way("zero2"),
    "accumulation": Way(options=BF16, iteration=in_two_micro_batches),
    "accumulation, hsdp": Way("hsdp", iteration=in_partly_reduced_micro_batches),
    "recomputation": Way(prepare=recomputed),
    "flat": Way(optimizer=partial(fsdp2.optim.flat, torch.optim.SGD, lr=0.1, momentum=0.9)),
    "adamw": Way(options=BF16, optimizer=adamw, clips=True),
    "int8 gathers": Way(prepare=partial(wrap_weights, kind=RowInt8)),
}


def sharded(way: Way) -> Any:
    shape = (2, 1) if way.strategy == "hsdp" else (2,)
    mesh = init_device_mesh("pretend", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    model = fsdp2.parallelize(way.prepare(mlp().to("pretend")), way.strategy, mesh=mesh, wrap={Block}, **way.options)
    model.set_keep_unsharded_storage(way.keeps)
    return model


def step_of(model: Any, optimizer: Any, way: Way, more: Callable[[Tensor], Tensor | None] = lambda x: None) -> Any:
    def step(x: Tensor) -> Tensor:
        loss = way.iteration(model, x)
        if way.clips:
            fsdp2.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        changed = more(x)
        return loss if changed is None else loss + changed

    return step


def values(model: Any) -> dict[str, Tensor]:
    return {name: value.to_local().cpu() for name, value in state_of(model).items()}


def trained(way: Way, captured: bool, inputs: list[Tensor]) -> tuple[list[Any], Any]:
    """After each step the loss, the parameters, and now and then an evaluation, which nobody captures."""
    model = sharded(way)
    optimizer = way.optimizer(model.parameters())
    step = step_of(model, optimizer, way)
    run = fsdp2.capture(step) if captured else step
    found: list[Any] = []
    for index, x in enumerate(inputs):
        found.append(run(own_chunk(x).to("pretend")).item())
        if index % 3 == 2:
            found.append(values(model))
            with torch.no_grad():
                found.append(model(own_chunk(x).to("pretend")).cpu())
    return found, run


QUICK = ("bf16, clipped", "accumulation, hsdp")


@on_ranks(2, device="pretend")
@pytest.mark.parametrize("names", [QUICK, pytest.param(tuple(WAYS), marks=pytest.mark.slow)], ids=["quick", "all"])
def test_a_captured_step_trains_as_an_eager_one(names):
    inputs = batches(6)
    for name in names:
        for seed in (None, 1) if len(names) > len(QUICK) else (1,):
            pretend.set_order(seed)
            expected, _ = trained(WAYS[name], False, inputs)
            found, captured = trained(WAYS[name], True, inputs)
            assert (captured.reason, captured.num_graphs) == (None, 1), name
            for index, (one, other) in enumerate(zip(expected, found, strict=True)):
                torch.testing.assert_close(other, one, rtol=0, atol=0, msg=lambda text, at=f"{name}, {index}": f"{at}: {text}")
    pretend.set_order(0)


class Planted:
    """Steps that a graph cannot be, by what their reason must say. Each is called after the optimizer's step."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.calls = 0
        self.tensor = torch.ones(3, device="pretend")
        self.side = torch.Stream("pretend")

    def reads_a_number(self, x: Tensor) -> Tensor:
        """_local_scalar_dense.default makes the host wait for the device .*test_capture.py"""
        return x.sum() * 0 + x.mean().item()

    def one_rank_reads_a_number(self, x: Tensor) -> Tensor | None:
        """_local_scalar_dense.*rank 1"""
        return self.reads_a_number(x) if dist.get_rank() == 1 else None

    def varies_a_size(self, x: Tensor) -> Tensor:
        """a Python number changes, .*: aten.slice.*test_capture.py"""
        self.calls += 1
        return x[: 1 + self.calls % 3].sum()

    def counts(self, x: Tensor) -> Tensor:
        """a Python number changes, .*got 3, 2 one step before"""
        self.calls += 1
        return x.sum() * self.calls

    def branches(self, x: Tensor) -> Tensor:
        """it ran aten.* where it had run aten"""
        self.calls += 1
        return x.sum() if self.calls % 2 else x.mean()

    def takes_another_tensor(self, x: Tensor) -> Tensor:
        """an address changes: aten.add"""
        result = x.sum() + self.tensor
        self.kept, self.tensor = self.tensor, torch.from_numpy(torch.ones(3).numpy()).to("pretend")
        return result.sum()

    def waits_for_an_event(self, x: Tensor) -> None:
        """RuntimeError in the capture: .*while a graph is captured"""
        torch.pretend.current_stream().record_event().synchronize()

    def leaves_a_stream(self, x: Tensor) -> None:
        """has not been joined"""
        self.side.wait_stream(torch.pretend.current_stream())
        with torch.pretend.stream(self.side):
            self.tensor.add_(1)

    def schedules(self, x: Tensor) -> None:
        """SGD.param_groups.0..'lr'. changed from .*make it a tensor"""
        self.optimizer.param_groups[0]["lr"] *= 0.9


PLANTED = [name for name in vars(Planted) if not name.startswith("_")]


@on_ranks(2, device="pretend")
@pytest.mark.parametrize("names", [PLANTED[1:2], pytest.param(PLANTED, marks=pytest.mark.slow)], ids=["quick", "all"])
def test_a_step_that_a_graph_cannot_keep_is_refused_by_name_on_all_ranks_and_goes_on_eagerly(names):
    inputs = batches(7)
    way = WAYS["bf16"]
    for name in names:
        found = {}
        for captured in (False, True):
            model = sharded(way)
            optimizer = sgd(model.parameters())
            plant = getattr(Planted(optimizer), name)
            step = step_of(model, optimizer, way, plant)
            run = fsdp2.capture(step) if captured else step
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                losses = [run(own_chunk(x).to("pretend")).cpu() for x in inputs]
            found[captured] = losses, values(model)
        assert re.search(plant.__doc__, run.reason), (name, run.reason)
        assert run.num_graphs == 0, name
        torch.testing.assert_close(found[True], found[False], rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")


@on_ranks(2, device="pretend")
def test_each_size_gets_a_graph_until_there_are_enough():
    way = WAYS["bf16"]
    sizes = [4, 8, 4, 8, 4, 8, 4, 8, 4, 8, 12, 4, 8]
    found = {}
    for captured in (False, True):
        model = sharded(way)
        optimizer = sgd(model.parameters())
        step = step_of(model, optimizer, way)
        run = fsdp2.capture(step, max_graphs=2) if captured else step
        losses = []
        for index, size in enumerate(sizes):
            if captured and index == 10:
                assert (run.reason, run.num_graphs) == (None, 2)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                losses.append(run(own_chunk(batches(1, (size, 7), seed=index)[0])))
        found[captured] = torch.stack([loss.cpu() for loss in losses]), values(model)
    assert "max_graphs" in run.reason
    assert run.num_graphs == 2
    torch.testing.assert_close(found[True], found[False], rtol=0, atol=0)


class Moody(nn.Module):
    """Doubles in training what it adds in an evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 7))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * 2 if self.training else x + self.weight


def freeze(model: Any, at: int) -> None:
    model[0].up.weight.requires_grad_(at % 2 == 0)


SWITCHES: dict[str, tuple[Callable[[Any, int], object], str]] = {
    "train or eval": (lambda model, at: model.train(at % 2 == 0), "training of"),
    "train or eval of a plain module": (lambda model, at: model[-1].train(at % 2 == 0), "training of 3"),
    "freezing": (freeze, "requires_grad of 0.up.weight"),
    "divide factor": (lambda model, at: model[0].set_gradient_divide_factor(2.0 + at % 2), "divide factor of 0"),
    "gradient sync": (lambda model, at: model.set_requires_gradient_sync(at % 2 == 0), "the gradient sync of the root"),
}


@on_ranks(2, device="pretend")
@pytest.mark.parametrize("name", SWITCHES)
def test_switches_that_the_program_turns_between_steps_are_noticed(name):
    turn, named = SWITCHES[name]
    found = {}
    for captured in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(Block(7) for _ in range(3)), Moody()).to("pretend")
        for block in model[:3]:
            fsdp2.fully_shard(block)
        model = fsdp2.fully_shard(model)
        optimizer = sgd(model.parameters())
        step = step_of(model, optimizer, Way())
        run = fsdp2.capture(step, max_graphs=1) if captured else step
        losses = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for index, x in enumerate(batches(9)):
                if index >= 5:
                    turn(model, index)
                losses.append(run(own_chunk(x).to("pretend")).cpu())
        found[captured] = torch.stack(losses), values(model)
    assert run.num_graphs == 1
    assert named in run.reason
    torch.testing.assert_close(found[True], found[False], rtol=0, atol=0)


@on_ranks(2, device="pretend")
def test_a_rate_that_changes_in_the_first_steps_alone_ends_in_a_graph(monkeypatch):
    monkeypatch.setattr("fsdp2.captured._STALE", 3)
    model = sharded(WAYS["fp32"])
    optimizer = sgd(model.parameters())
    run = fsdp2.capture(step_of(model, optimizer, WAYS["fp32"]), max_graphs=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for index, x in enumerate(batches(14)):
            if index < 5:
                optimizer.param_groups[0]["lr"] *= 0.9
            run(own_chunk(x).to("pretend"))
    assert (run.reason, run.num_graphs) == (None, 1)


@on_ranks(2, device="pretend")
def test_optimizers_that_count_on_the_host_and_gradients_zeroed_to_none_outside_are_refused():
    way = WAYS["fp32"]
    for make, zeroes, reason in (
        (lambda params: torch.optim.AdamW(params, lr=0.01), True, "AdamW counts its steps on the host: make it with capturable=True"),
        (sgd, False, "zero them within the step"),
    ):
        model = sharded(way)
        optimizer = make(model.parameters())

        def step(x: Tensor, model=model, optimizer=optimizer, zeroes=zeroes) -> None:
            forward_backward(model, x)
            optimizer.step()
            if zeroes:
                optimizer.zero_grad()

        run = fsdp2.capture(step)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for x in batches(6):
                run(own_chunk(x).to("pretend"))
                optimizer.zero_grad()
        assert reason in run.reason


@dataclass
class Batch:
    x: Tensor


@on_ranks(2, device="pretend")
def test_arguments_that_capture_cannot_look_into_are_refused():
    way = WAYS["fp32"]
    model = sharded(way)
    x = own_chunk(batches(1)[0]).to("pretend")
    for first in (0, 1):
        run = fsdp2.capture(lambda batch: forward_backward(model, batch.x if isinstance(batch, Batch) else batch))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for index in range(3):
                run(Batch(x) if index >= first else x)
        assert "an argument is a Batch, which capture cannot look into: pass its tensors" in run.reason


@on_ranks(2)
def test_on_a_cpu_a_step_runs_eagerly_and_says_so():
    model = fsdp2.fully_shard(mlp())
    captured = fsdp2.capture(lambda x: model(x).square().mean())
    losses = [captured(own_chunk(x)) for x in batches(5)]
    assert captured.reason.startswith("the model is on a cpu device, which has no graphs")
    assert "rank" not in captured.reason  # it is so on all of them
    assert [loss.item() for loss in losses] == [model(own_chunk(x)).square().mean().item() for x in batches(5)]
    for wrong in ({"step": 3}, {"step": print, "warmup": 2}, {"step": print, "max_graphs": 0}):
        with pytest.raises(fsdp2.errors.ArgumentError):
            fsdp2.capture(**wrong)
