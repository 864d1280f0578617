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


def test_the_memory_tracker_of_torchs_fsdp2_refuses_ours_and_names_what_to_use(one_of_two):
    """Symptom: AttributeError: 'ClientState' object has no attribute '_pre_forward_hook_handle'."""
    tracker = FSDPMemTracker(model_of(fsdp2.fully_shard, one_of_two))
    with pytest.raises(fsdp2.ArgumentError, match=r"(?s)FSDPMemTracker got.*fix:.*torch's MemTracker"), tracker:
        pass


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
