"""The version of FSDP2 whose numbers fsdp2 gives where versions differ: ``fully_shard`` reads it, units keep it.

"2.13"  gradients are reduced in ``reduce_dtype``, else in the dtype that the forward computed with (torch 2.11 to 2.14)
"2.15"  ... else in ``param.grad_dtype`` if that was set, else in the parameter's own dtype: with bf16 compute and fp32
        parameters, gradients travel in fp32
"torch" as the torch that is installed; the default
"""

from __future__ import annotations

from typing import Any, Literal

from .errors import ArgumentError, got
from .torch_names import torch_tensors

Semantics = Literal["2.13", "2.15"]

_chosen: Semantics | None = None


def set_semantics(semantics: Literal["torch", "2.13", "2.15"]) -> None:
    """Let later ``fully_shard`` calls give the numbers of that version of torch's FSDP2; sharded modules keep theirs.

    ``set_semantics("2.13")`` keeps bf16 gradients on the wire with torch 2.15: half of the bytes of the default there.
    Collective: no; all ranks must choose the same.

    Example:
        fsdp2.set_semantics("2.13")  # gradients travel in bf16
        fsdp2.fully_shard(net, mp_policy=fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        fsdp2.set_semantics("torch")
    """
    global _chosen
    known: dict[Any, Semantics | None] = {"torch": None, "2.13": "2.13", "2.15": "2.15"}
    if all(semantics != each for each in known):
        raise ArgumentError(
            got("set_semantics", "semantics", semantics),
            expected='"torch" (as the installed version), "2.13" or "2.15"',
            fix='for instance fsdp2.set_semantics("2.13")',
        )
    _chosen = known[semantics]


def chosen_semantics() -> Semantics:
    return _chosen or torch_tensors.INSTALLED_SEMANTICS


def has_chosen_semantics() -> bool:
    """Whether the user chose a version."""
    return _chosen is not None
