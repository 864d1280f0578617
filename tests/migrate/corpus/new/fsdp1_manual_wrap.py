"""Manual wrap inside of the constructor, with a dict of arguments."""
import os
from typing import Dict

import torch
import torch.distributed as dist
import torch.nn as nn
import fsdp2


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1 = fsdp2.wrap.wrap(nn.Linear(8, 4))
        self.layer2 = nn.Linear(4, 16)
        self.layer3 = fsdp2.wrap.wrap(nn.Linear(16, 4), strategy="zero2")

    def forward(self, x):
        return self.layer3(torch.relu(self.layer2(self.layer1(x))))


dist.init_process_group("gloo")
torch.manual_seed(0)
# less memory
# fsdp2: backward_prefetch=BackwardPrefetch.BACKWARD_POST dropped: the next group is always
#   prefetched in backward, as by BACKWARD_PRE.
# fsdp2: device_id=torch.device("cpu") dropped: parallelize moves the model to the device of its
#   mesh.
wrapper_kwargs = dict(
    offload_policy=fsdp2.OffloadPolicy(),
)
with fsdp2.wrap.enable_wrap(**wrapper_kwargs):
    fsdp_model = fsdp2.wrap.wrap(Model())

optim = torch.optim.Adam(fsdp_model.parameters(), lr=0.01)
torch.manual_seed(dist.get_rank())
for _ in range(4):
    out = fsdp_model(torch.randn(6, 8))
    loss = out.pow(2).mean()
    loss.backward()
    optim.step()
    optim.zero_grad()
    if dist.get_rank() == 0:
        print("loss %.6f" % loss.item(), flush=True)
dist.barrier()
os._exit(0)
