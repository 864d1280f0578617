"""The models of built-in shapes: decoders as GPT, Llama and DeepSeek have them, and T5. They are for plans, where nothing is computed.

Each is as large, launches the operators and keeps the activations that a model of its family does. Attention is torch's scaled dot
product, which a flash kernel computes. Of routed experts each takes an equal part of the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture: of ``routed`` experts of ``hidden`` each a token takes ``top``, and all ``shared``; the first layers are dense."""

    routed: int
    shared: int
    top: int
    hidden: int
    dense_layers: int


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """DeepSeek's: queries, and keys with values, through low ranks; a head has parts with and without positions, and its values."""

    query_rank: int
    key_rank: int
    plain: int
    rotary: int
    value: int


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """family: "gpt" (layer norm, learned positions, GELU, biases) or "llama" (RMS norm, rotary positions, gated SiLU)"""

    family: str
    dim: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int
    context: int = 2048
    experts: Experts | None = None
    latent: LatentAttention | None = None


@dataclass(frozen=True, slots=True)
class T5Shape:
    """layers: of the encoder, and again of the decoder; inner: of all heads together"""

    dim: int
    layers: int
    heads: int
    inner: int
    hidden: int
    vocabulary: int = 32128


def _norm(shape: DecoderShape, dim: int | None = None) -> nn.Module:
    dim = shape.dim if dim is None else dim
    return nn.LayerNorm(dim) if shape.family == "gpt" else nn.RMSNorm(dim)


def _rotated(x: Tensor, rotary: Tensor) -> Tensor:
    """(batch, heads, sequence, head), turned by its position. rotary: (2, sequence, head), cosines and sines"""
    first, second = x.chunk(2, -1)
    return x * rotary[0] + torch.cat([-second, first], -1) * rotary[1]


def _heads(x: Tensor, head: int) -> Tensor:
    """(batch, sequence, heads * head) -> (batch, heads, sequence, head)."""
    return x.view(*x.shape[:-1], -1, head).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        has_bias = shape.family == "gpt"
        self.shape, self.head = shape, shape.dim // shape.heads
        self.query = nn.Linear(shape.dim, shape.dim, bias=has_bias)
        self.key, self.value = (nn.Linear(shape.dim, shape.kv_heads * self.head, bias=has_bias) for _ in range(2))
        self.out = nn.Linear(shape.dim, shape.dim, bias=has_bias)

    def forward(self, x: Tensor, rotary: Tensor | None) -> Tensor:
        query, key, value = (_heads(part(x), self.head) for part in (self.query, self.key, self.value))
        if rotary is not None:
            query, key = _rotated(query, rotary), _rotated(key, rotary)
        times = self.shape.heads // self.shape.kv_heads
        if times > 1:
            key, value = (part[:, :, None].expand(-1, -1, times, -1, -1).flatten(1, 2) for part in (key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class Latent(nn.Module):
    """Attention through low ranks."""

    def __init__(self, shape: DecoderShape, latent: LatentAttention) -> None:
        super().__init__()
        self.heads, self.latent = shape.heads, latent
        with_positions = latent.plain + latent.rotary
        self.query_down = nn.Linear(shape.dim, latent.query_rank, bias=False)
        self.query_norm, self.key_norm = nn.RMSNorm(latent.query_rank), nn.RMSNorm(latent.key_rank)
        self.query_up = nn.Linear(latent.query_rank, shape.heads * with_positions, bias=False)
        self.key_down = nn.Linear(shape.dim, latent.key_rank + latent.rotary, bias=False)
        self.key_up = nn.Linear(latent.key_rank, shape.heads * (latent.plain + latent.value), bias=False)
        self.out = nn.Linear(shape.heads * latent.value, shape.dim, bias=False)

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        latent = self.latent
        query = _heads(self.query_up(self.query_norm(self.query_down(x))), latent.plain + latent.rotary)
        low, positions = torch.split(self.key_down(x), [latent.key_rank, latent.rotary], -1)
        both = _heads(self.key_up(self.key_norm(low)), latent.plain + latent.value)
        key, value = torch.split(both, [latent.plain, latent.value], -1)
        plain, turned = torch.split(query, [latent.plain, latent.rotary], -1)
        positions = _rotated(positions[:, None], rotary).expand(-1, self.heads, -1, -1)
        query, key = torch.cat([plain, _rotated(turned, rotary)], -1), torch.cat([key, positions], -1)
        missing = query.shape[-1] - value.shape[-1]  # the kernel wants one size of heads
        mixed = F.scaled_dot_product_attention(query, key, F.pad(value, (0, missing)), is_causal=True)[..., : latent.value]
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    def __init__(self, shape: DecoderShape, hidden: int) -> None:
        super().__init__()
        has_bias = shape.family == "gpt"
        self.up, self.down = nn.Linear(shape.dim, hidden, bias=has_bias), nn.Linear(hidden, shape.dim, bias=has_bias)
        self.gate = None if has_bias else nn.Linear(shape.dim, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x)
        out: Tensor = self.down(inner)
        return out


class Mixture(nn.Module):
    """A router, and experts whose weights are three parameters with a dim for experts."""

    def __init__(self, shape: DecoderShape, experts: Experts) -> None:
        super().__init__()
        self.experts = experts
        self.router = nn.Linear(shape.dim, experts.routed, bias=False)
        self.up, self.gate = (nn.Parameter(torch.empty(experts.routed, shape.dim, experts.hidden)) for _ in range(2))
        self.down = nn.Parameter(torch.empty(experts.routed, experts.hidden, shape.dim))
        self.shared = FeedForward(shape, experts.shared * experts.hidden) if experts.shared else None

    def forward(self, x: Tensor) -> Tensor:
        top, routed = self.experts.top, self.experts.routed
        rows = x.flatten(0, 1)
        scores, _ = torch.topk(self.router(rows).softmax(-1), top)
        each = -(-rows.shape[0] * top // routed)  # tokens of an expert, the last of them padding
        taken = F.pad(rows.repeat(top, 1), (0, 0, 0, each * routed - rows.shape[0] * top)).view(routed, each, -1)
        out = torch.bmm(F.silu(torch.bmm(taken, self.gate)) * torch.bmm(taken, self.up), self.down)
        out = out.flatten(0, 1)[: rows.shape[0] * top].view(top, *rows.shape)
        mixed: Tensor = (out * scores.t()[..., None]).sum(0).view_as(x)
        return mixed if self.shared is None else mixed + self.shared(x)


class Block(nn.Module):
    def __init__(self, shape: DecoderShape, index: int) -> None:
        super().__init__()
        experts = shape.experts if shape.experts is not None and index >= shape.experts.dense_layers else None
        self.attention_norm, self.ffn_norm = _norm(shape), _norm(shape)
        self.attention: nn.Module = Attention(shape) if shape.latent is None else Latent(shape, shape.latent)
        self.ffn: nn.Module = FeedForward(shape, shape.hidden) if experts is None else Mixture(shape, experts)

    def forward(self, x: Tensor, rotary: Tensor | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotary)
        out: Tensor = x + self.ffn(self.ffn_norm(x))
        return out


class Decoder(nn.Module):
    """Tokens (batch, sequence) -> logits."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.rotary_dim = shape.dim // shape.heads if shape.latent is None else shape.latent.rotary
        self.tokens = nn.Embedding(shape.vocabulary, shape.dim)
        self.positions = nn.Embedding(shape.context, shape.dim) if shape.family == "gpt" else None
        self.blocks = nn.ModuleList(Block(shape, index) for index in range(shape.layers))
        self.norm = _norm(shape)
        self.output = nn.Linear(shape.dim, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        rotary = None
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1]))
        else:
            rotary = torch.empty(2, tokens.shape[1], self.rotary_dim, dtype=x.dtype)
        for block in self.blocks:
            x = block(x, rotary)
        out: Tensor = self.output(self.norm(x))
        return out


class T5Attention(nn.Module):
    def __init__(self, shape: T5Shape) -> None:
        super().__init__()
        self.head = shape.inner // shape.heads
        self.query, self.key, self.value = (nn.Linear(shape.dim, shape.inner, bias=False) for _ in range(3))
        self.out = nn.Linear(shape.inner, shape.dim, bias=False)

    def forward(self, x: Tensor, other: Tensor, bias: Tensor | None) -> Tensor:
        query, key, value = (_heads(part(of), self.head) for part, of in ((self.query, x), (self.key, other), (self.value, other)))
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=1.0)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class T5Block(nn.Module):
    """looks_back: of the decoder, which attends to the encoder as well"""

    def __init__(self, shape: T5Shape, looks_back: bool) -> None:
        super().__init__()
        self.self_norm, self.self_attention = nn.RMSNorm(shape.dim), T5Attention(shape)
        self.cross_norm = nn.RMSNorm(shape.dim) if looks_back else None
        self.cross_attention = T5Attention(shape) if looks_back else None
        self.ffn_norm = nn.RMSNorm(shape.dim)
        self.up, self.down = nn.Linear(shape.dim, shape.hidden, bias=False), nn.Linear(shape.hidden, shape.dim, bias=False)

    def forward(self, x: Tensor, bias: Tensor, encoded: Tensor | None) -> Tensor:
        normed = self.self_norm(x)
        x = x + self.self_attention(normed, normed, bias)
        if self.cross_attention is not None and self.cross_norm is not None and encoded is not None:
            x = x + self.cross_attention(self.cross_norm(x), encoded, None)
        out: Tensor = x + self.down(self.up(self.ffn_norm(x)).relu())
        return out


class T5(nn.Module):
    """Source and target tokens -> logits. One table is the embedding of both and the head."""

    def __init__(self, shape: T5Shape) -> None:
        super().__init__()
        self.shape = shape
        self.shared = nn.Embedding(shape.vocabulary, shape.dim)
        self.head = nn.Linear(shape.dim, shape.vocabulary, bias=False)
        self.head.weight = self.shared.weight
        self.encoder_bias, self.decoder_bias = nn.Embedding(32, shape.heads), nn.Embedding(32, shape.heads)
        self.encoder = nn.ModuleList(T5Block(shape, looks_back=False) for _ in range(shape.layers))
        self.decoder = nn.ModuleList(T5Block(shape, looks_back=True) for _ in range(shape.layers))
        self.encoder_norm, self.decoder_norm = nn.RMSNorm(shape.dim), nn.RMSNorm(shape.dim)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        encoded = self._run(source, self.encoder, self.encoder_bias, None)
        decoded = self._run(target, self.decoder, self.decoder_bias, self.encoder_norm(encoded))
        out: Tensor = self.head(self.decoder_norm(decoded))
        return out

    def _run(self, tokens: Tensor, blocks: nn.ModuleList, table: nn.Embedding, encoded: Tensor | None) -> Tensor:
        length = tokens.shape[1]
        distances = torch.zeros(length, length, dtype=torch.long)
        bias = table(distances).permute(2, 0, 1)[None]
        x: Tensor = self.shared(tokens)
        for block in blocks:
            x = block(x, bias.to(x.dtype), encoded)
        return x
