"""Two jobs that write to one folder, as a dying one and the one that follows it: one at a time, and the dead hold nobody up.

Symptom: both wrote to one ``partial`` folder, so that checkpoints with a name held the state of both, and could not be loaded.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp2 import fully_shard
from fsdp2.checkpoint import (
    Checkpointer,
    CheckpointError,
    checkpoint_folder,
    load_safetensors,
    save_full_state,
    save_safetensors,
    verify,
)
from fsdp2.checkpoint.checkpoint_folder import CheckpointFolder
from fsdp2.checkpoint.dcp_write import DigestingWriter
from fsdp2.checkpoint.end_notes import EndNotes
from fsdp2.inspector.run_folder import Lines, write_json
from harness import cpu_mesh, on_ranks
from harness.models import mlp


def alone(seed: int) -> tuple[nn.Module, dist.ProcessGroup]:
    """A model and a process group of this rank, which is a job by itself."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("job", "shard"))["shard"]
    return fully_shard(mlp(seed=seed), mesh=mesh), mesh.get_group()


@on_ranks(2, timeout=60)
def test_the_second_run_in_a_folder_is_refused_until_the_first_is_closed(tmp_path: Path) -> None:
    rank = dist.get_rank()
    model, group = alone(seed=rank)
    with Checkpointer(tmp_path, model, process_group=group) as checkpointer:
        if rank == 0:
            checkpointer.save(1)
            checkpointer.wait()
        dist.barrier()
        if rank == 1:
            with (
                patch.object(checkpoint_folder, "WAIT_S", 0.0),
                pytest.raises(CheckpointError, match=r"another run writes to .*: process \d+ on "),
            ):
                checkpointer.save(1)
            assert checkpointer.load().step == 1  # reading is free
        dist.barrier()
        if rank == 0:
            checkpointer.save(2)
            checkpointer.close()
        dist.barrier()
        if rank == 1:
            checkpointer.save(3)
            checkpointer.wait()
            names = sorted(each.name for each in tmp_path.iterdir())
            assert names == [".lock", "latest", "step_000002", "step_000003"]
    dist.barrier()
    assert not (tmp_path / ".lock").exists()


@on_ranks(2, timeout=60)
def test_a_folder_of_weights_and_a_file_are_locked_while_they_are_written(tmp_path: Path) -> None:
    rank = dist.get_rank()
    model, group = alone(seed=rank)
    if rank == 0:
        save_safetensors(model, tmp_path / "folder", process_group=group)
        (tmp_path / "folder" / ".model.safetensors.0123abcd.tmp").touch()  # what is being written
        assert checkpoint_folder.take_lock(tmp_path / "folder" / ".lock")
        assert checkpoint_folder.take_lock(tmp_path / ".full.pt.lock")
    dist.barrier()
    if rank == 1:
        with patch.object(checkpoint_folder, "WAIT_S", 0.0), pytest.raises(CheckpointError, match="another run writes to"):
            save_safetensors(model, tmp_path / "folder", process_group=group)
        names = sorted(each.name for each in (tmp_path / "folder").iterdir())
        assert names == [".lock", ".model.safetensors.0123abcd.tmp", "model.safetensors"]
    with patch.object(checkpoint_folder, "WAIT_S", 0.0), patch("fsdp2.checkpoint.full_state.default_group", lambda: None):
        if rank == 1:
            with pytest.raises(CheckpointError, match="another run writes to"), patch("torch.distributed.get_rank", lambda *_: 0):
                save_full_state(tmp_path / "full.pt", mlp())
    dist.barrier()
    if rank == 0:
        checkpoint_folder.give_up_lock(tmp_path / "folder" / ".lock")
        checkpoint_folder.give_up_lock(tmp_path / ".full.pt.lock")
    dist.barrier()
    if rank == 1:
        save_safetensors(model, tmp_path / "folder", process_group=group)
        load_safetensors(model, tmp_path / "folder")
        assert [each.name for each in (tmp_path / "folder").iterdir()] == ["model.safetensors"]


def test_a_dead_owner_loses_its_lock_even_if_its_children_live(tmp_path: Path) -> None:
    path = tmp_path / "run" / ".lock"
    read, write = os.pipe()
    owner = os.fork()
    if owner == 0:
        try:
            checkpoint_folder.take_lock(path)
            child = os.fork()
            if child == 0:  # like a worker of a data loader: it has the open file too
                os.close(read)
                signal.pause()
            os.write(write, str(child).encode())
            signal.pause()
        finally:
            os._exit(1)
    child = int(os.read(read, 100))
    try:
        with patch.object(checkpoint_folder, "WAIT_S", 0.0), pytest.raises(CheckpointError, match=f"process {owner} on "):
            checkpoint_folder.take_lock(path)
        os.kill(owner, signal.SIGKILL)
        os.waitpid(owner, 0)
        assert checkpoint_folder.take_lock(path)
        assert checkpoint_folder.take_lock(path)  # the same process may have it several times
        checkpoint_folder.give_up_lock(path)
        assert path.exists()
        checkpoint_folder.give_up_lock(path)
        assert not path.exists()
    finally:
        os.kill(child, signal.SIGKILL)
        os.close(read)
        os.close(write)


@on_ranks(1)
def test_two_checkpointers_of_one_process_leave_each_other_alone(tmp_path: Path) -> None:
    """Of weights and their averages, for instance; the second removed what the first was writing, taking it for a dead run's."""
    model = fully_shard(mlp(), mesh=cpu_mesh())
    first, second = Checkpointer(tmp_path, model, keep_last=None), Checkpointer(tmp_path, model, keep_last=None)
    writing, go_on = threading.Event(), threading.Event()

    finish = DigestingWriter.finish

    def slow(*args: Any, **kwargs: Any) -> None:
        writing.set()
        assert go_on.wait(30)
        finish(*args, **kwargs)

    with patch.object(DigestingWriter, "finish", slow):
        first.save(1)
        assert writing.wait(30)
    second.save(1)
    second.wait()
    go_on.set()
    first.close()
    assert verify(tmp_path).nbytes > 0
    assert sorted(each.name for each in tmp_path.glob("step_*")) == ["step_000001", "step_000001_2"]
    assert (tmp_path / ".lock").exists()
    second.close()
    assert not (tmp_path / ".lock").exists()


@on_ranks(1)
def test_a_checkpointer_that_nobody_closed_does_not_keep_others_out(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, fully_shard(mlp(), mesh=cpu_mesh()))
    checkpointer.save(1)
    assert (tmp_path / ".lock").exists()
    checkpointer.wait()
    del checkpointer
    gc.collect()
    assert not (tmp_path / ".lock").exists()


@on_ranks(1)
def test_a_relative_folder_stays_where_it_is_when_the_process_goes_elsewhere(tmp_path: Path) -> None:
    """The next save failed, and so did close."""
    (tmp_path / "elsewhere").mkdir()
    with working_in(tmp_path):
        checkpointer = Checkpointer("run", fully_shard(mlp(), mesh=cpu_mesh()))
        checkpointer.save(1)
    with working_in(tmp_path / "elsewhere"):
        checkpointer.save(2)
        assert checkpointer.load().path == checkpointer.latest() == tmp_path / "run" / "step_000002"
        assert checkpointer.load("step_000001").step == checkpointer.load("../run/step_000001").step == 1
        checkpointer.close()
    assert sorted(each.name for each in (tmp_path / "run").iterdir()) == ["latest", "step_000001", "step_000002"]


def test_a_lock_is_one_whatever_path_leads_to_it(tmp_path: Path) -> None:
    """With two names for it in one process, who gave up one gave up both."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    first, second = (checkpoint_folder.take_lock(tmp_path / name / ".lock") for name in ("real", "link"))
    assert first is not None
    assert second is not None
    checkpoint_folder.give_up_lock(second)
    assert is_locked_for_others(tmp_path / "real" / ".lock")
    checkpoint_folder.give_up_lock(first)
    assert not is_locked_for_others(tmp_path / "real" / ".lock")


def test_a_lock_is_kept_while_others_read_its_file(tmp_path: Path) -> None:
    """A monitor that read it in this process gave it up: POSIX's locks end with any close of the file."""
    path = tmp_path / ".lock"
    with checkpoint_folder.locked(path):
        assert path.read_text().startswith("process ")
        assert is_locked_for_others(path)
    assert not path.exists()


def test_an_error_while_the_lock_is_held_is_not_hidden_by_one_of_giving_it_up(tmp_path: Path) -> None:
    with patch("os.close", side_effect=OSError(errno.EIO, "at close")), pytest.raises(ValueError, match="ours"):
        _fail_inside(tmp_path / ".lock")


def _fail_inside(path: Path) -> None:
    with checkpoint_folder.locked(path):
        raise ValueError("ours")


def test_inode_numbers_that_change_from_look_to_look_do_not_hold_up_a_lock(tmp_path: Path) -> None:
    with patch("os.path.samestat", return_value=False), checkpoint_folder.locked(tmp_path / ".lock"):
        assert is_locked_for_others(tmp_path / ".lock")


def test_links_in_the_place_of_what_is_written_are_not_followed(tmp_path: Path) -> None:
    """The file to which the link leads was overwritten, or emptied."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    for name in (".lock", "full.pt.partial", f".run.json.{os.getpid()}", "run.json", "ledger.rank0.jsonl", "full.pt", "end_rank_0"):
        (tmp_path / name).symlink_to(victim)
    with pytest.raises(CheckpointError, match=r"\.lock cannot be written"):
        checkpoint_folder.take_lock(tmp_path / ".lock")
    save_full_state(tmp_path / "full.pt", mlp())
    write_json(tmp_path / "run.json", {"a": 1})
    lines = Lines(tmp_path / "ledger.rank0.jsonl")
    lines.write({"a": 1})
    lines.close()
    with patch.object(dist, "get_rank", return_value=0):
        notes = EndNotes(tmp_path, None)
        notes.at = 1
        notes.leave(ValueError("bad"))
    assert victim.read_text() == "mine"
    assert torch.load(tmp_path / "full.pt", weights_only=True).keys() == mlp().state_dict().keys()
    assert not (tmp_path / "full.pt").is_symlink()
    assert json.loads((tmp_path / "ledger.rank0.jsonl").read_text()) == {"a": 1}


def test_a_fork_neither_has_its_parents_lock_nor_can_give_it_up(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    held = checkpoint_folder.take_lock(path)
    assert held is not None
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            checkpoint_folder.give_up_lock(held)
            code = 0
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert path.exists()
    assert is_locked_for_others(path)
    checkpoint_folder.give_up_lock(held)


@contextlib.contextmanager
def working_in(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def is_locked_for_others(path: Path) -> bool:
    """What a process sees that has nothing of ours, but for the name of its owner."""
    child = os.fork()
    if child == 0:
        code = 2
        with contextlib.suppress(BaseException), patch.object(checkpoint_folder, "WAIT_S", 0.0):
            try:
                held = checkpoint_folder.take_lock(path)
                assert held is not None
                checkpoint_folder.give_up_lock(held)
                code = 0
            except CheckpointError:
                code = 1
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 1)
    return code == 1


def write_into(folder: Path, text: str) -> None:
    for name in ("__0_0.distcp", ".metadata"):
        (folder / name).write_text(text)


def test_runs_do_not_meet_where_the_file_system_has_no_locks(tmp_path: Path) -> None:
    first, second = CheckpointFolder(tmp_path, keep_last=2), CheckpointFolder(tmp_path, keep_last=2)
    with patch("fcntl.flock", side_effect=OSError(errno.ENOLCK, "No locks available")):
        for folder, text in ((first, "first"), (second, "second")):
            write_into(folder.begin(), text)
        paths = {text: folder.commit(1) for folder, text in ((first, "first"), (second, "second"))}
        first.prune()
        second.discard()
    for text, path in paths.items():
        assert {each.read_text() for each in path.iterdir()} == {text}
    assert (tmp_path / "latest").read_text() == paths["second"].name


def test_what_a_dead_run_has_left_is_removed_by_the_next(tmp_path: Path) -> None:
    for name in ("partial", f"partial_{'0' * 32}"):
        (tmp_path / name).mkdir()
        write_into(tmp_path / name, "")
    (tmp_path / f"latest_{'0' * 32}.partial").touch()
    (tmp_path / ".lock").write_text("process 1 on another host")
    (tmp_path / "partial_of_mine").mkdir()
    folder = CheckpointFolder(tmp_path, keep_last=1)
    write_into(folder.begin(), "")
    folder.commit(7)
    folder.unlock()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["latest", "partial_of_mine", "step_000007"]


def test_a_pointer_to_the_latest_that_is_damaged_is_passed_over(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep_last=None)
    for step in (1, 2):
        write_into(folder.begin(), "")
        folder.commit(step)
    folder.unlock()
    for content in (b"\xff\xfe", b"\0" * 12, b"../other", b""):
        (tmp_path / "latest").write_bytes(content)
        assert folder.latest() == tmp_path / "step_000002"


def test_a_pointer_that_is_being_written_is_left_alone_by_another_checkpointer(tmp_path: Path) -> None:
    first, second = CheckpointFolder(tmp_path, keep_last=None), CheckpointFolder(tmp_path, keep_last=None)
    write_into(first.begin(), "")
    with patch("os.fsync", lambda _: second.begin()):
        final = first.commit(1)
    assert first.latest() == final
    first.unlock()
    second.unlock()
