"""Tensor subclasses with all-gather extensions: one for each way in which an unsharded parameter can come about."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class Wrapper(torch.Tensor):
    """High-precision values in ``_values``; every operation works on them, and results are of the subclass again."""

    _values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, values.shape, values.stride(), values.storage_offset(), dtype=values.dtype, device=values.device
        )

    def __init__(self, values: Tensor) -> None:
        self._values = values

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(cls, lambda x: x._values, (args, kwargs or {}))
        return pytree.tree_map_only(Tensor, cls, func(*args, **kwargs))

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_values"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], metadata: None, size: Any, stride: Any) -> Wrapper:
        return cls(inner["_values"])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._values})"


def to_rows_of_int8(values: Tensor) -> tuple[Tensor, Tensor]:
    """int8 and a scale a row: what a rank makes of its rows does not depend on the others'."""
    scale = values.flatten(1).abs().amax(1).clamp(min=1e-12) / 127
    return (values / scale.view(-1, *[1] * (values.ndim - 1))).round().to(torch.int8), scale


def from_rows_of_int8(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (values * scale.view(-1, *[1] * (values.ndim - 1))).to(dtype)


class RowInt8(Wrapper):
    """All-gathered as int8 and fp32 scales, which are bytes together; the unsharded parameter is plain, of rounded values.

    Pads nothing and takes only the mesh: the old signature.
    """

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
        assert mesh.ndim == 1
        return to_rows_of_int8(self._values), "metadata"

    def fsdp_post_all_gather(
        self, gathered: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        assert metadata == "metadata"
        values = from_rows_of_int8(*gathered, param_dtype)
        if out is not None:
            (out._local_tensor if isinstance(out, DTensor) else out).copy_(values)
            return None
        return values, (*gathered, values)


class Unflattened(torch.Tensor):
    """``RowInt8`` without the methods that say what it is made of, which torch does not ask of an extension."""

    _values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> Unflattened:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, values.shape, dtype=values.dtype, device=values.device
        )

    __init__ = Wrapper.__init__  # type: ignore[assignment]
    __torch_dispatch__ = classmethod(Wrapper.__torch_dispatch__.__func__)  # type: ignore[assignment, attr-defined]
    fsdp_pre_all_gather = RowInt8.fsdp_pre_all_gather
    fsdp_post_all_gather = RowInt8.fsdp_post_all_gather


class RowInt8ForBoth(RowInt8):
    """What torch's FSDP2 asks for besides: filling ``out`` is no change that autograd sees."""

    def fsdp_post_all_gather(self, *args: Any, out: Tensor | None = None) -> Any:
        if out is None:
            return super().fsdp_post_all_gather(*args)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            return super().fsdp_post_all_gather(*args, out=out)


class InDtype(Wrapper):
    """All-gathered in half precision, whatever the policy says, and used in ``param_dtype``: one tensor, the new signature."""

    seen: list[tuple[Any, ...]] = []  # noqa: RUF012 (of the class, for tests to read)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: tuple[int, ...], module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        InDtype.seen.append((mesh, outer_size, outer_stride, module, mp_policy))
        return (self._values.to(torch.bfloat16),), None

    def fsdp_post_all_gather(
        self, gathered: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        (values,) = gathered
        assert values.dtype == torch.bfloat16
        if out is not None:
            out.copy_(values)
            return None
        cast = values.to(param_dtype)
        return cast, (values, cast)


class RoundedTo8(torch.autograd.Function):
    """What training sees of a ``RowInt8`` weight: rounded values in forward, its gradient as it is."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return from_rows_of_int8(*to_rows_of_int8(values), values.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def wrap_weights(model: nn.Module, kind: type[Wrapper]) -> nn.Module:
    """Let every parameter of at least two dims be a ``kind``."""
    for module in model.modules():
        for name, param in list(module._parameters.items()):
            if param is not None and param.ndim > 1:
                module._parameters[name] = nn.Parameter(kind(param.detach().clone()), param.requires_grad)
    return model
