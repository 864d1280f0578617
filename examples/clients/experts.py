"""A mixture of experts: the experts over a mesh of their own, all other parameters over all ranks.

    torchrun --standalone --nproc_per_node 4 examples/clients/experts.py
    torchrun --standalone --nproc_per_node 1 examples/clients/experts.py        the whole model in one process, unsharded

Four ranks are two groups of two. Within a group each rank has half of the experts, and tokens travel to their expert and back by
all-to-all; between the groups ranks with the same experts shard these. An expert's gradient is already a sum over the ranks that
sent it tokens, and so its reduction divides by all ranks, as that of the other parameters does. ``fsdp2.clip_grad_norm_`` takes
parameters of both meshes together. The last line that it prints is the losses; one process and four print the same ones.
"""

from __future__ import annotations

import on_cpu
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fsdp2

STEPS, WIDTH, EXPERTS, TOKENS = 6, 16, 4, 64


class AllToAll(torch.autograd.Function):
    """The i-th of equal parts of a tensor goes to rank i of a group; gradients go back."""

    @staticmethod
    def forward(ctx, sent: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        sent = sent.contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return received

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return AllToAll.apply(grad, ctx.group), None


class Experts(nn.Module):
    """The stacked weights of all experts, or of those of one rank."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, WIDTH, 2 * WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(count, 2 * WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """(experts, tokens, width)"""
        return torch.bmm(torch.bmm(tokens, self.up).relu(), self.down)


class Mixture(nn.Module):
    """Each token goes to one expert, by its position, so that all experts get as many; a gate scales what comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.experts = Experts(EXPERTS)
        self.mesh: DeviceMesh | None = None

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        gates = self.gate(normed).softmax(-1).view(-1, EXPERTS, EXPERTS).diagonal(dim1=1, dim2=2)  # token i to expert i % EXPERTS
        by_expert = normed.view(-1, EXPERTS, WIDTH).transpose(0, 1).contiguous()
        came_back = self.to_experts(by_expert).transpose(0, 1)
        return x + (gates.unsqueeze(-1) * came_back).reshape(x.shape)

    def to_experts(self, by_expert: Tensor) -> Tensor:
        if self.mesh is None:
            return self.experts(by_expert)
        group, size = self.mesh.get_group(), self.mesh.size()
        arrived = AllToAll.apply(by_expert, group)
        own = arrived.view(size, EXPERTS // size, -1, WIDTH).transpose(0, 1).reshape(EXPERTS // size, -1, WIDTH)
        done = self.experts(own).view(EXPERTS // size, size, -1, WIDTH).transpose(0, 1).reshape(by_expert.shape)
        return AllToAll.apply(done, group)

    def keep_own_experts(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        rank, count = mesh.get_local_rank(), EXPERTS // mesh.size()
        for name, param in list(self.experts.named_parameters()):
            setattr(self.experts, name, nn.Parameter(param.detach()[rank * count : (rank + 1) * count].clone()))


def shard(model: nn.Sequential, device: str) -> None:
    ranks = dist.get_world_size()
    everyone = init_device_mesh(device, (ranks,))
    experts = init_device_mesh(device, (ranks // 2, 2), mesh_dim_names=("shard", "expert"))
    for block in model:
        block.keep_own_experts(experts["expert"])
        block.to(device)
        fsdp2.fully_shard(block.experts, mesh=experts["shard"])
        block.experts.set_gradient_divide_factor(ranks)
        fsdp2.fully_shard(block, mesh=everyone)
    fsdp2.fully_shard(model, mesh=everyone)


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ranks, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(Mixture(), Mixture())
    if ranks > 1:
        shard(model, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for step in range(STEPS):
        x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(step)).to(device).chunk(ranks)[rank]
        loss = nn.functional.mse_loss(model(x), x.roll(1, dims=1))
        loss.backward()
        fsdp2.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        dist.all_reduce(loss)
        losses.append(loss.item() / ranks)
    if rank == 0:
        print("losses", *losses, flush=True)


if __name__ == "__main__":
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    main()
    on_cpu.leave()
