"""Write a DCP folder from lazy tensors, a band at a time, with DCP's own writer.

DCP plans from descriptions of tensors and asks for values when it writes them: it gets tensors on the meta device for the former,
and bands, each a shard of its tensor, for the latter.
"""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from ..boxes import Box
from ..dcp_metadata_check import box_of, chunk_of
from ..lazy import LazyTensor
from ..named_state import State, map_values
from ..readers.lazy_pieces import dtype_of
from .dcp_writer import DigestingWriter
from .streaming import Stream, bands_of, converted

_COPIES = 4
"""So many bands are in memory at a time: the one before, the one being written, and copies that torch.save makes."""


class _Planner(DefaultSavePlanner):
    def __init__(self, lazy_of: dict[int, LazyTensor], stream: Stream) -> None:
        super().__init__()
        self._lazy_of = lazy_of  # by id of the tensor on the meta device
        self._stream = stream

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = [part for item in plan.items for part in self._in_bands(item)]
        self.plan = dataclasses.replace(plan, items=items)
        return self.plan

    def _in_bands(self, item: WriteItem) -> list[WriteItem]:
        data = item.tensor_data
        if data is None or not data.size.numel():
            return [item]
        bands = list(bands_of(tuple(data.size), data.properties.dtype, _COPIES))
        return [item] if len(bands) == 1 else [_band(item.index.fqn, data, box) for box in bands]

    def resolve_data(self, write_item: WriteItem) -> Any:
        described = self.state_dict[write_item.index.fqn]
        lazy = self._lazy_of.get(id(described))
        if lazy is None or write_item.tensor_data is None:
            return super().resolve_data(write_item)
        return self._stream.band(lazy, box_of(write_item.tensor_data.chunk), described.dtype)


def _band(fqn: str, data: TensorWriteData, box: Box) -> WriteItem:
    chunk = chunk_of(box)
    return WriteItem(
        MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=TensorWriteData(chunk, data.properties, data.size)
    )


def write_dcp(folder: Path, state: State, model: State, stream: Stream) -> None:
    """Write ``state`` into a new ``folder``, in one file and ``.metadata``.

    model:  whose tensors are converted to ``stream.dtype``
    Memory: BAND_NBYTES, four bands of a quarter of it
    """
    lazy_of: dict[int, LazyTensor] = {}
    kept: list[torch.Tensor] = []  # ids stay theirs while they live
    of_model = {id(value) for value in model.values()}

    def describe(value: Any) -> Any:
        if not isinstance(value, LazyTensor):
            return value
        dtype = converted(value, stream.dtype) if id(value) in of_model else dtype_of(value)
        described = torch.empty(value.shape, dtype=dtype, device="meta")
        kept.append(described)
        lazy_of[id(described)] = value
        return described

    writer = DigestingWriter(folder)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")  # which is how it is meant
        try:
            dcp_save(map_values(describe, state), storage_writer=writer, planner=_Planner(lazy_of, stream), no_dist=True)
        except CheckpointException as wrapped:  # not an Exception; the error inside names file and key
            raise next(iter(wrapped.failures.values()))[0] from wrapped
