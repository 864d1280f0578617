"""Reinforcement learning with a sharded actor, a reference model, and a copy that generates: GRPO on a toy task.

    torchrun --standalone --nproc_per_node 2 examples/grpo_toy.py

Prompts are digits, and a right answer repeats them, each one larger (9 becomes 0). The reward is the share of digits that are right,
which a program can check. Each step publishes the actor's weights to a copy that generates, parks the actor meanwhile, and trains it
on several answers per prompt, each judged against the others (GRPO, Shao et al. 2024), not far from the reference, a snapshot of its
first weights. Two CPU cores need ten seconds; rewards begin near 0.1.
"""

from __future__ import annotations

import argparse
import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp2

DIGITS, LENGTH = 10, 3


class Policy(nn.Module):
    """``tokens (rows, n)`` to the logits of each next token, ``(rows, n, DIGITS)``."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(DIGITS, width)
        self.position = nn.Parameter(torch.randn(2 * LENGTH, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.head = nn.Linear(width, DIGITS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(x)


def sharded(model: Policy) -> Policy:
    for block in model.blocks:
        fsdp2.fully_shard(block)
    return fsdp2.fully_shard(model)


@torch.no_grad()
def generated(engine: Policy, prompts: Tensor, generator: torch.Generator) -> Tensor:
    """``prompts (rows, LENGTH)`` with sampled answers after them."""
    tokens = prompts
    for _ in range(LENGTH):
        likely = engine(tokens)[:, -1].softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(likely, 1, generator=generator)], dim=1)
    return tokens


def rewards(tokens: Tensor) -> Tensor:
    prompts, answers = tokens.split(LENGTH, dim=1)
    return (answers == (prompts + 1) % DIGITS).float().mean(dim=1)


def log_likelihood(model: nn.Module, tokens: Tensor) -> Tensor:
    """Of each token of the answers: ``(rows, LENGTH)``."""
    logits = model(tokens[:, :-1])[:, LENGTH - 1 :]
    return logits.log_softmax(-1).gather(-1, tokens[:, LENGTH:, None]).squeeze(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--prompts", type=int, default=16, help="per rank and step")
    parser.add_argument("--answers", type=int, default=8, help="per prompt")
    arguments = parser.parse_args()
    dist.init_process_group()
    rank = dist.get_rank()
    torch.manual_seed(0)
    engine = Policy()  # on each rank; in a real job, an inference engine in other processes
    actor = sharded(copy.deepcopy(engine))
    reference = fsdp2.snapshot(actor, "cpu")
    optimizer = torch.optim.AdamW(actor.parameters(), lr=3e-3)
    weights = fsdp2.publish(actor)
    generator = torch.Generator().manual_seed(rank)
    for step in range(arguments.steps):
        engine.load_state_dict(dict(weights))
        fsdp2.park(actor, optimizer)
        prompts = torch.randint(DIGITS, (arguments.prompts, LENGTH), generator=generator)
        tokens = generated(engine, prompts.repeat_interleave(arguments.answers, dim=0), generator)
        fsdp2.unpark(actor, optimizer)

        reward = rewards(tokens)
        by_prompt = reward.view(-1, arguments.answers)
        advantage = ((by_prompt - by_prompt.mean(1, keepdim=True)) / (by_prompt.std(1, keepdim=True) + 1e-4)).view(-1, 1)
        with reference.applied(), torch.no_grad():
            expected = log_likelihood(actor, tokens)
        likely = log_likelihood(actor, tokens)
        distance = (expected - likely).exp() - (expected - likely) - 1  # an estimate of the KL divergence that is never negative
        loss = -((likely - likely.detach()).exp() * advantage - 1e-3 * distance).mean()
        loss.backward()
        fsdp2.clip_grad_norm_(actor.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

        mean = reward.mean()
        dist.all_reduce(mean, dist.ReduceOp.SUM)
        if rank == 0 and (step % 10 == 0 or step == arguments.steps - 1):
            print(f"step {step:4}  version {weights.version:4}  reward {mean.item() / dist.get_world_size():.2f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
