"""A training loop on accelerate with FSDP, as one writes it for torch. No line knows fsdp2:

    torchrun --standalone --nproc_per_node 2 -m fsdp2.run examples/clients/accelerate_loop.py       on fsdp2
    torchrun --standalone --nproc_per_node 2 examples/clients/accelerate_loop.py                    on torch's FSDP2

Gradients are accumulated over two batches and clipped. After half of the steps ``save_state`` writes a checkpoint, the parameters are
spoilt, and ``load_state`` brings them back. The last line that it prints is the losses of all batches.
"""

from __future__ import annotations

import tempfile

import accelerate
import on_cpu
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

STEPS = 6


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


def main() -> None:
    on_cpu.for_accelerate()
    plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        reshard_after_forward=True,
        state_dict_type="SHARDED_STATE_DICT",
    )
    accelerator = accelerate.Accelerator(fsdp_plugin=plugin, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), Block(32), Block(32), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs = torch.randn(8 * 2 * STEPS, 8)
    data = torch.utils.data.TensorDataset(inputs, inputs.square().sum(1, keepdim=True))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    assert isinstance(model, FSDPModule)

    folders = [tempfile.mkdtemp()] if accelerator.is_main_process else [None]
    dist.broadcast_object_list(folders)
    losses = []
    for index, (x, y) in enumerate(loader):
        if index == STEPS:
            accelerator.save_state(folders[0])
            with torch.no_grad():
                for param in model.parameters():
                    param.zero_()
            accelerator.load_state(folders[0])
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    accelerator.print("losses", *losses, flush=True)


if __name__ == "__main__":
    main()
    on_cpu.leave()
