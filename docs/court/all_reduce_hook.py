"""Without HSDP nothing holds the tensor that set_all_reduce_hook's hook works on: the next reduce-scatter may get its memory."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fsdp2.testing import pretend  # a simulated accelerator, whose streams take turns in the order of a seed

pretend.activate()
dist.init_process_group(pretend.MODEL, store=dist.HashStore(), rank=0, world_size=4)


def gradients(seed: int | None) -> list[torch.Tensor]:
    pretend.set_order(seed)  # None: everything runs as it is queued
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4))).to("pretend")
    mesh, policy = init_device_mesh("pretend", (4,)), MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    for module in [*model, model]:
        fully_shard(module, mesh=mesh, mp_policy=policy).set_all_reduce_hook(lambda grad: grad.mul_(0.5))
    model(torch.ones(1, 8, device="pretend")).sum().backward()
    return [param.grad.to_local().cpu() for param in model.parameters()]


expected, wrong = gradients(None), {}
for seed in range(10):
    found = gradients(seed)
    wrong[seed] = [str(index) for index, pair in enumerate(zip(found, expected, strict=True)) if not torch.equal(*pair)]
wrong = {seed: names for seed, names in wrong.items() if names}
print(f"torch {torch.__version__}: expected each order's gradients to be equal; wrong layers by seed: {wrong}")
sys.exit(bool(wrong))
