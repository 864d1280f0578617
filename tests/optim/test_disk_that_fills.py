"""The disk of one rank fills while others have room: every rank raises that rank's error where ranks meet anyway, and none hangs.

The writer of rank 1 is made to fail; rank 0 learns of it from rank 1 alone.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp2
from fsdp2 import DiskOffloadPolicy
from fsdp2.checkpoint import Checkpointer
from fsdp2.core.comm import agreement
from fsdp2.optim import offloaded
from harness import on_ranks
from harness.models import batches, mlp
from harness.sharding import shard_blocks
from harness.training import forward_backward


@contextlib.contextmanager
def disk_of_rank_1(call: str) -> Iterator[Any]:
    """``call`` of ``os`` fails there once the event is set. A file of one byte has room: so the check of the folder passes."""
    disk = threading.Event()
    really: Callable[..., Any] = getattr(os, call)

    def called(*args: Any) -> Any:
        if disk.is_set() and dist.get_rank() == 1 and args[1:] != (0, 1):
            raise OSError(errno.ENOSPC, "No space left on device")
        return really(*args)

    with mock.patch.object(os, call, called):
        yield disk


def sharded(policy: Any = None, device: str = "cpu") -> nn.Module:
    with torch.device(device):
        model = mlp()
    shard_blocks(model, offload_policy=policy)
    return model


def is_told(text: str) -> Any:
    return pytest.raises(fsdp2.FSDPError, match=text + r".*No space left")


@on_ranks(2)
@pytest.mark.parametrize(("call", "text"), [("posix_fallocate", "bytes of optimizer state"), ("fdatasync", "does not take")])
@pytest.mark.parametrize("in_backward", [False, True])
def test_states_without_room_are_an_error_on_all_ranks_in_the_next_backward(call, text, in_backward, tmp_path):
    model = sharded()
    optimizer = offloaded(torch.optim.AdamW, model, DiskOffloadPolicy(tmp_path), step_in_backward=in_backward, lr=0.01)
    for x in batches(2 if call == "fdatasync" else 0):
        forward_backward(model, x)
        optimizer.step()
    with disk_of_rank_1(call) as disk:
        disk.set()
        forward_backward(model, batches(1)[0])
        optimizer.step()  # is no collective: here rank 1 alone knows
    assert agreement.has_untold() == (dist.get_rank() == 1)
    with is_told(text):
        forward_backward(model, batches(1)[0])
    assert not agreement.has_untold()
    assert os.listdir(tmp_path) == []


@on_ranks(2)
def test_parameters_without_room_are_an_error_on_all_ranks_in_fully_shard(tmp_path):
    with disk_of_rank_1("posix_fallocate") as disk, is_told("bytes of parameters of"):
        disk.set()
        sharded(DiskOffloadPolicy(tmp_path))
    assert os.listdir(tmp_path) == []


@on_ranks(2)
@pytest.mark.parametrize("call", ["posix_fallocate", pytest.param("fdatasync", marks=pytest.mark.slow)])
def test_parameters_that_get_their_values_on_a_full_disk_are_an_error_on_all_ranks_in_the_first_backward(call, tmp_path):
    model = sharded(DiskOffloadPolicy(tmp_path), "meta")
    with disk_of_rank_1(call) as disk:
        disk.set()
        model.to_empty(device="cpu")
        for param in model.parameters():
            nn.init.ones_(param)
        with is_told("bytes of parameters of"):
            forward_backward(model, batches(1)[0])
    forward_backward(model, batches(1)[0])  # whoever goes on has the values, in memory


@on_ranks(2)
def test_a_checkpoint_before_that_backward_is_refused_on_all_ranks(tmp_path):
    (tmp_path / "checkpoints").mkdir(exist_ok=True)
    model = sharded()
    optimizer = offloaded(torch.optim.AdamW, model, DiskOffloadPolicy(tmp_path), lr=0.01)
    checkpointer = Checkpointer(tmp_path / "checkpoints", model, asynchronous=False)
    forward_backward(model, batches(1)[0])
    with disk_of_rank_1("posix_fallocate") as disk:
        disk.set()
        optimizer.step()
    with is_told("bytes of optimizer state"):
        checkpointer.save(1)
    assert checkpointer.latest() is None
    checkpointer.close()
