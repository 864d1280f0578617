"""One rank: joins the process group once, then runs one test body after another until its pipe ends.

Each body finds the state that a fresh process would have, as far as that is cheap: seeds, default dtype, grad mode,
warning filters. Process groups that a body makes stay, since a cached mesh may refer to them; the parent replaces a
pool that has gathered too many.
"""

from __future__ import annotations

import ast
import faulthandler
import gc
import importlib.util
import os
import pickle
import random
import signal
import socket
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any

import pytest

from harness.results import Fingerprints, kept

# Imported once by the forkserver and shared by all ranks. torch._dynamo is what the first `fully_shard` needs.
PRELOAD = [
    "fsdp2",
    "pytest",
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
]
PRETEND, MODELLED = "pretend", "pretend_model"
DEVICES = ("", PRETEND, MODELLED)
"""A pool runs on what FSDP2_TEST_DEVICE says; on the pretend accelerator, a process a rank; on it, one process as rank 0 of many."""
WATCHER = "_exit_with_parent"  # the name by which stacks leave our own thread out


@dataclass(frozen=True)
class Job:
    """One test, as a rank has to run it: no code, only where to import it from. keep_results: see ``results.py``."""

    module: str
    path: str
    function: str
    arguments: dict[str, bytes]
    warning_filters: bytes
    keep_results: bool = False


@dataclass(frozen=True)
class Reply:
    """What one rank says: ``kind`` is passed, failed, skipped or xfailed; ``summary`` one line, ``text`` all of it.

    results: of a body whose results are kept; used_device: it has put something on a device
    """

    kind: str
    summary: str = ""
    text: str = ""
    results: Fingerprints = field(default_factory=list)
    used_device: bool = False
    open_files: int = field(default_factory=lambda: len(os.listdir("/dev/fd")))
    process_groups: tuple[int, int] = field(default_factory=lambda: _process_groups())


def _process_groups() -> tuple[int, int]:
    """How many process groups torch has numbered, and how many there are, on this rank: the next one's name is made of either."""
    import torch.distributed as dist

    world = dist.distributed_c10d._world
    return world.group_count, len(world.pg_names)


def serve(pipe: Connection, rank: int, world_size: int, store_path: str, log_path: str, device: str) -> None:
    """The whole life of the process. Replies once when the process group is ready, then once to each job."""
    _redirect_output(log_path)
    from harness.states import check_moves

    check_moves()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which kills us
    threading.Thread(target=_exit_with_parent, name=WATCHER, daemon=True).start()
    if device:
        os.environ["FSDP2_TEST_DEVICE"] = PRETEND
    _join_process_group(rank, world_size, store_path, device)
    _send(pipe, Reply("passed"))
    frozen_modules = 0
    while True:
        if len(sys.modules) > frozen_modules:
            # What modules made as they were imported lives as long as the process: keep it out of the collection after each test.
            gc.freeze()
            frozen_modules = len(sys.modules)
        try:
            job = pipe.recv()
        except EOFError:
            os._exit(0)  # no orderly shutdown: it would wait for ranks that are gone already
        _send(pipe, run(job))


def run(job: Job) -> Reply:
    """Run one body, and say what came of it."""
    background_errors: list[str] = []
    results: Fingerprints = []
    used_device = False
    try:
        with _as_in_pytest(pickle.loads(job.warning_filters), background_errors):
            body = getattr(load(job.module, job.path), job.function).on_ranks_body
            arguments = {name: pickle.loads(value) for name, value in job.arguments.items()}
            _reset()
            if job.keep_results:
                results, used_device = _run_for_comparison(body, arguments)
            else:
                body(**arguments)
            del body, arguments
            gc.collect()  # runs the finalizers of this test, not of a later one
    except pytest.skip.Exception as skip:
        return Reply("skipped", text=str(skip.msg))
    except pytest.xfail.Exception as xfail:
        return Reply("xfailed", text=str(xfail.msg))
    except BaseException as error:  # SystemExit and pytest's own are outside Exception
        # The first frame is this function's.
        lines = traceback.format_exception(type(error), error, error.__traceback__ and error.__traceback__.tb_next)
        first_line = (str(error).splitlines() or [""])[0]
        return Reply("failed", f"{type(error).__name__}: {first_line}", "".join(lines))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    if background_errors:
        return Reply("failed", "an exception in a finalizer or a thread", "\n".join(background_errors))
    return Reply("passed", results=results, used_device=used_device)


def _run_for_comparison(body: Callable[..., None], arguments: dict[str, Any]) -> tuple[Fingerprints, bool]:
    """Run it by algorithms that both devices have, and say what it computed, and whether it used the device."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    before = _num_allocations()
    with kept() as results, sdpa_kernel(SDPBackend.MATH):
        body(**arguments)
    return results.fingerprints(), _num_allocations() > before


def _num_allocations() -> int:
    if os.environ.get("FSDP2_TEST_DEVICE") != PRETEND:
        return 0
    from fsdp2.testing import pretend

    return pretend.memory_stats()["allocations"]


def load(name: str, path: str) -> ModuleType:
    """The test module under the name that it has in the parent, so that pickles of its classes and functions work.

    Its ``assert`` statements are rewritten as pytest does, to show the values that they compared.
    """
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == path:
        return known
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, path
    module = importlib.util.module_from_spec(spec)
    with open(path, "rb") as file:
        source = file.read()
    tree = ast.parse(source, filename=path)
    _rewrite_asserts(tree, source, path)
    # Pickle imports a.b before a.b.test_c. Test folders need no __init__.py, so these may be no packages.
    folder = os.path.dirname(path)
    parent = name.rpartition(".")[0]
    while parent:
        if parent not in sys.modules:
            sys.modules[parent] = ModuleType(parent)
            sys.modules[parent].__path__ = [folder]
        folder, parent = os.path.dirname(folder), parent.rpartition(".")[0]
    sys.modules[name] = module
    try:
        exec(compile(tree, path, "exec", dont_inherit=True), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _rewrite_asserts(tree: ast.Module, source: bytes, path: str) -> None:
    try:
        from _pytest.assertion.rewrite import rewrite_asserts
    except ImportError:  # not public; without it, a failing assert shows its line only
        return
    rewrite_asserts(tree, source, path)


def _reset() -> None:
    import torch

    random.seed(0)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    if os.environ.get("FSDP2_TEST_DEVICE") == PRETEND:
        from fsdp2.testing import pretend

        pretend.set_order(0)
        pretend.reset_counts()
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)


@contextmanager
def _as_in_pytest(filters: list[tuple[Any, ...]], background_errors: list[str]) -> Iterator[None]:
    """Warning filters as in the parent; exceptions nobody sees (``__del__``, threads) are collected, not lost."""

    def unraisable(event: Any) -> None:
        error = "".join(traceback.format_exception(event.exc_type, event.exc_value, event.exc_traceback))
        background_errors.append(f"{event.err_msg or 'Exception ignored in'}: {event.object!r}\n{error}")

    def in_thread(event: threading.ExceptHookArgs) -> None:
        error = "".join(traceback.format_exception(event.exc_type, event.exc_value, event.exc_traceback))
        background_errors.append(f"in thread {event.thread and event.thread.name}\n{error}")

    hooks = sys.unraisablehook, threading.excepthook
    sys.unraisablehook, threading.excepthook = unraisable, in_thread
    try:
        with warnings.catch_warnings():
            warnings.resetwarnings()
            for action, message, category, module, lineno in reversed(filters):
                # The interpreter's initial filters hold strings or None, all others compiled patterns.
                warnings.filterwarnings(action, _pattern(message), category, _pattern(module), lineno)
            yield
    finally:
        sys.unraisablehook, threading.excepthook = hooks


def _pattern(pattern: Any) -> str:
    return "" if pattern is None else getattr(pattern, "pattern", pattern)


def _join_process_group(rank: int, world_size: int, store_path: str, device: str) -> None:
    import torch
    import torch.distributed as dist

    from harness.mesh import device_type

    torch.set_num_threads(1)
    backend = "gloo"
    if device_type() == "cuda":
        torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl"
    elif device_type() == PRETEND:
        from fsdp2.testing import pretend

        pretend.activate()
        if device == MODELLED:
            dist.init_process_group(pretend.MODEL, store=dist.HashStore(), rank=0, world_size=world_size)
            return
        backend = f"cpu:gloo,{pretend.DEVICE_TYPE}:{pretend.BACKEND}"
    # Keep gloo on the loopback: whatever the host name resolves to may be slow or unreachable.
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    store = dist.FileStore(store_path, world_size)
    # The parent's timeout comes first and shows the stacks; this one only ends ranks that lost their parent.
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(minutes=30))


def _redirect_output(log_path: str) -> None:
    log = os.open(log_path, os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    # The forkserver may have started without usable streams of its own.
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115  # open as long as the process
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.enable(2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    import torch

    # Python's stacks say nothing of gloo's threads; torch prints native ones, and then calls faulthandler.
    torch._C._set_print_stack_traces_on_fatal_signal(True)


def _exit_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _send(pipe: Connection, reply: Reply) -> None:
    try:
        pipe.send(reply)
    except BrokenPipeError:
        os._exit(1)
