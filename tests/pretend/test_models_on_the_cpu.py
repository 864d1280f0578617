"""A model on the CPU, sharded over a mesh of devices: ``fully_shard`` moves it, and nothing remembers where it was."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

import fsdp2
from fsdp2.testing import pretend
from harness import on_ranks
from harness.models import MLP, batches, mlp
from harness.sharding import shard_blocks, with_reference
from harness.subclasses import RowInt8, wrap_weights
from harness.training import adamw, assert_same_bits, assert_trains_bitwise_as, fed_own_chunk

BF16 = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Watched(MLP):
    """With a buffer, a tie, a 0-d and a frozen parameter; it notes where parameters, buffers and gradients are."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.full((5,), 0.5))
        self.register_buffer("lost", torch.zeros(3), persistent=False)
        self.gain = nn.Parameter(torch.tensor(0.9))
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)
        self.tie()
        self.seen: set[str] = set()

    def tie(self) -> Watched:
        self.blocks[2].down.weight = self.blocks[0].down.weight
        return self

    def forward(self, x: Tensor) -> Tensor:
        self.seen |= {tensor.device.type for tensor in (x, *self.parameters(recurse=False), *self.buffers())}
        return super().forward(x) * self.gain * self.frozen + self.shift


def watched() -> Watched:
    torch.manual_seed(0)
    return Watched()


def devices_of(model: nn.Module) -> set[str]:
    """Of each parameter, its local tensor and its gradient, and of each buffer, as types say it and as memory does."""
    tensors = [*model.parameters(), *model.buffers(), *(param.grad for param in model.parameters() if param.grad is not None)]
    tensors += [each.to_local() for each in tensors if hasattr(each, "to_local")]
    return {each.device.type for each in tensors} | {each.untyped_storage().device.type for each in tensors[-2:]}


@on_ranks(1, 2, device="pretend")
@pytest.mark.parametrize("options", [{}, {"mp_policy": BF16}, {"reshard_after_forward": False}], ids=["fp32", "bf16", "kept"])
def test_everything_is_on_the_device_from_fully_shard_on_and_trains_as_it_does_moved_before(options):
    model, moved = watched(), watched().to("pretend").tie()  # on such a device ``Module.to`` cuts ties
    shard_blocks(model, **options)
    assert devices_of(model) == {"pretend"}
    steps = fed_own_chunk(model, batches(3, (8, 7)), adamw)
    assert model.seen == {"pretend"}
    assert devices_of(model) == {"pretend"}
    assert {value.device.type for value in model.state_dict().values()} == {"pretend"}
    assert_same_bits(steps, fed_own_chunk(shard_blocks(moved, **options), [x.to("pretend") for x in batches(3, (8, 7))], adamw))


@on_ranks(2, device="pretend")
def test_its_numbers_are_those_of_the_model_that_stays_on_the_cpu():
    model, reference = with_reference(watched())
    assert_trains_bitwise_as(shard_blocks(model), reference, batches(3, (8, 7)))


@on_ranks(2, device="pretend")
def test_the_memory_on_the_cpu_is_given_up():
    model = mlp()
    storages = [weakref.ref(param.untyped_storage()) for param in model.parameters()]
    shard_blocks(model)
    gc.collect()
    assert [reference for reference in storages if reference() is not None] == []


@on_ranks(2, device="pretend")
def test_parameters_with_extensions_are_moved_as_well():
    model = shard_blocks(wrap_weights(mlp(), RowInt8))
    assert devices_of(model) == {"pretend"}
    model(batches(1, (4, 7))[0]).square().mean().backward()
    assert devices_of(model) == {"pretend"}


@on_ranks(2, device="pretend")
def test_a_copy_and_a_state_dict_of_the_cpu_stay_on_the_device():
    model = shard_blocks(mlp())
    twin = copy.deepcopy(model)
    whole = {name: value.full_tensor().cpu() for name, value in model.state_dict().items()}
    twin.load_state_dict(whole)
    assert devices_of(twin) == {"pretend"}
    assert all(torch.equal(value.full_tensor().cpu(), whole[name]) for name, value in twin.state_dict().items())


@on_ranks(2, device="pretend")
def test_under_offload_the_shards_stay_on_the_host_and_are_computed_with_on_the_device():
    model = shard_blocks(watched(), offload_policy=fsdp2.CPUOffloadPolicy())
    assert {param.device.type for param in model.parameters()} == {"cpu"}
    assert all(param.to_local().is_pinned() for param in model.parameters() if param.numel() > 1)
    assert {buffer.device.type for buffer in model.buffers()} == {"pretend"}
    model(batches(1, (4, 7))[0]).square().mean().backward()
    assert model.seen == {"pretend"}
    assert {param.grad.device.type for param in model.parameters() if param.grad is not None} == {"cpu"}
    pretend.synchronize()


@on_ranks(2, device="pretend")
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "shards"])
def test_values_of_the_cpu_that_were_assigned_are_refused_before_the_first_gather_until_they_are_moved(whole):
    values = {name: value.cpu() for name, value in (mlp() if whole else shard_blocks(mlp())).state_dict().items()}
    with torch.device("meta"):
        model = shard_blocks(mlp())
    model.load_state_dict(values, assign=True)
    x = batches(1, (4, 7))[0]
    pretend.reset_counts()
    with pytest.raises(fsdp2.MaterializationError, match="storage on pretend:0") as raised:
        model(x)
    assert "first.weight on cpu" in str(raised.value)
    assert pretend.launches() == {}
    model.to("pretend")
    model(x).square().mean().backward()
    assert devices_of(model) == {"pretend"}
