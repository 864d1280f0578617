"""Faults that only steps show, each the only finding of a watch; healthy training has none, and its numbers are the same."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

import fsdp2
from fsdp2 import doctor, fully_shard
from fsdp2.errors import DoctorError, DoctorWarning
from harness import cpu_mesh, on_ranks
from harness.models import MLP, mlp
from harness.sharding import shard_blocks
from harness.user_warnings import warned_on_rank_0

Step = Callable[[nn.Module, Optimizer, Tensor], None]


def backward(model: nn.Module, x: Tensor) -> None:
    model(x).square().mean().backward()


def clipped(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    backward(model, x)
    clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def clipped_by_ours(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    backward(model, x)
    fsdp2.clip_grad_norm_(model.parameters(), 0.1)
    fsdp2.get_total_norm([param.grad for param in model.parameters()])
    optimizer.step()


def accumulated(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    for index in range(2):
        with fsdp2.accumulate(model, last=index == 1):
            backward(model, x + index)
    optimizer.step()


def accumulated_by_switch(model: Any, optimizer: Optimizer, x: Tensor) -> None:
    for index in range(2):
        model.set_requires_gradient_sync(index == 1)
        backward(model, x + index)
    optimizer.step()


def local_clip(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    backward(model, x)
    grads = [param.grad.to_local() for param in model.parameters()]
    norm = torch.stack([grad.norm() for grad in grads]).norm()
    for grad in grads:
        grad.mul_(0.01 / norm)
    optimizer.step()


def changed(change: Callable[[Tensor], object]) -> Step:
    """A step that changes each rank's piece of every gradient before the optimizer sees it, otherwise than by one factor."""

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
        backward(model, x)
        for param in model.parameters():
            change(param.grad.to_local())
        optimizer.step()

    return step


def clipped_by_value(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    backward(model, x)
    clip_grad_value_(model.parameters(), 1e-3)
    optimizer.step()


def decayed(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    backward(model, x)
    for param in model.parameters():
        param.grad.add_(param.detach(), alpha=0.1)
    optimizer.step()


def frozen_on_a_rank(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    """Rows of an embedding that do not train, all of them rank 0's."""
    backward(model, x)
    for param in model.parameters():
        param.grad.to_local().mul_(dist.get_rank())
    optimizer.step()


def one_factor_a_parameter(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    backward(model, x)
    for index, param in enumerate(model.parameters()):
        param.grad.mul_(0.9**index)
    optimizer.step()


def in_bfloat16(step: Step) -> Step:
    return lambda model, optimizer, x: step(model, optimizer, x.bfloat16())


CHANGED: list[Step] = [
    clipped_by_value,
    decayed,
    frozen_on_a_rank,
    one_factor_a_parameter,
    changed(lambda grad: grad.sign_()),
    changed(lambda grad: grad.add_(torch.randn_like(grad), alpha=1e-3)),
    changed(lambda grad: grad[:1].zero_()),
]


def clip_after_step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    backward(model, x)
    optimizer.step()
    clip_grad_norm_(model.parameters(), 0.1)


def clip_cleared(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    clip_grad_norm_(model.parameters(), 0.1)
    backward(model, x)
    optimizer.step()


def switch_on_a_block(model: Any, optimizer: Optimizer, x: Tensor) -> None:
    for index in range(2):
        model.blocks[1].set_requires_gradient_sync(index == 1)
        backward(model, x + index)
    optimizer.step()


def switch_of_replicas(model: Any, optimizer: Optimizer, x: Tensor) -> None:
    for index in range(2):
        model.set_requires_all_reduce(index == 1)
        backward(model, x + index)
    optimizer.step()


def switch_never_on(model: Any, optimizer: Optimizer, x: Tensor) -> None:
    model.set_requires_gradient_sync(False)
    backward(model, x)
    optimizer.step()


def used_outside(model: Any, optimizer: Optimizer, x: Tensor) -> None:
    penalty = model.blocks[1].up.weight.to_local().square().sum()
    (model(x).square().mean() + penalty).backward()
    optimizer.step()


def same_data(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    clipped(model, optimizer, torch.ones(3, 7))


class Unused(MLP):
    """Its last block never runs."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks[:-1]:
            x = block(x)
        return self.last(x)


def usual(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    backward(model, x)
    optimizer.step()


HEALTHY: list[Step] = [usual, clipped, clipped_by_ours, accumulated, accumulated_by_switch]
FAULTS: list[tuple[Step, str, str]] = [
    (local_clip, "clip-on-local-shards", ""),
    (clip_after_step, "clip-without-effect", ""),
    (clip_cleared, "clip-without-effect", ""),
    (switch_on_a_block, "accumulation-switch-on-a-part", "blocks.1"),
    (switch_of_replicas, "accumulation-switch-without-effect", "the root"),
    (switch_never_on, "step-before-reduction", "first.weight"),
    (used_outside, "used-outside-forward", "blocks.1.up.weight"),
    (same_data, "same-data-on-every-rank", ""),
]


def watched(model: nn.Module, step: Step, **options: Any) -> doctor.watch:
    """After three steps, each rank on data of its own."""
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(10 + dist.get_rank())
    with doctor.watch(model, optimizer, **options) as watching:
        for _ in range(3):
            step(model, optimizer, torch.randn(3, 7))
            optimizer.zero_grad()
    return watching


@on_ranks(2)
def test_healthy_steps_have_no_finding_and_compute_what_they_do_without_a_watch():
    for step in HEALTHY:
        model, alone = shard_blocks(mlp()), shard_blocks(mlp())
        assert not watched(model, step, strict=True).report, step.__name__
        optimizer = torch.optim.AdamW(alone.parameters())
        torch.manual_seed(10 + dist.get_rank())
        for _ in range(3):
            step(alone, optimizer, torch.randn(3, 7))
            optimizer.zero_grad()
        for ours, expected in zip(model.parameters(), alone.parameters(), strict=True):
            assert torch.equal(ours.to_local(), expected.to_local())


@on_ranks(2)
def test_an_optimizer_of_each_parameter_that_steps_in_backward_is_healthy():
    model = shard_blocks(mlp())
    optimizers = {param: torch.optim.SGD([param], lr=0.1) for param in model.parameters()}

    def step_at_once(param: nn.Parameter) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in optimizers:
        param.register_post_accumulate_grad_hook(step_at_once)
    torch.manual_seed(10 + dist.get_rank())
    for in_order in (list, reversed):  # the first one's step, which ends a step of the watch, is the last of a backward, and the first
        with doctor.watch(model, in_order(optimizers.values()), patience=2) as watching:
            for _ in range(3):
                backward(model, torch.randn(3, 7))
        assert not watching.report, watching.report


@on_ranks(2)
def test_gradients_that_a_program_changes_by_no_single_factor_have_no_finding():
    for index, step in enumerate(CHANGED):
        assert not watched(shard_blocks(mlp()), step, strict=True).report, index


@on_ranks(2)
def test_a_local_clip_of_bfloat16_gradients_is_found_and_a_common_one_is_not():
    assert not watched(shard_blocks(mlp().bfloat16()), in_bfloat16(clipped), strict=True).report
    with pytest.raises(DoctorError, match="clip-on-local-shards"):
        watched(shard_blocks(mlp().bfloat16()), in_bfloat16(local_clip), strict=True)


@on_ranks(2)
def test_each_fault_is_warned_of_once_on_rank_0_and_strict_raises_it_on_all():
    for step, check, names in FAULTS:
        with warned_on_rank_0(DoctorWarning, check) as caught:
            report = watched(shard_blocks(mlp()), step).report
        assert [finding.check for finding in report] == [check], f"{step.__name__}:\n{report}"
        assert len(caught) == (dist.get_rank() == 0)
        assert any(name.startswith(names) for name in report[0].params or [""]), report
    with pytest.raises(DoctorError, match="clip-on-local-shards"):
        watched(shard_blocks(mlp()), local_clip, strict=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not watched(shard_blocks(mlp()), same_data, ignore=["same-data-on-every-rank"]).report
    torch.manual_seed(0)
    with warned_on_rank_0(DoctorWarning, "blocks.2.up.weight"):
        report = watched(shard_blocks(Unused()), usual).report
    assert [finding.check for finding in report] == ["gradient-never-came"]


@on_ranks(2)
@pytest.mark.filterwarnings("ignore:(?s).*fully_shard was never called on MLP:UserWarning")  # that is for everybody
def test_a_forgotten_root_is_found_in_the_first_step():
    model = mlp()
    for block in model.blocks:
        fully_shard(block, mesh=cpu_mesh())
    with warned_on_rank_0(DoctorWarning, r"never-averaged \(ranks 0, 1\)[\s\S]*first.weight, first.bias"):
        assert [finding.check for finding in watched(model, usual).report] == ["never-averaged"]


@on_ranks(2)
def test_rank_0_warns_of_what_another_rank_alone_did_once_ranks_exchange_what_they_saw():
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
        (used_outside if dist.get_rank() == 1 else usual)(model, optimizer, x)

    with warned_on_rank_0(DoctorWarning, r"used-outside-forward \(rank 1\)") as caught:
        report = watched(shard_blocks(mlp()), step).report
    assert len(caught) == (dist.get_rank() == 0)
    assert [finding.check for finding in report] == ["used-outside-forward"]


@on_ranks(2)
def test_a_step_on_some_ranks_is_found_before_ranks_communicate_and_training_goes_on():
    """``if rank == 1: optimizer.step()`` aborted: the watch's exchange met the other rank's all-gather."""
    model = shard_blocks(mlp())
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(10 + dist.get_rank())
    caught = contextlib.nullcontext() if dist.get_rank() == 0 else pytest.warns(DoctorWarning, match=r"step-on-some-ranks \(rank 0\)")
    with caught, doctor.watch(model, optimizer) as watching:
        for _ in range(4):
            backward(model, torch.randn(3, 7))
            if dist.get_rank() == 1:
                optimizer.step()
            optimizer.zero_grad()
    assert [finding.check for finding in watching.report] == ["step-on-some-ranks"] * dist.get_rank()


@on_ranks(2, device="pretend")
def test_on_a_device_writes_that_the_next_forward_does_not_use_are_found():
    """Symptom: an average exchanged for the weights through ``.data`` was evaluated as the weights, and nobody noticed."""
    for after in (False, True):
        torch.manual_seed(0)
        model = mlp()
        shard_blocks(model, after)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        x = torch.full((2, 7), 0.1 + dist.get_rank(), device="pretend")
        kept = [] if after else [name for name, _ in model.named_parameters()]
        watching = doctor.watch(model, optimizer, strict=True)
        for expected, written in (([], lambda param: param), (kept, lambda param: param.data)):
            optimizer.zero_grad()
            with torch.no_grad():
                model(x)
                for param in model.parameters():
                    written(param).add_(1)
            assert {name for finding in doctor.check(model, optimizer) for name in finding.params} == set(expected)
            with pytest.raises(DoctorError, match=r"write-not-seen") if expected else contextlib.nullcontext():
                backward(model, x)
        watching.give_up()


@on_ranks(2)
def test_nothing_is_left_behind_by_a_watch():
    functions = dist.all_reduce, torch.autograd.backward, ReduceLROnPlateau.step
    clip, total_norm = torch.nn.utils.clip_grad._clip_grads_with_norm_, fsdp2.clip.total_norm
    model = shard_blocks(mlp())
    watched(model, clipped)
    assert torch.nn.utils.clip_grad._clip_grads_with_norm_ is clip
    assert (dist.all_reduce, torch.autograd.backward, ReduceLROnPlateau.step) == functions
    assert not model._forward_hooks or len(model._forward_hooks) == len(shard_blocks(mlp())._forward_hooks)
    assert fsdp2.clip.total_norm is total_norm
    assert all(not unit._get_fsdp_state().watchers for unit in [model, *model.blocks])
    assert not any(param._backward_hooks for param in model.parameters())
    assert len(model._forward_pre_hooks) == len(shard_blocks(mlp())._forward_pre_hooks)
