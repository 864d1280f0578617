"""Device cards as JSON files, for ``fsdp2 plan --card FILE``."""

from __future__ import annotations

import json
import math
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
        return _checked(Card(**values))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ArgumentError(
            f"{path} was not read as a card: {type(error).__name__}: {error}",
            expected=f"one of {list(CARDS)}, or a file that fsdp2 measure has written",
            fix="fsdp2 measure card.json",
        ) from None


_MAY_BE_ZERO = ("tile_writes", "collectives_take", "kernel_s", "launch_s")


def _checked(card: Card) -> Card:
    """Raises: ValueError for a number that no card has, which somebody wrote into the file"""
    rates = {name: value for name, value in asdict(card).items() if name not in ("name", "is_measured", "protocols", "host")}
    by_dtype, low_and_high = rates.pop("flops"), rates.pop("measured_over_modeled")
    least = dict.fromkeys(_MAY_BE_ZERO, 0.0)
    rates |= {f"flops[{name!r}]": value for name, value in by_dtype.items()}
    rates |= {f"measured_over_modeled[{index}]": value for index, value in enumerate(low_and_high)}
    parts: dict[str, HostCosts | Protocol] = {"host": card.host}
    parts |= {f"protocols[{index}]": each for index, each in enumerate(card.protocols)}
    for which, part in parts.items():
        numbers = {f"{which}.{name}": value for name, value in asdict(part).items() if name != "name"}
        rates |= numbers
        least |= {name: 0.0 for name in numbers if not name.endswith("share")}
    for name, value in rates.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or value < 0 or (value == 0 and name not in least):
            raise ValueError(f"{name} is {value!r}, and a card has a number {'of 0 or more' if name in least else 'above 0'} there")
    if not isinstance(card.ranks_per_host, int):
        raise ValueError(f"ranks_per_host is {card.ranks_per_host!r}, and a host has a whole number of ranks")
    if card.collectives_take >= 1:
        raise ValueError(f"collectives_take is {card.collectives_take!r}, and collectives leave operators a part: it is below 1")
    if not card.flops or not card.protocols:
        raise ValueError("flops and protocols have at least one entry")
    if len(low_and_high) != 2 or low_and_high[0] > low_and_high[1]:
        raise ValueError(f"measured_over_modeled is {list(low_and_high)}, and a range has a lower and an upper end")
    return card


def card_named(name: str) -> Card:
    """A card by name, or from a file. Raises: ArgumentError"""
    return CARDS[name] if name in CARDS else read_card(Path(name))
