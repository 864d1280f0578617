"""The usual DDP script: train, save on rank 0, go on from there."""
import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
    model = DDP(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    return model, optimizer


def train(model, optimizer, steps, rank):
    model.train()
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(torch.full((4, 6), 0.3 * (step + 1) + rank)).square().mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if rank == 0:
            print(f"loss {loss.item():.6f} norm {norm.item():.6f}", flush=True)


def main():
    dist.init_process_group(backend="gloo")
    rank = dist.get_rank()
    path = [os.path.join(tempfile.mkdtemp(), "last.pt")]
    dist.broadcast_object_list(path)
    model, optimizer = make()
    train(model, optimizer, 2, rank)
    if rank == 0:  # the others have the same
        torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, path[0])
    dist.barrier()

    model, optimizer = make()
    checkpoint = torch.load(path[0], map_location="cpu", weights_only=True)
    model.module.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    train(model, optimizer, 2, rank)


if __name__ == "__main__":
    main()
    dist.barrier()
    os._exit(0)
