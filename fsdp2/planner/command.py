"""``fsdp2 plan``: plan a training run from the command line. Most options are the fields of ``Setting``.

$ fsdp2 plan llama3-70b --ranks 64 --batch 1 --sequence 8192 --checkpointing full
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NoReturn

from ..arguments import COUNT, add_format, word_of
from ..errors import ArgumentError
from ..printable import say_json
from ..tables import Table, show
from ..testing.clock.cards import CARDS, Card
from .api import plan_of
from .card_file import card_named
from .result import headline, tables
from .script import of_script
from .setting import Setting
from .shapes import SHAPES, named
from .tiers import OFFLOADS
from .workload import Workload


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``fsdp2 plan``."""
    add_workload(parser)
    for verb in ("search", "measure"):
        parser.add_argument(f"--{verb}", action=_Verb, nargs="?", help=argparse.SUPPRESS)


class _Verb(argparse.Action):
    """An option that has become a command."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        parser.error(f"plan --{self.dest} is the command fsdp2 {self.dest}: fsdp2 {self.dest} --help")


def add_workload(parser: argparse.ArgumentParser) -> None:
    """The arguments of a plan and of a search: a model, a setting, a card, and how to print the result."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help=f"{', '.join(SHAPES)}; hf:CONFIG.json; package.module:function, which returns a module; or a training script, SCRIPT.py",
    )
    parser.add_argument("--model", dest="named_model", metavar="MODEL", help="the same as MODEL")
    parser.add_argument(
        "--arguments", metavar="ARGS", default="", help='the arguments of SCRIPT.py in one string: "--config large.toml"'
    )
    parser.add_argument("--ranks", dest="world_size", type=word_of(COUNT), metavar="N", help="number of ranks (required)")
    for each in fields(Setting):
        if "option" in each.metadata:
            option = parser.add_argument(f"--{each.name.replace('_', '-')}", default=each.default, **each.metadata["option"])
            if each.default is not None:
                option.help = f"{option.help} (default: %(default)s)"
    offload = parser.add_mutually_exclusive_group()
    for place, kept in OFFLOADS.items():
        if place:
            flag = "--offload" if place is True else f"--offload-{place}"
            offload.add_argument(flag, dest="offload", action="store_const", const=place, default=Setting.offload, help=f"keep {kept}")
    parser.add_argument(
        "--inputs",
        metavar="package.module:function",
        help="a function from batch and sequence to the model's arguments (default: token ids)",
    )
    parser.add_argument(
        "--card",
        metavar="GPU",
        help=f"also predict the time of a step on this GPU: {', '.join(CARDS)}, or a file written by fsdp2 measure",
    )
    add_format(parser)


def run(options: argparse.Namespace) -> int:
    planned = plan_of(*asked_for(options))
    return shown(options, planned, headline(planned), tables(planned))


def asked_for(options: argparse.Namespace) -> tuple[Workload, Setting, Card | None]:
    """What is to be planned."""
    model = options.model or options.named_model
    if model is None or options.world_size is None:
        raise ArgumentError(
            f"{options.command} needs a model and a number of ranks",
            expected="both",
            fix=f"for instance: fsdp2 {options.command} llama3-8b --ranks 16",
        )
    card = None if options.card is None else card_named(options.card)
    setting = Setting(**{each.name: getattr(options, each.name) for each in fields(Setting)})
    if model.endswith(".py"):
        return *of_script(model, shlex.split(options.arguments), setting), card
    return named(model, options.inputs), setting, card


def shown(options: argparse.Namespace, result: Any, title: str, found: Sequence[Table]) -> int:
    """Print ``result``, which has all figures in bytes and seconds, or its tables. Returns 0"""
    if options.format == "json":
        say_json(result)
    else:
        show(title, found)
    return 0
