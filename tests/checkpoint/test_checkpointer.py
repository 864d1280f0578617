"""A resumed run is the run that never stopped; whatever fails or crashes, and wherever, the earlier checkpoint stays whole."""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import os
import pickle
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp2 import ArgumentError, FSDPModule, fully_shard
from fsdp2.checkpoint import Checkpointer, CheckpointError, save_safetensors
from fsdp2.checkpoint.checkpoint_folder import CheckpointFolder
from fsdp2.checkpoint.dcp_read import read_metadata
from fsdp2.checkpoint.dcp_write import DigestingWriter
from fsdp2.checkpoint.failures import on_every_rank
from fsdp2.core.iteration.module_state import named_units
from fsdp2.ranks import Rank, Ranks, run_ranks
from harness import cpu_mesh, on_ranks
from harness.checkpoints import CrashError, crash_at, on_rank_0
from harness.models import batches, mlp
from harness.runs import Loader, Net, Run, assert_same_state
from harness.training import assert_same_bits, fed_own_chunk


def names(folder: Path) -> list[str]:
    """But for the lock of the run that writes there."""
    return sorted(each.name for each in folder.iterdir() if each.name != ".lock")


# --- resuming ---------------------------------------------------------------------------------------------------------------------


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("asynchronous", [True, False])
def test_resumed_run_continues_bit_for_bit(tmp_path: Path, asynchronous: bool) -> None:
    with Run(tmp_path / "run", asynchronous=asynchronous) as run:
        run.steps(3)
        run.checkpointer.save(3)
        losses, state = run.steps(3), run.state()

    with Run(tmp_path / "run", seed=1000) as again:
        resumed = again.checkpointer.load()
        assert again.steps(3) == losses
        assert_same_state(again.state(), state)
    assert (resumed.step, resumed.world_size, resumed.random_restored) == (3, dist.get_world_size(), True)
    assert resumed.path == tmp_path / "run" / "step_000003"


@on_ranks(2)
def test_checkpoint_before_the_first_step_changes_nothing(tmp_path: Path) -> None:
    """torch's ``get_optimizer_state_dict`` takes a step of zero gradients then, after which Adam counts one step too many."""
    with Run(tmp_path / "never", data=None) as run:
        losses = run.steps(2)

    with Run(tmp_path / "run") as run:
        run.checkpointer.save(0)
        assert not run.optimizer.state
        assert run.steps(2) == losses

    with Run(tmp_path / "run", seed=1000) as again:
        again.step()
        again.checkpointer.load()
        assert not again.optimizer.state
        assert again.steps(2) == losses


@on_ranks(2)
def test_parameters_without_state_and_several_groups_are_restored(tmp_path: Path) -> None:
    def make(seed: int) -> tuple[nn.Module, Optimizer, Checkpointer]:
        torch.manual_seed(seed)
        model = fully_shard(Net(), mesh=cpu_mesh())
        model.blocks[0].requires_grad_(False)
        groups = [{"params": model.last.parameters(), "lr": 0.5}, {"params": model.blocks.parameters(), "momentum": 0.0}]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        return model, optimizer, Checkpointer(tmp_path, model, optimizer)

    def step(model: nn.Module, optimizer: Optimizer) -> Tensor:
        model.eval()
        loss = model(torch.ones(2, 6)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    model, optimizer, checkpointer = make(0)
    step(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.25
    checkpointer.save(1)
    losses = [step(model, optimizer) for _ in range(2)]
    checkpointer.close()

    model, optimizer, checkpointer = make(1)
    checkpointer.load()
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert optimizer.param_groups[1]["momentum"] == 0.0
    assert [step(model, optimizer) for _ in range(2)] == losses
    checkpointer.close()


@on_ranks(2)
@pytest.mark.parametrize("name", ["Adagrad", "ASGD", "NAdam", "RMSprop"])
def test_state_of_other_optimizers_is_sharded_like_the_parameters(tmp_path: Path, name: str) -> None:
    def make(seed: int) -> tuple[nn.Module, Optimizer]:
        model = fully_shard(mlp(seed=seed), mesh=cpu_mesh())
        return model, getattr(torch.optim, name)(model.parameters())

    model, optimizer = make(0)
    fed_own_chunk(model, batches(2), optimizer=optimizer)
    with Checkpointer(tmp_path, model, optimizer) as checkpointer:
        checkpointer.save(2)
    steps = fed_own_chunk(model, batches(2, seed=3), optimizer=optimizer)
    model, optimizer = make(1)
    with Checkpointer(tmp_path, model, optimizer) as checkpointer:
        checkpointer.load()
    assert_same_bits(fed_own_chunk(model, batches(2, seed=3), optimizer=optimizer), steps)


@on_ranks(2)
def test_position_may_be_a_dict_and_keeps_its_types(tmp_path: Path) -> None:
    position = {"epoch": 1, "seen": {3: (1, 2), "empty": {}}, "shuffled": torch.arange(3), "rank": dist.get_rank()}
    found: dict[str, Any] = {"stale": True}
    with Checkpointer(tmp_path, fully_shard(Net(), mesh=cpu_mesh()), data=dict(position)) as checkpointer:
        checkpointer.save(1)
    with Checkpointer(tmp_path, fully_shard(Net(), mesh=cpu_mesh()), data=found) as checkpointer:
        checkpointer.load()
    assert found.pop("shuffled").tolist() == position.pop("shuffled").tolist()
    assert found == position


@on_ranks(4)
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_other_number_of_ranks_and_other_mesh_continue_but_for_random_numbers(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """Saved by ranks 0 and 1, loaded by 4, saved by these, and loaded by ranks 0 and 1."""
    pair = pair_mesh()
    mesh = cpu_mesh(*shape)
    here = dist.get_rank() < 2
    if here:
        with Run(tmp_path / "two", mesh=pair, process_group=pair.get_group(), data={"seen": 7}) as first:
            first.steps(2)
            first.checkpointer.save(2)
        expected = first.full_state()
    dist.barrier()

    found: dict[str, Any] = {}
    with Run(tmp_path / "two", seed=1000, mesh=mesh, data=found) as run:
        before = torch.get_rng_state()
        resumed = run.checkpointer.load()
        assert (resumed.step, resumed.world_size, resumed.random_restored) == (2, 2, False)
        assert found == {"seen": 7}
        assert torch.equal(torch.get_rng_state(), before)
        values = run.full_state()
        other = Checkpointer(tmp_path / "four", run.model, run.optimizer, run.scheduler, data=found)
        other.save(2)
        other.close()
    if here:
        # Running means of the batch norm differ between ranks: those of rank 0 are for all.
        of_rank_0 = expected if dist.get_rank() == 0 else expected | {name: values[name] for name in values if ".norm.running" in name}
        assert_same_state(values, of_rank_0)
        with Run(tmp_path / "four", seed=1000, mesh=pair, process_group=pair.get_group(), data={}) as again:
            assert again.checkpointer.load().world_size == 4
            assert_same_state(again.full_state(), of_rank_0)
            assert again.scheduler.last_epoch == 2
    dist.barrier()


def pair_mesh() -> DeviceMesh:
    """Over ranks 0 and 1; ranks 2 and 3 have one of their own. Collective: yes."""
    return init_device_mesh(cpu_mesh().device_type, (2, 2), mesh_dim_names=("pair", "shard"))["shard"]


@on_ranks(4)
def test_position_that_differs_between_ranks_needs_as_many_ranks(tmp_path: Path) -> None:
    pair = pair_mesh()
    if dist.get_rank() < 2:
        with contextlib.closing(Run(tmp_path, mesh=pair, process_group=pair.get_group()).checkpointer) as checkpointer:
            checkpointer.save(1)
    dist.barrier()
    with Run(tmp_path, seed=1000) as run:
        before = run.state()
        with pytest.raises(CheckpointError, match="a data position for each of 2 ranks"):
            run.checkpointer.load()
        assert_same_state(run.state(), before)
    with Run(tmp_path, seed=1000, data=None) as run:
        assert run.checkpointer.load().step == 1


@on_ranks(2)
def test_files_are_read_by_dcp_into_an_unsharded_model(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        run.steps(2)
        run.checkpointer.save(2)
    expected = run.full_state()
    dist.broadcast_object_list(everyones := [expected])  # batch norm's buffers are rank 0's
    expected = everyones[0]
    unsharded = Net()
    state = {"model": unsharded.state_dict(), "optimizer": {"state": {"last.weight": {"exp_avg": torch.empty(3, 6)}}}, "step": 0}
    dcp.load(state, checkpoint_id=tmp_path / "step_000002")
    for name, value in state["model"].items():
        assert torch.equal(value, expected[f"model.{name}"]), name
    number = [name for name, _ in unsharded.named_parameters()].index("last.weight")
    assert torch.equal(state["optimizer"]["state"]["last.weight"]["exp_avg"], expected[f"optimizer.{number}.exp_avg"])
    assert state["step"] == 2


# --- while training goes on -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def held_back_writing() -> Iterator[threading.Event]:
    """Inside, files are written once the event is set."""
    event = threading.Event()
    write = DigestingWriter.write_data

    def wait_and_write(*args: Any) -> Any:
        event.wait()
        return write(*args)

    with patch.object(DigestingWriter, "write_data", wait_and_write):
        try:
            yield event
        finally:
            event.set()


@on_ranks(2)
def test_training_goes_on_during_a_save_and_does_not_change_what_is_saved(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        run.steps(2)
        state = run.state()
        with held_back_writing() as event:
            run.checkpointer.save(2)
            losses = run.steps(3)  # with collectives of its own
            assert not (tmp_path / "latest").exists()
            event.set()
            run.checkpointer.wait()
        assert (tmp_path / "latest").read_text() == "step_000002"
    with Run(tmp_path, seed=1000) as again:
        again.checkpointer.load()
        assert_same_state(again.state(), state)
        assert again.steps(3) == losses


@on_ranks(2)
def test_only_one_save_is_under_way(tmp_path: Path) -> None:
    run = Run(tmp_path, keep_last=None)
    events: list[str] = []
    write, take = Checkpointer._write, Checkpointer._state

    def recording_write(self: Checkpointer, state: dict[str, Any], step: int, store: Any) -> None:
        write(self, state, step, store)
        events.append(f"wrote {step}")

    def recording_take(self: Checkpointer, step: int, store: Any) -> dict[str, Any]:
        events.append(f"took {step}")
        return take(self, step, store)

    with patch.object(Checkpointer, "_write", recording_write), patch.object(Checkpointer, "_state", recording_take):
        for step in (1, 2, 3):
            run.checkpointer.save(step)
        run.checkpointer.close()
    assert events == [f"{what} {step}" for step in (1, 2, 3) for what in ("took", "wrote")]


@on_ranks(2, 3)
def test_a_save_while_one_is_under_way_on_one_rank_is_skipped_on_all(tmp_path: Path) -> None:
    run, may_end = Run(tmp_path, if_busy="skip"), threading.Event()
    write = Checkpointer._write

    def late(*args: Any) -> None:
        write(*args)
        assert dist.get_rank() != 1 or may_end.wait(60)  # the other ranks have ended theirs

    with patch.object(Checkpointer, "_write", late):
        assert run.checkpointer.save(1)
        if dist.get_rank() != 1:
            run.checkpointer._pending.result()
        assert not run.checkpointer.save(2)
        may_end.set()
        run.checkpointer.wait()
        assert run.checkpointer.save(3)
        run.checkpointer.close()
    assert names(tmp_path) == ["latest", "step_000001", "step_000003"]


@pytest.mark.parametrize("in_time", [True, False])
@on_ranks(2, 3)
def test_a_save_that_is_replaced_on_one_rank_before_it_is_written_there_is_none_on_all(tmp_path: Path, in_time: bool) -> None:
    with Run(tmp_path, if_busy="replace") as run:
        run.checkpointer.save(1)
        run.checkpointer.wait()
        run.step()
        write, is_first, may_be_replaced = DigestingWriter.write_data, iter([True]), threading.Event()

        def slow(*args: Any) -> Any:
            written = None if in_time and dist.get_rank() == 1 else write(*args)
            may_be_replaced.set()
            assert not next(is_first, False) or run.checkpointer._is_replaced.wait(60)
            return written or write(*args)

        with patch.object(DigestingWriter, "write_data", slow):
            run.checkpointer.save(2)
            run.step()
            state = run.state()
            assert may_be_replaced.wait(60)
            assert run.checkpointer.save(3)
            run.checkpointer.wait()
        assert names(tmp_path) == ["latest", "step_000001" if in_time else "step_000002", "step_000003"]
        assert run.checkpointer.load().step == 3
        assert_same_state(run.state(), state)
        full = patch.object(os, "writev", side_effect=OSError(errno.ENOSPC, "No space left on device"))
        with full if dist.get_rank() == 0 else contextlib.nullcontext():
            run.checkpointer.save(4)
            run.checkpointer._pending.exception()
        with pytest.raises(CheckpointError, match="No space left"):
            run.checkpointer.save(5)


@on_ranks(2)
def test_ranks_agree_three_times_in_a_save(tmp_path: Path) -> None:
    """Symptom: a save was slower than ``dcp.save``. Cause: eight agreements beside DCP's own; each waits for the slowest rank."""
    with Run(tmp_path, asynchronous=False) as run:
        run.checkpointer.save(0)
        with patch.object(dist, "all_gather_object", wraps=dist.all_gather_object) as agreements:
            run.checkpointer.save(1)
        assert agreements.call_count == 3


@on_ranks(1, 2)
def test_a_save_makes_few_calls_of_python_functions_for_a_tensor(tmp_path: Path) -> None:
    """Symptom: a step during a save waited for the interpreter. Cause: rank 0 read the metadata back, more than half of all calls."""
    with Run(tmp_path) as run:
        run.step()
        counts = []
        write = Checkpointer._write

        def counted_write(self: Checkpointer, *args: Any) -> None:
            calls = itertools.count()
            sys.setprofile(lambda frame, event, arg: next(calls) if event == "call" else None)  # of this thread
            try:
                write(self, *args)
            finally:
                sys.setprofile(None)
                counts.append(next(calls))

        with patch.object(Checkpointer, "_write", counted_write):
            for step in (1, 2):
                run.checkpointer.save(step)
        run.checkpointer.wait()
        num_tensors = len(read_metadata(tmp_path / "step_000002").state_dict_metadata)
        assert counts[1] < 230 * num_tensors, (counts, num_tensors)


@on_ranks(2)
def test_memory_is_one_copy_of_the_shards_that_every_save_writes_to(tmp_path: Path) -> None:
    """Half of the time that training waited for a save went to memory that nobody had touched."""
    with Run(tmp_path) as run:
        run.step()
        copies: list[dict[int, int]] = []
        write = Checkpointer._write

        def counting_write(self: Checkpointer, state: dict[str, Any], step: int, store: Any) -> None:
            tensors = [*state["model"].values(), *(each for values in state["optimizer"]["state"].values() for each in values.values())]
            storages = [(each.to_local() if isinstance(each, DTensor) else each).untyped_storage() for each in tensors]
            copies.append({each.data_ptr(): each.nbytes() for each in storages})
            write(self, state, step, store)

        saved = []
        with patch.object(Checkpointer, "_write", counting_write):
            for step in (1, 2, 3):
                saved.append(run.state())
                run.checkpointer.save(step)
                run.step()
        assert copies[0] == copies[1] == copies[2]
        groups = [group for _, unit in named_units(run.model) for group in unit.groups]
        in_flats = {f"model.{param.fqn}" for group in groups for param in group.params}
        others = sum(value.numel() * value.itemsize for name, value in run.state().items() if name not in in_flats)
        assert sum(copies[0].values()) == sum(group.flat.nbytes for group in groups) + others
        for step in (2, 3):
            run.checkpointer.load(f"step_00000{step}")
            assert_same_state(run.state(), saved[step - 1])
        assert not run.checkpointer._spare


# --- which checkpoints there are --------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_last_ones_are_kept_and_the_latest_is_named(tmp_path: Path) -> None:
    on_rank_0(lambda: checkpoint(tmp_path / "partial"))
    on_rank_0(lambda: checkpoint(tmp_path / "step_000009_best"))
    model = fully_shard(Net(), mesh=cpu_mesh())
    with Checkpointer(tmp_path, model, keep_last=2) as checkpointer:
        assert checkpointer.latest() is None
        for step in (10, 20, 30):
            checkpointer.save(step)
        assert checkpointer.latest() == tmp_path / "step_000030"
        assert names(tmp_path) == ["latest", "step_000009_best", "step_000020", "step_000030"]
        checkpointer.save(20)  # as after load("step_000020")
        assert checkpointer.latest() == tmp_path / "step_000020_2"
        assert names(tmp_path) == ["latest", "step_000009_best", "step_000020_2", "step_000030"]
        assert checkpointer.load().step == 20
        assert checkpointer.load("step_000030").step == 30
        assert checkpointer.load(tmp_path / "step_000030").step == 30


def checkpoint(path: Path, age_s: int = 0) -> Path:
    """Files as of a checkpoint, for those who do not look into it."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "__0_0.distcp").write_text(path.name)
    (path / ".metadata").write_text(path.name)
    os.utime(path / ".metadata", (1e9 - age_s, 1e9 - age_s))
    return path


def test_after_a_jump_of_the_clock_the_last_steps_are_kept(tmp_path: Path) -> None:
    """Symptom: of steps 1 to 6, saved while the clock went back an hour each time, steps 1, 2 and 6 were kept."""
    folder = CheckpointFolder(tmp_path, keep_last=3)
    for step in range(1, 7):
        checkpoint(folder.begin(), age_s=3600 * step)
        folder.commit(step)
        folder.prune()
    folder.unlock()
    assert names(tmp_path) == ["latest", "step_000004", "step_000005", "step_000006"]


@on_ranks(2)
def test_a_save_makes_a_folder_that_somebody_has_removed(tmp_path: Path) -> None:
    run = saved(tmp_path / "run")
    for asynchronous in (True, False):
        options = {"data": run.loader, "asynchronous": asynchronous}
        with Checkpointer(tmp_path / "run", run.model, run.optimizer, run.scheduler, **options) as checkpointer:
            checkpointer.save(2)
            checkpointer.wait()
            on_rank_0(lambda: shutil.rmtree(tmp_path / "run"))
            for step in (3, 4):
                checkpointer.save(step)
                checkpointer.wait()
            dist.barrier()
            assert names(tmp_path / "run") == ["latest", "step_000003", "step_000004"]
            assert (tmp_path / "run" / ".lock").exists()
            dist.barrier()


@on_ranks(2)
def test_ranks_that_pass_different_steps_are_noticed(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "run", fully_shard(Net(), mesh=cpu_mesh())) as checkpointer:
        with pytest.raises(ArgumentError, match=r"(?s)different steps.*rank 0: 100.*rank 1: 101.*expected: one step on all ranks"):
            checkpointer.save(100 + dist.get_rank())
        assert checkpointer.latest() is None


@on_ranks(2, timeout=60)
def test_a_save_waits_for_a_rank_as_long_as_the_programs_own_collectives(tmp_path: Path) -> None:
    """Symptom: a stopped rank held the others for 30 minutes in a program that had set a minute."""
    program = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    checkpointer = Checkpointer(tmp_path, fully_shard(Net(), mesh=cpu_mesh()), process_group=program)
    if dist.get_rank() == 0:
        with pytest.raises(CheckpointError, match="a rank is gone, or cannot be reached"):
            checkpointer.save(1)
    dist.barrier()
    if dist.get_rank() == 1:
        with pytest.raises(CheckpointError, match="a rank is gone, or cannot be reached"):
            checkpointer.save(1)
    checkpointer.close()


def test_latest_is_the_newest_by_time_if_nothing_names_it(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep_last=2)
    assert folder.latest() is None
    checkpoint(tmp_path / "step_000100", age_s=50)
    newest = checkpoint(tmp_path / "step_000010", age_s=10)
    (tmp_path / "step_000200").mkdir()  # without metadata
    assert folder.latest() == newest
    (tmp_path / "latest").write_text("step_000300")  # removed by hand
    assert folder.latest() == newest
    (tmp_path / "latest").write_text("step_000100\n")
    assert folder.latest() == tmp_path / "step_000100"
    (tmp_path / "step_000100" / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"step_000100, which is the latest checkpoint, has no \.metadata"):
        folder.latest()


@on_ranks(2)
def test_ranks_with_folders_of_their_own_acknowledge_nothing(tmp_path: Path) -> None:
    model = fully_shard(mlp(), mesh=cpu_mesh(2))
    with (
        Checkpointer(tmp_path / f"rank_{dist.get_rank()}", model, asynchronous=False) as checkpointer,
        pytest.raises(CheckpointError, match=r"(?s)files that are missing.*__1_0\.distcp: is missing"),
    ):
        checkpointer.save(1)
    assert not list(tmp_path.glob("rank_*/step_*"))


@on_ranks(2)
def test_a_folder_that_one_rank_alone_knows_is_an_error_on_all(tmp_path: Path) -> None:
    model = fully_shard(mlp(), mesh=cpu_mesh(2))
    folder: Any = tmp_path / "run" if dist.get_rank() == 0 else None
    with pytest.raises(CheckpointError, match="NoneType"):
        Checkpointer(folder, model)
    with pytest.raises(CheckpointError, match="NoneType"):
        save_safetensors(model, folder)


ON_DISK = [(Path, name) for name in ("mkdir", "rename", "replace", "unlink", "open", "rmdir")]
ON_DISK += [(os, name) for name in ("fsync", "unlink", "rmdir")]  # type: ignore[misc]


def test_crash_at_any_change_of_the_disk_leaves_a_whole_checkpoint_and_the_next_save_works(tmp_path: Path) -> None:
    finished = False
    for number in range(60):
        where = tmp_path / str(number)
        for step in (1, 2):
            checkpoint(where / f"step_{step:06d}", age_s=10 - step)
        (where / "latest").write_text("step_000002")
        folder = CheckpointFolder(where, keep_last=2)

        def save(step: int, folder: CheckpointFolder = folder) -> None:
            folder.begin()
            for name in ("__0_0.distcp", ".metadata"):
                with (folder.partial / name).open("w") as file:
                    file.write(f"step_{step:06d}")
            folder.commit(step)
            folder.prune()

        try:
            with crash_at(number, ON_DISK):
                save(3)
            finished = True
        except CrashError:
            pass
        for each in where.glob("step_*"):
            assert sorted(file.read_text() for file in each.iterdir()) == [each.name] * 2, "half a checkpoint has a name"
        latest = folder.latest()
        assert latest is not None
        assert latest.name in ("step_000002", "step_000003")
        save(4)
        assert folder.latest() == where / "step_000004"
        assert len(folder.checkpoints()) == 2
        assert not folder.partial.exists()
        if finished:
            return
    raise AssertionError("it never finished")


# --- errors -----------------------------------------------------------------------------------------------------------------------


def saved(folder: Path, **options: Any) -> Run:
    """A run that has saved step 1, complete on all ranks."""
    with Run(folder, **options) as run:
        run.step()
        run.checkpointer.save(1)
    return run


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


def corrupt(path: Path) -> None:
    """Other bytes all over the file, the same number of them."""
    path.write_bytes(bytes(path.stat().st_size))


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch pwned",)


def put_code_into(metadata: Path) -> None:
    metadata.write_bytes(pickle.dumps(Evil()))


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "a file is missing": (lambda path: (path / "__1_0.distcp").unlink(), r"__1_0\.distcp: is missing, with \w+\."),
    "a file is cut short": (lambda path: truncate(path / "__1_0.distcp"), r"__1_0\.distcp: has \d+ bytes of \d+, with \w+\."),
    "a file is corrupt": (lambda path: corrupt(path / "__1_0.distcp"), r"__1_0\.distcp cannot be read"),
    "no metadata": (lambda path: (path / ".metadata").unlink(), "is no checkpoint: it has no .metadata"),
    "metadata are cut short": (lambda path: truncate(path / ".metadata"), r"\.metadata cannot be read"),
    "metadata are empty": (lambda path: (path / ".metadata").write_bytes(b""), r"\.metadata cannot be read"),
    "metadata are another pickle": (lambda path: (path / ".metadata").write_bytes(pickle.dumps([1])), r"\.metadata cannot be read"),
    "metadata have code": (lambda path: put_code_into(path / ".metadata"), r"it names (posix|nt)\.system"),
    "the folder is gone": (shutil.rmtree, "is no folder"),
}


@on_ranks(2)
@pytest.mark.parametrize("what", BROKEN)
def test_broken_checkpoint_is_an_error_on_every_rank_that_changes_nothing(tmp_path: Path, what: str) -> None:
    damage, said = BROKEN[what]
    saved(tmp_path)
    on_rank_0(lambda: damage(tmp_path / "step_000001"))
    with Run(tmp_path, seed=1000) as run:
        run.step()
        before, random_before = run.state(), torch.get_rng_state()
        with pytest.raises(CheckpointError, match=said):
            run.checkpointer.load("step_000001")
        assert_same_state(run.state(), before)
        assert torch.equal(torch.get_rng_state(), random_before)
        assert run.scheduler.last_epoch == 1
        run.checkpointer.save(5)
        assert run.checkpointer.load().step == 5
    assert not Path("pwned").exists()


@on_ranks(2)
def test_other_model_is_an_error_that_lists_what_differs(tmp_path: Path) -> None:
    saved(tmp_path)
    with Run(tmp_path, seed=1000, width=9) as run:
        before = run.state()
        with pytest.raises(CheckpointError, match=r"blocks\.0\.0\.weight: \(9, 6\) in the model, \(8, 6\) in the checkpoint") as raised:
            run.checkpointer.load()
        assert_same_state(run.state(), before)
    assert str(raised.value).count("in the checkpoint") == 6
    other = nn.Sequential()
    other.add_module("last", nn.Linear(6, 3))
    other.add_module("new", nn.Linear(1, 1))
    with Checkpointer(tmp_path, fully_shard(other, mesh=cpu_mesh())) as checkpointer, pytest.raises(CheckpointError) as raised:
        checkpointer.load()
    for said in ("new.weight: is not in the checkpoint", "blocks.0.0.bias: is not in the model"):
        assert said in str(raised.value)


@on_ranks(2)
def test_other_optimizer_is_an_error(tmp_path: Path) -> None:
    run = saved(tmp_path)
    for params in ([run.model.last.weight], [{"params": [run.model.last.weight]}, {"params": [run.model.last.bias]}]):
        optimizer = torch.optim.AdamW(params)
        with Checkpointer(tmp_path, run.model, optimizer) as checkpointer:
            before = run.state()
            with pytest.raises(CheckpointError, match="is of another optimizer: 1 groups of 12 parameters"):
                checkpointer.load()
            assert_same_state(run.state(), before)
            assert not optimizer.state


@on_ranks(2)
def test_what_the_checkpoint_does_not_have_is_named(tmp_path: Path) -> None:
    model = fully_shard(Net(), mesh=cpu_mesh())
    with Checkpointer(tmp_path, model) as checkpointer:
        with pytest.raises(CheckpointError, match=f"there is no checkpoint in {tmp_path}"):
            checkpointer.load()
        checkpointer.save(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer(tmp_path, model, optimizer, data={}) as checkpointer:
        with pytest.raises(CheckpointError, match="has no state of: data, optimizer"):
            checkpointer.load()
        dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "plain")
        with pytest.raises(CheckpointError, match="was not saved by a Checkpointer: it has model"):
            checkpointer.load("plain")


@on_ranks(2)
def test_full_disk_on_one_rank_raises_on_every_rank_at_the_next_call(tmp_path: Path) -> None:
    run = saved(tmp_path)
    state = run.state()
    checkpointer = Checkpointer(tmp_path, run.model, run.optimizer, run.scheduler, data=run.loader)
    full = OSError(28, "No space left on device")
    run.step()
    with patch("os.writev", side_effect=full) if dist.get_rank() == 1 else contextlib.nullcontext():
        checkpointer.save(2)
        run.step()
        with pytest.raises(CheckpointError, match=r"cannot save step 2 .*rank 1: OSError.*No space left on device"):
            checkpointer.save(3)
    assert names(tmp_path) == ["latest", "step_000001"]
    checkpointer.wait()  # said once
    checkpointer.close()
    with Run(tmp_path, seed=1000) as again:
        assert again.checkpointer.load().step == 1
        assert_same_state(again.state(), state)
        again.checkpointer.save(2)
        assert again.checkpointer.latest() == tmp_path / "step_000002"


@on_ranks(2)
@pytest.mark.parametrize("step", ["begin", "commit", "prune"])
def test_failure_on_rank_0_alone_raises_on_every_rank(tmp_path: Path, step: str) -> None:
    run = saved(tmp_path)
    checkpointer = Checkpointer(tmp_path, run.model, run.optimizer, run.scheduler, data=run.loader)
    with patch.object(CheckpointFolder, step, side_effect=PermissionError(13, "Permission denied")):
        checkpointer.save(2)
        with pytest.raises(CheckpointError, match="Permission denied"):
            checkpointer.close()
    expected = ["latest", "step_000001", "step_000002"] if step == "prune" else ["latest", "step_000001"]
    dist.barrier()
    assert names(tmp_path) == expected


class Picky(Loader):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        if dist.get_rank() == 1:
            raise KeyError("generator")


@on_ranks(2)
def test_state_that_somebody_refuses_is_an_error_on_every_rank_before_the_model_is_changed(tmp_path: Path) -> None:
    saved(tmp_path)
    with Run(tmp_path, seed=1000, data=Picky(0)) as run:
        before = run.state()
        with pytest.raises(CheckpointError, match=r"rank 1.*KeyError"):
            run.checkpointer.load()
        assert_same_state(run.state(), before)


class Unsafe:
    pass


@on_ranks(2)
def test_position_that_could_not_be_loaded_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    model = fully_shard(Net(), mesh=cpu_mesh())
    checkpointer = Checkpointer(tmp_path / "run", model, data={"bad": Unsafe()} if dist.get_rank() == 0 else {})
    with checkpointer, pytest.raises(CheckpointError, match="the data position cannot be saved"):
        checkpointer.save(1)
    assert not (tmp_path / "run").exists()


@on_ranks(2)
def test_wrong_arguments_and_a_closed_checkpointer_are_errors_that_say_so(tmp_path: Path) -> None:
    model: FSDPModule = fully_shard(Net(), mesh=cpu_mesh())
    for wrong in ({"keep_last": 0}, {"optimizer": model}, {"data": 3}, {"scheduler": "cosine"}):
        with pytest.raises(TypeError, match=f"Checkpointer got {next(iter(wrong))}=.* of type"):
            Checkpointer(tmp_path, model, **wrong)
    with pytest.raises(TypeError, match="Checkpointer got"):
        Checkpointer(tmp_path, None)
    checkpointer = Checkpointer(tmp_path, model)
    checkpointer.save(3)
    with pytest.raises(TypeError, match=r"Checkpointer\.load got checkpoint=3 of type int(?s:.*)the name or the path of a checkpoint"):
        checkpointer.load(3)
    with pytest.raises(CheckpointError, match=r"no checkpoint 'step_000004'(?s:.*)expected: a path, or one of \['step_000003'\]"):
        checkpointer.load("step_000004")
    assert checkpointer.load("step_000003").step == checkpointer.load(tmp_path / "step_000003").step == 3
    checkpointer.close()
    checkpointer.close()
    with pytest.raises(RuntimeError, match="closed"):
        checkpointer.save(1)


@on_ranks(2)
def test_model_on_the_meta_device_is_named(tmp_path: Path) -> None:
    saved(tmp_path)
    with torch.device("meta"):
        model = Net()
    with Checkpointer(tmp_path, fully_shard(model, mesh=cpu_mesh())) as checkpointer:
        for call in (lambda: checkpointer.save(1), checkpointer.load):
            with pytest.raises(RuntimeError, match=r"blocks\.0\.0\.weight \(8, 6\)"):
                call()


@on_ranks(2)
def test_error_of_one_rank_is_raised_on_every_rank() -> None:
    def fail() -> None:
        if dist.get_rank() == 1:
            raise ValueError("seven")

    with pytest.raises(CheckpointError, match=r"\[rank 1\] counting: ValueError: seven"):
        on_every_rank(dist.group.WORLD, "counting", fail)


# --- kill -9 ----------------------------------------------------------------------------------------------------------------------

STEPS, EVERY = 8, 2
CRASHES = ["mid-step", "between the files of a rank", "before the metadata", "before the rename", "before it is named"]


def train_and_crash(folder: Path, crash: str | None) -> Ranks:
    """A training like any other, resumed if it can be. Rank 1, or rank 0 where only that acts, kills itself when step 6 is saved."""

    def train(rank: Rank) -> None:
        dist.init_process_group("gloo")
        run = Run(folder / "run")
        done = run.checkpointer.load().step if run.checkpointer.latest() else 0
        for step in range(done + 1, STEPS + 1):
            if step == 6 and crash is not None:
                install_crash(rank.rank, crash, run)
            rank.send((step, run.step()))
            if step % EVERY == 0:
                run.checkpointer.save(step)
        run.checkpointer.close()

    return run_ranks(2, train, limit_s=300, grace_s=60)


def install_crash(rank: int, crash: str, run: Run) -> None:
    def die(*args: Any, **kwargs: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    run.checkpointer.wait()  # of step 4: a crash so early that no thread is writing would test less
    if crash == "mid-step" and rank == 1:
        run.model.blocks[0].register_forward_hook(die)
    elif crash == "between the files of a rank" and rank == 1:
        fsync, count = os.fsync, iter(range(10))
        os.fsync = lambda file: die() if next(count) == 0 else fsync(file)  # type: ignore[assignment]
    elif crash == "before the metadata" and rank == 0:
        DigestingWriter.finish = die  # type: ignore[method-assign]
    elif crash == "before the rename" and rank == 0:
        CheckpointFolder.commit = die  # type: ignore[method-assign, assignment]
    elif crash == "before it is named" and rank == 0:
        Path.replace = die  # type: ignore[method-assign, assignment]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    ends = train_and_crash(tmp_path_factory.mktemp("uninterrupted"), None)
    assert ends.status == 0, ends
    return ends


@pytest.mark.slow
@pytest.mark.parametrize("crash", CRASHES)
def test_killed_run_resumes_with_the_same_losses(uninterrupted: Ranks, tmp_path: Path, crash: str) -> None:
    ends = train_and_crash(tmp_path, crash)
    assert -signal.SIGKILL in [end.status for end in ends]
    assert all(end.status for end in ends), "the other rank cannot have gone on"
    names_after = names(tmp_path / "run")
    assert (tmp_path / "run" / "latest").read_text() == "step_000004", names_after
    assert {"step_000002", "step_000004"} <= set(names_after) or crash == "mid-step", names_after

    again = train_and_crash(tmp_path, None)
    assert again.status == 0, again
    for rank, expected in enumerate(uninterrupted):
        losses = dict(expected.sent)
        assert len(losses) == STEPS
        assert all(map(math.isfinite, losses.values()))
        assert dict([*ends[rank].sent, *again[rank].sent]) == losses
    assert not list((tmp_path / "run").glob("*partial*"))


# --- odd but legal, and not ---------------------------------------------------------------------------------------------------------


@on_ranks(1, 2)
def test_a_model_without_state_and_inference_mode(tmp_path: Path) -> None:
    empty = fully_shard(nn.Sequential(nn.ReLU()), mesh=cpu_mesh())
    with Checkpointer(tmp_path / "empty", empty) as checkpointer:
        checkpointer.save(0)
        assert checkpointer.load().step == 0
    model = fully_shard(mlp(), mesh=cpu_mesh())
    optimizer = torch.optim.AdamW(model.parameters())
    fed_own_chunk(model, batches(1), optimizer=optimizer)
    with torch.inference_mode(), Checkpointer(tmp_path / "model", model, optimizer) as checkpointer:
        checkpointer.save(1)
        checkpointer.load()
    fed_own_chunk(model, batches(1), optimizer=optimizer)
    with Checkpointer(tmp_path / "empty", model) as checkpointer, pytest.raises(CheckpointError, match="of another model"):
        checkpointer.load()


@on_ranks(2)
@pytest.mark.parametrize("step", ["one", 1.5, -1, True, None])
def test_a_step_that_is_no_number_of_steps_is_refused(step: Any, tmp_path: Path) -> None:
    model = fully_shard(mlp(), mesh=cpu_mesh())
    with Checkpointer(tmp_path, model) as checkpointer, pytest.raises(ArgumentError, match="save got step"):
        checkpointer.save(step)
