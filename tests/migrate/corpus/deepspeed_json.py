"""DeepSpeed, ZeRO-3 in bf16 with accumulation, the configuration in a JSON file; checkpoints with a tag."""
import os
import tempfile

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset


def main():
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    dataset = TensorDataset(torch.linspace(-1, 1, 48).reshape(8, 6))
    net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
    engine, _, loader, _ = deepspeed.initialize(
        model=net, model_parameters=net.parameters(), training_data=dataset, config="deepspeed_zero3.json"
    )
    for epoch in range(2):
        for step, (batch,) in enumerate(loader):
            loss = engine(batch).float().square().mean()
            engine.backward(loss)
            engine.step()
            if dist.get_rank() == 0:
                print(f"loss {loss.item():.5f}", flush=True)
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    engine.save_checkpoint(folder[0], tag="last")
    dist.barrier()
    os._exit(0)


main()
