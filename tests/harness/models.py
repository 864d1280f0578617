"""Small models with awkward shapes, and their data: what the numerics tests train.

Dims are coprime with the number of ranks on purpose: with 2, 3 and 4 ranks some rows do not divide, some ranks get none.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """A residual MLP block; its scale has a single row, so all ranks but the first keep an empty shard of it."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, dim + 3)
        self.down = nn.Linear(dim + 3, dim, bias=False)
        self.scale = nn.Parameter(torch.full((1,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(self.norm(x))))


class MLP(nn.Module):
    """``x (batch, 7)`` to ``(batch, 5)`` through ``num_blocks`` blocks."""

    def __init__(self, dim: int = 10, num_blocks: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(7, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(num_blocks))
        self.last = nn.Linear(dim, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Attention(nn.Module):
    """Attention of ``x`` over ``memory`` (or itself), without dropout."""

    def __init__(self, dim: int, num_heads: int = 2) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim)
        self.value = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        memory = x if memory is None else memory
        q, k, v = (
            layer(source).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for layer, source in ((self.query, x), (self.key, memory), (self.value, memory))
        )
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class TransformerBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(dim)
        self.attention = Attention(dim)
        self.mlp = Block(dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x + self.attention(self.attention_norm(x)))


class Transformer(nn.Module):
    """``ids (batch, length)`` to logits; the head's weight may be the embedding's."""

    def __init__(self, vocab: int = 11, dim: int = 6, num_blocks: int = 2, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.position = nn.Parameter(torch.randn(5, dim))
        self.blocks = nn.ModuleList(TransformerBlock(dim) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def mlp(dim: int = 10, num_blocks: int = 3, seed: int = 0) -> MLP:
    torch.manual_seed(seed)
    return MLP(dim, num_blocks)


def transformer(tied: bool = False, seed: int = 0) -> Transformer:
    torch.manual_seed(seed)
    return Transformer(tied=tied)


def batches(num_steps: int = 3, shape: tuple[int, ...] = (12, 7), seed: int = 1) -> list[Tensor]:
    """One whole batch a step; 12 rows divide over 1, 2, 3 and 4 ranks."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for _ in range(num_steps)]


def token_batches(num_steps: int = 3, vocab: int = 11, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab, (12, 5), generator=generator) for _ in range(num_steps)]
