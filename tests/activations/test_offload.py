"""``apply_activation_offload``: what autograd saves is on the host in between, and every value is the one that it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp2
from fsdp2 import apply_activation_checkpointing, apply_activation_offload, fully_shard
from fsdp2.activations.around_forward import around_forward
from fsdp2.activations.on_host import HostMemory
from harness import cpu_mesh, on_ranks
from harness.models import Block, Transformer, batches, mlp, token_batches, transformer
from harness.pretend_training import Scenario, train, train_late
from harness.recording import recording
from harness.sharding import shard_blocks, with_reference
from harness.training import assert_same_bits, assert_trains_bitwise_as, fed_in_chunks, fed_own_chunk, forward_backward


def memory_of(model: Any) -> HostMemory:
    memory = around_forward(model.blocks[0]).outer.memory
    assert isinstance(memory, HostMemory)
    return memory


def offload(model: Any, **options: Any) -> None:
    apply_activation_offload(model, min_nbytes=0, **options)


def offload_and_checkpoint(model: Any) -> None:
    apply_activation_checkpointing(model)
    offload(model)


@on_ranks(2, 3)
@pytest.mark.parametrize("checkpointed", ["", "before", "after"])
def test_training_is_that_of_the_plain_model_and_the_host_is_used(checkpointed):
    model, reference = with_reference(transformer())
    keys = list(model.state_dict())
    if checkpointed == "before":
        apply_activation_checkpointing(model)
    offload(model)
    shard_blocks(model)
    if checkpointed == "after":
        apply_activation_checkpointing(model)
    assert list(model.state_dict()) == keys
    assert_trains_bitwise_as(model, reference, token_batches())
    memory = memory_of(model)
    assert memory.peak_nbytes > 0
    assert memory.nbytes == 0


def num_saved(model: nn.Module, x: Tensor) -> int:
    """Bytes on the host behind a forward, of a model that has trained before."""
    for _ in range(2):
        forward_backward(model, x)
    loss = model(x).square().mean()
    nbytes = memory_of(model).nbytes
    loss.backward()
    return nbytes


def test_each_storage_goes_once_parameters_and_the_last_block_stay_and_a_budget_is_kept():
    model = mlp(num_blocks=3)
    x = torch.randn(64, 7)
    offload(model)
    rows = 64 * 4
    # Of a block: its input, what the norm returns, tanh's result, what is scaled; the norm's mean and rstd. No input of the second
    # block goes anew, which the first has saved as the result of its addition only if that is saved: it is not.
    of_a_block = rows * (10 + 10 + 13 + 10 + 2)
    assert num_saved(model, x) == 2 * of_a_block
    budgeted = mlp(num_blocks=3)
    offload(budgeted, max_nbytes=of_a_block + rows * 15)
    assert of_a_block < num_saved(budgeted, x) <= of_a_block + rows * 15
    assert memory_of(budgeted).peak_nbytes <= of_a_block + rows * 15


def test_a_saved_tensor_that_is_changed_in_place_is_an_error_whether_it_went_or_stayed():
    class Careless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x).exp()
            return y.mul_(2)

    model = nn.Sequential(Careless(), Careless())
    apply_activation_offload(model, min_nbytes=10**6)
    with pytest.raises(fsdp2.OrderError, match=r"\(2, 4\) of torch.float32 that backward needs was changed in place"):
        model(torch.randn(2, 4)).sum().backward()


def test_backward_twice_and_gradients_of_gradients_are_the_plain_models():
    model, plain = mlp(), mlp()
    offload(model)
    found = []
    for each in (model, plain):
        x = batches(1)[0].requires_grad_()
        loss = each(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        grad.square().sum().backward()
        found.append([x.grad, *(param.grad for param in each.parameters())])
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


@on_ranks(2)
def test_copies_are_ordered_with_the_computation_and_with_all_collectives():
    with recording() as streams:
        model = mlp()
        offload(model)
        shard_blocks(model)
        fed_own_chunk(model, batches())
    assert "offload" in streams._clocks


@on_ranks(2, device="pretend")
@pytest.mark.parametrize("prepare", [offload, pytest.param(offload_and_checkpoint, marks=pytest.mark.slow)])
def test_on_a_device_that_runs_late_every_order_of_the_copies_trains_alike(prepare):
    scenario = Scenario(prepare=prepare, model=lambda: mlp(num_blocks=4))
    expected = train(Scenario(model=scenario.model), "cpu")
    for seed in (None, 0, 1):
        assert_same_bits(train_late(seed, scenario), expected)


@pytest.mark.parametrize(
    ("prepare", "options", "error", "text"),
    [
        (offload, {}, fsdp2.ModuleError, "blocks.0: it is offloaded already"),
        (offload, {"modules": fsdp2.wrap.by_name("blocks.1.up")}, fsdp2.ModuleError, "blocks.1.up: it is inside of blocks.1"),
        (lambda model: None, {"modules": [Block, nn.Linear]}, fsdp2.ModuleError, "blocks.0.up: it is inside of blocks.0"),
        (lambda model: None, {"max_nbytes": -1}, fsdp2.ArgumentError, "max_nbytes=-1"),
    ],
)
def test_a_mistake_is_an_error_by_name(prepare, options, error, text):
    model = mlp()
    prepare(model)
    with pytest.raises(error, match=text):
        apply_activation_offload(model, **options)


@pytest.mark.slow
@on_ranks(2, timeout=300)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("checkpointed", [False, True])
def test_compiled_blocks_are_offloaded_too(checkpointed):
    model, reference = with_reference(Transformer(dim=6, num_blocks=4))
    offload(model)
    if checkpointed:
        apply_activation_checkpointing(model)
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
        fully_shard(block, mesh=cpu_mesh())
    fully_shard(model, mesh=cpu_mesh())
    steps = fed_own_chunk(model, token_batches())
    assert memory_of(model).peak_nbytes > 0
    assert_same_bits(steps, fed_in_chunks(reference, token_batches()))
