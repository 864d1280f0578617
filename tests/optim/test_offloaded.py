"""``offloaded``: optimizer states are in files, memory is bounded, and every value is the ordinary optimizer's."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import fsdp2
from fsdp2 import fully_shard
from fsdp2.optim import AnyPrecisionAdamW, DiskOffloadPolicy, flat, offloaded
from harness import cpu_mesh, on_ranks
from harness.memory import PeakBytes
from harness.models import batches, mlp
from harness.sharding import shard_blocks
from harness.training import Step, adamw, assert_same_bits, assert_same_tensor, fed_in_chunks, fed_own_chunk, forward_backward


def sharded(num_blocks: int = 3) -> nn.Module:
    model = mlp(num_blocks=num_blocks)
    return shard_blocks(model)


def states_of(optimizer: Any, model: nn.Module) -> dict[str, Any]:
    named = {name: optimizer.state[param] for name, param in model.named_parameters()}
    return {f"{name}.{key}": value for name, state in named.items() for key, value in state.items()}


@on_ranks(2, 3)
@pytest.mark.parametrize(("on_disk", "fraction"), [(True, 1.0), (True, 0.5), (True, 0.0), (False, 0.5)])
def test_it_trains_as_the_ordinary_optimizer_does(on_disk, fraction, tmp_path):
    model, reference = sharded(), mlp()
    policy = DiskOffloadPolicy(tmp_path) if on_disk else fsdp2.CPUOffloadPolicy()
    optimizer = offloaded(torch.optim.AdamW, model, policy, fraction=fraction, lr=0.01)
    steps = fed_own_chunk(model, batches(), optimizer=optimizer)
    assert_same_bits(steps, fed_in_chunks(reference, batches(), adamw))
    assert (optimizer.states.files.peak > 0) == (on_disk and fraction > 0)
    assert os.listdir(tmp_path) == []


@on_ranks(2)
def test_state_dicts_go_from_it_to_the_ordinary_optimizer_and_back(tmp_path):
    model = sharded()
    policy = DiskOffloadPolicy(tmp_path)
    optimizer = offloaded(torch.optim.AdamW, model, policy, lr=0.01)
    fed_own_chunk(model, batches(2), optimizer=optimizer)
    twin = copy.deepcopy(model)
    ordinary = adamw(twin.parameters())
    ordinary.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    again = copy.deepcopy(model)
    reloaded = offloaded(torch.optim.AdamW, again, policy, lr=1.0)
    reloaded.load_state_dict(copy.deepcopy(ordinary.state_dict()))
    for each, of in ((model, optimizer), (twin, ordinary), (again, reloaded)):
        fed_own_chunk(each, batches(2, seed=5), optimizer=of)
    expected = states_of(ordinary, twin)
    for each, of in ((model, optimizer), (again, reloaded)):
        found = states_of(of, each)
        assert found.keys() == expected.keys()
        for name in expected:
            assert_same_tensor(found[name], expected[name], name)
    assert all(run.file is not None for run in reloaded._host_runs.values())


@on_ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_state_dict_goes_into_files_run_by_run(dtype, tmp_path):
    """Copies of all of it lay beside the parameters, and the next step made the runs of all of these before the first file."""
    model, twin = sharded(num_blocks=12), sharded(num_blocks=12)
    ordinary = adamw(twin.parameters())
    fed_own_chunk(twin, batches(1), optimizer=ordinary)
    given = ordinary.state_dict()
    for state in given["state"].values():
        state.update({key: value.to(dtype) for key, value in state.items() if value.dim() > 0})
    optimizer = offloaded(torch.optim.AdamW, model, DiskOffloadPolicy(tmp_path), lr=1.0)
    with PeakBytes() as bytes_in_use:
        bytes_in_use.touch([given, list(model.parameters())])
        before = bytes_in_use.peak
        optimizer.load_state_dict(given)
    files = [run.file.nbytes for run in optimizer._host_runs.values()]
    assert len(files) == 13
    # Files count with all of their pages; 4 096: numbers of steps, and the values of a parameter in its own dtype.
    assert bytes_in_use.peak - before <= sum(files) + max(files) + 4096 < 1.5 * sum(files)
    assert optimizer.param_groups[0]["lr"] == 0.01
    for (name, param), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        for key, value in ordinary.state[other].items():
            expected = value.to(param.dtype) if value.dim() > 0 else value
            assert_same_tensor(optimizer.state[param][key], expected, f"{name}.{key}")


@on_ranks(2)
@pytest.mark.parametrize("step_in_backward", [False, True])
def test_it_steps_parameters_of_every_dtype_as_the_unsharded_model_is_stepped(step_in_backward):
    class Weights(nn.Module):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.one, self.other = nn.Parameter(torch.randn(5, 4).to(dtype)), nn.Parameter(torch.randn(3).to(dtype))

        def forward(self, scale: float) -> torch.Tensor:
            return sum(((param - scale).abs().double() ** 2).sum() for param in self.parameters())

    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128):
        ours, theirs = fully_shard(Weights(dtype), mesh=cpu_mesh()), Weights(dtype)
        optimizer = offloaded(torch.optim.AdamW, ours, fsdp2.CPUOffloadPolicy(), step_in_backward=step_in_backward, lr=0.01)
        ordinary = torch.optim.AdamW(theirs.parameters(), lr=0.01)
        for step in range(3):
            for model, each in ((ours, optimizer), (theirs, ordinary)):
                model(0.1 * step).backward()
                each.step()
                each.zero_grad()
        for (name, param), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(param.full_tensor(), other, msg=f"{name} {dtype}")


@on_ranks(2)
def test_hooks_hear_each_step_once_and_no_step_of_a_part():
    model = sharded()
    heard: list[Any] = []
    handle = register_optimizer_step_post_hook(lambda optimizer, *_: heard.append(optimizer))
    try:
        for make, options in (
            (flat, {}),
            (offloaded, {"policy": fsdp2.CPUOffloadPolicy(), "fraction": 0.5}),
            (offloaded, {"policy": fsdp2.CPUOffloadPolicy(), "step_in_backward": True}),
        ):
            optimizer = make(torch.optim.AdamW, model, lr=0.01, **options)
            own: list[Any] = []
            optimizer.register_step_post_hook(lambda optimizer, *_, own=own: own.append(optimizer))
            fed_own_chunk(model, batches(3), optimizer=optimizer)
            assert own == heard == [optimizer] * 3
            heard.clear()
    finally:
        handle.remove()


@on_ranks(2)
def test_parameters_without_gradients_hyperparameter_groups_clipping_and_other_classes(tmp_path):
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        matrices = [param for param in model.parameters() if param.dim() > 1]
        return [{"params": matrices}, {"params": [param for param in model.parameters() if param.dim() < 2], "lr": 0.1}]

    model, twin = sharded(), sharded()
    optimizer = offloaded(AnyPrecisionAdamW, groups(model), DiskOffloadPolicy(tmp_path), lr=0.01, use_kahan_summation=True)
    expected = AnyPrecisionAdamW(groups(twin), lr=0.01, use_kahan_summation=True)
    for step, x in enumerate(batches(4)):
        for each in (model, twin):
            each.blocks[1].up.bias.requires_grad_(step != 1)
            each.zero_grad()
            forward_backward(each, x)
        optimizer.step(max_norm=0.01)
        fsdp2.clip_grad_norm_(twin.parameters(), 0.01)
        expected.step()
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.to_local(), theirs.to_local(), msg=name)


@on_ranks(1)
@pytest.mark.parametrize("read_ahead", [0, 1, 2])
def test_no_more_than_the_states_of_a_few_runs_are_in_memory(read_ahead, tmp_path):
    model = sharded(num_blocks=12)
    optimizer = offloaded(torch.optim.AdamW, model, DiskOffloadPolicy(tmp_path, read_ahead=read_ahead), lr=0.01)
    for x in batches(3):
        forward_backward(model, x)
        optimizer.step()
    sizes = [run.file.nbytes for run in optimizer._host_runs.values()]
    assert len(sizes) == 13
    assert 0 < optimizer.states.files.peak <= (1 + 2 * read_ahead) * max(sizes) < sum(sizes)
    assert optimizer.states.files.in_memory == 0


def test_a_process_that_is_killed_leaves_no_file(tmp_path):
    program = f"""
import os, signal, torch
from fsdp2.optim import DiskOffloadPolicy, offloaded
model = torch.nn.Linear(64, 64)
optimizer = offloaded(torch.optim.AdamW, model, DiskOffloadPolicy({str(tmp_path)!r}), lr=0.1)
for _ in range(2):
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
assert all(run.file for run in optimizer._host_runs.values())
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program], check=False)
    assert done.returncode == -signal.SIGKILL
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("policy", "options", "text"),
    [
        ("/scratch", {}, "a CPUOffloadPolicy or a DiskOffloadPolicy"),
        (DiskOffloadPolicy("/nowhere/at/all"), {}, "path='/nowhere/at/all', which takes no files: .*No such file"),
        (DiskOffloadPolicy("/proc"), {}, "path='/proc', which takes no files"),
        (DiskOffloadPolicy(__file__), {}, "which takes no files: .*Not a directory"),
        (DiskOffloadPolicy("."), {"fraction": 2.0}, "fraction=2.0"),
        (DiskOffloadPolicy(".", read_ahead=-1), {}, "read_ahead=-1"),
        (DiskOffloadPolicy(None), {}, "path=None"),
    ],
)
def test_a_mistake_is_an_error_by_name(policy, options, text):
    with pytest.raises(fsdp2.ArgumentError, match=text):
        offloaded(torch.optim.AdamW, nn.Linear(2, 2), policy, lr=0.1, **options)


@on_ranks(2)
def test_a_folder_that_is_missing_on_one_rank_is_an_error_on_all(tmp_path):
    path = tmp_path if torch.distributed.get_rank() == 0 else "/nowhere/at/all"
    with pytest.raises(fsdp2.ArgumentError, match="path='/nowhere/at/all', which takes no files"):
        offloaded(torch.optim.AdamW, sharded(), DiskOffloadPolicy(path), lr=0.1)


def test_a_disk_without_room_is_an_error_that_says_how_much_is_needed(tmp_path):
    model = nn.Linear(64, 64, bias=False)
    optimizer = offloaded(torch.optim.AdamW, model, DiskOffloadPolicy(tmp_path), lr=0.1)
    model(torch.ones(2, 64)).sum().backward()
    full = OSError(28, "No space left on device")
    with (
        mock.patch("os.posix_fallocate", side_effect=full),
        pytest.raises(fsdp2.FSDPError, match=r"does not take 32,768 bytes of optimizer state: .*No space left"),
    ):
        optimizer.step()
    assert os.listdir(tmp_path) == []


# --- steps in backward ---------------------------------------------------------------------------------------------------------


def assert_same_losses_and_values(actual: list[Step], expected: list[Step]) -> None:
    """Gradients are gone."""
    assert_same_bits([replace(step, grads={}) for step in actual], [replace(step, grads={}) for step in expected])


@on_ranks(2)
@pytest.mark.parametrize(("on_disk", "fraction"), [(True, 1.0), (False, 0.5)])
def test_steps_in_backward_give_the_ordinary_optimizers_values(on_disk, fraction, tmp_path):
    model, reference = sharded(), mlp()
    policy = DiskOffloadPolicy(tmp_path) if on_disk else fsdp2.CPUOffloadPolicy()
    optimizer = offloaded(torch.optim.AdamW, model, policy, fraction=fraction, step_in_backward=True, lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)

    def with_a_look_at_the_state(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = forward_backward(model, x)
        counts = {int(state["step"]) for state in optimizer.state.values()}  # of those on the host this step is taken
        assert not counts or max(counts) in (len(steps), len(steps) + 1)
        return loss

    steps, expected = [], []
    plain = adamw(reference.parameters())
    its_schedule = torch.optim.lr_scheduler.StepLR(plain, 2)
    for x in batches(5):
        steps += fed_own_chunk(model, [x], optimizer=optimizer, iteration=with_a_look_at_the_state)
        schedule.step()
        expected += fed_in_chunks(reference, [x], lambda _: plain)
        its_schedule.step()
    assert_same_losses_and_values(steps, expected)
    left = {name for name, grad in steps[-1].grads.items() if grad is not None}
    assert "blocks.2.up.weight" not in left
    assert bool(left) == (fraction < 1)


@on_ranks(2)
def test_the_step_of_a_unit_ends_before_the_backward_of_another_has_begun():
    """Shown by waiting for it there: a step that waited for the end of backward would never end."""
    model = sharded()
    optimizer = offloaded(torch.optim.AdamW, model, fsdp2.CPUOffloadPolicy(), step_in_backward=True, lr=0.01)
    events: list[str] = []

    def before_backward(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        def hook(grad: torch.Tensor) -> None:
            for run, step in optimizer._in_backward._under_way:
                step.result()
                (fqn,) = {name for name, param in named if param.to_local().data_ptr() == run.data.data_ptr()}
                events.append(f"stepped {fqn.split('.')[1]}")
            events.append("backward of 0 begins")

        output.register_hook(hook)

    named = [(name, param) for name, param in model.named_parameters() if name.startswith("blocks")]
    for x in batches(2):
        forward_backward(model, x)
        optimizer.step()
        optimizer.zero_grad()
    model.blocks[0].register_forward_hook(before_backward)
    forward_backward(model, batches(1)[0])
    assert events == ["stepped 2", "backward of 0 begins"]  # 1 is reduced when its backward is over: beside that of 0
    optimizer.step()


@on_ranks(2)
@pytest.mark.parametrize("mistake", ["clipping", "torch's clipping", "max_norm", "scaling", "accumulation"])
def test_what_needs_all_gradients_first_is_refused_at_the_first_step_in_backward(mistake):
    model = sharded()
    optimizer = offloaded(torch.optim.AdamW, model, fsdp2.CPUOffloadPolicy(), step_in_backward=True, lr=0.01)
    scaler = torch.amp.GradScaler("cpu")
    x = batches(1)[0]
    before = {name: param.detach().clone() for name, param in model.named_parameters()}

    def one_step() -> None:
        loss = model(x).square().mean()
        (scaler.scale(loss) if mistake == "scaling" else loss).backward()
        if mistake == "clipping":
            fsdp2.clip_grad_norm_(model.parameters(), 1e9)
        elif mistake == "torch's clipping":  # is noticed where it has an effect
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        elif mistake == "accumulation":
            forward_backward(model, x)
        if mistake == "scaling":
            scaler.step(optimizer)
        else:
            optimizer.step(max_norm=1.0 if mistake == "max_norm" else None)

    with pytest.raises((fsdp2.OrderError, fsdp2.ArgumentError), match="leave step_in_backward out"):
        one_step()
    for name, param in model.named_parameters():
        assert_same_tensor(param, before[name], name)
