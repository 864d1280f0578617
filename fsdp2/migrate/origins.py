"""Where a name comes from: the frameworks' public names, under each of the paths from which scripts import them.

torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel  ->  fsdp:FullyShardedDataParallel
torch.nn.parallel.DistributedDataParallel                                    ->  ddp:DistributedDataParallel
"""

from __future__ import annotations

from .. import installation

FSDP2_NAMES = frozenset({*installation.FSDP2_NAMES, "GradientReductionHandle"})
"""Public names of torch's FSDP2; ``fsdp2`` has them all."""

WRAP_NAMES = frozenset(
    {
        "CustomPolicy",
        "ModuleWrapPolicy",
        "always_wrap_policy",
        "enable_wrap",
        "lambda_auto_wrap_policy",
        "size_based_auto_wrap_policy",
        "transformer_auto_wrap_policy",
        "wrap",
    }
)

FSDP1_NAMES = WRAP_NAMES | {"FlatParameter"} | frozenset(installation.FSDP1_NAMES)
"""Public names of FSDP1 and its submodules; ``fsdp2.compat`` has them all."""

STATIC = "fsdp:FullyShardedDataParallel."
"""The origin of a static method of FSDP1, before its name."""

STATIC_METHODS = {
    "fsdp_modules": ("module", "root_only"),
    "summon_full_params": ("module",),
    **dict.fromkeys(
        ("state_dict_type", "set_state_dict_type"),
        ("module", "state_dict_type", "state_dict_config", "optim_state_dict_config"),
    ),
    "optim_state_dict": ("model", "optim", "optim_state_dict", "group"),
    "full_optim_state_dict": ("model", "optim", "optim_input", "rank0_only", "group"),
    "sharded_optim_state_dict": ("model", "optim", "group"),
    "optim_state_dict_to_load": ("model", "optim", "optim_state_dict", "is_named_optimizer", "load_directly", "group"),
    "shard_full_optim_state_dict": ("full_optim_state_dict", "model", "optim_input", "optim"),
    "scatter_full_optim_state_dict": ("full_optim_state_dict", "model", "optim_input", "optim", "group"),
}
"""The static methods that rules know, with their arguments."""

_FSDP_MODULES = (
    "torch.distributed.fsdp.fully_sharded_data_parallel",
    "torch.distributed.fsdp.sharded_grad_scaler",
    "torch.distributed.fsdp._fully_shard",
    "torch.distributed.fsdp.wrap",
    "torch.distributed.fsdp.api",
    "torch.distributed._composable.fsdp",
    "torch.distributed.fsdp",
)
_OTHER_MODULES = {
    "torch.nn.parallel.distributed": "ddp",
    "torch.nn.parallel": "ddp",
    "torch.distributed.optim": "zero",
    "torch.distributed.algorithms.join": "join",
    "deepspeed": "deepspeed",
}
_OTHER_NAMES = {"ddp": "DistributedDataParallel", "zero": "ZeroRedundancyOptimizer", "join": "Join"}


def origin(dotted: str) -> str:
    """``framework:Name`` or ``framework:Name.attribute`` for what a framework made public; else ``dotted`` as it is.

    "fsdp:?" is something of torch.distributed.fsdp that is not public.
    """
    for module in _FSDP_MODULES:
        if dotted.startswith(f"{module}."):
            name = dotted[len(module) + 1 :]
            first = name.split(".")[0]
            known = (FSDP1_NAMES - WRAP_NAMES) | FSDP2_NAMES if module == "torch.distributed.fsdp" else FSDP1_NAMES | FSDP2_NAMES
            if first in known:
                return f"fsdp:{name}"
            return dotted if f"{module}.{first}" in _FSDP_MODULES else "fsdp:?"
    for module, framework in _OTHER_MODULES.items():
        if dotted.startswith(f"{module}."):
            name = dotted[len(module) + 1 :]
            if framework == "deepspeed" or name.split(".")[0] == _OTHER_NAMES[framework]:
                return f"{framework}:{name}"
    return dotted


def is_framework_module(dotted: str) -> bool:
    """Whether import lines of this module are the business of a migration."""
    return dotted in _FSDP_MODULES or dotted in _OTHER_MODULES or dotted.startswith(("torch.distributed.fsdp.", "deepspeed."))


def star_names(module: str) -> frozenset[str]:
    """What ``from module import *`` binds, of the names that matter here."""
    if module == "torch.distributed.fsdp":
        return (FSDP1_NAMES - WRAP_NAMES - {"ShardedGradScaler"}) | FSDP2_NAMES
    if module == "torch.distributed.fsdp.wrap":
        return WRAP_NAMES
    if module in _FSDP_MODULES:
        return FSDP1_NAMES | FSDP2_NAMES
    return frozenset({"DistributedDataParallel"}) if module == "torch.nn.parallel" else frozenset()


def new_home(name: str) -> str | None:
    """The module of fsdp2 from which ``fsdp:name`` can be imported under the same name."""
    if name in FSDP2_NAMES:
        return "fsdp2"
    return "fsdp2.compat" if name in FSDP1_NAMES else None
