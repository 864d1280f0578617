"""Copies between the device and parameters or gradients on the host: nothing but the end of a backward makes the host wait for them."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from fsdp2.testing import pretend
from harness import on_ranks
from harness.models import batches, mlp
from harness.pretend_training import BF16, on_host
from harness.sharding import shard_blocks
from harness.training import assert_same_bits, fed_own_chunk, forward_backward, own_chunk, sgd


def sharded(policy: Any, device_type: str = "pretend", **options: Any) -> Any:
    mesh = init_device_mesh(device_type, (torch.distributed.get_world_size(),))
    model: Any = mlp().to(device_type)
    shard_blocks(model, mesh=mesh, offload_policy=policy, **options)
    return model


@on_ranks(2, device="pretend")
def test_parameters_in_files_reach_the_device_without_a_wait_of_the_host(tmp_path):
    """Symptom: the memory of a file is not page-locked, so the host waited for each copy from it and for each gradient's copy out."""
    for options in ({}, BF16):
        expected = on_host(fed_own_chunk(sharded(None, "cpu", **options), batches(3, (8, 7)), sgd))
        inputs = [x.to("pretend") for x in batches(3, (8, 7))]
        for seed in (None, 0, 1):
            pretend.set_order(seed)
            model = sharded(fsdp2.DiskOffloadPolicy(str(tmp_path)), **options)
            assert_same_bits(on_host(fed_own_chunk(model, inputs, sgd)), expected)
        pretend.synchronize()
        pretend.reset_counts()
        forward_backward(model, own_chunk(inputs[0]))
        waits = pretend.host_waits()
        assert waits == {"event.synchronize": 4}, waits  # the optimizer runs on the host: one wait for each group's gradients


def streams_of_copies_and_reductions(ran: list[str]) -> tuple[set[str], set[str]]:
    """Of what ``pretend.traced`` gives: the streams of copies to the host, and those of reduce-scatters."""
    copies, reductions = set[str](), set[str]()
    for entry in ran:
        stream, kind, name = entry.split(" ", 2)
        if (kind, name) == ("copy", "to the host"):
            copies.add(stream)
        elif kind == "collective" and "reduce_scatter" in name:
            reductions.add(stream)
    return copies, reductions


@on_ranks(2, device="pretend")
def test_a_reduce_scatter_does_not_wait_for_the_copy_of_other_gradients_to_the_host():
    """Symptom: both ran on one stream, so a unit's reduce-scatter waited until the gradients of the unit before were on the host."""
    model = sharded(fsdp2.CPUOffloadPolicy())
    x = own_chunk(batches(1, (8, 7))[0]).to("pretend")
    forward_backward(model, x)
    with pretend.traced() as ran:
        forward_backward(model, x)
        pretend.synchronize()
    copies, reductions = streams_of_copies_and_reductions(ran)
    assert copies
    assert reductions
    assert not copies & reductions
