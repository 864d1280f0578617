"""Calls that all ranks must make, made by some: who waits in what is said, which rank has not made it, and where that rank is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import fsdp2
from fsdp2.checkpoint import full_state_dict
from fsdp2.hangs import background, joint_calls
from fsdp2.hangs.background import EXIT_STATUS
from fsdp2.hangs.lookout import Limits, Lookout
from harness import on_ranks

PROGRAM = """
import threading
import torch, torch.distributed as dist
from torch import nn
import fsdp2
from fsdp2.checkpoint import full_state_dict

dist.init_process_group("gloo")
model = fsdp2.fully_shard(nn.Linear(4, 4))
fsdp2.set_missing_rank_timeout(8, notice=0.5)  # on busy cores the other rank takes seconds to say where it is

def something_else():
    threading.Event().wait()  # until the test ends

if dist.get_rank() == 0:
    full_state_dict(model)
something_else()
"""

ENDING_PROGRAM = """
import torch.distributed as dist
from torch import nn
import fsdp2
from fsdp2.hangs.patience import Patience

# The watchdog looks all the time and never ends the program: on busy cores any rank may be silent for longer than its timeout.
Patience.is_over = lambda self, now: ""
Patience.silent_for = lambda self, rank, now: None
Patience.still_for = lambda self, now: 0.0
fsdp2.set_missing_rank_timeout(notice=1e-9)
dist.init_process_group("gloo")
fsdp2.fully_shard(nn.Linear(4, 4))
fsdp2.watchdog(timeout=1e-3, patience=1000)  # and never stopped
"""


DETAIL_PROGRAM = """
import threading
from datetime import timedelta
import torch.distributed as dist
from torch import nn
import fsdp2

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
model = fsdp2.fully_shard(nn.Linear(4, 4))
if dist.get_rank() == 0:
    model.weight.full_tensor()  # on rank 0 alone
threading.Event().wait()
"""


def sharded() -> nn.Module:
    torch.manual_seed(0)
    return fsdp2.fully_shard(nn.Linear(4, 4))


def store_of(name: str) -> dist.Store:
    return dist.PrefixStore(name, dist.distributed_c10d._get_default_store().clone())


def in_something_else(store: dist.Store, look_out: Lookout) -> None:
    while not store.check(["told"]):
        look_out.look()
        store.add("looks of rank 1", 1)


def look_beside(store: dist.Store, look_out: Lookout) -> None:
    """Rank 1 has looked from beginning to end between any two looks of this rank."""
    while not store.check(["told"]):
        look_out.look()
        before = store.add("looks of rank 1", 0)
        while store.add("looks of rank 1", 0) < before + 2 and not store.check(["told"]):
            pass


@on_ranks(2)
def test_a_rank_that_waits_names_the_missing_rank_and_its_line():
    joint_calls.counts.clear()  # tests before this one called it in the same processes
    model = sharded()
    store, own = store_of("lookout_alone"), store_of("lookout_alone")
    said: list[str] = []
    look_out = Lookout(own, tell=lambda text: (said.append(text), own.set("told", "1")))
    if dist.get_rank() == 0:
        thread = threading.Thread(target=look_beside, args=(own, look_out))
        thread.start()
        full_state_dict(model)  # until rank 1 comes, too
        thread.join()
        (text,) = said
        assert re.match(
            r"fsdp2: rank 0 has waited for \d+ s in full_state_dict, which all ranks must call\. It called it here:\n", text
        ), text
        assert "full_state_dict(model)  # until rank 1 comes, too" in text  # the line of the program
        assert (
            "Rank 1 has not called it: it is in no such call, and has called full_state_dict 0 times; this is call 1 of rank 0." in text
        )
        assert "in in_something_else" in text  # where rank 1's main thread is
        assert "test_lookout.py" in text
        assert "fsdp2/" not in text.partition("fix:")[0].replace(__file__, "")  # no frames of ours
    else:
        in_something_else(store, look_out)
        full_state_dict(model)
        assert said == []


@on_ranks(2)
def test_a_rank_that_never_came_to_materialize_is_named():
    joint_calls.counts.clear()
    with torch.device("meta"):
        model = sharded()
    store, own = store_of("lookout_materialize"), store_of("lookout_materialize")
    said: list[str] = []
    look_out = Lookout(own, tell=lambda text: (said.append(text), own.set("told", "1")))
    if dist.get_rank() == 0:
        thread = threading.Thread(target=look_beside, args=(own, look_out))

        def init(module: nn.Module) -> None:
            thread.start()
            thread.join()
            module.reset_parameters()

        fsdp2.materialize(model, init)
        assert "Rank 1 has not called it: it is in no such call, and has called materialize 0 times" in said[0]
    else:
        in_something_else(store, look_out)
        fsdp2.materialize(model)
        assert said == []


def six_looks(look_out: Lookout) -> None:
    for _ in range(6):
        look_out.look()
        dist.barrier()


@on_ranks(2)
def test_a_rank_that_has_left_the_call_is_not_blamed_by_one_with_more_to_do_there():
    joint_calls.counts.clear()
    said: list[str] = []
    look_out = Lookout(store_of("lookout_left"), tell=said.append)

    @joint_calls.joint
    def call(model: nn.Module) -> None:
        if dist.get_rank() == 0:
            six_looks(look_out)

    call(sharded())
    if dist.get_rank() == 1:
        six_looks(look_out)
    assert said == []


@on_ranks(2)
def test_nobody_is_blamed_while_all_ranks_are_in_the_call_or_in_none():
    """A save of a large model takes long on all ranks."""
    said: list[str] = []
    look_out = Lookout(store_of("lookout_all"), tell=said.append)

    @joint_calls.joint
    def slow_call(model: nn.Module) -> None:
        six_looks(look_out)

    slow_call(sharded())
    six_looks(look_out)
    assert said == []


@on_ranks(2)
def test_ranks_outside_of_the_models_mesh_are_not_expected():
    store = store_of("lookout_mesh")
    said: list[str] = []
    look_out = Lookout(store, tell=said.append)

    @joint_calls.joint
    def alone(model: nn.Module) -> None:
        for _ in range(6):
            look_out.look()

    mesh = DeviceMesh("cpu", [0], mesh_dim_names=("alone",), _init_backend=False)
    if dist.get_rank() == 0:
        holder = nn.Module()
        holder.weight = nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False))
        alone(holder)
    assert said == []


@on_ranks(2)
def test_no_thread_runs_until_a_program_asks_for_one():
    with patch("fsdp2.hangs.lookout._ranks_meet_over_tcp", return_value=True), patch("fsdp2.hangs.lookout._watching", None):
        full_state_dict(sharded())
        fsdp2.clip_grad_norm_(sharded().parameters(), 1.0)
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("fsdp2_")] == []


def test_names_in_what_is_told_cannot_steer_the_terminal(capsys):
    background.tell("rank 1 waits in \x1b[2Jmodel.py")
    assert "\x1b" not in (told := capsys.readouterr().err)
    assert told.startswith("rank 1 waits in ")


@on_ranks(2)
def test_the_environment_asks_for_a_watchdog_by_a_number_only() -> None:
    with patch.dict(os.environ, FSDP2_WATCHDOG="soon"), pytest.raises(fsdp2.ArgumentError, match="FSDP2_WATCHDOG='soon'"):
        sharded()


@pytest.mark.parametrize("wrong", [{"timeout": 0}, {"timeout": "a"}, {"notice": -1}, {"notice": None}])
def test_times_that_are_none_are_refused(wrong):
    with pytest.raises(fsdp2.ArgumentError, match=next(iter(wrong))):
        fsdp2.set_missing_rank_timeout(**wrong)
    assert Limits.ends is None


def under_torchrun(program: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(program)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"} | environment
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train.py"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
def test_under_torchs_own_comparison_and_a_timeout_the_traceback_ends_in_the_line_of_the_rank_that_called_alone(tmp_path: Path):
    """As docs/hangs.md says. Without the timeout it hangs for half an hour."""
    done = under_torchrun(DETAIL_PROGRAM, tmp_path, TORCH_DISTRIBUTED_DEBUG="DETAIL")
    assert done.returncode != 0
    assert "model.weight.full_tensor()  # on rank 0 alone" in done.stderr


@pytest.mark.slow
def test_under_torchrun_the_waiting_rank_ends_with_the_explanation(tmp_path: Path):
    done = under_torchrun(PROGRAM, tmp_path)
    assert done.returncode != 0
    assert re.search(r"fsdp2: rank 0 has waited for [\d.]+ s in full_state_dict", done.stderr)
    assert "in something_else" in done.stderr
    assert f"exitcode  : {EXIT_STATUS}" in done.stderr


@pytest.mark.slow
def test_a_program_may_end_while_threads_ask_the_store(tmp_path: Path) -> None:
    """Python unwinds a daemon thread that is inside of C++ by force, which aborts the process: 3 of 4 such programs died so."""
    done = under_torchrun(ENDING_PROGRAM, tmp_path)
    assert done.returncode == 0, done.stderr
