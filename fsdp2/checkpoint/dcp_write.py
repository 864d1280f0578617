"""DCP's storage writer, as fast as the disk: each tensor is one write, and its CRC-32 is computed on the way.

The files are those of DCP's own writer, and all of DCP's tools read them; ``digests.json`` is added.
"""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ..durable import durable_file
from .dcp_read import METADATA
from .digests import FileDigest, directory_digest, write_digests
from .file_reading import bytes_of
from .torch_file import around, described


class LatePlanner(DefaultSavePlanner):
    """Asks for a part of the state when DCP's ranks already listen to each other: what fails in ``more`` all of them hear of."""

    def __init__(self, more: Callable[[], dict[str, Any]]) -> None:
        super().__init__()
        self._more = more

    def set_up_planner(self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner(state_dict | self._more(), storage_meta, is_coordinator)


class _Written(NamedTuple):
    info: Any
    directory: int | None


class DigestingWriter(FileSystemWriter):
    """Writes one file a rank. Memory: of tensors that are not contiguous, or not in host memory, a copy of one at a time."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name = f"{plan.storage_data.prefix}0.distcp"
        results: list[WriteResult] = []
        if plan.items:
            with durable_file(Path(self.path) / name) as file:
                at = 0
                for item in plan.items:
                    value: Any = planner.resolve_data(item)  # kept until it is written, because the parts are views of it
                    if item.type == WriteItemType.BYTE_IO:
                        parts = [value.getbuffer()]
                    else:
                        value = value.detach().cpu().contiguous()
                        parts = _parts(value)
                    nbytes = sum(map(len, parts))
                    directory = zlib.crc32(parts[-1]) if len(parts) > 1 else directory_digest(parts[0])
                    _write(file.fileno(), parts)
                    results.append(WriteResult(item.index, nbytes, _Written(_StorageInfo(name, at, nbytes), directory)))
                    at += nbytes
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the digests, on one rank, of the files of all ranks."""
        files: dict[str, FileDigest] = {}
        for result in (result for of_rank in results for result in of_rank):
            info, directory = result.storage_data
            digest = files.setdefault(info.relative_path, FileDigest(0))
            digest.nbytes = max(digest.nbytes, info.offset + info.length)
            if directory is not None:
                digest.directories[info.offset] = directory
        described = [[WriteResult(each.index, each.size_in_bytes, each.storage_data.info) for each in of_rank] for of_rank in results]
        super().finish(metadata, described)
        write_digests(Path(self.path), files, [METADATA])


def _parts(tensor: Tensor) -> list[memoryview]:
    """The tensor's file in three parts, the directory last; or in one."""
    description = described(tensor)
    if description is None:
        buffer = io.BytesIO()
        torch.save(tensor.clone(), buffer)  # a clone: the storage of the tensor may be larger
        return [buffer.getbuffer()]
    data = bytes_of(tensor)
    head, tail = around(description, data)
    return [memoryview(head), data, memoryview(tail)]


def _write(file: int, parts: Sequence[memoryview]) -> None:
    left = [part for part in parts if len(part)]
    while left:
        done = os.writev(file, left)
        while left and done >= len(left[0]):
            done -= len(left.pop(0))
        if left:
            left[0] = left[0][done:]
