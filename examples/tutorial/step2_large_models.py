"""Step 2: what a large model needs: a start without memory, bf16, micro-batches, clipping.

torchrun --nproc-per-node 2 examples/tutorial/step2_large_models.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from model import ByteModel, Text, next_byte_loss

import fsdp2


def sharded_model() -> ByteModel:
    """Build the model from the meta device: no rank ever holds the whole model."""
    policy = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with torch.device("meta"):
        model = ByteModel()
    for block in model.blocks:
        fsdp2.fully_shard(block, mp_policy=policy)
    fsdp2.fully_shard([model.norm, model.head], mp_policy=policy)  # they run together, at the end
    fsdp2.fully_shard(model, mp_policy=policy)
    torch.manual_seed(0)
    fsdp2.materialize(model)
    return model


def train_step(model: ByteModel, optimizer: torch.optim.Optimizer, batch: torch.Tensor, num_micro_batches: int = 2) -> torch.Tensor:
    """One update from ``batch``, which is worked on in pieces; returns this rank's mean loss."""
    micro_batches = batch.chunk(num_micro_batches)
    total = torch.zeros(())
    for index, micro_batch in enumerate(micro_batches):
        with fsdp2.accumulate(model, last=index == len(micro_batches) - 1):
            loss = next_byte_loss(model(micro_batch[:, :-1]), micro_batch) / len(micro_batches)
            loss.backward()
        total += loss.detach()
    fsdp2.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return total


def main(steps: int = 30) -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = sharded_model()
    optimizer = fsdp2.optim.flat(torch.optim.AdamW, model, lr=3e-3)
    text = Text()
    for step in range(steps):
        loss = train_step(model, optimizer, text.batch(step, 16, rank, world_size))
        dist.all_reduce(loss)
        if rank == 0:
            print(f"step {step:2d}  loss {loss.item() / world_size:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
