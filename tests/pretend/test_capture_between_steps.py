"""``fsdp2.capture`` where calls differ: a step raises, an optimizer joins late, state is loaded, an argument is written."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fsdp2
from harness import on_ranks
from harness.models import batches
from harness.training import forward_backward, own_chunk, sgd
from pretend.test_capture import WAYS, sharded, values


class Program:
    """A model, its optimizer and a step; subclasses change one thing."""

    reason: str | None = None

    def __init__(self) -> None:
        self.model = sharded(WAYS["bf16"])
        self.optimizer = sgd(self.model.parameters())
        self.raises = False

    def step(self, x: Tensor, *more: Any) -> Any:
        if self.raises:
            raise ValueError("a bad batch")
        loss = forward_backward(self.model, x)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def call(self, run: Callable[..., Any], x: Tensor, index: int) -> Any:
        return run(x)

    def between(self, index: int) -> None:
        pass


class _Raises(Program):
    at = 0

    def call(self, run: Callable[..., Any], x: Tensor, index: int) -> Any:
        if index == self.at:
            self.raises = True
            with pytest.raises(ValueError, match="a bad batch"):
                run(x)
            self.raises = False
        return run(x)


class RaisesAtFirst(_Raises):
    """Its learning rate changes later: the optimizer is found, though the first call found none."""

    def between(self, index: int) -> None:
        if index == 4:
            self.optimizer.param_groups[0]["lr"] = 0.01


class RaisesInTheLastWatchedStep(_Raises):
    """The step that comes in its place is watched."""

    at, reason = 2, "a Python number changes"
    calls = 0

    def step(self, x: Tensor) -> Any:
        loss = super().step(x)
        self.calls += 1
        return loss * self.calls


class StepsLate(Program):
    """No optimizer steps in the first call, which is another form."""

    def step(self, x: Tensor, last: bool) -> Any:
        with fsdp2.accumulate(self.model, last=last):
            loss = forward_backward(self.model, x)
        if last:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=False)
        return loss

    def call(self, run: Callable[..., Any], x: Tensor, index: int) -> Any:
        return run(x, index > 0)

    def between(self, index: int) -> None:
        if index == 5:
            self.optimizer.param_groups[0]["lr"] = 0.01


class LoadsState(Program):
    """The optimizer gets other tensors, which the graph must read."""

    def between(self, index: int) -> None:
        if index == 1:
            self.saved = copy.deepcopy(self.optimizer.state_dict())
        if index == 4:
            self.optimizer.load_state_dict(self.saved)


class WritesAnArgument(Program):
    reason = "writes into an argument"

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros((), device="pretend")

    def step(self, x: Tensor, total: Tensor) -> Any:
        loss = super().step(x)
        total.add_(loss.detach())
        return loss

    def call(self, run: Callable[..., Any], x: Tensor, index: int) -> Any:
        return run(x, self.total), self.total.clone()


class NeedsAGradientOfAnArgument(Program):
    reason = "requires a gradient"

    def step(self, x: Tensor) -> Any:
        loss = super().step(x)
        (grad,) = torch.autograd.grad(x.square().sum(), x)
        return loss + grad.sum()

    def call(self, run: Callable[..., Any], x: Tensor, index: int) -> Any:
        return run(x.requires_grad_())


class PassesOneThenTrue(Program):
    """Equal in Python, and different to an operator."""

    def step(self, x: Tensor, flag: Any) -> Any:
        loss = super().step(x)
        return loss + x.sum() if flag is True else loss

    def call(self, run: Callable[..., Any], x: Tensor, index: int) -> Any:
        return run(x, 1 if index < 4 else True)


PROGRAMS: list[type[Program]] = [
    RaisesAtFirst,
    RaisesInTheLastWatchedStep,
    StepsLate,
    LoadsState,
    WritesAnArgument,
    NeedsAGradientOfAnArgument,
    PassesOneThenTrue,
]


def trained(kind: type[Program], captured: bool) -> tuple[list[Any], Any, Any]:
    program = kind()
    run: Any = fsdp2.capture(program.step) if captured else program.step
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for index, x in enumerate(batches(8)):
            found.append(program.call(run, own_chunk(x).to("pretend"), index))
            program.between(index)
    found = torch.utils._pytree.tree_map_only(Tensor, lambda each: each.detach().cpu(), found)
    return found, values(program.model), run


@on_ranks(2, device="pretend")
@pytest.mark.parametrize("kind", PROGRAMS, ids=lambda kind: kind.__name__)
def test_calls_that_differ_train_as_eager_ones(kind):
    expected = trained(kind, False)[:2]
    *found, run = trained(kind, True)
    torch.testing.assert_close(tuple(found), expected, rtol=0, atol=0)
    assert (kind.reason or "") in (run.reason or ""), run.reason
    assert kind.reason or run.reason is None, run.reason
