"""DeepSpeed as it cannot be rewritten: fp16 with a loss scale, NVMe, a checkpoint of its own kind."""
import deepspeed
import torch
from torch import nn

config = {
    "fp16": {"enabled": True, "initial_scale_power": 12},
    "optimizer": {"type": "OneBitAdam", "params": {"lr": 0.001}},
    "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/tmp"}},
}

# fsdp2: not migrated: deepspeed.zero.Init: not something that fsdp2 replaces
with deepspeed.zero.Init():
    net = nn.Linear(6, 3)
# fsdp2: not migrated: offload to nvme: fsdp2 offloads to host memory
# fsdp2: not migrated: fp16 with its loss scale: use bf16, or write torch.amp.GradScaler around the
#   steps
# fsdp2: not migrated: optimizer "OneBitAdam": pass one of torch's as optimizer
# fsdp2: not migrated: no optimizer, in the configuration or as an argument
engine, optimizer, _, _ = deepspeed.initialize(model=net, config=config)
# fsdp2: not migrated: load_checkpoint: use fsdp2.checkpoint.Checkpointer; for DeepSpeed's files,
#   `fsdp2 convert OLD NEW --to dcp`
engine.load_checkpoint("checkpoints")
for _ in range(3):
    # fsdp2: not migrated: engine.device: the model has nothing of that name
    loss = engine(torch.randn(4, 6, device=engine.device)).square().mean()
    engine.backward(loss)
    engine.step()
