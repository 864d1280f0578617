"""Has every parameter and buffer been given a value?

``to_empty`` gives memory that nobody has written: on one day zeros, on another the last model's numbers. ``canaries`` fills it with
NaN, so that what nobody writes afterwards is found, by ``check`` or by the first loss. Non-persistent buffers are the usual victims: no
checkpoint has them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..inspect import local_of
from .finding import Finding
from .inspected import Inspected


@contextlib.contextmanager
def canaries() -> Iterator[None]:
    """Inside, ``nn.Module.to_empty`` fills what it allocates: floating point with NaN, other numbers with the largest of their dtype.

    Collective: no. Thread-safe: no, ``to_empty`` is exchanged for all of the process.

    Example:
        with torch.device("meta"):
            net = nn.Linear(16, 16)
        with fsdp2.doctor.canaries():
            net.to_empty(device="cpu")
        net.weight.isnan().all()  # until somebody writes it
    """
    usual = nn.Module.to_empty

    def to_empty(self: nn.Module, *, device: Any, recurse: bool = True) -> nn.Module:
        usual(self, device=device, recurse=recurse)
        with torch.no_grad():
            for tensor in (*self.parameters(recurse), *self.buffers(recurse)):
                local = local_of(tensor)
                if not local.is_meta and type(local) is Tensor and local.dtype is not torch.bool:
                    local.fill_(_canary(local.dtype))
        return self

    nn.Module.to_empty = to_empty  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.to_empty = usual  # type: ignore[method-assign]


def initialization_findings(inspected: Inspected) -> Iterator[Finding]:
    shown = {id(param.unsharded()): param.sharded for param in inspected.params}
    tensors: dict[str, Tensor] = {name: shown.get(id(param), param) for name, param in inspected.model.named_parameters()}
    tensors |= inspected.buffers
    meta = tuple(name for name, tensor in tensors.items() if local_of(tensor).is_meta)
    if meta:
        yield Finding(
            "on-meta-device",
            "error",
            f"{len(meta)} parameters or buffers are still on the meta device",
            "they have no values: forward raises",
            "call fsdp2.materialize(model), or model.to_empty(device=...) and initialize, or load a checkpoint",
            meta,
        )
    unwritten = tuple(name for name, tensor in tensors.items() if _is_unwritten(local_of(tensor)))
    if unwritten:
        yield Finding(
            "uninitialized",
            "error",
            f"{len(unwritten)} parameters or buffers hold NaN: no code has written them since to_empty, or a checkpoint holds NaN",
            "every loss that they take part in is NaN; without fsdp2.doctor.canaries() they would hold old values of the memory",
            "initialize them after to_empty: parameters by reset_parameters() or a checkpoint, non-persistent buffers (rotary tables, "
            "masks) by their own function, for no checkpoint has them; or call fsdp2.materialize(model) in the place of to_empty",
            unwritten,
        )


def _is_unwritten(local: Tensor) -> bool:
    if local.is_meta or type(local) is not Tensor or local.numel() == 0 or local.dtype is torch.bool:
        return False
    if local.is_floating_point() or local.is_complex():
        return bool(local.isnan().any())
    # Small types reach their largest number in earnest: as masks, and as quantized values.
    return local.dtype.itemsize > 1 and bool((local == _canary(local.dtype)).all())


def _canary(dtype: torch.dtype) -> float | int:
    return float("nan") if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).max
