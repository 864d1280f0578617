"""A unit of several dtypes, or with extensions next to plain parameters, is gathered in one collective on the host as well."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.func import functional_call

import fsdp2
from fsdp2.core.comm import collectives
from harness import cpu_mesh, on_ranks
from harness.models import batches
from harness.sharding import shard_blocks
from harness.subclasses import InDtype, RoundedTo8, RowInt8, RowInt8ForBoth, Wrapper, wrap_weights
from harness.training import assert_equal_training, fed_own_chunk, fed_whole, forward_backward

NUM_BLOCKS = 3


class Block(nn.Module):
    """Trained in fp32, next to a frozen bf16 gain and a frozen int64 shift of one row."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, dim)
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, dim).bfloat16(), requires_grad=False)
        self.shift = nn.Parameter(torch.tensor([3]), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.up(x) * self.gain + self.shift)


class Rounded(nn.Module):
    """The oracle: the plain model, whose weights are rounded where they are used."""

    def __init__(self, model: nn.Module, rounded: Any) -> None:
        super().__init__()
        self.model = model
        self.rounded = rounded

    def forward(self, x: Tensor) -> Tensor:
        weights = {name: self.rounded(param) if param.ndim > 1 else param for name, param in self.model.named_parameters()}
        return functional_call(self.model, weights, (x,))

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.named_parameters(*args, **kwargs)


ROUNDING = {
    None: lambda weight: weight,
    RowInt8: RoundedTo8.apply,
    InDtype: lambda weight: weight + (weight.bfloat16().float() - weight).detach(),
}


def blocks(kind: type[Wrapper] | None = None, dim: int = 7) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(dim) for _ in range(NUM_BLOCKS)])
    return model if kind is None else wrap_weights(model, kind)


# --- how many collectives ---------------------------------------------------------------------------------------------------------


def gathers_of_a_step(model: Any) -> int:
    """All-gathers that CommDebugMode counts in a second step."""
    x = torch.ones(2, 8, requires_grad=True)
    mode = CommDebugMode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of outputs that are views
        forward_backward(model, x)
        with mode:
            forward_backward(model, x)
    return sum(count for name, count in mode.get_comm_counts().items() if "gather" in str(name))


@on_ranks(2)
def test_a_unit_is_gathered_by_as_many_collectives_as_in_torchs_fsdp2():
    """Symptom: one for each dtype, and one more for extensions."""
    for kind in (None, RowInt8ForBoth):
        for reshard in (True, False):
            fsdp2.set_collective_algorithms("stock")
            try:
                ours = gathers_of_a_step(shard_blocks(blocks(kind, 8), reshard_after_forward=reshard))
            finally:
                fsdp2.set_collective_algorithms("measured")
            theirs = gathers_of_a_step(shard_blocks(blocks(kind, 8), fully_shard=torch_fully_shard, reshard_after_forward=reshard))
            assert ours == theirs == (2 * NUM_BLOCKS if reshard else NUM_BLOCKS), (kind, reshard)


@contextlib.contextmanager
def gathers() -> Iterator[list[tuple[int, str]]]:
    """(bytes, algorithm) of each collective that gathers parameters."""
    seen: list[tuple[int, str]] = []
    gather = collectives.all_gather

    def counted(outputs: list[Tensor], inputs: Any, process_group: Any, algorithm: str, *rest: Any) -> Any:
        seen.extend((output.nbytes, algorithm) for output in outputs)
        return gather(outputs, inputs, process_group, algorithm, *rest)

    with mock.patch.object(collectives, "all_gather", counted):
        yield seen


@on_ranks(2)
def test_its_size_chooses_the_algorithm():
    small, large = blocks()[0], nn.ParameterList(torch.ones(1 << 15, dtype=dtype) for dtype in (torch.float32, torch.float64))
    fsdp2.fully_shard(small, mesh=cpu_mesh())
    fsdp2.fully_shard(large, mesh=cpu_mesh())  # neither dtype is large enough for broadcasts alone
    with gathers() as seen:
        large.unshard()
        small.unshard()
    assert seen == [((1 << 15) * (4 + 8), "broadcast"), (2 * (4 * 8 * 4 + 16 + 16), "stock")]
    assert all(torch.equal(param, torch.ones_like(param)) for param in large.parameters())


@on_ranks(4)
def test_groups_over_different_process_groups_stay_apart():
    from torch.distributed.tensor import Shard

    from fsdp2 import ShardPlacementResult

    model = blocks()[0]
    expected = [param.detach().clone() for param in model.parameters()]
    pairs = cpu_mesh(2, 2)["shard"]
    fsdp2.fully_shard(
        model, mesh=cpu_mesh(), shard_placement_fn=lambda param: ShardPlacementResult(Shard(0), pairs) if param.ndim > 1 else None
    )
    with gathers() as seen:
        model.unshard()
    assert len(seen) == 2
    for param, value in zip(model.parameters(), expected, strict=True):
        assert torch.equal(param, value)


# --- values ---------------------------------------------------------------------------------------------------------------------


def plain(model: Any, x: Tensor) -> Tensor:
    return forward_backward(model, x)


def unsharded_early(model: Any, x: Tensor) -> Tensor:
    """All blocks are gathered before the first runs."""
    handles = [block.unshard(async_op=True) for block in model]
    for handle in reversed(handles):
        handle.wait()
    return forward_backward(model, x)


def prefetched(model: Any, x: Tensor) -> Tensor:
    for block, ahead in zip(model, [*model[1:], None], strict=True):
        block.set_modules_to_forward_prefetch([] if ahead is None else [ahead])
    for block, ahead in zip(model, [None, *model[:-1]], strict=True):
        block.set_modules_to_backward_prefetch([] if ahead is None else [ahead])
    return forward_backward(model, x)


def looked_at_first(model: Any, x: Tensor) -> Tensor:
    with torch.inference_mode():
        model(x)
    return forward_backward(model, x)


def trains_as_the_unsharded_model(kind: type[Wrapper] | None, iteration: Any, **options: Any) -> None:
    model = shard_blocks(blocks(kind), **options)
    steps = fed_own_chunk(model, batches(), iteration=iteration, optimizer=torch.optim.SGD(trained(model), 0.1))
    for step in steps:
        step.params.clear()  # of the subclass; the next step's loss and gradients show them
    expected = fed_whole(Rounded(blocks(), ROUNDING[kind]), batches(), make_optimizer=lambda params: torch.optim.SGD(params, 0.1))
    for step in expected:
        step.params.clear()
    assert_equal_training(steps, expected)


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


@on_ranks(2, 3)
def test_it_trains_as_the_unsharded_model():
    for kind in ROUNDING:
        for reshard in (False, None):
            trains_as_the_unsharded_model(kind, plain, reshard_after_forward=reshard)
        for iteration in (plain, unsharded_early, prefetched, looked_at_first):
            trains_as_the_unsharded_model(kind, iteration)


@on_ranks(4)
def test_a_smaller_mesh_in_backward_takes_one_collective_as_well():
    for kind in (None, RowInt8):
        trains_as_the_unsharded_model(kind, plain, reshard_after_forward=2)
    model = shard_blocks(blocks(), reshard_after_forward=2)
    loss = model(batches()[0]).sum()
    with gathers() as seen:
        loss.backward()
    assert len(seen) == NUM_BLOCKS


@on_ranks(2)
def test_what_is_written_between_an_asynchronous_unshard_and_its_wait_is_not_sent():
    model = blocks()[0]
    expected = {name: param.detach().clone() for name, param in model.named_parameters()}
    fsdp2.fully_shard(model, mesh=cpu_mesh())
    shards = [param.to_local() for param in model.parameters()]
    handle = model.unshard(async_op=True)
    with torch.no_grad():
        for shard in shards:
            shard.zero_()
    handle.wait()
    for name, param in model.named_parameters():
        assert torch.equal(param, expected[name]), name


# --- errors ---------------------------------------------------------------------------------------------------------------------


class FailsOnce(RowInt8):
    on_ranks: tuple[int, ...] = ()

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        if dist.get_rank() in FailsOnce.on_ranks:
            FailsOnce.on_ranks = ()
            raise ZeroDivisionError
        return super().fsdp_pre_all_gather(mesh)


@on_ranks(2)
def test_after_an_error_in_an_extension_the_next_gather_has_all_values():
    for ranks in ((0, 1), (1,)):  # where one rank alone fails, the other waits for its next gather
        for prepared in (False, True):
            model = blocks(FailsOnce)[0]
            expected = Rounded(blocks()[0], RoundedTo8.apply)(batches()[0])
            fsdp2.fully_shard(model, mesh=cpu_mesh())
            if prepared:
                model(batches()[0])
                model.reshard()
            FailsOnce.on_ranks = ranks
            if dist.get_rank() in ranks:
                with pytest.raises(ZeroDivisionError):
                    model.unshard()
            model.unshard()
            torch.testing.assert_close(model(batches()[0]), expected)
            model.reshard()
