"""How long a planned step takes, by the model whose prices tests/clock holds; here, that a step is priced as a whole."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from fsdp2.errors import ArgumentError
from fsdp2.planner.api import plan_of
from fsdp2.planner.models import DecoderShape
from fsdp2.planner.result import tables
from fsdp2.planner.setting import Setting
from fsdp2.planner.shapes import of_shape
from fsdp2.printable import say_json
from fsdp2.testing.clock.cards import A100_40GB

SHAPE = DecoderShape("gpt", dim=4096, layers=2, heads=32, kv_heads=32, hidden=16384, vocabulary=8192, context=1024)
SETTING = Setting(world_size=16, param_dtype=torch.bfloat16, reduce_dtype=torch.float32, batch=8, checkpointing="full")

CARD = replace(A100_40GB, collectives_take=0.0)  # so that the network does not change how long compute takes


def test_a_step_is_its_parts_and_a_slow_network_is_exposed():
    workload = of_shape("gpt", SHAPE)
    fast = plan_of(workload, SETTING, card=replace(CARD, between=300e9)).duration
    planned = plan_of(workload, SETTING, card=replace(CARD, between=1e9))
    slow = planned.duration
    assert fast is not None
    assert slow is not None
    for each in (fast, slow):
        assert each.step == pytest.approx(each.computing + sum(each.exposed.values()) + each.idle)
    assert fast.computing == pytest.approx(slow.computing)
    assert 0.3 < fast.mfu < A100_40GB.matmul_share  # a third of what is computed is computed again
    wire = sum(each.leaves_host for each in planned.traffic) / (8 * 1e9 * A100_40GB.link_share)  # eight network cards a host
    assert wire < slow.step < wire + slow.computing
    assert (fast.fastest, fast.slowest) == pytest.approx([fast.step * each for each in CARD.measured_over_modeled])
    assert sum(slow.exposed.values()) > 10 * sum(fast.exposed.values())
    with pytest.raises(ArgumentError, match="backend"):
        plan_of(workload, replace(SETTING, backend="gloo"), card="h100")


def test_every_figure_says_how_it_was_found(capsys):
    """In text next to each table's title, and in JSON by the name of the field."""
    workload = of_shape("gpt", SHAPE)
    fields = {"numel", "state", "groups", "traffic", "memory", "duration"}
    modeled = plan_of(workload, SETTING, card=CARD)
    measured = plan_of(workload, SETTING, card=replace(CARD, is_measured=True))
    assert modeled.methods.keys() == fields
    assert {each for each in fields if modeled.methods[each] == "exact"} == {"numel", "state", "groups", "traffic"}
    assert measured.methods == modeled.methods | {"duration": "modeled, measured rates"}
    titles = {table.title.rpartition("(")[2] for table in tables(measured)}
    assert titles == {"exact)", "modeled)", "modeled, measured rates)"}
    say_json(measured)
    assert json.loads(capsys.readouterr().out)["methods"] == measured.methods
