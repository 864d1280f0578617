"""DeepSpeed, ZeRO-3 in bf16 with accumulation, the configuration in a JSON file; checkpoints with a tag."""
import os
import tempfile

import fsdp2
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset


def main():
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    dataset = TensorDataset(torch.linspace(-1, 1, 48).reshape(8, 6))
    net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
    # fsdp2: bf16: parameters stay fp32 and are used in bf16; gradients are reduced and accumulated in
    #   fp32.
    # fsdp2: activation_checkpointing of the DeepSpeed configuration dropped: there is no such option;
    #   see docs/migrating.md.
    # fsdp2: model_parameters=net.parameters() dropped: the optimizer takes the sharded parameters.
    engine = fsdp2.parallelize(net, "zero3", mp_policy=fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    optimizer = torch.optim.AdamW(engine.parameters(), lr=0.01, weight_decay=0.1)
    loader = DataLoader(dataset, batch_size=2, sampler=DistributedSampler(dataset))
    engine.micro_step = 0
    for epoch in range(2):
        for step, (batch,) in enumerate(loader):
            loss = engine(batch).float().square().mean()
            (loss / 2).backward()
            # fsdp2: every micro-batch is reduced; fsdp2.accumulate around it saves communication.
            engine.micro_step += 1
            if engine.micro_step % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
            if dist.get_rank() == 0:
                print(f"loss {loss.item():.5f}", flush=True)
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    # fsdp2: a checkpoint of torch.distributed.checkpoint, not one that DeepSpeed reads.
    dcp.save({"model": get_model_state_dict(engine), "optimizer": get_optimizer_state_dict(engine, optimizer)}, checkpoint_id=os.path.join(folder[0], "last"))
    dist.barrier()
    os._exit(0)


main()
