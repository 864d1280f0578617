"""What a search proposes: settings that fit, the fastest first, as changes to what was asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fsdp2.cli import main
from fsdp2.errors import ArgumentError, MeshError
from fsdp2.planner.api import plan_of
from fsdp2.planner.duration import Duration
from fsdp2.planner.memory import Memory, Peak
from fsdp2.planner.models import DecoderShape
from fsdp2.planner.rehearsal import Setting
from fsdp2.planner.result import Plan
from fsdp2.planner.search import LINEAR_LAYERS, search, searched
from fsdp2.planner.shapes import of_shape
from fsdp2.state_bytes import StateBytes

ASKED = Setting(world_size=64, batch=8, prefetch=1)


def made_up(setting: Setting) -> Plan:
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
    return Plan("made up", setting, 1, StateBytes(0, 0, 0, 0), (), memory, (), "", Duration("card", seconds, 0, {}, 0, 0))


def test_what_fits_is_proposed_the_fastest_first_as_changes_and_as_many_sequences_are_trained():
    found = searched(made_up, ASKED, limit=30, ranks_per_host=8, keep=4)
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
    nothing = searched(made_up, ASKED, limit=1, ranks_per_host=8, keep=4)
    assert nothing.proposals == ()
    assert "nothing that was tried fits" in nothing.table.note


def test_wrong_arguments_of_a_search_are_our_errors(capsys):
    for limit in (0, "a", True):
        with pytest.raises(ArgumentError, match="memory_limit"):
            search(torch.nn.Linear(2, 2), ASKED, "h100", memory_limit=limit)
    assert main(["plan", "llama3-8b", "--ranks", "8", "--search"]) == 1
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
