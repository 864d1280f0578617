"""Is the model cut into groups that are worth a collective each, and that need not be in memory all at once?

Worked example, 4 blocks of 1 GiB and a root that holds two of them besides its own 0.2 GiB:

    unsharded at once      root 2.2 GiB, and two blocks (the one that runs, and the next): 4.2 GiB
    with each block apart  root 0.2 GiB, and two blocks: 2.2 GiB
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn
from torch.distributed.tensor import DTensor

from ..grouping.auto import auto_groups
from ..grouping.module_tree import ModuleTree
from ..inspect import Group
from ..printable import in_bytes
from .finding import Finding
from .inspected import Inspected

ROOT_SHARE = 0.5
ROOT_SAVES_NBYTES = 32 << 20
"""A root that holds more than this share of the bytes is worth a word if another wrapping saves this much memory."""

SMALL_NBYTES = 1 << 20
SMALL_MODEL_NBYTES = 64 << 20
"""A group below the first size takes longer to start than to move, on any fabric; in a model below the second all groups are small."""

PADDED_SHARE = 0.1
PADDED_NBYTES = 1 << 20
"""Padding is worth a word from this share of a group's bytes, and from this many bytes."""


def wrapping_findings(inspected: Inspected) -> Iterator[Finding]:
    yield from _large_root(inspected)
    yield from _small_groups(inspected)
    yield from _padding(inspected)
    yield from _swapped_axes(inspected)


def _large_root(inspected: Inspected) -> Iterator[Finding]:
    root, *below = inspected.units
    own = sum(group.unsharded_nbytes for group in root.groups)
    others = [unit.unsharded_nbytes for unit in below]
    if own <= ROOT_SHARE * (own + sum(others)) or own < ROOT_SAVES_NBYTES:
        return
    now = _peak(own, others)
    apart = _apart(inspected.model, root.groups)
    best = _peak(own - sum(apart.values()), [*others, *apart.values()])
    if now - best >= ROOT_SAVES_NBYTES:
        yield Finding(
            "large-root",
            "warning",
            f"the root holds {in_bytes(own)} of {in_bytes(own + sum(others))}; {in_bytes(now)} of parameters are unsharded at once, "
            f"{in_bytes(best)} with a group for each of {len(apart)} modules",
            "the root's parameters are gathered before anything runs and stay until the last gradient: nothing overlaps with their "
            "gather, and they cost a device their whole size",
            "call fully_shard on these modules before the root, or fsdp2.parallelize(model), which finds them",
            tuple(apart),
        )


def _peak(root: int, others: list[int]) -> int:
    """The peak of unsharded parameters: the root's, those of the module that runs, and those of the next one."""
    return root + sum(sorted(others)[-2:])


def _apart(model: nn.Module, groups: Sequence[Group]) -> dict[str, int]:
    """The modules that automatic wrapping would take out of the root, with the bytes that each then has unsharded."""
    nbytes = {id(param.sharded): param.numel * group.param_dtype.itemsize for group in groups for param in group.params}
    shown = {id(param.unsharded()): id(param.sharded) for group in groups for param in group.params}
    # A tree that was not sharded: modules below the root that are have bytes of their own.
    unsharded = nn.Sequential() if isinstance(model, (nn.Sequential, nn.ModuleList)) else nn.Module()
    for name, child in model.named_children():
        unsharded.add_module(name, child)
    tree = ModuleTree(unsharded)
    found = {}
    for modules in auto_groups(tree):
        own = {shown.get(id(param), id(param)) for module in modules for param in tree.params(module)}
        if size := sum(nbytes.get(key, 0) for key in own):
            found[tree.name_of(modules[0])] = size
    return found


def _small_groups(inspected: Inspected) -> Iterator[Finding]:
    sizes = {group.name: group.unsharded_nbytes for group in inspected.groups if group.name}
    small = [name for name, nbytes in sizes.items() if nbytes < SMALL_NBYTES]
    total = sum(group.unsharded_nbytes for group in inspected.groups)
    if total >= SMALL_MODEL_NBYTES and len(small) >= 2 and len(small) > len(sizes) / 4:
        yield Finding(
            "small-groups",
            "note",
            f"{len(small)} of {len(sizes)} groups below the root have less than {in_bytes(SMALL_NBYTES)}",
            "each costs hooks, one collective in forward and two in backward; starting these takes longer than sending their bytes",
            "call fully_shard only on the modules around them",
            tuple(small),
        )


def _padding(inspected: Inspected) -> Iterator[Finding]:
    padded, uneven, padding = [], [], 0
    for group in inspected.groups:
        copies = group.num_shards or 1
        own = sum(param.numel * (copies if param.dim is None else 1) for param in group.params) * group.param_dtype.itemsize
        nbytes = group.unsharded_nbytes - own
        if nbytes >= PADDED_NBYTES and nbytes > PADDED_SHARE * own:
            padded.append(group.name or "the root")
            uneven += [param.fqn for param in group.params if param.dim is not None and param.shape[param.dim] % copies]
            padding += nbytes
    if padded:
        num_shards = inspected.groups[0].num_shards
        yield Finding(
            "padding",
            "note",
            f"{len(padded)} groups ({padded[0]}, ...) are more than a tenth padding, {in_bytes(padding)} in total",
            f"rows that do not divide over {num_shards} ranks are padded in memory and in each collective",
            "shard another dim by shard_placement_fn, shard over fewer ranks (a 2-D mesh), or choose sizes that divide",
            tuple(uneven),
        )


def _swapped_axes(inspected: Inspected) -> Iterator[Finding]:
    """Finding on parameters that are cut over an axis whose name says that it has replicas. Joined axes have the names of both."""
    names: dict[str, str] = {}
    for param in inspected.params:
        if isinstance(param.sharded, DTensor):
            mesh = param.sharded.device_mesh
            for axis, placement in zip(mesh.mesh_dim_names or (), param.sharded.placements, strict=False):
                if placement.is_shard() and "replica" in axis and "shard" not in axis:
                    names[param.fqn] = axis
    if names:
        axes = ", ".join(dict.fromkeys(names.values()))
        yield Finding(
            "mesh-axes-swapped",
            "warning",
            f"{len(names)} parameters are sharded over the mesh axis {axes!r}",
            "fully_shard replicates over the first of two axes, shards over the second, and ignores their names: shards have another "
            "size, and gathers cross the links that were meant for replicas",
            'init_device_mesh(device, (replicas, shards), mesh_dim_names=("replicate", "shard"))',
            tuple(names),
        )
