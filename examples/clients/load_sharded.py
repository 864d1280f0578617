"""A mixture of experts that transformers shards while it loads it, as one writes it for torch. No line knows fsdp2:

    torchrun --standalone --nproc_per_node 4 -m fsdp2.run examples/clients/load_sharded.py   on fsdp2
    torchrun --standalone --nproc_per_node 4 examples/clients/load_sharded.py                on torch's FSDP2

``SHARDING`` in the environment has the arguments of ``DistributedConfig``, as JSON. By default each of two groups of ranks has all
experts, half of them on each rank, and ranks with the same experts shard these. The program trains, saves a file per rank, loads them
again, and trains on, with transformers' Trainer. The last line that it prints is the losses of all steps.
"""

from __future__ import annotations

import json
import os
import tempfile

import on_cpu
import torch
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import FSDPModule
from transformers import DistributedConfig

STEPS = 3
SHARDING = json.loads(os.environ.get("SHARDING", '{"fsdp_size": 4, "ep_size": 2}'))
CONFIG = transformers.Qwen3MoeConfig(
    vocab_size=61,
    hidden_size=16,
    intermediate_size=32,
    moe_intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    num_experts=4,
    num_experts_per_tok=2,
    decoder_sparse_step=1,
    attn_implementation="eager",
)


class Counting(torch.utils.data.Dataset):
    """Sequences that count upwards, modulo 61."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(8) * (1 + index % 5) + index) % 61
        return {"input_ids": tokens, "labels": tokens}


def train(model: torch.nn.Module, folder: str) -> list[float]:
    arguments = transformers.TrainingArguments(
        output_dir=folder,
        max_steps=STEPS,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        per_device_train_batch_size=2,
        max_grad_norm=1.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=Counting())
    trainer.train()
    return [each["loss"] for each in trainer.state.log_history if "loss" in each]


def main() -> None:
    on_cpu.for_accelerate()
    folders = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(folders)
    whole, sharded = os.path.join(folders[0], "whole"), os.path.join(folders[0], "sharded")
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        transformers.Qwen3MoeForCausalLM(CONFIG).save_pretrained(whole)
    dist.barrier()
    losses = []
    for folder in (whole, sharded):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(**SHARDING))
        assert isinstance(model, FSDPModule)
        losses += train(model, folders[0])
        model.save_pretrained(sharded, distributed_checkpoint=True)
        dist.barrier()
    if dist.get_rank() == 0:
        print("losses", *losses, flush=True)


if __name__ == "__main__":
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    main()
    on_cpu.leave()
