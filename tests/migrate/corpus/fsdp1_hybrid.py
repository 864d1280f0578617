"""Hybrid sharding, in a trainer class; on real machines, shards stay within a node."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


class Trainer:
    def __init__(self, model: nn.Module, strategy: ShardingStrategy = ShardingStrategy.HYBRID_SHARD):
        mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("replicate", "shard"))
        self.model: FSDP = FSDP(
            model,
            sharding_strategy=strategy,
            device_mesh=mesh,
            auto_wrap_policy=ModuleWrapPolicy({Layer}),
            mixed_precision=MixedPrecision(reduce_dtype=torch.float32),
            forward_prefetch=True,
            limit_all_gathers=True,
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def step(self, batch):
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.model(batch).square().mean()
        loss.backward()
        norm = self.model.clip_grad_norm_(0.5, norm_type=2.0)
        self.optimizer.step()
        return loss.item(), norm.item()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    trainer = Trainer(nn.Sequential(*[Layer() for _ in range(3)]))
    torch.manual_seed(10 + dist.get_rank())
    for _ in range(3):
        loss, norm = trainer.step(torch.randn(4, 12))
        if dist.get_rank() == 0:
            print(f"loss {loss:.6f} norm {norm:.6f}", flush=True)
    dist.barrier()
    os._exit(0)


main()
