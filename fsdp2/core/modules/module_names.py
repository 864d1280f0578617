"""Every name of a module in a tree, also if a module is below itself: a block that refers to its owner.

torch lists each module once, or, with ``remove_duplicate=False``, follows a cycle for ever.

Worked example: ``model.block.owner`` is ``model``; ``model.other`` is ``model.block``. The names are "", "block" and "other".
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def all_names(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """As ``root.named_modules(remove_duplicate=False)``, without names of a module inside of itself."""
    return _below(root, "", [])


def _below(module: nn.Module, name: str, above: list[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    if any(module is each for each in above):
        return
    yield name, module
    above.append(module)
    for key, child in module._modules.items():
        if child is not None:
            yield from _below(child, f"{name}.{key}" if name else key, above)
    above.pop()
