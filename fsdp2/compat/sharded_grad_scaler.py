"""``ShardedGradScaler``: fp16 loss scaling whose every rank skips the same steps, though each sees its own gradients only.

Whether a gradient is infinite or NaN is asked of local tensors, on their own device (offloaded ones on the host), and the answer is
shared by one all-reduce. It refuses to know modules.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..core import torch_compat as compat


class ShardedGradScaler(GradScaler):
    """A ``torch.amp.GradScaler`` for sharded gradients.

    device:        where losses are; None: the accelerator, or the CPU
    process_group: the ranks that agree on skipping; None: all
    The other arguments are GradScaler's. Its optimizers may have DTensors on any meshes, plain tensors, and fp16 gradients.
    ``unscale_`` and ``step`` are collective, over ``process_group``.
    """

    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(
            device if device is not None else compat.default_device_type(),
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )
        self.process_group = process_group

    def scale(self, outputs: Any) -> Any:
        """Scaled losses, in the dtype that each has (GradScaler's promote fp16 to fp32)."""
        if not self.is_enabled():
            return outputs
        if isinstance(outputs, Tensor):
            return super().scale(outputs).to(outputs.dtype)
        if isinstance(outputs, (list, tuple)):
            return type(outputs)(self._scaled(outputs))
        return self._scaled(outputs)

    def _scaled(self, outputs: Iterable[Any]) -> Iterator[Any]:
        return (self.scale(each) for each in outputs)

    @torch.no_grad()
    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """What GradScaler calls before a step: divides gradients by the scale, and finds out whether one is not finite anywhere.

        Returns: found_inf by device, 1.0 or 0.0, the same on all ranks
        """
        alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    local = _values(param.grad)
                    alike.setdefault((local.device, local.dtype), []).append(local)
        found = torch.zeros_like(found_inf)
        for (device, _), grads in alike.items():
            here = torch.zeros_like(found_inf, device=device)
            compat.unscale_and_check(grads, here, inv_scale.to(device))
            found = torch.maximum(found, here.to(found.device))
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.process_group)
        devices = {device for device, _ in alike} | {found.device}
        return {device: found.to(device) for device in devices}


def _values(grad: Tensor) -> Tensor:
    if grad.is_sparse:
        return grad._values()
    return compat.local_tensor(grad) if isinstance(grad, DTensor) else grad


__all__ = ["ShardedGradScaler"]
