"""Iterations that the user ends: ``set_manual_backward_finalization``, ``finalize_backward`` and its handle.

Where torch's FSDP2 has them (2.15), the same script runs with both, and each step has to say the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn

import fsdp2
from fsdp2 import OrderError
from harness import cpu_mesh, needs_torch, on_ranks
from harness.sharding import with_reference
from harness.training import assert_equal_grads, grads_of

PACKAGES = {"ours": fsdp2, "torch": torch_fsdp}
EACH = ["ours", pytest.param("torch", marks=needs_torch("2.15", "finalize_backward"))]


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def shard(package: Any, model: nn.Sequential, mesh: Any = None, **options: Any) -> Any:
    package = PACKAGES.get(package, package) if isinstance(package, str) else package
    for layer in model:
        package.fully_shard(layer, mesh=mesh or cpu_mesh(), **options)
    return package.fully_shard(model, mesh=mesh or cpu_mesh(), **options)


def step(model: nn.Module, scale: float = 1.0) -> None:
    model(torch.full((1, 4), scale)).sum().backward()


def shown(model: nn.Module) -> list[tuple[str, float | None]]:
    """Of each parameter that the modules show its kind, and the sum of its gradient on this rank."""
    result = []
    for param in model.parameters():
        grad = param.grad
        local = grad.to_local() if hasattr(grad, "to_local") else grad
        result.append((type(param).__name__, None if local is None else round(float(local.abs().sum()), 4)))
    return result


def transcript(package: Any) -> list[object]:
    """What a user sees, step by step: values, or the kind of exception."""
    log: list[object] = []
    model = shard(package, layers())
    handles: list[Any] = []

    def run(call: Callable[[], object]) -> None:
        try:
            result = call()
            log.append(result if result is None or isinstance(result, float) else isinstance(result, package.GradientReductionHandle))
        except RuntimeError:
            log.append("RuntimeError")
        if not handles:  # while one is open, what is there already is nobody's business
            log.append(shown(model))

    run(model.finalize_backward)
    run(lambda: model.finalize_backward(async_op=True))
    run(lambda: model(torch.ones(1, 4)).sum().item())
    run(model.finalize_backward)
    run(lambda: model[0].set_manual_backward_finalization(True))
    run(lambda: model.set_manual_backward_finalization(True))
    run(lambda: step(model))
    run(lambda: model.set_manual_backward_finalization(False))
    run(model.finalize_backward)
    run(model.finalize_backward)
    run(model[0].finalize_backward)
    model.zero_grad()
    model.set_requires_gradient_sync(False)
    for _ in range(2):
        run(lambda: step(model))
    run(model.finalize_backward)
    model.set_requires_gradient_sync(True)
    run(lambda: handles.append(model.finalize_backward(async_op=True)))
    run(lambda: model(torch.ones(1, 4)).sum().item())
    run(model.finalize_backward)
    run(lambda: handles[-1].wait())
    run(lambda: handles.pop().wait())
    model.zero_grad()
    run(lambda: step(model))
    run(lambda: handles.append(model.finalize_backward(async_op=True)))
    model.reset_iter_state()
    run(lambda: handles.pop().wait())
    run(lambda: model.set_manual_backward_finalization(False))
    run(lambda: step(model))
    return log


@on_ranks(2)
@needs_torch("2.15", "finalize_backward")
def test_every_step_says_what_torch_says():
    with_2_15 = transcript(fsdp2), transcript(torch_fsdp)
    for index, (ours, theirs) in enumerate(zip(*with_2_15, strict=True)):
        assert ours == theirs, f"entry {index}"


@on_ranks(1, 2)
@pytest.mark.parametrize("version", ["2.13", "2.15"])
@pytest.mark.parametrize("reshards", [True, False])
@pytest.mark.parametrize("syncs", ["always", "at the end"])
def test_micro_batches_that_are_finalized_by_hand_have_the_gradients_of_the_unsharded_model(version, reshards, syncs):
    reference = layers()
    fsdp2.set_semantics(version)
    model = shard(fsdp2, copy.deepcopy(reference))
    fsdp2.set_semantics("torch")
    model.set_manual_backward_finalization(True)
    for _ in range(2):
        for index in range(3):
            model.set_requires_gradient_sync(syncs == "always")
            model.set_reshard_after_backward(reshards)
            step(model, index + 1.0)
            step(reference, index + 1.0)
        model.set_requires_gradient_sync(True)
        model.set_reshard_after_backward(True)
        model.finalize_backward()
        assert_equal_grads(grads_of(model), grads_of(reference))
        model.zero_grad()
        reference.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize("package", EACH)
def test_a_child_in_manual_mode_is_refused_at_the_roots_first_forward(package):
    model = shard(package, layers())
    model[0].set_manual_backward_finalization(True)
    with pytest.raises(RuntimeError):
        model(torch.ones(1, 4))


@on_ranks(2)
@pytest.mark.parametrize("package", EACH)
def test_nothing_is_finalized_while_all_reduce_is_off(package):
    model = shard(package, layers(), cpu_mesh(2, 1, names=("replicate", "shard")))
    model.set_manual_backward_finalization(True)
    model.set_requires_all_reduce(False)
    step(model)
    with pytest.raises(RuntimeError, match=r"all-reduce is off|partial"):
        model.finalize_backward()


@on_ranks(2)
@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("package", EACH)
def test_an_open_handle_holds_up_roots_with_the_same_communication_context(package, shares):
    one, other = (shard(package, layers()) for _ in range(2))
    if shares:
        PACKAGES[package].share_comm_ctx([one, other])
    assert (one._get_fsdp_state()._comm_ctx is other._get_fsdp_state()._comm_ctx) is shares
    for model in (one, other):
        model.set_manual_backward_finalization(True)
        step(model)
        model.finalize_backward()
        model.zero_grad()
    step(one)
    handle = one.finalize_backward(async_op=True)
    if shares:
        for call in (lambda: other(torch.ones(1, 4)), other.finalize_backward, other.reset_iter_state):
            with pytest.raises(RuntimeError):
                call()
    handle.wait()
    step(other)
    other.finalize_backward()
    assert_equal_grads(grads_of(one), grads_of(other))


@on_ranks(2)
@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("package", EACH)
def test_nothing_is_finalized_asynchronously_while_a_root_with_the_same_context_is_in_its_iteration(package, shares):
    one, other = (shard(package, layers()) for _ in range(2))
    if shares:
        PACKAGES[package].share_comm_ctx([one, other])
    for model in (one, other):
        model.set_manual_backward_finalization(True)
        step(model)
    if shares:
        with pytest.raises(RuntimeError, match=r"sharing|shares"):
            one.finalize_backward(async_op=True)
        one.finalize_backward()
    else:
        one.finalize_backward(async_op=True).wait()
    other.finalize_backward(async_op=True).wait()
    assert_equal_grads(grads_of(one), grads_of(other))
    if package == "ours":  # torch takes an evaluation for a forward whose backward is to come
        with torch.no_grad():
            other(torch.ones(1, 4))
    one.zero_grad()
    step(one)
    one.finalize_backward(async_op=True).wait()
    assert_equal_grads(grads_of(one), grads_of(other))


@on_ranks(2)
@pytest.mark.parametrize("package", EACH)
def test_pending_partial_gradients_are_all_reduced_where_torch_refuses(package):
    """What is pending is reduced by the flags as they are then: torch 2.15 refuses, since its finalization does not know partials."""
    reference = layers()
    model = shard(package, copy.deepcopy(reference), cpu_mesh(2, 1, names=("replicate", "shard")))
    model.set_manual_backward_finalization(True)
    rank = torch.distributed.get_rank()
    for index, all_reduces in enumerate((False, False, True)):
        model.set_requires_all_reduce(all_reduces)
        if not all_reduces:
            x = torch.full((1, 4), 1.0 + rank + index, requires_grad=True)  # so that a hook reduces, and leaves a partial sum
            model(x).sum().backward()
            for each in range(2):
                (reference(torch.full((1, 4), 1.0 + each + index)).sum() / 2).backward()
    if package == "torch":
        with pytest.raises(RuntimeError, match="partial gradient reductions"):
            model.finalize_backward()
        return
    model.finalize_backward()
    assert_equal_grads(grads_of(model), grads_of(reference))


@on_ranks(2)
def test_finalizing_inside_of_a_backward_is_refused():
    model = shard(fsdp2, layers())
    model.set_manual_backward_finalization(True)
    output = model(torch.ones(1, 4))
    output.register_hook(lambda grad: model.finalize_backward())
    with pytest.raises(OrderError, match="inside of a backward"):
        output.sum().backward()
    model.reset_iter_state()
    model.set_manual_backward_finalization(False)
    step(model)


@on_ranks(2)
def test_a_backward_that_fails_beside_pending_gradients_is_not_begun_again_in_silence():
    model = shard(fsdp2, layers())
    model.set_manual_backward_finalization(True)
    step(model)
    x = torch.ones(1, 4, requires_grad=True)
    x.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(x).sum().backward()
    with pytest.raises(OrderError, match="reset_iter_state"):
        model(torch.ones(1, 4))
    model.reset_iter_state()
    step(model)
    model.finalize_backward()
    reference = layers()
    step(reference)
    assert_equal_grads(grads_of(model), grads_of(reference))


@on_ranks(2)
@pytest.mark.parametrize("kept", [True, False])
def test_the_unsharded_storage_stays_where_it_is_if_that_is_asked_for(kept):
    model, reference = with_reference(layers())
    shard(fsdp2, model)
    model.set_keep_unsharded_storage(kept)
    seen: list[torch.Tensor] = []
    model[1].register_forward_pre_hook(lambda module, args: seen.append(module.weight.detach()))
    for index in range(3):
        step(model, index + 1.0)
        step(reference, index + 1.0)
        assert (seen[-1].untyped_storage().size() > 0) is kept
    assert_equal_grads(grads_of(model), grads_of(reference))
    if kept:
        assert len({each.data_ptr() for each in seen}) == 1
        model.set_keep_unsharded_storage(False)
        assert seen[-1].untyped_storage().size() == 0
        step(model)
        assert seen[-1].untyped_storage().size() == 0


@on_ranks(2)
def test_nothing_of_ours_changes_its_address_in_a_steady_step():
    model = shard(fsdp2, layers(), mp_policy=fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    model.set_keep_unsharded_storage(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    addresses = set()
    for index in range(100):
        step(model)
        optimizer.step()
        optimizer.zero_grad()
        if index > 0:
            groups = [group for layer in model for group in layer._get_fsdp_state().groups]
            shards = [param.to_local().data_ptr() for param in model.parameters()]
            whole = [
                (param.unsharded.data_ptr(), param.unsharded.untyped_storage().size()) for group in groups for param in group.params
            ]
            addresses.add((*shards, *whole))
    assert len(addresses) == 1
    assert all(nbytes > 0 for _, nbytes in whole)
