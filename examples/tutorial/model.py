"""The model of the tutorial: a small transformer over bytes, and batches of text to train it on."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Attention and a perceptron, each added to its input (batch, length, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.queries_keys_values(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        queries, keys, values = parts.movedim(-3, 0).transpose(-3, -2)
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.out(mixed.transpose(-3, -2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ByteModel(nn.Module):
    """Logits of the next byte, (batch, length, 256), for bytes (batch, length)."""

    def __init__(self, layers: int = 4, width: int = 64, heads: int = 4, length: int = 64) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        x = self.embedding(text) + self.places(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_byte_loss(logits: Tensor, text: Tensor) -> Tensor:
    """Mean cross entropy, in fp32, of (batch, length, 256) logits for the bytes 1 to length of (batch, length + 1) text."""
    return F.cross_entropy(logits.float().flatten(0, 1), text[:, 1:].flatten())


class Text:
    """Random pieces of the standard library's sources; the same for a seed, however many ranks share them."""

    def __init__(self, length: int = 64, num_files: int = 40) -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:num_files]
        self._bytes = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
        self._length = length

    def batch(self, step: int, size: int, rank: int, world_size: int) -> Tensor:
        """This rank's share, (size / world_size, length + 1), of the batch of ``step``."""
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(len(self._bytes) - self._length - 1, (size,), generator=generator)
        mine = starts.chunk(world_size)[rank]
        return torch.stack([self._bytes[start : start + self._length + 1] for start in mine.tolist()]).long()
