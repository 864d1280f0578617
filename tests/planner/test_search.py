"""What a search proposes: settings that fit, the fastest first, as changes to what was asked for."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import torch

from fsdp2.cli import main
from fsdp2.errors import ArgumentError, MeshError
from fsdp2.planner import search as searching
from fsdp2.planner import search_command
from fsdp2.planner.api import plan_of
from fsdp2.planner.duration import Duration
from fsdp2.planner.memory import Memory, Peak
from fsdp2.planner.models import DecoderShape
from fsdp2.planner.rehearsal import GroupFacts
from fsdp2.planner.result import Plan
from fsdp2.planner.search import LINEAR_LAYERS, search, searched
from fsdp2.planner.setting import Setting
from fsdp2.planner.shapes import of_shape
from fsdp2.state_bytes import StateBytes

GROUP = GroupFacts("", torch.float32, numel=1000, sharded=0, unsharded=0, padding=0)
ASKED = Setting(world_size=64, batch=8, prefetch=1)


def made_up(setting: Setting, is_of_interest: object = None) -> Plan:
    """Memory and time as a formula that a test can read. ddp cannot be."""
    if setting.strategy == "ddp":
        raise MeshError("no ddp")
    nbytes = setting.batch * (1 if setting.checkpointing == "full" else 4) + {"zero3": 2, "hsdp": 8, "zero2": 16}[setting.strategy]
    nbytes += 2 * setting.prefetch - (1 if setting.wrap is LINEAR_LAYERS else 0)
    seconds = (
        100 / setting.batch + (30 if setting.checkpointing == "full" else 0) + {"zero3": 20, "hsdp": 10, "zero2": 5}[setting.strategy]
    )
    seconds += 3 * abs(setting.prefetch - 2) + (9 if setting.wrap is LINEAR_LAYERS else 0)
    memory = Memory(Peak(nbytes, {}, "backward", ""), {}, 0)
    return Plan(
        "made up",
        setting,
        1,
        StateBytes(0, 0, 0, 0),
        (),
        memory,
        (),
        "",
        Duration("card", seconds, 0, {"forward": seconds}, 0, 0, seconds, seconds),
    )


def test_what_fits_is_proposed_the_fastest_first_as_changes_and_as_many_sequences_are_trained():
    found = searched(made_up, ASKED, limit=30, keep=4)
    assert found.asked.changes == {}
    assert found.asked.peak == 36, "it does not fit"
    assert len(found.proposals) == 4
    steps = [each.step for each in found.proposals]
    assert steps == sorted(steps)
    for each in found.proposals:
        assert each.peak <= 30
        assert each.plan.setting.batch * each.plan.setting.micro_batches == 8
        assert each.step == made_up(each.plan.setting).duration.step
    best = found.proposals[0]
    others = [replace(ASKED, strategy=s, checkpointing=c, prefetch=p, batch=b, micro_batches=8 // b)
              for s in ("zero3", "hsdp", "zero2") for c in ("none", "full") for p in range(4) for b in (1, 2, 4, 8)]  # fmt: skip
    assert best.step == min(plan.duration.step for plan in map(made_up, others) if plan.memory.peak.nbytes <= 30)
    assert "micro-batches 2 of 4" in str(found.table.rows)
    nothing = searched(made_up, ASKED, limit=1, keep=4)
    assert nothing.proposals == ()
    assert "nothing that was tried fits" in nothing.table.note
    why = {str(each.changes): each.why for each in nothing.dropped}
    assert why["{'strategy': 'ddp'}"] == "no ddp"
    assert why["{'strategy': 'zero2'}"] == "needs 50 B, in backward of the model"


def test_proposals_whose_ranges_overlap_with_that_of_the_fastest_are_not_told_apart():
    def plan(setting: Setting, is_of_interest: object = None) -> Plan:
        planned = made_up(setting)
        return replace(
            planned, duration=replace(planned.duration, fastest=0.9 * planned.duration.step, slowest=1.1 * planned.duration.step)
        )

    found = searched(plan, ASKED, limit=40, keep=9)
    first, *others = found.proposals
    assert first.told_apart is None
    assert [each.told_apart for each in others] == [0.9 * each.step > 1.1 * first.step for each in others]
    alike = sum(each.told_apart is False for each in others)
    assert 0 < alike < len(others)
    assert f"{alike} cannot be told apart from the fastest" in found.table.note
    words = {None: "", True: "yes", False: "no"}
    assert [row[2] for row in found.table.rows[1:]] == [words[each.told_apart] for each in found.proposals if each.changes]
    unproven = searched(made_up, ASKED, limit=40, keep=9)
    assert {each.told_apart for each in unproven.proposals} == {None}
    assert "told apart from" not in unproven.table.note


def test_no_setting_is_planned_twice():
    """A hybrid strategy without ``shard_size`` is the one over the ranks of a host."""
    for strategy in ("zero3", "hsdp"):
        planned = []

        def plan(setting, is_of_interest=None, planned=planned):
            planned.append(str(replace(setting, shard_size=setting.node_size)))
            return made_up(setting)

        found = searched(plan, replace(ASKED, strategy=strategy), limit=60, keep=9)
        assert len(set(planned)) == len(planned)
        assert len({str(each.changes) for each in found.proposals}) == len(found.proposals)


def test_what_is_too_large_by_its_state_alone_is_dropped_before_it_is_planned():
    planned: list[Setting] = []

    def plan(setting: Setting, is_of_interest: object) -> Plan:
        planned.append(setting)
        shards = {"zero3": 64, "hsdp": 8, "zero2": 64, "ddp": 1}[setting.strategy]
        kept = 4000 / shards
        state = StateBytes(0, kept, kept, 2 * kept)
        return replace(made_up(replace(setting, strategy="zero3")), setting=setting, groups=(GROUP,), state=state)

    found = searched(plan, ASKED, limit=2000, keep=4)
    assert {each.strategy for each in planned} == {"zero3", "hsdp", "zero2"}
    (why,) = {each.why for each in found.dropped if each.changes.get("strategy") == "ddp"}
    assert why == "parameters and optimizer state alone take 12.0 kB"
    assert found.num_tried == len(planned) + len(found.dropped)
    planned.clear()
    searched(plan, replace(ASKED, optimizer=torch.optim.SGD, offload=True), limit=2000, keep=4)
    assert "ddp" in {each.strategy for each in planned}, "of state in host memory, nothing is known before"


def test_a_candidate_is_to_be_exact_where_it_may_be_proposed_or_lead_on():
    wanted: list[tuple[int, bool]] = []

    def plan(setting: Setting, is_of_interest: Callable[[Plan], bool]) -> Plan:
        plan = made_up(setting)
        wanted.append((plan.memory.peak.nbytes, is_of_interest(plan)) if wanted else (plan.memory.peak.nbytes, True))
        return plan

    found = searched(plan, ASKED, limit=30, keep=2)
    smallest = min(nbytes for nbytes, is_exact in wanted if is_exact)
    assert not any(is_exact for nbytes, is_exact in wanted[1:] if nbytes > max(30, wanted[0][0]))
    assert {each.peak for each in found.proposals} <= {nbytes for nbytes, is_exact in wanted if is_exact}
    assert smallest <= 30


def test_no_proposal_has_a_change_that_gains_nothing_and_none_is_tried_that_cannot_gain():
    planned: list[Setting] = []

    def plan(setting: Setting, is_of_interest: object, exposed: float = 1.0) -> Plan:
        planned.append(setting)
        made = made_up(replace(setting, prefetch=2))  # how much is gathered ahead makes no difference to time
        assert made.duration is not None
        return replace(
            made, setting=setting, memory=made_up(setting).memory, duration=replace(made.duration, exposed={"forward": exposed})
        )

    found = searched(plan, ASKED, limit=1000, keep=50)
    assert {each.prefetch for each in planned} == {1, 2}
    assert not [each for each in found.proposals if "prefetch" in each.changes]
    assert found.num_slower == len([each for each in planned if each.prefetch == 2])
    assert not [each for each in planned if each.checkpointing != "none"], "computing more again is no faster"
    planned.clear()
    searched(lambda *given: plan(*given, exposed=0.0), ASKED, limit=1000, keep=50)
    assert {(each.strategy, each.prefetch) for each in planned} == {("zero3", 1)}, "nothing waits for communication"


def test_wrong_arguments_of_a_search_are_our_errors(capsys):
    for limit in (0, "a", True):
        with pytest.raises(ArgumentError, match="memory_limit"):
            search(torch.nn.Linear(2, 2), ASKED, "h100", memory_limit=limit)
    assert main(["search", "llama3-8b", "--ranks", "8"]) == 2
    assert 'card="h100"' in capsys.readouterr().err


@pytest.mark.slow
def test_proposals_of_a_small_decoder_are_plans_of_their_settings():
    shape = DecoderShape("llama", dim=1024, layers=2, heads=8, kv_heads=8, hidden=4096, vocabulary=8192, context=1024)
    workload = of_shape("small", shape)
    asked = Setting(world_size=8, param_dtype=torch.bfloat16, reduce_dtype=torch.float32, batch=2)
    limit = 0.9 * plan_of(workload, asked).memory.peak.nbytes
    found = search(workload, asked, "h100", memory_limit=limit, keep=3)
    assert found.proposals
    for each in found.proposals:
        assert each.changes
        assert each.plan == plan_of(workload, each.plan.setting, card="h100")
        assert each.peak <= limit


@pytest.mark.full
def test_a_search_with_shortcuts_finds_what_one_that_rehearses_all_blocks_of_all_candidates_finds(monkeypatch):
    """Changes that gain less than ``GAIN`` may be in another order, or be tried by one of them only."""
    shape = DecoderShape("llama", dim=256, layers=18, heads=4, kv_heads=4, hidden=1024, vocabulary=2048, context=256)
    workload = of_shape("small", shape)
    asked = Setting(world_size=16, param_dtype=torch.bfloat16, reduce_dtype=torch.float32, batch=2, sequence=256)
    limit = 0.6 * plan_of(workload, asked).memory.peak.nbytes
    found = search(workload, asked, "h100", memory_limit=limit)
    monkeypatch.setattr(searching, "_least_kept", lambda asked, setting: 0.0)

    def plan(setting: Setting, is_of_interest: object) -> Plan:
        return plan_of(replace(workload, repeated=""), setting, card="h100")

    all_rehearsed = searched(plan, asked, limit, keep=50)
    assert len(found.proposals) == min(5, len(all_rehearsed.proposals))
    assert found.proposals[0].step == pytest.approx(all_rehearsed.proposals[0].step, rel=searching.GAIN)
    others = {tuple(each.changes.items()): each for each in all_rehearsed.proposals}
    pairs = [(each, others[key]) for each in found.proposals if (key := tuple(each.changes.items())) in others]
    assert len(pairs) >= 3
    for each, other in pairs:
        assert replace(each.plan, duration=None) == replace(other.plan, duration=None)
        assert each.step == pytest.approx(other.step, rel=1e-3)


@pytest.mark.slow
def test_a_search_proposes_to_save_what_is_slow_to_compute_again_and_prints_json(capsys):
    """It knew only all or nothing: where nothing does not fit, "full" was its fastest."""
    shape = DecoderShape("llama", dim=1024, layers=4, heads=8, kv_heads=8, hidden=4096, vocabulary=4096, context=1024)
    workload = of_shape("small", shape)
    asked = Setting(world_size=8, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    plans = {kind: plan_of(workload, replace(asked, checkpointing=kind), card="h100") for kind in ("none", "selective", "full")}
    peaks = {kind: each.memory.peak.nbytes for kind, each in plans.items()}
    assert peaks["full"] < peaks["selective"] < peaks["none"]
    # smaller units alone save a few percent of the peak: the limit is below what they need without checkpointing
    found = search(workload, asked, "h100", memory_limit=(peaks["selective"] + peaks["none"]) // 2)
    assert found.proposals[0].plan.setting.checkpointing == "selective"
    assert "ActivationCheckpointPolicy(save_ops=HEAVY_OPS)" in str(found.tables)
    assert main(["plan", "t5-3b", "--ranks", "8", "--sequence", "64", "--param-dtype", "bf16", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["memory"]["peak"]["nbytes"] > printed["state"]["optimizer"] > 0
    assert printed["setting"]["param_dtype"] == "torch.bfloat16"


@pytest.mark.parametrize(("kind", "said"), [("terminal", ["1", "2", "3"]), ("file", ["2"]), ("quiet", [])])
def test_a_search_says_which_setting_it_tries_also_where_its_error_output_is_no_terminal(kind, said, monkeypatch, capsys):
    clock = mock.Mock(monotonic=mock.Mock(return_value=0.0))
    monkeypatch.setattr(search_command, "time", clock)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: kind == "terminal")
    with search_command._progress(kind == "quiet") as on_candidate:
        for number, seconds in enumerate((0.5, 2.0, 11.0, 12.0)):
            clock.monotonic.return_value = seconds
            on_candidate(number, {})
    assert re.findall(r"tried (\d) settings; now: as asked", capsys.readouterr().err) == said
