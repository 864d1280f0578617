"""On a backend whose host does not wait (NCCL), ranks that reduced different units together are told afterwards, by name."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from fsdp2 import MixedPrecisionPolicy, OrderError
from fsdp2.core.comm.streams import DeviceStreams
from fsdp2.core.iteration import late_comparison
from fsdp2.testing import pretend
from harness import on_ranks
from harness.mesh import moved_to
from harness.models import Block as MLPBlock
from harness.models import batches, mlp, token_batches, transformer
from harness.pretend_training import halve_in_a_hook, in_partly_reduced_micro_batches, in_two_micro_batches
from harness.training import assert_equal_grads, forward_backward, own_chunk, sgd

DIM = 7


class Block(nn.Module):
    """Blocks of equal sizes would swap gradients unnoticed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Model(nn.Module):
    """Runs the blocks of ``route``, after a first layer of the root's."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor, route: list[int]) -> Tensor:
        x = self.first(x)
        for index in route:
            x = x + self.blocks[index](x)
        return x


EVERY = [0, 1, 2, 3]
BF16_REDUCE = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)}


def sharded(model: nn.Module, strategy: str, wrap: set[type[nn.Module]], **options: Any) -> Any:
    """hsdp: two replicas; hsdp_shard: one, of all ranks."""
    world_size = dist.get_world_size()
    shape = {"hsdp": (2, world_size // 2), "hsdp_shard": (1, world_size)}.get(strategy, (world_size,))
    mesh = init_device_mesh("pretend", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    return fsdp2.parallelize(model.to("pretend"), strategy.removesuffix("_shard"), mesh=mesh, wrap=wrap, **options)


def models(strategy: str, **options: Any) -> tuple[Any, Model]:
    torch.manual_seed(0)
    reference = Model()
    model = sharded(copy.deepcopy(reference), strategy, {Block}, **options)
    model.set_reshard_after_forward(False)
    return model, reference


def step(model: nn.Module, x: Tensor, route: list[int]) -> None:
    model(x, route).square().mean().backward()


def check_step(model: nn.Module, reference: Model, x: Tensor) -> None:
    model.zero_grad()
    reference.zero_grad()
    step(model, own_chunk(x).to("pretend"), EVERY)
    step(reference, x, EVERY)
    found = {name: param.grad.full_tensor().cpu() for name, param in model.named_parameters()}
    assert_equal_grads(found, {name: param.grad for name, param in reference.named_parameters()}, ulps=32)
    pretend.synchronize()
    model(own_chunk(x).to("pretend"), EVERY)  # where it would be told


@on_ranks(2, device="pretend", timeout=60)
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "hsdp", "hsdp_shard"])
def test_every_rank_is_told_by_name_what_was_reduced_with_what(strategy):
    """Symptom: gradients of one block in another, in silence."""
    model, reference = models(strategy)
    x, *_ = batches(1)
    check_step(model, reference, x)
    mine, others = ((2, 1), (1, 2))[dist.get_rank()]
    step(model, own_chunk(x).to("pretend"), [0, mine, 3])
    pretend.synchronize()
    words = rf"(?s)1 times.*blocks\.{mine}: another rank reduced blocks\.{others} in its place\n.*last checkpoint"
    with pytest.raises(OrderError, match=words):
        model(x.to("pretend"), EVERY)
    model.reset_iter_state()  # each rank has recorded another order, by which it prefetches
    check_step(model, reference, x)


@on_ranks(2, device="pretend", timeout=60)
def test_the_next_backward_tells_as_well_and_nobody_waits_to_be_told():
    model, _ = models("ddp")
    words = r"(?s)2 times(?=.*blocks\.1: another rank reduced blocks\.2 in)(?=.*blocks\.2: another rank reduced blocks\.1 in)"
    with pytest.raises(OrderError, match=words):
        three_steps(model, batches(1)[0].to("pretend"))


def three_steps(model: Model, x: Tensor) -> None:
    """What is wrong in the first arrives before the last backward.

    Not before: the device of a slow process runs on, and a rank that was told at once would never issue what the other one waits for.
    """
    with pretend.no_host_waits(), mock.patch.object(DeviceStreams, "has_passed", return_value=False):
        step(model, x, (EVERY, [0, 2, 1, 3])[dist.get_rank()])
        step(model, x, EVERY)
        loss = model(x, EVERY).square().mean()
    pretend.synchronize()
    loss.backward()


@on_ranks(4, device="pretend_model")
def test_what_the_host_reads_before_it_is_there_says_nothing():
    """A planted fault: nobody asks the event behind the copy."""
    model, _ = models("ddp")
    x = batches(1)[0].to("pretend")
    step(model, x, EVERY)
    with mock.patch.object(DeviceStreams, "has_passed", return_value=True), counted_tags(drain=False) as found:
        model(x, EVERY)
    assert found == [0]


# --- nobody is told who has done nothing wrong ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """A way to train that is right. prepare, iteration: as in ``harness.pretend_training``"""

    strategy: str = "zero3"
    options: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[Any], None] = lambda model: None
    iteration: Callable[[Any, Tensor], Tensor] = forward_backward
    num_read: int = 4  # groups a step


def reduce_unused(model: Any) -> None:
    model.set_reduce_scatter_unused_params(True)
    leave_out(model)


def leave_out(model: Any) -> None:
    """One rank does not use a parameter."""
    if dist.get_rank() == 1:
        block = model.blocks[1]
        block.forward = lambda x: x + block.down(torch.tanh(block.up(block.norm(x))))


def freeze(model: Any) -> None:
    model.blocks[0].requires_grad_(False)
    model.blocks[1].norm.requires_grad_(False)


def toggled_micro_batches(model: Any, x: Tensor) -> Tensor:
    """What was accumulated is laid out anew."""
    model.blocks[1].up.requires_grad_(False)
    model.set_requires_gradient_sync(False)
    forward_backward(model, x)
    model.blocks[1].up.requires_grad_(True)
    model.set_requires_gradient_sync(True)
    return forward_backward(model, x)


def added_up(model: Any, x: Tensor) -> Tensor:
    """Gradients are there already: what is reduced is added to them and freed."""
    forward_backward(model, x)
    return forward_backward(model, x)


def step_in_hooks(model: Any) -> None:
    def update(param: nn.Parameter) -> None:
        param.data.add_(param.grad, alpha=-0.1)
        param.grad = None

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(update)


WAYS = {
    "plain": Way(),
    "bf16": Way(options=BF16_REDUCE),
    "fp16": Way(options={"mp_policy": MixedPrecisionPolicy(torch.float16, torch.float16)}),
    "ddp": Way("ddp"),
    "zero1": Way("zero1", iteration=in_two_micro_batches, num_read=8),
    "unreduced": Way(iteration=lambda model, x: in_two_micro_batches(model, x, reduce_first=False)),
    "partial": Way("hsdp", iteration=in_partly_reduced_micro_batches),
    "partial, bf16": Way("hsdp", options=BF16_REDUCE, iteration=in_partly_reduced_micro_batches),
    "toggled": Way("zero1", iteration=toggled_micro_batches),
    "unused": Way(prepare=leave_out),
    "reduce_unused": Way(prepare=reduce_unused),
    "frozen": Way(prepare=freeze, num_read=3),
    "divided": Way(options=BF16_REDUCE, prepare=lambda model: model.set_gradient_divide_factor(1e30)),
    "summed": Way(prepare=lambda model: model.set_force_sum_reduction_for_comms(True)),
    "hook": Way(prepare=halve_in_a_hook),
    "offloaded": Way(options={"offload_policy": fsdp2.CPUOffloadPolicy()}),
    "added up": Way(iteration=added_up, num_read=8),
    "optimizer in hooks": Way(prepare=step_in_hooks),
}
QUICK = ("bf16", "partial", "unused", "toggled", "added up")


@contextlib.contextmanager
def counted_tags(drain: bool = True) -> Iterator[list[int]]:
    """How many reductions were compared, each time that somebody looked. drain: not those of before"""
    if drain:
        pretend.synchronize()
        late_comparison.compare()
    found: list[int] = []
    compare = late_comparison.are_mixed

    def counting(tags: Tensor) -> list[bool]:
        found.append(int((tags[:, 0].isfinite()).sum()))
        return compare(tags)

    with mock.patch.object(late_comparison, "are_mixed", counting):
        yield found


def check_silence(model: Any, inputs: list[Tensor], iteration: Callable[[Any, Tensor], Tensor], num_read: int) -> None:
    optimizer = sgd(model.parameters())
    with counted_tags() as found:
        for x in inputs:
            iteration(model, x)
            optimizer.step()
            optimizer.zero_grad()
            pretend.synchronize()
        with torch.no_grad():
            model(inputs[0])
    assert sum(found) == num_read * len(inputs)


@on_ranks(2, device="pretend")
@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in WAYS])
def test_no_rank_is_told_where_all_reduce_the_same(name):
    way = WAYS[name]
    model = sharded(mlp(), way.strategy, {MLPBlock}, **way.options)
    way.prepare(model)
    check_silence(model, [own_chunk(x).to("pretend") for x in batches(3)], way.iteration, way.num_read)


@on_ranks(2, device="pretend")
def test_tied_weights_across_units_are_compared_once():
    model = moved_to("pretend", transformer(tied=True))
    mesh = init_device_mesh("pretend", (2,))
    for module in (model.embedding, *model.blocks, model):
        fsdp2.fully_shard(module, mesh=mesh)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        check_silence(model, [own_chunk(x).to("pretend") for x in token_batches(3)], forward_backward, 4)


@on_ranks(1024, device="pretend_model")
@pytest.mark.parametrize("options", [{}, BF16_REDUCE])
def test_no_rank_of_many_is_told_where_all_reduce_the_same(options):
    model = sharded(mlp(), "zero3", {MLPBlock}, **options)
    check_silence(model, [x.to("pretend") for x in batches(2)], forward_backward, 4)


@on_ranks(2, device="pretend")
def test_nobody_asks_the_device_while_a_graph_is_captured():
    model = sharded(mlp(), "zero3", {MLPBlock})
    x = own_chunk(batches(1)[0]).to("pretend")
    forward_backward(model, x)
    model.zero_grad()
    with counted_tags(drain=False) as found:
        with pretend.capturing():
            forward_backward(model, x)
            forward_backward(model, x)
        assert found == []
        pretend.synchronize()
        forward_backward(model, x)
        assert found == [4]  # of the backward before


class TwoDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(DIM, DIM)
        self.up = nn.Linear(DIM, DIM, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(x).to(torch.bfloat16)).float()


@on_ranks(2, device="pretend")
def test_groups_of_one_unit_are_told_apart():
    model = nn.Sequential(TwoDtypes(), TwoDtypes()).to("pretend")
    mesh = init_device_mesh("pretend", (2,))
    units = [fsdp2.fully_shard.state(fsdp2.fully_shard(module, mesh=mesh)) for module in (*model, model)]
    check_silence(model, [own_chunk(x).to("pretend") for x in batches(2)], forward_backward, 4)
    numbers = {group.gradients.number for unit in units for group in unit.groups}
    assert len(numbers) == 4
    copied = copy.deepcopy(model)
    check_silence(copied, [own_chunk(x).to("pretend") for x in batches(2)], forward_backward, 4)
    assert numbers.isdisjoint(group.gradients.number for each in copied for group in fsdp2.fully_shard.state(each).groups)
