"""Warnings: on rank 0, at the line of the user's program that led to them, once; as errors, on all ranks alike."""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp2 import doctor, fully_shard, user_warnings
from harness import cpu_mesh, on_ranks
from harness.models import batches, mlp
from harness.training import forward_backward

X = batches(1)[0]


def shown_by(run: Callable[[], object], action: str = "always") -> list[tuple[str, int]]:
    """Where each of our warnings pointed to."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter(action)  # type: ignore[arg-type]
        run()
    return [(each.filename, each.lineno) for each in caught]


def line_of(function: Callable[..., Any]) -> tuple[str, int]:
    return __file__, function.__code__.co_firstlineno


def with_adapters(mesh: Any = None) -> Any:
    model = fully_shard(mlp(), mesh=mesh or cpu_mesh())
    model.blocks[0].adapter = nn.Linear(2, 2)
    return model


@on_ranks(2)
def test_rank_0_alone_shows_a_warning_at_the_line_of_the_program_that_led_to_it():
    model = with_adapters()
    trained = fully_shard(mlp(), mesh=cpu_mesh())
    optimizer = torch.optim.SGD(trained.parameters())
    watching = doctor.watch(trained, optimizer)
    weight = trained.last.weight

    def same_data_twice() -> None:
        for _ in range(2):
            optimizer.zero_grad()
            forward_backward(trained, torch.ones(3, 7))
            step()

    step = lambda: optimizer.step()  # noqa: E731
    outside = lambda: (trained(X).sum() + weight.to_local().sum()).backward()  # noqa: E731
    call = lambda: model(X)  # noqa: E731
    setter = lambda: model.set_reduce_scatter_divide_factor(2.0)  # noqa: E731
    # Through nn.Module.__call__; a method of ours; the hook of an optimizer; a hook in backward.
    for run, line in [(call, call), (setter, setter), (same_data_twice, step), (outside, outside)]:
        shown = shown_by(run)
        assert shown == ([line_of(line)] if dist.get_rank() == 0 else []), line.__code__.co_firstlineno
    watching.stop()


@on_ranks(2)
def test_a_second_time_is_silent_and_a_filter_makes_it_an_error_on_every_rank():
    model = fully_shard(mlp(), mesh=cpu_mesh())

    def twice() -> None:
        for _ in range(2):
            model.set_reduce_scatter_divide_factor(2.0)

    assert len(shown_by(twice, "default")) == (dist.get_rank() == 0)
    assert shown_by(twice, "ignore") == []
    adapted = with_adapters()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for run in (twice, lambda: adapted(X)):
            with pytest.raises(Warning, match=r"set_gradient_divide_factor|registered below FSDPMLP"):
                run()
        dist.barrier()  # all ranks have raised, none waits for the gather of another


@on_ranks(2)
def test_the_first_rank_of_a_model_that_rank_0_has_not_warns_of_it():
    """As of a later stage of a pipeline."""
    stages = cpu_mesh(2, 1, names=("pipeline", "data"))
    model = with_adapters(stages["data"])
    assert len(shown_by(lambda: model(X))) == 1
    assert model._get_fsdp_state().ranks == {dist.get_rank()}


def test_what_stands_between_the_line_and_the_warning_is_passed_over():
    warn = functools.partial(user_warnings.warn, "careful")

    def at_the_end_of_a_block() -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(warn)

    in_a_thread = lambda: (thread := threading.Thread(target=warn), thread.start(), thread.join())  # noqa: E731
    in_a_checkpoint = lambda: checkpoint(lambda x: x * (warn() or 1), X, use_reentrant=False)  # noqa: E731
    for run in (in_a_thread, in_a_checkpoint):
        assert shown_by(run) == [line_of(run)]
    file, line = line_of(at_the_end_of_a_block)
    assert shown_by(at_the_end_of_a_block) == [(file, line + 1)]
