"""``Checkpointer``: saves the state of a training loop, completely or not at all, and restores it.

    checkpointer = Checkpointer("runs/a", model, optimizer, scheduler, data=loader)
    step = checkpointer.load().step if checkpointer.latest() else 0
    while step < num_steps:
        ...; step += 1
        if step % 100 == 0:
            checkpointer.save(step)  # copies this rank's shards to host memory; a thread writes them while training goes on
    checkpointer.close()

The files are DCP's: ``dcp.load`` reads "model" and "optimizer", laid out as by
``torch.distributed.checkpoint.state_dict.get_state_dict``, with torch's FSDP2 or ours, on any number of ranks or in one process.
"""

from __future__ import annotations

import contextlib
import copy
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.optim import Optimizer

from ..arguments import COUNT, OPTIMIZER, PATH, PROCESS_GROUP, SWITCH, Kind, one_of, require
from ..core.comm.agreement import agree, another_over, default_group, is_lost
from ..core.iteration.module_state import named_units
from ..errors import ArgumentError, CheckpointError, FSDPError, LostRankError, OrderError, short
from ..hangs.joint_calls import joint
from ..inspect import at_disk
from ..optim import FlatOptimizer
from ..torch_names import torch_collectives
from ..user_warnings import warn
from .checkpoint_folder import CheckpointFolder, Store, step_of
from .checkpointer_load import Restored, files_to_read, read_state
from .dcp_read import pack, unpack
from .dcp_write import REPLACED, DigestingWriter, LatePlanner
from .digests import number_of, read_digests
from .failures import failure, from_rank_0, on_every_rank, tried
from .host_memory import HostMemory, Kept
from .model_tensors import checked_model
from .training_state import (
    Spare,
    host_copy,
    load_into,
    named_model_state,
    named_optimizer_state,
    names_in,
    numbered_optimizer_state,
    put_back,
    random_state,
    set_random_state,
    take_per_rank_values,
    value_digests,
)


@runtime_checkable
class Stateful(Protocol):
    """An object with a state to save: a scheduler, a data loader, ..."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


_STATEFUL = Kind(lambda value: isinstance(value, Stateful), "an object with state_dict and load_state_dict", "scheduler")
_DATA = Kind(
    lambda value: isinstance(value, (Stateful, MutableMapping)),
    "a dict, or an object with state_dict and load_state_dict",
    "loader",
)


_MEMORY = Kind(
    lambda value: SWITCH.holds(value) or (PATH.holds(value) and bool(os.fspath(value))), "True, False, or a folder in memory", "True"
)
_IF_BUSY = one_of("replace", "skip", "wait")
_CHECKPOINT = Kind(PATH.or_none.holds, "the name or the path of a checkpoint, or None for the latest", '"step_000100"')


@dataclass(frozen=True)
class Resumed:
    """The checkpoint that ``Checkpointer.load`` loaded.

    step:            as passed to ``save``
    path:            of the checkpoint
    world_size:      of the run that saved it
    random_restored: whether the random number generators continue; False if the number of ranks changed
    source:          "memory" for a checkpoint that ``keep`` made, else "disk"
    lost:            on rank 0, why the run before has ended, in which collective others noticed, and how many steps are lost; "" if it
                     could not leave that, or has not ended by an error within ``with Checkpointer(...)``, or there is no optimizer here
    """

    step: int
    path: Path
    world_size: int
    random_restored: bool
    source: str = "disk"
    lost: str = ""


class Checkpointer:
    """Saves and loads model, optimizer, scheduler, data position, random number generators and step. All methods are collective.

    folder:        for the checkpoints, visible to all ranks. Only one run may save there at a time: the first save
                   locks out other processes until ``close``, or until this object or its process ends
    data:          each rank's position in the data: an object with ``state_dict`` and ``load_state_dict``, or a dict
    keep_last:     how many checkpoints to keep; None for all. While one is being written there is one more
    asynchronous:  False: ``save`` returns when the checkpoint is complete
    if_busy:       what ``save`` and ``keep`` do while one is being written, the same on all ranks: "wait" for it; "replace" it, so that
                   it never becomes a checkpoint, unless it is complete by then; or "skip" the new one (the ranks agree on this
                   first). After ``wait`` nothing is being written
    memory:        where ``keep`` puts checkpoints that outlive the processes: True for shared memory of each host, until the process
                   that started this one ends (torchrun's agent) or this is closed; or a folder in memory, not that of the checkpoints
    process_group: the ranks that train this model; None: all

    On the same number of ranks, a resumed run continues bit for bit; buffers that differ between ranks (batch norm's
    running means) are restored on each. On another number of ranks, model, optimizer and scheduler continue and such
    buffers are rank 0's; the data position continues if it was equal on all ranks, else ``load`` raises an error;
    random number generators keep the program's seeds.

    Memory:     during ``load``, and from the first ``save`` or ``keep`` until ``close`` or the next ``load``, a copy of this
                rank's shards of model and optimizer in host memory; without ``asynchronous``, saving copies none that are
                there already. In ``memory`` one more of them, and with several hosts one of another rank's; twice that while
                ``keep`` replaces them
    Collective: the constructor and all methods, over ``process_group``; the constructor makes a gloo group
    Raises:     CheckpointError on every rank, with the earlier checkpoints unchanged

    Example:
        checkpointer = fsdp2.checkpoint.Checkpointer(folder, model, optimizer)
        checkpointer.save(step=100)
        checkpointer.wait()
        checkpointer.load().step  # 100
        checkpointer.close()
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        model: nn.Module,
        optimizer: Optimizer | None = None,
        scheduler: Stateful | None = None,
        *,
        data: Stateful | MutableMapping[str, Any] | None = None,
        keep_last: int | None = 2,
        asynchronous: bool = True,
        if_busy: Literal["wait", "replace", "skip"] = "wait",
        memory: bool | str | os.PathLike[str] = False,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        def check() -> tuple[nn.Module, Path]:
            require("Checkpointer", OPTIMIZER.or_none, optimizer=optimizer)
            require("Checkpointer", _STATEFUL.or_none, scheduler=scheduler)
            require("Checkpointer", _DATA.or_none, data=data)
            require("Checkpointer", COUNT.or_none, keep_last=keep_last)
            require("Checkpointer", SWITCH, asynchronous=asynchronous)
            require("Checkpointer", _IF_BUSY, if_busy=if_busy)
            require("Checkpointer", _MEMORY, memory=memory)
            if not isinstance(memory, bool) and os.path.realpath(memory) == os.path.realpath(folder):
                raise ArgumentError(
                    f"Checkpointer got memory={os.fspath(memory)!r}, which is the folder of the checkpoints on disk",
                    expected="another folder: keep() replaces what is in it",
                    fix="pass memory=True, or a folder in memory (tmpfs)",
                )
            return checked_model(model, "Checkpointer"), Path(folder)

        require("Checkpointer", PROCESS_GROUP.or_none, process_group=process_group)
        checked, problem = tried("cannot make a Checkpointer", check)
        given = agree(process_group or default_group(), problem, ("memory" if memory is not False else "no memory", if_busy))
        if len(set(given)) > 1:
            raise ArgumentError(
                "ranks gave Checkpointer different options",
                items=[f"rank {rank}: {has}, if_busy={busy!r}" for rank, (has, busy) in enumerate(given)],
                expected="memory= on all ranks or on none, and the same if_busy",
                fix="pass the same on all ranks: each keeps its own shards",
            )
        self._model, path = checked[0]
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._data = data
        self._asynchronous = asynchronous
        self._if_busy = if_busy
        self._is_replaced = threading.Event()  # the pending save is to end without a checkpoint
        self._process_group = process_group
        self._group = borrow_group(process_group)
        self._disk = Store(CheckpointFolder(path, keep_last), dist.get_rank(self._group), optimizer=optimizer)
        self._memory = HostMemory(memory, self._group) if memory is not False else None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fsdp2_checkpointer")
        self._pending: Future[None] | None = None
        self._spare = Spare()  # of the last asynchronous save; in use while that is pending
        self._closed = False
        # An object that the user forgets to close must not lock other runs out; the thread holds the object until a save is written.
        for store in self._stores:
            weakref.finalize(self, store.folder.unlock).atexit = False  # the lock ends with the process

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The ranks that save and load together; None: all."""
        return self._process_group

    @property
    def _stores(self) -> list[Store]:
        return [self._disk] if self._memory is None else [self._disk, self._memory]

    # --- saving ---

    @joint
    def save(self, step: int) -> bool:
        """Start saving the current state; training may continue when this returns. Returns whether it was not skipped (``if_busy``).

        step:   counts from 0; ``load`` takes it rather than what was kept in memory before, even of a later step
        Raises: CheckpointError, also from the earlier save
        """
        return self._save(step, self._disk)

    @joint
    def keep(self, step: int) -> bool:
        """Like ``save``, into the hosts' memory, where it replaces the checkpoint before it. It outlives processes, and with
        several hosts the loss of one; ``load`` takes it until a step is saved on disk. It does not read the disk.

        step:   that of the latest checkpoint on disk, or a later one
        Raises: CheckpointError, also from an earlier save; OrderError without ``memory=``
        """
        if self._memory is None:
            raise OrderError(
                "this Checkpointer has no memory to keep checkpoints in",
                expected="memory=True or a folder",
                fix="pass memory=True to Checkpointer",
            )
        return self._save(step, self._memory)

    def _save(self, step: int, store: Store) -> bool:
        if self._if_busy == "skip" and self._pending is not None:
            over = self._process_group or default_group()  # the thread communicates over ours
            if not all(agree(over, None, self._pending.done())):
                return False
        self._end_pending()
        if self._memory is not None and self._disk.number is None:
            self._latest()
        store.number = max(*(each.number or 0 for each in self._stores), time.time_ns() - 1) + 1  # a clock may go back
        with torch.inference_mode(False), torch.no_grad():
            state = self._state_of_every_rank(step, store)
        if not store.is_locked:
            what = f"cannot save step {step} in {store.folder.path}"
            try:
                on_every_rank(self._group, what, lambda: store.folder.lock() if store.leads else None)
            except FSDPError:
                self._disk.end.at = None  # another run saves there, and its end is the one to tell
                raise
            store.is_locked = True
            if store.leads:
                store.end.forget()
        self._disk.end.at = step
        self._pending = self._thread.submit(at_disk()(self._write), state, step, store)
        del state  # the thread drops it when it is written
        if not self._asynchronous:
            self.wait()
        return True

    def _end_pending(self) -> None:
        """Wait for the save that is under way, if any, or replace it. Its ranks tell each other, so that none has it if one has not."""
        if self._if_busy == "replace":
            self._is_replaced.set()
        try:
            self.wait()
        except CheckpointError as error:
            if not self._is_replaced.is_set() or REPLACED not in str(error):
                raise
        finally:
            self._is_replaced.clear()

    def wait(self) -> None:
        """Wait until the current save, if any, is complete. Raises: CheckpointError if it failed."""
        if self._closed:
            raise OrderError("this Checkpointer is closed", expected="to be called before close()", fix="create another Checkpointer")
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _state_of_every_rank(self, step: int, store: Store) -> dict[str, Any]:
        """This rank's state. Collective: yes. Raises: the error of a rank, or ArgumentError if ranks pass different steps"""
        state, problem = tried(f"cannot save step {step} in {store.folder.path}", lambda: self._state(step, store))
        steps = agree(self._group, problem, step)
        if len(set(steps)) > 1:
            raise ArgumentError(
                f"ranks gave Checkpointer.{'save' if store is self._disk else 'keep'} different steps",
                items=[f"rank {rank}: {each}" for rank, each in enumerate(steps)],
                expected="one step on all ranks",
                fix="count steps the same way on all ranks: end the epoch on all of them when one runs out of data",
            )
        return state[0]

    def _state(self, step: int, store: Store) -> dict[str, Any]:
        if type(step) is not int or step < 0:
            headline = f"Checkpointer.{'save' if store is self._disk else 'keep'} got step {step!r}"[:300]
            raise ArgumentError(headline, expected="an int, 0 or more", fix="pass int(step)")
        rank, size = dist.get_rank(self._group), dist.get_world_size(self._group)
        latest = self._disk.latest if rank == 0 and store is not self._disk else None  # not looked for: the disk may be failing
        if latest is not None and step_of(latest) > step:
            raise ArgumentError(
                f"Checkpointer.keep got step {step}, and {latest} is of a later step, which load takes if memory is lost",
                expected=f"step {step_of(latest)} or a later one",
                fix=f"to go on from an earlier step, save({step}) first: it is the latest then",
            )
        parts = {"model": named_model_state(self._model)}
        if self._optimizer is not None:
            parts["optimizer"] = named_optimizer_state(self._model, self._optimizer)
        state: dict[str, Any] = {"step": step, "world_size": size}
        flats = [group.flat for _, unit in named_units(self._model) for group in unit.groups if group.flat is not None]
        if isinstance(self._optimizer, FlatOptimizer):
            flats += [each for each in self._optimizer.state_tensors() if type(each) is torch.Tensor and each.is_contiguous()]
        state |= host_copy(parts, shared=not self._asynchronous, spare=self._spare, flats=flats)
        if self._scheduler is not None:
            state["scheduler"] = pack(self._scheduler.state_dict(), "the scheduler")
        if self._data is not None:
            position = self._data.state_dict() if isinstance(self._data, Stateful) else dict(self._data)
            state["data"] = {f"rank_{rank}": pack(position, "the data position")}
        state["random"] = {f"rank_{rank}": pack(random_state(self._device_type), "random state")}
        return state

    @torch.no_grad()  # of a thread's own; with it a DTensor's local tensor would cost a node of autograd each time
    def _write(self, state: dict[str, Any], step: int, store: Store) -> None:
        """Write ``state``, in the thread. No other thread uses our process group meanwhile."""
        folder, what = store.folder, f"cannot save step {step} in {store.folder.path}"
        parts: dict[str, Any] = {name: state[name] for name in ("model", "optimizer") if name in state}
        rank = dist.get_rank(self._group)
        told: list[tuple[str, dict[Any, bytes]]] = []  # of each rank; leaders name the folder

        def own_state() -> dict[str, Any]:
            own = take_per_rank_values(parts, [digests for _, digests in told], rank)
            return {"own": {f"rank_{rank}": pack(own, "what differs between the ranks")}} if own else {}

        def prepare() -> tuple[tuple[str, dict[Any, bytes]], DigestingWriter, LatePlanner]:
            name = folder.begin().name if store.leads else ""
            for event in self._spare.copied:
                event.synchronize()
            writer = DigestingWriter(folder.path, store.number or 0, self._is_replaced.is_set)
            return (name, value_digests(parts)), writer, LatePlanner(own_state)

        def write(writer: DigestingWriter, planner: LatePlanner) -> None:
            into = folder.path / told[store.leader][0]  # a rank may see the folder at another path
            dcp_save(state, checkpoint_id=into, storage_writer=writer, planner=planner, process_group=self._group)
            store.complete(into, writer.metadata)  # DCP knows that every rank has written all of it
            if store.leads:
                store.latest = folder.commit(step)

        unpruned: FSDPError | None = None
        try:
            prepared, problem = tried(what, prepare)
            told += agree(self._group, problem, prepared[0][0] if prepared else ("", {}))
            _, problem = tried(what, lambda: write(*prepared[0][1:]))
            if store.num_hosts > 1:  # none removes the checkpoint before until every one has this one
                agree(self._group, problem, None)
            if problem is None:
                unremoved = f"step {step} is saved, but other steps cannot be removed"
                _, unpruned = tried(unremoved, lambda: folder.prune() if store.leads else None)
            unpruned = next(filter(None, agree(self._group, problem, unpruned)), None)
        except LostRankError:
            raise  # the next save removes what there is
        except FSDPError:
            discarded = f"{what}, nor remove what there is of it"
            on_every_rank(self._group, discarded, lambda: folder.discard() if store.leads else None)
            raise
        if unpruned is not None:
            raise unpruned

    # --- loading ---

    def latest(self) -> Path | None:
        """The latest complete checkpoint; None if there is none. Waits for the current save."""
        self.wait()
        kept, found = self._latest()
        if kept is not None and self._memory is not None:
            return self._memory.folder.path / kept.names.get(self._memory.leader, f"step_{kept.step:06d}")
        return None if found is None else self._disk.folder.path / found.name  # a rank may see the folder at another path

    def _latest(self) -> tuple[Kept | None, Path | None]:
        """The checkpoint in memory, if it was made after that on disk, and the one on disk, as rank 0 sees it."""

        def on_disk() -> tuple[Path | None, int]:
            found = self._disk.folder.latest()
            return found, number_of(read_digests(found)) if found is not None and self._memory is not None else 0

        found, number = from_rank_0(self._group, f"cannot read {self._disk.folder.path}", on_disk)
        self._disk.latest, self._disk.number = found, number
        try:
            kept = self._memory.newest() if self._memory is not None else None
        except LostRankError:
            raise
        except CheckpointError as error:
            self._warn_of("what was kept in memory", error, found)
            return None, found
        if kept is not None and self._memory is not None:
            self._memory.number = kept.number
        if kept is None or kept.number < number:
            return None, found
        if kept.missing:
            lost = f"{short(kept.missing)} were on hosts that are lost, and so were their copies"
            self._warn_of(f"step {kept.step}, which was kept in memory,", lost, found)
        return None if kept.missing else kept, found

    def _warn_of(self, what: str, why: object, found: Path | None) -> None:
        source = found or "the start: there is no checkpoint on disk"
        ranks = dist.get_process_group_ranks(self._group)
        text = f"{what} cannot be loaded: {' '.join(str(why).partition('expected:')[0].split())}. Going on from {source}"
        warn(text, ranks=ranks, once=text)

    @joint
    def load(self, checkpoint: str | os.PathLike[str] | None = None, *, verify: bool = False) -> Resumed:
        """Resume from a checkpoint. Every rank reads and checks its whole state before it changes anything.

        checkpoint: a folder, or the name of one in ours; None: the latest, in memory if that was made after the one on disk. If
                    what is in memory is damaged, the one on disk, with a warning
        verify:     compare the files with their digests first; the ranks share the work
        Memory:     copies of this rank's shards in host memory: model and optimizer, then the model twice
        Raises:     CheckpointError on every rank, with everything but the data position unchanged
        """
        self.wait()
        self._spare.clear()
        kept, found = self._latest() if checkpoint is None else (None, None)
        with torch.inference_mode(False), torch.no_grad(), at_disk():
            try:
                path, restored = self._read(checkpoint, verify, kept)
            except CheckpointError as error:
                if self._memory is not None and self._memory.leads:
                    with contextlib.suppress(OSError):  # the next keep removes what was fetched of it
                        self._memory.folder.discard()
                if kept is None or found is None or isinstance(error, LostRankError):
                    raise
                self._warn_of(f"step {kept.step}, which was kept in memory,", error, found)
                kept = None
                path, restored = self._read(checkpoint, verify, kept)
            what, undo = f"cannot go on from {path}", list[Callable[[], object]]()
            try:
                on_every_rank(self._group, what, lambda: self._restore(restored, undo))
                lost = on_every_rank(self._group, what, lambda: self._restore_data(restored))  # last: a data loader cannot go back
            except FSDPError:
                for each in reversed(undo):
                    with contextlib.suppress(Exception):  # the first error is the one to report
                        each()
                raise
        self._disk.end.at = restored.step
        source = "disk" if kept is None else "memory"
        return Resumed(restored.step, path, restored.world_size, restored.random is not None, source, lost)

    def _read(self, checkpoint: str | os.PathLike[str] | None, verify: bool, kept: Kept | None) -> tuple[Path, Restored]:
        given = {name for name, each in (("scheduler", self._scheduler), ("data", self._data)) if each is not None}
        state = self._group, self._model, self._optimizer, given
        if kept is not None and self._memory is not None:
            path = self._memory.fetch(kept, lambda path: files_to_read(path, *state))
            return path, read_state(path, *state, self._memory.share if verify else None, has_all_files=False)
        folder = self._disk.folder.path
        path = folder / from_rank_0(self._group, f"cannot read {folder}", lambda: self._find(checkpoint))
        share = dist.get_rank(self._group), dist.get_world_size(self._group)
        return path, read_state(path, *state, share if verify else None)

    def _find(self, checkpoint: str | os.PathLike[str] | None) -> Path:
        """The folder of ``checkpoint``, by its name in our folder or by its path; None: the latest."""
        require("Checkpointer.load", _CHECKPOINT, checkpoint=checkpoint)
        folder = self._disk.folder
        if checkpoint is not None:
            for found in (Path(checkpoint), Path(os.path.abspath(checkpoint))):
                if (folder.path / found).exists():
                    return found
            raise failure(
                f"there is no checkpoint {os.fspath(checkpoint)!r}: {folder.path / checkpoint} is no folder",
                expected=f"a path, or one of {short([each.name for each in folder.checkpoints()])} in {folder.path}",
                fix="name one of these, or none for the latest",
                file=folder.path / checkpoint,
            )
        latest = folder.latest()
        if latest is None:
            raise failure(
                f"there is no checkpoint in {folder.path}",
                expected="a checkpoint that a save completed",
                fix="start from scratch, or name another folder",
                file=folder.path,
            )
        return Path(latest.name)

    @property
    def _device_type(self) -> str:
        """The device on which the model computes."""
        devices = (getattr(param, "device_mesh", param.device) for param in self._model.parameters())
        kinds = [each.type if isinstance(each, torch.device) else each.device_type for each in devices]
        return next((kind for kind in kinds if kind != "cpu"), "cpu")

    def _restore(self, restored: Restored, undo: list[Callable[[], object]]) -> None:
        """Restore everything but the data position. undo: gets a function that reverts each change, before the change"""
        model, optimizer, scheduler = self._model, self._optimizer, self._scheduler
        if restored.random is not None:
            undo.append(partial(set_random_state, random_state(self._device_type), self._device_type))
            set_random_state(unpack(restored.random), self._device_type)
        if scheduler is not None:
            undo.append(partial(scheduler.load_state_dict, copy.deepcopy(scheduler.state_dict())))
            scheduler.load_state_dict(unpack(restored.scheduler))
        if optimizer is not None:
            undo.append(partial(optimizer.load_state_dict, optimizer.state_dict()))
            optimizer.load_state_dict(numbered_optimizer_state(restored.optimizer, names_in(model, optimizer)))
            restored.optimizer = {}  # its memory is that of the copy
        undo.append(partial(put_back, model, host_copy(named_model_state(model))))
        load_into(model, restored.model)

    def _restore_data(self, restored: Restored) -> str:
        """Return how the run before has ended: other ranks, which may leave notes of their own, still wait for this one."""
        if isinstance(self._data, Stateful):
            self._data.load_state_dict(unpack(restored.data))
        elif self._data is not None:
            self._data.clear()
            self._data.update(unpack(restored.data))
        if restored.random is not None:  # again: the user's objects may have drawn random numbers
            set_random_state(unpack(restored.random), self._device_type)
        return self._disk.end.take(restored.step) if self._disk.leads and self._optimizer is not None else ""

    # --- the end ---

    def close(self) -> None:
        """Wait for the current save and end this checkpointer: other methods then raise an error. May be called twice.

        What ``memory=True`` keeps is freed, except while an error is on its way out.
        """
        if self._closed:
            return
        try:
            self.wait()
        finally:
            self._closed = True
            self._thread.shutdown()
            self._spare.clear()
            self._disk.end.close()
            give_back(self._group, self._process_group)
            for store in self._stores:
                store.folder.unlock()
            if self._memory is not None and sys.exc_info()[0] is None:
                self._memory.remove()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        if error is not None and not self._closed:
            self._disk.end.leave(error)
        self.close()


# --- the process group of the writing thread, which communicates while training does ----------------------------------------------


_Key = tuple[tuple[int, ...], timedelta | None]

_free: WeakKeyDictionary[dist.ProcessGroup, dict[_Key, list[dist.ProcessGroup]]] = WeakKeyDictionary()
"""Unused groups, by the default group (which ends with ``destroy_process_group()``), and by ranks and time-out.

They are reused rather than destroyed: a process group costs five files and three threads until the process ends."""


def borrow_group(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """A group over the ranks of ``process_group`` (None: all), with its time-out, for the caller alone. Collective: yes, over these."""
    if not dist.is_initialized():
        raise OrderError(
            "there is no process group",
            expected="torch.distributed to be initialized, even for a single rank",
            fix="call torch.distributed.init_process_group first",
        )
    free = _free_for(process_group)
    return free.pop() if free else another_over(_over(process_group), "checkpointer", backend="gloo")


def give_back(group: dist.ProcessGroup, process_group: dist.ProcessGroup | None) -> None:
    """Return it, on all its ranks, with no operation under way. A group with a lost rank is not reused."""
    if dist.is_initialized() and not is_lost(group):
        _free_for(process_group).append(group)


def _free_for(process_group: dist.ProcessGroup | None) -> list[dist.ProcessGroup]:
    over = _over(process_group)
    key = tuple(dist.get_process_group_ranks(over)), torch_collectives.timeout_of_group(over)
    return _free.setdefault(_over(None), {}).setdefault(key, [])


def _over(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    over = process_group or dist.group.WORLD
    assert over is not None
    return over
