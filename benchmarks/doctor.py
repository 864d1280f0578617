"""What do the doctor's light checks cost a step that nobody looks at closely?

A small step: forward, backward, clipping and AdamW of tiny blocks on a fake process group of 8 ranks, all host and hardly any
arithmetic, so that the share of the checks is the largest that it can be. Python calls are counted with and without them. Their time
is that of the main thread in the hooks themselves, a hundred times in turn with a step: two steps differ by more than the checks take.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import common
import models
import torch
from python_calls import calls_during
from torch import nn

TARGET = common.Target(0.01, 0.005, of="ours")


def trained(num_blocks: int, params_per_block: int, mesh: object) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = models.tiny_stack(num_blocks, params_per_block)
    common.shard(model, model.blocks, common.OURS, mesh)  # type: ignore[arg-type]
    return model, torch.optim.AdamW(model.parameters())


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    x = torch.randn(2, 16)

    def step() -> None:
        model(x).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def watched(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    from fsdp2 import doctor

    # Ranks of a fake process group all have the data of this one.
    return doctor.watch(model, optimizer, every=1 << 40, ignore=["same-data-on-every-rank", "same-random-numbers"])


def hooks_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """All that a watch runs in one step, as the modules and optimizers that call it hold it."""
    from fsdp2.doctor import hearing

    before_forward = next(iter(model._forward_pre_hooks.values()))  # ahead of all others
    (after_backward,) = model._get_fsdp_state().watchers  # type: ignore[operator, union-attr]
    (on_clip,) = hearing.clips._listeners
    before_step: Any = list(optimizer._optimizer_step_pre_hooks.values())[-1]
    inputs, params = (torch.randn(2, 16),), list(model.parameters())

    def light_checks() -> None:
        before_forward(model, inputs, {})
        after_backward()
        on_clip(params)
        before_step(optimizer, (), {})

    return light_checks


def timed(function: Callable[[], None], repeats: int) -> float:
    begin = time.thread_time()
    for _ in range(repeats):
        function()
    return (time.thread_time() - begin) * 1e3 / repeats


def main() -> None:
    options = common.parser(__doc__).parse_args()
    common.start(options, __doc__)
    mesh = common.fake_mesh(8)
    for num_blocks, params_per_block in ((4, 4), (16, 12)):
        model, optimizer = trained(num_blocks, params_per_block, mesh)
        step = step_of(model, optimizer)
        timed(step, 5)
        calls = {"off": calls_during(step)[0]}
        with watched(model, optimizer):
            timed(step, 2)  # these two are looked at closely
            calls["on"] = calls_during(step)[0]
            functions = {
                "step": functools.partial(timed, step, 1),
                "checks": functools.partial(timed, hooks_of(model, optimizer), 100),
            }
            samples = common.interleave(functions, 20 if options.quick else 300, warmup=5)
        typical = common.Spread.of(samples["step"]).p50
        for unit, values in (
            ("of a step's calls", [calls["on"] / calls["off"] - 1]),
            ("of a step", [each / typical for each in samples["checks"]]),
        ):
            result = common.Result.of(
                "doctor",
                "light checks in a step",
                f"{num_blocks} blocks of {params_per_block} parameters",
                unit,
                {common.OURS: values},
                TARGET,
                calls=calls,
                step_ms=typical,
            )
            common.report(result, options.json)


if __name__ == "__main__":
    main()
