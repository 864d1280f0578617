"""An encoder-decoder with a shared embedding: transformer policy, bf16, and a full state dict streamed to rank 0."""
import argparse
import os
import tempfile
import functools
import torch
import torch.nn as nn
import torch.optim as optim
import torch.distributed as dist
from functools import partial
from torch.distributed.fsdp import (
    FullyShardedDataParallel as FSDP,
    CPUOffload,
    MixedPrecision,
    BackwardPrefetch,
    ShardingStrategy,
    FullStateDictConfig,
    StateDictType,
)
from torch.distributed.fsdp.wrap import (
    transformer_auto_wrap_policy,
    enable_wrap,
    wrap,
)
from torch.nn.parallel import DistributedDataParallel as DDP

bf16_ready = True

bfSixteen = MixedPrecision(
    param_dtype=torch.bfloat16,
    # Gradient communication precision.
    reduce_dtype=torch.bfloat16,
    # Buffer precision.
    buffer_dtype=torch.bfloat16,
)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Seq2Seq(nn.Module):
    def __init__(self, width=16, vocabulary=32):
        super().__init__()
        self.shared = nn.Embedding(vocabulary, width)
        self.encoder = nn.ModuleList(Block(width) for _ in range(2))
        self.decoder = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.shared.weight

    def forward(self, source, target):
        x = self.shared(source)
        for block in self.encoder:
            x = block(x)
        y = self.shared(target) + x.mean(1, keepdim=True)
        for block in self.decoder:
            y = block(y)
        return self.head(y)


def train(args, model, rank, optimizer):
    for step in range(args.steps):
        source, target = torch.randint(32, (4, 6)), torch.randint(32, (4, 5))
        loss = nn.functional.cross_entropy(model(source, target).flatten(0, 1).float(), target.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"loss {loss.item():.6f}", flush=True)


def fsdp_main(args):
    dist.init_process_group("gloo")
    rank = int(os.environ['RANK'])
    torch.manual_seed(0)
    model = Seq2Seq()
    t5_auto_wrap_policy = functools.partial(
        transformer_auto_wrap_policy,
        transformer_layer_cls={
            Block,
        },
    )
    sharding_strategy: ShardingStrategy = ShardingStrategy.SHARD_GRAD_OP #for Zero2 and FULL_SHARD for Zero3

    if bf16_ready:
        mp_policy = bfSixteen
    else:
        mp_policy = None # defaults to fp32

    # model is on CPU before input to FSDP
    model = FSDP(model,
        auto_wrap_policy=t5_auto_wrap_policy,
        mixed_precision=mp_policy,
        sharding_strategy=sharding_strategy,
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        device_id=torch.device("cpu"))

    optimizer = optim.AdamW(model.parameters(), lr=args.lr)
    torch.manual_seed(rank)
    train(args, model, rank, optimizer)

    if args.save_model:
        # save
        save_policy = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
        with FSDP.state_dict_type(
            model, StateDictType.FULL_STATE_DICT, save_policy
        ):
            cpu_state = model.state_dict()
        if rank == 0:
            with tempfile.TemporaryDirectory() as folder:
                torch.save(cpu_state, os.path.join(folder, "t5.pt"))
            print(f"saved {sum(value.numel() for value in cpu_state.values())} elements", flush=True)


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description='T5-like FSDP example')
    parser.add_argument('--lr', type=float, default=.002, metavar='LR')
    parser.add_argument('--steps', type=int, default=3)
    parser.add_argument('--save-model', action='store_false', default=True)
    fsdp_main(parser.parse_args())
    dist.barrier()
    os._exit(0)
