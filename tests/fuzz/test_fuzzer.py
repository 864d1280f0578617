"""The fuzzer itself: programs are values, faults and hangs are found, and failing programs become small."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from fuzz.body import run
from fuzz.comparing import tolerance_of
from fuzz.drawing import FEATURES, draw
from fuzz.program import OPTIMIZERS, Action, Failure, Micro, Node, Program, Step, Unit, nodes, tidy, units, walk
from fuzz.refusals import is_documented
from fuzz.shrinking import shrink

NAMES = {each.__name__: each for each in (Action, Failure, Micro, Node, Program, Step, Unit)}


def test_a_program_prints_as_what_makes_it():
    for seed in range(50):
        assert eval(repr(draw(seed)), NAMES) == draw(seed)


def test_programs_are_drawn_tidy():
    for seed in range(200):
        assert tidy(draw(seed)) == draw(seed), seed


def test_every_feature_is_drawn():
    programs = [draw(seed) for seed in range(300)]
    found = [node for program in programs for node, _ in walk(program.root)]
    micros = [micro for program in programs for step in program.steps for micro in step.micros]
    for field in ("frozen", "ignored", "extension", "tied_to", "borrows", "checkpoint", "skip", "detach", "in_place", "container"):
        assert any(getattr(node, field) for node in found), field
    for field in ("method", "hook", "stored"):
        assert any(getattr(node, field) for node in found), field
    for field in ("unused", "ignores", "in_hooks", "force_sum", "separate_group", "prefetch", "gather"):
        assert any(getattr(program, field) for program in programs), field
    assert {program.world for program in programs} == {1, 2, 3, 4}
    assert {(program.optimizer, program.in_hooks) for program in programs} == set(itertools.product(OPTIMIZERS, (False, True)))
    assert {"save", "reload"} < {action.kind for micro in micros for action in micro.actions}
    assert {micro.order for micro in micros} == {"each", "sum", "fifo", "lifo"}
    assert any(len(members) > 1 for program in programs for _, members in units(program))
    assert len(FEATURES) == len(set(FEATURES))


def test_a_failing_program_is_shrunk_to_what_it_takes_to_fail():
    def has_tie(program: Program) -> bool:
        return any(node.tied_to for node in nodes(program).values())

    big = next(program for program in map(draw, range(1000)) if has_tie(program) and len(program.steps) > 2)
    small = shrink(big, has_tie, seconds=60)
    assert len(small.steps) == 1
    assert len(nodes(small)) == 3  # the root, and two that are tied
    assert not units(small)


SHARDED = Program(root=Node("root", children=(Node("a", "linear"),), unit=Unit()))


def test_wrong_numbers_are_a_fault():
    result = run(SHARDED, lib="fuzz.planted_faults")
    assert result.kind == "fault"
    assert "gradient of a.weight" in result.text
    assert "about 2 times" in result.text


def test_a_reload_that_an_optimizer_loses_is_a_fault():
    saved, loaded = (Step((Micro((Action(kind),)),)) for kind in ("save", "reload"))
    program = replace(SHARDED, world=1, optimizer="host", steps=(Step(), saved, loaded))
    assert run(program).kind == "right"
    result = run(program, lib="fuzz.planted_faults")
    assert result.headline.startswith("Failed: step 2: value of a.weight"), result.text


def test_a_program_without_fp32_that_amplifies_nothing_is_compared_to_nine_digits_and_one_with_fp32_to_four():
    assert tolerance_of(SHARDED) == 1e-9
    low = replace(SHARDED, root=replace(SHARDED.root, unit=Unit(param_dtype="float32")))
    assert tolerance_of(low) == 1e-4
    assert tolerance_of(low, amplified=1e-7) < 1.1e-4


@pytest.mark.slow
@pytest.mark.parametrize("seed", [195, 1180])
def test_what_fp32_does_to_the_unsharded_model_is_rounding_in_the_sharded_one_too(seed):
    # 195: gradients of a penalty, through activations in fp32, are 0.03 % off. 1180: gradients of 1e4 are 0.2 % off in the second step.
    assert run(draw(seed)).kind == "right"
    assert run(draw(seed), lib="fuzz.planted_faults").kind == "fault"


@pytest.mark.slow
def test_a_program_that_fp32_makes_another_one_is_pointless():
    result = run(draw(1304))
    assert (result.kind, result.headline) == ("pointless", "a program that amplifies rounding")


@pytest.mark.slow
def test_a_hang_is_a_fault_that_shows_stacks():
    stuck = replace(SHARDED, max_buffers=2)  # by which planted_faults knows it
    result = run(stuck, lib="fuzz.planted_faults", timeout_s=3.0)
    assert result.kind == "fault"
    assert "did not finish within 3 s" in result.headline
    assert "planted_faults.py" in result.text


def test_refusals_are_known_by_their_beginning_and_by_what_the_program_does():
    assert is_documented("OrderError: the root of a forward is a list of modules: ['A', 'B']", SHARDED)
    assert is_documented("OrderError: b.c is tied to parameters that belong to a module outside of the root: ['weight']", SHARDED)
    assert not is_documented("OrderError: something else", SHARDED)
    differing = replace(SHARDED, root=replace(SHARDED.root, children=(Node("a", "linear", skip="rank"),)))
    assert is_documented("OrderError: 2 units are not in the same backward on all ranks", differing)
    assert not is_documented("OrderError: 2 units are not in the same backward on all ranks", SHARDED)
