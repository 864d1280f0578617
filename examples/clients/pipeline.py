"""torch's pipeline parallelism over stages that are sharded: two stages by two data parallel ranks.

    torchrun --standalone --nproc_per_node 4 examples/clients/pipeline.py
    torchrun --standalone --nproc_per_node 1 examples/clients/pipeline.py       the whole model in one process, unsharded

Each rank keeps one of two stages, of which it stores half. ``Schedule1F1B`` runs four micro-batches through them. The last line that it
prints is the losses; one process and four print the same ones.
"""

from __future__ import annotations

import on_cpu
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import fsdp2

STEPS, WIDTH, LAYERS, MICRO_BATCHES = 6, 32, 4, 4


def whole_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)))


def batch(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(16, WIDTH, generator=draw)
    return x, x.roll(1, dims=1).sin()


def unsharded() -> list[float]:
    model = whole_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        x, y = batch(step)
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        fsdp2.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def pipelined() -> list[float]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (2, dist.get_world_size() // 2), mesh_dim_names=("pipeline", "data"))
    stage, replica = mesh["pipeline"].get_local_rank(), mesh["data"].get_local_rank()
    model = whole_model()[stage * LAYERS // 2 : (stage + 1) * LAYERS // 2].to(device)
    for layer in model:
        fsdp2.fully_shard(layer, mesh=mesh["data"], reshard_after_forward=False)  # gathered once for all micro-batches
    fsdp2.fully_shard(model, mesh=mesh["data"], reshard_after_forward=False)
    part = PipelineStage(model, stage, 2, torch.device(device), group=mesh["pipeline"].get_group())
    schedule = Schedule1F1B(part, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        x, y = (each.to(device).chunk(mesh["data"].size())[replica] for each in batch(step))
        of_micro_batches: list[Tensor] = []
        if stage == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=of_micro_batches)
        clip(model, mesh, 0.1)
        optimizer.step()
        optimizer.zero_grad()
        loss = torch.stack(of_micro_batches).mean().detach() if of_micro_batches else torch.zeros((), device=device)
        dist.all_reduce(loss)
        losses.append(loss.item() / mesh["data"].size())
    return losses


def clip(model: nn.Module, mesh: dist.DeviceMesh, max_norm: float) -> None:
    """Clip by the norm over both stages: each stage knows that of its own parameters."""
    total = fsdp2.get_total_norm([param.grad for param in model.parameters()]).square()
    dist.all_reduce(total, group=mesh["pipeline"].get_group())
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, total.sqrt())


def main() -> None:
    losses = pipelined() if dist.get_world_size() > 1 else unsharded()
    if dist.get_rank() == 0:
        print("losses", *losses, flush=True)


if __name__ == "__main__":
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    main()
    on_cpu.leave()
