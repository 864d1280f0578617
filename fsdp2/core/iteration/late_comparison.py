"""On stream-ordered backends (NCCL) ranks see afterwards whether all of them reduced the same groups in the same order.

To compare orders before a backward (``backward_agreement.py``), the host would have to wait for the device. Here every
reduction carries a tag: the group's number in binary digits, then the digits' complements. If all ranks send the same
tag, each digit or its complement stays exactly zero in the sum, also after averaging, scaling, rounding and further
sums. If two ranks send different tags, some digit and its complement are both not zero, and these digits tell one
number from the other. (If a divisor made the sum too small for its dtype, both are zero, which tells nothing.)

Worked example, 3 digits; rank 0 reduces group 5, rank 1 group 4, averaged

    tag of 5   1 0 1   0 1 0      tag of 4   1 0 0   0 1 1      mean   1 0 .5   0 1 .5: they differ in the last digit

Tags are copied to the host after the backward. The host does not wait for the copy: the first forward or backward that
finds it complete reads it. By then the optimizer may have written parameters by wrong gradients, so the error says that
they are wrong. In a graph capture ranks compare nothing, as replays run no Python. If a rank's last collective waits
for one that another rank never starts, the rank learns nothing: it ends when the other rank ends, or by NCCL's timeout.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import OrderError
from ..comm.agreement import groups_of
from ..comm.streams import Event, Streams
from ..group.handing_out import HandedOut
from ..group.param_group import ParamGroup
from ..group.reduce_plan import NUM_DIGITS, TAG_NUMEL
from ..plan.mesh import DataParallelMesh

EXPECTED = "forward to call the same units in the same order on every rank, and each loss to use what they return"
FIX = (
    "make one group of the module around those that some ranks leave out (wrap=None: the whole model), "
    "or, if only the losses differ, call set_reduce_scatter_unused_params(True) on the root"
)


class Peers:
    """Ranks that gather and reduce together, and the numbers by which all of them know a root or a group.

    Ranks may make different models, and run them in different orders as long as nothing is reduced. All of them take
    part in the first backward of a root that they compare, or that reduces: it numbers the root, and its groups.

    roots:      the ``Agreement`` of each living root whose backwards are compared before they communicate
    num_roots:  how many roots were in a backward that these ranks have compared; equal on all of them
    groups:     living groups by their numbers
    num_groups: how many groups have had a number; equal on all of these ranks
    """

    def __init__(self) -> None:
        self.roots: weakref.WeakSet[Any] = weakref.WeakSet()
        self.num_roots = 0
        self.groups: weakref.WeakValueDictionary[int, ParamGroup] = weakref.WeakValueDictionary()
        self.num_groups = 0

    def number(self, group: ParamGroup) -> None:
        """Give ``group`` the next number, if it has none."""
        if self.groups.get(group.gradients.number) is not group:
            group.gradients.set_number(self.num_groups)
            self.groups[self.num_groups] = group
            self.num_groups += 1


_Key = tuple[str, ...]
_peers: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[_Key, Peers]] = weakref.WeakKeyDictionary()
"""By process group: one rank may outlive a group whose name comes again, and the others have not."""

_alone: dict[_Key, Peers] = {}


def peers_on(mesh: DataParallelMesh) -> Peers:
    """The ranks over both axes of ``mesh``.

    Numbers are of one type of device: in one backward autograd runs the host's nodes and an accelerator's on different
    threads, so ranks may come to the two in different orders.
    """
    groups = groups_of(mesh)
    by_key = _peers.setdefault(groups[-1], {}) if groups else _alone
    key = (mesh.device_type, *(process_group.group_name for process_group in groups))
    if key not in by_key:
        by_key[key] = Peers()
    return by_key[key]


# --- tags on their way to the host ------------------------------------------------------------------------------------

MAX_UNREAD = 64
"""How many backwards may be unread. Each takes pinned memory. A host is never so many backwards ahead of its device, as
the device's queue is full before; if it were, the oldest one would be forgotten."""


class _Unread(NamedTuple):
    """Tags of the groups (names, meshes, numbers) that this rank reduced in a backward; on the host after ``event``."""

    groups: list[tuple[str, DataParallelMesh, int]]
    tags: list[Tensor]
    streams: Streams
    event: Event


_unread: collections.deque[_Unread] = collections.deque(maxlen=MAX_UNREAD)


def read_later(reduced: Sequence[HandedOut]) -> None:
    """Copy the tags of ``reduced``, which compute is ordered after, to the host, without waiting for the copy."""
    tagged = [(each.job, each.tag) for each in reduced if each.tag is not None]
    if not tagged or (streams := tagged[0][0].plan.group.streams).is_capturing():
        return
    tagged.sort(key=lambda each: each[1].device.type == "cpu")  # tags that are on the host already come last
    there = [tag for *_, tag in tagged if tag.device.type != "cpu"]
    tags = [tag for *_, tag in tagged if tag.device.type == "cpu"]
    if there:
        joined = torch.cat(there)
        host = torch.empty(joined.shape, dtype=joined.dtype, device="cpu", pin_memory=True)
        tags.insert(0, host.copy_(joined, non_blocking=True))
    groups = [(job.fqn or "the root", job.plan.group.mesh, job.plan.number or 0) for job, _ in tagged]
    _unread.append(_Unread(groups, tags, streams, streams.mark(streams.compute)))


def compare() -> None:
    """Raise OrderError if tags have arrived that show another group in the place of one that this rank reduced."""
    while _unread and _unread[0].streams.has_passed(_unread[0].event):
        read = _unread.popleft()
        tags = torch.cat(read.tags).view(-1, TAG_NUMEL)
        found = zip(read.groups, tags, are_mixed(tags), strict=True)
        items = [_item(*group, tag) for group, tag, is_mixed in found if is_mixed]
        if items:
            _unread.clear()
            raise OrderError(
                f"ranks reduced different units together, {len(items)} times in one backward: "
                "gradients of that step are wrong",
                items=items,
                expected=EXPECTED,
                fix="go back to the last checkpoint, because optimizers have written wrong values since, "
                f"and call reset_iter_state(); {FIX}",
            )


def _item(name: str, mesh: DataParallelMesh, number: int, tag: Tensor) -> str:
    instead = number_instead(number, tag)
    numbered = peers_on(mesh).groups.items()
    others = sorted({other.fqn or "the root" for each, other in numbered if each % (1 << NUM_DIGITS) == instead})
    return f"{name}: another rank reduced {' or '.join(others) or 'something else'} in its place"


def are_mixed(tags: Tensor) -> list[bool]:
    """For each reduced tag, whether ranks reduced different groups. tags: (n, TAG_NUMEL), on the host"""
    is_there = tags.abs() > 0  # False for NaN
    mixed: list[bool] = (is_there[:, :NUM_DIGITS] & is_there[:, NUM_DIGITS:]).any(1).tolist()
    return mixed


def number_instead(number: int, tag: Tensor) -> int | None:
    """The group that other ranks reduced instead of ``number``, modulo 1024; None if there seem to be several.

    tag: (TAG_NUMEL,), on the host, mixed
    """
    instead = number % (1 << NUM_DIGITS)
    shares = []
    for place, (digit, complement) in enumerate(tag.double().abs().view(2, NUM_DIGITS).T.tolist()):
        if digit > 0 and complement > 0:
            instead ^= 1 << (NUM_DIGITS - 1 - place)
            shares.append(min(digit, complement) / (digit + complement))
    # As many ranks have sent each digit of one other group.
    return instead if max(shares) < 1.25 * min(shares) else None
