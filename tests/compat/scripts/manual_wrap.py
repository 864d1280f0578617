"""Manual wrapping: layers are annotated while the model is built, and the context says how they are wrapped."""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel
from torch.distributed.fsdp.wrap import enable_wrap, wrap


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1 = wrap(nn.Linear(8, 4))
        self.layer2 = nn.Linear(4, 16)
        self.layer3 = wrap(nn.Linear(16, 4))

    def forward(self, x):
        return self.layer3(torch.relu(self.layer2(torch.relu(self.layer1(x)))))


def main(device):
    torch.manual_seed(0)
    wrapper_kwargs = {"cpu_offload": CPUOffload(offload_params=False), "device_id": device}
    with enable_wrap(wrapper_cls=FullyShardedDataParallel, **wrapper_kwargs):
        fsdp_model = wrap(Model())
    optim = torch.optim.Adam(fsdp_model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    losses = []
    for _ in range(5):
        x = torch.randn(6, 8, generator=generator).to(device)
        loss = fsdp_model(x).square().mean()
        loss.backward()
        fsdp_model.clip_grad_norm_(0.1)
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    dist.init_process_group()
    print(main(torch.device("cpu")))
