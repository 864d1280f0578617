"""Do ranks have the same model, and replicas the same values?

Each rank says what it has as plain data (``Facts``); all ranks then compare what all have said, and find the same. Values are compared
by a digest of their bytes.
"""

from __future__ import annotations

import zlib
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..inspect import local_of
from .finding import Finding
from .inspected import Inspected

_CHUNK_NBYTES = 64 << 20


@dataclass(frozen=True)
class Facts:
    """The facts of one rank.

    ranks:   those that train the same model as this one on other data
    shapes:  of each parameter and buffer by name: shape, dtype, whether it requires a gradient
    copies:  digests of what other ranks have as well, by its name and those ranks
    buffers: digests of buffers by name
    seed:    of this rank's CPU generator, if parameters have no values yet
    """

    ranks: tuple[int, ...]
    shapes: Mapping[str, str]
    copies: Mapping[tuple[str, tuple[int, ...]], int]
    buffers: Mapping[str, int]
    seed: int | None


def facts_of(inspected: Inspected) -> Facts:
    shapes = {param.fqn: f"{tuple(param.sharded.shape)} {param.dtype} {param.sharded.requires_grad}" for param in inspected.params}
    copies: dict[tuple[str, tuple[int, ...]], int] = {}
    for group in inspected.groups:
        if group.replicate_group is not None and group.replicate_group.size() > 1:
            ranks = tuple(dist.get_process_group_ranks(group.replicate_group))
            copies |= {(param.fqn, ranks): digest(param.local) for param in group.params if not param.local.is_meta}
    buffers = {name: digest(buffer) for name, buffer in inspected.buffers.items() if not buffer.is_meta}
    shapes |= {name: f"{tuple(buffer.shape)} {buffer.dtype}" for name, buffer in inspected.buffers.items()}
    needs_values = any(param.local.is_meta for param in inspected.params)
    return Facts(inspected.ranks, shapes, copies, buffers, torch.initial_seed() if needs_values else None)


def replica_findings(by_rank: Sequence[Facts]) -> Iterator[Finding]:
    """by_rank: what every rank said, the same on all."""
    shapes = [_among(facts.ranks, facts.shapes) for facts in by_rank]
    for names, ranks in _differing(shapes):
        yield Finding(
            "models-differ",
            "error",
            f"{len(names)} parameters or buffers differ between ranks in shape, dtype or requires_grad",
            "collectives of different sizes hang, or mix up parameters",
            "build the same model on every rank",
            names,
            ranks,
        )
    for names, ranks in _differing([facts.copies for facts in by_rank]):
        yield Finding(
            "replicas-differ",
            "error",
            f"{len(names)} parameters have different values on different replicas",
            "replicas that start with different values keep them apart: each adds the same gradients to its own",
            "give all ranks the same seed before the model is built, load one checkpoint, or let fsdp2.parallelize broadcast "
            "rank 0's values",
            names,
            ranks,
        )
    for names, ranks in _differing([_among(facts.ranks, facts.buffers) for facts in by_rank]):
        yield Finding(
            "buffers-differ",
            "warning",
            f"{len(names)} buffers have different values on different ranks",
            "ranks compute different functions; statistics of BatchNorm drift apart, and a checkpoint has those of one rank",
            "initialize buffers to the same values on all ranks, broadcast them, or use SyncBatchNorm",
            names,
            ranks,
        )
    seeds = {rank: facts.seed for rank, facts in enumerate(by_rank) if facts.seed is not None}
    if len(set(seeds.values())) > 1:
        usual = Counter(seeds.values()).most_common(1)[0][0]
        yield Finding(
            "seeds-differ",
            "error",
            "generators are seeded differently, and parameters have no values yet",
            "fsdp2.materialize draws whole parameters on every rank and keeps its slices: they would be slices of different models",
            "call torch.manual_seed(seed) with the same seed on all ranks before values are drawn, and with seed + rank afterwards, "
            "if dropout is to differ",
            ranks=tuple(rank for rank, seed in seeds.items() if seed != usual),
        )


def digest(tensor: Tensor) -> int:
    """CRC-32 of the bytes of a tensor, of a DTensor of its local one."""
    local = local_of(tensor)
    if type(local) is not Tensor:
        return 0  # a subclass with memory of its own, whose bytes we cannot read
    found = zlib.crc32(str((tuple(local.shape), local.dtype)).encode())
    flat = local.contiguous().view(-1).view(torch.uint8)
    for start in range(0, flat.numel(), _CHUNK_NBYTES):
        piece = flat[start : start + _CHUNK_NBYTES].cpu().clone()  # with a storage of its own
        found = zlib.crc32(bytes(piece.untyped_storage()), found)
    return found


_Said = Mapping[tuple[str, tuple[int, ...]], Hashable]
"""The facts of one rank, by a name and the ranks that must have the same."""


def _among(ranks: tuple[int, ...], said: Mapping[str, Hashable]) -> _Said:
    return {(name, ranks): value for name, value in said.items()}


def _differing(by_rank: Sequence[_Said]) -> Iterator[tuple[tuple[str, ...], tuple[int, ...]]]:
    """Names of what ranks say differently, or not at all, and which ranks are not of the most frequent opinion."""
    keys = dict.fromkeys(key for said in by_rank for key in said)
    found: defaultdict[tuple[int, ...], list[str]] = defaultdict(list)
    for key in keys:
        name, ranks = key
        opinions = {rank: by_rank[rank].get(key) for rank in ranks}
        usual = Counter(opinions.values()).most_common(1)[0][0]
        if others := tuple(rank for rank, value in opinions.items() if value != usual):
            found[others].append(name)
    for others, names in found.items():
        yield tuple(dict.fromkeys(names)), others
