"""DeepSpeed as it cannot be rewritten: fp16 with a loss scale, NVMe, a checkpoint of its own kind."""
import deepspeed
import torch
from torch import nn

config = {
    "fp16": {"enabled": True, "initial_scale_power": 12},
    "optimizer": {"type": "OneBitAdam", "params": {"lr": 0.001}},
    "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/tmp"}},
}

with deepspeed.zero.Init():
    net = nn.Linear(6, 3)
engine, optimizer, _, _ = deepspeed.initialize(model=net, config=config)
engine.load_checkpoint("checkpoints")
for _ in range(3):
    loss = engine(torch.randn(4, 6, device=engine.device)).square().mean()
    engine.backward(loss)
    engine.step()
