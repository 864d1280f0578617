"""How long would a training step take on GPUs, by a model: ours and torch's FSDP2, the same trace and clock for both?

It is a model. docs/step_clock.md tells what it knows and what not, and how wrong it is where times have been published.

    python benchmarks/step_clock.py                         every row
    python benchmarks/step_clock.py --rows dense --worlds 8 --card h200
    python benchmarks/step_clock.py --published             torch's FSDP2 next to torchtitan's published step times

Each implementation trains on a device that computes nothing and logs all that it is given (``clock_device``). Above torch's
dispatcher the host's time is measured live, here (the thread's CPU time, medians over steps, both implementations in turn); what lies
below is a stated constant. A step lasts from the end of one to the end of the next, with no wait between them.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import clock_device as device
import common
import step_models
import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import OURS, UPSTREAM
from step_models import Shape, Transformer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from fsdp2.testing.clock.cards import CARDS, H100_96GB, Card, HostCosts
from fsdp2.testing.clock.costs import is_copy
from fsdp2.testing.clock.report import break_down
from fsdp2.testing.clock.timeline import Clock
from fsdp2.testing.clock.trace import Trace, steady

WORLDS = (1, 8, 64, 512)


@dataclass(frozen=True)
class Row:
    """The model, and how it is trained. change: applied to the model before it is sharded"""

    shape: Shape
    batch: int = 1
    sequence: int = 8192
    change: Callable[[nn.Module], None] = lambda model: None
    recompute: Literal["selectively", "wholly", "not"] = "selectively"
    hsdp: bool = False
    offload: bool = False
    prefetch: int = 0
    reduce_dtype: torch.dtype = torch.float32
    blocks_per_unit: int = 1
    target: float = 1.0
    worlds: tuple[int, ...] = WORLDS
    fused: bool = True
    norms_apart: bool = False
    """Upstream wants one storage dtype a unit, so its users shard the norms of a block as a unit of their own; which it cannot
    recompute selectively."""


ROWS = {
    "dense": Row(step_models.LLAMA_8B),
    "dense, prefetch 2 deep": Row(step_models.LLAMA_8B, prefetch=2),
    "dense, HSDP": Row(step_models.LLAMA_8B, hsdp=True, worlds=(64, 512)),
    "dense, offload": Row(step_models.LLAMA_8B, offload=True, worlds=(64, 512)),
    "dense, short": Row(step_models.LLAMA_8B, sequence=1024),
    "dense, short, prefetch 2 deep": Row(step_models.LLAMA_8B, sequence=1024, prefetch=2, worlds=(512,)),
    "dense, short, two blocks per unit": Row(step_models.LLAMA_8B, sequence=1024, blocks_per_unit=2, worlds=(512,)),
    "dense, short, bf16 reduction": Row(step_models.LLAMA_8B, sequence=1024, reduce_dtype=torch.bfloat16, worlds=(512,)),
    "dense, short, HSDP": Row(step_models.LLAMA_8B, sequence=1024, hsdp=True, worlds=(512,)),
    "mixed dtypes": Row(step_models.LLAMA_8B, change=step_models.store_in_two_dtypes, norms_apart=True, recompute="wholly", target=0.9),
    "experts": Row(step_models.EXPERTS, sequence=4096, target=0.9, worlds=(1, 8, 64)),  # upstream cannot cut 1408 rows into 512
    "float8 gathers": Row(step_models.LLAMA_8B, change=step_models.gather_in_float8, target=0.9),
    "host-bound": Row(step_models.SMALL, sequence=256, recompute="not", target=0.7, worlds=(1, 8, 64)),
}


# torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3, without torch.compile: tokens a second and GPU by GPUs.
PUBLISHED = {8: 5762, 128: 5605}
PUBLISHED_BATCH, PUBLISHED_SEQUENCE = 2, 8192
PUBLISHED_ROW = Row(step_models.LLAMA_8B, PUBLISHED_BATCH, PUBLISHED_SEQUENCE, fused=False)


def sharded(row: Row, implementation: str, mesh: Any) -> Any:
    """The row's model, on the mesh's device."""
    package = common.package_of(implementation)
    options: dict[str, Any] = {"mesh": mesh}
    options["mp_policy"] = package.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=row.reduce_dtype)
    if row.offload:
        options["offload_policy"] = package.CPUOffloadPolicy()
    with torch.device("meta"):
        model = Transformer(row.shape)
    row.change(model)
    shards = mesh.size(-1)

    def place(parameter: nn.Parameter) -> Shard | None:  # fewer experts than ranks: cut each expert
        return Shard(1) if parameter.ndim == 3 and parameter.size(0) < shards else None

    experts = {"shard_placement_fn": place} if row.shape.experts else {}
    blocks = list(model.blocks)
    if row.recompute != "not":
        step_models.recompute_blocks(model, row.recompute == "selectively")
    for block in blocks:
        if row.norms_apart and implementation == UPSTREAM:
            package.fully_shard([block.attention_norm, block.ffn_norm], **options)
    together = row.blocks_per_unit
    blocks_of_units = (
        list(model.blocks) if together == 1 else [list(model.blocks[at : at + together]) for at in range(0, len(blocks), together)]
    )
    units = [model.tokens, *blocks_of_units, *([model.output] if row.norms_apart else [[model.norm, model.output]])]
    for unit in units:
        package.fully_shard(unit, **options, **experts)
    package.fully_shard(model, **options)
    if row.prefetch:
        heads = [unit[0] if isinstance(unit, list) else unit for unit in units]
        for index, head in enumerate(heads):
            head.set_modules_to_forward_prefetch(heads[index + 1 : index + 1 + row.prefetch])
            head.set_modules_to_backward_prefetch(heads[max(0, index - row.prefetch) : index][::-1])
    model.to_empty(device="cpu" if row.offload else device.DEVICE_TYPE)
    return model


class Training:
    """One implementation under training; the traces of its construction and of every step, in order."""

    def __init__(self, row: Row, implementation: str, mesh: Any) -> None:
        self.row = row
        with device.logged() as build:
            self.model = sharded(row, implementation, mesh)
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=row.fused, foreach=not row.fused)
            self.tokens = torch.zeros(row.batch, row.sequence, dtype=torch.long, device=device.DEVICE_TYPE)
            head = row.shape.dim // row.shape.heads
            self.rotary = torch.zeros(row.sequence, 1, head // 2, dtype=torch.complex64, device=device.DEVICE_TYPE)
        self.traces = [build]

    def step(self) -> None:
        """Forward, backward, clipping and optimizer; with offload, the first two, for the others run on the CPU."""
        with device.logged() as trace:
            device.mark("forward")
            logits = self.model(self.tokens, self.rotary)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), self.tokens.flatten())
            del logits
            device.mark("backward")
            loss.backward()
            if not self.row.offload:
                device.mark("clip")
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                device.mark("optimizer")
                self.optimizer.step()
            self.optimizer.zero_grad()
        self.traces.append(trace)


def clocked(traces: list[Trace], card: Card) -> dict[str, Any]:
    """Figures of the last step. The first two traces are the construction and a first step; later ones take each other's medians."""
    clock = Clock(card, traces[-1].groups)
    build, first, *later = traces
    clock.run(build.entries)
    clock.allocator.empty_cache()
    clock.run(first.entries)
    *others, last = steady(later)
    for step in others:
        clock.run(step.entries)
    begin, num_spans, segments = clock.end, len(clock.spans), clock.allocator.segments
    clock.host_works.clear()
    clock.allocator.reset_peak()
    clock.run(last.entries)
    ran = clock.spans[num_spans:]
    parts = break_down(ran, begin, clock.end)
    allocator = clock.allocator
    moved = [span for span in ran if is_copy(span.entry)]

    def ms(by_phase: dict[str, float]) -> dict[str, float]:
        return {phase: seconds * 1e3 for phase, seconds in by_phase.items()}

    return {
        "step_ms": (clock.end - begin) * 1e3,
        "captured_ms": captured_seconds(traces, card) * 1e3,
        "host_ms": ms(clock.host_works),
        "computing_ms": parts.computing * 1e3,
        "exposed_ms": ms(parts.exposed),
        "packing_ms": parts.waiting * 1e3,
        "idle_ms": parts.idle * 1e3,
        "idle_gaps": parts.gaps,
        "launches": len(ran),
        "collectives": sum(span.entry.kind == "collective" for span in ran),
        "copies": len(moved),
        "copies_ms": sum(span.stop - span.start for span in moved) * 1e3,
        "host_waits": sum(entry.kind.startswith("host waits") for entry in last.entries),
        "peak_gib": allocator.peak_allocated / 2**30,
        "reserved_gib": allocator.peak_reserved / 2**30,
        "fragmentation": 1 - allocator.peak_allocated / allocator.peak_reserved,
        "new_segments": allocator.segments - segments,
        "fits": allocator.peak_reserved <= card.memory_nbytes,
    }


def captured_seconds(traces: list[Trace], card: Card) -> float:
    """The last step as a replayed graph: the same work, between which the host takes no time."""
    clock = Clock(replace(card, host=HostCosts(0.0, 0.0, 0.0, 0.0, 0.0), launch_s=0.0), traces[-1].groups)
    begin = 0.0
    for trace in traces:
        begin = clock.end
        clock.run(replace(entry, host_s=0.0) for entry in trace.entries)
    return clock.end - begin


def measure(name: str, row: Row, world: int, card: Card, steps: int) -> dict[str, Any]:
    """One row at one world size: the figures of each implementation."""
    dist.init_process_group(device.BACKEND, store=dist.HashStore(), rank=0, world_size=world)
    if row.hsdp:
        mesh = init_device_mesh(device.DEVICE_TYPE, (world // 8, 8), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh(device.DEVICE_TYPE, (world,))
    trainings = {each: Training(row, each, mesh) for each in (UPSTREAM, OURS)}
    gc.collect()
    gc.disable()
    for _ in range(steps + 2):
        for training in trainings.values():
            training.step()
    gc.enable()
    figures = {each: clocked(training.traces, card) for each, training in trainings.items()}
    dist.destroy_process_group()
    return {"row": name, "world": world, "card": card.name, "target": row.target, **figures}


def line_of(result: dict[str, Any]) -> str:
    """One row of the table: upstream / ours where both are shown."""

    def pair(figure: Callable[[dict[str, Any]], float], digits: int) -> str:
        return f"{figure(result[UPSTREAM]):.{digits}f} / {figure(result[OURS]):.{digits}f}"

    def ratio(figure: str) -> float:
        return result[OURS][figure] / result[UPSTREAM][figure]

    def exposed(one: dict[str, Any]) -> str:
        return "+".join(f"{one['exposed_ms'].get(phase, 0):.1f}" for phase in ("forward", "backward", "clip"))

    cells = [
        result["row"] + ("" if result[OURS]["fits"] else " (does not fit)"),
        str(result["world"]),
        pair(lambda one: one["step_ms"], 1),
        f"{ratio('step_ms'):.3f}" + ("" if ratio("step_ms") <= result["target"] else f" MISSED {result['target']:g}"),
        f"{exposed(result[UPSTREAM])} / {exposed(result[OURS])}",
        pair(lambda one: one["captured_ms"], 1),
        pair(lambda one: one["packing_ms"], 1),
        pair(lambda one: one["idle_ms"], 1),
        pair(lambda one: sum(one["host_ms"].values()), 0),
        pair(lambda one: one["launches"], 0),
        pair(lambda one: one["collectives"], 0),
        pair(lambda one: one["copies_ms"], 1),
        pair(lambda one: one["peak_gib"], 2),
        f"{ratio('peak_gib'):.2f}" + ("" if ratio("peak_gib") <= 0.85 else " MISSED 0.85"),
        pair(lambda one: 100 * one["fragmentation"], 0),
    ]
    return "| " + " | ".join(cells) + " |"


HEAD = (
    "| row | world | step, ms | ratio | exposed: forward+backward+clip, ms | captured, ms | waiting for copies, ms | idle, ms "
    "| host, ms | launches | collectives | copies, ms | peak, GiB | ratio | fragmentation, % |\n" + "| --- " * 15 + "|"
)


def published_line(result: dict[str, Any]) -> str:
    """The model's times for upstream against published ones, in tokens a second and GPU."""
    modeled = PUBLISHED_BATCH * PUBLISHED_SEQUENCE / result[UPSTREAM]["step_ms"] * 1e3
    measured = PUBLISHED[result["world"]]
    error = f"{modeled / measured - 1:+.0%}"
    peak = f"peak {result[UPSTREAM]['peak_gib']:.1f} GiB"
    return f"  world {result['world']}: modeled {modeled:.0f} tokens/s, published {measured}: {error}; {peak}"


def main() -> None:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    arguments.add_argument("--worlds", nargs="+", type=int, default=list(WORLDS))
    arguments.add_argument("--card", choices=CARDS, default="h100")
    arguments.add_argument("--steps", type=int, default=5, help="that are measured")
    arguments.add_argument("--json", type=Path, help="also append a JSON line a row to this file")
    arguments.add_argument("--published", action="store_true", help="torch's FSDP2 against published step times, instead of the rows")
    arguments.add_argument("--bare", action="store_true", help="without a heading")
    options = arguments.parse_args()
    if not options.bare:
        print((__doc__ or "").splitlines()[0])
        print("  " + "  ".join(f"{name}={value}" for name, value in common.environment().items()))
        print("" if options.published else HEAD, flush=True)
    if len(options.rows) > 1 and not options.published:  # a process for each: addresses are not used again, and there are 2**45
        for name in options.rows:
            passed_on = ["--bare", "--rows", name, "--worlds", *map(str, options.worlds), "--card", options.card]
            passed_on += ["--steps", str(options.steps), *(["--json", str(options.json)] if options.json else [])]
            subprocess.run([sys.executable, __file__, *passed_on], check=True)
        return
    device.activate()
    torch.set_num_threads(1)
    if options.published:
        for world in PUBLISHED:
            result = measure("published", PUBLISHED_ROW, world, H100_96GB, options.steps)
            print(published_line(result))
            print(json.dumps(result), flush=True)
        return
    for name in options.rows:
        for world in options.worlds:
            if world not in ROWS[name].worlds:
                continue
            result = measure(name, ROWS[name], world, CARDS[options.card], options.steps)
            print(line_of(result), flush=True)
            if options.json is not None:
                with options.json.open("a") as file:
                    file.write(json.dumps(result | {"environment": common.environment()}) + "\n")


if __name__ == "__main__":
    main()
