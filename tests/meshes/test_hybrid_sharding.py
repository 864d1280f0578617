"""HSDP in depth: equal to DDP, partial accumulation, hooks, reduce dtypes, uneven shards."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from fsdp2 import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from harness import cpu_mesh, device_type, on_ranks
from harness.models import MLP, batches, mlp, token_batches, transformer
from harness.on_pretend import among_two
from harness.sharding import with_reference
from harness.training import assert_equal_grads, assert_equal_training, fed_own_chunk, fed_whole, forced, grads_of, own_chunk

SHAPES = [(2, 2), *(pytest.param(shape, marks=pytest.mark.slow) for shape in ((4, 1), (1, 4)))]


class UpstreamMLP(MLP):
    """For torch's fully_shard, which remembers one class for each that it saw, ours included."""


def shard(model: nn.Module, shape: tuple[int, int], apply: object = fully_shard, **options: object) -> None:
    among_two(*shape)
    for block in model.blocks:
        apply(block, mesh=cpu_mesh(*shape), **options)
    apply(model, mesh=cpu_mesh(*shape), **options)


def backward(model: nn.Module, x: Tensor) -> None:
    model(x).square().mean().backward()


@on_ranks(4)
@pytest.mark.parametrize("after", [None, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_training_equals_ddp_and_the_unsharded_model(shape, after):
    model = mlp()
    whole, replicated = copy.deepcopy(model), copy.deepcopy(model)
    ddp = DistributedDataParallel(replicated)
    shard(model, shape, reshard_after_forward=after)
    assert model.blocks[0].up.weight.placements == (Replicate(), Shard(0))
    steps = fed_own_chunk(model, batches(3))
    assert_equal_training(steps, fed_whole(whole, batches(3)))
    fed_own_chunk(ddp, batches(3))
    for (name, ours), theirs in zip(model.named_parameters(), replicated.parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor().cpu(), theirs.data, atol=1e-6, rtol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@on_ranks(4)
@pytest.mark.slow
@pytest.mark.parametrize("all_reduce", ["stock", "all_gather"])
@pytest.mark.parametrize("reduce_scatter", ["stock", "all_to_all", "pairwise", "all_reduce"])
def test_every_algorithm_gives_the_gradients_of_the_unsharded_model(reduce_scatter, all_reduce):
    model, whole = with_reference(mlp())
    with forced(reduce_scatter=reduce_scatter, all_reduce=all_reduce):
        shard(model, (2, 2))
    assert_equal_training(fed_own_chunk(model, batches(2)), fed_whole(whole, batches(2)))


@on_ranks(4)
def test_all_ranks_of_a_replica_hold_the_same_bits():
    model = transformer(tied=True)
    shard(model, (2, 2))
    fed_own_chunk(model, token_batches(3))
    group = cpu_mesh(2, 2).get_group(0)
    for name, param in model.named_parameters():
        mine = param.to_local()
        others = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(others, mine.contiguous(), group=group)
        assert torch.equal(others[0], others[1]), name


@on_ranks(4)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "syncs",
    [
        ((True, False), (True, False), (True, True)),
        ((False, False), (True, False), (True, True)),
        ((True, False), (False, False), (True, True)),
        ((True, True), (True, False), (True, True)),
        ((False, False), (False, False), (True, True)),
    ],
    ids=["partial", "local_partial", "partial_local", "again", "local"],
)
def test_accumulation_by_every_order_of_the_two_switches(syncs, shape):
    """Each micro-batch: (reduce-scatter?, all-reduce?)."""
    model, reference = with_reference(mlp(), shard, shape)
    for step in range(2):
        for (sync, all_reduce), x in zip(syncs, batches(3, seed=step), strict=True):
            model.set_requires_gradient_sync(sync)
            model.set_requires_all_reduce(all_reduce)
            backward(model, own_chunk(x))
            backward(reference, x)
        assert_equal_grads(grads_of(model), grads_of(reference), ulps=32)
        model.zero_grad()
        reference.zero_grad()


@on_ranks(4)
def test_no_gradient_is_shown_while_it_is_partial():
    model = mlp()
    shard(model, (2, 2))
    model.set_requires_all_reduce(False)
    backward(model, own_chunk(batches(1)[0]))
    assert all(param.grad is None for param in model.parameters())
    model.reset_iter_state()
    model.set_requires_all_reduce(True)
    reference = mlp()
    backward(reference, batches(1)[0])
    backward(model, own_chunk(batches(1)[0]))
    assert_equal_grads(grads_of(model), grads_of(reference))


@on_ranks(4)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16], ids=str)
def test_dtypes_of_parameters_and_reduction_as_in_torch_fsdp2(param_dtype, reduce_dtype, shape):
    ours, reference = mlp(), mlp()
    torch.manual_seed(0)
    theirs = UpstreamMLP().to(device_type())
    shard(ours, shape, mp_policy=MixedPrecisionPolicy(param_dtype, reduce_dtype))
    shard(theirs, shape, apply=torch_fully_shard, mp_policy=TorchPolicy(param_dtype, reduce_dtype))
    for index, x in enumerate(batches(2)):
        for model in (ours, theirs):
            model.set_requires_all_reduce(index == 1)
            backward(model, own_chunk(x))
        backward(reference, x)
    exact = param_dtype is None and reduce_dtype in (None, torch.float32)
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert a.grad.dtype == b.grad.dtype == torch.float32
        bound = 1e-6 if exact else 2e-2 * max(b.grad.full_tensor().abs().max().item(), 0.01)
        torch.testing.assert_close(a.grad.to_local(), b.grad.to_local(), atol=bound, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
        if not exact:
            truth = reference.get_parameter(name).grad
            bound = 0.05 * max(truth.abs().max().item(), 0.02)
            torch.testing.assert_close(a.grad.full_tensor().cpu(), truth, atol=bound, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


@on_ranks(4)
@pytest.mark.parametrize("shape", [(2, 2), (4,)], ids=str)
@pytest.mark.parametrize("reduce_dtype", [None, torch.float64], ids=str)
def test_the_hook_sees_reduced_gradients_once_a_backward_and_may_change_them(shape, reduce_dtype):
    among_two(*shape)
    model, reference = with_reference(mlp())
    for block in model.blocks:
        fully_shard(block, mesh=cpu_mesh(*shape), mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
    fully_shard(model, mesh=cpu_mesh(*shape))
    seen: list[Tensor] = []

    def double(reduced: Tensor) -> None:
        seen.append(reduced.clone())
        reduced.mul_(2)

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_all_reduce_hook(double)
    for micro_batch in range(2):
        model.set_requires_gradient_sync(micro_batch == 1)
        backward(model, own_chunk(batches(1)[0]))
        backward(reference, batches(1)[0])
    assert len(seen) == 4
    assert all(each.ndim == 1 for each in seen)
    assert [each.dtype for each in seen].count(reduce_dtype or torch.float32) >= 3
    expected = {name: 2 * param.grad for name, param in reference.named_parameters()}
    assert_equal_grads(grads_of(model), expected, ulps=64)


@on_ranks(4)
def test_the_hook_runs_after_partial_gradients_are_whole():
    model, reference = with_reference(mlp(), fully_shard, mesh=cpu_mesh(2, 2))
    calls = []
    model.set_all_reduce_hook(lambda reduced: calls.append(reduced.sum().item()))
    for micro_batch, x in enumerate(batches(3)):
        model.set_requires_all_reduce(micro_batch == 2)
        backward(model, own_chunk(x))
        backward(reference, x)
        assert len(calls) == (micro_batch == 2)
    assert_equal_grads(grads_of(model), grads_of(reference), ulps=32)


@on_ranks(4)
def test_a_hook_that_reduces_over_ranks_outside_the_mesh_makes_hsdp_of_fsdp():
    """What the hook is for: replication that fully_shard is not told of."""
    model, reference = with_reference(mlp())
    grid = cpu_mesh(2, 2)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=grid["shard"])
        module.set_all_reduce_hook(lambda reduced: dist.all_reduce(reduced.div_(2), group=grid.get_group("replicate")))
    backward(model, own_chunk(batches(1)[0]))
    backward(reference, batches(1)[0])
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor().cpu(), theirs.grad, atol=1e-6, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@on_ranks(4)
@pytest.mark.parametrize("offload", [False, True])
def test_clipping_and_a_divide_factor(offload):
    model = mlp()
    reference: MLP = copy.deepcopy(model)
    options = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if offload else {}
    shard(model, (2, 2), **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(2.0)
    backward(model, own_chunk(batches(1)[0]))
    backward(reference, batches(1)[0])
    for param in reference.parameters():
        param.grad.mul_(2)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    torch.testing.assert_close(norm.full_tensor().cpu(), nn.utils.clip_grad_norm_(reference.parameters(), 0.1))
    assert_equal_grads(grads_of(model), grads_of(reference), ulps=32)
