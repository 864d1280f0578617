"""On stream-ordered backends (NCCL) ranks see afterwards whether all of them reduced the same groups in the same order.

To compare orders before a backward (``backward_agreement.py``), the host would have to wait for the device. Here every
reduction carries a tag (``core/group/order_tags.py``), which is copied to the host after the backward. The host does
not wait for the copy: the first forward or backward that finds it complete reads it. By then the optimizer may have
written parameters by wrong gradients, so the error says that they are wrong. In a graph capture ranks compare nothing,
as replays run no Python.

If a rank's last collective waits for one that another rank never starts, the rank learns nothing: it ends when the
other rank ends, or by NCCL's timeout.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import OrderError
from ..comm.streams import Event, Streams
from ..group.memory import GroupMemory
from ..group.order_tags import NUM_DIGITS, TAG_NUMEL, are_mixed, number_instead
from ..group.reduction import Reduction
from .peers import peers_on

MAX_UNREAD = 64
"""How many backwards may be unread. Each takes pinned memory. A host is never so many backwards ahead of its device, as
the device's queue is full before; if it were, the oldest one would be forgotten."""


class _Unread(NamedTuple):
    """Tags on their way to the host, of the groups (and their numbers) that this rank reduced in a backward.

    event: when it has passed, the tags are on the host
    """

    groups: list[tuple[GroupMemory, int]]
    tags: list[Tensor]
    streams: Streams
    event: Event


_unread: collections.deque[_Unread] = collections.deque(maxlen=MAX_UNREAD)


def read_later(reductions: Sequence[Reduction]) -> None:
    """Copy the tags of ``reductions``, which compute is ordered after, to the host, without waiting for the copy."""
    tagged = [
        (reduction.group, reduction.number, tag)
        for reduction in reductions
        if (tag := reduction.take_tag()) is not None
    ]
    if not tagged:
        return
    streams = tagged[0][0].streams
    if streams.is_capturing():
        return
    tagged.sort(key=lambda each: each[2].device.type == "cpu")  # last, those that are on the host already
    there = [tag for *_, tag in tagged if tag.device.type != "cpu"]
    tags = [tag for *_, tag in tagged if tag.device.type == "cpu"]
    if there:
        joined = torch.cat(there)
        host = torch.empty(joined.shape, dtype=joined.dtype, device="cpu", pin_memory=True)
        tags.insert(0, host.copy_(joined, non_blocking=True))
    _unread.append(
        _Unread([(group, number) for group, number, _ in tagged], tags, streams, streams.mark(streams.compute))
    )


def compare() -> None:
    """Raise OrderError if tags have arrived that show another group in the place of one that this rank reduced."""
    while _unread and _unread[0].streams.has_passed(_unread[0].event):
        read = _unread.popleft()
        tags = torch.cat(read.tags).view(-1, TAG_NUMEL)
        mixed = [
            (*group, tag) for group, tag, is_mixed in zip(read.groups, tags, are_mixed(tags), strict=True) if is_mixed
        ]
        if mixed:
            _unread.clear()
            raise _order_error(mixed)


def _order_error(mixed: Sequence[tuple[GroupMemory, int, Tensor]]) -> OrderError:
    items = []
    for group, number, tag in mixed:
        instead = number_instead(number, tag)
        numbered = peers_on(group.mesh).groups.items()
        others = sorted({_name_of(other) for each, other in numbered if each % (1 << NUM_DIGITS) == instead})
        items.append(f"{_name_of(group)}: another rank reduced {' or '.join(others) or 'something else'} in its place")
    return OrderError(
        f"ranks reduced different units together, {len(items)} times in one backward: gradients of that step are wrong",
        items=items,
        expected="forward to call the same units in the same order on every rank, "
        "and each loss to use what they return",
        fix="go back to the last checkpoint, because optimizers have written wrong values since, "
        "and call reset_iter_state(); make one group of the module around those that some ranks leave out "
        "(wrap=None: the whole model), or, if only the losses differ, "
        "call set_reduce_scatter_unused_params(True) on the root",
    )


def _name_of(group: GroupMemory) -> str:
    return group.fqn or "the root"
