"""``on_ranks``: the decorator that turns a test function into one that runs on several ranks.

It knows pytest; the processes are ``pool.py``'s concern.
"""

from __future__ import annotations

import functools
import inspect
import pickle
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.mesh import device_type
from harness.on_pretend import OnPretend, on_pretend
from harness.pool import Outcome, run_on_pool
from harness.results import first_difference
from harness.worker import PRETEND, Job


def on_ranks(*world_sizes: int, timeout: float = 120.0, device: str = "") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the test once for each world size, its body on that many processes at the same time.

    Order of decorators: any; ``parametrize``, ``slow``, ``skipif`` and ``xfail`` marks go above or below.
    Arguments:  parameters and fixtures come pickled to each rank, and all ranks get the same: they share ``tmp_path``.
                ``monkeypatch``, ``capsys`` and ``request`` stay in the parent: use ``unittest.mock.patch`` in the body.
                A body that has an argument ``world_size`` gets it.
    The body:   must be a function at the top of its module, which each rank imports. The default process group exists,
                one CPU thread a rank, seeds are 0, warnings are errors under pytest's own filters. ``pytest.raises``,
                ``warns``, ``skip``, ``xfail`` and bare ``assert`` work as anywhere. A skip is taken on all ranks.
    Output:     what ranks print is shown with the rank in front, by pytest's usual rules.
    Failure:    the traceback of the rank that failed first, without the parent's; the processes are replaced.
    timeout:    seconds for one run of the body; then every rank's Python stacks are shown and the test fails.
    device:     "pretend": the pretend accelerator, with gloo between the ranks; "pretend_model": one process plays rank 0, and the
                others have its data. Skipped without a C++ compiler. Tests for the CPU run on it as well, and must then compute the
                same bits, if ``on_pretend.py`` says so.
    Slow tests: world sizes above 2, if there is a smaller one. ``@on_ranks(2, 3)`` runs on 2 ranks in ``make test``, on 3 in
                ``make test-slow``; ``@on_ranks(4)`` in ``make test``.
    """
    if not world_sizes:
        raise TypeError("on_ranks needs at least one world size: @on_ranks(2, 3)")

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        if "." in body.__qualname__:
            raise TypeError(f"on_ranks: {body.__qualname__} must be a function at the top of its module for ranks to import")
        signature = inspect.signature(body)
        wants_world_size = "world_size" in signature.parameters

        @functools.wraps(body)
        def test(*, world_size: int, **arguments: object) -> None:
            _skip_without_devices(world_size, PRETEND if isinstance(world_size, OnPretend) else device)
            if wants_world_size:
                arguments["world_size"] = int(world_size)
            if isinstance(world_size, OnPretend):
                _compare_devices(int(world_size), body, arguments, timeout)
                return
            outcome = run_on_pool(world_size, _job(body, arguments), timeout, device)
            for text in outcome.output:
                sys.stdout.write(text)
            _report(outcome)

        if not wants_world_size:
            extra = inspect.Parameter("world_size", inspect.Parameter.KEYWORD_ONLY)
            signature = signature.replace(parameters=[*signature.parameters.values(), extra])
        test.__signature__ = signature  # type: ignore[attr-defined]  # pytest reads the arguments from it
        test.on_ranks_body = body  # type: ignore[attr-defined]  # where a rank finds the body
        variants = [_variant(each, world_sizes) for each in world_sizes]
        if not device:
            variants += on_pretend(inspect.getfile(body), body.__name__, world_sizes)
        return pytest.mark.parametrize("world_size", variants)(test)

    return decorate


def _compare_devices(world_size: int, body: Callable[..., None], arguments: dict[str, Any], timeout: float) -> None:
    """Run the body on the CPU, then on the pretend accelerator, which must compute the same bits; each run has folders of its own."""
    outcomes = []
    for device in ("", PRETEND):
        given = {name: _folder_below(value, device or "cpu") for name, value in arguments.items()}
        outcomes.append(run_on_pool(world_size, replace(_job(body, given), keep_results=True), timeout, device))
    for outcome in outcomes:
        for text in outcome.output:
            sys.stdout.write(text)
        _report(outcome)
    on_cpu, late = outcomes
    if not late.used_device:
        pytest.fail("the body put nothing on the device: it has no place in harness/on_pretend.py", pytrace=False)
    for rank, (ours, expected) in enumerate(zip(late.results, on_cpu.results, strict=True)):
        difference = first_difference(ours, expected)
        if difference is not None:
            pytest.fail(f"rank {rank} computes other bits than on the CPU: {difference}", pytrace=False)


def _folder_below(value: object, name: str) -> object:
    """A new folder in ``value`` if that is a folder, as ``tmp_path`` is; else ``value``."""
    if not (isinstance(value, Path) and value.is_dir()):
        return value
    folder = value / name
    folder.mkdir()
    return folder


def _variant(world_size: int, world_sizes: Sequence[int]) -> Any:
    """Quick on the fewest ranks, slow on more; the most of three numbers or more are for ``make test-full``."""
    smallest, largest = min(world_sizes), max(world_sizes)
    if len(world_sizes) > 2 and world_size == largest:
        marks = [pytest.mark.full]
    else:
        marks = [pytest.mark.slow] if world_size > max(smallest, 2) else []
    return pytest.param(world_size, id=f"ranks{world_size}", marks=marks)


def _job(body: Callable[..., None], arguments: dict[str, Any]) -> Job:
    pickled = {}
    for name, value in arguments.items():
        try:
            pickled[name] = pickle.dumps(value)
        except Exception as error:
            raise TypeError(
                f"on_ranks: the argument {name!r} ({type(value).__name__}) can't be sent to the ranks: {error}\n"
                "fix: pass a function or class from the top of a module, or a name that the body looks up"
            ) from None
    return Job(
        module=body.__module__,
        path=inspect.getfile(body),
        function=body.__name__,
        arguments=pickled,
        # What pytest has in force for this very test: its ini file, -W, and the test's own marks.
        warning_filters=pickle.dumps(list(warnings.filters)),
    )


def _skip_without_devices(world_size: int, device: str) -> None:
    if device or device_type() == "pretend":
        from fsdp2.testing import pretend

        if missing := pretend.missing_tools():
            pytest.skip(f"the pretend accelerator is compiled first, which needs {' and '.join(missing)}")
        pretend.library()  # here, once, before ranks ask for it
    elif device_type() == "cuda":
        import torch

        if torch.cuda.device_count() < world_size:
            pytest.skip(f"needs {world_size} CUDA devices, one a rank; found {torch.cuda.device_count()}")


def _report(outcome: Outcome) -> None:
    if outcome.kind == "failed":
        pytest.fail(outcome.text, pytrace=False)
    if outcome.kind == "skipped":
        pytest.skip(outcome.text)
    if outcome.kind == "xfailed":
        pytest.xfail(outcome.text)
