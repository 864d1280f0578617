"""Models that are kept in containers and objects: what becomes of them is not seen, and is listed."""
import os
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


@dataclass
class State:
    parts: dict
    optimizer: torch.optim.Optimizer


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, 1)

    def forward(self, x):
        return self.head(torch.relu(self.body(x)))

    def count(self):
        return sum(value.numel() for value in self.state_dict().values())


def build():
    net = Net()
    first = {name: value.clone() for name, value in net.state_dict().items()}  # not wrapped yet
    net.load_state_dict(first)
    model = DDP(net)
    whole = net.state_dict()  # is the wrapped one from here on
    assert all(value.shape == first[name].shape for name, value in whole.items())
    return model


def unwrap(model_or_ddp):
    return model_or_ddp.module if isinstance(model_or_ddp, DDP) else model_or_ddp


def bare(something):
    while hasattr(something, "module"):
        something = something.module
    return something


def save(state, folder):
    torch.save({"net": state.parts["net"].state_dict(), "optimizer": state.optimizer.state_dict()}, f"{folder}/state.pt")


def load(state, folder):
    saved = torch.load(f"{folder}/state.pt")
    state.parts["net"].module.load_state_dict(saved["net"])
    for each in state.parts.values():
        each.load_state_dict(saved["net"])


def train(state, batches):
    net = state.parts["net"]
    for batch in batches[:-1]:
        if "--accumulate" in sys.argv:
            with net.no_sync():
                net(batch).square().mean().backward()
    loss = net(batches[-1]).square().mean()
    loss.backward()
    state.optimizer.step()
    state.optimizer.zero_grad()
    return loss.item()


dist.init_process_group("gloo")
torch.manual_seed(0)
model = build()
assert unwrap(model) is bare(model)
state = State(parts={"net": model}, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
scheduler = torch.optim.lr_scheduler.StepLR(state.optimizer, 2)
torch.manual_seed(dist.get_rank())
for _ in range(4):
    loss = train(state, [torch.randn(4, 6) for _ in range(2)])
    scheduler.step()
    if dist.get_rank() == 0:
        print(f"loss {loss:.6f} after {scheduler.state_dict()['last_epoch']}", flush=True)
dist.barrier()
os._exit(0)
