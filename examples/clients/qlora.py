"""QLoRA: a frozen Llama whose weights are NF4 (torchao), with LoRA adapters (PEFT) that train. No line knows fsdp2:

    torchrun --standalone --nproc_per_node 2 -m fsdp2.run examples/clients/qlora.py       on fsdp2
    torchrun --standalone --nproc_per_node 2 examples/clients/qlora.py                    on torch's FSDP2

Each rank stores and sends its share of the 4-bit weights. After half of the steps the program writes the adapter as
``PeftModel.from_pretrained`` reads it, makes the model again, and resumes from the folder. The last line that it prints is the losses.
"""

from __future__ import annotations

import tempfile
import warnings

import on_cpu
import peft
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import NF4Tensor, to_nf4

STEPS = 6


def quantized_base() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=32
    )
    model = transformers.LlamaForCausalLM(config)
    for layer in model.model.layers:
        for module in layer.modules():
            if isinstance(module, nn.Linear):
                module.weight = nn.Parameter(to_nf4(module.weight.detach(), 32, 32), requires_grad=False)
    return model


def shard(model: nn.Module) -> nn.Module:
    for layer in model.base_model.model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    assert isinstance(model, FSDPModule)
    kept = [param.to_local() for param in model.parameters()]
    assert sum(isinstance(param, NF4Tensor) for param in kept) == 14  # seven in each of two layers
    return model


def train(model: nn.Module, steps: range, device: torch.device) -> list[float]:
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=2.0)
    losses = []
    for step in steps:
        index = torch.arange(4).unsqueeze(1) + 4 * (step * dist.get_world_size() + dist.get_rank())
        tokens = ((torch.arange(16) * (1 + index % 5) + index) % 61).to(device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        dist.all_reduce(loss)
        losses.append(loss.item() / dist.get_world_size())
    return losses


def main() -> None:
    device = torch.device("cuda", dist.get_rank()) if torch.cuda.is_available() else torch.device("cpu")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.0, init_lora_weights="gaussian")
    model = shard(peft.get_peft_model(quantized_base(), config))
    losses = train(model, range(STEPS // 2), device)

    folders = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(folders)
    adapter = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True))
    if dist.get_rank() == 0:
        model.save_pretrained(folders[0], state_dict=adapter)
    dist.barrier()
    model = shard(peft.PeftModel.from_pretrained(quantized_base(), folders[0], is_trainable=True))
    losses += train(model, range(STEPS // 2, STEPS), device)
    if dist.get_rank() == 0:
        print("losses", *losses, flush=True)


if __name__ == "__main__":
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    main()
    on_cpu.leave()
