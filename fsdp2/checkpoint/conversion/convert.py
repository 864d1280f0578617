"""``convert``: a checkpoint of one format into another, on one CPU process, without the job that saved it; ``fsdp2 convert``.

    fsdp2 convert runs/fsdp1/model_rank0.pt out --to dcp --optimizer runs/fsdp1/optim_rank0.pt

The target is written next to its final path and renamed when it is complete.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import math
import os
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...arguments import EXISTING, PATH, SWITCH, add_format, dtype_option, require, word_of
from ...durable import sync_folder
from ...errors import ArgumentError, CheckpointError
from ...printable import say, say_json
from ..failures import describe, failure
from ..file_reading import ByteReader
from ..lazy_tensors import State, converted, nbytes_of, tensors_of
from ..progress import progress_bar
from ..safetensors_load import scale_lost, scales_of
from ..safetensors_plan import check_dtype
from ..safetensors_plan import nbytes_of as size_of
from .open_source import open_source
from .source import FORMATS, Shapes, Source
from .targets import Stream, write_dcp, write_safetensors, write_torch
from .verify import verify as verify_checkpoint

_MAX_EXPANSION, _MAX_TIES, _FREE_NBYTES = 16, 64, 1 << 30
"""How much more than it reads conversion may write: for repeated elements; for ties; in any case."""

TARGETS = ("dcp", "safetensors", "torch")


@dataclass(frozen=True)
class Converted:
    """The result of ``convert``.

    source:      the format that was found
    num_tensors: of the model
    nbytes:      of tensors that were read
    optimizer:   whether the target has the optimizer's state
    left_out:    entries of the source that the target lacks
    """

    path: Path
    source: str
    num_tensors: int
    nbytes: int
    optimizer: bool
    left_out: tuple[str, ...]


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    to: str,
    format: str | None = None,
    optimizer: str | os.PathLike[str] | None = None,
    shapes: nn.Module | Shapes | str | os.PathLike[str] | None = None,
    with_optimizer: bool = True,
    model_key: str | None = None,
    optimizer_key: str | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    force: bool = False,
    verify: bool = False,
    progress: bool | None = None,
) -> Converted:
    """Write the checkpoint ``src`` to ``dst`` in another format, with whole tensors.

    to:             "dcp": a folder for ``dcp.load`` of ``{"model": ..., "optimizer": ...}``, whose parts are named as by
                    ``get_model_state_dict`` and ``get_optimizer_state_dict``; "torch": one file for ``torch.load``, the model's state
                    dict alone or ``{"model": ..., "optimizer": ...}``, the optimizer by name; "safetensors": a folder with the model,
                    which needs ``with_optimizer=False`` where the source has an optimizer
    format, optimizer, shapes, with_optimizer, model_key, optimizer_key: of ``src``, see ``open_source``
    dtype:          to convert the model's floating-point tensors to; the optimizer's stay
    max_shard_size: of a safetensors file
    force:          replace ``dst``, at the end; False: an error if it exists
    verify:         compare the source with its digests first, as ``fsdp2.checkpoint.verify`` does
    progress:       a bar; None: after a second, on a terminal, if rich is installed

    Memory:     besides descriptions of the tensors, bands of 64 MiB in all and three buffers of 16 MiB; a tensor that
                was saved with non-contiguous strides is read whole
    Collective: no
    Raises:     CheckpointError naming file and key; ArgumentError. ``dst`` is then unchanged, and nothing is left next
                to it

    Example:
        fsdp2.checkpoint.save_safetensors(model, folder / "model")
        if dist.get_rank() == 0:
            fsdp2.checkpoint.convert(folder / "model", folder / "model.pt", to="torch").nbytes
    """
    if to not in TARGETS:
        raise ArgumentError(f"to is {to!r}", expected=" or ".join(TARGETS), fix='to="dcp"')
    check_dtype(dtype)
    max_nbytes = size_of(max_shard_size)
    require("convert", PATH, src=src, dst=dst)
    require("convert", SWITCH, with_optimizer=with_optimizer, force=force, verify=verify)
    require("convert", SWITCH.or_none, progress=progress)
    target = Path(os.path.abspath(dst))
    _check_target(Path(src), target, to, force)
    for path in (src, optimizer) if verify else ():
        if path is not None:
            verify_checkpoint(path, format=format if path is src else None)
    source = open_source(
        src,
        format=format,
        optimizer=optimizer,
        shapes=shapes,
        with_optimizer=with_optimizer,
        model_key=model_key,
        optimizer_key=optimizer_key,
    )
    if to == "safetensors" and source.optimizer is not None:
        raise failure(
            f"{source.path} has an optimizer's state, and a safetensors folder holds none",
            expected="a format that stores optimizer state, or with_optimizer=False to drop it",
            fix="with_optimizer=False (--no-optimizer), or --to dcp or torch",
            file=source.path,
        )
    model = source.model
    _refuse_scaled(source, dtype)
    has_optimizer = source.optimizer is not None
    if to == "safetensors":
        model = dict(source.tensors)
        source.left_out += [f"model.{name}" for name in source.model if name not in model]
    state = {"model": model, "optimizer": source.optimizer} if has_optimizer else {"model": model}
    total = sum(nbytes_of(lazy) for _, lazy in tensors_of(state))
    _check_total(state, total)
    _check_room(_written_nbytes(state, to, dtype), target)
    with ByteReader() as reader, progress_bar("converting", total, progress) as advance, _new(target, force) as partial:
        stream = Stream(reader, advance, dtype)
        if to == "dcp":
            write_dcp(partial, state, model, stream)
        elif to == "torch":
            write_torch(partial, state if has_optimizer else model, model, stream)
            with partial.open("rb") as file:
                os.fsync(file.fileno())
        else:
            write_safetensors(partial, model, stream, max_nbytes)
    return Converted(target, source.format, len(tensors_of(model)), reader.bytes_read, has_optimizer, tuple(source.left_out))


def _refuse_scaled(source: Source, dtype: torch.dtype | None) -> None:
    if dtype is None:
        return
    tensors = source.tensors
    scales = scales_of(tensors)
    lost = {name: f"is scaled by {scale}" for name, lazy in tensors.items() if (scale := scale_lost(lazy, dtype, scales))}
    if lost:
        raise failure(
            f"{source.path} has {len(lost)} float8 tensors whose scales nothing here applies",
            problems=lost,
            expected="weights that may be converted to another dtype as they are",
            fix="convert without dtype, or have the library that made them dequantize them",
            file=source.path,
        )


def _check_target(src: Path, target: Path, to: str, force: bool) -> None:
    exists = target.exists() and not (target.is_dir() and to != "torch" and not any(target.iterdir()))
    source = Path(os.path.abspath(src))
    if target == source or target in source.parents or source in target.parents:
        raise failure(
            f"{target} is the source of the conversion, contains it, or lies in it",
            expected="a path outside of the source",
            fix="choose another",
            file=target,
        )
    if exists and not force:
        raise failure(
            f"{target} exists",
            expected="a path that does not exist yet",
            fix="choose another; force (--force) replaces it",
            file=target,
        )
    if exists and target.is_dir() is not (to != "torch"):
        kinds = ("a file", "a folder") if to == "torch" else ("a folder", "a file")
        raise failure(f"{target} is {kinds[1]}", expected=f"{kinds[0]}, which {to} is", fix="choose another", file=target)


def _check_total(state: State, total: int) -> None:
    """Check that ``total`` bytes are plausible for the source's files. Raises: CheckpointError"""
    tensors = tensors_of(state)
    distinct = {lazy: nbytes_of(lazy) for _, lazy in tensors}
    files = {stored.path for _, lazy in tensors for stored in lazy.stored()}
    nbytes = sum(path.stat().st_size for path in files)
    for found, factor in ((sum(distinct.values()), _MAX_EXPANSION), (total, _MAX_TIES)):
        if found > factor * nbytes + _FREE_NBYTES:
            largest = sorted(tensors, key=lambda item: -nbytes_of(item[1]))
            raise failure(
                f"the source's {len(files)} files have {nbytes} bytes, and their tensors would be {found}",
                items=[f"{name}: {lazy.shape}" for name, lazy in largest][:20],
                expected=f"at most {factor} times as much",
                fix="do not trust this checkpoint; or save its tensors without expanding them",
                file=next(iter(files), None),
            )


def _written_nbytes(state: State, to: str, dtype: torch.dtype | None) -> int:
    """Bytes of the target's tensors; only DCP writes a tied tensor once per name."""
    nbytes: dict[Any, int] = {}
    for name, lazy in tensors_of(state):
        itemsize = converted(lazy, dtype if name.startswith("model.") else None).itemsize
        nbytes[name if to == "dcp" else lazy] = math.prod(lazy.shape) * itemsize
    return sum(nbytes.values())


def _check_room(nbytes: int, target: Path) -> None:
    """Check that ``nbytes`` fit on the disk. Raises: CheckpointError"""
    place = next(each for each in target.parents if each.is_dir())
    free = shutil.disk_usage(place).free
    if nbytes > free:
        raise failure(
            f"{target} would have {nbytes} bytes, and {place} has {free} bytes free",
            expected="enough free space for the new checkpoint",
            fix="free some space, or choose another place",
            file=target,
        )


@contextlib.contextmanager
def _new(target: Path, force: bool) -> Iterator[Path]:
    """A path next to ``target``, renamed to it at the end; after an error it is removed and ``target`` unchanged."""
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    aside = partial.with_suffix(".replaced")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        if force and target.is_dir() and any(target.iterdir()):
            target.rename(aside)
            try:
                partial.rename(target)
            except OSError:
                aside.rename(target)
                raise
        else:
            partial.replace(target)
        sync_folder(target.parent)
    except CheckpointError:
        raise
    except Exception as error:
        raise failure(
            f"{target} cannot be written: {describe(error)}",
            expected="a folder that can be written to, and enough free space",
            fix="free some space, or choose another place; nothing was left behind",
            file=target,
        ) from error
    finally:
        for path in (partial, aside):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


# --- the command ------------------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``fsdp2 convert``."""
    parser.add_argument("src", type=word_of(EXISTING, str), help="folder or file; one rank's file of FSDP1 or FSDP2 stands for all")
    parser.add_argument("dst", help="what to write: a folder (dcp, safetensors) or a file (torch)")
    parser.add_argument("--to", required=True, choices=TARGETS)
    parser.add_argument("--from", dest="source_format", choices=FORMATS, help="the format of SRC, if its files suggest another")
    said = "where the optimizer's state is, if it is not in SRC"
    parser.add_argument("--optimizer", type=word_of(EXISTING, str), metavar="PATH", help=said)
    parser.add_argument("--model-key", metavar="KEY", help="where SRC has the model, for instance ema or nets.student")
    parser.add_argument("--optimizer-key", metavar="KEY", help="where SRC has the optimizer's state")
    parser.add_argument("--no-optimizer", dest="with_optimizer", action="store_false", help="leave the optimizer's state out")
    said = "JSON of the parameters' names and shapes, for FSDP1's local state dicts"
    parser.add_argument("--shapes", type=word_of(EXISTING, str), metavar="FILE", help=said)
    parser.add_argument("--dtype", **dtype_option("convert the model's floating-point tensors"))
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of a safetensors file (default: 5GB)")
    parser.add_argument("--force", action="store_true", help="replace DST if it exists")
    parser.add_argument("--verify", action="store_true", help="compare SRC with its digests first")
    add_format(parser)


def run(options: argparse.Namespace) -> int:
    """Convert, and print a summary."""
    own = {"format": options.source_format, "progress": False if options.quiet else None}
    done = convert(**{name: own[name] if name in own else getattr(options, name) for name in inspect.signature(convert).parameters})
    if options.format == "json":
        say_json(done)
        return 0
    what = f"{done.num_tensors} tensors" + (" and the optimizer" if done.optimizer else "")
    say(f"{done.path}: {what} from {done.source}, {done.nbytes / 1e6:.1f} MB read")
    for each in done.left_out:
        say(f"  left out: {each}")
    return 0
