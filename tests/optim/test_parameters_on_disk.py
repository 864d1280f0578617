"""``fully_shard(offload_policy=DiskOffloadPolicy(path))``: parameters are in files, and values stay the same."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from fsdp2 import DiskOffloadPolicy, fully_shard, mapped_file
from fsdp2.core.group.own_memory import leaves_of
from fsdp2.optim import offloaded
from fsdp2.testing import pretend
from harness import cpu_mesh, on_ranks
from harness.models import batches, mlp
from harness.pretend_training import on_host
from harness.sharding import shard_blocks
from harness.subclasses import InDtype, RowInt8, Wrapper, wrap_weights
from harness.training import Step, adamw, assert_same_bits, assert_trains_bitwise_as, fed_in_chunks, fed_own_chunk, forward_backward


def sharded(
    folder: Any, num_blocks: int = 3, read_ahead: int = 1, device_type: str = "cpu", make: Callable[..., nn.Module] = mlp
) -> nn.Module:
    mesh = cpu_mesh() if device_type == "cpu" else init_device_mesh(device_type, (torch.distributed.get_world_size(),))
    model = make(num_blocks=num_blocks).to(device_type)
    policy = DiskOffloadPolicy(folder, read_ahead=read_ahead)
    return shard_blocks(model, mesh=mesh, offload_policy=policy)


def without_grads(steps: list[Step]) -> list[Step]:
    """Those of an optimizer that steps in backward are gone."""
    return [replace(step, grads={}) for step in steps]


@on_ranks(2)
def test_a_model_in_files_trains_as_the_unsharded_model(tmp_path):
    expected = fed_in_chunks(mlp(), batches(), adamw)
    assert_same_bits(fed_own_chunk(sharded(tmp_path), batches(), adamw), expected)
    model = sharded(tmp_path)
    optimizer = offloaded(torch.optim.AdamW, model, DiskOffloadPolicy(tmp_path), step_in_backward=True, lr=0.01)
    assert_same_bits(without_grads(fed_own_chunk(model, batches(), optimizer=optimizer)), without_grads(expected))
    assert os.listdir(tmp_path) == []


@on_ranks(2, device="pretend")
@pytest.mark.slow
def test_a_model_in_files_trains_on_a_device_that_runs_late(tmp_path):
    resident = mlp()
    shard_blocks(resident)
    inputs = batches(3, (8, 7))
    expected = on_host(fed_own_chunk(resident, inputs, adamw))
    for seed in (None, 0, 1):
        pretend.set_order(seed)
        model = sharded(tmp_path, device_type="pretend")
        assert_same_bits(on_host(fed_own_chunk(model, [x.to("pretend") for x in inputs], adamw)), expected)
        pretend.synchronize()


@on_ranks(2)
@pytest.mark.parametrize("read_ahead", [0, 1, 3])
def test_the_files_of_a_few_units_are_in_memory_and_the_next_ones_are_asked_for(read_ahead, tmp_path, monkeypatch):
    model = sharded(tmp_path, 8, read_ahead)
    events: list[tuple[str, int]] = []
    reads = mapped_file.ReadAhead()
    monkeypatch.setattr("fsdp2.core.group.param_group.READ_AHEAD", reads)
    begin, ask_for = mapped_file.ReadAhead.begin, mapped_file.MappedFile.ask_for

    def noted_begin(self: Any, file: Any, num_ahead: int) -> None:
        events.append(("read", file.number))
        begin(self, file, num_ahead)

    def noted_ask_for(file: Any) -> None:
        events.append(("ask", file.number))
        ask_for(file)

    monkeypatch.setattr(mapped_file.ReadAhead, "begin", noted_begin)
    monkeypatch.setattr(mapped_file.MappedFile, "ask_for", noted_ask_for)
    for x in batches(2):
        events.clear()
        forward_backward(model, x)
    files = [group.file for block in model.blocks for group in fully_shard.state(block).groups]
    numbers = [file.number for file in files]
    read = [number for kind, number in events if kind == "read" and number in numbers]
    assert read == numbers + numbers[::-1]  # each once in forward, and once in backward
    assert reads.in_memory <= read_ahead * files[0].nbytes + max(file.nbytes for file in files)
    # One runs, one is prefetched, and the next ones are asked for; the root is as large as a block at most.
    assert 0 < reads.peak <= (2 + read_ahead) * max(file.nbytes for file in reads._files.values()) < sum(file.nbytes for file in files)
    if read_ahead == 1:
        for number in numbers[3:]:
            assert events.index(("ask", number)) < events.index(("read", number))


@on_ranks(2)
def test_copies_state_dicts_and_writes_in_place_work_as_in_memory(tmp_path):
    model, reference = sharded(tmp_path), mlp()
    fed_own_chunk(model, batches(1), adamw)
    fed_in_chunks(reference, batches(1), adamw)
    twin = copy.deepcopy(model)
    state = {name: value.full_tensor() for name, value in model.state_dict().items()}
    for each in (model, reference):
        with torch.no_grad():
            for param in each.parameters():
                param.mul_(0.5)
    assert_trains_bitwise_as(model, reference, batches(2), adamw)
    for name, param in twin.named_parameters():
        assert torch.equal(param.full_tensor(), state[name])


@on_ranks(2)
@pytest.mark.parametrize("kind", [RowInt8, *(pytest.param(each, marks=pytest.mark.slow) for each in (Wrapper, InDtype))])
def test_parameters_that_gather_themselves_are_in_files_and_train_as_in_memory(kind, tmp_path):
    """They stayed in host memory, for they lie in no flat shard: a file is the memory of the tensors that their class wraps."""
    resident = wrap_weights(mlp(), kind)
    shard_blocks(resident)
    model = sharded(tmp_path, make=lambda num_blocks: wrap_weights(mlp(num_blocks=num_blocks), kind))
    twin = copy.deepcopy(model)
    expected = fed_own_chunk(resident, batches(), adamw)
    for each in (model, twin):
        steps = fed_own_chunk(each, batches(), adamw)
        assert [step.loss for step in steps] == [step.loss for step in expected]
        for param, other in zip(each.parameters(), resident.parameters(), strict=True):
            (values,) = leaves_of(param.to_local())
            assert torch.equal(values, leaves_of(other.to_local())[0])
            (group,) = [group for module in (*each.blocks, each) for group in fully_shard.state(module).groups if holds(group, param)]
            assert group.file is not None
            start = group.file.tensor(torch.uint8, group.file.nbytes).data_ptr()
            assert values.numel() == 0 or start <= values.data_ptr() < start + group.file.nbytes
    assert os.listdir(tmp_path) == []


def holds(group: Any, param: Any) -> bool:
    return any(each.sharded is param for each in group.params)


@on_ranks(2)
def test_a_folder_that_takes_no_files_is_an_error_on_all_ranks(tmp_path):
    path = tmp_path if torch.distributed.get_rank() == 0 else "/proc"
    with pytest.raises(fsdp2.ArgumentError, match="path='/proc', which takes no files"):
        fully_shard(mlp(), mesh=cpu_mesh(), offload_policy=DiskOffloadPolicy(path))


def test_a_process_that_is_killed_in_a_step_leaves_no_file(tmp_path):
    program = f"""
import os, signal, torch, torch.distributed as dist
import fsdp2
from fsdp2.optim import offloaded
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
policy = fsdp2.DiskOffloadPolicy({str(tmp_path)!r})
model = fsdp2.fully_shard(torch.nn.Linear(64, 64), offload_policy=policy)
optimizer = offloaded(torch.optim.AdamW, model, policy, lr=0.1)
for step in range(3):
    model(torch.ones(2, 64)).sum().backward()
    if step == 2:
        torch._foreach_add_([param.detach().to_local() for param in model.parameters()], 1.0)  # in the middle of an update
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()
"""
    done = subprocess.run([sys.executable, "-c", program], check=False)
    assert done.returncode == -signal.SIGKILL
    assert os.listdir(tmp_path) == []
