"""Hybrid sharding, in a trainer class; on real machines, shards stay within a node."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
import fsdp2


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


class Trainer:
    # fsdp2: HYBRID_SHARD is "hsdp": a 2-D mesh of nodes and the LOCAL_WORLD_SIZE ranks of each;
    #   shard_size= or a 2-D mesh= says otherwise.
    def __init__(self, model: nn.Module, strategy: str = "hsdp"):
        mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("replicate", "shard"))
        # fsdp2: forward_prefetch=True dropped: the next group is always prefetched, in the order of the
        #   first iteration.
        # fsdp2: limit_all_gathers=True dropped: prefetch is bounded to the next group, without stopping the
        #   CPU.
        # fsdp2: device_id=torch.device("cpu") dropped: parallelize moves the model to the device of its
        #   mesh.
        # fsdp2: use_orig_params=True dropped: parameters always are the original ones, sharded.
        self.model: fsdp2.FSDPModule = fsdp2.parallelize(
            model,
            strategy=strategy,
            mesh=mesh,
            wrap=fsdp2.wrap.by_class(Layer),
            mp_policy=fsdp2.MixedPrecisionPolicy(reduce_dtype=torch.float32),
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def step(self, batch):
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.model(batch).square().mean()
        loss.backward()
        norm = fsdp2.clip_grad_norm_(self.model.parameters(), 0.5, norm_type=2.0)
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
