"""What runs until it is stopped leaves nothing, however it ends: no hook, thread, patched function, file, signal handler."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp2
from fsdp2 import doctor
from fsdp2.core.comm import collective_log
from fsdp2.errors import OrderError
from fsdp2.inspect import events
from fsdp2.lifecycle import UntilStopped
from fsdp2.torch_names import torch_autograd
from harness import on_ranks
from harness.inspected import folder_for_all, training

Begin = Callable[[], Any]

KINDS: dict[str, Callable[[Path, nn.Module, torch.optim.Optimizer], Any]] = {
    "ledger": lambda folder, model, optimizer: fsdp2.ledger(folder, model, optimizer),
    "ledger of any optimizer": lambda folder, model, optimizer: fsdp2.ledger(folder, model),
    "record": lambda folder, model, optimizer: fsdp2.record(folder, model, optimizer),
    "trace": lambda folder, model, optimizer: fsdp2.trace(folder),
    "watch": lambda folder, model, optimizer: doctor.watch(model, optimizer, every=1),
    "watchdog": lambda folder, model, optimizer: fsdp2.watchdog(timeout=3600),
    "install": lambda folder, model, optimizer: fsdp2.install(),
    "install of FSDP1's names": lambda folder, model, optimizer: fsdp2.install(fsdp1=True),
}


def stopped_twice(begin: Begin, step: Begin) -> None:
    running = begin()
    step()
    running.stop()
    running.stop()


def of_a_block(begin: Begin, step: Begin) -> None:
    with begin() as running:
        assert isinstance(running, UntilStopped)
        step()


def stopped_within_its_block(begin: Begin, step: Begin) -> None:
    with begin() as running:
        step()
        running.stop()
        step()


def after_an_error(begin: Begin, step: Begin) -> None:
    with contextlib.suppress(KeyError), begin() as running:
        step()
        raise KeyError
    running.stop()


def stopped_before_its_block(begin: Begin, step: Begin) -> None:
    running = begin()
    running.stop()
    with pytest.raises(OrderError, match="has ended before the block begins"), running:
        step()


def two_that_end_in_the_order_in_which_they_began(begin: Begin, step: Begin) -> None:
    first, second = begin(), begin()
    step()
    first.stop()
    step()
    second.stop()


def where_the_beginning_fails(begin: Begin, step: Begin) -> None:
    usual = UntilStopped.__init__

    def fails(self: Any) -> None:
        begins = self._begin

        def begin_and_fail(undo: contextlib.ExitStack) -> None:
            begins(undo)
            raise KeyError

        self._begin = begin_and_fail
        usual(self)

    UntilStopped.__init__ = fails  # type: ignore[method-assign]
    try:
        with pytest.raises(KeyError):
            begin()
    finally:
        UntilStopped.__init__ = usual  # type: ignore[method-assign]


WAYS = [
    stopped_twice,
    of_a_block,
    stopped_within_its_block,
    stopped_before_its_block,
    after_an_error,
    two_that_end_in_the_order_in_which_they_began,
    where_the_beginning_fails,
]


def functions() -> dict[str, int]:
    """Each function and class that a loaded module of torch's or ours has, by where it is."""
    found = {}
    for module_name, module in list(sys.modules.items()):
        if isinstance(module, types.ModuleType) and module_name.split(".")[0] in ("torch", "fsdp2", __name__):
            for name, value in list(vars(module).items()):
                if callable(value):
                    found[f"{module_name}.{name}"] = id(value)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau
    return found | {"ReduceLROnPlateau.step": id(scheduler.step)}


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What a tool may change, in this process and on these objects."""
    hooks = sys.modules["torch.optim.optimizer"]
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    return {
        "functions": functions(),
        "module hooks": [
            [len(each) for key, each in sorted(vars(module).items()) if "hooks" in key and isinstance(each, dict)]
            for module in model.modules()
        ],
        "watchers": [len(module._get_fsdp_state().watchers) for module in model.modules()],
        "parameter hooks": [len(param._backward_hooks or ()) for param in model.parameters()],
        "optimizer hooks": [len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)],
        "global hooks": [len(hooks._global_optimizer_pre_hooks), len(hooks._global_optimizer_post_hooks)],
        "listeners": events.listeners,
        "log": collective_log.current,
        "profiler": torch_autograd.profiler_is_on(),
        "threads": {each.name for each in threading.enumerate()},
        "files": sorted(os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()),
        "signals": (wakeup, signal.getsignal(signal.SIGUSR1)),
    }


def differences(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What has changed; of functions, those that were there before."""
    functions = [name for name, value in before.pop("functions").items() if after["functions"].get(name, value) != value]
    changed = {what: (value, after[what]) for what, value in before.items() if after[what] != value}
    return changed | ({"functions": functions} if functions else {})


@on_ranks(2)
def test_nothing_is_left_of_what_ran_until_it_was_stopped(world_size):
    model, optimizer, _ = training(8)
    inputs = torch.randn(2, 8, generator=torch.Generator().manual_seed(dist.get_rank()))

    def step() -> None:
        model(inputs).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    folder, number = folder_for_all(), itertools.count()
    step()
    left = {}
    for kind, begins in KINDS.items():
        begin = lambda begins=begins: begins(folder / str(next(number)), model, optimizer)  # noqa: E731
        stopped_twice(begin, step)  # what a first use loads stays
        for way in WAYS:
            before = state_of(model, optimizer)
            way(begin, step)
            dist.barrier()
            if changed := differences(before, state_of(model, optimizer)):
                left[kind, way.__name__] = changed
    assert not left, left


@on_ranks(1)
def test_a_model_that_was_compiled_and_uncompiled_is_as_before(world_size):
    model, optimizer, step = training(8)
    step()
    fsdp2.uncompile(fsdp2.compile(model))
    before = state_of(model, optimizer), dict(vars(model))
    assert fsdp2.compile(model) is model  # as torch.compile, it returns what to call
    assert vars(model) != before[1]
    assert fsdp2.uncompile(fsdp2.uncompile(model)) is model
    assert differences(before[0], state_of(model, optimizer)) == {}
    assert vars(model) == before[1]
