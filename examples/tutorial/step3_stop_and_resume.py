"""Step 3: stop, and go on with another number of ranks.

torchrun --nproc-per-node 2 examples/tutorial/step3_stop_and_resume.py --stop-at 10 --folder runs/tutorial
torchrun --nproc-per-node 3 examples/tutorial/step3_stop_and_resume.py --folder runs/tutorial
"""

from __future__ import annotations

import argparse

import torch.distributed as dist
from model import Text
from step2_large_models import sharded_model, train_step
from torch.optim import AdamW

from fsdp2.checkpoint import Checkpointer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    parser.add_argument("--stop-at", type=int, default=20)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = sharded_model()
    optimizer = AdamW(model.parameters(), lr=3e-3)
    checkpointer = Checkpointer(options.folder, model, optimizer)
    first = checkpointer.load().step if checkpointer.latest() else 0
    text = Text()
    for step in range(first, options.stop_at):
        loss = train_step(model, optimizer, text.batch(step, 12, rank, world_size))
        dist.all_reduce(loss)
        if rank == 0:
            print(f"step {step:2d}  loss {loss.item() / world_size:.4f}")
    checkpointer.save(step=options.stop_at)
    checkpointer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
