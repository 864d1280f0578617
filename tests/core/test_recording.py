"""The race check itself, on programs of a few lines: what it must find, and what it must let pass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp2.core.comm.streams import Streams, streams_of
from fsdp2.core.group.param import storage_view
from harness.recording import RaceError, RecordingStreams, recording


def races(program: Callable[[RecordingStreams], None]) -> list[str]:
    """How each race in ``program`` reads."""
    streams = RecordingStreams()
    with streams.watching():
        program(streams)
    return [str(race) for race in streams.races]


def follow(streams: RecordingStreams, later: str, earlier: str) -> None:
    streams.order(later, streams.mark(earlier))


@contextlib.contextmanager
def fake_ranks(world_size: int = 2) -> Iterator[None]:
    """A process group that moves nothing, but goes through the same operators."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


# ---- reads and writes ----


@pytest.mark.parametrize("ordered", [True, False])
def test_a_read_on_another_stream_must_come_behind_the_write(ordered):
    def program(streams: RecordingStreams) -> None:
        x = torch.ones(4)
        follow(streams, "gather", "compute")
        x.add_(1)
        if ordered:
            follow(streams, "gather", "compute")
        with streams.on("gather"):
            x + 1

    assert len(races(program)) == (0 if ordered else 1)


@pytest.mark.parametrize("ordered", [True, False])
def test_a_write_must_come_behind_every_read(ordered):
    def program(streams: RecordingStreams) -> None:
        x = torch.ones(4)
        for stream in ("gather", "reduce"):
            follow(streams, stream, "compute")
            with streams.on(stream):
                x + 1
        follow(streams, "compute", "gather")
        if ordered:
            follow(streams, "compute", "reduce")
        x.mul_(2)

    found = races(program)
    assert len(found) == (0 if ordered else 1)
    assert ordered or ("aten.mul_ on compute writes" in found[0] and "aten.add on reduce" in found[0])


def test_orders_are_transitive_but_not_symmetric():
    def program(streams: RecordingStreams) -> None:
        x = torch.ones(4)
        follow(streams, "gather", "compute")
        follow(streams, "reduce", "gather")
        with streams.on("reduce"):
            x.add_(1)
        follow(streams, "all_reduce", "reduce")
        follow(streams, "compute", "all_reduce")
        x.add_(1)
        with streams.on("reduce"):  # compute is behind reduce, but reduce not behind compute
            x.add_(1)

    (found,) = races(program)
    assert "aten.add_ on reduce writes" in found


def test_an_event_covers_only_what_came_before_it():
    def program(streams: RecordingStreams) -> None:
        x = torch.ones(4)
        event = streams.mark("compute")
        x.add_(1)
        streams.order("gather", event)
        with streams.on("gather"):
            x + 1

    assert len(races(program)) == 1


def test_two_reads_are_no_race():
    def program(streams: RecordingStreams) -> None:
        x = torch.ones(4)
        follow(streams, "gather", "compute")
        with streams.on("gather"):
            x + 1
        x + 1

    assert races(program) == []


def test_the_report_names_both_operators_streams_lines_and_the_buffer():
    def program(streams: RecordingStreams) -> None:
        x = torch.zeros(8)
        with streams.on("user's own"):
            x[2:4].fill_(1)

    (found,) = races(program)
    first = program.__code__.co_firstlineno
    assert found.startswith("aten.fill_ on user's own writes bytes [8, 16) too early")
    assert f"earlier  aten.zeros on compute, at test_recording.py:{first + 1} program" in found
    assert f"later    aten.fill_ on user's own, at test_recording.py:{first + 3} program" in found
    assert "buffer   32 bytes, by aten.zeros on compute" in found


def race(then: Callable[[], object]) -> None:
    with recording() as streams:
        checked: Streams = streams
        assert streams_of(torch.device("cpu")) is checked
        x = torch.zeros(8)
        with streams.on("gather"):
            x + 1
        then()


def fail() -> None:
    raise ZeroDivisionError


def test_leaving_the_recording_raises_what_was_found():
    before = streams_of(torch.device("cpu"))
    with pytest.raises(RaceError, match="1 race"):
        race(then=int)
    assert streams_of(torch.device("cpu")) is before


def test_an_error_inside_is_not_hidden_by_a_race():
    with pytest.raises(ZeroDivisionError):
        race(then=fail)


# ---- which bytes ----


def test_disjoint_pieces_of_a_buffer_do_not_race_but_the_whole_does():
    def program(streams: RecordingStreams) -> None:
        flat = torch.zeros(8)
        follow(streams, "gather", "compute")
        with streams.on("gather"):
            flat[:4].fill_(1)
        flat[4:].fill_(2)
        assert streams.races == []
        flat.fill_(3)

    (found,) = races(program)
    assert "writes bytes [0, 32)" in found


@pytest.mark.parametrize("seen_first", ["piece", "whole"])
def test_a_storage_inside_another_is_the_same_memory(seen_first):
    """A sharded parameter has a storage of its own over a piece of the flat shard."""
    flat = torch.zeros(8)
    shard = torch.empty(0).set_(torch.from_dlpack(flat[2:4].view(torch.uint8)).untyped_storage(), 0, (2,), (1,))

    def program(streams: RecordingStreams) -> None:
        if seen_first == "piece":
            shard + 1
        with streams.on("gather"):
            flat + 1
        shard.add_(1)

    (found,) = races(program)
    assert "aten.add_ on compute writes bytes [8, 16)" in found
    assert "aten.add on gather" in found


def test_memory_that_outlives_one_of_its_storages_is_not_freed():
    def program(streams: RecordingStreams) -> None:
        flat = torch.zeros(8)
        shard = torch.from_dlpack(flat[2:4])
        shard + 1
        follow(streams, "gather", "compute")
        with streams.on("gather"):
            flat + 1
        del shard
        torch.ones(1)

    assert races(program) == []


# ---- operators of every kind ----


def test_views_touch_nothing():
    def program(streams: RecordingStreams) -> None:
        x = torch.zeros(8)
        with streams.on("gather"):
            x.view(2, 4).t()[1:].unbind()
            x.detach()
            torch.empty_like(x)
            x.data.as_strided((2,), (1,), 3)
            torch.empty(0).set_(x.untyped_storage(), 0, (8,), (1,))

    assert races(program) == []


def split_copy(outs: list[Tensor], source: Tensor) -> None:
    torch.split_with_sizes_copy(source.view(1, -1), [4, 4], dim=1, out=outs)


def chunk_cat(outs: list[Tensor], source: Tensor) -> None:
    torch._chunk_cat([source[:4]], 0, 1, out=outs[0])


def foreach_add(outs: list[Tensor], source: Tensor) -> None:
    torch._foreach_add_(outs, list(source.view(2, 1, 4).unbind()))


def matmul_out(outs: list[Tensor], source: Tensor) -> None:
    torch.mm(source.view(2, 4)[:1], source.view(4, 2), out=torch.empty(1, 2))
    outs[0].zero_()


@pytest.mark.parametrize("operator", [split_copy, chunk_cat, foreach_add, matmul_out])
@pytest.mark.parametrize("missing", ["read", "write"])
def test_out_variants_and_foreach_read_and_write(operator, missing):
    def program(streams: RecordingStreams) -> None:
        outs = [torch.zeros(1, 4), torch.zeros(1, 4)]
        if missing == "read":
            follow(streams, "gather", "compute")
        source = torch.ones(8)
        if missing == "write":
            follow(streams, "gather", "compute")
            outs[0].zero_()
        with streams.on("gather"):
            operator(outs, source)

    assert any(f"on gather {missing}s" in race for race in races(program))


COLLECTIVES = {
    "all_gather": lambda output, source: dist.all_gather_into_tensor(output, source),
    "reduce_scatter": lambda output, source: dist.reduce_scatter_tensor(output, source),
    "all_to_all": lambda output, source: dist.all_to_all_single(output, source),
    "all_reduce": lambda output, source: dist.all_reduce(output),
    "broadcast": lambda output, source: dist.broadcast(output, 1),
    "recv": lambda output, source: dist.recv(output, 1),
    "send": lambda output, source: dist.send(source, 1),
}


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_write_their_output_and_read_their_input(name):
    sizes = {"all_gather": (4, 8), "reduce_scatter": (8, 4)}
    for late in ("read", "write"):
        if (late == "read") != (name == "send") and name not in ("all_gather", "reduce_scatter", "all_to_all"):
            continue

        def program(streams: RecordingStreams, late: str = late) -> None:
            source, output = (torch.zeros(numel) for numel in sizes.get(name, (4, 4)))
            follow(streams, "gather", "compute")
            (source if late == "read" else output).add_(1)
            with streams.on("gather"):
                COLLECTIVES[name](output, source)

        with fake_ranks():
            (found,) = races(program)
        assert f"on gather {late}s" in found
        assert "c10d." in found


@pytest.mark.parametrize("read", [lambda x: x.item(), lambda x: x.tolist(), lambda x: x.numpy(), float, bool])
def test_the_host_may_read_only_what_the_current_stream_is_behind(read):
    def program(streams: RecordingStreams) -> None:
        follow(streams, "reduce", "compute")
        with streams.on("reduce"):
            x = torch.ones(1)
        read(x)

    (found,) = races(program)
    assert "on compute reads" in found


def test_a_blocking_read_does_not_stand_in_for_an_order():
    def program(streams: RecordingStreams) -> None:
        x = torch.ones(1)
        follow(streams, "reduce", "compute")
        x.item()
        with streams.on("reduce"):
            x.add_(1)

    assert len(races(program)) == 1


def test_synchronize_orders_all_that_is_started_after_it():
    def program(streams: RecordingStreams) -> None:
        x = torch.ones(1)
        event = streams.mark("compute")
        streams.synchronize(event)
        for stream in ("reduce", "never seen before"):
            with streams.on(stream):
                x + 1

    assert races(program) == []


def test_backward_is_recorded():
    """Autograd runs CPU operators on the calling thread, where the recording is active."""

    def program(streams: RecordingStreams) -> None:
        weight = torch.ones(4, requires_grad=True)
        loss = (weight * weight).sum()
        follow(streams, "gather", "compute")
        with torch.no_grad(), streams.on("gather"):
            weight.data.fill_(3)
        loss.backward()

    (found,) = [race for race in races(program) if "aten.mul on compute reads" in race]
    assert "aten.fill_ on gather" in found


# ---- allocation and free ----


def test_memory_may_be_used_on_another_stream_only_behind_its_allocation():
    def program(streams: RecordingStreams) -> None:
        x = torch.empty(4)
        with streams.on("gather"):
            x.zero_()

    (found,) = races(program)
    assert "earlier  aten.empty on compute" in found


@pytest.mark.parametrize("ordered", [True, False])
def test_freed_memory_may_be_used_again_only_behind_its_last_use_elsewhere(ordered):
    def program(streams: RecordingStreams) -> None:
        x = torch.empty(4)
        follow(streams, "gather", "compute")
        with streams.on("gather"):
            x.zero_()
        del x  # this alone is fine ...
        assert streams.races == []
        if ordered:
            follow(streams, "compute", "gather")
        torch.ones(1)  # ... but this may get its memory

    found = races(program)
    assert len(found) == (0 if ordered else 1)
    assert ordered or "freed while still in use" in found[0]


def test_memory_goes_back_to_the_stream_that_allocated_it():
    def program(streams: RecordingStreams) -> None:
        with streams.on("reduce"):
            x = torch.empty(4)
        follow(streams, "compute", "reduce")
        x.zero_()
        del x
        torch.ones(4)  # compute has nothing to wait for: the memory is not its own
        assert streams.races == []
        with streams.on("reduce"):
            torch.ones(4)

    (found,) = races(program)
    assert "freed while still in use" in found
    assert "re-use of freed memory on reduce" in found


def test_what_autograd_saves_is_not_freed_before_backward():
    def program(streams: RecordingStreams) -> None:
        weight = torch.ones(4, requires_grad=True)
        follow(streams, "gather", "compute")
        y = weight.exp()
        loss = y.sum()
        storage = y.untyped_storage()
        follow(streams, "gather", "compute")
        with torch.no_grad(), streams.on("gather"):
            y.detach() + 1
        del y, storage
        torch.ones(1)
        assert streams.races == []
        follow(streams, "compute", "gather")
        loss.backward()

    assert races(program) == []


@pytest.mark.parametrize("missing", ["allocate", "free", None])
def test_resizing_a_storage_allocates_and_frees(missing):
    def program(streams: RecordingStreams) -> None:
        storage = torch.empty(16, dtype=torch.uint8).untyped_storage()
        view = storage_view(storage, torch.empty(0), 0, (4,))
        streams.resize(storage, 0)
        streams.resize(storage, 16)
        if missing != "allocate":
            follow(streams, "gather", "compute")
        with streams.on("gather"):
            view.fill_(1)
        if missing != "free":
            follow(streams, "compute", "gather")
        streams.resize(storage, 0)
        torch.ones(1)

    found = races(program)
    assert len(found) == (0 if missing is None else 1)
    if missing == "allocate":
        assert "earlier  resize on compute" in found[0]
    if missing == "free":
        assert "freed while still in use, by free on compute" in found[0]


def test_use_after_a_resize_to_nothing_is_refused():
    streams = RecordingStreams()
    with streams.watching():
        x = torch.zeros(4)
        streams.resize(x.untyped_storage(), 0)
        with pytest.raises(AssertionError, match="used after its storage was freed"):
            x + 1


# ---- memory of the host, as with CPU offload ----


@pytest.mark.parametrize("ordered", [True, False])
def test_the_host_may_write_only_when_the_copy_to_the_device_has_passed(ordered):
    def program(streams: RecordingStreams) -> None:
        flat = torch.ones(4)
        streams.keep_on_host(flat)
        with streams.on("gather"):
            flat.to(torch.device("cpu"), non_blocking=True)
        follow(streams, "compute", "gather")  # the host is not compute
        if ordered:
            streams.synchronize(streams.mark("compute"))
        flat.add_(1)

    found = races(program)
    assert len(found) == (0 if ordered else 1)
    assert ordered or "aten.add_ on host writes" in found[0]


@pytest.mark.parametrize("non_blocking", [True, False])
def test_the_host_may_read_only_what_a_copy_has_brought(non_blocking):
    def program(streams: RecordingStreams) -> None:
        flat = torch.ones(4)
        streams.keep_on_host(flat)
        grad = torch.empty(4, pin_memory=True)
        grad.copy_(torch.ones(4), non_blocking=non_blocking)
        flat.sub_(grad)
        grad.tolist()

    found = races(program)
    assert len(found) == (2 if non_blocking else 0)
    assert not non_blocking or "aten.sub_ on host reads" in found[0]
