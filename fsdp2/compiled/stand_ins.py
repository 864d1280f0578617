"""A parameter group as the compiler sees it: stand-ins for its parameters, and a place where its gradient arrives.

A *stand-in* has the shape, strides and dtype of an unsharded parameter and no memory: modules show it while the compiler traces
them, and the captured graph names it as an input, which the rewriting then replaces by what is computed from the flat shard. The
*landing* is a leaf of the shape of the group's reduce-scatter output, without memory either: as an input of the graph it is what
autograd delivers the reduced gradient to; from there the sharded parameters get views of it, as in eager mode.

Worked example, 2 ranks, parameters (5, 4) and (4,), fp32: stand-ins (5, 4) and (4,) over storages of 0 bytes; the landing has
96 elements: the slots [0, 12) and [32, 34) of this rank's gradients, and two flags at 64.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..core.group.handing_out import give
from ..core.group.param import ShardedParam
from ..core.group.param_group import ParamGroup
from ..core.group.reduce_plan import ReducePlan
from ..core.group.shown_parameters import show


class Landing:
    """Where the reduced gradient of one group arrives, for one choice of trainable parameters.

    plan: what lies where in the gradient; leaf: (plan.layout.shard_numel,) in storage dtype, of one element expanded
    used: parameters of the plan that a forward since the last arrival used, by index
    """

    def __init__(self, group: ParamGroup, plan: ReducePlan) -> None:
        self._group = group
        self.plan = plan
        one = torch.zeros(1, dtype=group.plan.dtype, device=group.device)
        self.leaf = one.expand(plan.layout.shard_numel).detach().requires_grad_()
        self.leaf.register_post_accumulate_grad_hook(self._arrive)  # type: ignore[no-untyped-call]
        self.used: set[int] = set()

    @torch.no_grad()
    def _arrive(self, leaf: Tensor) -> None:
        """Give the sharded parameters their gradients. Waits for the device only if parameters were used on other ranks alone."""
        reduced, leaf.grad = leaf.grad, None
        assert reduced is not None
        views, slot = self.plan.views, self.plan.flags_slot
        if len(self.used) < len(views):
            assert slot is not None
            flags = reduced[slot.offset : slot.offset + slot.numel].tolist()
            views = [view for view, flag in zip(views, flags, strict=True) if flag != 0]
        self.used.clear()
        give(reduced, views, self._group.plan.dtype, self._group.wait)


class Face:
    """One group as the compiler sees it; valid while the group's plan stays as it is.

    stand_ins: one for each parameter of the group, in its order
    trainable: which of them are, as the stand-ins and the landing have it
    """

    def __init__(self, group: ParamGroup) -> None:
        self.group = group
        self._plan = _plan_of(group)
        self.stand_ins = [new_stand_in(param, group) for param in group.params]
        self._landings: dict[tuple[bool, ...], Landing | None] = {}
        self.trainable: tuple[bool, ...] = ()
        self.landing: Landing | None = None
        self.follow_trainable()

    def is_current(self) -> bool:
        """Whether the group is laid out as when this was made."""
        return self._plan == _plan_of(self.group)

    def follow_trainable(self) -> None:
        """Let the stand-ins, and the landing, follow ``requires_grad`` of the parameters."""
        trainable = tuple(param.sharded.requires_grad for param in self.group.params)
        if trainable == self.trainable:
            return
        self.trainable = trainable
        for stand_in, wanted in zip(self.stand_ins, trainable, strict=True):
            stand_in.requires_grad_(wanted)
        if trainable not in self._landings:
            params = [param for param, wanted in zip(self.group.params, trainable, strict=True) if wanted]
            self._landings[trainable] = Landing(self.group, ReducePlan(self.group.plan, params, compact=False)) if params else None
        self.landing = self._landings[trainable]

    def show(self) -> None:
        show(self.group.params, self.stand_ins)

    def show_sharded(self) -> None:
        show(self.group.params, [param.sharded for param in self.group.params])


def _plan_of(group: ParamGroup) -> tuple[Any, ...]:
    return group.plan.layout, group.plan.dtype, group.plan.param_dtype, group.plan.reduce_dtype, [id(param) for param in group.params]


def new_stand_in(param: ShardedParam, group: ParamGroup) -> nn.Parameter:
    """A parameter like the unsharded one, over a storage of its own that is freed."""
    whole = torch.empty(param.spec.cut.shape, dtype=group.plan.param_dtype, device=group.device)
    whole.untyped_storage().resize_(0)
    with torch.no_grad():
        return nn.Parameter(param.spec.to_logical(whole), requires_grad=param.sharded.requires_grad)
