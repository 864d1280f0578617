"""The models that are measured: tiny ones that cost nothing but the host, and a GPT that computes.

None of them knows of sharding. ``blocks`` are the units that ``fully_shard`` is applied to, one by one, before the root.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Stack(nn.Module):
    """Blocks one after another; the root keeps no parameter of its own, so that every group is the same."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def tiny_stack(num_blocks: int, params_per_block: int, dim: int = 16) -> Stack:
    """``params_per_block`` (even) parameters a block, as biased linear layers of ``dim``: all host, hardly any arithmetic."""
    return Stack([nn.Sequential(*[nn.Linear(dim, dim) for _ in range(params_per_block // 2)]) for _ in range(num_blocks)])


class TransformerBlock(nn.Module):
    """Pre-norm attention and MLP: 12 parameters, 12 * dim**2 + 13 * dim elements; x is (batch, sequence, dim)."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def transformer_stack(num_blocks: int, dim: int, num_heads: int = 8, device: str = "cpu") -> Stack:
    """Equal transformer blocks. Their values come from a fill, not a generator: drawing 10**8 of them takes seconds."""
    with torch.device("meta"):
        stack = Stack([TransformerBlock(dim, num_heads) for _ in range(num_blocks)])
    stack.to_empty(device=device)
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.fill_(0.01)
    return stack


class GPT(nn.Module):
    """Token and position embeddings, transformer blocks, a norm and a head; tokens (batch, sequence) -> logits."""

    def __init__(self, vocab_size: int, max_length: int, dim: int, num_blocks: int, num_heads: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab_size, dim), nn.Embedding(max_length, dim)
        self.blocks = nn.ModuleList([TransformerBlock(dim, num_heads) for _ in range(num_blocks)])
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.size(1)]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def numel_of(model: nn.Module) -> int:
    """Elements of all parameters, each counted once (of the whole model, sharded or not)."""
    return sum(parameter.numel() for parameter in model.parameters())
