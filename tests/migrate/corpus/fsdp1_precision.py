"""Several precisions, in a dataclass of settings whose strategy is named on the command line."""
import dataclasses
import os
from typing import Optional

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

PRECISIONS = {
    "fp32": None,
    "bf16": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True),
    "comm": MixedPrecision(reduce_dtype=torch.bfloat16, keep_low_precision_grads=False),
    "none": MixedPrecision(param_dtype=torch.bfloat16, cast_root_forward_inputs=False),
}


@dataclasses.dataclass
class Settings:
    precision: Optional[MixedPrecision]
    strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD
    lr: float = 0.1


def wrap_model(net: nn.Module, settings: Settings) -> FSDP:
    return FSDP(
        net,
        mixed_precision=settings.precision,
        sharding_strategy=settings.strategy,
        device_id=torch.device("cpu"),
    )


dist.init_process_group("gloo")
for name in ("fp32", "bf16", "comm"):
    torch.manual_seed(0)
    settings = Settings(precision=PRECISIONS[name], strategy=ShardingStrategy[os.environ.get("STRATEGY", "FULL_SHARD")])
    model = wrap_model(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr)
    torch.manual_seed(dist.get_rank())
    for _ in range(2):
        loss = model(torch.randn(4, 8)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"{name} loss {loss.item():.6f}", flush=True)
dist.barrier()
os._exit(0)
