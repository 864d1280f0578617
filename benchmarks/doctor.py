"""What do the doctor's light checks cost a step that nobody looks at closely?

A small step: forward, backward, clipping and AdamW of tiny blocks on a fake process group of 8 ranks, all host and hardly any
arithmetic, so that the share of the checks is the largest that it can be. Time is that of the main thread. Python calls are exact;
times need an idle machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager

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


def watched(model: nn.Module, optimizer: torch.optim.Optimizer) -> AbstractContextManager[object]:
    from fsdp2 import doctor

    # Ranks of a fake process group all have the data of this one.
    return doctor.watch(model, optimizer, every=1 << 40, ignore=["same-data-on-every-rank"])


def timed(step: Callable[[], None]) -> float:
    begin = time.thread_time()
    step()
    return (time.thread_time() - begin) * 1e3


def main() -> None:
    options = common.parser(__doc__).parse_args()
    common.start(options, __doc__)
    mesh = common.fake_mesh(8)
    rounds = 20 if options.quick else 300
    for num_blocks, params_per_block in ((4, 4), (16, 12)):
        model, optimizer = trained(num_blocks, params_per_block, mesh)
        step = step_of(model, optimizer)

        def off(step: Callable[[], None] = step) -> float:
            return timed(step)

        def on(step: Callable[[], None] = step, model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> float:
            with watched(model, optimizer):
                step()
                step()  # these two are looked at closely
                return timed(step)

        samples = common.interleave({"off": off, "on": on}, rounds, warmup=5)
        calls = {"off": calls_during(step)[0]}
        with watched(model, optimizer):
            step()
            step()
            calls["on"] = calls_during(step)[0]
        shares = [on - off for on, off in zip(samples["on"], samples["off"], strict=True)]
        typical = common.Spread.of(samples["off"]).p50
        for unit, values in (
            ("of a step's calls", [calls["on"] / calls["off"] - 1]),
            ("of a step", [each / typical for each in shares]),
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
