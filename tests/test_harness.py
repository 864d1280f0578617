"""The harness itself: what a test on ranks may use, and what one sees when it fails.

Tests that must fail run in an inner pytest, in this process, so that they share the ranks of the outer one.
"""

from __future__ import annotations

import os
import random
import sys
import textwrap
import time
import warnings
from dataclasses import dataclass
from enum import Enum

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from harness import cpu_mesh, device_type, on_ranks, pool

pytest_plugins = ["pytester"]


class Color(Enum):
    RED = 1


@dataclass(frozen=True)
class Point:
    x: int


def double(x: int) -> int:
    return 2 * x


# What a body may use.


@on_ranks(1, 2, 3)
def test_a_body_runs_in_a_process_group_of_each_size(world_size):
    assert dist.get_world_size() == world_size
    total = torch.ones(1, device=device_type())
    dist.all_reduce(total)
    assert total.item() == world_size


@on_ranks(2)
@pytest.mark.parametrize("value", [3, Color.RED, Point(1), double, torch.float16, torch.nn.Linear])
def test_parameters_arrive_as_the_same_objects_when_parametrize_is_below(value):
    assert value in (3, Color.RED, Point(1), double, torch.float16, torch.nn.Linear)


@pytest.mark.parametrize("rows", [1, 4])
@on_ranks(2)
@pytest.mark.parametrize("columns", [5])
def test_parametrize_may_be_above_and_below(rows, columns):
    assert rows in (1, 4)
    assert columns == 5


@on_ranks(2)
def test_all_ranks_share_tmp_path(tmp_path):
    (tmp_path / str(dist.get_rank())).touch()
    dist.barrier()
    assert sorted(os.listdir(tmp_path)) == ["0", "1"]


@on_ranks(2)
@pytest.mark.parametrize("times", [1, 2])
def test_each_body_starts_from_the_same_state(times):
    """A test that leaves a default behind changes the ones after it, only when they run together."""
    assert torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled()
    assert torch.initial_seed() == 0
    assert random.random() == random.Random(0).random()
    assert torch.get_num_threads() == 1
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.manual_seed(1)


@on_ranks(2)
def test_pytest_raises_and_warns_work_in_a_body():
    with pytest.raises(ValueError, match="boom"):
        raise ValueError("boom")
    with pytest.warns(UserWarning, match="careful"):
        warnings.warn("careful", stacklevel=1)


@on_ranks(2)
@pytest.mark.filterwarnings("ignore:expected")
def test_the_filterwarnings_mark_holds_in_the_ranks():
    warnings.warn("expected", stacklevel=1)


@on_ranks(4)
@pytest.mark.parametrize("times", [1, 2])
def test_cpu_mesh_is_made_once_per_shape_and_names(times):
    mesh = cpu_mesh(2, 2)
    assert mesh.mesh_dim_names == ("replicate", "shard")
    assert cpu_mesh(2, 2) is mesh
    assert cpu_mesh(2, 2, names=("a", "b")) is not mesh
    assert cpu_mesh().mesh_dim_names == ("shard",)
    with pytest.raises(ValueError, match="has 6 ranks, but this test runs on 4"):
        cpu_mesh(2, 3)


# What one sees when a test fails.


@pytest.fixture
def run_inner(pytester, monkeypatch):
    """Run a test module in an inner pytest with our ini file's rules, and hand back the result and its output."""
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # the inner run replaces it
    for name in ("CI", "BUILD_NUMBER"):  # under these pytest prints a failure's text a second time, in its summary
        monkeypatch.delenv(name, raising=False)
    pytester.makeini("[pytest]\nfilterwarnings = error\naddopts = --import-mode=importlib -p no:cacheprovider")

    def run(body: str):
        header = """
            import os, threading, time, warnings
            import pytest, torch
            import torch.distributed as dist
            from harness import on_ranks
        """
        pytester.makepyfile(textwrap.dedent(header) + textwrap.dedent(body))
        result = pytester.runpytest_inprocess()
        return result, result.stdout.str()

    return run


def test_a_failing_rank_shows_its_traceback_alone_while_others_wait_for_it(run_inner):
    result, output = run_inner("""
        @on_ranks(2)
        def test_it():
            if dist.get_rank() == 1:
                raise ValueError("boom")
            dist.barrier()
    """)
    result.assert_outcomes(failed=1)
    assert "[rank 1 of 2] ValueError: boom" in output
    assert "(rank 0 still running)" in output
    assert output.count("Traceback") == 1
    assert "harness" not in output.split("FAILURES")[1].replace("test_harness", "")  # no frame of ours


def test_the_rank_that_lost_its_peer_is_not_the_one_shown(run_inner):
    result, output = run_inner("""
        @on_ranks(2)
        def test_it():
            if dist.get_rank() == 1:
                os._exit(3)
            dist.barrier()
    """)
    result.assert_outcomes(failed=1)
    assert "[rank 1 of 2] the process ended with exit code 3" in output
    assert output.count("Traceback") == 0


def test_a_crash_shows_where_it_was(run_inner):
    result, output = run_inner("""
        import ctypes

        def the_culprit():
            ctypes.string_at(0)

        @on_ranks(1)
        def test_it():
            the_culprit()
    """)
    result.assert_outcomes(failed=1)
    assert "the process ended by signal SIGSEGV" in output
    assert "in the_culprit" in output


def test_a_failing_assert_shows_the_values(run_inner):
    result, output = run_inner("""
        @on_ranks(1)
        def test_it():
            x = torch.zeros(3)
            assert x.numel() == 4
    """)
    result.assert_outcomes(failed=1)
    assert "AssertionError: assert 3 == 4" in output


def test_after_a_failure_the_next_test_has_new_ranks(run_inner):
    result, _ = run_inner("""
        @on_ranks(2)
        def test_first():
            if dist.get_rank() == 0:
                raise ValueError("boom")
            dist.barrier()

        @on_ranks(2)
        def test_second():
            total = torch.ones(1)
            dist.all_reduce(total)
            assert total.item() == 2
    """)
    result.assert_outcomes(failed=1, passed=1)


def test_a_stuck_test_shows_the_stacks_of_every_rank_that_has_not_finished(run_inner):
    start = time.monotonic()
    result, output = run_inner("""
        def wait_in_vain():
            torch.distributed.barrier()

        def idle():
            time.sleep(1000)

        @on_ranks(3, timeout=1)
        def test_it():
            if dist.get_rank() == 0:
                return
            if dist.get_rank() == 2:
                threading.Thread(target=idle, daemon=True).start()
            wait_in_vain()
    """)
    assert time.monotonic() - start < 15
    result.assert_outcomes(failed=1)
    assert "ranks 1, 2 of 3 did not finish within 1 s" in output
    assert "[rank 0 of 3] passed" in output
    assert output.count("in wait_in_vain") == 2
    assert output.count("in idle") == 1
    assert pool.worker.WATCHER not in output


def test_warnings_are_errors_in_the_ranks(run_inner):
    result, output = run_inner("""
        @on_ranks(1)
        def test_it():
            warnings.warn("careful")
    """)
    result.assert_outcomes(failed=1)
    assert "[rank 0 of 1] UserWarning: careful" in output


def test_an_exception_in_a_finalizer_or_a_thread_fails_the_test_that_caused_it(run_inner):
    result, output = run_inner("""
        class Leaky:
            def __init__(self):
                self.cycle = self
            def __del__(self):
                raise ValueError("in __del__")

        def fail():
            raise ValueError("in a thread")

        @on_ranks(1)
        def test_finalizer():
            Leaky()

        @on_ranks(1)
        def test_thread():
            thread = threading.Thread(target=fail)
            thread.start()
            thread.join()
    """)
    result.assert_outcomes(failed=2)
    assert "ValueError: in __del__" in output
    assert "ValueError: in a thread" in output


def test_skip_and_xfail_pass_through_and_a_skip_on_one_rank_is_a_failure(run_inner):
    result, output = run_inner("""
        @on_ranks(2)
        def test_skip():
            pytest.skip("needs more")

        @on_ranks(2)
        def test_xfail():
            pytest.xfail("not yet")

        @pytest.mark.xfail(reason="not yet", strict=True)
        @on_ranks(1)
        def test_xfail_mark():
            raise ValueError

        @on_ranks(2)
        def test_uneven_skip():
            if dist.get_rank() == 1:
                pytest.skip("alone")
    """)
    result.assert_outcomes(skipped=1, xfailed=2, failed=1)
    assert "has to be taken on every rank: rank 0 passed, rank 1 skipped" in output


def test_what_ranks_print_is_shown_with_the_failure(run_inner):
    result, output = run_inner("""
        @on_ranks(2)
        def test_it():
            print("hello")
            raise ValueError
    """)
    result.assert_outcomes(failed=1)
    assert "[rank 0 of 2] hello" in output
    assert "[rank 1 of 2] hello" in output


def test_an_argument_that_cannot_be_sent_is_named(run_inner):
    result, output = run_inner("""
        @on_ranks(1)
        @pytest.mark.parametrize("function", [lambda: 1])
        def test_it(function):
            pass
    """)
    result.assert_outcomes(failed=1)
    assert "the argument 'function' (function) can't be sent to the ranks" in output


def test_two_folders_may_hold_a_file_of_the_same_name(run_inner, pytester):
    for folder in ("a", "b"):
        pytester.mkdir(folder).joinpath("test_same.py").write_text(
            "from harness import on_ranks\n"
            "class Here: pass\n"
            "import pytest\n"
            "@on_ranks(1)\n"
            "@pytest.mark.parametrize('cls', [Here])\n"
            f"def test_it(cls):\n    assert '{folder}' in __name__ and cls is Here\n"
        )
    result, _ = run_inner("")
    result.assert_outcomes(passed=2)


def test_on_ranks_refuses_a_function_that_ranks_cannot_import():
    with pytest.raises(TypeError, match="must be a function at the top of its module"):

        @on_ranks(2)
        def body():
            pass

    with pytest.raises(TypeError, match="at least one world size"):
        on_ranks()


@on_ranks(4)
def _make_meshes():
    for _ in range(2):
        init_device_mesh(device_type(), (2, 2), mesh_dim_names=("a", "b"))


def test_process_groups_that_tests_leave_behind_do_not_use_up_the_files(monkeypatch):
    """200 tests that each made a 2-D mesh ran into the limit of open files: a group lives as long as its process."""
    monkeypatch.setattr(pool, "MAX_OPEN_FILES", 15)
    _make_meshes(world_size=4)
    assert 4 not in pool._pools
    _make_meshes(world_size=4)


@on_ranks(2)
def _make_a_group_on_one_rank():
    if dist.get_rank() == 0:
        dist.new_group([0], use_local_synchronization=True)


def test_a_body_that_made_a_process_group_on_some_ranks_only_is_the_last_of_its_ranks():
    """A later test hung: torch makes a group's name of how many there are, so that the ranks waited under different names."""
    _make_a_group_on_one_rank(world_size=2)
    assert 2 not in pool._pools
