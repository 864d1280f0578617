"""What do the offload tiers leave on the device, what do they keep on the host, and does the host wait in forward and backward?

    python benchmarks/offload.py            every row

Rank 0 of 8, the others modeled, on the pretend accelerator (docs/pretend_device.md), which counts bytes and the host's waits, and has
no times. Equal transformer blocks in fp32, AdamW, the third step. Bytes are in units of one rank's shard of the parameters, P, so that
a resident run keeps 3 (parameters and two moments) between steps; "files" are the most bytes of files in memory at a time.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import common  # noqa: F401  # first: it says which fsdp2 is measured
import models
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fsdp2
from fsdp2.mapped_file import READ_AHEAD
from fsdp2.optim import in_backward, offloaded
from fsdp2.testing import pretend

NUM_BLOCKS, DIM, WORLD = 8, 256, 8


class _Later:
    """Stands in place of the thread that steps, as if that were slow: on the pretend device, two host threads may block each other."""

    def submit(self, action: Callable[[Any], Any], argument: Any) -> Any:
        return SimpleNamespace(result=lambda: action(argument))


@dataclass(frozen=True)
class Row:
    """offload: of parameters and gradients; states: of optimizer states, None: an ordinary optimizer; tokens: many make activations"""

    offload: Callable[[str], Any] = lambda folder: None
    states: Callable[[str], Any] = lambda folder: None
    options: tuple[tuple[str, Any], ...] = ()
    activations: bool = False
    tokens: int = 16


def _host(folder: str) -> fsdp2.CPUOffloadPolicy:
    return fsdp2.CPUOffloadPolicy()


ROWS = {
    "resident": Row(),
    "resident, 512 tokens": Row(tokens=512),
    "activations on the host, 512 tokens": Row(tokens=512, activations=True),
    "states on the host, half": Row(states=_host, options=(("fraction", 0.5),)),
    "states on the host": Row(states=_host),
    "states on the host, steps in backward": Row(states=_host, options=(("step_in_backward", True),)),
    "parameters, gradients, states on the host": Row(offload=_host),
    "parameters and states in files, steps in backward": Row(
        offload=fsdp2.DiskOffloadPolicy, states=fsdp2.DiskOffloadPolicy, options=(("step_in_backward", True),)
    ),
}


@dataclass(frozen=True)
class Measured:
    """In units of P. kept, peak: on the device, between steps and at most; on_host: between backward and step; files: at most
    waits: of the host, in forward and backward; begun: parts whose step had begun when backward ended
    """

    row: str
    kept: float
    peak: float
    on_host: float
    files: float
    waits: int
    begun: int


def measure(name: str, row: Row, folder: str) -> Measured:
    torch.manual_seed(0)
    mesh = init_device_mesh(pretend.DEVICE_TYPE, (WORLD,))
    model = models.transformer_stack(NUM_BLOCKS, DIM).to(pretend.DEVICE_TYPE)
    if row.activations:
        fsdp2.apply_activation_offload(model, modules=["TransformerBlock"], min_nbytes=1 << 12)
    offload = row.offload(folder)
    for module in (*model.blocks, model):
        fsdp2.fully_shard(module, mesh=mesh, offload_policy=offload)
    unit = sum(_local(param).nbytes for param in model.parameters())
    states = row.states(folder)
    optimizer: Any = (
        torch.optim.AdamW(model.parameters()) if states is None else offloaded(torch.optim.AdamW, model, states, **dict(row.options))
    )
    x = torch.randn(1, row.tokens, DIM).to(pretend.DEVICE_TYPE)
    for _ in range(2):
        _backward(model, x)
        optimizer.step()
        optimizer.zero_grad()
    pretend.synchronize()
    gc.collect()
    READ_AHEAD.peak = 0
    kept = pretend.memory_stats()["allocated"] - x.nbytes
    torch.get_device_module(pretend.DEVICE_TYPE).reset_peak_memory_stats()
    pretend.reset_counts()
    _backward(model, x)
    waits = sum(pretend.host_waits().values())
    steps = getattr(optimizer, "_in_backward", None)
    begun = 0 if steps is None else len(steps._under_way)
    on_host = _on_host(model, optimizer, has_files=isinstance(offload, fsdp2.DiskOffloadPolicy), states=states)
    optimizer.step()
    peak = pretend.memory_stats()["peak"] - x.nbytes
    files = READ_AHEAD.peak + (optimizer.states.files.peak if isinstance(states, fsdp2.DiskOffloadPolicy) else 0)
    pretend.synchronize()
    return Measured(name, kept / unit, peak / unit, on_host / unit, files / unit, waits, begun)


def _backward(model: nn.Module, x: Tensor) -> None:
    model(x).square().mean().backward()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _on_host(model: nn.Module, optimizer: torch.optim.Optimizer, has_files: bool, states: Any) -> int:
    tensors = [] if has_files else list(model.parameters())
    tensors += [param.grad for param in model.parameters() if param.grad is not None]
    if not isinstance(states, fsdp2.DiskOffloadPolicy):
        tensors += [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
    return sum(local.nbytes for local in map(_local, tensors) if local.device.type == "cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--row", choices=list(ROWS), help="this one alone, as a JSON line")
    options = parser.parse_args()
    if options.row is not None:
        _measure_alone(options.row)
        return
    print("| | device, between steps | device, at most | host, behind backward | files in memory | waits | steps begun in backward |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name in ROWS:  # in a process each: nothing is left of another row
        done = subprocess.run([sys.executable, __file__, "--row", name], check=True, capture_output=True, text=True)
        each = Measured(**json.loads(done.stdout.splitlines()[-1]))
        nbytes = " | ".join(f"{value:.2f} P" for value in (each.kept, each.peak, each.on_host, each.files))
        print(f"| {name} | {nbytes} | {each.waits} | {each.begun} |", flush=True)


def _measure_alone(name: str) -> None:
    in_backward.ThreadPoolExecutor = lambda *args, **kwargs: _Later()  # type: ignore[assignment, misc]
    pretend.activate()
    dist.init_process_group(pretend.MODEL, store=dist.HashStore(), rank=0, world_size=WORLD)
    pretend.set_order(None)  # at once: an event has passed when it is asked, as on a device that keeps up
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(asdict(measure(name, ROWS[name], folder))))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
