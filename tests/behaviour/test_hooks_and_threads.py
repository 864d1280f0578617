"""The user's hooks around ours, what modules show and print, and threads."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from harness import on_ranks
from harness.models import Block, batches, mlp
from harness.sharding import shard_blocks, with_reference
from harness.training import (
    assert_same_bits,
    assert_same_tensor,
    assert_trains_bitwise_as,
    fed_in_chunks,
    fed_own_chunk,
    forward_backward,
    own_chunk,
)

# --- hooks --------------------------------------------------------------------------------------------------------------------------


class Observer:
    """Registers every kind of hook and notes, in order, which ran and what it saw of the parameters and values."""

    def __init__(self, module: Block) -> None:
        self.module = module
        self.seen: list[tuple[str, str]] = []
        self.values: list[Tensor] = []
        module.register_forward_pre_hook(self.pre)
        module.register_forward_pre_hook(self.first, prepend=True)
        module.register_forward_hook(self.post)
        module.register_forward_hook(self.always, always_call=True)
        module.register_full_backward_pre_hook(self.backward_pre)
        module.register_full_backward_hook(self.backward)

    def note(self, name: str, *values: Tensor) -> None:
        param = self.module.up.weight
        self.seen.append((name, "sharded" if isinstance(param, DTensor) else "unsharded"))
        self.values += [value.detach().clone() for value in values]

    def first(self, module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        self.note("first", *args)
        return (args[0] * 1.5,)

    def pre(self, module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        self.note("pre", *args)
        return (args[0] + 1,)

    def post(self, module: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
        self.note("post", *args, output)
        output.register_hook(lambda grad: self.values.append(grad.clone()))
        return output * 2

    def always(self, module: nn.Module, args: tuple[Tensor], output: Tensor | None) -> None:
        self.note("always", *(() if output is None else (output,)))

    def backward_pre(self, module: nn.Module, grads: tuple[Tensor]) -> tuple[Tensor]:
        self.note("backward pre", *grads)
        return (grads[0] * 3,)

    def backward(self, module: nn.Module, grad_input: tuple[Tensor], grad_output: tuple[Tensor]) -> tuple[Tensor]:
        self.note("backward", *grad_input, *grad_output)
        return (grad_input[0] / 2,)


@on_ranks(1, 2)
@pytest.mark.parametrize("when", ["before fully_shard", "after fully_shard"])
@pytest.mark.parametrize("after", [True, False])
def test_hooks_of_the_user_see_and_change_what_they_do_without_sharding(when, after):
    model, reference = with_reference(mlp())
    expected = Observer(reference.blocks[1])
    if when == "before fully_shard":
        seen = Observer(model.blocks[1])
        shard_blocks(model, after)
    else:
        shard_blocks(model, after)
        seen = Observer(model.blocks[1])
    assert_trains_bitwise_as(model, reference, batches(2))
    assert [name for name, _ in seen.seen] == [name for name, _ in expected.seen[: len(seen.seen)]]
    shown = dict(seen.seen[:6])
    assert shown["pre"] == "unsharded"
    assert shown["backward"] == "unsharded"  # our hook comes when the gradients of the inputs are done, behind the user's
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    per_step = len(seen.values) // 2
    for step in range(2):  # the reference ran once for each rank in each step
        first = (step * world_size + rank) * per_step
        for index in range(per_step):
            assert_same_tensor(seen.values[step * per_step + index], expected.values[first + index], f"value {index}")


@on_ranks(2)
def test_an_always_called_hook_runs_when_forward_raises():
    model = shard_blocks(mlp())
    seen = []
    model.blocks[1].register_forward_hook(lambda *args: seen.append("always"), always_call=True)

    def raises(*args: Any) -> None:
        raise RuntimeError("trap")

    handle = model.blocks[1].down.register_forward_hook(raises)
    with pytest.raises(RuntimeError, match="trap"):
        model(own_chunk(batches()[0]))
    handle.remove()
    assert seen == ["always"]
    model.reset_iter_state()
    assert_trains_bitwise_as(model, mlp(), batches(2))


@on_ranks(2)
def test_hooks_on_parameters_survive_from_step_to_step():
    model = shard_blocks(mlp())
    steps: list[str] = []
    for name in ("first.weight", "blocks.1.scale"):
        model.get_parameter(name).register_post_accumulate_grad_hook(lambda param, name=name: steps.append(name))
    for x in batches(2):
        forward_backward(model, own_chunk(x))
    assert sorted(steps) == ["blocks.1.scale", "blocks.1.scale", "first.weight", "first.weight"]


# --- what is shown --------------------------------------------------------------------------------------------------------------------


@on_ranks(1, 2)
def test_names_order_and_printing_are_those_of_the_model():
    model, plain = with_reference(mlp(), shard_blocks)
    names = [name for name, _ in plain.named_parameters()]
    for _ in range(2):
        assert [name for name, _ in model.named_parameters()] == names
        assert list(model.state_dict()) == list(plain.state_dict())
        assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
        model.unshard()
        assert [name for name, _ in model.named_parameters()] == names
        assert type(model.first.weight) is nn.Parameter
        assert all(isinstance(param, DTensor) for param in model.blocks.parameters())
        for shown, expected in zip(model.parameters(), plain.parameters(), strict=True):
            assert shown.shape == expected.shape
            assert shown.requires_grad
        model.reshard()
        forward_backward(model, own_chunk(batches()[0]))
    expected = repr(plain).replace("MLP(", "FSDPMLP(", 1).replace("x Block(", "x FSDPBlock(")
    assert repr(model) == expected
    model.unshard()
    assert repr(model) == expected
    model.reshard()


@on_ranks(2)
@pytest.mark.parametrize("after", [True, False, None])
def test_parameters_in_the_middle_of_forward_and_backward(after):
    model = shard_blocks(mlp(), after)
    shown: dict[str, list[bool]] = {"forward": [], "between": [], "backward": []}

    def look(name: str) -> None:
        shown[name] += [
            isinstance(next(module.parameters(recurse=False), None), DTensor) for module in (model.blocks[1].up, model.first)
        ]

    model.blocks[1].up.register_forward_hook(lambda *args: look("forward"))
    model.blocks[1].up.register_full_backward_hook(lambda *args: look("backward"))
    out = model(own_chunk(batches()[0]))
    look("between")
    out.sum().backward()
    assert shown["forward"] == [False, False]
    assert shown["between"] == {True: [True, True], False: [False, False], None: [True, False]}[after]
    assert shown["backward"] == [False, False]
    assert all(isinstance(param, DTensor) for param in model.parameters())


# --- threads ------------------------------------------------------------------------------------------------------------------------


def in_a_thread(run: Callable[[], Any]) -> Any:
    results: list[Any] = []
    errors: list[BaseException] = []

    def target() -> None:
        try:
            results.append(run())
        except BaseException as error:  # handed on to the thread that waits
            errors.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("where", ["forward", "backward", "one thread each", "both in one"])
def test_forward_and_backward_in_threads(where):
    model, reference = with_reference(mlp(), shard_blocks)

    def iteration(model: nn.Module, x: Tensor) -> Tensor:
        if where == "both in one":
            return in_a_thread(lambda: forward_backward(model, x))
        forward = lambda: model(x).square().mean()  # noqa: E731
        loss = in_a_thread(forward) if where != "backward" else forward()
        if where != "forward":
            in_a_thread(loss.backward)
        else:
            loss.backward()
        return loss

    assert_same_bits(fed_own_chunk(model, batches(), iteration=iteration), fed_in_chunks(reference, batches()))


@on_ranks(1, 2)
def test_two_models_trained_in_turn_and_interleaved():
    models = [mlp(seed=0), mlp(num_blocks=2, seed=1)]
    references = [copy.deepcopy(model) for model in models]
    for model in models:
        shard_blocks(model)
    for x in batches(2):
        for model, reference in zip(models, references, strict=True):
            assert_trains_bitwise_as(model, reference, [x])

    # both forwards, then both backwards, the first one's first
    world_size = torch.distributed.get_world_size()
    for nets, ranks in ((models, [torch.distributed.get_rank()]), (references, range(world_size))):
        for rank in ranks:
            losses = [net(x.chunk(world_size)[rank]).square().mean() for net, x in zip(nets, batches(2), strict=True)]
            for loss in losses:
                loss.backward()
    for model, reference in zip(models, references, strict=True):
        for name, param in model.named_parameters():
            whole = reference.get_parameter(name).grad / world_size
            torch.testing.assert_close(param.grad.full_tensor(), whole, msg=name)
