"""What every benchmark shares: choosing an implementation, sampling fairly, and writing a result down.

It knows nothing of what is measured. Three implementations go by name: ``plain`` is the model untouched, ``upstream`` is
``torch.distributed.fsdp``, ``ours`` is ``fsdp2``. A script builds one model for each, in one process, and takes its
samples in turns, so that a slow moment of the machine falls on all of them.

Example: host times of 1.0 (plain), 5.0 (upstream) and 2.0 ms (ours) in one round are overheads of 4.0 and 1.0 ms, ratio 0.25.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: its thread pool is sized once

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))  # measure this checkout, not an fsdp2 that happens to be installed

PLAIN, UPSTREAM, OURS = "plain", "upstream", "ours"
_PACKAGES = {UPSTREAM: "torch.distributed.fsdp", OURS: "fsdp2"}


def package_of(implementation: str) -> ModuleType:
    """The package whose ``fully_shard`` and policies ``implementation`` uses; ``plain`` has none."""
    return importlib.import_module(_PACKAGES[implementation])


def shard(
    model: nn.Module,
    units: Iterable[nn.Module],
    implementation: str,
    mesh: DeviceMesh,
    *,
    mixed: bool = False,
) -> nn.Module:
    """Apply ``implementation`` to each of ``units``, then to ``model``, in place, and return ``model``.

    mixed: bf16 parameters and fp32 reduction. ``plain`` then becomes a bf16 model, so that computing costs all the same.
    """
    if implementation == PLAIN:
        return model.bfloat16() if mixed else model
    package = package_of(implementation)
    options: dict[str, Any] = {"mesh": mesh}
    if mixed:
        options["mp_policy"] = package.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for unit in units:
        package.fully_shard(unit, **options)
    package.fully_shard(model, **options)
    return model


def fake_mesh(world_size: int, device: str = "cpu") -> DeviceMesh:
    """A mesh of ``world_size`` ranks in this process alone; its collectives move (almost) no data and mean nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    return init_device_mesh(device, (world_size,))


# -- samples ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and the 10th and 90th percentile of ``n`` samples."""

    p50: float
    p10: float
    p90: float
    n: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0], 1)
        deciles = statistics.quantiles(samples, n=10, method="inclusive")
        return cls(statistics.median(samples), deciles[0], deciles[8], len(samples))


def slowest_rank(function: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> Callable[[], float]:
    """A sample of what ``function`` takes on the slowest rank, in ms of ``clock``: ``time.process_time`` counts all threads.

    Collective: yes, over the world
    """

    def sample() -> float:
        dist.barrier()
        begin = clock()
        function()
        spent = torch.tensor((clock() - begin) * 1e3)
        dist.all_reduce(spent, op=dist.ReduceOp.MAX)
        return spent.item()

    return sample


def on_ranks(run_rank: Callable[[int, argparse.Namespace, str], None], options: argparse.Namespace) -> None:
    """``run_rank(rank, options, directory)`` in ``options.world`` processes, which share the directory until all have ended."""
    with tempfile.TemporaryDirectory() as directory:
        torch.multiprocessing.spawn(run_rank, (options, directory), nprocs=options.world)


Samples = dict[str, list[float]]


def interleave(functions: Mapping[str, Callable[[], float]], rounds: int, warmup: int) -> Samples:
    """``rounds`` samples of every function, one of each a round, who goes first changing; no garbage collection inside.

    Each function returns its own sample, so it decides what belongs to the measured time.
    """
    samples: Samples = {name: [] for name in functions}
    names = list(functions)
    gc.collect()
    gc.disable()
    try:
        for index in range(-warmup, rounds):
            first = index % len(names)
            for name in names[first:] + names[:first]:
                value = functions[name]()
                if index >= 0:
                    samples[name].append(value)
            gc.collect()
    finally:
        gc.enable()
    return samples


def over_plain(samples: Samples, divisor: float = 1.0) -> Samples:
    """Every sample less the plain model's sample of the same round, divided; ``plain`` itself drops out."""
    return {
        name: [(value - plain) / divisor for value, plain in zip(values, samples[PLAIN], strict=True)]
        for name, values in samples.items()
        if name != PLAIN
    }


# -- results ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Target:
    """Upper bounds: to be met, and the stretch; on the ratio ours / upstream, or on our own value."""

    bound: float
    stretch: float | None = None
    of: str = "ratio"


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the table: one figure, for one case, of every implementation that ran."""

    benchmark: str
    figure: str
    case: str
    unit: str
    spreads: dict[str, Spread]
    ratio: Spread | None
    target: Target | None
    details: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        benchmark: str,
        figure: str,
        case: str,
        unit: str,
        samples: Samples,
        target: Target | None = None,
        **details: Any,
    ) -> Result:
        """Summarize ``samples``, whose rounds are paired. The ratio's p50 is the ratio of the medians, which noise moves
        less; its p10 and p90 are those of the rounds' own ratios. No ratio where the target is one on our own value."""
        spreads = {name: Spread.of(values) for name, values in samples.items()}
        ratio = None
        if OURS in samples and UPSTREAM in samples and (target is None or target.of == "ratio"):
            rounds = Spread.of([ours / upstream for ours, upstream in zip(samples[OURS], samples[UPSTREAM], strict=True)])
            ratio = Spread(spreads[OURS].p50 / spreads[UPSTREAM].p50, rounds.p10, rounds.p90, rounds.n)
        return cls(benchmark, figure, case, unit, spreads, ratio, target, details)

    @classmethod
    def from_json(cls, line: str) -> Result:
        record = json.loads(line)
        record.pop("environment", None)
        record["spreads"] = {name: Spread(**spread) for name, spread in record["spreads"].items()}
        record["ratio"] = Spread(**record["ratio"]) if record["ratio"] else None
        record["target"] = Target(**record["target"]) if record["target"] else None
        return cls(**record)

    def verdict(self) -> str:
        """``stretch``, ``met``, ``MISSED``; empty where there is no target or nothing to judge."""
        if self.target is None:
            return ""
        judged = self.ratio if self.target.of == "ratio" else self.spreads.get(OURS)
        if judged is None:
            return ""
        if self.target.stretch is not None and judged.p50 <= self.target.stretch:
            return "stretch"
        return "met" if judged.p50 <= self.target.bound else "MISSED"


@functools.cache
def environment() -> dict[str, Any]:
    """Device, commit and versions: what a reader needs to repeat the numbers."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(REPOSITORY), *arguments], capture_output=True, text=True, check=False)
        return done.stdout.strip()

    processor = platform.processor() or platform.machine()
    if (cpuinfo := Path("/proc/cpuinfo")).exists():
        models = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        processor = models[0] if models else processor
    device = f"{processor}, {os.cpu_count()} cores"
    if torch.cuda.is_available():
        device += f"; {torch.cuda.get_device_name()}"
    dirty = "+changes" if git("status", "--porcelain", "--untracked-files=no") else ""
    return {
        "device": device,
        "commit": (git("rev-parse", "--short", "HEAD") or "none") + dirty,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
    }


def parser(description: str | None) -> argparse.ArgumentParser:
    """The arguments that every script has; ``description`` is its docstring, whose first line is the question."""
    arguments = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    arguments.add_argument("--quick", action="store_true", help="fewer and smaller samples")
    arguments.add_argument("--json", type=Path, help="also append the JSON lines to this file")
    arguments.add_argument(
        "--implementations",
        nargs="+",
        choices=[PLAIN, UPSTREAM, OURS],
        default=[PLAIN, UPSTREAM, OURS],
        help="what to run; the figures need 'plain'",
    )
    return arguments


def start(options: argparse.Namespace, description: str | None) -> None:
    """Print the question and where it is asked, and make the process a quiet one."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # a fake gather leaves odd values behind; denormals would be timed as work
    print((description or "").splitlines()[0])
    print("  " + "  ".join(f"{name}={value}" for name, value in environment().items()), flush=True)
    for implementation in options.implementations:
        if implementation != PLAIN:
            package_of(implementation)  # an implementation that cannot be imported fails here, before anything is measured


def report(result: Result, json_file: Path | None) -> None:
    """Print one line for people and one for programs; append the latter to ``json_file``."""
    parts = [
        f"{name} p50 {_number(spread.p50)} (p10-p90 {_number(spread.p10)}-{_number(spread.p90)})"
        for name, spread in result.spreads.items()
    ]
    if result.ratio is not None:
        parts.append(f"ratio {result.ratio.p50:.2f} ({result.ratio.p10:.2f}-{result.ratio.p90:.2f})")
    count = next(iter(result.spreads.values())).n
    print(f"  {result.figure}, {result.case} [{result.unit}]   " + "   ".join(parts) + f"   n={count}   {result.verdict()}")
    line = json.dumps(asdict(result) | {"environment": environment()})
    print(line, flush=True)
    if json_file is not None:
        with json_file.open("a") as file:
            file.write(line + "\n")


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def table(results: Sequence[Result]) -> str:
    """All results under one heading, a row each."""
    rows = [("figure", "case", "ours", "upstream", "unit", "ratio (p10-p90)", "target (stretch)", "")]
    for result in results:
        ours, upstream = result.spreads.get(OURS), result.spreads.get(UPSTREAM)
        ratio, target = result.ratio, result.target
        wanted = ""
        if target is not None:
            suffix = "x" if target.of == "ratio" else f" {result.unit}"
            wanted = f"{target.bound:g}{suffix}" + (f" ({target.stretch:g}{suffix})" if target.stretch is not None else "")
        rows.append(
            (
                result.figure,
                result.case,
                _number(ours.p50) if ours else "-",
                _number(upstream.p50) if upstream else "-",
                result.unit,
                f"{ratio.p50:.2f} ({ratio.p10:.2f}-{ratio.p90:.2f})" if ratio else "-",
                wanted,
                result.verdict(),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])
