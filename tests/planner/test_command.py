"""``fsdp2 plan``: which models it knows, and what it prints."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from fsdp2.cli import main
from fsdp2.planner.api import plan_of
from fsdp2.planner.models import DecoderShape
from fsdp2.planner.rehearsal import Setting
from fsdp2.planner.shapes import SHAPES, named, of_shape
from fsdp2.wrap import root_only

NUMEL = {  # in billions, as their papers have it
    "llama3-8b": 8.03,
    "llama3-70b": 70.55,
    "llama3-405b": 405.9,
    "deepseek-v3": 671.0,
    "gpt-175b": 175.2,
    "gpt-1t": 1009.3,
    "t5-3b": 2.85,
    "t5-11b": 11.3,
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_has_as_many_parameters_as_its_paper_says(name):
    with torch.device("meta"):
        model = named(name).build()
    assert sum(param.numel() for param in model.parameters()) / 1e9 == pytest.approx(NUMEL[name], rel=0.005)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_each_shape_can_be_rehearsed(name):
    """With two layers, of a mixture with two that have experts: only what is repeated is checkpointed."""
    shape, layers = SHAPES[name], 2
    if isinstance(shape, DecoderShape) and shape.experts is not None:
        shape, layers = replace(shape, experts=replace(shape.experts, dense_layers=1)), 3
    planned = plan_of(of_shape(name, replace(shape, layers=layers)), Setting(world_size=64, sequence=64, checkpointing="full"))
    assert {each.kind for each in planned.traffic} == {"all_gather", "reduce_scatter"}
    assert planned.memory.peak.nbytes > planned.state.total


@pytest.mark.slow
@pytest.mark.parametrize("option", [(), ("--model",)])
def test_a_configuration_of_transformers_is_planned(option, tmp_path, capsys):
    pytest.importorskip("transformers")
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert (
        main(["plan", *option, f"hf:{tmp_path / 'config.json'}", "--ranks", "16", "--sequence", "32", "--checkpointing", "full"]) == 0
    )
    printed = capsys.readouterr().out
    assert "over 16 ranks" in printed
    assert "Peak of a step" in printed
    assert "reduce_scatter" in printed


def test_a_model_that_nobody_knows_is_refused_with_the_closest_name(capsys):
    assert main(["plan", "lama3-8b", "--ranks", "8"]) == 1
    assert "fix:      llama3-8b" in capsys.readouterr().err
    assert main(["plan", "gpt2", "--ranks", "8"]) == 1
    assert "hf: and the file's path" in capsys.readouterr().err


MODELS = """
import torch
from torch import nn

class Picture(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.unused = nn.Conv2d(3, 8, 3), nn.Linear(8, 8)

    def forward(self, x):
        return self.first(x).relu().flatten(1)

class Reading(Picture):
    def forward(self, x):
        return super().forward(x) * (2.0 if x.sum() > 0 else 1.0)

def pictures(batch, sequence):
    return (torch.zeros(batch, 3, 8, 8),)
"""


def test_a_model_that_takes_no_tokens_needs_inputs_and_says_so(tmp_path, capsys, monkeypatch):
    (tmp_path / "pictures_to_plan.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "pictures_to_plan:Picture", "--ranks", "4"]) == 1
    said = capsys.readouterr().err
    assert "Picture raised RuntimeError when it was called with ((1, 2048) torch.int64)" in said
    assert "--inputs package.module:function" in said
    assert main(["plan", "pictures_to_plan:Picture", "--ranks", "4", "--inputs", "pictures_to_plan:pictures"]) == 0
    assert "296 parameters" in capsys.readouterr().out, "with a layer that no rank uses"
    assert main(["plan", "pictures_to_plan:Reading", "--ranks", "4", "--inputs", "pictures_to_plan:pictures"]) == 1
    assert "Reading reads values of tensors, which a plan does not have" in capsys.readouterr().err
    assert main(["plan", "pictures_to_plan:Picture", "--ranks", "4", "--inputs", "pictures_to_plan:absent"]) == 1
    assert "pictures_to_plan:absent was not found" in capsys.readouterr().err


@pytest.mark.slow
def test_a_root_that_holds_most_of_the_model_is_told_with_the_peak_of_automatic_wrapping():
    workload = of_shape("gpt", DecoderShape("gpt", dim=256, layers=4, heads=4, kv_heads=4, hidden=1024, vocabulary=64, context=16))
    setting = Setting(world_size=8, sequence=16)
    whole, wrapped = plan_of(workload, replace(setting, wrap=root_only)), plan_of(workload, setting)
    assert whole.large_root is not None
    assert (whole.large_root.share, whole.large_root.peak) == (1.0, wrapped.memory.peak.nbytes)
    assert "the root group holds 100% of the parameters" in str(whole)
    assert wrapped.large_root is None
