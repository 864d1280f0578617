"""``watchdog``: a thread on each rank that reports where each rank is when ranks wait for each other for ever, and then ends them.

    with fsdp2.watchdog(timeout=600):
        train()

Threads talk over the store of the process group; the ranks' own communication stays as it is. Each thread looks ten times in a
``timeout``, and writes a sign. The *judge* is the lowest rank that still watches: rank 0, unless it has left. Its thread reads the
signs of all ranks; when nothing has moved for too long it asks them for reports, prints an explanation, and lets all of them end. The
other ranks watch the judge. In between they listen for asks, so that a user's signal is answered within a second.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ..errors import ArgumentError, OrderError, short
from ..inspect import CollectiveLog, lost_ranks, recording
from ..lifecycle import UntilStopped
from ..torch_names import torch_collectives
from . import background
from .background import BackgroundThread
from .explanation import explain, own_account
from .patience import Patience, Sign
from .report import MainThread, Report, cpu_time_of_main_thread, report_of

_END = "end"  # what the judge asks for last
_LEFT = "left"  # begins the sign of a rank that watches no longer; why it left follows

PATIENCE_WITH_ANSWERS = 10.0
"""Seconds after which the judge explains upon a user's ask, without the ranks that have not answered."""

_num_made = 0  # equal on all ranks, so that two watchdogs of one process do not read each other's keys


@dataclass(frozen=True)
class Ask:
    """The judge asks for reports. number: of the ask; why: in words; until: when the judge goes on without missing reports"""

    number: int
    why: str
    until: float
    ends: bool


class Watchdog:
    """One rank's part, without the thread. A test calls ``look`` with a clock of its own.

    tell: prints; end: ends the process. The other attributes are what this rank has heard and sent so far, one for each message that
    goes through the store.
    """

    def __init__(
        self,
        store: Any,
        log: CollectiveLog,
        timeout: float,
        patience: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        tell: Callable[[str], None] | None = None,
        end: Callable[[], None] | None = None,
    ) -> None:
        self._store = store
        self._log = log
        self.rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._clock = clock
        self._tell = tell or background.tell
        self._end = end or background.end_process
        self._patience = Patience(timeout, patience, self._world_size, clock())
        self._main_thread = MainThread(clock, cpu_time_of_main_thread)
        self._looks = 0
        self._judge_rank = 0
        self._wanted = 0  # how many explanations users had asked for when the judge last began one
        self._answered = 0  # the last ask that this rank has answered
        self._ask: Ask | None = None
        self._left: dict[int, str] = {}  # ranks that have stopped to watch, and why
        self._ends_after: tuple[float, set[int]] | None = None  # the judge, once it has explained a hang: when, or which ranks

    def look(self) -> None:
        """Write a sign, answer asks, and judge the others' signs. Local: it never waits for another rank."""
        now = self._clock()
        self._looks += 1
        if self._ends_after is not None:
            self._end_last(now, *self._ends_after)
            return
        own = Sign(self._looks, self._log.moves, self._looks if self._log.at_disk else self._main_thread.at())
        try:
            self._write(f"sign/{self.rank}", f"{own.looks} {own.moves} {own.at}")
            self._answer()
            self._patience.hear(self._signs_to_judge(), self._left, now)
            if self._judge_rank == self.rank:
                self._judge(now)
            else:
                self._watch_the_judge(now)
        except RuntimeError:  # the store is gone, most often with the process that had it
            self._patience.hear({self.rank: own}, self._left, now)
            still = self._patience.still_for(now)
            if still >= 2 * self._patience.timeout:
                self._end_alone(f"the ranks' store is out of reach, and rank {self.rank} has stood still for {still:.0f} s")

    def listen(self) -> None:
        """Answer asks, and explain upon a user's ask. Local; it makes one request to the store, the judge a few."""
        if self._ends_after is not None:
            self._end_last(self._clock(), *self._ends_after)
            return
        with contextlib.suppress(RuntimeError):  # the store is gone: the next look reports it
            self._answer()
            # Only looks decide whether a hang has ended.
            if self._judge_rank == self.rank and (self._ask is None or not self._ask.ends):
                self._serve(self._clock())

    def leave(self, why: str = "") -> None:
        """Stop to watch, such that other ranks need not wait for this rank's signs."""
        with contextlib.suppress(RuntimeError):
            self._write(f"sign/{self.rank}", _LEFT + why)

    def is_ending(self) -> bool:
        """Whether the judge has explained a hang, and all ranks are going to end."""
        try:
            return self._ends_after is not None or self._read("ask") == _END
        except RuntimeError:
            return False

    def ask(self) -> None:
        """Let the judge print an explanation, and go on. Any rank may ask."""
        with contextlib.suppress(RuntimeError):
            self._store.add("wanted", 1)

    # --- messages through the store
    # -----------------------------------------------------------------------------------------------------

    def _write(self, key: str, text: str) -> None:
        self._store.set(key, text)

    def _read(self, key: str) -> str | None:
        """The value of ``key``; None if no rank has written it. A plain ``get`` would wait for that."""
        return bytes(self._store.get(key)).decode() if self._store.check([key]) else None

    def _signs(self, ranks: Iterable[int]) -> dict[int, Sign]:
        """The signs of the ranks that still watch; notes the ranks that have left."""
        told = {rank: text for rank in ranks if (text := self._read(f"sign/{rank}")) is not None}
        self._left |= {rank: text.removeprefix(_LEFT) for rank, text in told.items() if text.startswith(_LEFT)}
        return {rank: Sign(*map(int, text.split())) for rank, text in told.items() if rank not in self._left}

    def _signs_to_judge(self) -> dict[int, Sign]:
        """The signs that this rank judges by: those of all ranks if it is the judge, else the judge's."""
        while self._judge_rank < self.rank:
            signs = self._signs([self._judge_rank])
            if self._judge_rank not in self._left:
                return signs
            self._judge_rank += 1
            if self._judge_rank == self.rank:
                self._wanted = int(self._read("given") or 0)
        return self._signs(range(self._world_size))

    def _answer(self) -> None:
        """Answer the judge's ask, once; end where it says so."""
        asked = self._read("ask")
        if asked == _END:
            self.leave()
            self._end()
        elif asked is not None and int(asked) != self._answered:
            self._answered = int(asked)
            self._write(f"report/{asked}/{self.rank}", report_of(self.rank, self._log).to_json())

    # --- the judge ---

    def _judge(self, now: float) -> None:
        why = self._patience.is_over(now)
        if why and (self._ask is None or not self._ask.ends):
            self._begin_ask(why, now + self._patience.timeout / 2, ends=True)
            return
        if not why and self._ask is not None and self._ask.ends:  # something has moved after all
            self._ask = None
        self._serve(now)

    def _begin_ask(self, why: str, until: float, ends: bool) -> None:
        number = self._store.add("asks", 1)  # another rank may have judged, and asked, before this one
        self._ask = Ask(number, why, until, ends)
        self._write("ask", str(number))
        self._answer()

    def _serve(self, now: float) -> None:
        """Read whether a user asks, and explain once no report is missing, or it is too late for more."""
        if self._ask is None and (wanted := self._store.add("wanted", 0)) > self._wanted:
            self._wanted = wanted
            self._begin_ask("a user has asked", now + PATIENCE_WITH_ANSWERS, ends=False)
        if self._ask is not None:
            self._explain(self._ask, now)

    def _explain(self, ask: Ask, now: float) -> None:
        """Print the explanation if all reports have arrived, or time is over."""
        told = {rank: self._read(f"report/{ask.number}/{rank}") for rank in range(self._world_size)}
        reports = {rank: Report.from_json(text) for rank, text in told.items() if text is not None}
        silent = {rank: self._patience.silent_for(rank, now) for rank in range(self._world_size) if rank not in reports}
        gone = lost_ranks() if silent else {}
        if now < ask.until and not all(rank in self._left or rank in gone for rank in silent):
            return
        self._ask = None
        text = f"fsdp2.watchdog: {ask.why}\n{explain(reports, self._world_size, silent, self._left, gone)}"
        self._tell(text)
        if ask.ends:
            self._write("ask", _END)
            self._ends_after = now + self._patience.timeout / 4, reports.keys() - {self.rank}
        else:
            self._write("given", str(self._wanted))

    def _end_last(self, now: float, until: float, others: set[int]) -> None:
        """Once the others have left: they would find broken connections instead of the judge's message."""
        with contextlib.suppress(RuntimeError):
            if now < until and self._signs(others):
                return
        self._end()

    # --- the others ---

    def _watch_the_judge(self, now: float) -> None:
        silent = self._patience.silent_for(self._judge_rank, now)
        if silent is not None and silent >= 2 * self._patience.timeout:
            self._end_alone(f"rank {self._judge_rank} has given no sign for {silent:.0f} s")

    def _end_alone(self, why: str) -> None:
        """No rank can explain any more: each rank prints where it is itself."""
        own = {self.rank: report_of(self.rank, self._log)}
        self._tell(f"fsdp2.watchdog: {why}; rank {self.rank} alone says:\n{explain(own, 0, {})}")
        self._end()


class watchdog(UntilStopped):  # noqa: N801 (called as a function is)
    """Record collectives and watch them, from now until the end of the ``with`` block, or until ``stop()``, or the program's end.

    A hang is explained on rank 0, and ends all ranks with status 75.

    Where rank 0 has left, the lowest rank that still watches explains.

    timeout:    seconds without a collective that begins, is waited for or ends, and without Python code that runs in the main thread,
                on any rank: after these the job hangs. Longer than the longest kernel, and than the longest wait for a disk
    patience:   seconds without a collective, on any rank, even if Python runs; None: ten times ``timeout``

    SIGUSR1 to any rank makes that rank print the explanation, and nothing ends; from the main thread only, and not on Windows.
    Raises:     OrderError without a process group, ArgumentError if ``timeout`` is not a positive number or ``patience`` shorter
    Collective: no, but all ranks must call it at the same place: collectives are numbered from there

    Example:
        with fsdp2.watchdog(timeout=600):
            model(x).sum().backward()
            optimizer.step()
    """

    def __init__(self, timeout: float = 600.0, *, patience: float | None = None) -> None:
        self._timeout, self._longest = _checked_times(timeout, patience)
        if not dist.is_initialized():
            raise OrderError(
                "watchdog needs a process group, whose ranks it compares",
                expected="torch.distributed.init_process_group() before it",
                fix="call it after init_process_group()",
            )
        super().__init__()

    def _begin(self, undo: contextlib.ExitStack) -> None:
        global _num_made
        _num_made += 1
        store = torch_collectives.own_connection_to_the_store(f"fsdp2_watchdog_{_num_made}")
        log, asked = undo.enter_context(recording()), undo.enter_context(_asked_by_signal())
        dog = Watchdog(store, log, self._timeout, self._longest)
        dog.look()  # the first sign: it shows that a rank that dies soon after was there
        leaving, left = os.pipe()
        undo.callback(os.close, leaving)
        undo.callback(os.close, left)
        looks, listens = self._timeout / 10, between_listening(dist.get_world_size())
        self._why_left = ""
        undo.callback(lambda: dog.leave(self._why_left))
        thread = BackgroundThread(
            lambda: _run(dog, looks, listens, asked, leaving),
            stop=lambda: os.write(left, b"."),
            name="fsdp2_watchdog",
            at_exit=self._end_with_program,
        )
        undo.callback(thread.end)
        undo.push(functools.partial(self._tell_why, dog, log))

    def _tell_why(self, dog: Watchdog, log: CollectiveLog, kind: object, error: BaseException | None, _: object) -> None:
        """``error``: for instance of a backend to which ranks have sent different things; it names no module"""
        if isinstance(error, Exception):
            if dog.is_ending():  # another rank has ended already, which broke this rank's connection
                background.end_process()
            self._why_left = f" with {type(error).__name__}: {own_account(report_of(dog.rank, log))}"
            background.tell(f"fsdp2.watchdog: rank {dog.rank} leaves{self._why_left}")

    def _end_with_program(self) -> None:
        """Leave with the exception that ends the program, if one does: the other ranks then hear of it."""
        error = getattr(sys, "last_value", None)
        with contextlib.suppress(Exception):
            self.__exit__(None if error is None else type(error), error, None)


def between_listening(num_ranks: int) -> float:
    """Seconds between two. An ask goes from a rank to the judge, to all ranks, and back: within a second, on up to 1,000 ranks.

    With more ranks the store would have over 4,000 requests a second to answer.
    """
    return max(0.25, num_ranks / 4000)


def _run(dog: Watchdog, between_looks: float, between_listening: float, asked: int, leaving: int) -> None:
    """Look and listen every so many seconds, and pass on a user's ask, until ``leaving`` can be read."""
    next_look = time.monotonic() + between_looks
    while True:
        until_look = max(next_look - time.monotonic(), 0.0)
        ready = select.select([asked, leaving], [], [], min(until_look, between_listening))[0]
        if leaving in ready:
            return
        if asked in ready and signal.SIGUSR1 in os.read(asked, 4096):
            dog.ask()
        if time.monotonic() >= next_look:
            dog.look()
            next_look = time.monotonic() + between_looks
        else:
            dog.listen()


def _checked_times(timeout: Any, patience: Any) -> tuple[float, float]:
    """Both times as numbers. Raises: ArgumentError"""
    given = timeout if patience is None else patience
    are_numbers = all(isinstance(each, (int, float)) and not isinstance(each, bool) for each in (timeout, given))
    if not are_numbers or not 0 < timeout <= given < math.inf:
        raise ArgumentError(
            f"watchdog got timeout={short(timeout)} and patience={short(patience)}",
            expected="numbers of seconds, 0 < timeout <= patience",
            fix="for instance watchdog(timeout=600); without patience that is ten times timeout",
        )
    return float(timeout), 10.0 * timeout if patience is None else float(patience)


_writing: list[int] = []  # pipes of the watchdogs that run; SIGUSR1 writes to the last
_before: list[Any] = []  # the file descriptor and the handler that the first one has found


@contextlib.contextmanager
def _asked_by_signal() -> Iterator[int]:
    """The end of a pipe to which SIGUSR1 writes at once, even while the main thread waits in a collective, where no handler runs."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    installs = threading.current_thread() is threading.main_thread() and hasattr(signal, "SIGUSR1")
    if installs:
        before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False), signal.signal(signal.SIGUSR1, lambda *_: None)
        _before.extend(() if _before else before)
        _writing.append(writing)
    try:
        yield reading
    finally:
        if installs:  # watchdogs may end in any order
            _writing.remove(writing)
            signal.set_wakeup_fd(_writing[-1] if _writing else _before[0])
            if not _writing:
                signal.signal(signal.SIGUSR1, _before[1])
                _before.clear()
        os.close(reading)
        os.close(writing)
