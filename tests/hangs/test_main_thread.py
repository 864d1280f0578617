"""What a watchdog takes for work of the main thread. The clocks are the test's."""

from __future__ import annotations

import time
from unittest.mock import patch

from fsdp2.hangs import report
from fsdp2.hangs.report import MainThread, cpu_time_of_main_thread


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def num_moves(main_thread: MainThread, clock: Clock, computed: Clock, seconds_of_each: float) -> int:
    """Of ten looks, a second apart, that find the main thread at one instruction."""
    seen = []
    with patch.object(report, "_frames", lambda: [1, 2]):
        before = main_thread.at()
        for _ in range(10):
            clock.now += 1.0
            computed.now += seconds_of_each
            seen.append(main_thread.at())
    return sum(one != next_one for one, next_one in zip([before, *seen], seen, strict=False))


def test_a_main_thread_that_computes_moves_and_one_that_waits_does_not():
    clock, computed = Clock(), Clock()
    main_thread = MainThread(clock, computed)
    assert num_moves(main_thread, clock, computed, 0.9) == 10
    assert num_moves(main_thread, clock, computed, 0.001) == 0


def test_without_the_clock_of_a_thread_only_its_place_counts():
    clock = Clock()
    assert num_moves(MainThread(clock, lambda: None), clock, Clock(), 0.9) == 0


def test_the_time_of_the_main_thread_grows_while_it_computes():
    if not hasattr(time, "pthread_getcpuclockid"):
        assert cpu_time_of_main_thread() is None
        return
    before = cpu_time_of_main_thread()
    if before is not None:
        sum(range(100_000))
        assert cpu_time_of_main_thread() > before
