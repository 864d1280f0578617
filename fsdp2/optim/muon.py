"""Muon for sharded parameters: momentum made orthogonal matrix by matrix, on one rank each; AdamW for all that is no matrix.

Sources: K. Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks" (the iteration and its coefficients); J. Liu
et al. 2025, "Muon is scalable for LLM training" (weight decay, ``match_rms_adamw``). Values are those of ``torch.optim.Muon`` on the
unsharded model, up to the rounding of bf16 in the iteration.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..errors import ArgumentError
from ..torch_names import torch_dtensors
from .any_precision import step_adamw
from .arguments import holds, listed_params, result_of
from .whole_matrices import Cut, Job, compute_by_owners, cut_of


class Muon(Optimizer):
    """Muon for matrices, AdamW for the rest, in one optimizer.

    params:        a model, parameters, or groups of them. A group with ``use_muon`` says which of both it gets; without, parameters of
                   two dimensions, and of three (batches of matrices: experts), get Muon. Embeddings and the head are better off with
                   AdamW: put them into a group with ``use_muon=False``.
    lr, weight_decay: of both
    momentum, nesterov, ns_coefficients, ns_steps, eps, adjust_lr_fn: as of ``torch.optim.Muon``
    betas, adamw_eps: of AdamW
    Memory:        one element of momentum an element of a matrix; for a moment the whole matrices of two rounds, in bf16
    Collective:    ``step`` is, over the shard axis: two all-to-alls for every W matrices, of bf16 pieces. All ranks have gradients for
                   the same matrices, as backward leaves them. Under HSDP each shard group computes for itself.
    Raises:        ArgumentError for a value out of its range, or a vector with ``use_muon``; ParameterError for a matrix
                   that several mesh axes cut

    Example:
        optimizer = fsdp2.optim.Muon(model, lr=0.02)
        model(x).sum().backward()
        optimizer.step()
    """

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
    ) -> None:
        for name, value, is_fine, expected in (
            ("lr", lr, lambda lr: lr >= 0, "0 or more"),
            ("weight_decay", weight_decay, lambda decay: decay >= 0, "0 or more"),
            ("momentum", momentum, lambda momentum: 0 <= momentum < 1, "0 to below 1"),
            ("ns_coefficients", ns_coefficients, lambda three: len([float(each) for each in three]) == 3, "three numbers"),
            ("eps", eps, lambda eps: eps >= 0, "0 or more"),
            ("betas", betas, lambda betas: len([beta for beta in betas if 0 <= beta < 1]) == 2, "two numbers from 0 to below 1"),
            ("adamw_eps", adamw_eps, lambda eps: eps >= 0, "0 or more"),
            ("ns_steps", ns_steps, lambda steps: steps >= 1, "1 or more"),
            ("adjust_lr_fn", adjust_lr_fn, (None, *_ADJUSTMENTS).__contains__, f"None or one of {', '.join(_ADJUSTMENTS)}"),
        ):
            if not holds(is_fine, value):
                raise ArgumentError(f"Muon got {name}={value!r}", expected=expected, fix=f"pass another {name}")
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "betas": betas,
            "adamw_eps": adamw_eps,
        }
        super().__init__(_groups(params), defaults)
        self._cuts: dict[Tensor, Cut | None] = {}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As any optimizer's; see ``params`` of the class for the parameters."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        wrong = [f"parameter {tuple(param.shape)}" for param in group["params"] if group["use_muon"] and param.dim() not in (2, 3)]
        if wrong:
            self.param_groups.pop()
            raise ArgumentError(
                f"a group with use_muon=True has {len(wrong)} parameters that are no matrices",
                items=wrong,
                expected="parameters of two dimensions, or three",
                fix="put them into a group with use_muon=False",
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step, after ``closure`` if there is one; returns its result. Collective: see the class."""
        loss = result_of(closure)
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if group["use_muon"]:
                self._step_matrices(params, group)
            else:
                as_adamw = group | {"eps": group["adamw_eps"]} | _IN_PARAMETERS_DTYPE
                for param in params:
                    step_adamw(param, param.grad, self.state[param], as_adamw)
        return loss

    def _step_matrices(self, params: list[Tensor], group: dict[str, Any]) -> None:
        momentum, coefficients = group["momentum"], group["ns_coefficients"]

        def orthogonal(matrix: Tensor) -> Tensor:
            return orthogonalized(matrix, coefficients, group["ns_steps"], group["eps"])

        updates: list[Tensor] = []
        jobs: list[Job] = []
        sharded: list[int] = []
        for index, param in enumerate(params):
            assert param.grad is not None
            state = self.state[param]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(param)
            if param not in self._cuts:
                self._cuts[param] = cut_of(param, f"parameter {index}")
            cut, grad, buffer = self._cuts[param], _local(param.grad), _local(state["momentum_buffer"])
            buffer.lerp_(grad, 1 - momentum)
            update = (grad.lerp(buffer, momentum) if group["nesterov"] else buffer).to(torch.bfloat16)
            if cut is None:
                updates.append(orthogonal(update) if update.numel() > 0 else update)
            else:
                updates.append(update)
                sharded.append(index)
                jobs.append(Job(update, param.shape, cut, _cost(param.shape)))
        for index, result in zip(sharded, compute_by_owners(jobs, orthogonal), strict=True):
            updates[index] = result
        for param, update in zip(params, updates, strict=True):
            local = _local(param)
            local.mul_(1 - group["lr"] * group["weight_decay"])
            local.add_(update, alpha=-group["lr"] * _ADJUSTMENTS[group["adjust_lr_fn"] or "original"](*param.shape[-2:]))


_ADJUSTMENTS: dict[str, Callable[[int, int], float]] = {
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}

_IN_PARAMETERS_DTYPE = {"momentum_dtype": None, "variance_dtype": None, "use_kahan_summation": False, "compensation_dtype": None}


def orthogonalized(matrix: Tensor, coefficients: tuple[float, float, float], num_steps: int, eps: float) -> Tensor:
    """The nearest semi-orthogonal matrix, about: singular values come near 1 by a quintic polynomial (Newton-Schulz), in bf16.

    matrix: (..., m, n); of a batch each matrix by itself
    """
    a, b, c = coefficients
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    x = (matrix.mT if is_tall else matrix).to(torch.bfloat16)
    x = (x if x.dim() == 3 else x.unsqueeze(0)).contiguous()
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(num_steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    x = x.view(*matrix.shape[:-2], *x.shape[-2:])
    return x.mT if is_tall else x


def _cost(shape: torch.Size) -> float:
    """Multiplications of a step of the iteration: two products of the smaller side, one with the larger."""
    small, large = sorted(shape[-2:])
    return float(math.prod(shape[:-2]) * (2 * small * small * large + small**3))


def _local(tensor: Tensor) -> Tensor:
    return torch_dtensors.waited_for(torch_dtensors.local_tensor(tensor)) if isinstance(tensor, DTensor) else tensor


def _groups(params: nn.Module | Iterable[Any]) -> list[dict[str, Any]]:
    """Groups that all say ``use_muon``."""
    listed = listed_params("Muon", params)
    groups: list[dict[str, Any]] = [each for each in listed if isinstance(each, dict)] or [{"params": listed}]
    found: list[dict[str, Any]] = []
    for group in groups:
        if "use_muon" in group:
            found.append(group)
            continue
        own = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        kinds: dict[bool, list[Any]] = {True: [], False: []}
        for param in own:
            kinds[(param[1] if isinstance(param, tuple) else param).dim() in (2, 3)].append(param)
        found += [group | {"params": each, "use_muon": is_matrix} for is_matrix, each in kinds.items() if each]
    return found
