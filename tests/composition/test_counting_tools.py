"""Tools that count collectives see with stock algorithms what they see of torch's FSDP2."""

from __future__ import annotations

import pickle
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.profiler import profile

import fsdp2
from harness import cpu_mesh, on_ranks

COMPARISON = ("c10d.allreduce_", "c10d::allreduce_")  # of ranks, before a backward; torch's FSDP2 compares nothing


def model_of(shard, mesh=None) -> nn.Module:
    mesh = mesh or cpu_mesh()
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(3)])  # large enough for broadcasts, as measured
    for layer in model:
        shard(layer, mesh=mesh)
    return shard(model, mesh=mesh)


def step(model: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of outputs that are views
        model(torch.ones(2, 256)).square().sum().backward()


def counted(shard) -> Counter[str]:
    """What CommDebugMode counts in a second step."""
    model = model_of(shard)
    step(model)
    mode = CommDebugMode()
    with mode:
        step(model)
    return Counter({str(name): count for name, count in mode.get_comm_counts().items() if str(name) not in COMPARISON})


def profiled(shard) -> Counter[str]:
    """Names and numbers of torch.distributed's operators in a profile of a second step."""
    model = model_of(shard)
    step(model)
    with profile() as recorded:
        step(model)
    names = [event.name for event in recorded.events()]
    return Counter(name for name in names if name.startswith("c10d::") and name not in COMPARISON)


@on_ranks(2)
@pytest.mark.parametrize("count", [counted, pytest.param(profiled, marks=pytest.mark.slow)])
def test_stock_algorithms_are_counted_as_those_of_torchs_fsdp2(count):
    fsdp2.set_collective_algorithms("stock")
    try:
        ours = count(fsdp2.fully_shard)
    finally:
        fsdp2.set_collective_algorithms("measured")
    assert ours == count(torch_fully_shard)
    assert sorted(ours.values()) == [3, 6]  # a reduce-scatter for each unit; a gather in forward, and one in backward
    assert ours != count(fsdp2.fully_shard)


def in_flight_recorder(shard) -> Counter[str]:
    """Names and numbers of the collectives of a second step in torch's flight recorder, a ring that earlier tests fill, too."""
    model = model_of(shard)
    step(model)
    before = max((entry["record_id"] for entry in flight_records()), default=-1)
    step(model)
    return Counter(entry["profiling_name"] for entry in flight_records() if entry["record_id"] > before)


def flight_records() -> list[dict[str, Any]]:
    return pickle.loads(torch._C._distributed_c10d._dump_fr_trace())["entries"]


@on_ranks(2)
def test_the_flight_recorder_has_a_gather_and_a_reduction_of_each_unit_by_the_names_that_torchs_fsdp2_has():
    fsdp2.set_collective_algorithms("stock")
    try:
        ours = in_flight_recorder(fsdp2.fully_shard)
    finally:
        fsdp2.set_collective_algorithms("measured")
    theirs = in_flight_recorder(torch_fully_shard)
    assert sorted(theirs.values()) == [3, 6]
    assert theirs - ours == Counter()
    assert sorted((ours - theirs).values()) == [1]  # the comparison of ranks before backward


def memory_tracked(shard, mesh) -> tuple[int, int, int]:
    """Bytes as torch's MemTracker counts them: of the parameters, of everything at the peak of two steps, of everything after them."""
    model = model_of(shard, mesh)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    with tracker:
        for _ in range(2):
            step(model)
            optimizer.step()
            optimizer.zero_grad()
            tracker.reset_mod_stats()
        after = tracker.get_tracker_snapshot("current")[torch.device("cpu")]["Total"]
    peak = {str(kind): nbytes for kind, nbytes in tracker.get_tracker_snapshot("peak")[torch.device("cpu")].items()}
    return peak["_MemRefType.PARAM"], peak["Total"], after


@pytest.fixture
def one_of_two() -> Iterator[DeviceMesh]:
    """Rank 0 of two, whose collectives do nothing and hold nothing: no thread lets go of a buffer later."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def tracked_by_kinds(shard, mesh, ran_before: bool, recomputes: bool) -> tuple[Counter[str], Counter[str], list[set[str]]]:
    """Bytes by kinds as torch's FSDPMemTracker counts them, at the peak and behind a backward; the moments of each module."""
    torch.manual_seed(0)
    layers = [shard(nn.Linear(256, 256), mesh=mesh) for _ in range(3)]
    own = [nn.Linear(256, 256) for _ in range(2)]  # the root's
    model = shard(nn.Sequential(*map(checkpoint_wrapper, layers) if recomputes else layers, *own), mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters())

    def train() -> None:
        step(model)
        optimizer.step()
        optimizer.zero_grad()

    def all_hooks() -> list[object]:
        return [[*each._forward_pre_hooks.items(), *each._forward_hooks.items()] for each in model.modules()]

    if ran_before:
        train()
    hooks = all_hooks()
    with (tracker := FSDPMemTracker(model, optimizer)):
        train()
        tracker.reset_mod_stats()
        step(model)
        after = tracker.get_tracker_snapshot("current")
    moments = [{moment.name for moment in each.snapshots} for each in tracker.memory_tracking.values()]
    if shard is fsdp2.fully_shard:  # all is as it was
        assert all_hooks() == hooks
        train()
        assert [{moment.name for moment in each.snapshots} for each in tracker.memory_tracking.values()] == moments
    found = [snapshot[torch.device("cpu")] for snapshot in (tracker.get_tracker_snapshot("peak"), after)]
    peak, after = ({getattr(kind, "name", kind): nbytes for kind, nbytes in each.items()} for each in found)
    return peak, after, moments


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("ran_before", [True, False])
def test_the_memory_tracker_of_torchs_fsdp2_counts_ours_as_its_own(one_of_two, ran_before, recomputes):
    """Symptom: no attribute '_pre_forward_hook_handle'; later an error that refused ours. Counted twice: see below."""
    peak, after, moments = tracked_by_kinds(fsdp2.fully_shard, one_of_two, ran_before, recomputes)
    expected_peak, expected_after, expected = tracked_by_kinds(torch_fully_shard, one_of_two, ran_before, recomputes)
    assert moments == expected
    for found, torchs in ((peak, expected_peak), (after, expected_after)):
        twice = 0 if ran_before else found["SHARDED_PARAM"]
        for kind in ("SHARDED_PARAM", "UNSHARDED_PARAM", "OPT", "BUFFER", "INP"):
            assert found[kind] == torchs[kind], kind
        assert found["ALL_GATHER"] <= torchs["ALL_GATHER"] + 2048  # the biases, which torch gathers in the same buffer
        assert torchs["ACT"] <= found["ACT"] <= torchs["ACT"] + twice
        assert found["Total"] <= torchs["Total"] + twice + 2048
    assert 0 <= after["SHARDED_GRAD"] - expected_after["SHARDED_GRAD"] <= 1024  # flags of use
    gradients = ("SHARDED_GRAD", "UNSHARDED_GRAD", "REDUCE_SCATTER", "TEMP")
    assert sum(peak[kind] for kind in gradients) <= sum(expected_peak[kind] for kind in gradients) + 2048


def test_the_memory_tracker_sees_what_is_freed_and_no_higher_peak_than_that_of_torchs_fsdp2(one_of_two):
    """It once saw no storage shrink: we had kept the function that it patches.

    It counts the shards twice: as parameters, and as the flat shard of which they are views with storages of their own.
    """
    params, peak, after = memory_tracked(fsdp2.fully_shard, one_of_two)
    expected_params, expected_peak, expected_after = memory_tracked(torch_fully_shard, one_of_two)
    assert params == expected_params
    assert peak - params <= expected_peak
    assert after - params <= expected_after + 1024  # scalars of the optimizer's and of ours


@on_ranks(2)
def test_ranks_are_compared_before_a_backward_with_stock_algorithms_too():
    fsdp2.set_collective_algorithms("stock")
    try:
        model = model_of(fsdp2.fully_shard)
        step(model)
        first, _, last = model
        x = torch.ones(2, 256, requires_grad=True)
        outputs = first(x), last(x)
        with pytest.raises(fsdp2.OrderError):
            outputs[dist.get_rank()].sum().backward()
    finally:
        fsdp2.set_collective_algorithms("measured")


def test_an_unknown_choice_is_refused():
    with pytest.raises(fsdp2.ArgumentError, match="stock"):
        fsdp2.set_collective_algorithms("fast")
