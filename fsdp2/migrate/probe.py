"""One process of one side of ``--parity``: runs a script and writes down losses, gradients and whole parameters at each step.

It watches through hooks of torch on every optimizer and every module, and by wrapping ``Tensor.backward``.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..clip import get_total_norm
from . import on_cpu

_WRAPPERS = ("module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


class Probe:
    """Records one rank. ``install`` starts it; after ``num_steps`` steps of the outermost optimizer the process ends."""

    def __init__(self, folder: Path, num_steps: int) -> None:
        self._folder, self._num_steps = folder, num_steps
        self._losses: list[float] = []
        self._models: list[nn.Module] = []
        self._modules_deep = self._optimizers_deep = self._step = 0
        self._norm: float | None = None
        self._gradients: dict[str, Tensor] = {}
        self._is_narrow = False

    def install(self) -> None:
        backward: Callable[..., Any] = torch.Tensor.backward

        def recorded(loss: Tensor, *args: Any, **kwargs: Any) -> Any:
            if loss.numel() == 1:
                self._losses.append(float(loss.detach()))
            return backward(loss, *args, **kwargs)

        torch.Tensor.backward = recorded  # type: ignore[method-assign, assignment]  # losses go through no hook of torch's
        register_module_forward_pre_hook(self._before_forward)
        register_module_forward_hook(self._after_forward, always_call=True)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)

    def _before_forward(self, module: nn.Module, _inputs: Any) -> None:
        if self._modules_deep == 0 and next(module.parameters(), None) is not None and not self._knows(module):
            self._models.append(module)
        self._modules_deep += 1

    def _knows(self, module: nn.Module) -> bool:
        """Whether it is part of a model that was called before: activation checkpointing calls parts again, in backward."""
        return any(each is module for model in self._models for each in model.modules())

    def _after_forward(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        self._modules_deep -= 1
        self._is_narrow |= isinstance(output, Tensor) and output.is_floating_point() and output.itemsize < torch.float32.itemsize

    def _before_step(self, _optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._optimizers_deep == 0 and self._losses:
            self._norm = _gradient_norm(self._models)
            self._gradients = _whole_tensors(self._models, gradients=True)
        self._optimizers_deep += 1

    def _after_step(self, _optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self._optimizers_deep -= 1
        # Not an optimizer inside of another one, nor a step that only makes the state for a later load.
        if self._optimizers_deep or not self._losses:
            return
        self._step += 1
        params = _whole_tensors(self._models, gradients=False)
        rank = dist.get_rank() if dist.is_initialized() else 0
        with (self._folder / f"rank{rank}.jsonl").open("a") as file:
            line = {"step": self._step, "losses": self._losses, "norm": self._norm, "narrow": self._is_narrow}
            file.write(json.dumps(line) + "\n")
        if rank == 0:
            torch.save({"params": params, "gradients": self._gradients}, self._folder / f"step{self._step}.pt")
        self._losses = []
        if self._step == self._num_steps:
            if dist.is_initialized():
                dist.barrier()
            sys.stdout.flush()
            os._exit(0)


@torch.no_grad()
def _gradient_norm(models: list[nn.Module]) -> float:
    """The norm of the gradients of all models' trainable parameters. Collective."""
    total = 0.0
    for model in models:
        if isinstance(model, FullyShardedDataParallel):
            norm = model.clip_grad_norm_(float("inf"))  # it clips nothing, and knows which shards count
        else:
            norm = get_total_norm([param.grad for param in model.parameters() if param.grad is not None])
        total += float(norm) ** 2
    return float(total**0.5)


@torch.no_grad()
def _whole_tensors(models: list[nn.Module], *, gradients: bool) -> dict[str, Tensor]:
    """Parameters or gradients in host memory, by names without wrappers; FSDP1 shows no whole gradients. Collective."""
    found = {}
    for index, model in enumerate(models):
        is_fsdp1 = isinstance(model, FullyShardedDataParallel)
        summon = FullyShardedDataParallel.summon_full_params(model, writeback=False) if is_fsdp1 else contextlib.nullcontext()
        with summon:
            for name, param in model.named_parameters():
                value = (None if is_fsdp1 else param.grad) if gradients else param
                if value is not None:
                    found[(f"model {index}: " if index else "") + _unwrapped(name)] = _whole(value)
    return found


def _unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _whole(tensor: Tensor) -> Tensor:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    whole = whole.to_dense() if whole.layout != torch.strided else whole
    return whole.detach().cpu().clone()


@dataclass(frozen=True)
class Side:
    """The script as one side of the comparison runs it: the text of ``source`` as if it were the file ``claimed``.

    overlay: the folder in which modules are looked for before that of ``claimed``
    """

    num_steps: int
    source: Path
    claimed: Path
    overlay: Path
    arguments: tuple[str, ...]

    def run(self, folder: Path) -> NoReturn:
        """Be one rank, whose records go to ``folder``."""
        texts = [file.read_text() for file in (self.source, *self.overlay.glob("*.py"))]
        if not torch.cuda.is_available():
            on_cpu.let_fsdp1_run()
            if any(map(on_cpu.asks_for_gpus, texts)):
                on_cpu.stand_in()
        Probe(folder, self.num_steps).install()
        sys.argv = [str(self.claimed), *self.arguments]
        sys.path[:0] = [str(self.overlay), str(self.claimed.resolve().parent)]
        script = types.ModuleType("__main__")
        script.__file__ = str(self.claimed)
        sys.modules["__main__"] = script  # dataclasses and pickle look it up
        exec(compile(texts[0], str(self.claimed), "exec"), vars(script))
        sys.stdout.flush()
        os._exit(0)
