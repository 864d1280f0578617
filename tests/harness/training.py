"""Train a model and say what came of every step, so that two trainings can be compared; and force private options.

Oracles for a sharded model on W ranks, all of them the unsharded model:

    fed_whole(model, ...)       fed the whole batch: what the user expects; equal up to the order of additions
    fed_in_chunks(model, ...)   fed W chunks in turn, their gradients added in rank order and divided by W: the same
                                arithmetic as data parallelism, so equal bit for bit where a collective adds in rank order

    shard_blocks(model)                                  # fully_shard, ours or torch's
    steps = fed_own_chunk(model, batches(), adamw)
    assert_same_bits(steps, fed_in_chunks(reference, batches(), adamw))
    assert_equal_training(steps, fed_whole(reference, batches(), adamw))
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from harness.results import are_kept, note

Iteration = Callable[[nn.Module, Tensor], Tensor]
MakeOptimizer = Callable[[Any], Optimizer]


@dataclass(frozen=True)
class Step:
    """One optimizer step: the loss of the whole batch, each parameter's gradient before and its value after the step."""

    loss: Tensor
    grads: dict[str, Tensor | None]
    params: dict[str, Tensor]


# --- optimizers ---------------------------------------------------------------------------------------------------------------


def sgd(params: Any) -> Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def sgd_one_by_one(params: Any) -> Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=False)


def sgd_foreach(params: Any) -> Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True)


def adamw(params: Any) -> Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


def adamw_one_by_one(params: Any) -> Optimizer:
    return torch.optim.AdamW(params, lr=0.01, foreach=False)


def adamw_foreach(params: Any) -> Optimizer:
    return torch.optim.AdamW(params, lr=0.01, foreach=True)


# --- one training -------------------------------------------------------------------------------------------------------------


def forward_backward(model: nn.Module, x: Tensor) -> Tensor:
    """The default iteration: the mean square of the output."""
    loss = model(x).square().mean()
    loss.backward()
    return loss


def backward_of(loss_of: Callable[[Any, Tensor], Tensor]) -> Iteration:
    """An iteration with another loss."""

    def iteration(model: nn.Module, x: Tensor) -> Tensor:
        loss = loss_of(model, x)
        loss.backward()
        return loss

    return iteration


def micro_batches(number: int, **setters: Sequence[int]) -> Iteration:
    """``number`` backwards; ``set_requires_all_reduce=[2]`` turns it on in a sharded model before the third, off before others."""

    def iteration(model: Any, x: Tensor) -> Tensor:
        losses = []
        for index, rows in enumerate(x.chunk(number)):
            for name, chosen in setters.items() if hasattr(model, "reshard") else ():
                getattr(model, name)(index in chosen)
            losses.append(forward_backward(model, rows).float())
        return torch.stack(losses).mean()

    return iteration


def own_chunk(x: Tensor) -> Tensor:
    """The rows of ``x`` that are this rank's, of all ranks of the world."""
    rows = x.chunk(dist.get_world_size())[dist.get_rank()]
    return rows.clone() if are_kept() else rows  # a cache line begins where it does on another device, on which bits depend


def fed_own_chunk(
    model: nn.Module,
    inputs: Sequence[Tensor],
    make_optimizer: MakeOptimizer = sgd,
    iteration: Iteration = forward_backward,
    optimizer: Optimizer | None = None,
) -> list[Step]:
    """Train a data-parallel model, each rank on its own rows. Collective: yes."""
    optimizer = optimizer or make_optimizer(model.parameters())
    steps = []
    for x in inputs:
        rows = _at_its_own_address(own_chunk(x), model)
        loss = iteration(model, rows).detach()
        losses = [torch.empty_like(loss) for _ in range(dist.get_world_size())]
        dist.all_gather(losses, loss)
        steps.append(_take_step(model, optimizer, torch.stack(losses).mean()))
    return steps


def _at_its_own_address(rows: Tensor, model: Any) -> Tensor:
    """Where results are compared between devices: on the model's, and at the same address modulo a cache line, on which bits depend."""
    from fsdp2 import FSDPModule

    if not are_kept():
        return rows
    device = (
        model._get_fsdp_state().device if isinstance(model, FSDPModule) else next((p.device for p in model.parameters()), rows.device)
    )
    return rows.clone().to(device)


def fed_whole(
    model: nn.Module,
    inputs: Sequence[Tensor],
    make_optimizer: MakeOptimizer = sgd,
    iteration: Iteration = forward_backward,
) -> list[Step]:
    """Train the unsharded model on the whole batches."""
    optimizer = make_optimizer(model.parameters())
    return [_take_step(model, optimizer, iteration(model, x).detach()) for x in inputs]


def fed_in_chunks(
    model: nn.Module,
    inputs: Sequence[Tensor],
    make_optimizer: MakeOptimizer = sgd,
    iteration: Iteration = forward_backward,
    world_size: int | None = None,
) -> list[Step]:
    """Train the unsharded model on one rank's rows after another, as data parallelism does."""
    world_size = world_size or dist.get_world_size()
    optimizer = make_optimizer(model.parameters())
    steps = []
    for x in inputs:
        losses = []
        total: dict[str, Tensor] = {}
        for chunk in x.chunk(world_size):
            losses.append(iteration(model, _at_its_own_address(chunk, model)).detach())
            for name, param in model.named_parameters():
                if param.grad is not None:
                    total[name] = total[name] + param.grad if name in total else param.grad
                    param.grad = None
        for name, param in model.named_parameters():
            if name in total:
                param.grad = total[name] / world_size
        steps.append(_take_step(model, optimizer, torch.stack(losses).mean()))
    return steps


def _take_step(model: nn.Module, optimizer: Optimizer, loss: Tensor) -> Step:
    grads = grads_of(model)
    optimizer.step()
    optimizer.zero_grad()
    note("loss", {"": loss})
    return Step(loss, grads, state_of(model))


def _kept(grad: Tensor | None) -> Tensor | None:
    return None if grad is None else grad.detach().clone()


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the parameters as they are now."""
    state = {name: param.detach().clone() for name, param in model.named_parameters()}
    note("value of", state)
    return state


def grads_of(model: nn.Module) -> dict[str, Tensor | None]:
    """Copies of the gradients as they are now."""
    grads = {name: _kept(param.grad) for name, param in model.named_parameters()}
    note("gradient of", grads)
    return grads


# --- comparing two ------------------------------------------------------------------------------------------------------------


def own_piece(whole: Tensor, like: DTensor) -> Tensor:
    """What this rank keeps of ``whole`` if it is placed like ``like``: by ``torch.chunk`` alone, nobody's layout code."""
    for axis, placement in enumerate(like.placements):
        if isinstance(placement, Shard):
            pieces = whole.chunk(like.device_mesh.size(axis), placement.dim)
            rank = like.device_mesh.get_local_rank(axis)
            whole = pieces[rank] if rank < len(pieces) else whole.narrow(placement.dim, 0, 0)
    return whole


def _pair(actual: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    """What this rank has of both, on the device of the expected one: an oracle is computed on the CPU."""
    if isinstance(actual, DTensor):
        assert actual.shape == expected.shape
        if isinstance(expected, DTensor):
            assert actual.placements == expected.placements
            expected = expected.to_local()
        else:
            expected = own_piece(expected, actual)
        actual = actual.to_local()
    return actual.to(expected.device), expected


def assert_same_tensor(actual: Tensor | None, expected: Tensor | None, what: str) -> None:
    """Bit for bit, in dtype and in shape; None equals None alone."""
    if actual is None or expected is None:
        assert actual is expected, f"{what}: expected {expected}, got {actual}"
        return
    ours, theirs = _pair(actual, expected)
    assert ours.dtype == theirs.dtype, what
    assert ours.shape == theirs.shape, what
    if not torch.equal(ours, theirs):
        difference = (ours - theirs).abs().max().item()
        raise AssertionError(f"{what} is not bitwise what it should be: off by up to {difference:.3g}\n{ours}\n{theirs}")


def assert_same_tensors(actual: dict[str, Any], expected: dict[str, Any], what: str) -> None:
    assert actual.keys() == expected.keys()
    for name in expected:
        assert_same_tensor(actual[name], expected[name], f"{what} of {name}")


def assert_same_bits(actual: Sequence[Step], expected: Sequence[Step]) -> None:
    """Losses, gradients and parameters of every step are the same numbers."""
    assert len(actual) == len(expected)
    for index, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        assert_same_tensor(ours.loss, theirs.loss, f"step {index}: loss")
        assert_same_tensors(ours.grads, theirs.grads, f"step {index}: gradient")
        assert_same_tensors(ours.params, theirs.params, f"step {index}: value")


def assert_equal_grads(
    actual: dict[str, Tensor | None], expected: dict[str, Tensor | None], what: str = "gradient", ulps: float = 16
) -> None:
    """Every element within ``ulps`` units in the last place of the tensor's largest one: sums were added in another order.

    A sum that cancels keeps the rounding of its terms, so no tensor counts as smaller than a hundredth of the largest.
    """
    assert actual.keys() == expected.keys()
    largest = _largest(expected)
    floor = max(largest.values(), default=0.0) / 100
    for name, theirs in expected.items():
        ours = actual[name]
        if ours is None or theirs is None:
            assert ours is theirs, f"{what} of {name}: expected {theirs}, got {ours}"
            continue
        bound = ulps * torch.finfo(theirs.dtype).eps * max(largest[name], floor)
        torch.testing.assert_close(*_pair(ours, theirs), atol=bound, rtol=0, msg=lambda text, n=name: f"{what} of {n}: {text}")


def assert_equal_training(
    actual: Sequence[Step], expected: Sequence[Step], *, bound: float = 1e-6, ulps: float = 16, but: Sequence[str] = ()
) -> None:
    """Equal up to the order of additions.

    bound:  of losses and parameters, absolute and relative
    ulps:   of gradients, see ``assert_equal_grads``
    but:    ends of the names of parameters that the caller compares in another way
    """
    assert len(actual) == len(expected)
    for index, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        torch.testing.assert_close(*_pair(ours.loss, theirs.loss), atol=bound, rtol=bound)
        assert_equal_grads(_without(ours.grads, but), _without(theirs.grads, but), f"step {index}: gradient", ulps)
        for name, value in _without(theirs.params, but).items():
            pair = _pair(ours.params[name], value)
            where = f"step {index}: value of {name}"
            torch.testing.assert_close(*pair, atol=bound, rtol=bound, msg=lambda text, where=where: f"{where}: {text}")


def assert_trains_bitwise_as(model: nn.Module, reference: nn.Module, *training: Any, **options: Any) -> None:
    """Each rank fed its own rows, ``model`` trains as ``reference`` does fed all ranks' rows in turn, bit for bit. Collective: yes."""
    assert_same_bits(fed_own_chunk(model, *training, **options), fed_in_chunks(reference, *training, **options))


def assert_trains_as(model: nn.Module, reference: nn.Module, *training: Any, **options: Any) -> None:
    """As ``assert_trains_bitwise_as``, up to the order of additions; with the bounds of ``assert_equal_training``. Collective: yes."""
    bounds = {name: options.pop(name) for name in ("bound", "ulps", "but") if name in options}
    steps = fed_own_chunk(model, *training, **options)
    assert_equal_training(steps, fed_in_chunks(reference, *training, **options), **bounds)


def _without(tensors: dict[str, Any], but: Sequence[str]) -> dict[str, Any]:
    return {name: tensor for name, tensor in tensors.items() if not name.endswith(tuple(but))} if but else tensors


def _largest(tensors: dict[str, Tensor | None]) -> dict[str, float]:
    """The largest magnitude in each tensor. Collective if one of them is a DTensor, which is looked at as a whole."""
    found = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in found.values()]
    largest = torch.tensor([tensor.abs().max().item() if tensor.numel() > 0 else 0.0 for tensor in local])
    if any(isinstance(tensor, DTensor) for tensor in found.values()):
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    return dict(zip(found, largest.tolist(), strict=True))


# --- private options ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def forced(**options: Any) -> Iterator[None]:
    """Modules that are sharded inside use these fields of ``GroupOptions``: gather, all_gather, reduce_scatter, all_reduce."""
    from fsdp2.core.setup.build import private_options

    before = dict(private_options)
    private_options.update({name: value for name, value in options.items() if value is not None})
    try:
        yield
    finally:
        private_options.clear()
        private_options.update(before)
