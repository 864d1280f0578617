"""Several precisions, in a dataclass of settings whose strategy is named on the command line."""
import dataclasses
import os
from typing import Optional

import torch
import torch.distributed as dist
from torch import nn
import fsdp2

PRECISIONS = {
    "fp32": None,
    "bf16": fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "comm": fsdp2.MixedPrecisionPolicy(reduce_dtype=torch.bfloat16),
    "none": fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, cast_forward_inputs=False),
}


@dataclasses.dataclass
class Settings:
    precision: Optional[fsdp2.MixedPrecisionPolicy]
    strategy: str = "zero3"
    lr: float = 0.1


def wrap_model(net: nn.Module, settings: Settings) -> fsdp2.FSDPModule:
    # fsdp2: device_id=torch.device("cpu") dropped: parallelize moves the model to the device of its
    #   mesh.
    return fsdp2.parallelize(
        net,
        wrap=None,
        mp_policy=settings.precision or fsdp2.MixedPrecisionPolicy(),
        strategy=settings.strategy or "zero3",
    )


dist.init_process_group("gloo")
for name in ("fp32", "bf16", "comm"):
    torch.manual_seed(0)
    settings = Settings(precision=PRECISIONS[name], strategy={"FULL_SHARD": "zero3", "SHARD_GRAD_OP": "zero2", "NO_SHARD": "ddp", "HYBRID_SHARD": "hsdp", "_HYBRID_SHARD_ZERO2": "hsdp_zero2"}[os.environ.get("STRATEGY", "FULL_SHARD")])
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
