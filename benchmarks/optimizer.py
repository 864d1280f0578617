"""How much processor time, and how many Python calls, does clipping gradients and stepping with AdamW cost the host?

Tiny transformer blocks of 12 parameters on a fake process group of 8 ranks: what is left is dispatch, DTensor's above all. PyTorch's
``clip_grad_norm_`` and ``AdamW`` stand next to ``fsdp2.clip_grad_norm_`` and ``fsdp2.optim.flat``, with ``foreach=True``, the default
on a GPU, and with ``fused=True``, where the flat optimizer clips in its step. A backward before each sample makes new gradients, and
is not timed. The figure is the time over all parameters, for each; the plain model's, on plain tensors, is what upstream adds to.
Decaying matrices alone is the usual recipe; it makes two groups of hyperparameters.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import common
import models
import torch
from python_calls import calls_during
from torch import Tensor, nn

import fsdp2
from fsdp2.optim import flat

TARGET = common.Target(0.25, 0.10)
Make = Callable[[nn.Module, str], Callable[[], object]]


def clip(model: nn.Module, implementation: str) -> Callable[[], object]:
    """The clipping that a user of ``implementation`` would call."""
    parameters = list(model.parameters())
    function = fsdp2.clip_grad_norm_ if implementation == common.OURS else torch.nn.utils.clip_grad_norm_
    return lambda: function(parameters, max_norm=1.0, foreach=True)


def step(model: nn.Module, implementation: str) -> Callable[[], object]:
    """A step of the AdamW that a user of ``implementation`` would call."""
    return _adamw(model.parameters(), implementation, foreach=True).step


def step_decaying_matrices(model: nn.Module, implementation: str) -> Callable[[], object]:
    """The same with weight decay for matrices alone."""
    groups = [
        {"params": [param for param in model.parameters() if param.dim() > 1]},
        {"params": [param for param in model.parameters() if param.dim() <= 1], "weight_decay": 0.0},
    ]
    return _adamw(groups, implementation, foreach=True).step


def clip_and_step(model: nn.Module, implementation: str) -> Callable[[], object]:
    """One after the other."""
    both = clip(model, implementation), step(model, implementation)
    return lambda: [function() for function in both]


def clip_and_step_fused(model: nn.Module, implementation: str) -> Callable[[], object]:
    """Fused kernels, which clip while they step where the optimizer is flat."""
    optimizer = _adamw(model.parameters(), implementation, fused=True)
    if implementation == common.OURS:
        return lambda: optimizer.step(max_norm=1.0)
    clipped = clip(model, implementation)
    return lambda: (clipped(), optimizer.step())


def _adamw(params: object, implementation: str, **options: bool) -> torch.optim.Optimizer:
    if implementation == common.OURS:
        return flat(torch.optim.AdamW, params, lr=1e-4, **options)
    return torch.optim.AdamW(params, lr=1e-4, **options)


def sampler(model: nn.Module, x: Tensor, function: Callable[[], object], num_parameters: int) -> Callable[[], float]:
    """A function that makes gradients and returns the thread time of ``function`` in us a parameter."""

    def sample() -> float:
        model.zero_grad()
        model(x).sum().backward()
        begin = time.thread_time()
        function()
        return (time.thread_time() - begin) / num_parameters * 1e6

    return sample


def count_calls(model: nn.Module, x: Tensor, function: Callable[[], object], num_parameters: int) -> float:
    """Python calls of ``function`` a parameter."""
    model.zero_grad()
    model(x).sum().backward()
    return calls_during(function)[0] / num_parameters


CASES: Mapping[str, Make] = {
    "clip_grad_norm_": clip,
    "AdamW.step": step,
    "AdamW.step, matrices decay": step_decaying_matrices,
    "clip + AdamW": clip_and_step,
    "clip + AdamW, fused": clip_and_step_fused,
}


def main() -> None:
    options = common.parser(__doc__).parse_args()
    common.start(options, __doc__)
    mesh = common.fake_mesh(8)
    dim, rounds = 16, (3 if options.quick else 20)
    x = torch.randn(1, 2, dim, requires_grad=True)
    for num_blocks in (42, 167):
        trained, num_parameters = {}, num_blocks * 12
        for name in options.implementations:
            trained[name] = model = models.transformer_stack(num_blocks, dim)
            common.shard(model, model.blocks, name, mesh)
        for case, make in CASES.items():
            functions = {name: make(model, name) for name, model in trained.items()}
            samplers = {name: sampler(model, x, functions[name], num_parameters) for name, model in trained.items()}
            samples = common.interleave(samplers, rounds, warmup=1)
            calls = {name: [count_calls(model, x, functions[name], num_parameters)] for name, model in trained.items()}
            for figure, unit, values in (("host time a parameter", "us", samples), ("Python calls a parameter", "calls", calls)):
                what = f"{case}, {num_parameters} parameters"
                details = {"num_parameters": num_parameters, "world_size": 8}
                common.report(common.Result.of("optimizer", figure, what, unit, values, TARGET, **details), options.json)


if __name__ == "__main__":
    main()
