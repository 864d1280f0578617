"""Full state dicts of model and optimizer, to one file and back, with the type set once for the model."""
import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel as FSDP,
    StateDictType,
)


class Run:
    def __init__(self, path):
        self.path = path
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 6))
        self.net = FSDP(net, device_id=torch.device("cpu"))
        FSDP.set_state_dict_type(
            self.net,
            StateDictType.FULL_STATE_DICT,
            FullStateDictConfig(rank0_only=False),
            FullOptimStateDictConfig(rank0_only=False),
        )
        self.opt = torch.optim.Adam(self.net.parameters(), lr=0.05)

    def save(self):
        model_state = self.net.state_dict()
        optim_state = FSDP.optim_state_dict(self.net, self.opt)
        if dist.get_rank() == 0:
            torch.save({"model": model_state, "optim": optim_state}, self.path)
        dist.barrier()

    def load(self):
        checkpoint = torch.load(self.path, weights_only=True)
        self.net.load_state_dict(checkpoint["model"])
        optim_state = FSDP.optim_state_dict_to_load(
            model=self.net, optim=self.opt, optim_state_dict=checkpoint["optim"]
        )
        self.opt.load_state_dict(optim_state)

    def train(self, steps):
        for step in range(steps):
            loss = self.net(torch.full((2, 6), 0.1 * (step + 1 + dist.get_rank()))).sub(1).square().mean()
            loss.backward()
            self.opt.step()
            self.opt.zero_grad()
            if dist.get_rank() == 0:
                print(f"loss {loss.item():.6f}", flush=True)


dist.init_process_group("gloo")
path = [os.path.join(tempfile.mkdtemp(), "state.pt")]
dist.broadcast_object_list(path)
run = Run(path[0])
run.train(2)
run.save()
resumed = Run(path[0])
resumed.load()
resumed.train(2)
dist.barrier()
os._exit(0)
