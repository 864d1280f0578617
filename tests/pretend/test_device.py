"""The pretend accelerator itself: it computes what the CPU computes, and what a program has not ordered goes wrong on it."""

from __future__ import annotations

import copy
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp2.testing import pretend
from fsdp2.torch_names import torch_collectives
from harness import on_ranks
from harness.models import transformer


def world():
    return dist.distributed_c10d._get_default_group()


def wrong_in(program, expected):
    """The seeds with which ``program`` does not return what it should."""
    seeds = []
    for seed in range(20):
        pretend.set_order(seed)
        try:
            result = program().cpu()
            pretend.synchronize()
        except RuntimeError as error:
            if "after it had been freed" not in str(error):
                raise
            result = None
        if result is None or not torch.equal(result, expected):
            seeds.append(seed)
    return seeds


def side_stream():
    return torch.Stream("pretend")


# ---- it computes what the CPU computes ----


def trained(model: nn.Module, device: str) -> tuple[list[float], list[Tensor]]:
    model = copy.deepcopy(model).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
    torch.manual_seed(0)
    losses = []
    for step in range(3):
        ids = torch.arange(20).view(4, 5).add(step).remainder(11).to(device)
        loss = F.cross_entropy(F.dropout(model(ids), 0.2).flatten(0, 1), ids.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [param.detach().cpu() for param in model.parameters()]


@on_ranks(1, device="pretend")
def test_copies_resolve_conjugates_and_negatives():
    """Torch's own way resolved them by a copy, and that one by another, without an end."""
    values = torch.randn(3, 2, dtype=torch.complex64)
    on_device = values.to("pretend")
    for view in (torch.conj, lambda each: each.conj().imag, lambda each: each.conj().t()):
        expected = view(values)
        assert torch.equal(view(on_device).cpu(), expected)
        assert torch.equal(view(values).to("pretend").cpu(), expected)
        assert torch.equal(view(on_device).clone().cpu(), expected)
        target = torch.zeros_like(on_device)
        view(target).copy_(view(on_device))
        assert torch.equal(view(target).cpu(), expected)


@on_ranks(1, device="pretend")
def test_a_model_trains_bitwise_as_on_the_cpu_in_any_order():
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        model = transformer()
        losses, params = trained(model, "cpu")
        for order in (None, 0, 1):
            pretend.set_order(order)
            assert trained(model, "pretend")[0] == losses
            for ours, theirs in zip(trained(model, "pretend")[1], params, strict=True):
                assert torch.equal(ours, theirs)


@on_ranks(1, device="pretend")
def test_nothing_runs_before_the_host_waits_and_a_seed_gives_the_same_order_each_time():
    orders = []
    for _ in range(2):
        pretend.set_order(3)
        streams = [side_stream() for _ in range(3)]
        with pretend.traced() as ran:
            for number in range(4):
                for stream in streams:
                    with torch.pretend.stream(stream):
                        torch.ones(8, device="pretend").mul_(number)
            early = torch.pretend.memory_stats()["allocations"]
            assert early > 0
            pretend.synchronize()
        ids = {stream.stream_id: index for index, stream in enumerate(streams)}
        orders.append([(ids.get(int(line.split()[0])), line.split()[1:]) for line in ran])
    assert len(orders[0]) > 20
    assert orders[0] == orders[1]


@on_ranks(1, device="pretend")
def test_a_wrong_shape_is_an_error_at_once_and_an_error_of_a_late_operator_comes_where_the_host_waits():
    with pytest.raises(RuntimeError, match="shape"):
        torch.ones(2, 3, device="pretend") @ torch.ones(2, 3, device="pretend")
    table = torch.ones(3, 2, device="pretend")
    F.embedding(torch.full((2,), 7, device="pretend"), table)
    with pytest.raises((RuntimeError, IndexError), match="index"):
        pretend.synchronize()
    assert table.sum().item() == 6


@on_ranks(1, device="pretend")
def test_backward_runs_on_a_thread_of_the_device():
    x = torch.ones(3, device="pretend", requires_grad=True)
    threads = []
    x.register_hook(lambda grad: threads.append(threading.get_ident()))
    (x * 2).sum().backward()
    assert threads != [threading.get_ident()]
    assert x.grad.cpu().tolist() == [2, 2, 2]


@on_ranks(1, device="pretend")
def test_other_threads_may_use_the_device_while_it_lets_go_of_a_tensor_of_the_host():
    """Symptom: a hang. The device freed what an entry held while it had its own lock; a tensor's end needs Python's lock as well."""
    seen = []

    def use_on_another_thread():
        thread = threading.Thread(target=lambda: seen.append(pretend.memory_stats()))
        thread.start()
        thread.join()

    pretend.set_order(0)
    target = torch.empty(8, pin_memory=True)
    weakref.finalize(target, use_on_another_thread)
    target.copy_(torch.ones(8, device="pretend"), non_blocking=True)
    del target  # the entry alone has it now
    assert seen == []
    pretend.synchronize()
    assert len(seen) == 1


@on_ranks(1, device="pretend")
@pytest.mark.parametrize("seed", [None, 0])
def test_threads_that_use_the_device_at_the_same_time_get_what_each_has_computed(seed):
    """Symptom: a hang where each entry runs as it is queued. The allocator, which had the lock, waited for another thread's entry."""

    def sums(start):
        totals = []
        for number in range(start, start + 50):
            on_host = torch.empty(512, pin_memory=True)
            on_host.copy_(torch.full((512,), number, device="pretend").square().add(1), non_blocking=True)
            torch.pretend.current_stream().synchronize()
            totals.append(int(on_host[0]))
        return totals

    pretend.set_order(seed)
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(sums, (0, 50))) == [[n * n + 1 for n in range(start, start + 50)] for start in (0, 50)]


# ---- what a program has not ordered goes wrong ----


def uses_what_another_stream_makes(waits: bool) -> Tensor:
    side = side_stream()
    x = torch.ones(100, device="pretend")
    if waits:
        side.wait_stream(torch.pretend.current_stream())
    with torch.pretend.stream(side):
        y = x + 1
    if waits:
        torch.pretend.current_stream().wait_stream(side)
    return y.cpu()


def frees_what_another_stream_reads(waits: bool) -> Tensor:
    """``x`` is freed, and its memory given to ``z``, before the side stream has read it."""
    side = side_stream()
    x = torch.ones(100, device="pretend")
    side.wait_stream(torch.pretend.current_stream())
    with torch.pretend.stream(side):
        y = x + 1
    if waits:
        torch.pretend.current_stream().wait_stream(side)
    del x
    z = torch.zeros(100, device="pretend")
    torch.pretend.current_stream().wait_stream(side)
    return (y + z).cpu()  # here: ``y`` belongs to the side stream


def frees_what_another_stream_writes(waits: bool) -> Tensor:
    side = side_stream()
    x = torch.zeros(100, device="pretend")
    side.wait_stream(torch.pretend.current_stream())
    with torch.pretend.stream(side):
        x.fill_(5)
    if waits:
        torch.pretend.current_stream().wait_stream(side)
    del x
    return torch.full((100,), 2.0, device="pretend")


def records_a_stream(records: bool) -> Tensor:
    side = side_stream()
    x = torch.ones(100, device="pretend")
    side.wait_stream(torch.pretend.current_stream())
    with torch.pretend.stream(side):
        y = x + 1
    if records:
        x.record_stream(side)
    del x
    z = torch.zeros(100, device="pretend")
    torch.pretend.current_stream().wait_stream(side)
    return (y + z).cpu()  # here: ``y`` belongs to the side stream


def reads_pinned_memory_before_the_copy_is_done(waits: bool) -> Tensor:
    host = torch.zeros(100).pin_memory()
    host.copy_(torch.full((100,), 2.0, device="pretend"), non_blocking=True)
    if waits:
        torch.pretend.current_stream().synchronize()
    return host.clone()


def refills_pinned_memory_before_it_is_read(waits: bool) -> Tensor:
    host = torch.full((100,), 2.0).pin_memory()
    x = host.to("pretend", non_blocking=True)
    if waits:
        torch.pretend.current_stream().synchronize()
    host.fill_(7)
    return x


RACES = [
    uses_what_another_stream_makes,
    frees_what_another_stream_reads,
    frees_what_another_stream_writes,
    records_a_stream,
    reads_pinned_memory_before_the_copy_is_done,
    refills_pinned_memory_before_it_is_read,
]


@on_ranks(1, device="pretend")
@pytest.mark.parametrize("program", RACES)
def test_a_missing_order_gives_wrong_data_and_an_order_that_is_there_never_does(program):
    assert wrong_in(lambda: program(True), torch.full((100,), 2.0)) == []
    assert wrong_in(lambda: program(False), torch.full((100,), 2.0)) != []


@on_ranks(1, device="pretend")
def test_fresh_memory_and_freed_memory_hold_nothing_that_looks_like_a_value():
    assert torch.empty(1000, device="pretend").cpu().isnan().all()
    torch.zeros(5000, device="pretend")
    assert torch.empty(5000, device="pretend").cpu().isnan().all()
    assert torch.empty(100, dtype=torch.bfloat16, device="pretend").cpu().isnan().all()


@on_ranks(1, device="pretend")
def test_memory_is_split_merged_and_given_out_again_at_once_to_its_own_stream():
    a, b = torch.ones(1000, device="pretend"), torch.ones(1000, device="pretend")
    first, second = a.data_ptr(), b.data_ptr()
    side = side_stream()
    del a, b
    with torch.pretend.stream(side):
        assert torch.empty(1000, device="pretend").data_ptr() not in (first, second)
    assert torch.empty(2000, device="pretend").data_ptr() == first
    before = pretend.memory_stats()
    kept = torch.empty(300, device="pretend")
    assert pretend.memory_stats()["allocated"] - before["allocated"] == 1536  # 1200 bytes in blocks of 512
    assert kept.numel() == 300


# ---- the host ----


@on_ranks(1, device="pretend")
def test_waits_of_the_host_are_counted_by_reason_and_refused_where_none_may_be():
    x = torch.ones(4, device="pretend")
    pinned = torch.zeros(4).pin_memory()
    pretend.reset_counts()
    with pretend.no_host_waits():
        y = (x * 2).to("pretend", non_blocking=True)
        pinned.copy_(y, non_blocking=True)
        y.copy_(pinned, non_blocking=True)
    assert pretend.host_waits() == {}
    for wait in (y.sum().item, y.cpu, y.nonzero, lambda: torch.ones(4).to("pretend"), lambda: torch.tensor([1], device="pretend")):
        with pretend.no_host_waits(), pytest.raises(RuntimeError, match="a host synchronisation"):
            wait()
    pretend.reset_counts()
    torch.ones(4).to("pretend", non_blocking=True)
    x[[0, 2]] = 0
    assert pretend.host_waits() == {"copy from pageable memory": 1, "copy to the device": 1}
    assert x.tolist() == [0, 1, 0, 1]


@on_ranks(1, device="pretend")
def test_a_capture_refuses_what_graph_captures_refuse():
    x = torch.ones(4, device="pretend")
    event = torch.pretend.current_stream().record_event()
    for act in (event.query, event.synchronize, x.cpu, pretend.synchronize, lambda: torch.ones(2).to("pretend")):
        with pretend.capturing(), pytest.raises(RuntimeError, match="while a graph is captured"):
            act()
    with pretend.capturing():
        assert torch.pretend.is_current_stream_capturing()
        y = x + 1
    assert y.tolist() == [2, 2, 2, 2]


def joined(side, back=True, event=None):
    """Work of a captured graph on ``side``."""
    if event is None:
        side.wait_stream(torch.pretend.current_stream())
    else:
        side.wait_event(event)
    with torch.pretend.stream(side):
        y = torch.ones(4, device="pretend") + 1
    if back:
        torch.pretend.current_stream().wait_stream(side)
    return y


@on_ranks(1, device="pretend")
def test_a_capture_is_isolated():
    side, before = side_stream(), torch.pretend.current_stream().record_event()
    with pretend.capturing():
        joined(side)
        inside = torch.pretend.current_stream().record_event()
    with pytest.raises(RuntimeError, match="has not been joined"), pretend.capturing():
        joined(side, back=False)
    with pytest.raises(RuntimeError, match="an event from outside"), pretend.capturing():
        torch.pretend.current_stream().wait_event(before)
    with pytest.raises(RuntimeError, match="takes no part in the capture"), pretend.capturing():
        joined(side, event=before)
    for act in (side.wait_event, lambda event: event.query(), lambda event: event.synchronize()):
        with pytest.raises(RuntimeError, match="event of a captured graph"):
            act(inside)
    pretend.synchronize()
    assert joined(side).tolist() == [2, 2, 2, 2]


@on_ranks(1, device="pretend")
def test_a_limited_allocator_gives_back_what_is_free_tries_again_and_then_raises():
    free = [torch.ones(1 << 20, device="pretend") for _ in range(2)]
    with pretend.limited_memory(8 << 20):
        with torch.pretend.stream(side_stream()):
            torch.ones(1 << 20, device="pretend")  # 4 MiB, which stay that stream's
        retries = pretend.memory_stats()["retries"]
        kept = torch.ones(1 << 21, device="pretend")
        assert pretend.memory_stats()["retries"] == retries + 1
        with pytest.raises(torch.OutOfMemoryError, match="tried to allocate 4194304 bytes"):
            torch.ones(1 << 20, device="pretend")
        del free[0]
        torch.ones(1 << 20, device="pretend")
    assert kept.sum().item() == 1 << 21
    assert free[0].sum().item() == 1 << 20


@on_ranks(1, device="pretend")
def test_a_limit_gives_no_room_in_segments_from_before():
    """Symptom: what an earlier test still held decided how much memory a limited step took."""
    held = torch.ones(1, device="pretend")  # the rest of its segment is free
    with pretend.limited_memory(1 << 10), pytest.raises(torch.OutOfMemoryError):
        torch.ones(1 << 10, device="pretend")
    assert held.item() == 1


@on_ranks(1, device="pretend")
@pytest.mark.parametrize(("numel", "waits"), [(16, False), (1 << 15, True)])
def test_a_large_copy_from_pageable_memory_waits_for_what_its_stream_did_before(numel, waits):
    pretend.set_order(0)
    host = torch.zeros(1).pin_memory()
    host.copy_(torch.ones(1, device="pretend"), non_blocking=True)
    torch.zeros(numel).to("pretend", non_blocking=True)
    assert (host.item() == 1) is waits


# ---- collectives ----


@on_ranks(2, device="pretend")
def test_collectives_between_processes_are_ordered_by_streams_and_have_the_backends_results():
    rank = dist.get_rank()
    for order in (None, 0, 1, 2):
        pretend.set_order(order)
        own = torch.arange(4.0, device="pretend") + 10 * rank
        gathered = torch.empty(8, device="pretend")
        side = side_stream()
        side.wait_stream(torch.pretend.current_stream())
        with torch.pretend.stream(side):
            torch_collectives.all_gather_single(gathered, own, world(), False)
        torch.pretend.current_stream().wait_stream(side)
        averaged = torch.empty(2, device="pretend")
        torch_collectives.reduce_scatter_single(averaged, own.clone(), dist.ReduceOp.AVG, world(), False)
        work = dist.all_reduce(own, op=dist.ReduceOp.PREMUL_SUM(0.5), async_op=True)
        work.wait()
        assert gathered.tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
        assert averaged.tolist() == [5 + 2 * rank, 6 + 2 * rank]
        assert own.tolist() == [5, 6, 7, 8]
        dist.barrier()


@on_ranks(2, device="pretend")
def test_coalesced_collectives_are_one_launch():
    outputs = [torch.empty(2 * n, device="pretend") for n in (3, 5)]
    inputs = [torch.full((n,), float(dist.get_rank()), device="pretend") for n in (3, 5)]
    pretend.reset_counts()
    with torch_collectives.one_launch(world(), torch.device("pretend:0")):
        for output, input_ in zip(outputs, inputs, strict=True):
            torch_collectives.all_gather_single(output, input_, world(), False)
    assert pretend.launches() == {"all_gather": 1}
    assert outputs[1].tolist() == [0.0] * 5 + [1.0] * 5


@on_ranks(2, device="pretend")
def test_ranks_that_issue_different_collectives_are_told_so():
    x = torch.ones(4, device="pretend")
    if dist.get_rank() == 0:
        dist.all_reduce(x)
    else:
        dist.broadcast(x, 0)
    with pytest.raises(RuntimeError, match=r"rank . issues collective .*: (all_reduce|broadcast) of 16 bytes"):
        pretend.synchronize()


@on_ranks(8, device="pretend_model")
def test_one_process_plays_a_rank_of_many():
    assert dist.get_world_size() == 8
    gathered = torch.empty(16, device="pretend")
    torch_collectives.all_gather_single(gathered, torch.tensor([1.0, 2.0], device="pretend"), world(), False)
    assert gathered.tolist() == [1.0, 2.0] * 8
    averaged = torch.empty(2, device="pretend")
    torch_collectives.reduce_scatter_single(averaged, gathered, dist.ReduceOp.AVG, world(), False)
    assert averaged.tolist() == [1.4375, 2.875]  # rank r has 1 + r / 8 times this one's


@on_ranks(2, device="pretend")
def test_two_communicators_whose_ranks_issue_in_different_orders_wait_for_each_other():
    """On a GPU their kernels may be resident together, or not."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]

    def reduced(order):
        tensors = {number: torch.full((4,), float(number + 1), device="pretend") for number in order}
        for number in order:
            with torch.pretend.stream(side_stream()):
                torch.pretend.current_stream().wait_stream(torch.pretend.default_stream())
                dist.all_reduce(tensors[number], group=groups[number])
        pretend.synchronize()
        return [tensors[number].sum().item() for number in (0, 1)]

    other = (0, 1) if dist.get_rank() == 0 else (1, 0)
    assert reduced(other) == [8, 16]
    with pretend.one_collective_at_a_time(60):
        assert reduced((0, 1)) == [8, 16]
    with pretend.one_collective_at_a_time(2), pytest.raises(RuntimeError, match="gives no other communicator a turn"):
        reduced(other)
