"""Answers DCP's questions about strided shards, for which torch's own arithmetic is wrong.

Where tensor parallelism and ``fully_shard`` cut one dim, DCP asks torch which rows a rank has. If these do not divide evenly over
both, the answer is wrong (torch 2.13): chunks overlap, which DCP may notice or may not. DCP asks a local tensor instead, if it has
``__create_write_items__`` and similar methods; they are here.

Worked example, 7 rows over 2 tensor-parallel ranks ([0, 4) and [4, 7)), each half over 3 data-parallel ranks: (dp 0, tp 1) has row 4.

Source: ``_Checkpointable`` in torch/distributed/checkpoint/_checkpointable.py, which DTensor hands on to its local tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from ..core import torch_compat as compat
from .boxes import Piece, pieces_of
from .dcp_metadata_check import chunk_of
from .model_tensors import cuts_of, is_strided


def tell_chunks(tensor: DTensor) -> DTensor:
    """``tensor``, whose local tensor says for itself what it has of the whole, if that is sharded in strides. Collective: no."""
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None or not any(map(is_strided, tensor.placements)):
        return tensor
    local = compat.local_tensor(tensor)
    told = _Chunks(local, torch.Size(tensor.shape), pieces_of(tensor.shape, cuts_of(tensor, coordinate)))
    for name, method in (("write_items", told.write_items), ("chunk_list", told.chunks)):
        setattr(local, f"__create_{name}__", method)
    local.__get_tensor_shard__ = told.shard  # type: ignore[attr-defined]
    return tensor


class _Chunks:
    """For one local tensor, which holds this object: a strong reference back would keep the tensor until a garbage collection."""

    def __init__(self, local: Tensor, shape: torch.Size, pieces: Sequence[Piece]) -> None:
        self._local = weakref.ref(local)
        self._shape = shape
        self._pieces = pieces

    @property
    def _tensor(self) -> Tensor:
        local = self._local()
        assert local is not None, "asked by its own local tensor"
        return local

    def chunks(self) -> list[ChunkStorageMetadata]:
        return [chunk_of(piece.box) for piece in self._pieces]

    def write_items(self, name: str, whole: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self._tensor)
        data = [TensorWriteData(each, properties, self._shape) for each in self.chunks()]
        return [WriteItem(MetadataIndex(name, each.chunk.offsets), WriteItemType.SHARD, tensor_data=each) for each in data]

    def shard(self, index: MetadataIndex) -> Tensor:
        piece = next(piece for piece in self._pieces if torch.Size(piece.box.start) == index.offset)
        return self._tensor[piece.local.slices]
