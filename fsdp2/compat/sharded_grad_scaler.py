"""FSDP1's gradient scaler: ``fsdp2.optim.GradScaler`` with FSDP1's order of arguments, which leaves losses in their dtype."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..optim import GradScaler


class ShardedGradScaler(GradScaler):
    """See ``fsdp2.optim.GradScaler``."""

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
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled, process_group=process_group)

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


__all__ = ["ShardedGradScaler"]
