"""transformers' Trainer with FSDP, as one writes it for torch. No line knows fsdp2:

    torchrun --standalone --nproc_per_node 2 -m fsdp2.run examples/clients/trainer.py       on fsdp2
    torchrun --standalone --nproc_per_node 2 examples/clients/trainer.py                    on torch's FSDP2

It trains a small Llama, stops after half of the steps as a job does that has run out of time, and a second Trainer resumes from the
checkpoint of the first. The last line that it prints is the losses of all steps; both ways of starting it print the same ones.
"""

from __future__ import annotations

import tempfile

import on_cpu
import torch
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import FSDPModule

STEPS = 6


class Counting(torch.utils.data.Dataset):
    """Sequences that count upwards, modulo 61."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(16) * (1 + index % 5) + index) % 61
        return {"input_ids": tokens, "labels": tokens}


def train(folder: str, max_steps: int, resume: bool) -> transformers.Trainer:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=32
    )
    arguments = transformers.TrainingArguments(
        output_dir=folder,
        fsdp=True,
        fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "state_dict_type": "SHARDED_STATE_DICT"},
        max_steps=max_steps,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        per_device_train_batch_size=4,
        max_grad_norm=1.0,
        logging_steps=1,
        save_steps=STEPS // 2,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = transformers.Trainer(transformers.LlamaForCausalLM(config), arguments, train_dataset=Counting())
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def main() -> None:
    on_cpu.for_accelerate()
    folders = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(folders)
    train(folders[0], STEPS // 2, resume=False)
    trainer = train(folders[0], STEPS, resume=True)
    assert isinstance(trainer.model, FSDPModule)
    if dist.get_rank() == 0:
        losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
        print("losses", *losses, flush=True)


if __name__ == "__main__":
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    main()
    on_cpu.leave()
