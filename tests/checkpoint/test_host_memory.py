"""Checkpoints in the hosts' memory: a run goes on from them bit for bit, also where a host has lost its own; or says why not.

Each pair of ranks is a host here: it has a folder of its own.
"""

from __future__ import annotations

import errno
import os
import shutil
import warnings
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp2 import ArgumentError, OrderError
from fsdp2.checkpoint import CheckpointError, host_memory
from harness import cpu_mesh, on_ranks
from harness.runs import Run, assert_same_state


def host_of(tmp_path: Path, ranks_per_host: int) -> Path:
    return tmp_path / f"host_{dist.get_rank() // ranks_per_host}"


@on_ranks(4)
def test_a_run_continues_bit_for_bit_from_memory(tmp_path: Path) -> None:
    for lost in (None, 1):
        _continues_bit_for_bit(tmp_path / str(lost), cpu_mesh(), ranks_per_host=2, lost=lost)


@pytest.mark.slow
@on_ranks(4)
def test_a_run_continues_bit_for_bit_whichever_host_of_any_number_is_lost(tmp_path: Path) -> None:
    for mesh in (cpu_mesh(), cpu_mesh(2, 2)):
        for ranks_per_host in (1, 2, 3, 4):
            hosts = range(-(-4 // ranks_per_host))
            for lost in (None, *(hosts if len(hosts) > 1 else ())):
                _continues_bit_for_bit(tmp_path / f"{mesh.ndim}_{ranks_per_host}_{lost}", mesh, ranks_per_host, lost)


def _continues_bit_for_bit(folder: Path, mesh: DeviceMesh, ranks_per_host: int, lost: int | None) -> None:
    memory = host_of(folder, ranks_per_host)
    run = Run(folder / "disk", mesh=mesh, memory=memory)
    run.step()
    run.checkpointer.save(1)
    run.steps(2)
    run.checkpointer.keep(3)
    losses, state = run.steps(2), run.state()
    run.checkpointer.close()

    if dist.get_rank() // ranks_per_host == lost:
        shutil.rmtree(memory, ignore_errors=True)  # another host takes its place
    dist.barrier()
    again = Run(folder / "disk", seed=1000, mesh=mesh, memory=memory)
    resumed = again.checkpointer.load()
    assert (resumed.step, resumed.source, resumed.random_restored) == (3, "memory", True), folder.name
    assert again.steps(2) == losses, folder.name
    assert_same_state(again.state(), state)
    again.checkpointer.close()


@on_ranks(4)
def test_what_two_lost_hosts_had_is_named_and_the_run_goes_on_from_disk(tmp_path: Path) -> None:
    memory = host_of(tmp_path, 1)
    run = Run(tmp_path / "disk", memory=memory)
    run.step()
    run.checkpointer.save(1)
    losses, state = run.steps(2), run.state()
    run.checkpointer.keep(3)
    run.checkpointer.close()

    if dist.get_rank() in (1, 2):  # rank 1 and the host with its copy
        shutil.rmtree(memory)
    dist.barrier()
    again = Run(tmp_path / "disk", seed=1000, memory=memory)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        resumed = again.checkpointer.load()
    assert (resumed.step, resumed.source) == (1, "disk")
    texts = [str(each.message) for each in found if "kept in memory" in str(each.message)]
    assert len(texts) == (dist.get_rank() == 0)
    assert all("step 3" in text and "__1_0.distcp" in text and "step_000001" in text for text in texts)
    assert again.steps(2) == losses
    assert_same_state(again.state(), state)
    again.checkpointer.close()


@on_ranks(4)
def test_the_newer_of_memory_and_disk_is_loaded_and_names_are_of_the_disk(tmp_path: Path) -> None:
    run = Run(tmp_path / "disk", memory=host_of(tmp_path, 2), asynchronous=False)
    assert run.checkpointer.latest() is None
    run.checkpointer.keep(2)
    latest = run.checkpointer.latest()
    assert latest == host_of(tmp_path, 2) / "step_000002"
    run.checkpointer.save(1)
    assert run.checkpointer.load().source == "memory"
    assert run.checkpointer.load("step_000001").source == "disk"
    run.checkpointer.save(3)
    assert (run.checkpointer.load().step, run.checkpointer.load().source) == (3, "disk")
    run.checkpointer.keep(3)
    assert run.checkpointer.load().source == "memory"
    assert [each.name for each in host_of(tmp_path, 2).glob("step_*")] == ["step_000003"]
    run.checkpointer.close()


@on_ranks(4)
def test_a_host_whose_memory_is_full_fails_the_save_on_every_rank_and_leaves_the_one_before(tmp_path: Path) -> None:
    for ranks in ([0], [3], [1, 2]):
        base = tmp_path / str(ranks)
        run = Run(base / "disk", memory=host_of(base, 2))
        run.steps(2)
        run.checkpointer.keep(2)
        run.checkpointer.wait()
        losses, state = run.steps(2), run.state()
        full = OSError(errno.ENOSPC, "No space left on device")
        fails = patch.object(os, "pwrite", side_effect=full) if dist.get_rank() in ranks else patch.dict(os.environ)
        run.checkpointer.wait()
        with fails:
            run.checkpointer.keep(4)
            with pytest.raises(CheckpointError, match="No space left on device"):
                run.checkpointer.wait()
        assert run.checkpointer.load().step == 2
        assert run.steps(2) == losses
        assert_same_state(run.state(), state)
        run.checkpointer.keep(4)
        run.checkpointer.close()


@on_ranks(2, 4)
def test_shared_memory_is_freed_by_close_but_not_by_an_error(tmp_path: Path) -> None:
    def failing_run() -> None:
        run = Run(tmp_path / "disk", memory=True)
        with run.checkpointer:
            run.checkpointer.keep(1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing_run()
    again = Run(tmp_path / "disk", memory=True)
    resumed = again.checkpointer.load()
    assert (resumed.step, resumed.source) == (1, "memory")
    dist.barrier()
    again.checkpointer.close()
    dist.barrier()
    assert not resumed.path.parent.exists()


@on_ranks(1)
def test_folders_of_processes_that_have_ended_are_removed_and_those_of_others_are_not(tmp_path: Path) -> None:
    space = os.stat("/proc/self/ns/pid").st_ino
    own = f"fsdp2-{os.getuid()}-{space}-{os.getppid()}-"
    with patch.object(host_memory, "_SHARED_MEMORY", tmp_path):
        (tmp_path / f"{own}1").mkdir()  # a process of that number, before
        (tmp_path / f"fsdp2-{os.getuid()}-{space + 1}-{os.getppid()}-1").mkdir()  # of another container
        (tmp_path / "something").mkdir()
        run = Run(tmp_path / "disk", memory=True)
        run.checkpointer.keep(1)
        run.checkpointer.wait()
        folders = {each.name for each in tmp_path.iterdir()} - {"disk", "something"}
        assert f"{own}1" not in folders
        assert len(folders) == 2
        run.checkpointer.close()


@on_ranks(1)
def test_without_memory_nothing_can_be_kept(tmp_path: Path) -> None:
    run = Run(tmp_path / "disk")
    with pytest.raises(OrderError, match="memory=True"):
        run.checkpointer.keep(1)
    run.checkpointer.close()


@on_ranks(2)
def test_ranks_that_differ_in_memory_and_steps_that_are_none_are_refused_by_the_name_of_the_call(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="rank 1: no memory"):
        Run(tmp_path / "disk", memory=dist.get_rank() == 0)
    with pytest.raises(ArgumentError, match="a folder in memory"):
        Run(tmp_path / "disk", memory="")
    run = Run(tmp_path / "disk", memory=host_of(tmp_path, 2))
    with pytest.raises(ArgumentError, match=r"Checkpointer\.keep got step -1"):
        run.checkpointer.keep(-1)
    with pytest.raises(ArgumentError, match=r"Checkpointer\.keep different steps"):
        run.checkpointer.keep(dist.get_rank())
    run.checkpointer.close()
