"""With SUM reductions, a gradient that no other rank shards is divided twice by set_gradient_divide_factor's factor."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def gradient(force_sum: bool, reduce_dtype: torch.dtype) -> float:
    model = nn.Linear(1, 1, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)), mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
    model.set_gradient_divide_factor(4.0)
    model.set_force_sum_reduction_for_comms(force_sum)
    model(torch.full((1, 1), 16.0)).sum().backward()
    return model.weight.grad.to_local().item()


wrong = 0
for force_sum, reduce_dtype in ((False, torch.float32), (True, torch.float32), (False, torch.float16)):
    found = gradient(force_sum, reduce_dtype)
    wrong += found != 4.0
    print(f"torch {torch.__version__}, {force_sum=}, {reduce_dtype=}: expected 16 / 4 = 4.0, got {found}")
sys.exit(bool(wrong))
