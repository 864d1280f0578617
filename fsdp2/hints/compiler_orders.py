"""Warn once, at the first forward, if compiler, checkpointing and sharding are nested in an order that loses.

Modules below a root show whether they are compiled, checkpointed and sharded. Code around the root shows only whether
the compiler runs it. The costs were measured, see docs/compile.md:

    torch.compile(model) around checkpoint(sharded block)   nothing below the checkpoint is compiled: no graph at all
    torch.compile(model) around sharded blocks              the graph breaks at each block; around a loop over them,
                                                            code next to the loop is not compiled
    the compiler on each block, checkpoint and sharding     one graph, no break: no warning
    around it or inside, in any order
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ..core.iteration.unit import Unit
from ..errors import LosingOrderWarning, message
from ..torch_names import torch_compiler
from ..user_warnings import warn


def warn_of_losing_orders(root: nn.Module, units: Sequence[Unit], is_compiled: bool) -> None:
    """Warn of each order that loses once, by the outermost module that the compiler is on.

    is_compiled: code that the compiler runs has called ``root``
    """
    compiled = torch_compiler.compiled_modules(root)
    said: set[bool] = set()
    for outer in [root, *compiled] if is_compiled else compiled:
        # The compiler may be on a unit itself, whose hooks run outside of the graph.
        names = {id(module): name for name, module in outer.named_modules() if module is not outer}
        below = [(unit, names[id(unit.modules[0])]) for unit in units if id(unit.modules[0]) in names]
        for is_checkpointed in (True, False):
            found = [unit for unit, name in below if ("_checkpoint_wrapped_module" in name.split(".")) is is_checkpointed]
            if found and is_checkpointed not in said:
                said.add(is_checkpointed)
                ranks = {rank for each in units for rank in each.ranks}
                warn(_text(type(outer).__name__, found, is_checkpointed), LosingOrderWarning, ranks=ranks)


def _text(outer: str, below: list[Unit], is_checkpointed: bool) -> str:
    named = [f"{unit.fqn or 'the root'} ({type(unit.modules[0]).__name__})" for unit in below]
    if is_checkpointed:
        return message(
            f"torch.compile on {outer} does not compile {named[0]}: "
            "the compiler does not enter a checkpoint that is around a fully_shard",
            expected="the compiler on the block itself: then it is compiled, wherever checkpointing and sharding stand",
            fix="call compile() on each block that is checkpointed, instead of torch.compile on what holds them; or "
            "fully_shard(checkpoint_wrapper(block)) instead of a checkpoint around fully_shard(block)",
        )
    return message(
        f"torch.compile on {outer} is outside of {len(below)} modules that fully_shard took: its graph breaks at each of them",
        items=named,
        expected="the compiler on the modules that are sharded: one graph, without a break, for those of one class",
        fix="call compile() on each of them instead, before or after fully_shard; or fsdp2.compile(model): one graph of everything",
    )
