"""The watchdog on ranks that hang, and on ranks that are only slow. Its clock is the test's; hangs end by the test's own hand."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp2
from fsdp2 import fully_shard
from fsdp2.checkpoint import Checkpointer
from fsdp2.core.comm import collective_log
from fsdp2.hangs import background, watcher
from fsdp2.hangs.background import EXIT_STATUS
from fsdp2.hangs.watcher import Watchdog
from fsdp2.inspect import events
from fsdp2.optimizer_steps import STEPS
from harness import on_ranks

PROGRAM = Path(__file__).with_name("hanging_program.py")


def sharded() -> nn.Module:
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def store_of(name: str) -> dist.Store:
    return dist.PrefixStore(name, dist.distributed_c10d._get_default_store().clone())


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def look_beside(dog: Watchdog, clock: Clock, done: threading.Event, seconds: float) -> threading.Thread:
    """A thread that looks for as long as the test runs; each look takes so many seconds of the test's clock."""

    def run() -> None:
        while not done.is_set():
            clock.now += seconds
            dog.look()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@on_ranks(2)
def test_a_rank_that_does_not_come_is_named_with_the_unit_where_the_other_waits():
    """Rank 1 comes when rank 0 has explained the hang. Both then finish the step: the log changes nothing."""
    store, clock, done, said = store_of("late"), Clock(), threading.Event(), []
    model, inputs = sharded(), torch.ones(2, 8)
    model(inputs).sum().backward()

    def tell(text: str) -> None:
        said.append(text)
        store.set("explained", "1")
        done.set()

    with events.switched_on(lambda: STEPS.begun + 1) as log:
        dog = Watchdog(store_of("dog"), log, 60, 600, clock=clock, tell=tell, end=lambda: None)
        thread = look_beside(dog, clock, done, 0.05)
        if dist.get_rank() == 1:
            store.wait(["explained"])
        model(inputs).sum().backward()
        done.set()
        thread.join()
        assert [record.number for record in log.records if record.kind == "reduce-scatter"] != []
        assert all(record.has_ended() for record in log.records)
    if dist.get_rank() == 0:
        first, second, third = said[0].splitlines()[:3]
        assert re.fullmatch(r"fsdp2.watchdog: nothing has moved on any rank for 6\d s", first)
        assert re.fullmatch(r"rank 0 waits in all-gather of 0 in forward \(step \d+, #1\)", second)
        assert re.search(r"rank 1 never entered forward of .*: outside of forward and backward; finished none", third)
        assert "store.wait" in said[0], "rank 1's stack"
        assert "model(inputs)" in said[0], "rank 0's"


@on_ranks(2)
def test_a_slow_step_an_evaluation_on_rank_0_and_a_checkpoint_are_no_hangs(tmp_path):
    """Each takes a hundred looks of both watchdogs, more seconds of their clock than the timeout; the main thread runs Python."""
    store, clock, said = store_of("rounds"), Clock(), []
    looks, done = threading.Semaphore(0), threading.Event()
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, plain = torch.ones(2, 8), nn.Linear(8, 8)

    def slowly() -> None:
        for _ in range(50):
            looks.acquire()  # the main thread is at two places in turn, as it is at many in a program
            plain(inputs)
            looks.acquire()

    def wait_at_one_place(file: object) -> None:
        """A slow disk, whose thread stands still, and the main thread waits for it."""
        for _ in range(100):
            looks.acquire()

    def look_in_rounds() -> None:
        """Both ranks once a round, each a second, until rank 0's test is done."""
        number, goes_on = 0, True
        while goes_on:
            number += 1
            if dist.get_rank() == 0:
                goes_on = not done.is_set()
                store.set(f"round {number}", str(goes_on))
            else:
                goes_on = store.get(f"round {number}") == b"True"
            clock.now += 1
            dog.look()
            store.set(f"looked {number} {dist.get_rank()}", "")
            store.wait([f"looked {number} {rank}" for rank in range(2)])
            looks.release()

    with events.switched_on(lambda: STEPS.begun + 1) as log:
        dog = Watchdog(store_of("slow"), log, 40, 4000, clock=clock, tell=said.append, end=lambda: None)
        thread = threading.Thread(target=look_in_rounds)
        thread.start()
        model[1].register_forward_pre_hook(lambda *_: slowly())
        model(inputs).sum().backward()
        if dist.get_rank() == 0:
            slowly()
        with Checkpointer(tmp_path / "checkpoints", model, optimizer) as checkpointer, patch("os.fsync", wait_at_one_place):
            checkpointer.save(1)
        optimizer.step()
        dist.barrier()
        done.set()
        thread.join()
    assert said == []
    assert clock.now > 200


@on_ranks(2)
def test_sigusr1_prints_and_the_training_goes_on():
    """The signal comes while the main thread waits in a collective, where Python runs no handler.

    Looks are an hour apart: whoever waited for one to pass on the question, or the answer, would not end.
    """
    store, told = store_of("asked"), []
    model, inputs = sharded(), torch.ones(2, 8)

    def tell(text: str) -> None:
        told.append(text)
        store.set("told", "1")

    with patch.object(background, "tell", tell), fsdp2.watchdog(timeout=36000):
        if dist.get_rank() == 0:
            threading.Timer(0, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        else:
            store.wait(["told"])
        model(inputs).sum().backward()
    assert collective_log.current is None
    if dist.get_rank() == 0:
        assert told[0].startswith("fsdp2.watchdog: a user has asked\n")
        assert "rank 1" in told[0]


@on_ranks(1)
def test_arguments_that_cannot_be_are_refused():
    wrong = [0, "a", None, True, float("nan"), float("inf"), torch.ones(2)]
    for arguments in [{"timeout": each} for each in wrong] + [{"patience": each} for each in (5, "a", float("nan"))]:
        with pytest.raises(fsdp2.ArgumentError, match="0 < timeout <= patience"), fsdp2.watchdog(**arguments):
            pass


@on_ranks(2)
def test_an_ask_is_answered_between_looks_without_the_ranks_that_do_not_answer_in_ten_seconds():
    """Ranks listen in an order that the test's store holds; nobody looks again, and no clock but the test's moves."""
    store, clock, said = store_of("listening"), Clock(), []
    with events.switched_on(lambda: 1) as log:
        dog = Watchdog(store_of("dog that listens"), log, 600, 6000, clock=clock, tell=said.append, end=lambda: None)
        dog.look()
        dist.barrier()
        if dist.get_rank() == 1:
            dog.ask()
            store.set("wanted", "")
            store.wait(["asked"])
            dog.listen()
            store.set("answered", "")
        else:
            store.wait(["wanted"])
            dog.listen()
            store.set("asked", "")
            store.wait(["answered"])
            dog.listen()
            assert [text.splitlines()[0] for text in said] == ["fsdp2.watchdog: a user has asked"]
            assert "Python stacks of rank 1" in said[0]
            dog.ask()  # rank 1 listens no more
            dog.listen()
            assert len(said) == 1
            clock.now += 11
            dog.listen()
            assert "rank 1 does not answer" in said[1]
        dist.barrier()


@on_ranks(2)
@pytest.mark.parametrize("rank_1", ["answers", "is lost"])
def test_nobody_waits_for_a_rank_that_is_lost_and_the_judge_ends_once_the_others_have(rank_1):
    """It waited half a timeout for the answer of a rank that was known to be gone, and three tenths before it ended."""
    store, clock, said, ended = store_of(f"ends {rank_1}"), Clock(), [], []
    with (
        events.switched_on(lambda: 1) as log,
        patch.object(watcher, "lost_ranks", lambda: {1: "it has ended"} if rank_1 == "is lost" else {}),
        # The real one moves until it waits in ``join``: if it is late, the judge takes its first ask back.
        patch.object(watcher, "MainThread", lambda *_: types.SimpleNamespace(at=lambda: 0)),
    ):
        dog = Watchdog(
            store_of(f"dog that ends {rank_1}"), log, 60, 600, clock=clock, tell=said.append, end=lambda: ended.append(clock.now)
        )
        dog.look()
        dist.barrier()
        if dist.get_rank() == 1 and rank_1 == "answers":
            for heard in ("asked", "explained"):
                store.wait([heard])
                dog.listen()
                store.set(f"has heard {heard}", "")
            assert ended == [0]
        elif dist.get_rank() == 0:

            def look_until_told() -> None:
                while not said and clock.now < 6000:
                    looks.append(0 if dog._ask is None else looks[-1] + 1)
                    clock.now += 6
                    dog.look()
                    if rank_1 == "answers" and dog._ask is not None:
                        store.set("asked", "")
                        store.wait(["has heard asked"])

            looks = [0]  # since the judge has asked
            thread = threading.Thread(target=look_until_told)
            thread.start()
            thread.join()
            assert "nothing has moved" in said[0]
            assert looks[-1] == 1
            if rank_1 == "answers":
                dog.listen()
                assert ended == []
                store.set("explained", "")
                store.wait(["has heard explained"])
            dog.listen()
            assert ended == [clock.now]
        dist.barrier()


class StoreThatGoes:
    """A store whose process ends when the test says so."""

    def __init__(self, store: dist.Store) -> None:
        self._store, self.is_gone = store, False

    def __getattr__(self, name: str) -> Any:
        if self.is_gone:
            raise RuntimeError("the connection is closed")
        return getattr(self._store, name)


@on_ranks(2)
@pytest.mark.parametrize("store_goes_too", [False, True])
def test_a_rank_that_waits_ends_after_rank_0_has_left_with_an_exception(store_goes_too):
    """The main thread of rank 1 waits for a thread, as it would in a collective; its watchdog looks a thousand times at most."""
    store, clock, said, ended = store_of(f"rank 0 leaves {store_goes_too}"), Clock(), [], []
    with events.switched_on(lambda: 1) as log:
        dogs_store = StoreThatGoes(store_of(f"dog of those who stay {store_goes_too}"))
        dog = Watchdog(dogs_store, log, 60, 600, clock=clock, tell=said.append, end=lambda: ended.append(True))
        dog.look()
        dist.barrier()
        if dist.get_rank() == 0:
            dog.leave(" with ValueError: no more data")
            store.set("left", "")
        else:
            store.wait(["left"])

            def look_for_long() -> None:
                for number in range(1000):
                    dogs_store.is_gone = store_goes_too and number > 2
                    clock.now += 10
                    if not ended:
                        dog.look()

            thread = threading.Thread(target=look_for_long)
            thread.start()
            thread.join()
            assert ended == [True]
            first, *others = said[0].splitlines()
            if store_goes_too:
                assert re.match(
                    r"fsdp2.watchdog: the ranks' store is out of reach, and rank 1 has stood still for 1\d\d s; rank 1 alone", first
                )
            else:
                assert re.fullmatch(r"fsdp2.watchdog: nothing has moved on any rank for \d\d s", first)
                assert others[0] == "rank 0 has left the watchdog with ValueError: no more data"
            assert "in test_a_rank_that_waits_ends" in said[0], "rank 1's stack"
        dist.barrier()


@on_ranks(2)
def test_a_rank_that_fails_in_forward_says_where():
    model = sharded()
    model[1].forward = lambda x: 1 / 0
    told = []
    with patch.object(background, "tell", told.append), pytest.raises(ZeroDivisionError), fsdp2.watchdog(timeout=600):
        model(torch.ones(2, 8))
    assert told[0].startswith(f"fsdp2.watchdog: rank {dist.get_rank()} leaves with ZeroDivisionError: failed in forward of 1; its last")


def run(fault: str, folder: Path) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(PROGRAM), fault, str(folder / "store")]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("skips", r"rank 0 waits in all-gather of 3 in forward \(step 5, #\d+\)\n  rank 1 never entered forward of 3: outside of"),
        ("sleeps", r"rank 0 waits in all-gather of 2 in forward \(step 3, #\d+\)\n  rank 1 never entered forward of 2: in forward"),
        ("dies", r"rank 1 does not answer \(its last sign was \d+ s ago\): its process \(\d+ on \S+\) is stopped\nrank 0 waits in"),
    ],
)
def test_a_hang_is_explained_and_ends_all_ranks(fault: str, said: str, tmp_path: Path) -> None:
    done = run(fault, tmp_path)
    assert re.search(said, done.stderr), done.stderr
    assert "Python stacks of rank" in done.stderr
    assert f"statuses {[EXIT_STATUS] * (1 if fault == 'dies' else 2)}" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_another_shape_with_which_gloo_does_not_hang_but_fails_is_named(tmp_path: Path) -> None:
    """gloo ends the process of one rank, and the other gets an error of its connection, which names nothing."""
    said = run("shape", tmp_path).stderr
    assert re.search(r"rank 1 leaves with LostRankError: .*; its last collectives are .*all-gather of 1 in forward, 288 x", said), said
