"""Checkpoints in the hosts' memory: a run goes on from them bit for bit, also where a host has lost its own; or says why not.

Each pair of ranks is a host here: it has a folder of its own.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp2 import ArgumentError, OrderError
from fsdp2.checkpoint import CheckpointError, host_memory
from fsdp2.checkpoint.checkpoint_folder import CheckpointFolder
from fsdp2.ranks import Rank, run_ranks
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
    with Run(folder / "disk", mesh=mesh, memory=memory) as run:
        run.step()
        run.checkpointer.save(1)
        run.steps(2)
        run.checkpointer.keep(3)
        losses, state = run.steps(2), run.state()

    if dist.get_rank() // ranks_per_host == lost:
        shutil.rmtree(memory, ignore_errors=True)  # another host takes its place
    dist.barrier()
    with Run(folder / "disk", seed=1000, mesh=mesh, memory=memory) as again:
        resumed = again.checkpointer.load()
        assert (resumed.step, resumed.source, resumed.random_restored) == (3, "memory", True), folder.name
        assert again.steps(2) == losses, folder.name
        assert_same_state(again.state(), state)


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
@on_ranks(4)
def test_half_the_ranks_go_on_from_memory_those_of_one_host_after_the_other_is_lost_or_some_of_both(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    with Run(tmp_path / "disk", mesh=cpu_mesh(*shape), memory=host_of(tmp_path, 2), data={"seen": 7}) as run:
        run.steps(2)
        run.checkpointer.keep(2)
    values = run.full_state()
    of_rank_0 = {name: value for name, value in values.items() if ".norm." in name and ".running_" in name}
    dist.broadcast_object_list(told := [of_rank_0])
    expected = values | told[0]
    pair = init_device_mesh(cpu_mesh().device_type, (2, 2), mesh_dim_names=("pair", "shard"))
    for axis in ("pair", "shard"):  # ranks 0 and 2, one of each host; ranks 0 and 1, whose host has all
        mesh = pair[axis]
        if 0 in dist.get_process_group_ranks(mesh.get_group()):
            found: dict[str, int] = {}
            again = Run(
                tmp_path / "disk", seed=1000, mesh=mesh, memory=host_of(tmp_path, 2), data=found, process_group=mesh.get_group()
            )
            resumed = again.checkpointer.load()
            assert (resumed.step, resumed.source, resumed.world_size, found) == (2, "memory", 4, {"seen": 7})
            assert_same_state(again.full_state(), expected)
            again.checkpointer.close()
        dist.barrier()
        if dist.get_rank() == 3:
            shutil.rmtree(host_of(tmp_path, 2), ignore_errors=True)
        dist.barrier()


@on_ranks(4)
def test_what_two_lost_hosts_had_is_named_and_the_run_goes_on_from_disk(tmp_path: Path) -> None:
    memory = host_of(tmp_path, 1)
    with Run(tmp_path / "disk", memory=memory) as run:
        run.step()
        run.checkpointer.save(1)
        losses, state = run.steps(2), run.state()
        run.checkpointer.keep(3)

    if dist.get_rank() in (1, 2):  # rank 1 and the host with its copy
        shutil.rmtree(memory)
    dist.barrier()
    with Run(tmp_path / "disk", seed=1000, memory=memory) as again:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            resumed = again.checkpointer.load()
        assert (resumed.step, resumed.source) == (1, "disk")
        texts = [str(each.message) for each in found if "kept in memory" in str(each.message)]
        assert len(texts) == (dist.get_rank() == 0)
        assert all("step 3" in text and "__1_0.distcp" in text and "step_000001" in text for text in texts)
        assert again.steps(2) == losses
        assert_same_state(again.state(), state)


@on_ranks(4)
def test_the_newer_of_memory_and_disk_is_loaded_and_names_are_of_the_disk(tmp_path: Path) -> None:
    with Run(tmp_path / "disk", memory=host_of(tmp_path, 2), asynchronous=False) as run:
        assert run.checkpointer.latest() is None
        run.checkpointer.save(1)
        run.checkpointer.keep(2)
        latest = run.checkpointer.latest()
        assert latest == host_of(tmp_path, 2) / "step_000002"
        assert run.checkpointer.load().source == "memory"
        assert run.checkpointer.load("step_000001").source == "disk"
        run.checkpointer.save(3)
        assert (run.checkpointer.load().step, run.checkpointer.load().source) == (3, "disk")
        run.checkpointer.keep(3)
        assert run.checkpointer.load().source == "memory"
        assert [each.name for each in host_of(tmp_path, 2).glob("step_*")] == ["step_000003"]


@on_ranks(2)
def test_load_takes_the_step_that_was_saved_or_kept_last_even_if_it_is_an_earlier_one(tmp_path: Path) -> None:
    run = Run(tmp_path / "disk", memory=host_of(tmp_path, 1), asynchronous=False)
    checkpointer = run.checkpointer
    checkpointer.save(2)
    for step in (6, 5):
        checkpointer.keep(step)
        assert checkpointer.load().step == step
    with pytest.raises(ArgumentError, match=r"keep got step 1, and .*step_000002 is of a later step(?s:.*)save\(1\) first"):
        checkpointer.keep(1)
    assert checkpointer.load().step == 5
    checkpointer.save(1)  # goes on from an earlier step
    assert (checkpointer.load().step, checkpointer.load().source) == (1, "disk")
    checkpointer.keep(1)
    assert checkpointer.load().source == "memory"
    checkpointer.close()


@pytest.mark.parametrize("kept", [10, 12])
def test_a_kill_right_after_a_save_never_brings_back_what_was_kept_before_it(tmp_path: Path, kept: int) -> None:
    """Symptom: load took step 10 of the run that was given up. Cause: a kill between a save of step 10 and the removal of step 10 in
    memory, which was preferred at equal steps."""

    def begun(rank: Rank) -> Run:
        dist.init_process_group("gloo")
        return Run(tmp_path / "disk", seed=rank.rank, memory=tmp_path / f"host_{rank.rank}", asynchronous=False)

    def killed(rank: Rank) -> None:
        run = begun(rank)
        run.checkpointer.save(8)
        run.step()
        run.checkpointer.keep(kept)
        run.checkpointer.load("step_000008")
        run.steps(2)
        rank.send([value.tolist() for value in run.state().values()])
        with patch.object(CheckpointFolder, "prune", lambda folder: os.kill(os.getpid(), signal.SIGKILL)):
            run.checkpointer.save(10)

    def goes_on(rank: Rank) -> None:
        run = begun(rank)
        resumed = run.checkpointer.load()
        rank.send((resumed.step, resumed.source, [value.tolist() for value in run.state().values()]))
        run.checkpointer.close()

    before, after = (run_ranks(2, body, limit_s=120, grace_s=2) for body in (killed, goes_on))
    assert before[0].status == -signal.SIGKILL
    assert [each.sent for each in after] == [[(10, "disk", *each.sent)] for each in before], [each.output for each in (*before, *after)]


@on_ranks(2)
def test_a_step_is_kept_without_a_look_at_the_disk_which_may_fail(tmp_path: Path) -> None:
    with Run(tmp_path / "disk", memory=host_of(tmp_path, 1), asynchronous=False) as run:
        run.checkpointer.save(1)
        metadata = tmp_path / "disk" / "step_000001" / ".metadata"
        if dist.get_rank() == 0:
            metadata.rename(tmp_path / "metadata")
        with patch.object(run.checkpointer._disk.folder, "latest", side_effect=AssertionError):
            run.checkpointer.keep(2)
        dist.barrier()
        if dist.get_rank() == 0:
            (tmp_path / "metadata").rename(metadata)
        assert (run.checkpointer.load().step, run.checkpointer.load().source) == (2, "memory")


@on_ranks(2)
def test_what_a_load_has_fetched_of_a_checkpoint_that_it_then_cannot_read_is_removed(tmp_path: Path) -> None:
    memory = host_of(tmp_path, 1)
    with Run(tmp_path / "disk", memory=memory, asynchronous=False) as run:
        run.checkpointer.save(1)
        run.checkpointer.keep(2)
        if dist.get_rank() == 1:
            shutil.rmtree(next(memory.glob("step_*")))
        with _damaged(tmp_path, ".metadata", 0.5, on_rank=0), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert run.checkpointer.load().source == "disk"
            assert not [*memory.glob("partial_*")]


@on_ranks(2)
def test_damaged_memory_is_an_error_of_ours_that_falls_back_to_disk_with_a_warning(tmp_path: Path) -> None:
    with Run(tmp_path / "disk", memory=host_of(tmp_path, 1), asynchronous=False) as run:
        run.step()
        run.checkpointer.keep(1)
        with pytest.raises(CheckpointError, match=r"__0_0\.distcp"), _damaged(tmp_path, "__0_0.distcp", 0.0):
            run.checkpointer.load()  # there is nothing on disk
        run.checkpointer.save(1)
        losses, state = run.steps(2), run.state()
        run.checkpointer.keep(3)
        told: set[str] = set()
        places = [(name, part) for name in ("digests.json", ".metadata", "__0_0.distcp", "__1_0.distcp") for part in (0.0, 0.5, 0.99)]
        for name, part in places:
            for verify in (False, True):
                with _damaged(tmp_path, name, part), warnings.catch_warnings(record=True) as found:
                    warnings.simplefilter("always")
                    resumed = run.checkpointer.load(verify=verify)
                texts = [str(each.message) for each in found if "kept in memory" in str(each.message)]
                if resumed.source == "memory":  # bytes of a tensor, which verify alone compares
                    assert (verify, name[-7:], part) == (False, ".distcp", 0.5)
                    continue
                assert len(texts) <= (dist.get_rank() == 0)
                assert not told.intersection(texts), "it is told once"
                told.update(texts)
                assert any(name in text and "step_000001" in text for text in told) == (dist.get_rank() == 0)
                assert run.steps(2) == losses
                assert_same_state(run.state(), state)


@contextlib.contextmanager
def _damaged(tmp_path: Path, name: str, part: float, on_rank: int | None = None) -> Iterator[None]:
    """On every host, or on that of one rank, 40 bytes of a file."""
    if on_rank not in (None, dist.get_rank()):
        dist.barrier()
        yield
        dist.barrier()
        dist.barrier()
        return
    path = next(host_of(tmp_path, 1).glob(f"step_*/{name}"))
    whole = path.read_bytes()
    at = int(len(whole) * part)
    path.write_bytes(whole[:at] + b"\xff" * len(whole[at : at + 40]) + whole[at + 40 :])
    dist.barrier()
    yield
    dist.barrier()
    path.write_bytes(whole)
    dist.barrier()


@on_ranks(4)
def test_a_host_whose_memory_is_full_fails_the_save_on_every_rank_and_leaves_the_one_before(tmp_path: Path) -> None:
    for ranks in ([0], [3], [1, 2]):
        base = tmp_path / str(ranks)
        with Run(base / "disk", memory=host_of(base, 2)) as run:
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


@on_ranks(2, 4)
def test_shared_memory_is_freed_by_close_but_not_by_an_error(tmp_path: Path) -> None:
    def failing_run() -> None:
        run = Run(tmp_path / "disk", memory=True)
        with run.checkpointer:
            run.checkpointer.keep(1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing_run()
    with Run(tmp_path / "disk", memory=True) as again:
        resumed = again.checkpointer.load()
        assert (resumed.step, resumed.source) == (1, "memory")
        dist.barrier()
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
        with Run(tmp_path / "disk", memory=True) as run:
            run.checkpointer.keep(1)
            run.checkpointer.wait()
            folders = {each.name for each in tmp_path.iterdir()} - {"disk", "something"}
            assert f"{own}1" not in folders
            assert len(folders) == 2


@on_ranks(1)
def test_without_memory_nothing_can_be_kept(tmp_path: Path) -> None:
    with Run(tmp_path / "disk") as run, pytest.raises(OrderError, match="memory=True"):
        run.checkpointer.keep(1)


@on_ranks(2)
def test_ranks_that_differ_in_memory_and_steps_that_are_none_are_refused_by_the_name_of_the_call(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="rank 1: no memory"):
        Run(tmp_path / "disk", memory=dist.get_rank() == 0)
    with pytest.raises(ArgumentError, match="rank 1: no memory, if_busy='wait'"):
        Run(tmp_path / "disk", if_busy="wait" if dist.get_rank() else "skip")
    with pytest.raises(ArgumentError, match="a folder in memory"):
        Run(tmp_path / "disk", memory="")
    with pytest.raises(ArgumentError, match="the folder of the checkpoints on disk"):
        Run(tmp_path / "disk", memory=tmp_path / "other" / ".." / "disk")
    with Run(tmp_path / "disk", memory=host_of(tmp_path, 2)) as run:
        with pytest.raises(ArgumentError, match=r"Checkpointer\.keep got step -1"):
            run.checkpointer.keep(-1)
        with pytest.raises(ArgumentError, match=r"Checkpointer\.keep different steps"):
            run.checkpointer.keep(dist.get_rank())
