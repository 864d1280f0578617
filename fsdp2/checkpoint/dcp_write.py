"""DCP's storage writer, as fast as the disk: each tensor is one write, and its CRC-32 is computed on the way.

The files are those of DCP's own writer, and all of DCP's tools read them; ``digests.json`` is added.

Note: strided shards. If tensor parallelism and ``fully_shard`` cut the same dim, DCP asks torch for a rank's rows. If
these do not divide evenly over both, the answer is wrong (torch 2.13): chunks overlap, and DCP may not notice. So
``LatePlanner`` says which elements a rank has. Of 7 rows over 2 tensor-parallel ranks ([0, 4) and [4, 7)), each half
over 3 data-parallel ranks, (dp 0, tp 1) has row 4.
"""

from __future__ import annotations

import dataclasses
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
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from ..durable import durable_file
from ..torch_names import torch_dtensors
from .dcp_read import METADATA, chunk_of
from .digests import FileDigest, directory_digest, write_digests
from .failures import failure
from .file_reading import bytes_of
from .model_tensors import is_strided, own_pieces
from .shard_geometry import Box
from .torch_file import around, described


def shard_item(name: str, box: Box, properties: TensorProperties, size: torch.Size) -> WriteItem:
    """The plan to write ``box`` of the tensor ``name`` of ``size``."""
    chunk = chunk_of(box)
    return WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=TensorWriteData(chunk, properties, size))


class LatePlanner(DefaultSavePlanner):
    """Knows strided shards, and asks for a part of the state late, when DCP's ranks listen to each other.

    more: that part; if it fails on one rank, DCP tells all ranks
    """

    def __init__(self, more: Callable[[], dict[str, Any]]) -> None:
        super().__init__()
        self._more = more

    def set_up_planner(self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner(state_dict | self._more(), storage_meta, is_coordinator)
        self._strided = {name: value for name, value in self.state_dict.items() if _is_strided(value)}

    def create_local_plan(self) -> SavePlan:
        """See Note: strided shards."""
        plan = super().create_local_plan()
        items = [item for item in plan.items if item.index.fqn not in self._strided]
        for name, value in self._strided.items():
            properties = TensorProperties.create_from_tensor(torch_dtensors.local_tensor(value))
            items += [shard_item(name, piece.box, properties, value.size()) for piece in own_pieces(value)]
        self.plan = dataclasses.replace(plan, items=items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        value = self._strided.get(write_item.index.fqn)
        if value is None:
            return super().resolve_data(write_item)
        piece = next(each for each in own_pieces(value) if each.box.start == tuple(write_item.index.offset or ()))
        return torch_dtensors.local_tensor(value)[piece.local.slices]


def _is_strided(value: Any) -> bool:
    """Whether it is a DTensor with strided shards, one of them on this rank."""
    return isinstance(value, DTensor) and any(map(is_strided, value.placements)) and value.device_mesh.get_coordinate() is not None


REPLACED = "a later checkpoint has replaced this one, which was not yet complete"


class _Written(NamedTuple):
    info: Any
    directory: int | None


class DigestingWriter(FileSystemWriter):
    """Writes one file a rank, and ``number`` among the digests; raises a CheckpointError once it ``is_replaced``.

    Memory: of tensors that are not contiguous, or not in host memory, a copy of one at a time
    """

    def __init__(self, path: Path, number: int = 0, is_replaced: Callable[[], bool] = bool) -> None:
        super().__init__(path)
        self._number = number
        self._is_replaced = is_replaced
        self.metadata: Metadata | None = None

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name = f"{plan.storage_data.prefix}0.distcp"
        results: list[WriteResult] = []
        if plan.items:
            with durable_file(Path(self.path) / name) as file:
                at = 0
                for item in plan.items:
                    if self._is_replaced():
                        raise failure(REPLACED, expected="that one to be complete", fix="load the latest checkpoint")
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
        """Write what describes the files of all ranks, on one rank, which keeps it as ``metadata``."""
        files: dict[str, FileDigest] = {}
        for result in (result for of_rank in results for result in of_rank):
            info, directory = result.storage_data
            digest = files.setdefault(info.relative_path, FileDigest(0))
            digest.nbytes = max(digest.nbytes, info.offset + info.length)
            if directory is not None:
                digest.directories[info.offset] = directory
        described = [[WriteResult(each.index, each.size_in_bytes, each.storage_data.info) for each in of_rank] for of_rank in results]
        super().finish(metadata, described)
        self.metadata = metadata
        write_digests(Path(self.path), files, [METADATA], self._number)


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
