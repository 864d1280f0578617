"""When parameters are freed and gathered again changes memory and time, never a number."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp2 import FSDPModule, fully_shard
from harness import cpu_mesh, on_ranks
from harness.models import batches, mlp, token_batches, transformer
from harness.sharding import with_reference
from harness.training import (
    assert_same_bits,
    assert_same_tensors,
    assert_trains_bitwise_as,
    fed_in_chunks,
    fed_own_chunk,
    forced,
    forward_backward,
    own_chunk,
    state_of,
)


def shard(model: nn.Module, blocks: bool | int | None = None, root: bool | int | None = None) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, mesh=cpu_mesh(), reshard_after_forward=blocks)
    return fully_shard(model, mesh=cpu_mesh(), reshard_after_forward=root)


def is_sharded(module: nn.Module) -> bool:
    kinds = {isinstance(param, DTensor) for param in module.parameters(recurse=False)}
    assert len(kinds) == 1
    return kinds.pop()


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("root", [True, False, None])
@pytest.mark.parametrize("blocks", [True, False, None])
def test_every_reshard_after_forward_gives_the_same_numbers(blocks, root):
    model, reference = with_reference(mlp(), shard, blocks, root)
    assert_trains_bitwise_as(model, reference, batches())


@on_ranks(4)
@pytest.mark.parametrize(
    ("gather", "blocks", "root"),
    [("direct", 2, None), ("packed", 2, 2), ("mixed", 2, 2), ("packed", 2, None), ("packed", 1, None), ("packed", 4, 2)],
)
def test_resharding_to_fewer_ranks_gives_the_same_numbers(gather, blocks, root):
    model, reference = with_reference(mlp(dim=12))
    with forced(gather=gather):
        shard(model, blocks, root)
    assert_trains_bitwise_as(model, reference, batches())


@on_ranks(4)
def test_parameters_are_sharded_over_fewer_ranks_between_forward_and_backward():
    model = shard(mlp(dim=12), blocks=2)
    whole = model.blocks[0].up.weight.full_tensor()
    loss = model(own_chunk(batches()[0])).square().mean()
    between = model.blocks[0].up.weight
    assert isinstance(between, DTensor)
    assert between.device_mesh.size(-1) == 2
    assert between.to_local().shape == (8 if torch.distributed.get_rank() % 2 == 0 else 7, 12)  # 15 rows over 2 ranks
    assert_same_tensors({"weight": between.full_tensor()}, {"weight": whole}, "value")
    loss.backward()
    assert model.blocks[0].up.weight.device_mesh.size() == 4


@on_ranks(2, 3)
def test_set_reshard_after_forward_holds_from_the_next_forward_on():
    model, reference = with_reference(mlp(), shard)
    kept = []

    def iteration(model: nn.Module, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        if isinstance(model, FSDPModule):
            kept.append((is_sharded(model.blocks[0]), is_sharded(model.blocks[1])))
        loss.backward()
        if isinstance(model, FSDPModule):
            model.blocks[1].set_reshard_after_forward(len(kept) % 2 == 0)
        return loss

    assert_trains_bitwise_as(model, reference, batches(3), iteration=iteration)
    assert kept == [(True, True), (True, False), (True, True)]


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("root", [True, False, None])
def test_an_evaluation_without_grad_in_between_changes_nothing(root):
    model, reference = with_reference(mlp(), shard, root=root)
    evaluated: dict[bool, list[Tensor]] = {True: [], False: []}
    is_ours = False

    def iteration(model: nn.Module, x: Tensor) -> Tensor:
        held_out = batches(1, seed=9)[0]
        with torch.no_grad():
            evaluated[is_ours].append(model(held_out))
        if is_ours and root is not False:
            assert is_sharded(model.first)
        loss = forward_backward(model, x)
        model.eval()
        with torch.inference_mode():
            evaluated[is_ours].append(model(held_out).clone())
        model.train()
        if is_ours and root is False:
            model.reshard()  # asked to keep them, it does until a backward
        return loss

    reference_steps = fed_in_chunks(reference, batches(), iteration=iteration)
    is_ours = True
    assert_same_bits(fed_own_chunk(model, batches(), iteration=iteration), reference_steps)
    own = evaluated[False][torch.distributed.get_rank() * 2 :: torch.distributed.get_world_size() * 2]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(evaluated[True][::2], own, strict=True))


@on_ranks(1, 2, 3)
def test_a_forward_without_grad_leaves_everything_sharded_for_the_optimizer():
    model = shard(mlp())
    before = state_of(model)
    with torch.no_grad():
        model(own_chunk(batches()[0]))
    for module in (model.first, *model.blocks, model.last):
        assert is_sharded(module)
    assert_same_tensors(state_of(model), before, "value")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    forward_backward(model, own_chunk(batches()[0]))
    optimizer.step()
    changed = [name for name, value in state_of(model).items() if not torch.equal(value.to_local(), before[name].to_local())]
    assert changed


@on_ranks(1, 2, 3)
def test_unsharding_by_hand_changes_nothing():
    model, reference = with_reference(transformer(), shard)

    def iteration(model: nn.Module, x: Tensor) -> Tensor:
        if isinstance(model, FSDPModule):
            handles = [block.unshard(async_op=True) for block in model.blocks]
            model.unshard()
            assert not is_sharded(model.norm)
            handles[0].wait()
            handles[0].wait()
            assert not is_sharded(model.blocks[0].mlp.norm)  # the other is waited for by its forward
        loss = forward_backward(model, x)
        if isinstance(model, FSDPModule):
            model.blocks[0].unshard()
            model.blocks[0].reshard()
            model.blocks[1].unshard(async_op=True)
            model.blocks[1].reshard()
            assert is_sharded(model.blocks[1].mlp.norm)
            model.reshard()
        return loss

    assert_trains_bitwise_as(model, reference, token_batches(), iteration=iteration)


@on_ranks(2, 3)  # a single rank's shard is the unsharded parameter
@pytest.mark.parametrize("gather", ["direct", "packed"])
def test_a_shard_written_between_unshard_and_wait_is_gathered_as_it_was(gather):
    """A gather that sends the shard itself would send what is written later: measured, 99 % of the elements."""
    model = nn.Linear(60, 600)
    whole = model.weight.detach().clone()
    with forced(gather=gather):
        fully_shard(model, mesh=cpu_mesh())
    sharded = model.weight
    handle = model.unshard(async_op=True)
    with torch.no_grad():
        sharded.to_local().fill_(7.0)
    torch.distributed.barrier()
    handle.wait()
    assert torch.equal(model.weight, whole)
    model.reshard()
    model.unshard()
    assert torch.equal(model.weight, torch.full_like(whole, 7.0))
    model.reshard()


@on_ranks(1, 2, 3)
def test_unsharded_parameters_are_those_of_the_whole_model():
    model, whole = with_reference(mlp(), shard)
    for ours, theirs in zip([*model.blocks, model], [*whole.blocks, whole], strict=True):
        ours.unshard()
        for (name, param), (_, expected) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
            if ours is not model or not name.startswith("blocks"):
                assert type(param) is nn.Parameter
                assert torch.equal(param, expected)
                assert param.stride() == expected.stride()
        ours.reshard()


@on_ranks(2, 3)
def test_a_parameter_written_while_unsharded_is_forgotten_by_reshard():
    model = shard(mlp())
    before = state_of(model)
    model.unshard()
    with torch.no_grad():
        model.first.weight.fill_(3.0)
    model.reshard()
    assert_same_tensors(state_of(model), before, "value")


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_keeping_parameters_after_backward_serves_all_micro_batches(reshard_after_forward):
    """set_reshard_after_backward(False) together with accumulation without communication."""
    model, reference = with_reference(mlp(), shard, reshard_after_forward, reshard_after_forward)

    def iteration(model: nn.Module, x: Tensor) -> Tensor:
        losses = []
        for index, micro_batch in enumerate(x.chunk(2)):
            is_last = index == 1
            if isinstance(model, FSDPModule):
                model.set_reshard_after_backward(is_last)
                model.set_requires_gradient_sync(is_last)
            losses.append(forward_backward(model, micro_batch))
            if isinstance(model, FSDPModule):
                assert is_sharded(model.blocks[0]) == is_last
                assert is_sharded(model.first) == is_last
        return torch.stack(losses).mean()

    assert_trains_bitwise_as(model, reference, batches(), iteration=iteration)
