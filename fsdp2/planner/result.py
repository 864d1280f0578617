"""A plan: what a rank needs for a step, as plain values."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from ..printable import counted, in_bytes
from ..state_bytes import StateBytes
from ..tables import Shown, Table, as_text
from .duration import Duration
from .memory import Memory
from .rehearsal import GroupFacts
from .setting import Setting
from .tiers import OFFLOADS
from .traffic import Traffic


@dataclass(frozen=True)
class LargeRoot:
    """The root group holds this share of the parameters, and all of them are unsharded at once. peak: bytes with ``wrap="auto"``"""

    share: float
    peak: int


METHODS = {
    "numel": "exact",
    "state": "exact",
    "groups": "exact",
    "traffic": "exact",
    "memory": "modeled",
    "duration": "modeled",
}
"""How each field of a plan was found. *exact*: what the library allocates and issues. *modeled*: storages that operators make, without
what kernels and allocators add; times by docs/step_clock.md. *modeled, measured rates*: with those of a card file."""


@dataclass(frozen=True, repr=False)
class Plan(Shown):
    """Of rank 0, which has the largest shards. ``print`` it.

    numel:    parameters of the whole model
    state:    bytes kept between backward and optimizer step: exactly what the runtime allocates
    groups:   every parameter group, in the order in which ``model.modules()`` meets it
    memory:   the peak of a steady step, and the most bytes of each kind
    traffic:  what is communicated in a step
    wrapping: the groups in words, as ``fsdp2.wrap.plan`` prints them
    duration: of a step on a card, by a model; None: no card was named
    large_root: None: the root holds less than half of the model, or automatic wrapping needs no less memory
    methods:  how each of these was found: "exact", "modeled", or "modeled, measured rates"
    """

    name: str
    setting: Setting
    numel: int
    state: StateBytes
    groups: tuple[GroupFacts, ...]
    memory: Memory
    traffic: tuple[Traffic, ...]
    wrapping: str
    duration: Duration | None = None
    large_root: LargeRoot | None = None
    methods: dict[str, str] = field(default_factory=METHODS.copy)

    @property
    def padding(self) -> float:
        """The share of all unsharded storages that is no parameter."""
        return sum(group.padding for group in self.groups) / max(sum(group.unsharded for group in self.groups), 1)

    def __str__(self) -> str:
        return as_text(headline(self), tables(self))


def _stored(plan: Plan) -> str:
    """``bfloat16``, or with adapters ``98.6% bfloat16 and 1.4% float32``, of the elements."""
    numels = Counter[torch.dtype]()
    for group in plan.groups:
        numels[group.dtype] += group.numel
    if len(numels) < 2:
        return "".join(map(_word, numels))
    return " and ".join(f"{numel / plan.numel:.1%} {_word(dtype)}" for dtype, numel in numels.most_common())


def _name_of(made: Any) -> str:
    return str(getattr(getattr(made, "func", made), "__name__", "an optimizer"))


def _word(dtype: torch.dtype | None) -> str:
    return "" if dtype is None else str(dtype).removeprefix("torch.")


def headline(plan: Plan) -> str:
    setting = plan.setting
    dtypes = " ".join(
        f"{name} {dtype}"
        for name, dtype in (
            ("stored", _stored(plan)),
            ("computed", _word(setting.param_dtype)),
            ("reduced", _word(setting.reduce_dtype)),
        )
        if dtype
    )
    optimizer = setting.optimizer if isinstance(setting.optimizer, str) else _name_of(setting.optimizer)
    return (
        f"{plan.name}: {plan.numel:,} parameters, {setting.strategy} over {setting.world_size} ranks, {dtypes}, {optimizer}, "
        f"batch {setting.batch} x {setting.sequence} per rank, {setting.micro_batches} micro-batches, "
        f"checkpointing {setting.checkpointing}, prefetch {setting.prefetch}"
        + (f", {OFFLOADS[setting.offload]}" if setting.offload else "")
    )


def tables(plan: Plan) -> list[Table]:
    """All that a plan says."""
    state = plan.state
    peak = plan.memory.peak
    method = plan.methods
    kept = [("master parameters", state.master), ("gradients", state.gradients), ("optimizer state", state.optimizer)]
    kept += [("unsharded parameters", state.compute)] if state.compute else []
    found = [
        Table(
            f"Kept by a rank between backward and optimizer step ({method['state']})",
            ("what", "bytes"),
            (*((what, in_bytes(nbytes)) for what, nbytes in kept), ("together", in_bytes(state.total))),
        ),
        Table(
            f"Peak of a step: {in_bytes(peak.nbytes)}, in {peak.phase} of {peak.where or 'the model'} ({method['memory']})",
            ("what", "at the peak", "most at a time"),
            tuple((kind, in_bytes(peak.by_kind.get(kind, 0)), in_bytes(most)) for kind, most in plan.memory.most.items()),
            _host_words(plan.memory),
        ),
        Table(
            f"Communication of a step ({method['traffic']})",
            ("phase", "collective", "ranks", "launches", "sent by a rank", "leaves a host"),
            tuple(
                (each.phase, each.kind, str(each.ranks), str(each.launches), in_bytes(each.sent), in_bytes(each.leaves_host))
                for each in plan.traffic
            ),
        ),
    ]
    if plan.duration is not None:
        lasts = plan.duration
        exposed = [(f"exposed communication, {phase}", seconds) for phase, seconds in lasts.exposed.items()]
        span = f", {lasts.fastest * 1e3:,.0f} to {lasts.slowest * 1e3:,.0f}" if lasts.has_range else ", unproven"
        found.append(
            Table(
                f"A step on {lasts.card}: {lasts.step * 1e3:,.0f} ms{span}, {lasts.mfu:.0%} MFU ({method['duration']})",
                ("what", "ms"),
                tuple(
                    (what, f"{seconds * 1e3:,.1f}")
                    for what, seconds in [("computing", lasts.computing), *exposed, ("idle, or waiting for copies", lasts.idle)]
                ),
                "docs/step_clock.md says what the model leaves out, and how far it was from published times",
            )
        )
    largest = max(plan.groups, key=lambda group: group.unsharded, default=None)
    if largest is not None:
        found.append(
            Table(
                f"{counted(len(plan.groups), 'parameter group')}, "
                f"{plan.padding:.1%} of their unsharded storages padding ({method['groups']})",
                ("group", "parameters", "sharded", "unsharded"),
                (
                    (
                        f"largest: {largest.name or 'the root'}",
                        f"{largest.numel:,}",
                        in_bytes(largest.sharded),
                        in_bytes(largest.unsharded),
                    ),
                ),
                _root_words(plan),
            )
        )
    return found


def _host_words(memory: Memory) -> str:
    host = f"at most {in_bytes(memory.host)} in host memory" if memory.host else ""
    return f"{host}, {in_bytes(memory.files)} in files" if memory.files else host


def _root_words(plan: Plan) -> str:
    if plan.large_root is None:
        return ""
    return (
        f"the root group holds {plan.large_root.share:.0%} of the parameters, which are unsharded all at once: "
        f'with wrap="auto" the peak is {in_bytes(plan.large_root.peak)} instead of {in_bytes(plan.memory.peak.nbytes)}'
    )
