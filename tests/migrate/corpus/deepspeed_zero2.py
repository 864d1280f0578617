"""DeepSpeed, ZeRO-2, the configuration in the script."""
import argparse
import os

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.02)
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()

ds_config = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "Adam", "params": {"lr": args.lr, "betas": [0.9, 0.95], "eps": 1e-8}},
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 500000},
    "wall_clock_breakdown": False,
}

deepspeed.init_distributed(dist_backend="gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
model_engine, optimizer, _, _ = deepspeed.initialize(
    args=args,
    model=model,
    model_parameters=model.parameters(),
    config=ds_config,
)
torch.manual_seed(dist.get_rank())
for step in range(3):
    loss = model_engine(torch.randn(4, 6)).square().mean()
    model_engine.backward(loss)
    model_engine.step()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.6f}", flush=True)
dist.barrier()
os._exit(0)
