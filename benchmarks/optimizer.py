"""How much CPU time does the host spend on clipping gradients and on AdamW, over all parameters?

192 tiny parameters on a fake process group of 8 ranks: what is left is dispatch, DTensor's above all. ``clip_grad_norm_`` and
``AdamW`` with ``foreach=True``, as they default to on a GPU: PyTorch's own beside ``fsdp2.clip_grad_norm_`` and ``fsdp2.optim.flat``.
Gradients come from one backward and stay. The figure is the whole call's time a parameter; the plain model's, on plain tensors, is
what upstream adds to. Decaying matrices alone is the usual recipe; it makes two groups of hyperparameters.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import common
import models
import torch
from torch import nn

import fsdp2
from fsdp2.optim import flat

TARGET = common.Target(0.25, 0.10)


def clipper(model: nn.Module, implementation: str) -> Callable[[], object]:
    """The clipping that a user of ``implementation`` would call."""
    parameters = list(model.parameters())
    clip = fsdp2.clip_grad_norm_ if implementation == common.OURS else torch.nn.utils.clip_grad_norm_
    return lambda: clip(parameters, max_norm=1.0, foreach=True)


def adamw(model: nn.Module, implementation: str) -> Callable[[], object]:
    """A step of the AdamW that a user of ``implementation`` would call."""
    if implementation == common.OURS:
        return flat(torch.optim.AdamW, model, lr=1e-4, foreach=True).step
    return torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True).step


def adamw_decaying_matrices(model: nn.Module, implementation: str) -> Callable[[], object]:
    """The same with weight decay for matrices alone."""
    groups = [
        {"params": [param for param in model.parameters() if param.dim() > 1]},
        {"params": [param for param in model.parameters() if param.dim() <= 1], "weight_decay": 0.0},
    ]
    if implementation == common.OURS:
        return flat(torch.optim.AdamW, groups, lr=1e-4, foreach=True).step
    return torch.optim.AdamW(groups, lr=1e-4, foreach=True).step


def timed(function: Callable[[], object], num_parameters: int, calls: int) -> Callable[[], float]:
    """A function that calls ``function`` ``calls`` times and returns its thread time in us per call and parameter."""

    def sample() -> float:
        begin = time.thread_time()
        for _ in range(calls):
            function()
        return (time.thread_time() - begin) / calls / num_parameters * 1e6

    return sample


def main() -> None:
    options = common.parser(__doc__).parse_args()
    common.start(options, __doc__)
    mesh = common.fake_mesh(8)
    num_blocks, dim, rounds, calls = 16, 16, (10 if options.quick else 40), 3
    trained, num_parameters = {}, 0
    for name in options.implementations:
        model = models.transformer_stack(num_blocks, dim)
        common.shard(model, model.blocks, name, mesh)
        model(torch.randn(1, 2, dim, requires_grad=True)).sum().backward()
        num_parameters = len(list(model.parameters()))
        trained[name] = model
    for case, make in (
        ("clip_grad_norm_", clipper),
        ("AdamW.step", adamw),
        ("AdamW.step, matrices decay", adamw_decaying_matrices),
    ):
        functions = {name: timed(make(model, name), num_parameters, calls) for name, model in trained.items()}
        samples = common.interleave(functions, rounds, warmup=2)
        result = common.Result.of(
            "optimizer",
            "host time over all parameters, each",
            case,
            "us",
            samples,
            TARGET,
            num_parameters=num_parameters,
            world_size=8,
        )
        common.report(result, options.json)


if __name__ == "__main__":
    main()
