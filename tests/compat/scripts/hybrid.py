"""HYBRID_SHARD: sharded among the ranks of a node, replicated between nodes, on a 2-D mesh; and accumulation with ``no_sync``."""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.up = nn.Linear(dim, 3 * dim)
        self.down = nn.Linear(3 * dim, dim)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self, dim=5, num_blocks=3):
        super().__init__()
        self.embed = nn.Linear(8, dim)
        self.blocks = nn.ModuleList([Block(dim) for _ in range(num_blocks)])
        self.head = nn.Linear(dim, 4)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main(device, strategy=ShardingStrategy.HYBRID_SHARD):
    torch.manual_seed(0)
    device_mesh = init_device_mesh(device.type, (2, dist.get_world_size() // 2))
    model = FSDP(
        Model(),
        sharding_strategy=strategy,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_mesh=device_mesh,
        device_id=device,
        use_orig_params=True,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    losses = []
    for _ in range(4):
        x = torch.randn(2, 6, 8, generator=generator).to(device)
        with model.no_sync():
            model(x[0]).square().mean().backward()
        loss = model(x[1]).square().mean()
        loss.backward()
        model.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    dist.init_process_group()
    print(main(torch.device("cpu")))
