"""Whether compiler, checkpointing and sharding were put around one another in an order that loses; said once, in the first forward.

At a unit's first forward the call stack tells what is around it. It refuses to know what the compiler does inside; what each order
costs was measured, see docs/compile.md:

    torch.compile(model) around checkpoint(sharded block)   the compiler leaves all below the checkpoint alone: no graph at all
    torch.compile(model) around sharded blocks              the graph breaks at each of them; around a loop over them, what stands
                                                            beside the loop is not compiled
    the compiler on each block, checkpoint and sharding around it or inside, in any order   one graph, no break: nothing is said
"""

from __future__ import annotations

import warnings

from ...errors import LosingOrderWarning, message
from .. import torch_compat as compat
from ..iteration.schedule import Schedule
from ..iteration.unit import Unit


def look_around(unit: Unit, schedule: Schedule) -> None:
    """Warn if the forward of ``unit``, whose pre-hook runs, is called in an order that loses; each order once for a root."""
    unit.looked_around = True
    around = compat.compiled_around()
    if around is None:
        return
    above = [module for module in around.modules if module not in unit.modules]
    if not above:  # the compiler is on the unit itself: its hooks run outside of the graph
        return
    kind = "checkpoint" if around.is_checkpointed else "break"
    if kind in schedule.losing_orders:
        return
    schedule.losing_orders.add(kind)
    outer = type(above[-1]).__name__
    what = _named(unit)
    if around.is_checkpointed:
        text = message(
            f"torch.compile on {outer} does not compile {what}: the compiler does not enter a checkpoint that is around a fully_shard",
            expected="the compiler on the block itself: then it is compiled, wherever checkpointing and sharding stand",
            fix="call compile() on each block that is checkpointed, instead of torch.compile on what holds them; or "
            "fully_shard(checkpoint_wrapper(block)) instead of a checkpoint around fully_shard(block)",
        )
    else:
        inside = set(above[-1].modules())
        below = [each for each in schedule.units if above[-1] not in each.modules and not inside.isdisjoint(each.modules)]
        text = message(
            f"torch.compile on {outer} is outside of {len(below)} modules that fully_shard took: its graph breaks at each of them",
            items=[_named(each) for each in below],
            expected="the compiler on the modules that are sharded: one graph for all that are alike, without a break",
            fix="call compile() on each of them instead, before or after fully_shard; or fsdp2.compile(model): one graph of everything",
        )
    warnings.warn(text, LosingOrderWarning, stacklevel=2)


def _named(unit: Unit) -> str:
    return f"{unit.fqn or 'the root'} ({type(unit.modules[0]).__name__})"
