"""``save_safetensors``: streams shards into the files that Hugging Face's libraries open.

A file's header depends on names, shapes and dtypes alone, so it is written first; ranks then send their tensors in
bands to the writer.
"""

from __future__ import annotations

import contextlib
import copy
import os
import tempfile
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..arguments import COUNT, PROCESS_GROUP, SWITCH, require
from ..core.comm.agreement import agree, agree_over, default_group
from ..core.plan.mesh import device_of
from ..errors import ArgumentError, FSDPError, LostRankError, MaterializationError
from ..fsdp_module import FSDPModule
from ..hangs.joint_calls import joint
from ..sharded_class import original_class
from ..torch_names import torch_modules
from .checkpoint_folder import LOCK, locked
from .failures import failure, on_every_rank, tried
from .file_reading import bytes_of
from .folder_commit import Names, NewFile, choose_names, commit, make_folder
from .gather_to_writers import BandStream, Ready
from .key_map import KeyMap
from .model_tensors import WRAPPERS, ModelTensor, checked_model, meshes_of, model_tensors, reshard, still_on_meta
from .progress import progress_bar
from .safetensors_plan import (
    Band,
    PlannedFile,
    check_dtype,
    fingerprint,
    nbytes_of,
    plan_files,
    writers_of,
    written_tensors,
)

BUFFER_NBYTES = 64 << 20
"""A rank holds at most twice this while it saves."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that ``save_safetensors`` wrote; equal on all ranks.

    files:  names in the folder
    nbytes: of the tensors
    """

    folder: Path
    files: tuple[str, ...]
    nbytes: int


@joint
def save_safetensors(
    model: nn.Module,
    folder: str | os.PathLike[str],
    max_shard_size: int | str = "5GB",
    *,
    num_writers: int | None = 1,
    dtype: torch.dtype | None = None,
    key_map: KeyMap | None = None,
    config: bool | None = None,
    process_group: dist.ProcessGroup | None = None,
    progress: bool | None = None,
) -> SavedCheckpoint:
    """Write parameters and persistent buffers, whole, in Hugging Face's layout; ``load_safetensors`` and ``from_pretrained`` read it.

    folder:         created if needed; all writing ranks must see it, and other jobs are locked out meanwhile. One
                    rename replaces an earlier checkpoint in it; files other than ``config``'s are left alone
    max_shard_size: of a file, in bytes or like "5GB"; a larger tensor gets its own file. A single file has no index
    num_writers:    1: rank 0 writes all files; N: N ranks write different files at the same time; None: all ranks
    dtype:          to convert floating-point tensors to
    key_map:        from the checkpoint's names to the model's, as for ``load_safetensors``; saving undoes it, so that
                    fused or renamed weights get the checkpoint's names back. Bare patterns and functions have no
                    inverse: use ``Rename``, which has both directions; ``Concat`` needs ``sizes``. Keys that it ignores
                    are not written
    config:         write the ``config.json`` (and ``generation_config.json``) of a transformers model, which ``from_pretrained`` needs
                    next to the weights; None: if ``model.config`` can write one
    process_group:  the ranks that hold the model; None: all
    progress:       a bar on rank 0; None: after a second, on a terminal, if rich is installed

    Tied parameters are written once, under their first name. Non-persistent buffers and ``get_extra_state`` are not
    written.

    Memory:     besides the model, 2 * 64 MiB on any rank, even for the largest parameter: tensors are sent and written
                in bands
    Collective: yes, over ``process_group``
    Raises:     on all ranks: CheckpointError with ``file`` and ``key`` (disk full, folder not writable, different
                models on different ranks), MaterializationError, ParameterError. The folder is then unchanged

    Example:
        saved = fsdp2.checkpoint.save_safetensors(model, folder, dtype=torch.bfloat16)
        saved.files  # ("model.safetensors",)
    """

    def arguments() -> tuple[Path, int]:
        checked_model(model, "save_safetensors")
        require("save_safetensors", COUNT.or_none, num_writers=num_writers)
        check_dtype(dtype)
        require("save_safetensors", SWITCH.or_none, config=config, progress=progress)
        return Path(folder), nbytes_of(max_shard_size)

    require("save_safetensors", PROCESS_GROUP.or_none, process_group=process_group)
    group = process_group or default_group()
    path, max_nbytes = on_every_rank(group, "cannot save the model", arguments)
    world_size = 1 if group is None else group.size()
    what = f"cannot save the model to {path}"

    def plan() -> list[PlannedFile]:
        reshard(model)
        tensors = [each for each in model_tensors(model) if each.persistent]
        refuse_meta(tensors)
        _refuse_other_ranks(tensors, group)
        return plan_files(written_tensors(tensors, key_map), max_nbytes, writers_of(world_size, num_writers), dtype)

    with contextlib.ExitStack() as lock, contextlib.ExitStack() as stack, torch.inference_mode(False), torch.no_grad():
        files, names, configs = _agreed_plan(plan, what, model, path, config, group, lock)
        rank = 0 if group is None else group.rank()
        writer = _Writer([(file, names.temporary(path, index)) for index, file in enumerate(files) if file.writer == rank])
        stack.callback(writer.remove)
        _, problem = tried(what, lambda: _write(files, writer, group, _ready(model, group), progress, what))
        _agree_or_remove(group, problem, writer)
        if rank == 0:
            _, problem = tried(what, lambda: commit(path, names, files, configs))
            if problem is None:
                lock.close()  # before other ranks return, who would find its file in the folder
        _agree_or_remove(group, problem, writer)
    return SavedCheckpoint(path, names.final, sum(tensor.nbytes for file in files for tensor in file.tensors))


def _ready(model: nn.Module, group: dist.ProcessGroup | None) -> Ready:
    """Agreement over ``group``, on each device from which its ranks send; without DTensors none.

    See Note: first collective of a group.
    """
    devices = dict.fromkeys(device_of(mesh) for mesh in meshes_of(model))
    axes = [(group, device) for device in devices] if group is not None else []
    return lambda problem: agree_over(axes, problem)


def _agreed_plan(
    plan: Callable[[], list[PlannedFile]],
    what: str,
    model: nn.Module,
    folder: Path,
    config: bool | None,
    group: dist.ProcessGroup | None,
    lock: contextlib.ExitStack,
) -> tuple[list[PlannedFile], Names, dict[str, bytes]]:
    """The plan, if all ranks made the same one; the names that rank 0 chose; on rank 0 the files of ``config``.

    lock:       on rank 0 it holds the folder's lock
    Collective: yes
    """

    def prepare() -> tuple[list[PlannedFile], dict[str, bytes], str, Names | None]:
        files = plan()
        wanted = config if config is not None else has_config(model)
        dtypes = {tensor.dtype for file in files for tensor in file.tensors}
        configs = config_files(model, dtypes) if wanted else {}
        names = None
        if group is None or group.rank() == 0:
            lock.enter_context(locked(folder / LOCK))
            make_folder(folder)
            names = choose_names(folder, len(files), uuid.uuid4().hex[:8])
        return files, configs, fingerprint(files), names

    prepared, problem = tried(what, prepare)
    said = agree(group, problem, prepared[0][2:] if prepared else ("", None))
    differing = [rank for rank, (print_, _) in enumerate(said) if print_ != said[0][0]]
    if differing:
        raise failure(
            f"ranks {differing} have a model with names, shapes or dtypes different from rank 0's, or got different arguments",
            expected="the same model and arguments on every rank",
            fix="pass process_group if only some ranks have this model; nothing was written",
        )
    files, configs, *_ = prepared[0]
    chosen = said[0][1]
    assert chosen is not None
    return files, chosen, configs


def refuse_meta(tensors: list[ModelTensor]) -> None:
    on_meta = list(still_on_meta(tensors))
    if on_meta:
        raise MaterializationError(
            f"{len(on_meta)} parameters or buffers are on the meta device and have no values",
            items=on_meta,
            expected="values to save or to send",
            fix="call fsdp2.materialize(model), or load a checkpoint first",
        )


def _refuse_other_ranks(tensors: list[ModelTensor], group: dist.ProcessGroup | None) -> None:
    """Shards on ranks outside of ``group`` cannot be gathered."""
    present = set(dist.get_process_group_ranks(group)) if group is not None else {0}
    outside = [
        f"{each.name}: {each.tensor.device_mesh}"
        for each in tensors
        if isinstance(each.tensor, DTensor) and not present.issuperset(each.tensor.device_mesh.mesh.flatten().tolist())
    ]
    if outside:
        raise ArgumentError(
            f"{len(outside)} parameters or buffers are sharded over ranks that are not in process_group",
            items=outside,
            expected=f"meshes within ranks {sorted(present)}",
            fix="pass the process group of all ranks that hold the model; nothing was written",
        )


def _agree_or_remove(group: dist.ProcessGroup | None, problem: FSDPError | None, writer: _Writer) -> None:
    """Continue together, or raise together after every rank has removed its files. Collective: yes."""
    try:
        agree(group, problem, None)
    except FSDPError as error:
        writer.remove()
        if not isinstance(error, LostRankError):
            agree(group, None, None)
        raise


def _write(
    files: list[PlannedFile], writer: _Writer, group: dist.ProcessGroup | None, ready: Ready, progress: bool | None, what: str
) -> None:
    """Write this rank's files under their temporary names. Collective: yes, over the ranks of ``ready``.

    Raises: on every rank, the error of one; an error after the last band on its own rank alone, for the caller to share
    """
    files_of: dict[int, list[PlannedFile]] = {}  # by the rank that writes them
    for file in files:
        rank = file.writer if group is None else dist.get_global_rank(group, file.writer)
        files_of.setdefault(rank, []).append(file)
    band_nbytes = BUFFER_NBYTES // len(files_of)
    bands = {rank: (band for file in own for band in file.bands(band_nbytes)) for rank, own in sorted(files_of.items())}
    with contextlib.ExitStack() as stack:

        def begin() -> Callable[[int], None]:
            advance = stack.enter_context(progress_bar("saving", writer.nbytes, progress))
            writer.open_next()
            return advance

        begun, problem = tried(what, begin)

        def receive(band: Band, value: Tensor) -> None:
            writer.write(band, value)
            begun[0](value.nbytes)

        BandStream(group, ready, band_nbytes, what=what).run(bands, receive, problem)
        writer.finish()


class _Writer:
    """Writes bands into this rank's files, one file after another. Raises: CheckpointError naming file and key"""

    def __init__(self, files: list[tuple[PlannedFile, Path]]) -> None:
        self.nbytes = sum(tensor.nbytes for file, _ in files for tensor in file.tensors)
        self._todo = files
        self._files: list[NewFile] = []
        self._left = 0  # bytes of the open file's tensors to come

    def write(self, band: Band, value: Tensor) -> None:
        self._files[-1].write(bytes_of(value), band.tensor.key)
        self._left -= value.nbytes
        self.open_next()

    def open_next(self) -> None:
        """Finish the file that is complete, and begin the next one with bytes to come."""
        while self._left == 0 and self._todo:
            file, path = self._todo.pop(0)
            self.finish()
            self._files.append(NewFile(path, file.header))
            self._left = sum(tensor.nbytes for tensor in file.tensors)

    def finish(self) -> None:
        """Have the last file on the disk."""
        if self._files:
            self._files[-1].finish()

    def remove(self) -> None:
        """Remove the files that still have temporary names."""
        for file in self._files:
            file.remove()


# --- transformers' config ---------------------------------------------------------------------------------------------------------


def has_config(model: nn.Module) -> bool:
    return hasattr(getattr(model, "config", None), "save_pretrained")


def config_files(model: nn.Module, dtypes: Collection[torch.dtype]) -> dict[str, bytes]:
    """Names and contents of the JSON files that transformers needs next to the weights. Collective: no.

    dtypes: of the weights; if all floating-point ones are equal, the config names it
    Raises: ArgumentError if the model has no config; CheckpointError if the config cannot be saved
    """
    if not has_config(model):
        raise ArgumentError(
            f"config=True, but {type(model).__name__} has no config with save_pretrained",
            expected="a model of transformers",
            fix="leave config out, and write what the reader needs yourself",
        )
    found: dict[str, bytes] = {}
    for name in ("config", "generation_config"):
        each: Any = copy.deepcopy(getattr(model, name, None))
        if not hasattr(each, "save_pretrained"):
            continue
        if name == "config":
            _describe(each, model, dtypes)
        with tempfile.TemporaryDirectory() as folder:
            try:
                each.save_pretrained(folder)
            except Exception as error:
                raise failure(
                    f"model.{name} cannot be saved: {type(error).__name__}: {error}",
                    expected="values that its save_pretrained accepts",
                    fix="fix it, or pass config=False; nothing was written",
                ) from error
            found |= {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.suffix == ".json"}
    return found


def _describe(config: Any, model: nn.Module, dtypes: Collection[torch.dtype]) -> None:
    """As transformers' own save_pretrained: the user's class, not the sharded one, and the dtype of the weights."""
    config.architectures = [_class_of(model).__name__]
    floating = [dtype for dtype in dtypes if dtype.is_floating_point]
    if len(floating) == 1:
        config.dtype = floating[0]


def _class_of(model: nn.Module) -> type:
    wrapped = next((module for name, module in model.named_children() if name in WRAPPERS), None)
    if wrapped is not None:
        return _class_of(wrapped)
    if isinstance(model, FSDPModule):
        return original_class(type(model))
    if isinstance(model, torch_modules.TorchFSDPModule):
        return type(model).__bases__[1]
    return type(model)
