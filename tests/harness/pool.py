"""The parent's side of the ranks: start them, send them a test, collect what they say, replace them.

One pool a world size, made when the first test asks for it and kept until a test fails or the session ends. Processes
come from multiprocessing's ``forkserver``, which imports torch once; ranks meet in a file, so there are no ports.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import re
import resource
import shutil
import signal
import tempfile
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from harness import worker
from harness.results import Fingerprints
from harness.worker import Job, Reply

START_TIMEOUT_S = 120.0
# After the first failure, the others get this long to report theirs: most tests fail on all ranks alike, and the lowest
# rank is shown. The second is for ranks that lost a peer, which is never the cause.
GRACE_S = 0.3
GRACE_AFTER_LOST_PEER_S = 5.0
OUTPUT_LIMIT_BYTES = 200_000
# A process group costs five files and three threads for as long as the process lives, and a test may make several.
_OPEN_FILES_LIMIT = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
MAX_OPEN_FILES = 400 if _OPEN_FILES_LIMIT == resource.RLIM_INFINITY else min(400, _OPEN_FILES_LIMIT // 2)

_LOST_PEER = re.compile(
    r"closed by peer|reset by peer|connection refused|broken pipe|socket closed|remote process exited", re.IGNORECASE
)


@dataclass(frozen=True)
class Outcome:
    """What the test came to; ``output`` is what each rank printed; ``results`` what each computed, if that was asked for."""

    kind: str
    text: str = ""
    output: list[str] = field(default_factory=list)
    results: list[Fingerprints] = field(default_factory=list)
    used_device: bool = False


_pools: dict[tuple[int, str], Pool] = {}


def run_on_pool(world_size: int, job: Job, timeout_s: float, device: str = "") -> Outcome:
    """Run the job on every rank of the pool of this size; the pool is dropped if a rank failed, or is worn out.

    device: of ``worker.DEVICES``; "" for the one that all tests run on
    """
    key = (world_size, device)
    pool = _pools.get(key)
    if pool is None or not pool.is_alive():
        if pool is not None:
            pool.kill()
        pool = _pools[key] = Pool(world_size, device)
    outcome = None
    try:
        outcome = pool.run(job, timeout_s)
    finally:
        # None: interrupted, so the ranks are in mid-test.
        if outcome is None or outcome.kind == "failed" or pool.open_files > MAX_OPEN_FILES or pool.names_differ:
            _pools.pop(key).kill()
    return outcome


@atexit.register
def kill_pools() -> None:
    """End all ranks. The next test starts new ones."""
    while _pools:
        _pools.popitem()[1].kill()


class Pool:
    """``world_size`` processes with one process group over them."""

    def __init__(self, world_size: int, device: str = "") -> None:
        self.device = device
        self.world_size = 1 if device == worker.MODELLED else world_size  # processes
        self.num_ranks = world_size
        self.open_files = 0  # of the rank that has most
        self.names_differ = False  # a body made a process group on some ranks only: the next ones would not meet
        self._folder = Path(tempfile.mkdtemp(prefix="fsdp2-ranks-"))
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._logs: list[Path] = []
        self._logged = [0] * self.world_size  # bytes of each log that were shown already

        try:
            self._start()
        except BaseException:  # an interrupt, too, must leave no process behind
            self.kill()
            raise

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(worker.PRELOAD)
        for rank in range(self.world_size):
            parent_end, rank_end = context.Pipe()
            log = self._folder / f"rank{rank}.log"
            log.touch()
            arguments = (rank_end, rank, self.num_ranks, str(self._folder / "store"), str(log), self.device)
            process = context.Process(target=worker.serve, args=arguments, name=f"rank{rank}of{self.world_size}")
            process.start()
            rank_end.close()  # so that the pipe ends when the rank does
            self._processes.append(process)
            self._pipes.append(parent_end)
            self._logs.append(log)
        replies = self._collect(time.monotonic() + START_TIMEOUT_S)
        if any(reply.kind != "passed" for reply in replies.values()) or len(replies) < self.world_size:
            raise RuntimeError(self._failure(replies, f"did not start within {START_TIMEOUT_S:g} s").text)

    def is_alive(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def run(self, job: Job, timeout_s: float) -> Outcome:
        """Run the job on all ranks. Unless the outcome is failed, all of them are ready for the next."""
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):  # a rank that is gone shows as the end of its pipe
                pipe.send(job)
        replies = self._collect(time.monotonic() + timeout_s)
        kinds = {reply.kind for reply in replies.values()}
        if "failed" in kinds or len(replies) < self.world_size:
            return self._failure(replies, f"did not finish within {timeout_s:g} s")
        self.open_files = max(reply.open_files for reply in replies.values())
        self.names_differ = len({reply.process_groups for reply in replies.values()}) > 1
        output = self._read_output()
        if len(kinds) > 1:
            each = ", ".join(f"rank {rank} {reply.kind}" for rank, reply in sorted(replies.items()))
            return Outcome("failed", f"a skip or xfail has to be taken on every rank: {each}", output)
        ranks = range(self.world_size)
        results = [replies[rank].results for rank in ranks]
        return Outcome(replies[0].kind, replies[0].text, output, results, all(replies[rank].used_device for rank in ranks))

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _collect(self, deadline: float) -> dict[int, Reply]:
        """The replies until all ranks have spoken, the deadline, or some time after the first failure."""
        replies: dict[int, Reply] = {}
        while len(replies) < self.world_size:
            pending = {self._pipes[rank]: rank for rank in range(self.world_size) if rank not in replies}
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = pending[pipe]  # type: ignore[index]
                try:
                    replies[rank] = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    replies[rank] = self._death(rank)
                if replies[rank].kind == "failed":
                    grace = GRACE_AFTER_LOST_PEER_S if _LOST_PEER.search(replies[rank].summary) else GRACE_S
                    deadline = min(deadline, time.monotonic() + grace)
        return replies

    def _death(self, rank: int) -> Reply:
        self._processes[rank].join(5)
        code = self._processes[rank].exitcode
        by = f"by signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"with exit code {code}"
        output = self._read_output(only=rank)
        return Reply("failed", f"the process ended {by}", "".join(output))

    def _failure(self, replies: dict[int, Reply], late: str) -> Outcome:
        """The one rank that explains it; stacks instead, if no rank has failed."""
        failed = sorted(rank for rank, reply in replies.items() if reply.kind == "failed")
        if not failed:
            stuck = [rank for rank in range(self.world_size) if rank not in replies]
            output = self._read_output()
            stacks = "".join(self._stacks(stuck))
            ranks = f"rank{'s' * (len(stuck) > 1)} {', '.join(map(str, stuck))} of {self.world_size}"
            done = "".join(f"[rank {rank} of {self.world_size}] {replies[rank].kind}\n" for rank in sorted(replies))
            return Outcome("failed", f"{ranks} {late}\n{done}{stacks}", output)
        rank = next((rank for rank in failed if not _LOST_PEER.search(replies[rank].summary)), failed[0])
        others = ", ".join(
            f"rank {other} " + (replies[other].kind if other in replies else "still running")
            for other in range(self.world_size)
            if other != rank
        )
        text = f"[rank {rank} of {self.world_size}] {replies[rank].summary}\n\n{replies[rank].text}"
        return Outcome("failed", text + f"\n({others})" * bool(others), self._read_output())

    def _stacks(self, ranks: Collection[int]) -> list[str]:
        """Every thread's Python stack of the given ranks, written by ``faulthandler`` into their logs."""
        for rank in ranks:
            if (pid := self._processes[rank].pid) is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR1)
        stacks = []
        for rank in ranks:
            text, grown = "", True
            give_up = time.monotonic() + 3.0
            while (grown or not text) and time.monotonic() < give_up:
                time.sleep(0.1)
                grown = bool(more := self._read_log(rank))
                text += more
            # Leave out what is ours: the frames under the body, and the thread that watches the parent.
            threads = [part for part in text.split("\n\n") if worker.WATCHER not in part]
            threads = [re.split(rf".*{re.escape(worker.__file__)}", part)[0].rstrip() for part in threads]
            stacks.append(f"\n[rank {rank} of {self.world_size}]\n" + "\n\n".join(threads) + "\n")
        return stacks

    def _read_output(self, only: int | None = None) -> list[str]:
        """What ranks printed since last asked, each line with its rank in front."""
        ranks = range(self.world_size) if only is None else [only]
        return [
            "".join(f"[rank {rank} of {self.world_size}] {line}\n" for line in text.splitlines())
            for rank in ranks
            if (text := self._read_log(rank))
        ]

    def _read_log(self, rank: int) -> str:
        with self._logs[rank].open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            start = max(self._logged[rank], end - OUTPUT_LIMIT_BYTES)
            log.seek(start)
            self._logged[rank] = end
            return log.read(end - start).decode(errors="replace")
