"""Does the optimizer have the parameters that train, and does fsdp2 have them, with their values?"""

from __future__ import annotations

from collections.abc import Iterator

from ..inspect import is_sharded, parameters_of, unmanaged_parameters, written_unseen
from .finding import Finding
from .inspected import Inspected
from .learning import STEPPED_TWICE


def optimizer_findings(inspected: Inspected) -> Iterator[Finding]:
    """Findings on optimizers built before ``fully_shard``, with parameters that are not the model's, or without some of the model's."""
    if not inspected.optimizers:
        return
    yield from nothing_trains(inspected)
    yield from _in_two(inspected)
    held = {id(param): param for optimizer in inspected.optimizers for group in optimizer.param_groups for param in group["params"]}
    names = {id(param): name for name, param in inspected.model.named_parameters()}
    names |= {id(param.sharded): param.fqn for param in inspected.params}
    known = parameters_of(held.values())
    replaced = [param for key, param in known.items() if id(param.sharded) != key]
    if replaced:
        is_torchs = inspected.units[0].made_by != "fsdp2"
        yield Finding(
            "optimizer-before-sharding",
            "error" if is_torchs else "warning",
            f"the optimizer holds {len(replaced)} whole parameters, which fully_shard has cut since",
            "gradients and values are in the sharded parameters; "
            + (
                "torch's FSDP2 exchanges nothing in an optimizer, so no step changes them"
                if is_torchs
                else "fsdp2 exchanges them at the optimizer's first step, and raises if there is state already, but a scheduler, "
                "a moving average or an optimizer without step hooks keeps the dead ones"
            ),
            "build the optimizer after fully_shard" + (", and while nothing is unsharded (model.reshard())" if is_torchs else ""),
            tuple(names.get(id(param.sharded), param.fqn) for param in replaced),
        )
    # An optimizer of several models has parameters of others; one that has none of this model's is another's, or has dead ones.
    if not any(key in names for key in held):
        known = {key: param for key, param in known.items() if id(param.sharded) != key}
    dead = [param for key, param in held.items() if key not in names and key not in known]
    if dead:
        yield Finding(
            "optimizer-has-dead-parameters",
            "warning",
            f"the optimizer holds {len(dead)} parameters that are not in the model",
            "they get no gradient from this model's backward: something has put other parameters in their places, or the optimizer is "
            "another model's",
            "build the optimizer from model.parameters() after the last change of the model (loading with assign=True, adapters, ...)",
            tuple(f"a parameter of shape {tuple(param.shape)}" for param in dead),
        )
    steps = held.keys() | {id(param.sharded) for param in replaced}
    shards = {key: id(param.sharded) for key, param in parameters_of(inspected.model.parameters()).items()}
    missing = [
        name
        for name, param in inspected.model.named_parameters()
        if param.requires_grad and steps.isdisjoint((id(param), shards.get(id(param))))
    ]
    if missing:
        yield Finding(
            "optimizer-misses-parameters",
            "warning",
            f"the optimizer does not have {len(missing)} parameters that require a gradient",
            "no step ever changes them, although their gradients are computed, reduced and kept",
            "pass all of model.parameters() to the optimizer (several optimizers: give check a list), or freeze them with "
            "requires_grad_(False)",
            tuple(missing),
        )


def never_averaged(inspected: Inspected) -> Iterator[Finding]:
    """Finding on trainable parameters that no ``fully_shard`` call has, where there are several ranks."""
    if all(len(unit.ranks) < 2 for unit in inspected.units):
        return
    if names := tuple(unmanaged_parameters(inspected.model)):
        kind = type(inspected.model).__name__
        yield Finding(
            "never-averaged",
            "error",
            f"no fully_shard call has {len(names)} trainable parameters",
            "each rank trains its own on its own data: ranks compute different functions, and a checkpoint has those of one rank",
            f"call fully_shard on the {kind} as well, after its blocks"
            if not is_sharded(inspected.model)
            else "add them before fully_shard, call fully_shard on the modules that were added, or freeze them",
            names,
        )


def unseen_writes(inspected: Inspected) -> Iterator[Finding]:
    """Finding on writes that the next forward does not use. On the host that forward raises; on a device the doctor alone looks."""
    if names := tuple(written_unseen(inspected.model)):
        yield Finding(
            "write-not-seen",
            "error",
            f"{len(names)} parameters were written while they were kept unsharded, where no version counter of their shards shows it",
            "the next forward computes with their former values: on the CPU it raises, on a device nothing is noticed until they are "
            "gathered again",
            "write param itself under torch.no_grad(), one at a time, instead of param.data, param.detach().to_local() or lists for "
            "torch._foreach_*; or call reshard() on the FSDP modules before the write",
            names,
        )


def nothing_trains(inspected: Inspected) -> Iterator[Finding]:
    if not any(param.requires_grad for param in inspected.model.parameters()):
        yield Finding(
            "nothing-trains",
            "error",
            "no parameter of the model requires a gradient",
            "backward reaches no parameter, and no optimizer changes one",
            "call requires_grad_(True) on the parameters that are to train, after what froze the model",
        )


def _in_two(inspected: Inspected) -> Iterator[Finding]:
    """Optimizers that wrap another one have its groups, and count once."""
    holders: dict[int, set[tuple[int, ...]]] = {}
    for optimizer in inspected.optimizers:
        groups = tuple(map(id, optimizer.param_groups))
        for group in optimizer.param_groups:
            for param in group["params"]:
                holders.setdefault(id(param), set()).add(groups)
    names = tuple(param.fqn for param in inspected.params if len(holders.get(id(param.sharded), ())) > 1)
    if names:
        yield STEPPED_TWICE.of(names)
