"""torchtitan's debug Llama, sharded by torchtitan's own code, as it does it for torch. No line knows fsdp2:

    torchrun --standalone --nproc_per_node 2 -m fsdp2.run examples/clients/torchtitan_debug_model.py
    torchrun --standalone --nproc_per_node 1 examples/clients/torchtitan_debug_model.py       the whole model in one process, unsharded

On GPUs, torchtitan's whole trainer starts in the same way: ``torchrun ... -m fsdp2.run -m torchtitan.train --module llama3 --config
llama3_debugmodel``. It needs CUDA, and so this program takes its parts: model, ``ParallelDims``, selective activation checkpointing,
the clipping. Torch's own FSDP2 cannot run it on gloo, which has no reduction by torchtitan's factor. The last line that it prints is
the losses; one process and two print the same ones.
"""

# ruff: noqa: E402 (torchtitan's modules copy the device type when they are imported)

from __future__ import annotations

import on_cpu

on_cpu.for_torchtitan()

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.distributed.utils import clip_grad_norm_
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry

STEPS = 4


def sharded(spec, model: nn.Module) -> nn.Module:
    parallelism = ParallelismConfig(spmd_backend="partial_dtensor")
    dims = ParallelDims.from_config(parallelism, dist.get_world_size())
    dims.build_mesh()
    spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=TrainingConfig(mixed_precision_param="float32"),
        parallelism=parallelism,
        compile_config=CompileConfig(),
        ac_config=SelectiveAC.Config(),
        dump_folder="",
    )
    assert isinstance(model, FSDPModule)
    return model


def main() -> None:
    device = torch.device("cuda", dist.get_rank()) if torch.cuda.is_available() else torch.device("cpu")
    ranks, rank = dist.get_world_size(), dist.get_rank()
    spec = model_registry("debugmodel")
    for layer in spec.model.layers:  # FlexAttention has no backward on the CPU
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    torch.manual_seed(0)
    model = spec.model.build()
    with torch.no_grad():
        model.init_states(buffer_device=torch.device("cpu"))
    model.to(device)
    if ranks > 1:
        sharded(spec, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        tokens = torch.randint(2048, (4, 65), generator=torch.Generator().manual_seed(step)).to(device).chunk(ranks)[rank]
        scores = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(scores.flatten(0, 1).float(), tokens[:, 1:].flatten()) / ranks
        loss.backward()  # torchtitan has switched off the division by the number of ranks
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        dist.all_reduce(loss)
        losses.append(loss.item())
    if rank == 0:
        print("losses", *losses, flush=True)


if __name__ == "__main__":
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    main()
    on_cpu.leave()
