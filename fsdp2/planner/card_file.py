"""Device cards as JSON files, for ``fsdp2 plan --card FILE``."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from ..errors import ArgumentError
from ..testing.clock.cards import CARDS, Card, HostCosts, Protocol


def write_card(card: Card, path: Path) -> None:
    path.write_text(json.dumps(asdict(card), indent=2) + "\n")


def read_card(path: Path) -> Card:
    """Raises: ArgumentError if there is no such file, or it is no card"""
    try:
        values = json.loads(path.read_text())
        values["protocols"] = tuple(Protocol(**each) for each in values["protocols"])
        values["host"] = HostCosts(**values["host"])
        values["measured_over_modeled"] = tuple(values["measured_over_modeled"])
        return Card(**values)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ArgumentError(
            f"{path} was not read as a card: {type(error).__name__}: {error}",
            expected=f"one of {list(CARDS)}, or a file that fsdp2 measure has written",
            fix="fsdp2 measure card.json",
        ) from None


def card_named(name: str) -> Card:
    """A card by name, or from a file. Raises: ArgumentError"""
    return CARDS[name] if name in CARDS else read_card(Path(name))
