"""bf16 gradients with set_gradient_divide_factor are exact zeros on NCCL before torch 2.14 (pytorch/pytorch#190745)."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fsdp2.testing import pretend  # a simulated accelerator, whose process group reads a bf16 PREMUL_SUM's factor as that NCCL does

pretend.activate()
dist.init_process_group(pretend.MODEL, store=dist.HashStore(), rank=0, world_size=4)


def gradients(factor: float | None, force_sum: bool = False) -> list[float]:
    model = nn.Linear(4, 4, bias=False, device="pretend")
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    fully_shard(model, mesh=init_device_mesh("pretend", (4,)), mp_policy=policy)
    if factor is not None:
        model.set_gradient_divide_factor(factor)
    model.set_force_sum_reduction_for_comms(force_sum)
    model(torch.ones(1, 4, device="pretend")).sum().backward()
    return model.weight.grad.to_local().flatten().tolist()


print("the reduction's sum is", (total := gradients(1.0, force_sum=True)))
found = gradients(2.0)
expected = [each / 2 for each in total]
print(f"torch {torch.__version__}: divided by 2 expected {expected}, got {found}")
sys.exit(found != expected)
