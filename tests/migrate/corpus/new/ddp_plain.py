"""The usual DDP script: train, save on rank 0, go on from there."""
import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
import fsdp2.checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_model_state_dict,
    set_optimizer_state_dict,
)


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
    model = fsdp2.parallelize(model, "ddp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    return model, optimizer


def train(model, optimizer, steps, rank):
    model.train()
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(torch.full((4, 6), 0.3 * (step + 1) + rank)).square().mean()
        loss.backward()
        norm = fsdp2.clip_grad_norm_(model.parameters(), 1.0)
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
    model_state = fsdp2.checkpoint.full_state_dict(model)
    optimizer_state = fsdp2.checkpoint.full_optimizer_state_dict(model, optimizer, by_name=True)
    if rank == 0:  # the others have the same
        # fsdp2: state by parameter name, not by number; a file that the old script wrote has numbers.
        torch.save({"model": model_state, "optimizer": optimizer_state}, path[0])
    dist.barrier()

    model, optimizer = make()
    checkpoint = torch.load(path[0], map_location="cpu", weights_only=True)
    set_model_state_dict(model, checkpoint["model"], options=StateDictOptions(full_state_dict=True))
    # fsdp2: state by parameter name, not by number; a file that the old script wrote has numbers:
    #   `fsdp2 convert OLD NEW --to torch` gives it names.
    set_optimizer_state_dict(model, optimizer, checkpoint["optimizer"], options=StateDictOptions(full_state_dict=True))
    train(model, optimizer, 2, rank)


if __name__ == "__main__":
    main()
    dist.barrier()
    os._exit(0)
