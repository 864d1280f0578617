"""A training loop on Lightning Fabric's ModelParallelStrategy, as one writes it for torch. No line knows fsdp2:

    torchrun --standalone --nproc_per_node 2 -m fsdp2.run examples/clients/fabric_loop.py       on fsdp2
    torchrun --standalone --nproc_per_node 2 examples/clients/fabric_loop.py                    on torch's FSDP2

The first of two micro-batches keeps its gradients (``no_backward_sync``), the second reduces them. After half of the steps
``fabric.save`` writes a checkpoint, the parameters are spoilt, and ``fabric.load`` brings them back. The last line is all losses.
"""

from __future__ import annotations

import tempfile

import on_cpu
import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

STEPS = 6


def parallelize(model: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    for block in model:
        fully_shard(block, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


def main() -> None:
    devices = torch.cuda.device_count() or 2
    strategy = ModelParallelStrategy(parallelize, data_parallel_size=devices, tensor_parallel_size=1)
    fabric = Fabric(accelerator="auto", devices=devices, strategy=strategy)
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    with fabric.init_module(empty_init=True):
        model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 1))
    model = fabric.setup(model)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    assert isinstance(model.module, FSDPModule)

    draw = torch.Generator().manual_seed(fabric.global_rank)
    folder = fabric.broadcast(tempfile.mkdtemp())
    losses = []
    for step in range(STEPS):
        if step == STEPS // 2:
            state = {"model": model, "optimizer": optimizer}
            fabric.save(folder, state)
            with torch.no_grad():
                for param in model.parameters():
                    param.zero_()
            fabric.load(folder, state)
        for micro_batch in range(2):
            x = torch.randn(4, 8, generator=draw).to(fabric.device)
            with fabric.no_backward_sync(model, enabled=micro_batch == 0):
                loss = nn.functional.mse_loss(model(x), x.square().sum(1, keepdim=True)) / 2
                fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(fabric.all_reduce(loss.detach()).item())
    if fabric.global_rank == 0:
        print("losses", *losses, flush=True)


if __name__ == "__main__":
    main()
    on_cpu.leave()
