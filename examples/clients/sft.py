"""TRL's SFTTrainer with a LoRA adapter of PEFT, on FSDP, as one writes it for torch. No line knows fsdp2:

    torchrun --standalone --nproc_per_node 2 -m fsdp2.run examples/clients/sft.py       on fsdp2
    torchrun --standalone --nproc_per_node 2 examples/clients/sft.py                    on torch's FSDP2

It stops after half of the steps, and a second trainer resumes from the checkpoint of the first. At the end ``save_model`` writes the
adapter, whole, as ``PeftModel.from_pretrained`` reads it. The last line that it prints is the losses of all steps.
"""

from __future__ import annotations

import tempfile

import datasets
import on_cpu
import peft
import torch
import torch.distributed as dist
import transformers
import trl
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.distributed.fsdp import FSDPModule

STEPS = 6
WORDS = [f"w{number}" for number in range(58)]


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    numbers = {word: index for index, word in enumerate(["<pad>", "<end>", "<unk>", *WORDS])}
    words = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>", unk_token="<unk>")


def train(folder: str, max_steps: int, resume: bool) -> trl.SFTTrainer:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64
    )
    texts = [" ".join(WORDS[(start + step * number) % len(WORDS)] for number in range(12)) for start in range(16) for step in (1, 2, 3)]
    arguments = trl.SFTConfig(
        output_dir=folder,
        fsdp=True,
        fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "state_dict_type": "FULL_STATE_DICT"},
        bf16=False,
        gradient_checkpointing=False,
        max_length=32,
        max_steps=max_steps,
        learning_rate=5e-2,
        lr_scheduler_type="constant",
        per_device_train_batch_size=4,
        logging_steps=1,
        save_steps=STEPS // 2,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = trl.SFTTrainer(
        transformers.LlamaForCausalLM(config),
        arguments,
        train_dataset=datasets.Dataset.from_dict({"text": texts}),
        processing_class=tokenizer(),
        peft_config=peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, task_type="CAUSAL_LM"),
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def main() -> None:
    on_cpu.for_accelerate()
    folders = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(folders)
    train(folders[0], STEPS // 2, resume=False)
    trainer = train(folders[0], STEPS, resume=True)
    assert isinstance(trainer.model, FSDPModule)
    trainer.save_model(folders[0] + "/adapter")
    if dist.get_rank() == 0:
        adapter = load_file(folders[0] + "/adapter/adapter_model.safetensors")
        assert {tuple(value.shape) for value in adapter.values()} == {(4, 32), (32, 4)}, "whole"
        losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
        print("losses", *losses, flush=True)


if __name__ == "__main__":
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    main()
    on_cpu.leave()
