"""Device cards in files: what is written is read, what is no card is refused, and a measured one prices a plan."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import fsdp2
from fsdp2.cli import main
from fsdp2.errors import ArgumentError
from fsdp2.planner.card_file import card_named, read_card, write_card
from fsdp2.testing.clock.cards import CARDS


def test_a_card_is_read_as_it_was_written(tmp_path):
    for name, card in CARDS.items():
        write_card(card, tmp_path / "card.json")
        assert read_card(tmp_path / "card.json") == card_named(name) == card


@pytest.mark.parametrize("text", [None, "", "[1]", "{}", '{"protocols": [], "host": {}}', '{"protocols": [{"a": 1}], "host": {}}'])
def test_what_is_no_card_is_refused_in_a_line(tmp_path, capsys, text):
    path = tmp_path / "card.json"
    if text is not None:
        path.write_text(text)
    assert main(["plan", "t5-3b", "--ranks", "8", "--card", str(path)]) == 2
    assert "was not read as a card" in capsys.readouterr().err


BY_HAND = {
    "memory_bandwidth": (0, "fast", None, -1.0, float("nan")),
    "ranks_per_host": (0, 2.5),
    "flops": ({}, {"BFloat16": "1e15"}, {"BFloat16": 0}, [1.0]),
    "collectives_take": (1.0, -0.1),
    "protocols": ([], [{"name": "LL", "base_s": 0.0, "inside_s": 0.0, "between_s": 0.0, "share": 0}]),
    "measured_over_modeled": ([1.1, 0.9], [1.0]),
    "host": ([], {"operator": "4us"}),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BY_HAND.items() for value in values])
def test_a_number_that_no_card_has_is_refused_with_its_name(tmp_path, name, value):
    path = tmp_path / "card.json"
    write_card(CARDS["h100"], path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    with pytest.raises(ArgumentError, match=rf"was not read as a card.*{'' if value == [] or name == 'flops' else name}"):
        read_card(path)


def test_a_product_in_a_dtype_that_the_card_does_not_know_is_refused_by_name(tmp_path):
    card = replace(CARDS["h100"], flops={"BFloat16": 1e15})
    with pytest.raises(ArgumentError, match="no rate for products in Float"):
        fsdp2.plan(nn.Linear(4, 4), 2, card=card, inputs=lambda batch, _: (torch.ones(batch, 4),))


def test_a_plan_in_python_takes_the_name_of_a_card_and_its_file_alike(tmp_path):
    write_card(CARDS["h200"], tmp_path / "card.json")
    named, from_file = (
        fsdp2.plan(nn.Sequential(nn.Linear(8, 8)), 8, card=card, inputs=lambda batch, sequence: (torch.zeros(batch, 8),))
        for card in ("h200", str(tmp_path / "card.json"))
    )
    assert named.duration == from_file.duration
    with pytest.raises(ArgumentError, match="h201 was not read as a card"):
        fsdp2.plan(nn.Linear(8, 8), 8, card="h201")


def test_a_plan_without_a_model_or_ranks_says_what_is_missing(capsys):
    assert main(["plan", "--ranks", "8"]) == 2
    assert main(["plan", "llama3-8b"]) == 2
    assert "fsdp2 plan llama3-8b --ranks 16" in capsys.readouterr().err


MODEL = """
import torch
def model():
    return torch.nn.Sequential(torch.nn.Embedding(64, 64), torch.nn.Linear(64, 64))
"""


@pytest.mark.full
def test_a_card_of_this_machine_is_measured_and_prices_a_plan(tmp_path: Path, capfd, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    path = tmp_path / "card.json"
    assert main(["measure", str(path)]) == 0
    assert "Warning" not in capfd.readouterr().err
    card = read_card(path)
    assert card.ranks_per_host == 2
    assert card.is_measured
    assert 0 <= card.tile_writes < math.inf
    assert card.collectives_take == 0, "ranks of a CPU share its cores with the threads of their collectives"
    rates = (*card.flops.values(), card.memory_bandwidth, card.memory_nbytes, card.inside, card.to_host, card.attention_share)
    assert all(math.isfinite(each) and each > 0 for each in (*rates, card.host.operator, card.protocols[0].base_s))
    (tmp_path / "model_of_the_test.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "model_of_the_test:model", "--ranks", "2", "--ranks-per-host", "2", "--card", str(path)]) == 0
    assert re.search(r"A step on CPU, measured: .* ms, unproven, .* MFU \(modeled, measured rates\)", capfd.readouterr().out)
