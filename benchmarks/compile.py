"""How much longer than the compiled plain model does a step take whose blocks are compiled and sharded, with gloo between processes?

``block.compile()`` on each transformer block, then ``fully_shard``, the same for upstream and ours; inductor. Wall time of the slowest
rank, forward and backward; the plain compiled model does the same work on each rank and exchanges nothing. In the same rounds the
models run without the compiler, for what compiling wins. Next to the times: seconds of the first step (kernels come from a cache that
a model of its own has filled before), graphs, breaks, graphs compiled after the second step, calls of collectives in a step, and the
most bytes that a step holds over parameters and optimizer.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import common
import gloo_step
import models
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

VOCAB_SIZE, LENGTH, DIM, NUM_BLOCKS, NUM_HEADS = 8192, 64, 512, 4, 8
TARGET = common.Target(0.65, 0.45)  # of gloo_step: compiling changes what is computed, not what is communicated
EAGER = " eager"
COLLECTIVES = (
    *("all_gather_into_tensor", "all_gather_single", "all_gather", "reduce_scatter_tensor", "reduce_scatter_single"),
    *("all_to_all_single", "all_to_all", "all_reduce", "broadcast"),
)


class Graphs:
    """A backend: inductor, counted."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        from torch._inductor.compile_fx import compile_fx

        self.count += 1
        return compile_fx(graph, inputs)


@functools.cache
def forward_of_its_own(name: str) -> types.FunctionType:
    """The compiler keeps what it compiled with the code: the models of one process must not find one another's."""
    forward: Any = models.TransformerBlock.forward
    return types.FunctionType(forward.__code__.replace(co_name=f"forward_{name}"), forward.__globals__)


def build(name: str, compiled: bool, mesh: Any, mixed: bool) -> tuple[nn.Module, Graphs]:
    torch.manual_seed(0)
    model = models.GPT(VOCAB_SIZE, LENGTH, DIM, NUM_BLOCKS, NUM_HEADS)
    graphs = Graphs()
    for block in model.blocks if compiled else ():
        block.forward = types.MethodType(forward_of_its_own(f"{name}_{mixed}"), block)
        block.compile(backend=graphs)
    return common.shard(model, model.blocks, common.PLAIN if name == "cache" else name, mesh, mixed=mixed), graphs


@contextlib.contextmanager
def counted_collectives() -> Iterator[list[int]]:
    """How often a collective of ``torch.distributed`` is called inside."""
    calls = [0]

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            return function(*args, **kwargs)

        return run

    with contextlib.ExitStack() as stack:
        for name in COLLECTIVES:
            if hasattr(dist, name):
                stack.enter_context(mock.patch.object(dist, name, counted(getattr(dist, name))))
        yield calls


def peak_mib(step: Callable[[], Any]) -> float:
    """The most MiB that ``step`` holds over its low before that, which is when gradients are gone; by the allocator's account."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    kineto: Any = profiler.profiler
    events = sorted((e.start_ns(), e.nbytes()) for e in kineto.kineto_results.events() if e.name() == "[memory]")
    held = lowest = peak = 0
    for _, nbytes in events:
        held += nbytes
        lowest = min(lowest, held)
        peak = max(peak, held - lowest)
    return peak / 2**20


def run_rank(rank: int, options: argparse.Namespace, directory: str) -> None:
    """One rank; rank 0 reports. Collective: yes, over the world."""
    from torch._dynamo.utils import counters

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{directory}/store", 2), rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    rounds = 5 if options.quick else 20
    tokens = torch.randint(VOCAB_SIZE, (1, 33), generator=torch.Generator().manual_seed(rank))
    for mixed in (False,) if options.quick else (False, True):
        functions: dict[str, Callable[[], float]] = {}
        losses: dict[str, list[float]] = {}
        built: dict[str, Graphs] = {}
        details: dict[str, Any] = {}
        gloo_step.stepper(build("cache", True, mesh, mixed)[0], tokens, [])()
        for name in options.implementations:
            for compiled in (True, False):
                key = name if compiled else name + EAGER
                model, built[key] = build(name, compiled, mesh, mixed)
                losses[key] = []
                functions[key] = gloo_step.stepper(model, tokens, losses[key])
                counters.clear()
                first_s = functions[key]() / 1e3
                functions[key]()
                graphs = built[key].count
                with counted_collectives() as calls:
                    functions[key]()
                details[key] = {
                    "first_step_s": first_s,
                    "graphs": graphs,
                    "breaks": sum(counters["graph_break"].values()),
                    "collectives": calls[0] - 2,  # less the all-reduces of the stepper itself
                    "peak_mib": min(peak_mib(functions[key]) for _ in range(2)),
                }
        samples = common.interleave(functions, rounds, warmup=1)
        for key, graphs_made in built.items():
            details[key]["recompiled"] = graphs_made.count - details[key]["graphs"]
            details[key]["step_ms"] = common.Spread.of(samples[key]).p50
            details[key]["last_loss"] = losses[key][-1]
        if rank == 0:
            report(samples, details, mixed, options)
        del functions, model
    dist.destroy_process_group()


def report(samples: common.Samples, details: dict[str, Any], mixed: bool, options: argparse.Namespace) -> None:
    for key, row in details.items():
        print("    " + key + ": " + "  ".join(f"{name} {value:.4g}" for name, value in row.items()))
    compiled = {name: values for name, values in samples.items() if not name.endswith(EAGER)}
    result = common.Result.of(
        "compile",
        "regional compile: gloo step over plain compiled, 2 ranks",
        "bf16, fp32 reduce" if mixed else "fp32",
        "ms",
        common.over_plain(compiled),
        TARGET,
        **details,
    )
    common.report(result, options.json)


def main() -> None:
    options = common.parser(__doc__).parse_args()
    common.start(options, __doc__)
    with tempfile.TemporaryDirectory() as directory:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{directory}/kernels"  # both ranks'
        torch.multiprocessing.spawn(run_rank, (options, str(Path(directory))), nprocs=2)


if __name__ == "__main__":
    main()
