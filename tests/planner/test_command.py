"""``fsdp2 plan``: which models it knows, and what it prints."""

from __future__ import annotations

import argparse
import inspect
import json
import runpy
from dataclasses import asdict, fields, replace
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fsdp2
from fsdp2.cli import main
from fsdp2.errors import ModuleError
from fsdp2.grouping.policies import Wrap
from fsdp2.planner.api import plan_of
from fsdp2.planner.command import add_arguments
from fsdp2.planner.models import DecoderShape
from fsdp2.planner.result import Plan
from fsdp2.planner.setting import OPTIMIZERS, OptimizerName, Setting
from fsdp2.planner.shapes import SHAPES, named, of_shape
from fsdp2.planner.workload import next_token_loss
from fsdp2.strategy import STRATEGIES, StrategyName
from fsdp2.wrap import by_class, root_only

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
    assert main(["plan", "lama3-8b", "--ranks", "8"]) == 2
    assert "fix:      llama3-8b" in capsys.readouterr().err
    assert main(["plan", "gpt2", "--ranks", "8"]) == 2
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
    assert main(["plan", "pictures_to_plan:Picture", "--ranks", "4", "--inputs", "pictures_to_plan:absent"]) == 2
    assert "pictures_to_plan:absent was not found" in capsys.readouterr().err


def test_the_command_has_the_defaults_of_the_function():
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    defaults = vars(parser.parse_args(["llama3-8b", "--ranks", "8"]))
    taken = {
        name: each.default
        for name, each in inspect.signature(fsdp2.plan).parameters.items()
        if name not in ("model", "world_size", "loss")
    }
    assert {name: defaults[name] for name in taken} == taken
    assert {each.name for each in fields(Setting)} <= taken.keys() | {"world_size"}


def test_type_checkers_know_the_names_of_all_strategies_and_optimizers():
    assert get_args(StrategyName) == tuple(STRATEGIES)
    assert get_args(OptimizerName) == tuple(OPTIMIZERS)


SCRIPT = """
import argparse, os
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, mask=None):
        return x + self.down(self.up(x).relu())

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.table, self.head = nn.Embedding(64, width), nn.Linear(width, 64)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))

    def forward(self, words, mask):
        assert mask.all()
        x = self.table(words)
        for block in self.blocks:
            x = block(x, mask=mask)
        return self.head(x)

def make():
    return Net(32)

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=8)
    dist.init_process_group("gloo")
    assert dist.get_world_size() == int(os.environ["WORLD_SIZE"]) == 16
    told = [None] * 16
    dist.all_gather_object(told, "ready", group=dist.new_group(backend="gloo"))
    assert told == ["ready"] * 16
    counts = torch.zeros(16)
    getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(counts, torch.ones(1))
    assert counts.sum() == 16
    net = Net(parser.parse_args().width)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for block in net.blocks:
        fully_shard(block, mp_policy=policy)
    ROOT
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    words = torch.randint(0, 64, (4, 16))
    net(words, mask=torch.ones(4, 16, dtype=torch.bool)).sum().backward()
    raise SystemExit("it went on")

if __name__ == "__main__":
    main()
"""


def test_a_training_script_is_planned_as_it_trains(tmp_path, capsys):
    """The oracle: a plan of the same model with the same choices, made by hand."""
    path = tmp_path / "train_to_plan.py"
    path.write_text(SCRIPT.replace("ROOT", "fully_shard(net, mp_policy=policy); net.set_is_last_backward(True)"))
    assert main(["plan", str(path), "--ranks", "16", "--arguments", "--width 32", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    made = runpy.run_path(str(path))
    by_hand = fsdp2.plan(
        made["make"](),
        16,
        wrap=[made["Block"]],
        param_dtype=torch.bfloat16,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        inputs=lambda batch, sequence: (torch.zeros(4, 16, dtype=torch.long), torch.ones(4, 16, dtype=torch.bool)),
        loss=lambda output, inputs: next_token_loss(output, inputs[:1]),
    )
    assert planned["state"] == asdict(by_hand.state)
    assert planned["memory"]["peak"] == asdict(by_hand.memory.peak)
    assert [each["name"] for each in planned["groups"]] == [each.name for each in by_hand.groups]
    assert planned["setting"]["batch"] == 4


def test_a_script_that_shards_no_root_or_ends_early_is_told_so(tmp_path, capsys):
    path = tmp_path / "train_to_plan.py"
    path.write_text(SCRIPT.replace("ROOT", ""))
    assert main(["plan", str(path), "--ranks", "16"]) == 2
    assert "call fully_shard on the model" in capsys.readouterr().err
    path.write_text("raise ValueError('no data')")
    assert main(["plan", str(path), "--ranks", "16"]) == 2
    assert "it raised ValueError: 'no data'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_root_that_holds_most_of_the_model_is_told_with_the_peak_of_automatic_wrapping():
    workload = of_shape("gpt", DecoderShape("gpt", dim=256, layers=4, heads=4, kv_heads=4, hidden=1024, vocabulary=64, context=16))
    setting = Setting(world_size=8, sequence=16)
    whole, wrapped = plan_of(workload, replace(setting, wrap=root_only)), plan_of(workload, setting)
    assert whole.large_root is not None
    assert (whole.large_root.share, whole.large_root.peak) == (1.0, wrapped.memory.peak.nbytes)
    assert "the root group holds 100% of the parameters" in str(whole)
    assert wrapped.large_root is None


class UsesItsChildren(nn.Module):
    """The root uses weights of its children without calling them; they are most of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(4096, 16), nn.Embedding(1 << 14, 16)
        self.blocks = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.positions.weight[: ids.shape[1]]
        return F.linear(self.blocks(x), self.embedding.weight)


def test_a_model_that_automatic_wrapping_would_break_is_planned_with_its_blocks_and_told_why_without():
    def planned(wrap: Wrap) -> Plan:
        return fsdp2.plan(UsesItsChildren(), 8, batch=2, sequence=16, wrap=wrap, inputs=tokens, loss=lambda out, given: out.sum())

    def tokens(batch: int, sequence: int) -> tuple[Tensor]:
        return (torch.zeros(batch, sequence, dtype=torch.long),)

    assert planned(by_class(nn.Linear)).large_root is None
    with pytest.raises(ModuleError, match=r"(?s)positions.weight.*is not running.*fix: +wrap="):
        planned("auto")
