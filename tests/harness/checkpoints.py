"""For tests of checkpoints: a module of all that is rare, values without shards, a trained optimizer, one rank, all ranks, crashes."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp2.checkpoint.file_reading import ByteReader
from fsdp2.checkpoint.lazy_tensors import LazyTensor, dtype_of
from fsdp2.checkpoint.shard_geometry import Box

from .models import batches
from .training import adamw, fed_own_chunk


class Odd(nn.Module):
    """No dims, a single row, no rows, channels-last, other dtypes, a frozen parameter, ties, buffers of all kinds."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.zero_dim = nn.Parameter(torch.randn(()))
        self.one_row = nn.Parameter(torch.randn(1, 3))
        self.image = nn.Parameter(torch.randn(5, 3, 2, 2).to(memory_format=torch.channels_last))
        self.wide = nn.Parameter(torch.randn(2, 3, 7))
        self.small = nn.Parameter(torch.randn(7, 2).bfloat16())
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)
        self.no_rows = nn.Parameter(torch.randn(0, 4))
        self.norm = nn.BatchNorm1d(3)
        self.one = nn.Linear(4, 6)
        self.two = nn.Linear(4, 6, bias=False)
        self.two.weight = self.one.weight
        self.register_buffer("steps", torch.randint(100, (3,)))
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("cache", torch.full((4,), 7.0), persistent=False)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.frozen)
        self.cache.fill_(7.0)


def whole(value: Any) -> Any:
    """``value``, in dicts and lists, on the CPU, every DTensor gathered. Collective: yes."""
    if isinstance(value, dict):
        return {key: whole(each) for key, each in value.items()}
    if isinstance(value, list):
        return [whole(each) for each in value]
    if isinstance(value, DTensor):
        return value.detach().full_tensor().cpu()
    return value.detach().clone().cpu() if isinstance(value, Tensor) else copy.deepcopy(value)


def read(lazy: LazyTensor) -> Tensor:
    """All of it, from its files."""
    values = torch.empty(lazy.shape, dtype=dtype_of(lazy))
    with ByteReader() as reader:
        lazy.read(Box.whole(lazy.shape), values, reader)
    return values


def trained(model: nn.Module, make_optimizer: Any = adamw, inputs: list[Tensor] | None = None) -> Optimizer:
    """The optimizer of two steps."""
    optimizer: Optimizer = make_optimizer(model.parameters())
    fed_own_chunk(model, inputs or batches(2), optimizer=optimizer)
    return optimizer


def on_rank_0(action: Callable[[], object]) -> None:
    """While the other ranks wait. Collective: yes."""
    dist.barrier()
    if dist.get_rank() == 0:
        action()
    dist.barrier()


def of_every_rank(value: Any) -> list[Any]:
    """Collective: yes."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


class CrashError(BaseException):
    """The process ends here: what nobody catches."""


@contextlib.contextmanager
def crash_at(number: int, places: Iterable[tuple[Any, str]]) -> Iterator[None]:
    """Raise instead of the call with this number, counted from 0, of a function at one of ``places``, and at all later ones."""
    count = itertools.count()

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if next(count) >= number:
                raise CrashError
            return call(*args, **kwargs)

        return run

    with contextlib.ExitStack() as stack:
        for owner, name in places:
            stack.enter_context(patch.object(owner, name, counted(getattr(owner, name))))
        yield
