"""One script for one process or many, DDP's own flag for accumulation, and a checkpoint of the first rank alone."""
import io
import os
from contextlib import nullcontext
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.distributed import init_process_group, destroy_process_group

ddp = int(os.environ.get('RANK', -1)) != -1 # is this a ddp run?
if ddp:
    init_process_group(backend='gloo')
    ddp_rank = int(os.environ['RANK'])
    ddp_local_rank = int(os.environ['LOCAL_RANK'])
    master_process = ddp_rank == 0 # this process will do logging, checkpointing etc.
else:
    master_process = True
torch.manual_seed(1337)
model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", enabled=False)
checkpoint = {}
if ddp:
    model = DDP(model, device_ids=None)
raw_model = model.module if ddp else model # unwrap DDP container if needed
gradient_accumulation_steps = 2
for it in range(4):
    if it == 2 and master_process:
        checkpoint = {
            'model': raw_model.state_dict(),
            'optimizer': optimizer.state_dict(),
            'iter_num': it,
        }
        torch.save(checkpoint, io.BytesIO())
    for micro_step in range(gradient_accumulation_steps):
        later = model.no_sync if ddp and micro_step == 0 else nullcontext
        if ddp:
            model.require_backward_grad_sync = (micro_step == gradient_accumulation_steps - 1)
        X = torch.randn(4, 4, generator=torch.Generator().manual_seed(it * 10 + micro_step * 2 + ddp_rank))
        with later():
            loss = model(X).pow(2).mean() / gradient_accumulation_steps
            scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if master_process:
        print(it, loss.item() * gradient_accumulation_steps, flush=True)
if ddp:
    destroy_process_group()
