"""``wrap="auto"``: the repeated blocks of a model, found by themselves.

Blocks are the children of a ModuleList, Sequential or ModuleDict with some of the same structure: two of one class with parameters of
the same names and shapes, or all of one class about as large (a T5 block with a relative bias next to one without; but no stages of a
Swin, where each is larger than the one before: their layers are blocks). The outermost such children count, so that the experts
inside a block stay with it; but a list of nothing but equal modules with parts is a stage, and what is in it are blocks. Other
modules of the same classes are blocks too. Outside of the blocks, an embedding or a linear layer at least half as large as the
median block becomes a group, unless another module shares its parameters: then the root, which is unsharded as long as any of them
runs, keeps them.

Worked example, GPT-2 (12 blocks; the head is tied to the embedding):

    12 groups of one GPT2Block; the root: token embedding = head, positions (786 432 < half of 7 087 872), the last norm
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from torch import nn

from .module_tree import ModuleTree, class_of

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def auto_groups(tree: ModuleTree) -> list[list[nn.Module]]:
    """The groups that "auto" chooses, without the root."""
    blocks = _outermost(tree, tree.root, _has_parts) or _outermost(tree, tree.root, _is_leaf)
    if not blocks:
        return []
    classes = {class_of(block) for block in blocks.values()} - set(_LISTS)
    if any(map(_has_parts, blocks.values())):
        _add_of_classes(tree, tree.root, tuple(classes), blocks)
    groups = [[block] for block in blocks.values()]
    typical = statistics.median(tree.numel(block) for block in blocks.values())
    return groups + [[module] for module in _large_and_apart(tree, blocks, typical / 2)]


def _has_parts(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _is_leaf(module: nn.Module) -> bool:
    return not _has_parts(module)


def _outermost(tree: ModuleTree, module: nn.Module, may_be_block: Callable[[nn.Module], bool]) -> dict[int, nn.Module]:
    """The blocks in the tree of ``module``, by id."""
    children = tree.children(module)
    if isinstance(module, _LISTS):
        inside = [child for child in children if may_be_block(child)]
        if _some_alike(tree, inside) and not any(_is_stage(tree, child) for child in inside):
            return {id(child): child for child in inside}
    found: dict[int, nn.Module] = {}
    for child in children:
        found.update(_outermost(tree, child, may_be_block))
    return found


def _some_alike(tree: ModuleTree, modules: list[nn.Module]) -> bool:
    """Whether there is a class with several equal instances, or instances about as large. (A mix of two kinds of layers is fine.)"""
    by_class: dict[type[nn.Module], list[nn.Module]] = {}
    for module in modules:
        by_class.setdefault(class_of(module), []).append(module)
    for several in by_class.values():
        sizes = [tree.numel(module) for module in several]
        shapes = set(map(_shapes, several))
        if len(several) > 1 and (len(shapes) < len(several) or max(sizes) <= 2 * min(sizes)):
            return True
    return False


def _is_stage(tree: ModuleTree, module: nn.Module) -> bool:
    """Whether it is a list of several modules with parts, all the same."""
    children = tree.children(module) if isinstance(module, _LISTS) else []
    return len(children) > 1 and all(map(_has_parts, children)) and len({(class_of(each), _shapes(each)) for each in children}) == 1


def _shapes(module: nn.Module) -> tuple[tuple[str, torch.Size], ...]:
    return tuple((name, param.shape) for name, param in module.named_parameters())


def _add_of_classes(tree: ModuleTree, module: nn.Module, classes: tuple[type[nn.Module], ...], blocks: dict[int, nn.Module]) -> None:
    """Add the outermost modules of ``classes`` outside of ``blocks``: a lone middle block, a stage of one."""
    for child in tree.children(module):
        if id(child) in blocks:
            continue
        if class_of(child) in classes and not any(id(below) in blocks for below in child.modules()):
            blocks[id(child)] = child
        else:
            _add_of_classes(tree, child, classes, blocks)


def _large_and_apart(tree: ModuleTree, blocks: dict[int, nn.Module], min_numel: float) -> list[nn.Module]:
    """Embeddings and linear layers outside of ``blocks`` that are worth a group, and whose parameters are not tied."""
    users = tree.users()
    inside = {id(below) for block in blocks.values() for below in block.modules()}
    return [
        module
        for module in tree.candidates.values()
        if id(module) not in inside
        and isinstance(module, (nn.Embedding, nn.Linear))
        and _is_leaf(module)
        and tree.numel(module) >= min_numel
        and all(users[id(param)] == 1 for param in tree.params(module))
    ]
