"""Full state dicts of model and optimizer, to one file and back, with the type set once for the model."""
import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
import fsdp2
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)


class Run:
    def __init__(self, path):
        self.path = path
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 6))
        # fsdp2: device_id=torch.device("cpu") dropped: parallelize moves the model to the device of its
        #   mesh.
        self.net = fsdp2.parallelize(net, wrap=None)
        # fsdp2: set_state_dict_type dropped: the calls below say what they give.
        self.opt = torch.optim.Adam(self.net.parameters(), lr=0.05)

    def save(self):
        model_state = get_model_state_dict(self.net, options=StateDictOptions(full_state_dict=True))
        optim_state = get_optimizer_state_dict(self.net, self.opt, options=StateDictOptions(full_state_dict=True))
        if dist.get_rank() == 0:
            torch.save({"model": model_state, "optim": optim_state}, self.path)
        dist.barrier()

    def load(self):
        checkpoint = torch.load(self.path, weights_only=True)
        set_model_state_dict(self.net, checkpoint["model"], options=StateDictOptions(full_state_dict=True))
        optim_state = checkpoint["optim"]
        set_optimizer_state_dict(self.net, self.opt, optim_state, options=StateDictOptions(full_state_dict=True))

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
