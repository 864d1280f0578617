"""Fine-tuning a T5: transformer policy, bf16 for parameters, reduction and buffers, ZeRO-2, activation checkpointing, and a whole
state dict streamed to rank 0.
"""

import functools

import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import (
    BackwardPrefetch,
    FullStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp import (
    FullyShardedDataParallel as FSDP,
)
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.optim.lr_scheduler import StepLR
from transformers import T5Config, T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5Block

bf16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
t5_auto_wrap_policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={T5Block})


def setup_model():
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    config = T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0, use_cache=False)
    return T5ForConditionalGeneration(config)


def train(model, device, num_steps):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    model.train()
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    losses = []
    for _ in range(num_steps):
        fsdp_loss = torch.zeros(2).to(device)
        ids = torch.randint(2, 40, (3, 7), generator=generator).to(device)
        labels = torch.randint(2, 40, (3, 5), generator=generator).to(device)
        optimizer.zero_grad()
        output = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels)
        loss = output["loss"]
        loss.backward()
        optimizer.step()
        fsdp_loss[0] += loss.item()
        fsdp_loss[1] += len(ids)
        dist.all_reduce(fsdp_loss, op=dist.ReduceOp.SUM)
        losses.append((fsdp_loss[0] / fsdp_loss[1]).item())
        scheduler.step()
    return losses


def validation(model, device):
    model.eval()
    ids = torch.arange(2, 16).reshape(2, 7).to(device)
    with torch.no_grad():
        return model(input_ids=ids, labels=ids)["loss"].item()


def build(device, mixed_precision=bf16, checkpointing=True):
    model = FSDP(
        setup_model(),
        auto_wrap_policy=t5_auto_wrap_policy,
        mixed_precision=mixed_precision,
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        device_id=device,
        limit_all_gathers=True,
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
    )
    if checkpointing:
        wrapper = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
        apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrapper, check_fn=lambda submodule: isinstance(submodule, T5Block))
    return model


def save(model, offload_to_cpu=True):
    save_policy = FullStateDictConfig(offload_to_cpu=offload_to_cpu, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, save_policy):
        return model.state_dict()


def main(device):
    model = build(device)
    return [*train(model, device, 4), validation(model, device)]


if __name__ == "__main__":
    dist.init_process_group()
    print(main(torch.device("cpu")))
