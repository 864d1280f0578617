"""Models of many equal blocks are planned from rehearsals with few of them; the plan is that of the rehearsal with all of them."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from fsdp2.planner import api
from fsdp2.planner.models import Decoder, DecoderShape
from fsdp2.planner.rehearsal import Rehearsed, rehearse
from fsdp2.planner.search import LINEAR_LAYERS
from fsdp2.planner.setting import Setting
from fsdp2.planner.shapes import SHAPES, of_shape
from fsdp2.planner.workload import Workload, next_token_loss, tokens

SHAPE = DecoderShape("gpt", dim=64, layers=14, heads=4, kv_heads=4, hidden=256, vocabulary=512, context=64)
SETTING = Setting(world_size=16, param_dtype=torch.bfloat16, reduce_dtype=torch.float32, sequence=16)
SETTINGS = [
    replace(SETTING, checkpointing="full", prefetch=2),
    replace(SETTING, strategy="zero1", micro_batches=2),
    replace(SETTING, optimizer="sgd", offload=True, checkpointing="full"),
    replace(SETTING, offload="disk"),
    replace(SETTING, strategy="hsdp", shard_size=8, backend="gloo"),
    replace(SETTING, strategy="ddp"),
    replace(SETTING, prefetch=0),
    replace(SETTING, prefetch=0, strategy="zero2", checkpointing="full"),
]


def assert_planned_alike(workload: Workload, setting: Setting, num_rehearsals: int) -> None:
    card = "h100" if setting.backend == "nccl" else None
    with patch.object(api, "rehearse", side_effect=rehearse) as rehearsals:
        planned = api.plan_of(workload, setting, card=card)
    assert rehearsals.call_count == num_rehearsals
    whole = api.plan_of(replace(workload, repeated=""), setting, card=card)
    assert replace(planned, duration=None) == replace(whole, duration=None)
    if planned.duration is not None and whole.duration is not None:
        assert planned.duration.step == pytest.approx(whole.duration.step, rel=1e-3)
        assert planned.duration.mfu == pytest.approx(whole.duration.mfu, rel=1e-3)


def test_a_plan_of_few_blocks_is_that_of_all():
    assert_planned_alike(of_shape("gpt", SHAPE), SETTING, num_rehearsals=3)


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_plan_of_few_blocks_is_that_of_all_in_each_setting(setting):
    assert_planned_alike(of_shape("gpt", replace(SHAPE, layers=20)), setting, num_rehearsals=3)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in (
                {"strategy": "hsdp", "shard_size": 8, "checkpointing": "full"},
                {"strategy": "zero2", "checkpointing": "selective"},
                {"strategy": "zero1", "prefetch": 2},
                {"strategy": "ddp", "backend": "gloo"},
                {"offload": True},
                {"offload": "disk"},
            )
        ),
    ],
)
def test_micro_batches_in_between_are_like_the_second(changed):
    workload, setting = of_shape("gpt", replace(SHAPE, layers=2)), replace(SETTING, micro_batches=6, **changed)
    with patch.object(api, "MICRO_BATCHES", 6):
        whole = api.plan_of(workload, setting, card="h100" if setting.backend == "nccl" else None)
    with patch.object(api, "rehearse", side_effect=rehearse) as rehearsals:
        planned = api.plan_of(workload, setting, card="h100" if setting.backend == "nccl" else None)
    assert [call.args[1].micro_batches for call in rehearsals.call_args_list] == [3]
    assert replace(planned, duration=None) == replace(whole, duration=None)
    if planned.duration is not None and whole.duration is not None:
        for name in ("step", "computing", "idle", "mfu"):
            assert getattr(planned.duration, name) == pytest.approx(getattr(whole.duration, name), rel=1e-2), name


@pytest.mark.full
def test_the_blocks_of_a_mixture_are_repeated_behind_its_dense_ones():
    shape = SHAPES["deepseek-v3"]
    assert isinstance(shape, DecoderShape)
    assert_planned_alike(of_shape("mixture", replace(shape, layers=26)), replace(SETTING, sequence=64), num_rehearsals=3)


class Widening(Decoder):
    """Each block leaves more to backward than the one before."""

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.tokens(words)
        for number, block in enumerate(self.blocks):
            x = block(x.expand(1 + number, -1, -1), None)[:1]
        return self.output(self.norm(x))


@pytest.mark.slow
def test_a_root_that_grows_with_the_blocks_is_rehearsed_whole_where_figures_are_to_be_exact():
    """Its storages are rounded up, so that bytes do not fall on a line."""
    workload, setting = of_shape("gpt", SHAPE), replace(SETTING, wrap=LINEAR_LAYERS)
    with patch.object(api, "rehearse", side_effect=rehearse) as rehearsals:
        nearly = api.plan_of(workload, setting, card="h100", is_of_interest=lambda planned: False)
    assert rehearsals.call_count == 2
    assert_planned_alike(workload, setting, num_rehearsals=3)
    whole = api.plan_of(replace(workload, repeated=""), setting, card="h100")
    assert nearly.memory.peak.nbytes == pytest.approx(whole.memory.peak.nbytes, rel=0.01)
    assert nearly.duration is not None
    assert whole.duration is not None
    assert nearly.duration.step == pytest.approx(whole.duration.step, rel=0.01)


@pytest.mark.slow
def test_where_blocks_do_not_add_the_same_all_are_rehearsed():
    shape = replace(SHAPE, family="llama")
    workload = Workload("widening", lambda: Widening(shape), tokens, next_token_loss, repeated="blocks")
    assert_planned_alike(workload, SETTING, num_rehearsals=4)


@pytest.mark.slow
def test_a_trillion_parameters_on_ten_thousand_ranks_are_planned_from_seven_blocks():
    rehearsed: list[Rehearsed] = []

    def count(*args: object) -> Rehearsed:
        rehearsed.append(rehearse(*args))  # type: ignore[arg-type]
        return rehearsed[-1]

    setting = Setting(world_size=10_000, param_dtype=torch.bfloat16, reduce_dtype=torch.float32, sequence=2048)
    with patch.object(api, "rehearse", count):
        planned = api.plan_of(of_shape("gpt-1t", SHAPES["gpt-1t"]), setting)
    assert [len(each.groups) for each in rehearsed] == [6, 7, 8]  # the root, and the blocks
    assert not [entry for each in rehearsed for entry in each.entries if entry.name.startswith("prim::")]  # no kernel asks
    assert len(planned.groups) == 129
    assert len({group.name for group in planned.groups}) == 129
    assert planned.numel == pytest.approx(1.0093e12, rel=1e-3)
    whole = 16 * planned.numel / 10_000  # fp32 parameters, gradients and two states; rows do not divide over the ranks
    assert whole < planned.state.total < 1.2 * whole
