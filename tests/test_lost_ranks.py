"""An error of a collective names the ranks that are gone, why, and the unit; a program without errors sends two requests."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp2
from fsdp2 import lost_ranks
from fsdp2.core.comm import collectives
from fsdp2.errors import LostRankError
from harness import cpu_mesh, on_ranks

GONE = RuntimeError("Connection closed by peer [127.0.0.1]:4")


def model_of_three() -> nn.Module:
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    for layer in model:
        fsdp2.fully_shard(layer, mesh=cpu_mesh())
    return fsdp2.fully_shard(model, mesh=cpu_mesh())


def store_of(name: str) -> dist.Store:
    return dist.PrefixStore(name, dist.distributed_c10d._get_default_store())


def failing_at(number: int, reduces: bool) -> Any:
    """In place of ``Works.finish``: of gathers, or of reductions, the one with this number finds the connection closed."""
    real, calls = collectives.Works.finish, [0]

    def finish(self: Any) -> None:
        is_counted = (self._output is not None) is reduces and not self._finished
        real(self)
        calls[0] += is_counted
        if is_counted and calls[0] == number:
            raise GONE

    return finish


@on_ranks(2, timeout=60)
def test_an_error_of_a_collective_names_it_its_unit_and_the_ranks_that_are_gone() -> None:
    """Symptom: gloo's "Connection closed by peer [127.0.0.1]:4" was all that the other ranks said."""
    model, x = model_of_three(), torch.ones(2, 8)
    model(x).sum().backward()
    other = 1 - dist.get_rank()
    said: list[str] = []
    with patch.object(lost_ranks, "_stat", lambda pid: ("Z", "7")):
        for number, reduces in [(1, False), (2, False), (1, True)]:
            roll = lost_ranks._Roll(store_of(f"loss {number} {reduces}"), dist.group.WORLD)
            dist.barrier()
            with (
                patch.object(lost_ranks, "_roll", roll),
                patch.object(roll, "tell"),  # each rank would tell that it has lost another one itself, and be no cause
                patch.object(collectives.Works, "finish", failing_at(number, reduces)),
                patch.object(collectives.Works, "is_completed", lambda pending: False),  # both ranks fail between the same two
                pytest.raises(LostRankError) as caught,
            ):
                model(x).sum().backward()
            dist.barrier()
            model.reset_iter_state()
            text = str(caught.value)
            assert "a rank is gone, or cannot be reached" in text
            assert f"rank {other}: its process (" in text
            assert "Connection closed by peer" in text
            said.append(text.partition("reached: ")[2].partition(" has failed")[0])
    assert said == ["the all-gather of 0", "the all-gather of 1", "the reduce-scatter of 2"]


class NotTodayError(Exception):
    pass


@on_ranks(2, timeout=60)
def test_what_an_iteration_that_failed_leaves_under_way_may_fail_too_and_is_forgotten() -> None:
    """Symptom: reset_iter_state, or the next forward, raised gloo's own text, with memory of the reductions held."""
    model, x = model_of_three(), torch.ones(2, 8)

    def refuse(*_: Any) -> None:
        raise NotTodayError

    model(x).sum().backward()
    expected = [param.grad.to_local().clone() for param in model.parameters()]
    for recover in (model.reset_iter_state, lambda: model(x)):
        model.zero_grad()
        with patch.object(collectives.Works, "is_completed", return_value=False):
            handle = model[0].register_full_backward_pre_hook(refuse)
            with pytest.raises(NotTodayError):
                model(x).sum().backward()
            handle.remove()
        with patch.object(collectives.Works, "finish", failing_at(1, True)), pytest.raises(LostRankError) as caught:
            recover()
        assert "the reduction of 1 has failed" in str(caught.value)
        model.reset_iter_state()
        model.zero_grad()
        model(x).sum().backward()
        for param, grad in zip(model.parameters(), expected, strict=True):
            assert torch.equal(param.grad.to_local(), grad)


def test_each_collective_that_is_waited_for_where_it_is_called_lies_in_what_names_lost_ranks() -> None:
    """Others are issued with ``async_op``, and waited for in one of the places that ``raise_lost`` is called from."""
    package = Path(fsdp2.__file__).parent
    own = {
        "core/comm/collectives.py",  # of a group, which knows its unit's name
        "torch_names/torch_collectives.py",  # the two names of one collective
        "policy.py",  # examples of communicators
        "planner/measure.py",  # a program of its own, without a model
        "reference.py",  # what fully_shard means, to compare with: no more than that
        "prove/stand_ins.py",  # the same for uneven, guarded_step and park
        "prove/checkpoint.py",  # over a group of its own, in ranks that the command watches
        "migrate/probe.py",  # of the run that it compares
        "checkpoint/gather_to_writers.py",  # in a method that is called in ``reached``
        "communicators.py",  # their callers wait
    }
    collective = re.compile(r"(all_|reduce|broadcast|barrier|gather|scatter|batch_isend_irecv|monitored)")
    found = []
    for path in sorted(package.rglob("*.py")):
        if path.relative_to(package).as_posix() in own:
            continue
        tree = ast.parse(path.read_text())
        named = {
            inside
            for block in ast.walk(tree)
            if isinstance(block, ast.With)
            and any(ast.unparse(item).partition("(")[0].endswith(("during", "reached")) for item in block.items)
            for inside in ast.walk(block)
        }
        found += [
            f"{path.relative_to(package)}:{call.lineno}: {ast.unparse(call.func)}"
            for call in ast.walk(tree)
            if isinstance(call, ast.Call)
            and call not in named
            and re.match(r"(dist|torch_collectives)\.", ast.unparse(call.func))
            and collective.match(ast.unparse(call.func).partition(".")[2])
            and not any(keyword.arg == "async_op" and ast.unparse(keyword.value) != "False" for keyword in call.keywords)
        ]
    assert found == []


@on_ranks(2)
def test_an_error_of_another_kind_stays_what_it_is() -> None:
    for error in (
        torch.OutOfMemoryError("no memory"),
        torch.AcceleratorError("device-side assert"),
        fsdp2.OrderError("order", expected="a", fix="b"),
    ):
        with pytest.raises(type(error)) as caught:
            lost_ranks.raise_lost(error, "the all-gather of 0")
        assert caught.value is error


@on_ranks(2)
def test_a_rank_of_this_host_that_has_not_come_to_fully_shard_is_named() -> None:
    """Symptom: of a rank that died before its first ``fully_shard`` the others said that no process of this host has ended."""
    model_of_three()
    roll = lost_ranks._Roll(store_of("not come"), dist.group.WORLD)
    dist.barrier()
    environment = {"LOCAL_RANK": str(dist.get_rank()), "LOCAL_WORLD_SIZE": "3"}
    with (
        patch.object(lost_ranks, "_roll", roll),
        patch.object(lost_ranks, "PATIENCE", 0.0),
        patch.dict(os.environ, environment),
        pytest.raises(LostRankError, match="rank 2: it has not come to its first fully_shard"),
    ):
        lost_ranks.raise_lost(GONE, "the comparison of models")
    for local in (environment | {"LOCAL_WORLD_SIZE": "2"}, {}):  # all ranks of this host are here, or nothing tells how many it has
        with (
            patch.object(lost_ranks, "_roll", roll),
            patch.object(lost_ranks, "PATIENCE", 0.0),
            patch.dict(os.environ, local),
            pytest.raises(LostRankError, match="no process of this host has ended or is stopped: look at the other hosts"),
        ):
            lost_ranks.raise_lost(GONE, "the comparison of models")
    assert dist.get_rank() not in roll.known()


@on_ranks(2)
def test_what_one_rank_has_found_the_ranks_on_other_hosts_hear() -> None:
    model_of_three()
    rank = dist.get_rank()
    roll = lost_ranks._Roll(store_of("other hosts"), dist.group.WORLD)
    dist.barrier()
    assert roll.known() == {}
    if rank == 0:
        roll.tell(1, "its host is on fire")
        roll.tell(1, "its process has ended")
    dist.barrier()
    assert roll.known() == ({1: "its host is on fire"} if rank == 0 else {})
    roll.tell(rank, "")  # it has lost another rank itself
    dist.barrier()
    with patch.object(lost_ranks, "_stat", lambda pid: ("Z", "7")):
        assert roll.known() == ({1: "its host is on fire"} if rank == 0 else {})


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc, which tells that a process is stopped")
def test_a_process_that_is_stopped_or_has_ended_is_known() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        state, started = lost_ranks._stat(process.pid)
        assert state in "RSD"
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert lost_ranks._stat(process.pid) == ("T", started)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert lost_ranks._stat(process.pid) == ("Z", started)
    assert lost_ranks._stat(process.pid) == ("X", "")


@on_ranks(2)
def test_fully_shard_starts_no_thread_and_sends_two_requests() -> None:
    """Symptom: a thread and a second connection to the store in every job; with 16 000 ranks, 5 000 requests a second to rank 0."""
    before = threading.active_count()
    store = dist.distributed_c10d._get_default_store()
    with patch.object(lost_ranks, "_roll", None), patch.object(type(store), "clone", side_effect=AssertionError("a connection")):
        model = model_of_three()
        assert lost_ranks._roll is not None
        model(torch.ones(2, 8)).sum().backward()
    assert threading.active_count() == before


PROGRAM = """
import sys
import torch, torch.distributed as dist
from torch import nn
import fsdp2

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
model = fsdp2.fully_shard(nn.Linear(4, 4))
model(torch.ones(2, 4)).sum().backward()
if rank == 1:
    raise ValueError("no such file: shard_17")
while True:
    model(torch.ones(2, 4)).sum().backward()
"""


@pytest.mark.slow
def test_a_rank_that_an_exception_ends_tells_it_to_the_others(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(program), str(rank), str(tmp_path / "store")], env=environment, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=300)[1] for process in processes]
    assert "LostRankError" in said[0]
    assert f"rank 1: its program has ended with ValueError: no such file: shard_17 ({program}, line 12)" in said[0]
    assert "LostRankError" not in said[1]
