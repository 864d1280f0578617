"""Run one function, or a user's script, as N ranks on this machine: processes forked from this one, which has imported torch.

    ranks = run_ranks(8, lambda rank: run_script("train.py", ["--lr", "0.1"]), limit_s=600)
    ranks.status, ranks[3].error          1, "ValueError: ..."

A fork costs 10 ms and shares this process's pages, where a new process imports torch again: 64 ranks that train four blocks for four
steps take 22 s of processor time and 35 MiB each, against 250 s and 223 MiB under torchrun. Each rank has its number in ``RANK``, as
under torchrun, and meets the others by ``init_process_group()``; its processes belong to one process group, which ends with the run,
or with this process. Forked ranks share one hash seed: a set of strings has the same order on all of them.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import logging
import multiprocessing
import multiprocessing.util
import os
import pickle
import random
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

from .errors import OrderError

OVER = 124
"""Status of ranks that took longer than their limit, as that of ``timeout``."""
_WARM = ("torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor.parallel")
"""What scripts that shard import sooner or later: once here, instead of once on every rank."""
_LOOK_S = 0.02
_END_S = 3.0
_IDLE_S, _IDLE_SHARE = 0.05, 0.005
"""What a rank may compute and still wait for others, in seconds and as a share of the time: its threads look now and then."""
_WAIT_SHARE = 0.02
"""How much waiting for a processor counts: a rank that never gets one computes, and one that looks now and then waits a little, too."""
_KEPT_NBYTES = 200_000
_PROC = Path("/proc")


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended.

    status:   of the process; -n: signal n ended it, SIGTERM and SIGKILL being this module's where ``Ranks.is_late``, or another failed
    result:   what the body returned; None if it did not get there
    sent:     what the body gave to ``Rank.send``, also if it ended by ``os._exit``, or was killed
    error:    the exception that ended it, in one line; or why what it gave cannot be unpickled here
    stack:    of each thread when a signal ended it: a crash, or SIGTERM while it hung
    output:   the end of what it printed to standard output and error
    ended_s:  seconds after the ranks began
    """

    rank: int
    status: int
    ended_s: float
    result: Any = None
    sent: list[Any] = field(default_factory=list)
    error: str = ""
    stack: str = ""
    output: str = ""


class Ranks(tuple[RankEnd, ...]):
    """The ends of all ranks, by rank.

    is_late:    some had not ended at the limit, or all stood still; is_stalled: they had computed nothing for the patience
    stopped_by: the exception of ``stops_on`` that ended them
    """

    is_late = is_stalled = False
    stopped_by: BaseException | None = None

    @property
    def first_failed(self) -> RankEnd | None:
        """The rank that failed first: what ended the others follows from it. Of two at one look, the one that a signal ended."""
        return min((each for each in self if each.status), key=lambda each: (each.ended_s, each.status > 0), default=None)

    @property
    def status(self) -> int:
        """0 if all ranks ended with it; ``OVER``; else that of the rank that failed first, 128 + n for signal n."""
        first = self.first_failed
        return OVER if self.is_late else 0 if first is None else first.status if first.status > 0 else 128 - first.status


@dataclass(frozen=True)
class Rank:
    """What the body gets."""

    rank: int
    num_ranks: int
    _values: Path

    def send(self, value: Any) -> None:
        """Add ``value``, which must be picklable, to ``RankEnd.sent``, at once."""
        _append(self._values, ("sent", value))


def run_ranks(
    num_ranks: int,
    body: Callable[[Rank], object],
    *,
    limit_s: float | None = None,
    patience_s: float | None = None,
    grace_s: float = 5.0,
    stops_on: tuple[type[BaseException], ...] = (),
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    output: TextIO | None = None,
    hides_devices: bool = True,
) -> Ranks:
    """Run ``body`` on ``num_ranks`` forks of this process, wait for all of them, and leave none of their processes.

    body:     may be a closure; ``run_script`` runs a script. An exception is printed and ends the rank with status 1
    limit_s:  after so long the ranks are ended; ``RankEnd.stack`` has where each was
    patience_s: so long all ranks may want no processor, as ranks do that wait for each other; then they are ended. Linux only
    grace_s:  how long the others have to end by themselves once a rank has failed
    stops_on: exceptions in this process, as by ctrl-C, that end the ranks, and are then ``Ranks.stopped_by`` instead of raised
    env:      of the ranks, above this process's and ``RANK``, ``WORLD_SIZE``, ...; ``OMP_NUM_THREADS`` is 1 unless it says otherwise
    output:   gets what ranks print while they run, each line with its rank; None: it is in ``RankEnd.output`` alone
    """
    if dist.is_initialized() or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise OrderError(
            "this process has a process group, or has used CUDA, which its forks could not",
            expected="a process that is no rank itself",
            fix="run the ranks from another process, or before this one calls init_process_group() or puts anything on a GPU",
        )
    for name in _WARM:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="fsdp2-ranks-") as name:
        run = _Run(num_ranks, Path(name), output)
        is_late, stopped_by = False, None
        try:
            run.start(body, dict(env or {}), cwd, hides_devices)
            is_late = run.wait(limit_s, patience_s, grace_s)
        except stops_on as error:
            stopped_by = error
            run.terminate()
        finally:
            run.kill()
        ranks = Ranks(map(run.end_of, range(num_ranks)))
        ranks.is_late, ranks.is_stalled, ranks.stopped_by = is_late, run.is_stalled, stopped_by
        return ranks


class _Run:
    """The processes of one call, in the parent."""

    def __init__(self, num_ranks: int, folder: Path, output: TextIO | None) -> None:
        self._num_ranks, self._folder, self._output = num_ranks, folder, output
        self._processes: list[BaseProcess] = []
        self._ended_s: dict[int, float] = {}
        self._shown = [0] * num_ranks  # bytes of each rank's output
        self._begun: list[list[bytes]] = [[] for _ in range(num_ranks)]  # pieces of the line that has no end yet
        self._group = 0
        self._begin = time.monotonic()
        self.is_stalled = False
        self._life, self._own_life = os.pipe()  # ends when this process does, for only it keeps the writing end
        self._ports, self._port_for_ranks = os.pipe()  # the guardian writes the store's port, once for each rank

    def start(self, body: Callable[[Rank], object], env: dict[str, str], cwd: Any, hides_devices: bool) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self._begin = time.monotonic()
        gc.collect()
        gc.freeze()  # collections on ranks then leave the pages of this process's objects shared
        try:
            self._group = self._fork(self._guard).pid or 0
            os.setpgid(self._group, self._group)
            os.close(self._port_for_ranks)
            for rank in range(self._num_ranks):
                self._log(rank).touch()
                own = _environment(rank, self._num_ranks, hides_devices) | env
                self._fork(self._be_rank, rank, body, own, cwd)
        finally:
            gc.unfreeze()

    def _fork(self, target: Callable[..., None], *arguments: Any) -> BaseProcess:
        process = multiprocessing.get_context("fork").Process(target=target, args=arguments)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # that forks of a process with threads may deadlock: see the module
            process.start()
        self._processes.append(process)
        return process

    def _guard(self) -> None:
        """Serve the ranks' store, and end them all with the parent."""
        os.setpgid(0, 0)
        os.close(self._own_life)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", 0, is_master=True, wait_for_workers=False
        )
        os.write(self._port_for_ranks, f"{store.port:8}".encode() * self._num_ranks)
        os.read(self._life, 1)
        os.killpg(0, signal.SIGKILL)

    def _be_rank(self, rank: int, body: Callable[[Rank], object], env: dict[str, str], cwd: Any) -> None:
        os.close(self._own_life)
        os.setpgid(0, self._group)
        values = self._values(rank)
        with self._stack(rank).open("w") as stack, _as_new_process(self._log(rank), stack):
            os.environ.update(env | {"MASTER_PORT": os.read(self._ports, 8).decode().strip()})
            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
            if cwd is not None:
                os.chdir(cwd)
            try:
                result = body(Rank(rank, self._num_ranks, values))
                _append(values, ("result", result))
            except BaseException as error:
                if not isinstance(error, SystemExit):
                    _append(values, ("error", "".join(traceback.format_exception_only(error)).strip()))
                    sys.excepthook(type(error), error, error.__traceback__)
                    raise SystemExit(1) from None
                raise

    def wait(self, limit_s: float | None, patience_s: float | None, grace_s: float) -> bool:
        """Until all ranks have ended. Returns whether they took longer than ``limit_s``, or stood still for ``patience_s``."""
        deadline = None if limit_s is None else self._begin + limit_s
        computed_s, moved = 0.0, self._begin
        ranks = self._processes[1:]
        is_late = False
        while True:
            now_s = self._now()
            for rank, process in enumerate(ranks):
                if rank not in self._ended_s and not process.is_alive():
                    self._ended_s[rank] = now_s
            self._show()
            if len(self._ended_s) == len(ranks):
                return is_late
            failed = [when for rank, when in self._ended_s.items() if ranks[rank].exitcode]
            total_s = sum(_computed_s(process.pid) for process in ranks) if patience_s is not None else 0.0
            idle_s = _IDLE_S + _IDLE_SHARE * (time.monotonic() - moved)
            if abs(total_s - computed_s) > idle_s * len(ranks):
                computed_s, moved = total_s, time.monotonic()
            self.is_stalled = patience_s is not None and time.monotonic() > moved + patience_s
            is_late = self.is_stalled or (deadline is not None and time.monotonic() > deadline)
            if is_late or (failed and self._now() > min(failed) + grace_s):
                self.terminate()
                return is_late
            time.sleep(_LOOK_S)

    def terminate(self) -> None:
        """SIGTERM, at which ranks write their stacks."""
        ranks = self._processes[1:]
        for process in ranks:
            process.terminate()
        until = time.monotonic() + _END_S
        for process in ranks:
            process.join(max(0.0, until - time.monotonic()))

    def kill(self) -> None:
        """End every process of the run, and all that they have started in the same session."""
        if self._group:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._group, signal.SIGKILL)
        for process in self._processes:
            process.kill()  # for one that has not joined the others yet
        for process in self._processes:
            process.join()
        for end in (self._life, self._own_life, self._ports):
            os.close(end)
        self._show(is_last=True)

    def end_of(self, rank: int) -> RankEnd:
        found: dict[str, Any] = {"sent": []}
        for kind, pickled in _read(self._values(rank)):
            try:
                value = pickle.loads(pickled)
            except Exception as error:  # of a class that only the rank has, or one that pickles and cannot be made again
                found["error"] = found.get("error") or f"a value that this rank gave cannot be read here: {error!r}"
                continue
            if kind == "sent":
                found["sent"].append(value)
            else:
                found[kind] = value
        output = b""
        if self._log(rank).exists():  # else an interrupt came before this rank's start
            with self._log(rank).open("rb") as log:
                log.seek(max(0, os.fstat(log.fileno()).st_size - _KEPT_NBYTES))
                output = log.read()
        stack = self._stack(rank)
        text = stack.read_text(errors="replace") if stack.exists() else ""
        status = -signal.SIGKILL if rank + 1 >= len(self._processes) else self._processes[1 + rank].exitcode or 0
        return RankEnd(rank, status, self._ended_s.get(rank, self._now()), **found, stack=text, output=output.decode(errors="replace"))

    def _show(self, is_last: bool = False) -> None:
        """Whole lines that ranks have printed since the last call; the last call's may be unfinished."""
        for rank in range(self._num_ranks if self._output is not None else 0):
            if not self._log(rank).exists():
                continue
            with self._log(rank).open("rb") as log:
                log.seek(self._shown[rank])
                text = log.read()
            self._shown[rank] += len(text)
            begun = self._begun[rank]
            end = len(text) if is_last else text.rfind(b"\n") + 1
            begun.append(text[:end])
            if end or is_last:
                for line in b"".join(begun).decode(errors="replace").splitlines():
                    print(f"[rank {rank}] {line}", file=self._output, flush=True)
                begun.clear()
            begun.append(text[end:])

    def _now(self) -> float:
        return time.monotonic() - self._begin

    def _log(self, rank: int) -> Path:
        return self._folder / f"rank{rank}.log"

    def _stack(self, rank: int) -> Path:
        return self._folder / f"rank{rank}.stack"

    def _values(self, rank: int) -> Path:
        return self._folder / f"rank{rank}.values"


def _computed_s(pid: int | None) -> float:
    """What a process has computed, its ended children included, and a share of how long its main thread has waited for a processor.

    On a busy machine a rank may wait longer than it computes. Other threads look now and then, and wait as well: they do not count.
    0 where the system does not say.
    """
    times, waits = _fields(pid, "stat")[11:15], _fields(pid, "schedstat")[1:2]
    return sum(map(int, times)) / os.sysconf("SC_CLK_TCK") + _WAIT_SHARE * sum(map(int, waits)) / 1e9


def _fields(pid: int | None, name: str) -> list[str]:
    with contextlib.suppress(OSError):
        return (_PROC / str(pid) / name).read_text().rpartition(")")[2].split()
    return []


def _environment(rank: int, num_ranks: int, hides_devices: bool) -> dict[str, str]:
    """What torchrun sets; here, too, the store is served outside of the ranks. The loopback: a host's own name may lead elsewhere."""
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    defaults = {"OMP_NUM_THREADS": "1"} | ({"GLOO_SOCKET_IFNAME": loopback} if loopback else {})
    numbers = {f"{prefix}RANK": str(rank) for prefix in ("", "LOCAL_", "ROLE_")}
    sizes = {f"{prefix}WORLD_SIZE": str(num_ranks) for prefix in ("", "LOCAL_", "ROLE_")}
    return {
        **{name: os.environ.get(name, value) for name, value in defaults.items()},
        **numbers,
        **sizes,
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "fsdp2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        **({"CUDA_VISIBLE_DEVICES": ""} if hides_devices else {}),
    }


@contextlib.contextmanager
def _as_new_process(log: Path, stack: TextIO) -> Iterator[None]:
    """Inside, a fork is like a new Python whose output goes to ``log``: none of the parent's handlers, exits or random numbers,
    nor its warnings turned into errors, as a test runner's may be."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is the parent's, which ends us
    faulthandler.enable(stack)
    faulthandler.register(signal.SIGTERM, stack, chain=True)
    atexit._clear()
    atexit.register(logging.shutdown)
    multiprocessing.current_process().name = "MainProcess"
    warnings.filters[:] = [each for each in warnings.filters if each[0] != "error"]  # type: ignore[index]
    warnings._processoptions(sys.warnoptions)  # type: ignore[attr-defined]  # the user's own, of PYTHONWARNINGS, in their order
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = open(number, "w", buffering=1, closefd=False)  # noqa: SIM115  # open as long as the process
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    for handler in [each() for each in logging._handlerList]:  # type: ignore[attr-defined]
        if type(handler) is logging.StreamHandler:
            handler.stream = sys.stderr  # the parent's stream may be no file: that of a test, of a notebook
    try:
        yield
    finally:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as Python does before it runs what is left for the end
        atexit._run_exitfuncs()


def _append(path: Path, value: tuple[str, Any]) -> None:
    kind, content = value
    with path.open("ab") as file:
        file.write(pickle.dumps((kind, pickle.dumps(content))))


def _read(path: Path) -> Iterator[tuple[str, bytes]]:
    """Kinds and pickled values, up to the one that the rank was writing when it was killed."""
    if path.exists():
        with path.open("rb") as file, contextlib.suppress(EOFError, pickle.UnpicklingError):
            while True:
                yield pickle.load(file)


__all__: Sequence[str] = ["OVER", "Rank", "RankEnd", "Ranks", "run_ranks"]
