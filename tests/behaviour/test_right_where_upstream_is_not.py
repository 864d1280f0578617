"""Where torch's FSDP2 (2.13) loses gradients, uses stale values or fails, and this one must not.

Each test says what upstream does; where that is cheap and does not hang, it runs upstream too, so that we notice when it changes.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import fsdp2
from fsdp2 import CPUOffloadPolicy, fully_shard, share_comm_ctx
from fsdp2.errors import MaterializationError, OrderError
from harness import cpu_mesh, on_ranks
from harness.models import batches, mlp, token_batches, transformer
from harness.sharding import shard_blocks, with_reference
from harness.training import (
    adamw_foreach,
    adamw_one_by_one,
    assert_equal_grads,
    assert_equal_training,
    assert_same_bits,
    assert_same_tensors,
    assert_trains_bitwise_as,
    fed_in_chunks,
    fed_own_chunk,
    forward_backward,
    grads_of,
    own_chunk,
    state_of,
)


def evaluate(model: nn.Module, how: str, x: Tensor) -> None:
    if how == "with grad":
        model(x)
    else:
        with torch.no_grad() if how == "no_grad" else torch.inference_mode():
            model(x)


# --- between a forward and what follows ---------------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("after", [True, False, None])
@pytest.mark.parametrize("how", ["no_grad", "inference", "with grad"])
def test_zero_grad_right_after_an_evaluation_forgets_every_gradient(how, after):
    """Upstream shows the root's unsharded parameters then, whose gradients are None: the sharded ones stay and are added to."""
    model, reference = with_reference(mlp(), shard_blocks, after)
    x = own_chunk(batches()[0])
    forward_backward(model, x)
    evaluate(model, how, x)
    model.zero_grad()
    model.reshard()
    assert_trains_bitwise_as(model, reference, batches())


@on_ranks(2)
def test_upstream_zero_grad_after_an_evaluation_misses_the_root():
    model = shard_blocks(mlp(), fully_shard=torch_fully_shard)
    x = own_chunk(batches()[0])
    forward_backward(model, x)
    evaluate(model, "no_grad", x)
    model.zero_grad()
    model.reshard()
    assert model.first.weight.grad is not None


@on_ranks(2)
@pytest.mark.parametrize("after", [True, False, None])
@pytest.mark.parametrize("how", ["no_grad", "inference", "with grad"])
def test_clipping_right_after_an_evaluation_counts_every_gradient(how, after):
    model, reference = with_reference(mlp(), shard_blocks, after)
    forward_backward(model, own_chunk(batches()[0]))
    for chunk in batches()[0].chunk(2):
        (reference(chunk).square().mean() / 2).backward()
    evaluate(model, how, own_chunk(batches()[0]))
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
    torch.testing.assert_close(norm.full_tensor(), expected)
    for name, grad in grads_of(model).items():
        torch.testing.assert_close(grad.full_tensor(), reference.get_parameter(name).grad, msg=name)


@on_ranks(2)
@pytest.mark.parametrize("after", [True, False, None])
def test_gradients_are_found_between_a_forward_and_its_backward(after):
    """Symptom: clipping missed the root's gradients, because the second forward had unsharded its parameters."""
    model, reference = with_reference(mlp(), shard_blocks, after)
    first, second = batches(2)
    forward_backward(model, own_chunk(first))
    loss = model(own_chunk(second)).square().mean()
    norm = fsdp2.clip_grad_norm_(model.parameters(), 0.01)
    loss.backward()
    (sum(reference(chunk).square().mean() for chunk in first.chunk(2)) / 2).backward()
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.01))
    (sum(reference(chunk).square().mean() for chunk in second.chunk(2)) / 2).backward()
    for name, grad in grads_of(model).items():
        torch.testing.assert_close(grad.full_tensor(), reference.get_parameter(name).grad, msg=name)


@on_ranks(2)
def test_parameters_are_unsharded_while_a_backward_may_follow():
    model, reference = shard_blocks(mlp(), False), mlp()
    x = batches()[0]
    for _ in range(2):
        found = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
        expected = torch.autograd.grad(reference(x).square().mean(), list(reference.parameters()))
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs)


LOOKS = {
    "parameters": lambda model: list(model.parameters()),
    "state_dict": lambda model: model.state_dict(),
}


@on_ranks(2, timeout=30)
@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("after", [False, None, 1])
def test_one_rank_may_look_at_the_model_in_the_middle_of_a_step(after, look):
    """Symptom: a hang, for the rank that looked gathered again what the others still had."""
    model, reference = shard_blocks(mlp(), after), mlp()
    reference_steps = fed_in_chunks(reference, batches(), iteration=forward_and_backward_twice)

    def iteration(model: nn.Module, x: Tensor) -> Tensor:
        return forward_and_backward_twice(model, x, between=LOOKS[look] if dist.get_rank() == 0 else None)

    assert_equal_training(fed_own_chunk(model, batches(), iteration=iteration), reference_steps)


def forward_and_backward_twice(model: nn.Module, x: Tensor, between=None) -> Tensor:
    """So that there are gradients at the second forward."""
    forward_backward(model, x)
    loss = model(x).square().mean()
    if between is not None:
        between(model)
    loss.backward()
    return loss


@on_ranks(2)
def test_clipping_parameters_that_were_listed_unsharded_scales_the_sharded_gradients():
    model = shard_blocks(mlp())
    forward_backward(model, own_chunk(batches()[0]))
    model.unshard()
    listed = list(model.parameters())
    assert type(model.first.weight) is torch.nn.Parameter  # as asked for, though there are gradients
    grads = {name: grad.full_tensor() for name, grad in grads_of(model.blocks[0]).items()}
    model.reshard()
    norm = fsdp2.clip_grad_norm_(listed, 0.01)
    torch.testing.assert_close(norm, fsdp2.get_total_norm(grads_of(model).values()) * norm / 0.01, rtol=1e-3, atol=0)
    for name, grad in grads_of(model.blocks[0]).items():
        torch.testing.assert_close(grad.full_tensor(), grads[name] * 0.01 / (norm + 1e-6), msg=name)


@on_ranks(2)
@pytest.mark.parametrize("after", [True, False, None])
@pytest.mark.parametrize("how", ["no_grad", "with grad"])
def test_an_optimizer_that_is_built_right_after_an_evaluation_trains_every_parameter(how, after):
    """Upstream gives it unsharded parameters, which never get a gradient: it leaves them as they are, in silence."""
    model, reference = with_reference(mlp(), shard_blocks, after)
    evaluate(model, how, own_chunk(batches()[0]))
    optimizer = adamw_foreach(model.parameters())
    model.reshard()
    steps = fed_own_chunk(model, batches(), optimizer=optimizer)
    assert_same_bits(steps, fed_in_chunks(reference, batches(), adamw_foreach))
    assert all(isinstance(param, DTensor) for param in optimizer.param_groups[0]["params"])


@on_ranks(2)
def test_an_optimizer_that_was_built_before_fully_shard_gets_the_sharded_parameters():
    model, reference = with_reference(mlp())
    optimizer = torch.optim.AdamW([{"params": [p for n, p in model.named_parameters() if "bias" in n], "weight_decay": 0.0}], lr=0.01)
    optimizer.add_param_group({"params": [p for n, p in model.named_parameters() if "bias" not in n]})
    shard_blocks(model)
    steps = fed_own_chunk(model, batches(), optimizer=optimizer)

    def same_groups(params) -> torch.optim.Optimizer:
        named = list(reference.named_parameters())
        biases = {"params": [p for n, p in named if "bias" in n], "weight_decay": 0.0}
        return torch.optim.AdamW([biases, {"params": [p for n, p in named if "bias" not in n]}], lr=0.01)

    assert_same_bits(steps, fed_in_chunks(reference, batches(), same_groups))


@on_ranks(2)
def test_an_optimizer_with_state_for_whole_parameters_is_refused():
    model = mlp()
    optimizer = adamw_one_by_one(model.parameters())
    forward_backward(model, batches()[0])
    optimizer.step()
    shard_blocks(model)
    forward_backward(model, own_chunk(batches()[0]))
    with pytest.raises(OrderError, match=r"first\.weight"):
        optimizer.step()


@on_ranks(2)
@pytest.mark.parametrize("optimizer", [adamw_foreach, adamw_one_by_one])
@pytest.mark.parametrize("after", [False, None])
def test_parameters_left_unsharded_are_not_stale_after_a_step(optimizer, after):
    """backward, evaluation with grad (the root stays unsharded), step, forward: upstream's forward uses the root's old values."""
    model, reference = with_reference(mlp(), shard_blocks, after)

    def step(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> Tensor:
        loss = forward_backward(model, x).detach()
        model(x)  # with grad, and no backward
        opt.step()
        opt.zero_grad()
        return loss

    opt, plain = optimizer(model.parameters()), optimizer(reference.parameters())
    for x in batches(4):
        losses = [step(model, opt, own_chunk(x))]
        expected = forward_backward_in_chunks(reference, x)
        plain.step()
        plain.zero_grad()
        torch.testing.assert_close(losses[0], expected)
    for module in (model, *model.blocks):
        module.reshard()
    for name, value in state_of(model).items():
        torch.testing.assert_close(value.full_tensor(), reference.get_parameter(name), msg=name)


def forward_backward_in_chunks(model: nn.Module, x: Tensor) -> Tensor:
    """The reference's gradients of the whole batch; returns the loss of this rank's chunk."""
    losses = []
    for chunk in x.chunk(torch.distributed.get_world_size()):
        loss = model(chunk).square().mean()
        (loss / torch.distributed.get_world_size()).backward()
        losses.append(loss.detach())
    return losses[dist.get_rank()]


@on_ranks(2)
def test_keeping_parameters_after_backward_over_a_step_is_not_stale():
    """``set_reshard_after_backward(False)``, as if for accumulation, but never switched back."""
    model, reference = with_reference(mlp())
    optimizer = adamw_foreach(shard_blocks(model).parameters())
    model.set_reshard_after_backward(False)
    plain = adamw_foreach(reference.parameters())
    for x in batches(4):
        loss = forward_backward(model, own_chunk(x)).detach()
        expected = forward_backward_in_chunks(reference, x)
        torch.testing.assert_close(loss, expected)
        for each in (optimizer, plain):
            each.step()
            each.zero_grad()


@on_ranks(2)
def test_what_a_forward_kept_and_the_next_one_skips_is_not_stale_in_the_one_after():
    """Symptom: only the first forward after it looked whether the parameters that an earlier one had kept were written since."""
    model, reference = with_reference(mlp(), shard_blocks, False)
    x = batches()[0]
    with torch.no_grad():
        assert torch.equal(model(x), reference(x))
        whole = [each.blocks for each in (model, reference)]
        for each, blocks in zip((model, reference), whole, strict=True):
            each.blocks = nn.ModuleList([blocks[0], blocks[2]])
        assert torch.equal(model(x), reference(x))
        for each, blocks in zip((model, reference), whole, strict=True):
            each.blocks = blocks
            for value in each.state_dict().values():
                value.mul_(0.5)
        assert torch.equal(model(x), reference(x))


@on_ranks(2)
@pytest.mark.parametrize("after", [True, None])
def test_a_tied_embedding_that_a_forward_with_grad_kept_is_not_stale(after):
    """Symptom: the root's own groups were looked at, not the embedding's, which the root holds as long."""
    model, reference = with_reference(transformer(tied=True))
    fully_shard(model.embedding, mesh=cpu_mesh())
    fully_shard(model, mesh=cpu_mesh(), reshard_after_forward=after)
    ids = token_batches()[0]
    for _ in range(2):
        assert torch.equal(model(ids), reference(ids))  # with grad, and no backward
        with torch.no_grad():
            for each in (model, reference):
                for value in each.state_dict().values():
                    value.mul_(0.5)
    with torch.no_grad():
        assert torch.equal(model(ids), reference(ids))


@on_ranks(2)
def test_a_write_between_unshard_and_forward_is_seen_by_the_forward():
    model = shard_blocks(mlp())
    x = own_chunk(batches()[0])
    parameters = list(model.parameters())
    model.unshard()
    handle = model.blocks[0].unshard(async_op=True)
    with torch.no_grad():
        for param in parameters:
            param.zero_()
    assert torch.equal(model(x), torch.zeros(len(x), 5))
    handle.wait()


@on_ranks(1, 2, 3)
def test_reshard_ends_a_pending_unshard_whose_values_nobody_sees():
    """Upstream drops nothing: the next forward uses what was gathered before the parameters changed."""
    model, reference = with_reference(mlp(), shard_blocks)

    def iteration(model: nn.Module, x: Tensor) -> Tensor:
        return forward_backward(model, x)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    for x in batches():
        handles = [module.unshard(async_op=True) for module in (model, *model.blocks)]
        for module in (model, *model.blocks):
            module.reshard()
        loss = iteration(model, own_chunk(x))
        torch.testing.assert_close(loss.detach(), forward_backward_in_chunks(reference, x))
        handles[0].wait()
        handles = [module.unshard(async_op=True) for module in (model, *model.blocks)]
        for module in (model, *model.blocks):
            module.reshard()
        for each in (optimizer, plain):
            each.step()
            each.zero_grad()


# --- the first forward ------------------------------------------------------------------------------------------------------------


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("after", [True, False, None, 2])
def test_a_first_forward_in_inference_mode_does_not_break_training(after):
    """Upstream makes inference tensors of its parameters, which autograd then refuses to save."""
    if after == 2 and torch.distributed.get_world_size() % 2 == 1:
        after = 1
    model, reference = with_reference(mlp(), shard_blocks, after)
    with torch.inference_mode():
        model(own_chunk(batches()[0]))
    assert_trains_bitwise_as(model, reference, batches(2))
    model.double()
    with torch.inference_mode():
        model(own_chunk(batches()[0]).double())
    model.float()
    assert_trains_bitwise_as(model, reference, batches(2))


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("after", [True, False, None])
def test_casting_the_model_after_an_iteration(after):
    model, reference = with_reference(mlp(), shard_blocks, after)
    for dtype in (torch.float32, torch.float64, torch.float32):
        model.to(dtype)
        reference.to(dtype)
        inputs = [x.to(dtype) for x in batches(2)]
        assert_trains_bitwise_as(model, reference, inputs)


@on_ranks(1, 2)
def test_the_model_works_once_it_is_materialised_after_the_error():
    reference = mlp()
    with torch.device("meta"):
        model = mlp()
    shard_blocks(model)
    x = own_chunk(batches()[0])
    for _ in range(2):
        with pytest.raises(MaterializationError, match=r"first\.weight"):
            model(x)
    with pytest.raises(MaterializationError):
        model.blocks[0].unshard()
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, param in model.named_parameters():
            whole = reference.get_parameter(name).detach()
            param.copy_(distribute_tensor(whole, cpu_mesh(), param.placements))
    assert_trains_bitwise_as(model, reference, batches(2))


# --- several roots ------------------------------------------------------------------------------------------------------------------


@on_ranks(1, 2)
@pytest.mark.parametrize("order", ["one after another", "one backward"])
def test_roots_that_share_a_communication_context_and_are_all_last(order):
    """Upstream clears the shared state at the end of one root's backward, in the middle of the other's."""
    first, second = mlp(seed=0), mlp(seed=1)
    second.first = nn.Linear(5, 10)
    plain = [copy.deepcopy(first), copy.deepcopy(second)]
    for model in (first, second):
        shard_blocks(model)
    share_comm_ctx([first, second])
    for model in (first, second):
        model.set_is_last_backward(True)

    def run(one: nn.Module, two: nn.Module, x: Tensor) -> Tensor:
        if order == "one backward":
            loss = two(one(x)).square().mean()
            loss.backward()
            return loss.detach()
        hidden = one(x)
        leaf = hidden.detach().requires_grad_()
        loss = two(leaf).square().mean()
        loss.backward()
        hidden.backward(leaf.grad)
        return loss.detach()

    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    reference = torch.optim.SGD([*plain[0].parameters(), *plain[1].parameters()], lr=0.1)
    world_size = torch.distributed.get_world_size()
    for x in batches():
        run(first, second, own_chunk(x))
        for chunk in x.chunk(world_size):
            run(*plain, chunk)
        for each in plain:
            for param in each.parameters():
                param.grad /= world_size
        for opt in (optimizer, reference):
            opt.step()
            opt.zero_grad()
    for model, whole in zip((first, second), plain, strict=True):
        for name, param in model.named_parameters():
            torch.testing.assert_close(param.full_tensor(), whole.get_parameter(name), msg=name)


@on_ranks(2)
@pytest.mark.parametrize("order", ["one after another", "one backward"])
@pytest.mark.parametrize("last", [(True, False), (False, True), (False, False)])
def test_chained_roots_of_which_some_are_not_told_that_this_is_their_last_backward(last, order):
    """Upstream has all gradients, too, but for the second backward of two where the later root alone is told (an IndexError)."""
    roots = mlp(seed=0), nn.Sequential(nn.Linear(5, 10), nn.Linear(10, 3))
    wholes = copy.deepcopy(roots)
    shard_blocks(roots[0])
    fully_shard(roots[1][0], mesh=cpu_mesh())
    fully_shard(roots[1], mesh=cpu_mesh())
    share_comm_ctx(list(roots))
    for model, is_last in zip(roots, last, strict=True):
        model.set_is_last_backward(is_last)

    def run(one: nn.Module, two: nn.Module, x: Tensor) -> None:
        hidden = one(x)
        leaf = hidden if order == "one backward" else hidden.detach().requires_grad_()
        two(leaf).square().mean().backward()
        if order != "one backward":
            hidden.backward(leaf.grad)

    for x in batches(2):  # gradients add up
        run(*roots, own_chunk(x))
        run(*wholes, x)
        for model, whole in zip(roots, wholes, strict=True):
            assert_equal_grads(grads_of(model), grads_of(whole), ulps=32)


# --- offloading without an accelerator ------------------------------------------------------------------------------------------------


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("pin_memory", [True, False])
def test_offloading_on_a_host_without_accelerator(pin_memory):
    """Upstream asks for the pinned memory of an accelerator that is not there."""
    model, reference = with_reference(mlp(), shard_blocks, offload_policy=CPUOffloadPolicy(pin_memory=pin_memory))
    seen = []
    model.blocks[0].up.weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.to_local().clone()))

    def iteration(model: nn.Module, x: Tensor) -> Tensor:
        return torch.stack([forward_backward(model, part) for part in x.chunk(2)]).mean()

    steps = fed_own_chunk(model, batches(), iteration=iteration)
    assert_equal_training(steps, fed_in_chunks(reference, batches(), iteration=iteration))
    assert len(seen) == 6
    assert torch.equal(seen[-1], steps[-1].grads["blocks.0.up.weight"].to_local())


@on_ranks(2)
def test_accumulation_without_sync_is_forgotten_by_zero_grad():
    model, reference = with_reference(mlp(), shard_blocks)
    model.set_requires_gradient_sync(False)
    forward_backward(model, own_chunk(batches(1, seed=8)[0]))
    model.zero_grad()
    model.set_requires_gradient_sync(True)
    assert_trains_bitwise_as(model, reference, batches())


@on_ranks(2)
def test_zero_grad_to_zeros_keeps_the_gradient_tensors():
    model = shard_blocks(mlp())
    forward_backward(model, own_chunk(batches()[0]))
    grads = {name: param.grad for name, param in model.named_parameters()}
    model.zero_grad(set_to_none=False)
    assert all(param.grad is grads[name] for name, param in model.named_parameters())
    assert all(not grad.to_local().any() for grad in grads.values())
    forward_backward(model, own_chunk(batches()[0]))
    fresh = shard_blocks(mlp())
    forward_backward(fresh, own_chunk(batches()[0]))
    assert_same_tensors(grads_of(model), grads_of(fresh), "gradient")
