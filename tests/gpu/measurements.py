"""Measurements: ours beside torch's FSDP2 in one process, and what the clock of ``benchmarks/step_clock.py`` said before."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn

import fsdp2
from fsdp2.planner.measure import measured_card
from fsdp2.testing.clock.cards import CARDS
from gpu.check import Setup, Skip, check
from gpu.device import Device

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def blocks(dim: int, num_blocks: int) -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)) for _ in range(num_blocks)])


def stepper(device: Device, package: Any, dim: int, num_blocks: int) -> Callable[[], float]:
    """A function that trains one step and returns its time in ms, the device's part included."""
    with torch.device(device.device):
        model = blocks(dim, num_blocks)
    policy = package.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = device.mesh()
    for module in [*model, model]:
        package.fully_shard(module, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(512 if device.is_cuda else 2, dim, device=device.device)

    def sample() -> float:
        device.synchronize()
        began = time.perf_counter()
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        device.synchronize()
        return (time.perf_counter() - began) * 1e3

    return sample


@check(
    "time and peak of a step, ours over torch's FSDP2",
    part=3,
    setups={"one device": Setup(), "all devices": Setup(ranks=0)},
    timeout_s=600,
    each={"host_bound": (256, 48), "large": (4096, 8)},
)
def step_time(device: Device, dim: int, num_blocks: int) -> dict[str, Any]:
    if not device.is_cuda:
        dim, num_blocks = 16, 2
    packages = {"ours": fsdp2, "torch": torch_fsdp}
    peaks, times = {}, {}
    for name, package in packages.items():
        sample = stepper(device, package, dim, num_blocks)
        for _ in range(5 if device.is_cuda else 1):
            sample()
        device.reset_peak()
        times[name] = [sample() for _ in range(30 if device.is_cuda else 2)]
        peaks[name] = device.peak_nbytes()
        del sample
    medians = {name: statistics.median(samples) for name, samples in times.items()}
    return {
        "ours_ms": medians["ours"],
        "torch_ms": medians["torch"],
        "time_ratio": medians["ours"] / medians["torch"],
        "peak_ratio": peaks["ours"] / max(peaks["torch"], 1),
    }


def from_script(name: str, *arguments: str) -> list[dict[str, Any]]:
    """The JSON lines of one of the benchmarks."""
    script = BENCHMARKS / f"{name}.py"
    if not script.exists():
        raise Skip(f"benchmarks/{name}.py, which this version does not have")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.jsonl"
        done = subprocess.run(
            [sys.executable, str(script), *arguments, "--json", str(path)], capture_output=True, text=True, timeout=500
        )
        if done.returncode != 0:
            raise RuntimeError(f"benchmarks/{name}.py ended with exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@check("transient memory, ours beside torch's FSDP2", part=3, timeout_s=600)
def transient_memory(device: Device) -> dict[str, Any]:
    device.needs_cuda("the allocator's own figures")
    return {"lines": from_script("transient_memory", "--device", "cuda", "--quick")}


@check("the card as the clock takes it: shares of the data sheet that it reaches", part=3, timeout_s=120)
def card_shares(device: Device) -> dict[str, Any]:
    """What ``matmul_share``, ``attention_share``, ``memory_share`` and ``launch_s`` of a card should be."""
    device.needs_cuda("a card to measure")
    measured = measured_card(device.device)
    sheet = next((card for name, card in CARDS.items() if name.split("-")[0].upper() in measured.name.upper()), None)
    figures = {"matmul_tflops": measured.flops["BFloat16"] / 1e12, "memory_tb_s": measured.memory_bandwidth / 1e12}
    figures |= {
        "to_host_gb_s": measured.to_host / 1e9,
        "kernel_us": measured.kernel_s * 1e6,
        "operator_us": measured.host.operator * 1e6,
    }
    if sheet is not None:
        figures |= {
            "matmul_share": measured.flops["BFloat16"] / sheet.flops["BFloat16"],
            "attention_share": measured.attention_share * measured.flops["BFloat16"] / sheet.flops["BFloat16"],
            "memory_share": measured.memory_bandwidth / sheet.memory_bandwidth,
            "to_host_share": measured.to_host / sheet.to_host,
        }
    return figures


@check("the clock's prediction, to hold against the times above", part=3, timeout_s=600)
def clock_prediction(device: Device) -> dict[str, Any]:
    device.needs_cuda("step times to hold it against")
    return {"lines": from_script("step_clock", "--rows", "dense", "host-bound", "--worlds", "1", "8", "--steps", "2")}
