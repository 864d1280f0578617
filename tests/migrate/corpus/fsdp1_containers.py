"""Two models of a GAN in a dict, made by a function of another kind, clipped and saved by name."""
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.nn.utils import clip_grad_norm_


def make(sizes):
    layers = [nn.Linear(a, b) for a, b in zip(sizes, sizes[1:])]
    return FSDP(nn.Sequential(*layers), device_id=torch.device("cpu"), use_orig_params=True)


def clip(models):
    if "--clip" in sys.argv:
        return [model.clip_grad_norm_(1.0) for model in models.values()]
    return [clip_grad_norm_(model.parameters(), 100.0) for model in models.values()]


def states(models, optimizers):
    return {name: (models[name].state_dict(), optimizers[name].state_dict()) for name in models}


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    models = {"generator": make([3, 5, 4]), "critic": make([4, 6, 1])}
    critic = nn.Linear(4, 1)  # one that is never wrapped
    critic.load_state_dict(nn.Linear(4, 1).state_dict())
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.1) for name, model in models.items()}
    torch.manual_seed(dist.get_rank())
    for _ in range(3):
        loss = models["critic"](models["generator"](torch.randn(4, 3))).square().mean()
        loss.backward()
        clip(models)
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"loss {loss.item():.6f}", flush=True)
    if "--save" in sys.argv:
        torch.save(states(models, optimizers), "gan.pt")
    dist.barrier()
    os._exit(0)


main()
