"""What do the ledger, a recording and a trace cost a step?

A small step: forward, backward and AdamW of tiny blocks on a fake process group of 8 ranks, all host and hardly any arithmetic, so that
each share is the largest that it can be. "off" is a step with none of them, "again" the same once more: how far two equal steps
are apart. "trace" is one without torch's profiler, which counts what is allocated. Python calls are exact; times need an idle machine.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import common
import models
import torch
from python_calls import calls_during
from torch import nn


def trained(num_blocks: int, params_per_block: int, mesh: object) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = models.tiny_stack(num_blocks, params_per_block)
    common.shard(model, model.blocks, common.OURS, mesh)  # type: ignore[arg-type]
    return model, torch.optim.AdamW(model.parameters())


@contextmanager
def written_down(how: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    import fsdp2

    with tempfile.TemporaryDirectory() as folder:
        if how == "ledger":
            with fsdp2.ledger(folder, model, optimizer):
                yield
        elif how == "record":
            with fsdp2.record(folder, model, optimizer):
                yield
        elif how == "trace":
            with fsdp2.trace(folder, allocations=False):
                yield
        else:
            yield


def main() -> None:
    options = common.parser(__doc__).parse_args()
    common.start(options, __doc__)
    mesh = common.fake_mesh(8)
    rounds = 10 if options.quick else 50
    for num_blocks, params_per_block in ((4, 4), (16, 12)):
        model, optimizer = trained(num_blocks, params_per_block, mesh)
        x = torch.randn(2, 16)

        def step(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer, x: torch.Tensor = x) -> None:
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        def timed(how: str, model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> Callable[[], float]:
            def run(step: Callable[[], None] = step) -> float:
                with written_down(how, model, optimizer):
                    for _ in range(3):  # in which it asks for what changes seldom
                        step()
                    begin = time.thread_time()
                    step()
                    return (time.thread_time() - begin) * 1e3

            return run

        samples = common.interleave({how: timed(how) for how in ("off", "again", "ledger", "record", "trace")}, rounds, warmup=5)
        for how in ("again", "ledger", "record", "trace"):
            with written_down(how, model, optimizer):
                for _ in range(3):
                    step()
                calls = {"off": 0, how: calls_during(step)[0]}
            calls["off"] = calls_during(step)[0]
            ratios = [on / off for on, off in zip(samples[how], samples["off"], strict=True)]
            result = common.Result.of(
                "inspector",
                how,
                f"{num_blocks} blocks of {params_per_block} parameters",
                "of a step",
                {common.OURS: ratios},
                None,
                calls=calls,
                step_ms=common.Spread.of(samples["off"]).p50,
            )
            common.report(result, options.json)


if __name__ == "__main__":
    main()
