"""AdamW whose states have dtypes of their own, and which makes pure bf16 training converge.

A bf16 parameter has eight bits: an update smaller than 1/256 of it is lost, and training stops where fp32 goes on. *Kahan summation*
(W. Kahan 1965, for a running sum) keeps what each rounding lost in a tensor next to the parameter and adds it to the next update: two
bytes more an element, instead of four of an fp32 copy. ``flat`` may drive it.

Worked example, a parameter of 256 and updates of 0.5, where neighbors of 256 in bf16 are 2 apart

    bf16 alone         256, 256, 256, 256, 256 ...
    with compensation  256 (0.5 lost), 256 (1.0 lost), 258 (0.5 too much, taken back by the next), ...
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..arguments import DTYPE, SWITCH, require
from ..errors import ArgumentError
from .arguments import holds, listed_params, result_of


class AnyPrecisionAdamW(Optimizer):
    """AdamW (Loshchilov and Hutter 2019) with chosen dtypes of its states; with all of them fp32 it computes what ``AdamW`` does.

    lr, betas, eps, weight_decay: as AdamW's
    momentum_dtype, variance_dtype: of the running averages of gradients and of their squares; None: the parameter's
    use_kahan_summation: keep what rounding loses of each update
    compensation_dtype: in which that is kept; None: the parameter's
    Memory:      an element of each dtype for each element of a parameter
    Collective:  no
    Raises:      ArgumentError for a value out of its range

    Example:
        fsdp2.fully_shard(net.bfloat16())
        optimizer = fsdp2.optim.AnyPrecisionAdamW(net.parameters(), use_kahan_summation=True)
        net(x.bfloat16()).sum().backward()
        optimizer.step()
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        momentum_dtype: torch.dtype | None = None,
        variance_dtype: torch.dtype | None = None,
        use_kahan_summation: bool = False,
        compensation_dtype: torch.dtype | None = None,
    ) -> None:
        for name, value, is_fine in (
            ("lr", lr, lambda lr: float(lr) >= 0),
            ("betas", betas, lambda betas: all(0 <= beta < 1 for beta in betas)),
            ("eps", eps, lambda eps: eps >= 0),
            ("weight_decay", weight_decay, lambda decay: decay >= 0),
        ):
            if not holds(is_fine, value):
                raise ArgumentError(
                    f"AnyPrecisionAdamW got {name}={value}",
                    expected="betas from 0 to below 1" if name == "betas" else "0 or more",
                    fix=f"pass another {name}",
                )
        dtypes = {"momentum_dtype": momentum_dtype, "variance_dtype": variance_dtype, "compensation_dtype": compensation_dtype}
        require("AnyPrecisionAdamW", DTYPE.or_none, **dtypes)
        require("AnyPrecisionAdamW", SWITCH, use_kahan_summation=use_kahan_summation)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "use_kahan_summation": use_kahan_summation,
            **dtypes,
        }
        super().__init__(listed_params("AnyPrecisionAdamW", params), defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step, after ``closure`` if there is one; returns its result."""
        loss = result_of(closure)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    step_adamw(param, param.grad, self.state[param], group)
        return loss


def step_adamw(param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """One step of one parameter. state: its own, empty before the first step. group: options, as of ``AnyPrecisionAdamW``."""
    if not state:
        # fsdp2.plan knows the value of a constant, not that of zeros(). On the host, on any default device: it is read below.
        state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
        state["exp_avg"] = torch.zeros_like(param, dtype=group["momentum_dtype"] or param.dtype)
        state["exp_avg_sq"] = torch.zeros_like(param, dtype=group["variance_dtype"] or param.dtype)
        if group["use_kahan_summation"]:
            state["compensation"] = torch.zeros_like(param, dtype=group["compensation_dtype"] or param.dtype)
    state["step"] += 1
    step, lr = state["step"].item(), group["lr"]
    beta1, beta2 = group["betas"]
    exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
    exp_avg.lerp_(grad.to(exp_avg.dtype), 1 - beta1)
    squared = grad.to(exp_avg_sq.dtype)
    exp_avg_sq.mul_(beta2).addcmul_(squared, squared, value=1 - beta2)
    # In fp32 or wider even for narrower states: an update is small compared with the value that it changes.
    wide = torch.promote_types(torch.float32, torch.promote_types(exp_avg.dtype, exp_avg_sq.dtype))
    denominator = (exp_avg_sq.to(wide).sqrt() / (1 - beta2**step) ** 0.5).add_(group["eps"])
    size = -lr / (1 - beta1**step)
    if not group["use_kahan_summation"]:
        param.mul_(1 - lr * group["weight_decay"])
        if param.dtype is wide:
            param.addcdiv_(exp_avg.to(wide), denominator, value=size)
        else:
            param.add_((exp_avg.to(wide) / denominator).mul_(size).to(param.dtype))
        return
    lost, before = state["compensation"], param.to(wide, copy=True)
    update = (exp_avg.to(wide) / denominator).mul_(size).add_(before * (-lr * group["weight_decay"])).add_(lost.to(wide))
    param.copy_((before + update).to(param.dtype))
    lost.copy_(before.add_(update).sub_(param.to(wide)))


__all__ = ["AnyPrecisionAdamW"]
