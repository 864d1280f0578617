"""Device cards in files: what is written is read, what is no card is refused, and a measured one prices a plan."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from fsdp2.cli import main
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
