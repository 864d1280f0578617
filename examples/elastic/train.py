"""A training that goes on after any of its ranks was killed: every step is kept in memory, every tenth saved on disk.

torchrun --standalone --nproc-per-node 2 --max-restarts 100 examples/elastic/train.py --folder runs/elastic --steps 200

torchrun starts all ranks again when one is lost. They load the newest checkpoint, with ``keep`` that of the last step or of the one
before it, and go on as if nothing had happened: model, optimizer and random numbers are those of that step.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp2
from fsdp2.checkpoint import Checkpointer


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=64)
    options = parser.parse_args()

    # torchrun's store keeps the addresses of the ranks that it has started before; a prefix hides those.
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store = dist.PrefixStore(f"start_{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    print(f"rank {rank} is process {os.getpid()}", flush=True)
    torch.manual_seed(0)
    layers = nn.Sequential(*(Block(options.width) for _ in range(4)), nn.Linear(options.width, 1))
    model = fsdp2.parallelize(layers, "zero3", wrap=fsdp2.wrap.by_class(Block))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + rank)  # dropout and data differ between ranks
    with Checkpointer(options.folder / "checkpoints", model, optimizer, memory=True) as checkpointer:
        resumed = checkpointer.load() if checkpointer.latest() else None
        first = resumed.step if resumed else 0
        if resumed and rank == 0:
            print(f"goes on after step {first} from {resumed.source}. {resumed.lost}", flush=True)
        for step in range(first + 1, options.steps + 1):
            x = torch.randn(16, options.width)
            loss = (model(x) - x.sin().sum(dim=1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 10 == 0:
                checkpointer.save(step)
            else:
                checkpointer.keep(step)
            dist.all_reduce(loss)
            if rank == 0:
                print(f"step {step}: loss {loss.item() / dist.get_world_size():.9f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
