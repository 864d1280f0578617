"""A parameter that the user replaces at any moment of a step: the next forward uses the new one, or refuses it by name.

The oracle is the unsharded model: a backward is of the parameters that its graph was made with; the new one gets no gradient from it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

import fsdp2
from fsdp2 import FSDPError, fully_shard
from harness import cpu_mesh, on_ranks
from harness.models import mlp
from harness.sharding import shard_blocks, with_reference

VALUE = 0.25


class Run:
    """A model, and the name of the parameter that is replaced."""

    def __init__(self, model: Any, name: str) -> None:
        self.model = model
        self.module_name, _, self.name = name.rpartition(".")
        self.old = dict(model.named_parameters())[name]
        self.x = torch.linspace(-1, 1, 28).reshape(4, 7)

    @property
    def module(self) -> Any:
        return self.model.get_submodule(self.module_name)

    def loss(self) -> Tensor:
        return self.model(self.x).square().sum()

    def evaluate(self) -> Tensor:
        with torch.no_grad():
            return self.model(self.x)

    def step(self) -> None:
        torch.optim.SGD(self.model.parameters(), lr=0.1).step()
        self.model.zero_grad()

    def whole(self) -> Tensor:
        return torch.full(tuple(self.old.shape), VALUE)

    def sharded(self) -> Tensor:
        """As the model's parameters are sharded, if they are."""
        old = self.old
        return distribute_tensor(self.whole(), old.device_mesh, old.placements) if isinstance(old, DTensor) else self.whole()


class DroppedByTorchError(Exception):
    """``param.data = tensor`` of a DTensor does nothing and leaves no trace: tests/numerics/test_writes.py."""


def assign_data(run: Run) -> None:
    shown = getattr(run.module, run.name)
    if isinstance(shown, DTensor):
        raise DroppedByTorchError
    shown.data = run.whole()


WAYS: dict[str, Callable[[Run], object]] = {
    "setattr": lambda run: setattr(run.module, run.name, nn.Parameter(run.sharded())),
    "setattr, whole": lambda run: setattr(run.module, run.name, nn.Parameter(run.whole())),
    "register_parameter": lambda run: run.module.register_parameter(run.name, nn.Parameter(run.sharded())),
    "register_parameter, whole": lambda run: run.module.register_parameter(run.name, nn.Parameter(run.whole())),
    "_parameters": lambda run: run.module._parameters.update({run.name: nn.Parameter(run.sharded())}),
    "None": lambda run: setattr(run.module, run.name, None),
    "data": assign_data,
}


def after_forward(run: Run, way: Callable[[Run], object]) -> None:
    loss = run.loss()
    way(run)
    loss.backward()


def after_a_second_forward(run: Run, way: Callable[[Run], object]) -> None:
    losses = [run.loss(), run.loss()]
    way(run)
    sum(losses).backward()  # type: ignore[union-attr]


def after_forward_without_grad(run: Run, way: Callable[[Run], object]) -> None:
    run.evaluate()
    way(run)
    run.loss().backward()


def between_micro_batches(run: Run, way: Callable[[Run], object]) -> None:
    run.loss().backward()
    way(run)
    run.loss().backward()


def between_micro_batches_without_sync(run: Run, way: Callable[[Run], object]) -> None:
    for last in (False, True):
        if isinstance(run.old, DTensor):
            run.model.set_is_last_backward(last)
            run.model.set_reshard_after_backward(last)
        run.loss().backward()
        if not last:
            way(run)


def in_pre_hook(run: Run, way: Callable[[Run], object]) -> None:
    handle = run.module.register_forward_pre_hook(lambda *_: (way(run), handle.remove())[-1])
    run.loss().backward()


def in_forward_hook(run: Run, way: Callable[[Run], object]) -> None:
    handle = run.module.register_forward_hook(lambda *_: (way(run), handle.remove())[-1])
    run.loss().backward()


def in_hook_before(run: Run, way: Callable[[Run], object]) -> None:
    """In the second step, while the module's unit is being gathered ahead of its turn."""
    run.loss().backward()
    run.step()
    handle = run.model.first.register_forward_hook(lambda *_: (way(run), handle.remove())[-1])
    run.loss().backward()


def in_backward_hook(run: Run, way: Callable[[Run], object]) -> None:
    output = run.model(run.x)
    output.register_hook(lambda _: way(run))
    output.square().sum().backward()


STATES = (
    after_forward,
    after_a_second_forward,
    after_forward_without_grad,
    between_micro_batches,
    between_micro_batches_without_sync,
    in_pre_hook,
    in_forward_hook,
    in_hook_before,
    in_backward_hook,
)


def parallelized(strategy: str) -> Callable[[Any], Any]:
    return lambda model: fsdp2.parallelize(model, strategy)  # type: ignore[arg-type]


POLICIES: dict[str, Callable[[Any], Any]] = {
    "default": shard_blocks,
    "kept": lambda model: shard_blocks(model, False),
    "resharded": lambda model: shard_blocks(model, True),
    **{strategy: parallelized(strategy) for strategy in ("ddp", "zero1", "zero2")},
}
PLACES = ("blocks.0.up.weight", "last.weight", "last.bias")


def outcome(run: Run, state: Any, way: Any) -> list[Tensor] | str:
    """What the model computes afterwards, or the name of the error that it raised."""
    try:
        state(run, way)
        run.step()
        seen = [run.evaluate()]
        run.loss().backward()
        run.step()
        return [*seen, run.evaluate()]
    except FSDPError as error:
        return type(error).__name__ if run.name in str(error) else f"no name in {error}"
    except DroppedByTorchError:
        return "dropped"
    except Exception as error:
        return "mixed" if "got mixed torch.Tensor and DTensor" in str(error) else "raised"


def faults(policies: Iterable[str], states: Iterable[Any], ways: Iterable[str], places: Iterable[str] = PLACES) -> list[str]:
    found = []
    for policy, name, state, way in itertools.product(policies, places, states, ways):
        model, reference = with_reference(mlp(), POLICIES[policy])
        expected = outcome(Run(reference, name), state, WAYS[way])
        ours = outcome(Run(model, name), state, WAYS[way])
        if ours in ("ParameterError", "OrderError", "dropped") or (ours == "raised" and expected == "raised"):
            continue
        if ours == "mixed" and state in (in_pre_hook, in_hook_before):  # the module computes with what the hook has put there
            continue
        try:
            torch.testing.assert_close(ours, expected)
        except (AssertionError, TypeError):
            found.append(f"{policy} | {name} | {state.__name__} | {way}")
    return found


@on_ranks(2)
@pytest.mark.parametrize("policy", ["kept", "resharded", "zero1"])
def test_a_replaced_parameter_is_used_by_the_next_forward_or_refused(policy):
    """Symptom: replaced between forward and backward, or in a hook, it was gone without an error when the group was resharded."""
    states = (after_forward, in_pre_hook, in_forward_hook, in_backward_hook)
    assert faults([policy], states, ("setattr", "setattr, whole", "data"), PLACES[:2]) == []


@on_ranks(2)
@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_every_way_to_replace_a_parameter_at_every_moment(policy):
    assert faults([policy], STATES, WAYS) == []


@on_ranks(4)
def test_a_replaced_parameter_of_a_group_that_is_sharded_over_a_smaller_mesh_is_used_or_refused():
    POLICIES["smaller"] = lambda model: shard_blocks(model, 2)
    assert faults(["smaller"], (after_forward, in_backward_hook), ("setattr", "setattr, whole"), PLACES[:2]) == []


@on_ranks(2)
def test_gradients_go_to_the_parameter_that_the_graph_was_made_with():
    for after in (False, True):
        layer: Any = nn.Linear(4, 4)
        model, reference = with_reference(
            layer, lambda each, after=after: fully_shard(each, mesh=cpu_mesh(), reshard_after_forward=after)
        )
        old, reference_old = model.weight, reference.weight
        loss, reference_loss = model(torch.ones(2, 4)).sum(), reference(torch.ones(2, 4)).sum()
        new = model.weight = nn.Parameter(old.detach().clone())
        reference.weight = nn.Parameter(reference_old.detach().clone())
        loss.backward()
        reference_loss.backward()
        assert model.weight is new
        assert new.grad is None
        torch.testing.assert_close(old.grad.full_tensor(), reference_old.grad)


@on_ranks(2)
def test_a_constraint_that_a_layer_assigns_to_its_data_in_forward_is_refused():
    """Symptom: the optimizer stepped, and all later forwards still computed with the first result."""

    class Constrained(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=0.1)
            return super().forward(x)

    model = fully_shard(Constrained(4, 4), mesh=cpu_mesh(), reshard_after_forward=True)
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(fsdp2.OrderError, match="weight"):
        model(torch.ones(2, 4))
