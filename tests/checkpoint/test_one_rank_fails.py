"""What fails on one rank, at any step between collectives, is a CheckpointError on every rank; nobody waits for the one that failed.

Symptom: a rank raised where only CheckpointError was expected, or between two collectives where nothing was, and left the others in
the second one for ever. Smallest shape: two ranks, one parameter.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import os
import pkgutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fsdp2
from fsdp2 import ArgumentError, fully_shard
from fsdp2.checkpoint import (
    Checkpointer,
    CheckpointError,
    full_optimizer_state_dict,
    full_state_dict,
    load_checkpoint,
    load_safetensors,
    save_full_state,
    save_safetensors,
)
from fsdp2.core.comm import agreement as agreement_module
from fsdp2.core.comm.agreement import LostRankError, agree, agree_over
from fsdp2.errors import FSDPError
from fsdp2.ranks import Rank, run_ranks
from harness import cpu_mesh, on_ranks
from harness.checkpoints import of_every_rank
from harness.models import mlp, transformer
from harness.sharding import shard_blocks
from harness.training import assert_same_tensors

ERRORS: dict[str, Exception] = {
    "memory": MemoryError("no room for it"),
    "permission": PermissionError(errno.EACCES, "Permission denied"),
    "disk": OSError(errno.EIO, "Input/output error"),
}
Names = tuple[str, int, int, str]  # what to replace, on which rank, after how many calls that succeed, by which error


@contextlib.contextmanager
def failing(path: str, rank: int, after: int, error: str) -> Iterator[None]:
    """On ``rank`` the function at ``path`` raises, once ``after`` calls have succeeded; on the others all is well."""
    owner = pkgutil.resolve_name(path.rpartition(".")[0])
    name = path.rpartition(".")[2]
    real, left = getattr(owner, name), [after]

    def replaced(*args: Any, **kwargs: Any) -> Any:
        if left[0] == 0:
            raise ERRORS[error]
        left[0] -= 1
        return real(*args, **kwargs)

    with patch.object(owner, name, replaced) if dist.get_rank() == rank else contextlib.nullcontext():
        yield


def sharded(seed: int = 0, **options: Any) -> nn.Module:
    model = transformer(tied=True, seed=seed, **options)
    return shard_blocks(model)


def raises_on_every_rank(names: Names, call: Callable[[], Any]) -> None:
    path, rank, after, error = names
    with failing(path, rank, after, error), pytest.raises(FSDPError) as caught:
        call()
    told = of_every_rank((type(caught.value).__name__, str(caught.value)))
    assert len(set(told)) == 1
    assert told[0][0] == "CheckpointError"
    assert f"rank {rank}" in told[0][1]
    assert (str(ERRORS[error]) or error) in told[0][1] or ERRORS[error].strerror in told[0][1]


CHECKPOINT = "fsdp2.checkpoint"

# --- Checkpointer -----------------------------------------------------------------------------------------------------------------

SAVING: list[Names] = [
    (f"{CHECKPOINT}.checkpointer.host_copy", 1, 0, "memory"),
    (f"{CHECKPOINT}.training_state._plain_tensors", 1, 0, "memory"),
    (f"{CHECKPOINT}.training_state._digest", 1, 0, "memory"),
    (f"{CHECKPOINT}.checkpointer.take_per_rank_values", 1, 0, "memory"),
    (f"{CHECKPOINT}.checkpointer.pack", 1, 1, "memory"),  # of what differs between ranks; before it of random states
    (f"{CHECKPOINT}.checkpointer.DigestingWriter", 1, 0, "permission"),
    (f"{CHECKPOINT}.checkpointer.LatePlanner", 0, 0, "memory"),
    ("os.writev", 1, 0, "disk"),
    ("torch.distributed.checkpoint.filesystem.FileSystemWriter.finish", 0, 0, "disk"),
    (f"{CHECKPOINT}.checkpoint_folder.sync_folder", 0, 1, "disk"),
]
LOADING: list[Names] = [
    (f"{CHECKPOINT}.checkpointer_load.read_metadata", 1, 0, "permission"),
    (f"{CHECKPOINT}.checkpointer_load._Reading.prepare", 1, 0, "memory"),
    (f"{CHECKPOINT}.checkpointer_load.ByteReader", 1, 0, "memory"),
    ("os.preadv", 1, 0, "disk"),
    (f"{CHECKPOINT}.checkpointer_load._Reading.result", 0, 0, "memory"),
    (f"{CHECKPOINT}.checkpointer.set_random_state", 1, 0, "memory"),
    ("torch.optim.AdamW.load_state_dict", 1, 0, "memory"),
]


@on_ranks(2, timeout=30)
@pytest.mark.parametrize("names", SAVING, ids=lambda names: names[0].rpartition(".")[2])
def test_a_step_of_a_save_that_fails_on_one_rank_is_an_error_on_every_rank(tmp_path: Path, names: Names) -> None:
    model = sharded()
    model.register_buffer("own", torch.tensor([float(dist.get_rank())]))
    with Checkpointer(tmp_path, model) as checkpointer:
        checkpointer.save(1)
        checkpointer.wait()

        def save() -> None:
            checkpointer.save(2)
            checkpointer.wait()

        raises_on_every_rank(names, save)
        latest = checkpointer.latest()
        assert latest is not None
        assert latest.name in ("step_000001", "step_000002")
        save()


@on_ranks(2, timeout=30)
@pytest.mark.parametrize("names", LOADING, ids=lambda names: names[0].rpartition(".")[2])
def test_a_step_of_a_load_that_fails_on_one_rank_is_an_error_on_every_rank_that_changes_nothing(tmp_path: Path, names: Names) -> None:
    """Symptom: the random state came last, so where one rank could not set it, all had the checkpoint's model and optimizer."""
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters())
    with Checkpointer(tmp_path, model, optimizer) as checkpointer:
        for step in (1, 2):
            model(torch.arange(5)[None]).sum().backward()
            optimizer.step()
            if step == 1:
                checkpointer.save(1)
        before = state_of(model, optimizer)
        raises_on_every_rank(names, checkpointer.load)
        assert_same_tensors(state_of(model, optimizer), before, "value")
        assert checkpointer.load().step == 1


class Counter(nn.Module):
    """Has an extra state, by which its number of calls goes into checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


class Position:
    """Where a program is in its data, as an object."""

    def __init__(self) -> None:
        self.batch = 0

    def state_dict(self) -> dict[str, int]:
        return {"batch": self.batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.batch = state["batch"]


AdamW = torch.optim.AdamW
OPTIMIZERS: dict[str, Callable[[nn.Module, Path], torch.optim.Optimizer]] = {
    "torch": lambda model, path: AdamW(model.parameters()),
    "flat": lambda model, path: fsdp2.optim.flat(AdamW, model),
    "on the host": lambda model, path: fsdp2.optim.offloaded(AdamW, model, fsdp2.CPUOffloadPolicy()),
    "in files": lambda model, path: fsdp2.optim.offloaded(AdamW, model, fsdp2.DiskOffloadPolicy(path)),
}
"""What has had steps before the load; "new": no step."""


@on_ranks(2, timeout=120)
@pytest.mark.parametrize("kind", ["torch", *(pytest.param(kind, marks=pytest.mark.slow) for kind in [*OPTIMIZERS, "new"][1:])])
def test_whatever_a_load_has_changed_when_one_rank_fails_is_as_before_on_every_rank(tmp_path: Path, kind: str) -> None:
    """Symptom: a hook of the user's that raised while the model loaded left the checkpoint's model and optimizer on every rank.

    The scheduler and a position in the data were never brought back.
    """
    model = sharded()
    model.add_module("counter", Counter())
    optimizer = OPTIMIZERS.get(kind, OPTIMIZERS["torch"])(model, tmp_path)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    position = Position()

    def step() -> None:
        model(torch.arange(5)[None]).sum().backward()
        optimizer.step()
        scheduler.step()
        position.batch += 1
        model.counter.calls += 1

    if kind != "new":
        step()
    with Checkpointer(tmp_path, model, optimizer, scheduler, data=position) as checkpointer:
        if kind == "new":  # what is saved has had a step, what is loaded has had none
            before = copy.deepcopy((model.state_dict(), optimizer.state_dict(), scheduler.state_dict()))
            step()
        checkpointer.save(1)
        checkpointer.wait()
        if kind == "new":
            optimizer.load_state_dict(before[1])
            scheduler.load_state_dict(before[2])
            model.load_state_dict(before[0])
            position.batch = 0
        else:
            step()

        def everything() -> tuple[dict[str, torch.Tensor], Any]:
            plain = {key: value for key, value in scheduler.state_dict().items() if not key.startswith("_")}
            options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
            return state_of(model, optimizer), copy.deepcopy((plain, options, model.counter.calls, position.batch))

        tensors, rest = everything()
        last = model.blocks[-1]
        places: dict[str, tuple[Any, str]] = {
            "a hook before the model loads": (last, "_load_state_dict_pre_hooks"),
            "a hook after the model has loaded": (model, "_load_state_dict_post_hooks"),
            "a hook after the optimizer has loaded": (optimizer, "_optimizer_load_state_dict_post_hooks"),
            "a module's own loading": (last.attention, "_load_from_state_dict"),
            "an extra state": (model.counter, "set_extra_state"),
            "the model": (model, "load_state_dict"),
            "the scheduler": (scheduler, "load_state_dict"),
            "the optimizer": (optimizer, "load_state_dict"),
            "the data": (position, "load_state_dict"),
        }
        if kind != "torch":
            places = {place: places[place] for place in ("the optimizer", "a hook after the model has loaded")}
        for place, (owner, name) in places.items():
            with fails_once(owner, name), pytest.raises(CheckpointError, match=r"rank 1.*not today"):
                checkpointer.load()
            now, rest_now = everything()
            assert_same_tensors(now, tensors, place)
            where = rest[-1] if place != "the data" else 1  # last of all, and never asked to go back
            assert rest_now == (*rest[:-1], where), place
            position.batch = rest[-1]
        assert checkpointer.load().step == 1
        assert position.batch == 1


@contextlib.contextmanager
def fails_once(owner: Any, name: str) -> Iterator[None]:
    """On rank 1, what ``owner`` has at ``name`` raises when it has done its work: a method, or a hook among hooks."""
    failed = []

    def fail() -> None:
        if not failed and dist.get_rank() == 1:
            failed.append(True)
            raise ValueError("not today")

    real = getattr(owner, name)
    if isinstance(real, dict):
        hooks = {**real, -1: lambda *_: fail()}
        with patch.object(owner, name, type(real)(hooks)):
            yield
        return

    def replaced(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        fail()
        return result

    with patch.object(owner, name, replaced):
        yield


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Copies of this rank's part of both, and of the generator."""
    state = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    state["random"] = torch.get_rng_state()
    for number, each in optimizer.state_dict()["state"].items():
        state |= {f"{number}.{key}": value for key, value in each.items()}
    return {name: (value.to_local() if isinstance(value, DTensor) else value).clone() for name, value in state.items()}


class Unpicklable(torch.Tensor):
    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("this tensor stays where it is")


@on_ranks(2, timeout=30)
def test_a_buffer_that_differs_between_ranks_and_cannot_be_pickled_is_an_error_on_every_rank(tmp_path: Path) -> None:
    model = sharded()
    model.register_buffer("own", torch.full((2,), float(dist.get_rank())).as_subclass(Unpicklable))
    checkpointer = Checkpointer(tmp_path, model, asynchronous=False)
    with checkpointer, pytest.raises(CheckpointError, match=r"\[rank \d\].*this tensor stays"):
        checkpointer.save(1)


@on_ranks(2, timeout=30)
def test_an_argument_that_is_wrong_on_one_rank_is_an_error_on_every_rank(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"\[rank 1\] Checkpointer got keep_last"):
        Checkpointer(tmp_path, sharded(), keep_last=dist.get_rank() * -1 or 1)


# --- safetensors ------------------------------------------------------------------------------------------------------------------

SAVE = f"{CHECKPOINT}.safetensors_save"
SAVING_SAFETENSORS: list[Names] = [
    (f"{SAVE}.reshard", 1, 0, "memory"),
    (f"{SAVE}.model_tensors", 1, 0, "memory"),
    (f"{SAVE}.plan_files", 1, 0, "memory"),
    (f"{SAVE}.fingerprint", 1, 0, "memory"),
    (f"{SAVE}.has_config", 1, 0, "memory"),
    (f"{SAVE}.choose_names", 0, 0, "permission"),
    ("pathlib.Path.iterdir", 0, 0, "disk"),
    ("pathlib.Path.exists", 0, 0, "permission"),
    (f"{SAVE}.progress_bar", 0, 0, "memory"),
    (f"{SAVE}.NewFile", 0, 0, "permission"),
    (f"{CHECKPOINT}.gather_to_writers.keepers_of", 1, 0, "memory"),
    (f"{CHECKPOINT}.gather_to_writers.keepers_of", 0, 2, "memory"),
    (f"{CHECKPOINT}.gather_to_writers.BandStream._prepared", 1, 1, "memory"),
    (f"{CHECKPOINT}.gather_to_writers._Step.hand_out", 0, 0, "memory"),
    (f"{SAVE}.bytes_of", 0, 3, "memory"),
    (f"{CHECKPOINT}.folder_commit.NewFile.finish", 0, 0, "memory"),
    (f"{CHECKPOINT}.folder_commit.safe_open", 0, 0, "memory"),
    (f"{CHECKPOINT}.folder_commit._files_of_index", 0, 0, "memory"),
]


@on_ranks(2, timeout=30)
@pytest.mark.parametrize("names", SAVING_SAFETENSORS, ids=lambda names: f"{names[0].rpartition('.')[2]}{names[2]}")
@pytest.mark.parametrize("num_writers", [1, pytest.param(None, marks=pytest.mark.slow)])
def test_a_step_of_save_safetensors_that_fails_on_one_rank_is_an_error_on_every_rank(
    tmp_path: Path, names: Names, num_writers: int | None
) -> None:
    save_safetensors(sharded(seed=1), tmp_path)
    model = sharded()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    dist.barrier()
    with patch(f"{SAVE}.BUFFER_NBYTES", 2000):
        raises_on_every_rank(names, lambda: save_safetensors(model, tmp_path, 5000, num_writers=num_writers))
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
        dist.barrier()
        save_safetensors(model, tmp_path, 5000, num_writers=num_writers)
    other = sharded(seed=2)
    load_safetensors(other, tmp_path)
    for name, value in other.state_dict().items():
        assert torch.equal(value.to_local(), model.state_dict()[name].to_local())


LOAD = f"{CHECKPOINT}.safetensors_load"
LOADING_SAFETENSORS: list[Names] = [
    (f"{LOAD}.reshard", 1, 0, "memory"),
    (f"{LOAD}.model_tensors", 1, 0, "memory"),
    (f"{LOAD}.open_checkpoint", 1, 0, "permission"),
    (f"{LOAD}.give_storage", 0, 0, "memory"),
    (f"{LOAD}._read", 1, 0, "disk"),
    (f"{LOAD}._with_the_rest", 1, 0, "memory"),
    (f"{LOAD}.materialize", 1, 0, "memory"),
]


def fill_scratch(module: nn.Module) -> None:
    if hasattr(module, "scratch"):
        module.scratch.fill_(2.0)


@on_ranks(2, timeout=30)
@pytest.mark.parametrize("names", LOADING_SAFETENSORS, ids=lambda names: names[0].rpartition(".")[2])
def test_a_step_of_load_safetensors_that_fails_on_one_rank_is_an_error_on_every_rank(tmp_path: Path, names: Names) -> None:
    save_safetensors(fully_shard(mlp(), mesh=cpu_mesh()), tmp_path)
    with torch.device("meta"):
        model = mlp()
        model.register_buffer("scratch", torch.ones(3), persistent=False)
    fully_shard(model, mesh=cpu_mesh())
    raises_on_every_rank(names, lambda: load_safetensors(model, tmp_path, init_fn=fill_scratch))


@on_ranks(2, timeout=30)
def test_a_reader_that_fails_on_one_rank_alone_is_an_error_on_every_rank(tmp_path: Path) -> None:
    model = sharded()
    save_full_state(tmp_path / "full.pt", model)
    names = (f"{CHECKPOINT}.conversion.load_checkpoint.open_source", 1, 0, "memory")
    raises_on_every_rank(names, lambda: load_checkpoint(model, tmp_path / "full.pt"))


# --- the whole state ----------------------------------------------------------------------------------------------------------------

FULL = f"{CHECKPOINT}.full_state"
GATHERING: list[Names] = [
    (f"{FULL}.named_model_state", 1, 0, "memory"),
    (f"{FULL}.PlannedTensor", 1, 0, "memory"),
    (f"{CHECKPOINT}.gather_to_writers.keepers_of", 0, 2, "memory"),
    (f"{CHECKPOINT}.gather_to_writers.BandStream._prepared", 1, 1, "memory"),
    (f"{FULL}._Gathered._receive", 0, 1, "memory"),
    (f"{FULL}._Gathered.result", 0, 0, "memory"),
    (f"{FULL}.copy.deepcopy", 0, 0, "memory"),
    (f"{FULL}._write", 0, 0, "permission"),
]


@on_ranks(2, timeout=30)
@pytest.mark.parametrize("names", GATHERING, ids=lambda names: names[0].rpartition(".")[2])
def test_a_step_of_gathering_the_whole_state_that_fails_on_one_rank_is_an_error_on_every_rank(tmp_path: Path, names: Names) -> None:
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    with patch(f"{FULL}.BAND_NBYTES", 2000):
        raises_on_every_rank(names, lambda: save_full_state(tmp_path / "full.pt", model, optimizer))
        if names[0] not in (f"{FULL}._write", f"{FULL}.copy.deepcopy"):
            raises_on_every_rank(names, lambda: full_state_dict(model))
        state = full_optimizer_state_dict(model, optimizer)
    assert bool(state) is (dist.get_rank() == 0)
    assert not any(tmp_path.iterdir())


@on_ranks(4, timeout=30)
@pytest.mark.parametrize("shape", ["hsdp", "a stage of two", "a stage with two axes"])
def test_point_to_point_operations_come_after_a_collective_of_all_ranks_of_their_group(shape: str) -> None:
    """NCCL makes a group's communicator in its first collective: a batch of some ranks' operations would wait for the others."""
    if shape == "hsdp":
        mesh = cpu_mesh(2, 2)
    else:
        stages = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("stage", "replicate", "shard"))
        mesh = stages["shard"] if shape == "a stage of two" else stages["replicate", "shard"]
    model = fully_shard(mlp(), mesh=mesh)
    events: list[tuple[str, Any]] = []
    all_reduce, batch = dist.all_reduce, dist.batch_isend_irecv

    def reduced(tensor: Any, op: Any, group: Any) -> Any:
        events.append(("all", group))
        return all_reduce(tensor, op, group=group)

    def sent(operations: list[Any]) -> Any:
        events.append(("some", operations[0].group))
        return batch(operations)

    with patch.object(dist, "all_reduce", reduced), patch.object(dist, "batch_isend_irecv", sent):
        state = full_state_dict(model)
    assert bool(state) is (dist.get_rank() == 0)
    told = of_every_rank([(kind, dist.get_process_group_ranks(group)) for kind, group in events])
    sending = [(rank, at, ranks) for rank, each in enumerate(told) for at, (kind, ranks) in enumerate(each) if kind == "some"]
    assert bool(sending) is (shape != "a stage with two axes")  # there pairs of ranks talk by themselves
    for rank, at, ranks in sending:
        assert ("all", ranks) in told[rank][:at]
        assert all(("all", ranks) in told[other] for other in ranks)


# --- agreeing ---------------------------------------------------------------------------------------------------------------------


class OwnError(FSDPError):
    """Of the user's: what made it is not what it keeps."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)


@on_ranks(2, timeout=30)
def test_what_cannot_be_told_is_an_error_on_every_rank() -> None:
    with pytest.raises(CheckpointError, match="cannot send its state to the others"):
        agree(dist.group.WORLD, None, (lambda: None) if dist.get_rank() == 1 else None)
    with pytest.raises(FSDPError, match="seven"):
        agree(dist.group.WORLD, OwnError(7, "seven") if dist.get_rank() == 0 else None, None)


@on_ranks(2, timeout=30)
def test_a_group_whose_rank_is_gone_is_not_waited_for_again() -> None:
    group = dist.new_group([0, 1])
    gone = RuntimeError("Connection closed by peer [127.0.0.1]:4\nand a stack")
    for call in (lambda: agree(group, None, 1), lambda: agree_over([(group, torch.device("cpu"))], None)):
        with patch.object(dist, "all_gather_object", side_effect=gone), pytest.raises(LostRankError) as caught:
            call()
        assert isinstance(caught.value, CheckpointError)
        assert "a stack" not in str(caught.value)
    assert agreement_module.is_lost(group)
    assert not agreement_module.is_lost(dist.group.WORLD)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["Checkpointer", "save_safetensors", "full_state_dict"])
def test_a_rank_that_dies_in_a_save_is_a_checkpoint_error_on_the_others(tmp_path: Path, how: str) -> None:
    def save_and_die(rank: Rank) -> None:
        dist.init_process_group("gloo")
        model = sharded()
        checkpointer = Checkpointer(tmp_path / "run", model)
        checkpointer.save(1)
        checkpointer.wait()
        prepared = f"{CHECKPOINT}.gather_to_writers.BandStream._prepared"
        path, call = {
            "Checkpointer": (f"{CHECKPOINT}.training_state._plain_tensors", lambda: (checkpointer.save(2), checkpointer.wait())),
            "save_safetensors": (prepared, lambda: save_safetensors(model, tmp_path / "folder")),
            "full_state_dict": (prepared, lambda: full_state_dict(model)),
        }[how]
        rank.send(os.getpid())
        dies = patch(path, lambda *_: os.kill(os.getpid(), signal.SIGKILL)) if rank.rank == 1 else contextlib.nullcontext()
        with dies, pytest.raises(CheckpointError) as caught:
            call()
        rank.send(str(caught.value))
        os._exit(0)  # a thread of gloo may abort a process that ends by itself

    ends = run_ranks(2, save_and_die, limit_s=120, grace_s=60)
    assert [end.status for end in ends] == [0, -signal.SIGKILL]
    said = ends[0].sent[1]
    assert "a rank is gone, or cannot be reached" in said
    assert f"rank 1: its process ({ends[1].sent[0]} on " in said
