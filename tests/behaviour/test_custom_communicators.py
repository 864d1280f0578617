"""A custom communicator sees from us what it sees from torch's FSDP2: the same calls in the same order, sizes, aliasing, async_op."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchMixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather as TorchAllGather
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter as TorchReduceScatter

from fsdp2 import MixedPrecisionPolicy, fully_shard
from fsdp2.errors import OrderError
from fsdp2.policy import AllGather, ReduceScatter
from fsdp2.torch_names import torch_collectives
from harness import cpu_mesh, needs_torch, on_ranks
from harness.models import batches, mlp
from harness.sharding import shard_blocks, with_reference
from harness.training import (
    assert_equal_training,
    assert_same_tensors,
    assert_trains_as,
    fed_in_chunks,
    fed_own_chunk,
    forward_backward,
    grads_of,
    own_chunk,
)


class Recorder:
    """Allocates and communicates in the plainest way, and writes down what it is asked for."""

    def __init__(self, log: list[Any], name: str) -> None:
        self.log = log
        self.name = name
        self.buffers: list[Tensor] = []

    def allocate(self, size, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.log.append((self.name, "allocate", tuple(size), dtype, device.type))
        self.buffers.append(torch.empty(*size, dtype=dtype, device=device))
        return self.buffers[-1]

    def about(self, tensor: Tensor) -> Any:
        """Its size, dtype, and where it lies in which of the buffers that were allocated last."""
        for age, buffer in enumerate(reversed(self.buffers[-2:])):
            if buffer.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
                return tuple(tensor.shape), tensor.dtype, tensor.is_contiguous(), f"buffer -{age + 1} from {tensor.storage_offset()}"
        return tuple(tensor.shape), tensor.dtype, tensor.is_contiguous(), "not allocated here"


class Gather(Recorder):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False):
        self.log.append((self.name, "call", self.about(output_tensor), self.about(input_tensor), group.size(), async_op))
        return torch_collectives.all_gather_single(output_tensor, input_tensor, group, async_op)


class Scatter(Recorder):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False):
        self.log.append((self.name, "call", self.about(output_tensor), self.about(input_tensor), group.size(), str(op), async_op))
        return torch_collectives.reduce_scatter_single(output_tensor, input_tensor, op, group, async_op)


class OurGather(Gather, AllGather): ...


class OurScatter(Scatter, ReduceScatter): ...


class TheirGather(Gather, TorchAllGather): ...


class TheirScatter(Scatter, TorchReduceScatter): ...


class Partly(nn.Module):
    """A block of which a part may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(10, 10), nn.Linear(10, 10, bias=False)
        self.use_two = True

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.two(self.one(x)) if self.use_two else self.one(x))


def make(fully_shard, policy, gather, scatter, log: list[Any]) -> nn.Module:
    torch.manual_seed(0)
    model = mlp(num_blocks=2)
    model.blocks.append(Partly())
    for index, module in enumerate((*model.blocks, model)):
        fully_shard(module, mesh=cpu_mesh(), mp_policy=policy)
        module.set_custom_all_gather(gather(log, f"gather {index}"))
        module.set_custom_reduce_scatter(scatter(log, f"scatter {index}"))
    return model


def plain(model: nn.Module, x: Tensor) -> None:
    forward_backward(model, x)


def unused(model: nn.Module, x: Tensor) -> None:
    model.blocks[2].use_two = False
    forward_backward(model, x)


def unused_are_reduced(model: nn.Module, x: Tensor) -> None:
    model.set_reduce_scatter_unused_params(True)
    unused(model, x)


def unsharded_by_hand(model: nn.Module, x: Tensor) -> None:
    handle = model.blocks[1].unshard(async_op=True)
    model.blocks[2].unshard()
    handle.wait()
    forward_backward(model, x)


def accumulated(model: nn.Module, x: Tensor) -> None:
    model.set_requires_gradient_sync(False)
    forward_backward(model, x)
    model.set_requires_gradient_sync(True)
    forward_backward(model, x)


def frozen(model: nn.Module, x: Tensor) -> None:
    model.blocks[0].up.requires_grad_(False)
    forward_backward(model, x)


def divided(model: nn.Module, x: Tensor) -> None:
    for module in (*model.blocks, model):
        module.set_force_sum_reduction_for_comms(True)
    model.blocks[0].set_gradient_divide_factor(3.0)
    forward_backward(model, x)


POLICIES = {
    "fp32": {},
    "mixed": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    "fp16": {"reduce_dtype": torch.float16},
}


def assert_same_calls(ours: list[Any], theirs: list[Any]) -> None:
    for index, (our, their) in enumerate(zip(ours, theirs, strict=False)):
        assert our == their, f"call {index}, after {ours[max(index - 3, 0) : index]}"
    assert len(ours) == len(theirs)


@on_ranks(2)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "iteration",
    [
        plain,
        unused,
        pytest.param(unused_are_reduced, marks=needs_torch("2.13", "set_reduce_scatter_unused_params")),
        unsharded_by_hand,
        accumulated,
        frozen,
        divided,
    ],
)
def test_the_same_calls_as_from_upstream(iteration, policy):
    ours: list[Any] = []
    theirs: list[Any] = []
    model = make(fully_shard, MixedPrecisionPolicy(**POLICIES[policy]), OurGather, OurScatter, ours)
    upstream = make(torch_fully_shard, TorchMixedPrecisionPolicy(**POLICIES[policy]), TheirGather, TheirScatter, theirs)
    for x in batches(2):
        iteration(model, own_chunk(x))
        iteration(upstream, own_chunk(x))
        assert_same_calls(ours, theirs)
        if policy == "fp16":  # parameters lie in another order, and where one lies decides the order in which gloo adds three
            for ours_now, theirs_now in zip(model.parameters(), upstream.parameters(), strict=True):
                torch.testing.assert_close(ours_now.grad, theirs_now.grad, rtol=1e-2, atol=1e-6)
        else:
            assert_same_tensors(grads_of(model), grads_of(upstream), "gradient")


@on_ranks(2, 3)
def test_training_through_a_custom_communicator():
    model, reference = with_reference(mlp())
    log: list[Any] = []
    for module in (*model.blocks, model):
        fully_shard(module, mesh=cpu_mesh())
        module.set_custom_all_gather(OurGather(log, ""))
        module.set_custom_reduce_scatter(OurScatter(log, ""))
    assert_trains_as(model, reference, batches())


class Pooled:
    """Allocates in the middle of a larger buffer, as a communicator with a pool of its own does."""

    def allocate(self, size, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        numel = torch.Size(size).numel()
        return torch.full((numel + 96,), torch.nan, dtype=dtype, device=device)[64 : 64 + numel].view(size)


class PooledGather(Pooled, OurGather): ...


class PooledScatter(Pooled, OurScatter): ...


@on_ranks(2)
@pytest.mark.parametrize(("gather", "scatter"), [(PooledGather, OurScatter), (OurGather, PooledScatter)])
def test_buffers_of_a_communicator_may_lie_in_a_larger_one(gather, scatter):
    """Gradients were read from where the larger buffer begins."""
    model, reference = with_reference(mlp())
    for module in (*model.blocks, model):
        fully_shard(module, mesh=cpu_mesh())
        module.set_custom_all_gather(gather([], ""))
        module.set_custom_reduce_scatter(scatter([], ""))
    assert_trains_as(model, reference, batches(2))


@on_ranks(4)
@pytest.mark.parametrize("policy", POLICIES)
def test_replicas_of_shards_through_a_custom_reduce_scatter(policy):
    """It is told to average, and gloo, which all-reduces between the replicas, knows sums only.

    Symptom: AssertionError in the all-reduce of small buffers. Smallest shape: a (2, 2) mesh, and any module.
    """
    model, reference = with_reference(mlp(), shard_blocks, mesh=cpu_mesh(2, 2), mp_policy=MixedPrecisionPolicy(**POLICIES[policy]))
    without = copy.deepcopy(model)
    log: list[Any] = []
    for module in (*model.blocks, model):
        module.set_custom_reduce_scatter(OurScatter(log, ""))
    steps = fed_own_chunk(model, batches(1))
    assert {str(entry[5]) for entry in log if entry[1] == "call"} == {"RedOpType.SUM" if policy == "fp16" else "RedOpType.AVG"}
    if policy == "fp32":
        assert_equal_training(steps, fed_in_chunks(reference, batches(1)))
    else:  # of low precision only the order of additions differs from what goes through no communicator
        assert_equal_training(steps, fed_own_chunk(without, batches(1)), ulps=2.0**16, bound=1e-3)


@on_ranks(2)
def test_replicas_alone_never_come_to_a_custom_reduce_scatter():
    model, reference = with_reference(mlp())
    log: list[Any] = []
    for module in (*model.blocks, model):
        fully_shard(module, mesh=cpu_mesh(2, 1))
        module.set_custom_reduce_scatter(OurScatter(log, ""))
    assert_trains_as(model, reference, batches(2))
    assert log == []


class GroupOf(Scatter):
    """Writes down over which process group it is asked to reduce."""

    def __init__(self, log: list[Any], name: str) -> None:
        super().__init__(log, name)
        self.groups: list[dist.ProcessGroup] = []

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False):
        self.groups.append(group)
        return torch_collectives.reduce_scatter_single(output_tensor, input_tensor, op, group, async_op)


class OurGroupOf(GroupOf, ReduceScatter): ...


class TheirGroupOf(GroupOf, TorchReduceScatter): ...


@on_ranks(2)
@pytest.mark.parametrize(
    "apply", [fully_shard, pytest.param(torch_fully_shard, marks=needs_torch("2.13", "set_separate_reduce_scatter_group"))]
)
def test_a_custom_reduce_scatter_is_given_the_process_group_that_reduce_scatters_have(apply):
    comm = (OurGroupOf if apply is fully_shard else TheirGroupOf)([], "")
    model = nn.Linear(4, 4)
    apply(model, mesh=cpu_mesh())
    model.set_custom_reduce_scatter(comm)
    gathers = cpu_mesh().get_group()
    for separate in (False, True, False):
        model.set_separate_reduce_scatter_group(separate)
        forward_backward(model, torch.ones(2, 4))
        group = comm.groups.pop()
        assert not comm.groups
        assert (group is not gathers) == separate
        assert dist.get_process_group_ranks(group) == [0, 1]


@on_ranks(2)
@pytest.mark.parametrize("separate_first", [True, False])
def test_memory_of_process_groups_is_that_of_the_group_that_communicates(separate_first):
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=cpu_mesh())
    asked: list[dist.ProcessGroup] = []

    def empty(group: dist.ProcessGroup, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        asked.append(group)
        return torch.empty(numel, dtype=dtype, device=device)

    with (
        mock.patch.object(torch_collectives, "process_group_allocates", return_value=True),
        mock.patch.object(torch_collectives, "process_group_empty", empty),
    ):
        if separate_first:
            model.set_separate_reduce_scatter_group()
        model.set_allocate_memory_from_process_group_for_comm(True)
        model.set_separate_reduce_scatter_group()
        forward_backward(model, torch.ones(2, 4))
        gathers, *scatters = asked
        assert gathers is cpu_mesh().get_group()
        assert len(set(scatters)) == 1
        assert scatters[0] is not gathers
        model.set_separate_reduce_scatter_group(False)
        asked.clear()
        forward_backward(model, torch.ones(2, 4))
        assert set(asked) == {gathers}


@on_ranks(2)
def test_freezing_in_the_middle_of_an_accumulation_is_refused_with_a_custom_reduce_scatter():
    """It is shown buffers without gaps and flags, which are not laid out anew."""
    model = make(fully_shard, MixedPrecisionPolicy(), OurGather, OurScatter, [])
    model.set_requires_gradient_sync(False)
    model(batches(1)[0]).sum().backward()
    model.first.bias.requires_grad_(False)
    with pytest.raises(OrderError, match=r"(?s)requires_grad.*accumulate without sync.*fix:"):
        model(batches(1)[0]).sum().backward()
