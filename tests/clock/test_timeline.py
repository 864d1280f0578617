"""Virtual time of small traces that a reader can work out by hand. Nothing here needs a device or a process group."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdp2.testing.clock.cards import H100, HostCosts, Protocol
from fsdp2.testing.clock.report import Breakdown, break_down, union, without
from fsdp2.testing.clock.timeline import Clock
from fsdp2.testing.clock.trace import Entry, Seen, Trace, steady

MS = 1e-3
# 1 MB of traffic takes 1 ms; a gather of 1 MB over two ranks of one host takes 1 ms; the host and launches are free.
CARD = replace(
    H100,
    memory_bandwidth=1e9,
    memory_share=1.0,
    inside=0.5e9,
    link_share=1.0,
    collectives_take=0.0,
    kernel_s=0.0,
    launch_s=0.0,
    protocols=(Protocol("wire", base_s=0.0, inside_s=0.0, between_s=0.0, share=1.0),),
    host=HostCosts(0.0, 0.0, 0.0, 0.0, 0.0),
)
PAIR = (0, 1)


def work(ms: float, stream: int = 0, host_ms: float = 0.0, name: str = "aten::neg") -> Entry:
    """An operator that takes ``ms``, and before which the host takes ``host_ms``."""
    return Entry("op", name, stream, tensors=(Seen(True, False, "Float", int(ms * 1e6), (1,)),), host_s=host_ms * MS)


def gather(ms: float, stream: int, group: int = 0) -> Entry:
    return Entry("collective", "all_gather", stream, group, 1, int(ms * 1e6))


def record(event: int, stream: int) -> Entry:
    return Entry("record", stream=stream, id=event)


def wait(event: int, stream: int) -> Entry:
    return Entry("wait", stream=stream, id=event)


def mark(phase: str) -> Entry:
    return Entry("mark", phase)


def clocked(*entries: Entry, card=CARD) -> Clock:
    clock = Clock(card, groups=[PAIR, PAIR])
    clock.run(entries)
    return clock


def times(clock: Clock) -> list[tuple[float, float]]:
    """Start and stop of each span, in ms."""
    return [(pytest.approx(span.start / MS), pytest.approx(span.stop / MS)) for span in clock.spans]


def test_operators_on_one_stream_add_up():
    assert times(clocked(work(3), work(2))) == [(0, 3), (3, 5)]


def test_operators_on_two_streams_overlap():
    clock = clocked(work(3), work(2, stream=1))
    assert times(clock) == [(0, 3), (0, 2)]
    assert clock.end == pytest.approx(3 * MS)


def test_a_stream_that_waits_for_an_event_goes_on_when_the_other_stream_has_passed_it():
    clock = clocked(work(3), record(1, stream=0), work(4), wait(1, stream=1), work(2, stream=1))
    assert times(clock) == [(0, 3), (3, 7), (3, 5)]


def test_what_a_stream_was_given_before_the_wait_does_not_wait():
    clock = clocked(work(3), record(1, stream=0), work(2, stream=1), wait(1, stream=1), work(2, stream=1))
    assert times(clock) == [(0, 3), (0, 2), (3, 5)]


def test_collectives_of_one_group_run_in_the_order_of_issue_and_those_of_two_groups_together():
    assert times(clocked(gather(3, stream=1), gather(2, stream=2))) == [(0, 3), (3, 5)]
    assert times(clocked(gather(3, stream=1), gather(2, stream=2, group=1))) == [(0, 3), (0, 2)]


def test_operators_are_slower_while_a_collective_runs():
    card = replace(CARD, collectives_take=0.25)
    assert times(clocked(gather(2, stream=1), work(3), work(1), card=card)) == [(0, 2), (0, 3.5), (3.5, 4.5)]
    assert times(clocked(gather(9, stream=1), work(3), card=card)) == [(0, 9), (0, 4)]
    two_groups = clocked(gather(2, stream=1), gather(1, stream=2, group=1), work(3), card=card)
    assert times(two_groups) == [(0, 2), (0, 1), (0, 3.5)]
    later = (gather(9, 1), record(1, stream=1), wait(1, stream=2), gather(1, stream=2, group=1), wait(1, stream=0), work(3))
    assert times(clocked(*later, card=card)) == [(0, 9), (9, 10), (9, pytest.approx(9 + 1 + 2.25))]


def test_a_host_bound_step_takes_what_the_host_takes():
    clock = clocked(*[work(1, host_ms=5) for _ in range(4)])
    assert clock.end == pytest.approx(21 * MS)
    parts = break_down(clock.spans, 0.0, clock.end)
    assert (parts.computing, parts.idle, parts.gaps) == (pytest.approx(4 * MS), pytest.approx(17 * MS), 4)


def test_a_device_bound_step_takes_what_the_device_takes():
    clock = clocked(*[work(5, host_ms=1) for _ in range(4)])
    assert clock.end == pytest.approx(21 * MS)
    assert break_down(clock.spans, 0.0, clock.end) == Breakdown(
        computing=pytest.approx(20 * MS), exposed={}, waiting=0.0, idle=pytest.approx(1 * MS), gaps=1
    )


def test_a_host_that_waits_for_an_event_launches_what_follows_behind_it():
    clock = clocked(work(3), record(1, stream=0), work(4), Entry("host waits for event", id=1), work(1, stream=1))
    assert times(clock) == [(0, 3), (3, 7), (3, 4)]


def test_the_host_pays_for_what_lies_below_the_dispatcher():
    card = replace(CARD, host=HostCosts(operator=1 * MS, collective=10 * MS, coalesced=2 * MS, event=0.5 * MS, memory=0.0))
    coalesced = Entry("collective", "all_gather", 1, 0, 3, 0)
    clock = clocked(mark("forward"), work(0), record(1, stream=0), wait(1, stream=1), coalesced, card=card)
    assert dict(clock.host_works) == {"": 0.0, "forward": pytest.approx((1 + 0.5 + 0.5 + 10 + 2 * 2) * MS)}


def test_exposed_communication_of_a_schedule_of_two_layers():
    """Gather a (2 ms), then b (2 ms) while a computes for 1 ms; pack for 1 ms; in backward nothing is exposed but the last reduction.

    compute     . . a . . b | b' b' b'         forward: 2 ms for a, 1 ms for b
    gather      a a b b p .                    1 ms for b's copy
    reduce                          r r        behind backward: 2 ms
    """
    clock = clocked(
        mark("forward"),
        *(gather(2, stream=1), record(1, stream=1), gather(2, stream=1), work(1, stream=1), record(2, stream=1)),
        *(wait(1, stream=0), work(1), wait(2, stream=0), work(1)),
        mark("backward"),
        *(work(3), record(3, stream=0), wait(3, stream=2), gather(2, stream=2)),
    )
    parts = break_down(clock.spans, 0.0, clock.end)
    assert parts.computing == pytest.approx(5 * MS)
    assert parts.exposed == {"forward": pytest.approx(3 * MS), "end": pytest.approx(2 * MS)}
    assert parts.waiting == pytest.approx(1 * MS)
    assert parts.idle == pytest.approx(0.0)
    assert clock.end == pytest.approx(11 * MS)


def test_memory_that_another_stream_uses_is_given_out_again_once_that_stream_has_passed():
    def alloc(block: int) -> Entry:
        return Entry("alloc", id=block, nbytes=30 << 20)

    use, free = Entry("use", stream=1, id=1), Entry("free", id=1)
    later = Entry("mark", "later", host_s=9 * MS)
    reserved = [
        clocked(alloc(1), work(5, stream=1), *used, free, *passed, alloc(2)).allocator.reserved >> 20
        for used, passed in (((), ()), ((use,), ()), ((use,), (later,)))
    ]
    assert reserved == [30, 60, 30]


def test_intervals():
    assert union([(5, 6), (0, 2), (1, 3)]) == [(0, 3), (5, 6)]
    assert without([(0, 10)], [(1, 2), (4, 12)]) == [(0, 1), (2, 4)]


def test_host_times_are_medians_over_the_steps_that_do_the_same():
    steps = [Trace([work(1, host_ms=ms)]) for ms in (1, 9, 2)]
    odd = Trace([work(1), work(1)])
    assert [entry.host_s for step in steady([odd, *steps]) for entry in step.entries] == [0, 0, *[2 * MS] * 3]
