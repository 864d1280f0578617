"""How a workload is trained: the arguments of ``fsdp2.plan`` and the options of ``fsdp2 plan``, each declared once.

A field of ``Setting`` has its default, the check of its value, and what argparse is told.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch

from ..arguments import COUNT, DTYPE, NATURAL, Kind, dtype_option, one_of, require, word_of
from ..grouping.policies import Wrap
from ..strategy import STRATEGIES, StrategyName
from .tiers import OFFLOADS, Offload
from .world import Backend

Optimizer = Callable[[Any], torch.optim.Optimizer]
OptimizerName = Literal["adamw", "adam", "sgd"]

OPTIMIZERS: dict[str, Optimizer] = {
    "adamw": lambda params: torch.optim.AdamW(params, fused=True),
    "adam": lambda params: torch.optim.Adam(params, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, foreach=True),  # fused, it has no kernel for shapes alone
}
_OPTIMIZER = Kind(
    lambda value: value in OPTIMIZERS if isinstance(value, str) else callable(value),
    f"one of {list(OPTIMIZERS)}, or a function from parameters to an optimizer",
    "lambda params: MyOptimizer(params, lr=1e-4)",
)


_CHECKPOINTING = Kind(
    lambda value: value in ("none", "selective", "full", "auto") if isinstance(value, str) else value is not None,
    '"none", "selective", "full", or a policy of apply_activation_checkpointing',
    '"full"',
)


def _option(said: str, kind: Kind | None = None, **for_argparse: Any) -> dict[str, Any]:
    """A field's metadata. said: the help of its option; kind: its check, for numbers that of the option as well"""
    if kind in (COUNT, NATURAL):
        for_argparse |= {"type": word_of(kind), "metavar": "N"}
    return {"kind": kind, "option": {"help": said, **for_argparse}}


def _dtype_option(said: str) -> dict[str, Any]:
    return {"kind": DTYPE.or_none, "option": dtype_option(said)}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The arguments of ``fsdp2.plan`` but for model, inputs, loss and card, with the same meaning: as many attributes as choices.

    Raises: ArgumentError
    """

    world_size: int = field(metadata={"kind": COUNT})
    strategy: StrategyName = field(default="zero3", metadata=_option("as in fsdp2.parallelize", choices=list(STRATEGIES)))
    shard_size: int | None = field(
        default=None,
        metadata=_option(
            "ranks of a node, for hybrid strategies (default: ranks per host)", COUNT.or_none, type=word_of(COUNT), metavar="N"
        ),
    )
    wrap: Wrap = field(default="auto", metadata=_option("names of the classes whose modules become groups", nargs="+", metavar="CLASS"))
    dtype: torch.dtype | None = field(
        default=None, metadata=_dtype_option("dtype in which parameters are stored (default: the model's)")
    )
    param_dtype: torch.dtype | None = field(
        default=None, metadata=_dtype_option("dtype of forward and backward (default: that of the stored parameters)")
    )
    reduce_dtype: torch.dtype | None = field(
        default=None, metadata=_dtype_option("dtype in which gradients are reduced (default: as in MixedPrecisionPolicy)")
    )
    optimizer: OptimizerName | Optimizer = field(
        default="adamw", metadata=_option("the optimizer", _OPTIMIZER, choices=list(OPTIMIZERS))
    )
    batch: int = field(default=1, metadata=_option("sequences in a micro-batch of one rank", COUNT))
    sequence: int = field(default=2048, metadata=_option("tokens in a sequence", COUNT))
    micro_batches: int = field(default=1, metadata=_option("forwards and backwards before each optimizer step", COUNT))
    checkpointing: Any = field(
        default="none",
        metadata=_option(
            "full: each block is computed again in backward; selective: all of it but matrix products and attention",
            choices=["none", "selective", "full"],
        )
        | {"kind": _CHECKPOINTING},
    )
    offload: Offload = field(default=False, metadata={"kind": one_of(*OFFLOADS)})
    prefetch: int = field(default=1, metadata=_option("number of units gathered ahead", NATURAL))
    backend: Backend = field(
        default="nccl",
        metadata=_option("whose algorithms and schedule; gloo is for the CPU", one_of("nccl", "gloo"), choices=["nccl", "gloo"]),
    )
    ranks_per_host: int = field(default=8, metadata=_option("number of consecutive ranks that share a host", COUNT))

    def __post_init__(self) -> None:
        for each in fields(self):
            if each.metadata.get("kind") is not None:
                require("plan", each.metadata["kind"], **{each.name: getattr(self, each.name)})

    @property
    def node_size(self) -> int | None:
        """``shard_size`` for ``parallelize``."""
        if self.shard_size is None and any(each.is_hybrid for each in STRATEGIES.values() if each.name == self.strategy):
            return min(self.ranks_per_host, self.world_size)
        return self.shard_size
