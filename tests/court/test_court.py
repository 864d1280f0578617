"""The court condemns torch's FSDP2 when one of its waits or holds is taken out, and acquits it as it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.fsdp._fully_shard._fsdp_param_group as upstream

from court.programs import FOUND, SINGLE, draw, on_four
from court.trial import tried
from fsdp2.testing import pretend
from harness import on_ranks

PROGRAMS = Path(__file__).parents[2] / "docs" / "court"
SEEDS = range(3)
FIXED_IN_2_15 = {"all_reduce_hook"}


@on_ranks(4, device="pretend_model")
def test_it_acquits_what_is_right():
    for name in ("bf16", "hsdp"):
        assert str(tried(on_four(SINGLE[name]), range(1))) == "right", name


@on_ranks(4, device="pretend_model")
def test_it_condemns_a_copy_out_that_does_not_wait_for_its_gather():
    gather = upstream.foreach_all_gather
    with mock.patch.object(upstream, "foreach_all_gather", lambda *args: gather(*args)._replace(all_gather_event=None)):
        assert tried(SINGLE["plain"], SEEDS).wrong


@on_ranks(4, device="pretend_model")
def test_it_condemns_an_input_of_a_reduce_scatter_that_nothing_holds():
    held = upstream.ReduceScatterState

    def not_held(reduce_scatter_input: Any, *rest: Any) -> Any:
        return held(None, *rest)

    with mock.patch.object(upstream, "ReduceScatterState", not_held):
        assert tried(SINGLE["plain"], SEEDS).wrong


@pytest.mark.slow
@on_ranks(4, device="pretend_model")
def test_it_acquits_random_programs():
    verdicts = {number: str(tried(on_four(draw(number)), range(2))) for number in range(6)}
    assert {number: verdict for number, verdict in verdicts.items() if "WRONG" in verdict} == {}


@pytest.mark.full
@on_ranks(4, device="pretend_model", timeout=600)
def test_it_acquits_single_ways_of_training():
    verdicts = {name: str(tried(on_four(program), range(3))) for name, program in SINGLE.items() if name not in FOUND}
    assert {name: verdict for name, verdict in verdicts.items() if "WRONG" in verdict} == {}


@pytest.mark.full
@on_ranks(4, device="pretend", timeout=600)
def test_on_four_ranks_collectives_that_run_one_at_a_time_never_wait_for_each_other():
    """Those of several meshes above all: whichever group of a unit drains earlier buffers, ranks issue them in one order."""
    for name in ("meshes", "meshes_turned", "meshes_turned_bf16", "hsdp", "shared_context", "backward_split_hsdp_bf16"):
        with pretend.one_collective_at_a_time(300):
            assert str(tried(on_four(SINGLE[name]), range(2))) == "right", name


@pytest.mark.full
@pytest.mark.parametrize("program", sorted(path.stem for path in PROGRAMS.glob("*.py")))
def test_a_program_of_the_documentation_shows_its_fault(program):
    done = subprocess.run([sys.executable, "-W", "ignore", str(PROGRAMS / f"{program}.py")], capture_output=True, text=True)
    fixed = program in FIXED_IN_2_15 and torch.__version__ >= "2.15"
    assert done.returncode == (0 if fixed else 1), done.stdout + done.stderr


def test_a_program_of_the_documentation_has_forty_lines_at_most():
    lengths = {path.stem: len(path.read_text().splitlines()) for path in PROGRAMS.glob("*.py")}
    assert {name: length for name, length in lengths.items() if length > 40} == {}
    assert lengths.keys() >= set(FOUND.values())
