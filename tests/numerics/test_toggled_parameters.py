"""``requires_grad`` may be toggled at any moment, on what ``parameters()`` shows then and on what an optimizer holds."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fsdp2 import FSDPModule, accumulate, fully_shard
from harness import cpu_mesh, on_ranks
from harness.models import batches, mlp, token_batches, transformer
from harness.training import assert_trains_as, forward_backward

Program = Callable[[nn.Module, Tensor, Callable[[], None]], Tensor]
ON = pytest.mark.parametrize("on", ["shown", "held"])

FROZEN = [  # before the first step, in its middle, in the middle of the second, ...
    ("blocks.1.up.weight", "last.weight", "first.bias"),
    ("blocks.1.down.weight", "first.weight", "last.bias"),  # of the same shapes as some of the first
    (),
    ("blocks.0.up.weight", "blocks.0.up.bias", "blocks.0.norm.weight", "last.weight"),
]


def freeze_only(model: nn.Module, on: str, names: tuple[str, ...]) -> None:
    """on: "shown", what the modules show now; "held", the parameters that were there between steps, as an optimizer holds them"""
    for name, held in model.held.items():
        param = model.get_parameter(name) if on == "shown" else held
        param.requires_grad_(name not in names)


def assert_trains_as_unsharded(model: nn.Module, program: Program, on: str, mesh=(), after=None, inputs=None, frozen=FROZEN) -> None:
    """``program(model, x, toggle)`` is one iteration, which calls ``toggle()`` once."""
    reference = copy.deepcopy(model)
    reference.held = dict(reference.named_parameters())
    freeze_only(reference, "held", frozen[0])
    for name, param in model.named_parameters():
        param.requires_grad_(name not in frozen[0])
    units = [model.embedding] if isinstance(model, type(transformer())) else model.blocks
    for unit in units:
        fully_shard(unit, mesh=cpu_mesh(*mesh), reshard_after_forward=after)
    fully_shard(model, mesh=cpu_mesh(*mesh), reshard_after_forward=after)
    model.held = dict(model.named_parameters())
    for step, x in enumerate(inputs or batches(len(frozen) - 1)):

        def iteration(each: nn.Module, x: Tensor, step: int = step) -> Tensor:
            if each is reference:  # which is fed one rank's rows after another
                freeze_only(each, on, frozen[step])
            return program(each, x, lambda: freeze_only(each, on, frozen[step + 1]))

        assert_trains_as(model, reference, [x], iteration=iteration)
        model.reset_iter_state()  # shows what an optimizer is built of
        assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in reference.parameters()]


def after_a_forward_without_backward(model: nn.Module, x: Tensor, toggle: Callable[[], None]) -> Tensor:
    model(x)
    toggle()
    return forward_backward(model, x)


def saved_before_the_next_forward(model: nn.Module, x: Tensor, toggle: Callable[[], None]) -> Tensor:
    model(x)
    toggle()
    model.state_dict()
    return forward_backward(model, x)


def after_an_evaluation(model: nn.Module, x: Tensor, toggle: Callable[[], None]) -> Tensor:
    with torch.no_grad():
        model(x)
    toggle()
    return forward_backward(model, x)


def between_forward_and_backward(model: nn.Module, x: Tensor, toggle: Callable[[], None]) -> Tensor:
    loss = model(x).square().mean()
    toggle()
    loss.backward()
    return loss


def unsharded_by_hand(model: nn.Module, x: Tensor, toggle: Callable[[], None]) -> Tensor:
    if isinstance(model, FSDPModule):
        model.unshard()
        model.blocks[1].unshard()
    toggle()
    return forward_backward(model, x)


PROGRAMS = {
    program.__name__: program
    for program in (
        after_a_forward_without_backward,
        saved_before_the_next_forward,
        after_an_evaluation,
        between_forward_and_backward,
        unsharded_by_hand,
    )
}


@on_ranks(2)
@ON
@pytest.mark.parametrize("after", [True, False, None])
@pytest.mark.parametrize("program", PROGRAMS)
def test_in_the_middle_of_an_iteration(program, after, on):
    """Symptom: the next gather undid the toggle of an unsharded parameter, and nobody saw that of a sharded one without a gather."""
    assert_trains_as_unsharded(mlp(), PROGRAMS[program], on, after=after)


@on_ranks(4)
@pytest.mark.slow
@ON
@pytest.mark.parametrize("program", PROGRAMS)
def test_while_parameters_are_sharded_over_a_smaller_mesh(program, on):
    assert_trains_as_unsharded(mlp(), PROGRAMS[program], on, after=2)


# --- between micro-batches --------------------------------------------------------------------------------------------------------


def in_micro_batches(
    model: nn.Module, x: Tensor, toggle: Callable[[], None], begin: Callable[[nn.Module, bool], None], at: int = 2
) -> Tensor:
    """Four micro-batches, the toggle before that of index ``at``; ``begin(model, is_last)`` sets the flags of each."""
    losses = []
    for index, micro_batch in enumerate(x.chunk(4)):
        if index == at:
            toggle()
        if isinstance(model, FSDPModule):
            begin(model, index == 3)
        losses.append(forward_backward(model, micro_batch))
    return torch.stack(losses).mean()


def without_sync(model: nn.Module, is_last: bool) -> None:
    model.set_requires_gradient_sync(is_last)


def without_sync_or_reshard(model: nn.Module, is_last: bool) -> None:
    model.set_requires_gradient_sync(is_last)
    model.set_reshard_after_backward(is_last)


def without_all_reduce(model: nn.Module, is_last: bool) -> None:
    model.set_requires_all_reduce(is_last)


def without_all_reduce_or_wait(model: nn.Module, is_last: bool) -> None:
    model.set_requires_all_reduce(is_last)
    model.set_is_last_backward(is_last)


@on_ranks(2)
@ON
@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("begin", [without_sync, without_sync_or_reshard])
def test_while_gradients_accumulate_without_sync(begin, after, at, on):
    """What was accumulated for a parameter stays its gradient when it is frozen, and nobody else's."""

    def program(model: nn.Module, x: Tensor, toggle: Callable[[], None]) -> Tensor:
        return in_micro_batches(model, x, toggle, begin, at)

    assert_trains_as_unsharded(mlp(), program, on, after=after, inputs=batches(3, shape=(24, 7)))


@on_ranks(2)
@ON
@pytest.mark.parametrize("begin", [without_sync, without_all_reduce, without_all_reduce_or_wait])
@pytest.mark.parametrize("buffers", [1, 4])
def test_while_a_partial_sum_is_kept_under_hsdp(begin, on, buffers):
    """Symptom: what had been reduced of one parameter became the gradient of another; torch's FSDP2 does that too."""

    def program(model: nn.Module, x: Tensor, toggle: Callable[[], None]) -> Tensor:
        if isinstance(model, FSDPModule):
            model.set_reduce_scatter_max_input_buffers(buffers)
        return in_micro_batches(model, x, toggle, begin)

    assert_trains_as_unsharded(mlp(), program, on, mesh=(2, 1), inputs=batches(3, shape=(24, 7)))


@on_ranks(4)
@pytest.mark.slow
@ON
@pytest.mark.parametrize("begin", [without_sync, without_all_reduce, without_all_reduce_or_wait])
def test_while_a_partial_sum_of_shards_is_kept_under_hsdp(begin, on):
    def program(model: nn.Module, x: Tensor, toggle: Callable[[], None]) -> Tensor:
        return in_micro_batches(model, x, toggle, begin)

    assert_trains_as_unsharded(mlp(), program, on, mesh=(2, 2), inputs=batches(3, shape=(48, 7)))


@on_ranks(2)
@ON
def test_inside_of_accumulate(on):
    def program(model: nn.Module, x: Tensor, toggle: Callable[[], None]) -> Tensor:
        losses = []
        for index, micro_batch in enumerate(x.chunk(3)):
            if index == 1:
                toggle()
            if isinstance(model, FSDPModule):
                with accumulate(model, last=index == 2):
                    losses.append(forward_backward(model, micro_batch))
            else:
                losses.append(forward_backward(model, micro_batch))
        return torch.stack(losses).mean()

    assert_trains_as_unsharded(mlp(), program, on)


# --- ties -------------------------------------------------------------------------------------------------------------------------


@on_ranks(2)
@ON
@pytest.mark.parametrize("after", [True, False, None])
@pytest.mark.parametrize("program", ["after_a_forward_without_backward", "after_an_evaluation"])
def test_a_tied_embedding(program, after, on):
    frozen = [("embedding.weight",), ("norm.weight",), ("embedding.weight", "position"), ()]
    assert_trains_as_unsharded(transformer(tied=True), PROGRAMS[program], on, after=after, inputs=token_batches(3), frozen=frozen)
