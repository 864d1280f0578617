"""How much CPU time does the host spend on clipping gradients and on AdamW, over all parameters?

192 tiny parameters on a fake process group of 8 ranks: what is left is dispatch, DTensor's above all. PyTorch's own
``clip_grad_norm_`` and ``AdamW``, both with ``foreach=True``, as they default to on a GPU. Gradients come from one backward
and stay. The figure is the whole call's time a parameter; the plain model's, on plain tensors, is what upstream adds to.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import common
import models
import torch
from torch import nn

TARGET = common.Target(0.25, 0.10)


def clipper(model: nn.Module, implementation: str) -> Callable[[], object]:
    """The clipping that a user of ``implementation`` would call."""
    # TODO: ours goes to fsdp2.optim here once that has a clip_grad_norm_; the same for its AdamW below.
    parameters = list(model.parameters())
    return lambda: torch.nn.utils.clip_grad_norm_(parameters, max_norm=1.0, foreach=True)


def adamw(model: nn.Module, implementation: str) -> Callable[[], object]:
    """A step of the AdamW that a user of ``implementation`` would call."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True).step


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
    for case, make in (("clip_grad_norm_", clipper), ("AdamW.step", adamw)):
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
