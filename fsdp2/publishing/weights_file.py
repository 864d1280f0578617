"""Published weights in a safetensors file, in shared memory (``/dev/shm``) or on disk, and its reader, which needs no process group.

Each version is a file of its own, renamed over the one before when it is complete. So a reader sees all of one version, and what it has
mapped stays as it is while the next one comes; the memory of a version is free when nobody has it any more.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import uuid
import zlib
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..arguments import NATURAL, SWITCH, checked_path, require
from ..checkpoint.failures import failure
from ..checkpoint.file_reading import bytes_of
from ..checkpoint.lazy_tensors import DTYPES
from ..checkpoint.safetensors_files import build_header, digests_of, parse_header, with_digests
from .consumer import Stream

_VERSION = "fsdp2_version"


class Snapshot(NamedTuple):
    """One version of published weights. tensors: by name, on the host, in memory that all readers share until one writes to it"""

    version: int
    tensors: dict[str, Tensor]


def to_file(path: str | os.PathLike[str]) -> Callable[[Stream], None]:
    """A sink that writes a safetensors file, each version in place of the one before. It is not forced to disk.

    path:   in an existing folder; in ``/dev/shm``, what readers on this machine map is the only copy
    Memory: besides the file, a tensor on the host

    Example:
        fsdp2.publish(model).send(fsdp2.publishing.to_file(folder / "weights") if dist.get_rank() == 0 else None)
        dist.barrier()
        fsdp2.publishing.read_file(folder / "weights").version  # 1
    """
    target = checked_path("to_file", "path", path)

    def write(stream: Stream) -> None:
        if not target.parent.is_dir():
            raise failure(
                f"{target.parent} is not a folder",
                expected="an existing folder for published weights",
                fix="make the folder before the weights are sent",
                file=target,
            )
        metas = sorted(stream.metadata(), key=lambda meta: -meta.dtype.itemsize)
        header = build_header(metas, {"format": "pt", _VERSION: str(stream.version)})
        sizes = [math.prod(meta.shape) * meta.dtype.itemsize for meta in metas]
        starts = dict(zip((meta.name for meta in metas), itertools.accumulate(sizes, initial=len(header)), strict=False))
        crcs: dict[str, int] = {}
        partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
        try:
            with partial.open("xb", buffering=0) as file:
                file.truncate(len(header) + sum(sizes))
                for name, tensor in stream:
                    on_host = tensor.cpu().contiguous()
                    data, at = bytes_of(on_host), starts[name]
                    crcs[name] = zlib.crc32(data)
                    while data:
                        written = os.pwrite(file.fileno(), data, at)
                        data, at = data[written:], at + written
                file.write(with_digests(header, crcs))
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)

    return write


def read_file(path: str | os.PathLike[str], known: int | None = None, *, verify: bool = True) -> Snapshot | None:
    """What ``to_file`` has written last; None if there is none yet, or if it is version ``known``. Needs no process group.

    known:  the version that the reader has
    verify: compare the bytes with their checksums
    Raises: CheckpointError naming the damaged tensor

    Example:
        fsdp2.publishing.read_file(folder / "nobody has published yet")  # None
    """
    source = checked_path("read_file", "path", path)
    require("read_file", NATURAL.or_none, known=known)
    require("read_file", SWITCH, verify=verify)
    try:
        with source.open("rb") as file:
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except FileNotFoundError:
        return None
    start = memory[: 8 + int.from_bytes(memory[:8], "little")]
    header = parse_header(source, start[8:], len(memory))
    version = int(header.metadata.get(_VERSION, 0))
    if version == known:
        return None
    digests = digests_of(source, start, list(header.entries)) if verify else None
    whole = memoryview(memory)
    if digests is not None:
        found = {key: zlib.crc32(whole[entry.offset : entry.offset + entry.nbytes]) for key, entry in header.entries.items()}
        damaged = [key for key in found if found[key] != digests.tensors[key]]
        if damaged or digests.header != digests.found:
            raise failure(
                f"{source} has {len(damaged)} tensors whose bytes are not those that were published, or a damaged header",
                items=damaged,
                expected="the checksums in its header",
                fix="publish again",
                file=source,
            )
    tensors = {}
    for key, entry in header.entries.items():
        dtype = DTYPES[entry.dtype]
        count = entry.nbytes // dtype.itemsize
        flat = (
            torch.frombuffer(memory, dtype=dtype, count=count, offset=entry.offset)
            if count
            else torch.empty(0, dtype=dtype, device="cpu")
        )
        tensors[key] = flat.view(entry.shape)
    return Snapshot(version, tensors)
