"""One script for one process or many, DDP's own flag for accumulation, and a checkpoint of the first rank alone."""
import io
import os
from contextlib import nullcontext
import torch
from torch import nn
import fsdp2.checkpoint
import functools
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
    # fsdp2: device_ids=None dropped: parallelize moves the model to the device of its mesh.
    model = fsdp2.parallelize(model, "ddp")
raw_model = model if ddp else model # unwrap DDP container if needed
gradient_accumulation_steps = 2
for it in range(4):
    model_state = fsdp2.checkpoint.full_state_dict(raw_model) if it == 2 else None
    optimizer_state = fsdp2.checkpoint.full_optimizer_state_dict(model, optimizer, by_name=True) if it == 2 else None
    if it == 2 and master_process:
        # fsdp2: state by parameter name, not by number; a file that the old script wrote has numbers.
        checkpoint = {
            'model': model_state,
            'optimizer': optimizer_state,
            'iter_num': it,
        }
        torch.save(checkpoint, io.BytesIO())
    for micro_step in range(gradient_accumulation_steps):
        later = functools.partial(fsdp2.accumulate, model) if ddp and micro_step == 0 else nullcontext
        if ddp:
            model.set_requires_gradient_sync(micro_step == gradient_accumulation_steps - 1)
        X = torch.randn(4, 4, generator=torch.Generator().manual_seed(it * 10 + micro_step * 2 + ddp_rank))
        with later():
            loss = model(X).pow(2).mean() / gradient_accumulation_steps
            scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    fsdp2.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if master_process:
        print(it, loss.item() * gradient_accumulation_steps, flush=True)
if ddp:
    destroy_process_group()
