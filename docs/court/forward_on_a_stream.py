"""Forward on one stream, backward() called on another: memory that a reduction still reads is freed to a stream that does not wait."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp2.testing import pretend  # a simulated accelerator, whose streams take turns in the order of a seed

pretend.activate()
dist.init_process_group(pretend.MODEL, store=dist.HashStore(), rank=0, world_size=4)


def gradient(seed: int | None, input_requires_grad: bool) -> torch.Tensor:
    pretend.set_order(seed)  # None: everything runs as it is queued
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(8, 8, bias=False).to("pretend"), mesh=init_device_mesh("pretend", (4,)))
    x = torch.ones(1, 8, device="pretend", requires_grad=input_requires_grad)
    side = torch.Stream("pretend")
    side.wait_stream(torch.pretend.current_stream())
    with torch.pretend.stream(side):
        loss = model(x).square().sum()
    loss.backward()  # autograd runs it on the stream of forward
    with torch.pretend.stream(side):  # later work there, as the next batch's
        torch.zeros(64, device="pretend")
    torch.pretend.current_stream().wait_stream(side)
    return model.weight.grad.to_local().cpu()


wrong = {}
for requires in (False, True):  # the unit is reduced in the callback at the end of backward, or in a hook
    expected = gradient(None, requires)
    wrong[requires] = [seed for seed in range(20) if not torch.equal(gradient(seed, requires), expected)]
print(f"torch {torch.__version__}: expected each order's gradient to be equal; wrong seeds, by requires_grad of the input: {wrong}")
sys.exit(any(wrong.values()))
