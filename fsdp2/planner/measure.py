"""``fsdp2 measure FILE``: a device card of this machine, measured by as many ranks as it has devices (two on a CPU).

Each rate is what a loop reaches, so that the card's shares are 1. Every number is the median of several rounds: on a machine that does
other work at the same time, they are this machine's with that work. What one host cannot show is taken from what it can: the bandwidth
between hosts is written as that inside of one, and is for the reader to edit.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ..arguments import PLACE, word_of
from ..testing.clock.cards import Card, HostCosts, Protocol
from ..torch_names import torch_collectives, torch_tensors
from .card_file import write_card

_ROUNDS = 7
_DTYPES = {"BFloat16": torch.bfloat16, "Half": torch.float16, "Float": torch.float32}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    said = "the card file to write, for --card of fsdp2 plan and fsdp2 search"
    parser.add_argument("file", type=word_of(PLACE, Path), metavar="FILE", help=said)


def run(options: argparse.Namespace) -> int:
    """Start ranks, one for each device, or two on a CPU, which measure and write the file. Returns: their exit status"""
    kind = torch_tensors.default_device_type()
    num_ranks = 2 if kind == "cpu" else torch.get_device_module(kind).device_count()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    command = [
        *torchrun,
        "-m",
        "fsdp2.planner.measure",
        str(options.file),
    ]  # no forks: this process may have asked the driver for its devices
    told = subprocess.DEVNULL if options.quiet else None
    return subprocess.run(command, env={"OMP_NUM_THREADS": "1"} | os.environ, stdout=told, check=False).returncode


def main(path: str) -> None:
    """One rank."""
    kind = torch_tensors.default_device_type()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device(kind) if kind == "cpu" else torch.device(kind, local_rank)
    if kind != "cpu":
        torch.get_device_module(kind).set_device(device)
    dist.init_process_group("gloo" if kind == "cpu" else None)
    card = measured_card(device)
    if dist.get_rank() == 0:
        write_card(card, Path(path))
        sys.stdout.write(f"{path}: {card.name}, {dist.get_world_size()} ranks\n")
    dist.barrier()
    dist.destroy_process_group()


def measured_card(device: torch.device) -> Card:
    """Measure ``device``, and the default process group. Collective: yes, over all ranks"""
    is_cpu = device.type == "cpu"
    size = 256 if is_cpu else 8192
    nbytes = (16 if is_cpu else 1024) << 20
    products = {name: _products(size, dtype, device) for name, dtype in _DTYPES.items()}
    flops = {name: rate for name, (rate, _) in products.items()}
    source, target = (torch.ones(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    host = torch.ones(nbytes, dtype=torch.uint8, device="cpu", pin_memory=not is_cpu)
    one = torch.ones(1, device=device)
    operator = _seconds(lambda: one.add_(1), device, times=100, waits=is_cpu)
    base, bandwidth, slowed = _collectives(device)
    memory_bandwidth = 2 * nbytes / _seconds(lambda: target.copy_(source), device)
    written = 2.0 * size * size  # bytes of a product in bf16
    kernel = 0.0 if is_cpu else _seconds(lambda: one.add_(1), device, times=100)
    return Card(
        name="CPU, measured" if is_cpu else f"{torch.get_device_module(device.type).get_device_name(device)}, measured",
        flops=flops,
        memory_bandwidth=memory_bandwidth,
        memory_nbytes=float(_memory_of(device)),
        inside=bandwidth,
        between=bandwidth,
        to_host=nbytes / _seconds(lambda: host.copy_(source), device),
        ranks_per_host=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        matmul_share=1.0,
        tile_writes=products["BFloat16"][1] * memory_bandwidth / written,
        collectives_take=slowed,
        is_measured=True,
        attention_share=min(_attention_flops(device) / flops["BFloat16"], 1.0),
        memory_share=1.0,
        link_share=1.0,
        kernel_s=kernel,
        protocols=(Protocol("measured", base_s=base, inside_s=0.0, between_s=0.0, share=1.0),),
        host=HostCosts(operator=operator),
    )


def _products(size: int, dtype: torch.dtype, device: torch.device) -> tuple[float, float]:
    """FLOP/s of square products for each further term, and the seconds that a product takes beyond its terms, for its tiles."""

    def seconds_of(terms: int) -> float:
        left, right = torch.ones(size, terms, dtype=dtype, device=device), torch.ones(terms, size, dtype=dtype, device=device)
        return _seconds(lambda: left @ right, device)

    few, many = seconds_of(size // 4), seconds_of(size)
    if many <= few:  # other work on the machine came between them
        return 2.0 * size**3 / many, 0.0
    rate = 2.0 * size * size * (size - size // 4) / (many - few)
    return rate, max(many - 2.0 * size**3 / rate, 0.0)


def _attention_flops(device: torch.device) -> float:
    """FLOP/s of causal attention, half of the square."""
    batch, heads, sequence, head = (1, 2, 256, 64) if device.type == "cpu" else (4, 16, 4096, 128)
    q, k, v = (torch.ones(batch, heads, sequence, head, dtype=torch.bfloat16, device=device) for _ in range(3))
    seconds = _seconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), device)
    return 4.0 * batch * heads * sequence * sequence * head / 2 / seconds


def _collectives(device: torch.device) -> tuple[float, float, float]:
    """Seconds of an all-gather of next to nothing, bytes/s of a rank in a large one, and the share of its speed that this takes from a
    product next to it (on a CPU 0: the threads of both share its cores, which ``flops`` has)."""
    world = dist.group.WORLD
    assert world is not None
    size = world.size()
    nbytes = (4 if device.type == "cpu" else 256) << 20

    def gather(numel: int) -> Callable[[], Any]:
        own = torch.ones(numel, dtype=torch.uint8, device=device)
        whole = torch.empty(numel * size, dtype=torch.uint8, device=device)
        return lambda: torch_collectives.all_gather_single(whole, own, world, True)

    small, whole = gather(16), gather(nbytes // size)
    base, large = (_seconds(lambda run=run: run().wait(), device) for run in (small, whole))  # type: ignore[misc]
    moved = nbytes * (size - 1) / size if size > 1 else 2.0 * nbytes
    return base, moved / max(large - base, 1e-9), 0.0 if device.type == "cpu" or size == 1 else _slowed(whole, large, device)


def _slowed(collective: Callable[[], Any], lasts: float, device: torch.device) -> float:
    """The share of its speed that a product loses while ``collective``, which alone takes ``lasts`` seconds, runs next to it."""
    left, right = (torch.ones(4096, 4096, dtype=torch.bfloat16, device=device) for _ in range(2))
    alone = _seconds(lambda: left @ right, device)
    times = math.ceil(2 * lasts / alone)  # so that the collective ends first

    def products(other: Callable[[], Any] = lambda: None) -> None:
        work = other()
        for _ in range(times):
            left @ right
        if work is not None:
            work.wait()

    apart, together = _seconds(products, device, times=1), _seconds(lambda: products(collective), device, times=1)
    return min(max((together - apart) / lasts, 0.0), 0.9)


def _memory_of(device: torch.device) -> int:
    if device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    properties: Any = torch.get_device_module(device.type).get_device_properties(device)
    return int(properties.total_memory)


def _seconds(run: Callable[[], object], device: torch.device, times: int = 3, waits: bool = True) -> float:
    """The median of one call's time. waits: for the device, after ``times`` calls; else it is the host's time to give them"""

    def synchronize() -> None:
        if device.type != "cpu":
            torch.get_device_module(device.type).synchronize(device)

    run()
    found = []
    for _ in range(_ROUNDS):
        synchronize()
        begin = time.perf_counter()
        for _ in range(times):
            run()
        if waits:
            synchronize()
        found.append((time.perf_counter() - begin) / times)
    return statistics.median(found)


if __name__ == "__main__":
    main(sys.argv[1])
