"""DeepSpeed, ZeRO-2, the configuration in the script."""
import argparse
import os

import fsdp2
import torch
import torch.distributed as dist
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.02)
# fsdp2: add_config_arguments dropped: --deepspeed and --deepspeed_config say nothing here.
args = parser.parse_args()

ds_config = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "Adam", "params": {"lr": args.lr, "betas": [0.9, 0.95], "eps": 1e-8}},
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 500000},
    "wall_clock_breakdown": False,
}

torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
# fsdp2: the optimizer Adam of DeepSpeed decouples its weight decay by default: it is AdamW.
# fsdp2: args=args dropped: the configuration is in the call.
# fsdp2: model_parameters=model.parameters() dropped: the optimizer takes the sharded parameters.
model_engine = fsdp2.parallelize(model, "zero2")
optimizer = torch.optim.AdamW(model_engine.parameters(), lr=args.lr, betas=(0.9, 0.95), eps=1e-08, weight_decay=0.0)
torch.manual_seed(dist.get_rank())
for step in range(3):
    loss = model_engine(torch.randn(4, 6)).square().mean()
    loss.backward()
    fsdp2.clip_grad_norm_(model_engine.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.6f}", flush=True)
dist.barrier()
os._exit(0)
