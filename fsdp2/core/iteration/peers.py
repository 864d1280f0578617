"""Ranks that gather and reduce together, and the numbers by which all of them know a model, a root or a group.

Ranks may make different models, and run them in different orders as long as nothing is reduced. All of them take part
in the first backward of a root that they compare, or that reduces: it numbers the root, and the root's groups.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch.distributed as dist

from ..group.param_group import ParamGroup
from ..plan.mesh import DataParallelMesh


class Peers:
    """What this rank knows of the models that it trains with the same ranks.

    roots:      the ``Agreement`` of each living root whose backwards are compared before they communicate
    num_roots:  how many roots were in a backward that these ranks have compared; equal on all of them
    groups:     living groups by their numbers
    num_groups: how many groups have had a number; equal on all of these ranks
    num_models: how many models they have begun to run; first forwards gather, so these ranks run them in one order
    """

    def __init__(self) -> None:
        self.roots: weakref.WeakSet[Any] = weakref.WeakSet()
        self.num_roots = 0
        self.groups: weakref.WeakValueDictionary[int, ParamGroup] = weakref.WeakValueDictionary()
        self.num_groups = 0
        self.num_models = 0

    def number(self, group: ParamGroup) -> None:
        """Give ``group`` the next number, unless it has one."""
        if self.groups.get(group.gradients.number) is not group:
            group.gradients.set_number(self.num_groups)
            self.groups[self.num_groups] = group
            self.num_groups += 1


_peers: dict[tuple[str, ...], Peers] = {}


def peers_on(mesh: DataParallelMesh) -> Peers:
    """Those over both axes of ``mesh``.

    Numbers are of one type of device: in one backward autograd runs the host's nodes and an accelerator's on different
    threads, so ranks may come to the two in different orders.
    """
    return peers_in(mesh.shard_group, mesh.replicate_group, device_type=mesh.device_type)


def peers_in(*process_groups: dist.ProcessGroup | None, device_type: str = "") -> Peers:
    names = [group.group_name for group in process_groups if group is not None and group.size() > 1]
    return _peers.setdefault((device_type, *names), Peers())
