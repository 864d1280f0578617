"""Every algorithm of every collective, against sums that the test computes itself."""

from __future__ import annotations

import itertools
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp2.core.comm import collectives
from fsdp2.core.comm.backends import choose_all_gather, choose_all_reduce, choose_reduce_scatter, is_stream_ordered
from fsdp2.core.comm.collectives import all_gather, all_reduce, reduce_scatter
from fsdp2.core.comm.division import SUM, Division, divisions_for
from harness import on_ranks

FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
GATHERS = ["stock", "broadcast"]
SCATTERS = ["stock", "all_to_all", "pairwise", "all_reduce"]
RANK_ORDERED_SCATTERS = ["all_to_all", "pairwise"]


def row(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """What ``rank`` contributes: values whose sum depends on the order of addition."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(numel, generator=generator, dtype=torch.float64) * 10.0 ** (rank - 1)
    return (values * 100).to(dtype) if dtype == torch.uint8 else values.to(dtype)


def rank_ordered_sum(world_size: int, numel: int, dtype: torch.dtype) -> Tensor:
    total = row(0, numel, dtype)
    for rank in range(1, world_size):
        total = total + row(rank, numel, dtype)
    return total


def assert_bitwise(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def assert_within_rounding(actual: Tensor, expected: Tensor) -> None:
    """For sums in another order: some roundings of the largest contribution, which may cancel out of the sum."""
    largest = 5 * 10.0 ** (dist.get_world_size() - 2)
    torch.testing.assert_close(actual, expected, rtol=0, atol=4 * largest * torch.finfo(actual.dtype).eps)


# ---- pure ----


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((1, 1, torch.float32, "gloo"), ("SUM", None, None, "SUM", None, None)),
        ((4, 1, torch.float32, "gloo"), ("SUM", None, 4, "SUM", None, None)),
        ((1, 4, torch.float32, "gloo"), ("SUM", None, None, "SUM", None, 4)),
        ((4, 2, torch.bfloat16, "gloo"), ("SUM", None, None, "SUM", None, 8)),
        ((4, 2, torch.float32, "gloo", 3.0), ("SUM", None, None, "SUM", None, 3)),
        ((1, 1, torch.float32, "gloo", 3.0), ("SUM", None, 3, "SUM", None, None)),
        ((4, 1, torch.float32, "gloo", 1.0), ("SUM", None, None, "SUM", None, None)),
        ((1, 1, torch.float32, "nccl"), ("SUM", None, None, "SUM", None, None)),
        ((1, 1, torch.float32, "nccl", 3.0), ("SUM", None, 3, "SUM", None, None)),
        ((4, 1, torch.float32, "nccl"), ("AVG", None, None, "SUM", None, None)),
        ((1, 4, torch.float32, "nccl"), ("SUM", None, None, "AVG", None, None)),
        ((4, 2, torch.float32, "nccl"), ("AVG", None, None, "AVG", None, None)),
        ((3, 1, torch.float32, "nccl"), ("AVG", None, None, "SUM", None, None)),
        ((3, 1, torch.bfloat16, "nccl"), ("SUM", None, 3, "SUM", None, None)),
        ((4, 3, torch.bfloat16, "nccl"), ("SUM", None, None, "SUM", None, 12)),
        ((4, 2, torch.bfloat16, "nccl"), ("AVG", None, None, "AVG", None, None)),
        ((4, 2, torch.bfloat16, "nccl", 8.0), ("SUM", None, None, "SUM", None, 8)),
        ((4, 2, torch.float32, "nccl", 4.0), ("AVG", None, None, "SUM", None, None)),
        ((4, 2, torch.float32, "nccl", 5.0), ("SUM", None, None, "SUM", None, 5)),
        ((1, 2, torch.float32, "nccl", 5.0), ("SUM", None, None, "SUM", None, 5)),
        ((4, 2, torch.float32, "nccl", 5.0, True), ("SUM", None, None, "SUM", None, 5)),
        ((4, 2, torch.float32, "nccl", None, True), ("SUM", None, None, "SUM", None, 8)),
        ((2, 1, torch.float16, "nccl"), ("SUM", 2, None, "SUM", None, None)),
        ((4, 1, torch.float16, "gloo"), ("SUM", 2, 2, "SUM", None, None)),
        ((4, 2, torch.float16, "gloo"), ("SUM", 4, None, "SUM", None, 2)),
        ((3, 1, torch.float16, "gloo"), ("SUM", 2, 1.5, "SUM", None, None)),
        ((1, 8, torch.float16, "gloo"), ("SUM", None, None, "SUM", 4, 2)),
        ((8, 1, torch.float16, "gloo", 0.5), ("SUM", None, 0.5, "SUM", None, None)),
        ((4, 1, torch.float64, "gloo"), ("SUM", None, 4, "SUM", None, None)),
        ((4, 2, torch.float32, "nccl", None, False, "gloo"), ("AVG", None, None, "SUM", None, 2)),
        ((4, 2, torch.float32, "nccl", 5.0, False, "gloo"), ("SUM", None, None, "SUM", None, 5)),
        ((1, 2, torch.float32, "nccl", None, False, "gloo"), ("SUM", None, None, "SUM", None, 2)),
        ((4, 2, torch.float32, "gloo", None, False, "nccl"), ("SUM", None, None, "SUM", None, 8)),
        ((1, 2, torch.float32, "", None, False, "nccl"), ("SUM", None, None, "AVG", None, None)),
        ((4, 2, torch.float32, "a backend that nobody knows"), ("SUM", None, None, "SUM", None, 8)),
    ],
)
def test_the_two_legs_of_a_gradient_divide_once(arguments, expected):
    legs = divisions_for(*arguments)
    found = []
    for leg in (legs.reduce_scatter, legs.all_reduce):
        found += [leg.op.name, leg.predivide, leg.postdivide]
    assert tuple(found) == expected


@pytest.mark.parametrize("backend", ["nccl", "fake", "a backend that nobody knows"])
@pytest.mark.parametrize("choose", [choose_all_gather, choose_reduce_scatter, choose_all_reduce])
def test_only_gloo_takes_other_algorithms_than_the_backends_own(choose, backend):
    assert {choose(backend, ranks, nbytes) for ranks in (1, 2, 64) for nbytes in (0, 4096, 1 << 30)} == {"stock"}


def test_gloo_neither_sends_nor_receives_device_memory():
    for ranks, nbytes in itertools.product((2, 4, 64), (4096, 1 << 26)):
        assert choose_all_gather("gloo", ranks, nbytes, "cuda") == "broadcast"
        assert choose_reduce_scatter("gloo", ranks, nbytes, "cuda") == "all_reduce"
        assert choose_all_reduce("gloo", ranks, nbytes, "cuda") == "stock"


def test_backends_that_order_by_streams_are_not_waited_for():
    assert is_stream_ordered("nccl")
    assert is_stream_ordered("fake")
    assert not is_stream_ordered("gloo")
    assert not is_stream_ordered("a backend that nobody knows")


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("numel", [0, 1, 1000])
@pytest.mark.parametrize("dtype", FLOATS)
def test_rows_are_summed_in_rank_order_into_any_of_them(world_size, numel, dtype):
    expected = rank_ordered_sum(world_size, numel, dtype) / 2
    rows = [row(rank, numel, dtype) for rank in range(world_size)]
    apart = torch.empty(numel, dtype=dtype)
    for own in range(-1, world_size):
        mine = [tensor.clone() for tensor in rows]
        output = apart if own < 0 else mine[own]
        collectives._sum_rows(mine, output, 2.0)
        assert_bitwise(output, expected)


# ---- on ranks ----


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("algorithm", GATHERS)
def test_all_gather_lays_the_ranks_inputs_one_after_another(algorithm, in_place, world_size):
    rank, world = dist.get_rank(), dist.group.WORLD
    for dtype in [*FLOATS, torch.uint8]:
        outputs, inputs, expected = [], [], []
        for numel in (3, 0, 1, 5000):
            output = torch.zeros(world_size * numel, dtype=dtype)
            input_ = output[rank * numel : (rank + 1) * numel] if in_place else torch.empty(numel, dtype=dtype)
            input_.copy_(row(rank, numel, dtype))
            outputs.append(output)
            inputs.append(input_)
            expected.append(torch.cat([row(other, numel, dtype) for other in range(world_size)]))
        all_gather(outputs, inputs, world, algorithm, async_op=True).finish()
        for output, wanted in zip(outputs, expected, strict=True):
            assert_bitwise(output, wanted)


@on_ranks(1, 2)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int16, torch.bool, torch.complex64])
@pytest.mark.parametrize("algorithm", GATHERS)
def test_all_gather_carries_dtypes_that_gloo_does_not_know(algorithm, dtype, world_size):
    rank = dist.get_rank()
    output = torch.zeros(world_size * 4, dtype=dtype)
    all_gather([output], [torch.full((4,), rank, dtype=dtype)], dist.group.WORLD, algorithm, True).finish()
    assert output.tolist() == torch.arange(world_size).repeat_interleave(4).to(dtype).tolist()


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("algorithm", SCATTERS)
@pytest.mark.parametrize("numel", [0, 1, 1000, 70_001])
def test_reduce_scatter_gives_each_rank_its_row_of_the_sum(algorithm, numel, world_size):
    rank, world = dist.get_rank(), dist.group.WORLD
    for dtype in FLOATS:
        expected = rank_ordered_sum(world_size, world_size * numel, dtype)[rank * numel : (rank + 1) * numel]
        for reduction in (SUM, Division(postdivide=3.0), Division(predivide=2.0, postdivide=1.5)):
            output = torch.full((numel,), -1, dtype=dtype)
            input_ = row(rank, world_size * numel, dtype)
            reduce_scatter(output, input_, world, reduction, algorithm, async_op=True).finish()
            wanted = expected / ((reduction.predivide or 1) * (reduction.postdivide or 1))
            if dtype != torch.float16 and (algorithm in RANK_ORDERED_SCATTERS or world_size <= 2):
                assert_bitwise(output, wanted)
            else:
                assert_within_rounding(output, wanted)


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("algorithm", ["stock", "all_gather"])
@pytest.mark.parametrize("numel", [0, 1, 1000, 70_001])
def test_all_reduce_gives_every_rank_the_same_sum(algorithm, numel, world_size):
    rank, world = dist.get_rank(), dist.group.WORLD
    for dtype in FLOATS:
        for reduction in (SUM, Division(postdivide=3.0), Division(predivide=2.0, postdivide=1.5)):
            buffer = row(rank, numel, dtype)
            all_reduce(buffer, world, reduction, algorithm, async_op=True).finish()
            wanted = rank_ordered_sum(world_size, numel, dtype)
            wanted = wanted / ((reduction.predivide or 1) * (reduction.postdivide or 1))
            if dtype != torch.float16 and (algorithm == "all_gather" or world_size <= 2):
                assert_bitwise(buffer, wanted)
            else:
                assert_within_rounding(buffer, wanted)
            everyone = [torch.empty_like(buffer) for _ in range(world_size)]
            dist.all_gather(everyone, buffer)
            assert all(torch.equal(buffer, theirs) for theirs in everyone)


@on_ranks(4)
@pytest.mark.parametrize("dtype", FLOATS)
def test_hsdp_averages_each_gradient_once(dtype):
    rank = dist.get_rank()
    shards = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    legs = divisions_for(2, 2, dtype, "gloo")
    output = torch.empty(5, dtype=dtype)
    reduce_scatter(output, torch.full((10,), rank + 1.0, dtype=dtype), shards, legs.reduce_scatter, "pairwise", True).finish()
    all_reduce(output, replicas, legs.all_reduce, "all_gather", True).finish()
    assert_bitwise(output, torch.full((5,), 2.5, dtype=dtype))


@on_ranks(2, 4)
@pytest.mark.parametrize("algorithm", SCATTERS)
def test_fp16_gradients_near_the_largest_number_are_averaged_without_overflow(algorithm, world_size):
    reduction = divisions_for(world_size, 1, torch.float16, "gloo").reduce_scatter
    output = torch.empty(3, dtype=torch.float16)
    input_ = torch.full((3 * world_size,), 30000.0, dtype=torch.float16)
    reduce_scatter(output, input_, dist.group.WORLD, reduction, algorithm, True).finish()
    assert_bitwise(output, torch.full((3,), 30000.0, dtype=torch.float16))


@on_ranks(2, 3)
def test_collectives_in_flight_together_may_be_finished_in_any_order(world_size):
    rank, world = dist.get_rank(), dist.group.WORLD
    gathered = torch.empty(world_size * 4000)
    output, buffer = torch.empty(5000), torch.full((6000,), float(rank))
    pendings = [
        all_gather([gathered], [torch.full((4000,), float(rank))], world, "broadcast", True),
        reduce_scatter(output, torch.full((world_size * 5000,), float(rank)), world, SUM, "pairwise", True),
        all_reduce(buffer, world, SUM, "all_gather", True),
    ]
    theirs = torch.empty(1)
    works = [dist.isend(torch.tensor([7.0]), (rank + 1) % world_size), dist.irecv(theirs, (rank - 1) % world_size)]
    for work in works:
        work.wait()
    for pending in reversed(pendings) if rank == 0 else pendings:
        pending.finish()
    total = float(sum(range(world_size)))
    assert_bitwise(gathered, torch.arange(float(world_size)).repeat_interleave(4000))
    assert_bitwise(output, torch.full((5000,), total))
    assert_bitwise(buffer, torch.full((6000,), total))
    assert theirs.item() == 7.0  # the user's own messages on the same group are not ours


@on_ranks(2)
@pytest.mark.parametrize("algorithm", SCATTERS)
def test_a_second_finish_does_nothing(algorithm):
    output = torch.empty(3)
    pending = reduce_scatter(output, torch.ones(6), dist.group.WORLD, Division(postdivide=4.0), algorithm, True)
    pending.finish()
    pending.finish()
    assert_bitwise(output, torch.full((3,), 0.5))


@on_ranks(2, 3)
@pytest.mark.parametrize("numel", [10, 1_000_000])
def test_a_collective_that_nobody_finishes_does_not_stop_the_next_one(numel, world_size):
    """Symptom: all ranks hang after an exception. Cause: with send and recv, gloo cannot place a message whose receiving buffer
    is gone, and its connection jams; so no algorithm may use those."""
    rank, world = dist.get_rank(), dist.group.WORLD
    for algorithm in GATHERS:
        all_gather([torch.empty(world_size * numel)], [torch.ones(numel)], world, algorithm, True)
    for algorithm in SCATTERS:
        reduce_scatter(torch.empty(numel), torch.ones(world_size * numel), world, SUM, algorithm, True)
    for algorithm in ("stock", "all_gather"):
        all_reduce(torch.ones(numel), world, SUM, algorithm, True)
    dist.barrier()
    output = torch.empty(numel)
    reduce_scatter(output, torch.full((world_size * numel,), float(rank)), world, SUM, "pairwise", True).finish()
    assert_bitwise(output, torch.full((numel,), float(sum(range(world_size)))))


@on_ranks(2)
def test_buffers_are_kept_until_finish_and_no_longer():
    input_, output = torch.ones(2_000_000), torch.empty(1_000_000)
    alive = weakref.ref(input_.untyped_storage())
    pending = reduce_scatter(output, input_, dist.group.WORLD, SUM, "pairwise", True)
    del input_
    assert alive() is not None
    pending.finish()
    for _ in range(50):  # a thread of gloo's may hold a completed work until it is scheduled again; the rounds make it take others
        dist.barrier()
    assert alive() is None
    assert_bitwise(output, torch.full((1_000_000,), 2.0))


@on_ranks(2)
def test_collectives_are_looked_up_when_called_so_that_tools_can_count_them():
    counts = {}
    for name, run in {
        "broadcast": lambda: all_gather([torch.empty(4)], [torch.ones(2)], dist.group.WORLD, "broadcast", True),
        "all_reduce": lambda: all_reduce(torch.ones(2), dist.group.WORLD, SUM, "stock", True),
        "all_to_all_single": lambda: reduce_scatter(torch.empty(2), torch.ones(4), dist.group.WORLD, SUM, "all_to_all", True),
    }.items():
        with mock.patch.object(dist, name, wraps=getattr(dist, name)) as counted:
            run().finish()
        counts[name] = counted.call_count
    assert counts == {"broadcast": 2, "all_reduce": 1, "all_to_all_single": 1}


# ---- stream-ordered: the fake process group stands for NCCL ----


@pytest.fixture
def fake_world():
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("algorithm", ["stock", "broadcast"])
@pytest.mark.parametrize("pairs", [1, 3])
def test_stream_ordered_gathers_leave_nothing_to_wait_for(fake_world, algorithm, pairs):
    inputs = [torch.full((2,), 5.0) for _ in range(pairs)]
    outputs = [torch.zeros(8) for _ in range(pairs)]
    pending = all_gather(outputs, inputs, fake_world, algorithm, async_op=False)
    assert pending is None
    for output in outputs:
        assert_bitwise(output[2:4], torch.full((2,), 5.0))


@pytest.mark.parametrize("algorithm", ["stock", "all_to_all", "all_reduce"])
def test_stream_ordered_reductions_divide_right_behind_the_collective(fake_world, algorithm):
    output, buffer = torch.full((2,), 4.0), torch.full((3,), 8.0)
    assert reduce_scatter(output, torch.ones(8), fake_world, Division(postdivide=4.0), algorithm, False) is None
    assert all_reduce(buffer, fake_world, Division(postdivide=4.0), "stock", False) is None
    assert_bitwise(buffer, torch.full((3,), 2.0))
