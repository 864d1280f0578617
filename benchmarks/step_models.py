"""The models of ``step_clock.py``: a Llama 3, one with two storage dtypes, one with experts, one whose weights are gathered in float8.

They compute nothing, because their device does not; but they launch what such models launch. Attention is one operator, as a
flash kernel is. None of them knows of sharding; ``units`` says which modules a user would shard, one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

_library = torch.library.Library("step_clock", "DEF")
_library.define("attention(Tensor q, Tensor k, Tensor v) -> (Tensor, Tensor)")
_library.define("attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse) -> (Tensor, Tensor, Tensor)")
_library.impl("attention", lambda q, k, v: (torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)), "Meta")
_library.impl(
    "attention_backward",
    lambda grad, q, k, v, out, lse: (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)),
    "Meta",
)


class _Attention(torch.autograd.Function):
    """(batch, heads, sequence, head) each; causal."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = torch.ops.step_clock.attention(q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return torch.ops.step_clock.attention_backward(grad, *ctx.saved_tensors)


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of a model. experts: in each block, ``top`` of which a token uses; 0: none"""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int
    experts: int = 0
    top: int = 0


LLAMA_8B = Shape(dim=4096, layers=32, heads=32, kv_heads=8, hidden=14336, vocabulary=128256)
SMALL = Shape(dim=512, layers=24, heads=8, kv_heads=8, hidden=1536, vocabulary=8192)
EXPERTS = Shape(dim=2048, layers=24, heads=16, kv_heads=16, hidden=1408, vocabulary=102400, experts=64, top=6)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, self.head = shape, shape.dim // shape.heads
        self.wq = nn.Linear(shape.dim, shape.dim, bias=False)
        self.wk = nn.Linear(shape.dim, shape.kv_heads * self.head, bias=False)
        self.wv = nn.Linear(shape.dim, shape.kv_heads * self.head, bias=False)
        self.wo = nn.Linear(shape.dim, shape.dim, bias=False)

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, self.head)) for part in (self.wq(x), self.wk(x), self.wv(x)))
        q, k = _rotated(q, rotary), _rotated(k, rotary)
        if self.shape.kv_heads != self.shape.heads:
            times = self.shape.heads // self.shape.kv_heads
            k, v = (part[:, :, :, None].expand(-1, -1, -1, times, -1).flatten(2, 3) for part in (k, v))
        out = _Attention.apply(*(part.transpose(1, 2).contiguous() for part in (q, k, v)))
        return self.wo(out.transpose(1, 2).contiguous().flatten(2))


def _rotated(x: Tensor, rotary: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotary).flatten(3).type_as(x)


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(shape.dim, shape.hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(shape.hidden, shape.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Experts(nn.Module):
    """A router and experts whose weights are three parameters with a dim for experts; each takes an equal part of the tokens."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.router = nn.Linear(shape.dim, shape.experts, bias=False)
        self.w1, self.w3 = (nn.Parameter(torch.empty(shape.experts, shape.dim, shape.hidden)) for _ in range(2))
        self.w2 = nn.Parameter(torch.empty(shape.experts, shape.hidden, shape.dim))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        scores, _ = torch.topk(self.router(rows).softmax(-1), self.shape.top)
        taken = rows.repeat(self.shape.top, 1).unflatten(0, (self.shape.experts, -1))
        out = torch.bmm(F.silu(torch.bmm(taken, self.w1)) * torch.bmm(taken, self.w3), self.w2)
        return (out.reshape(self.shape.top, *rows.shape) * scores.t()[..., None]).sum(0).view_as(x)


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(shape.dim), nn.RMSNorm(shape.dim)
        self.attention = Attention(shape)
        self.ffn: nn.Module = Experts(shape) if shape.experts else FeedForward(shape)

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotary)
        return x + self.ffn(self.ffn_norm(x))


class Transformer(nn.Module):
    """Tokens (batch, sequence) -> logits."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.dim)
        self.blocks = nn.ModuleList([Block(shape) for _ in range(shape.layers)])
        self.norm = nn.RMSNorm(shape.dim)
        self.output = nn.Linear(shape.dim, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor, rotary: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, rotary)
        return self.output(self.norm(x))


class Recomputed(nn.Module):
    """A block that backward recomputes; selectively: but for attention and every second matrix product."""

    def __init__(self, block: nn.Module, selectively: bool) -> None:
        super().__init__()
        self.block = block
        self.options = {"context_fn": _every_second} if selectively else {}

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        return checkpoint(self.block, x, rotary, use_reentrant=False, preserve_rng_state=False, **self.options)


def _every_second() -> Any:
    counts = {True: 0, False: 0}

    def policy(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if func is torch.ops.step_clock.attention.default:
            return CheckpointPolicy.MUST_SAVE
        if func in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
            counts[ctx.is_recompute] += 1
            return CheckpointPolicy.MUST_SAVE if counts[ctx.is_recompute] % 2 else CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def recompute_blocks(model: Transformer, selectively: bool) -> None:
    """Let each block be recomputed in backward."""
    model.blocks = nn.ModuleList([Recomputed(block, selectively) for block in model.blocks])


class Float8Gathered(Tensor):
    """A weight that is all-gathered as float8 and used in the policy's dtype: the scale is 1, as where it was worked out ahead."""

    @staticmethod
    def __new__(cls, values: Tensor) -> Float8Gathered:
        return torch.Tensor._make_wrapper_subclass(
            cls, values.shape, values.stride(), values.storage_offset(), dtype=values.dtype, device=values.device
        )

    def __init__(self, values: Tensor) -> None:
        self._values = values

    @classmethod
    def __torch_dispatch__(cls, func: Callable[..., Any], types: Any, args: Any, kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(cls, lambda x: x._values, (args, kwargs or {}))
        return pytree.tree_map_only(Tensor, cls, func(*args, **kwargs))

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_values"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], metadata: None, size: Any, stride: Any) -> Float8Gathered:
        return cls(inner["_values"])

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
        return (self._values.to(torch.float8_e4m3fn),), None

    def fsdp_post_all_gather(
        self, gathered: tuple[Tensor, ...], metadata: Any, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        (values,) = gathered
        if out is not None:
            out.data.copy_(values)  # no version counter moves
            return None
        cast = values.to(dtype)
        return cast, (values, cast)


def gather_in_float8(model: nn.Module) -> None:
    """Let the weights of all linear layers in blocks be gathered in float8."""
    for block in model.blocks:
        for module in block.modules():
            if isinstance(module, nn.Linear):
                module.weight = nn.Parameter(Float8Gathered(module.weight.detach()))


def store_in_two_dtypes(model: nn.Module) -> None:
    """Weights in bf16, norms in fp32."""
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight = nn.Parameter(module.weight.detach().bfloat16())
