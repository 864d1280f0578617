"""Loss scaling for fp16: all ranks find the same infinities, and skip the same steps."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..core.comm.collective_log import during
from ..torch_names import torch_dtensors, torch_tensors
from .torch_names import unscale_and_check


class GradScaler(torch.amp.GradScaler):
    """A ``torch.amp.GradScaler`` whose ranks agree: if a gradient is not finite on one of them, all skip that optimizer's step.

    torch's asks DTensors, whose ranks agree mesh by mesh, and looks at plain parameters on each rank alone: there, some ranks may
    step and others not.

    device:        where losses are; None: the accelerator, or the CPU
    process_group: the ranks that agree on skipping; None: all
    The other arguments, ``state_dict`` and ``load_state_dict`` are GradScaler's. Several optimizers may share one; each skips by its
    own gradients, which may be DTensors on any meshes, plain tensors, offloaded, and fp16.
    ``unscale_`` and ``step`` are collective, over ``process_group``.

    Example:
        scaler = fsdp2.optim.GradScaler()
        scaler.scale(model(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    """

    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(
            device if device is not None else torch_tensors.default_device_type(),
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )
        self.process_group = process_group

    @torch.no_grad()
    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """GradScaler calls this before a step: divides gradients by the scale, and finds out whether one is not finite anywhere.

        Returns: found_inf by device, 1.0 or 0.0, the same on all ranks
        """
        by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    local = _values(param.grad)
                    by_kind.setdefault((local.device, local.dtype), []).append(local)
        found = torch.zeros_like(found_inf)
        for (device, _), grads in by_kind.items():
            here = torch.zeros_like(found_inf, device=device)
            unscale_and_check(grads, here, inv_scale.to(device))
            found = torch.maximum(found, here.to(found.device))
        with during("all-reduce of infs", self.process_group or dist.group.WORLD, found):
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self.process_group)
        devices = {device for device, _ in by_kind} | {found.device}
        return {device: found.to(device) for device in devices}


def _values(grad: Tensor) -> Tensor:
    if grad.is_sparse:
        return grad._values()
    return torch_dtensors.local_tensor(grad) if isinstance(grad, DTensor) else grad
