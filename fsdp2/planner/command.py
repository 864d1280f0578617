"""``fsdp2 plan``: what a training run will need. Options are those of ``fsdp2.plan``; rich prints the tables where it is installed.

$ fsdp2 plan llama3-70b --ranks 64 --batch 1 --sequence 8192 --checkpointing full
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from ..arguments import COUNT, NATURAL, POSITIVE, word_of
from ..errors import ArgumentError
from ..printable import say_json
from ..strategy import STRATEGIES
from ..tables import Table, show
from ..testing.clock.cards import CARDS
from ..wrap import by_class
from .api import plan_of
from .card_file import card_named
from .measure import measure_in_ranks
from .proposals import Found, words_of
from .rehearsal import OPTIMIZERS, Setting
from .result import Plan, headline, tables
from .script import of_script
from .search import search
from .shapes import SHAPES, named
from .tiers import Offload

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_DEFAULT = "(default: %(default)s)"
_PATIENCE_S = 1.0
"""A search that takes less than this says nothing before it has found."""
_PATIENCE_OF_FILES_S = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``fsdp2 plan``."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help=f"{', '.join(SHAPES)}; hf:CONFIG.json; package.module:function, which returns a module; or a training script, SCRIPT.py",
    )
    parser.add_argument("--model", dest="named_model", metavar="MODEL", help="the same as MODEL")
    parser.add_argument("--arguments", metavar="ARGS", default="", help='of a script, as one word: "--config large.toml"')
    parser.add_argument("--ranks", type=word_of(COUNT), help="how many; a plan needs it")
    parser.add_argument("--ranks-per-host", type=word_of(COUNT), default=8, help="default: 8")
    parser.add_argument("--strategy", choices=list(STRATEGIES), default=Setting.strategy, help=f"as in fsdp2.parallelize {_DEFAULT}")
    parser.add_argument("--shard-size", type=word_of(COUNT), help="ranks of a node, for hybrid strategies (default: ranks per host)")
    parser.add_argument("--wrap", nargs="+", metavar="CLASS", help="names of classes that become groups (default: found by themselves)")
    parser.add_argument("--dtype", choices=list(DTYPES), help="in which parameters are stored (default: as the model has them)")
    parser.add_argument("--param-dtype", choices=list(DTYPES), default="bf16", help="in which they are computed with (default: bf16)")
    parser.add_argument("--reduce-dtype", choices=list(DTYPES), default="fp32", help="in which gradients are reduced (default: fp32)")
    parser.add_argument("--optimizer", choices=list(OPTIMIZERS), default=Setting.optimizer, help=_DEFAULT)
    parser.add_argument(
        "--inputs",
        metavar="package.module:function",
        help="a function from batch and sequence to the model's arguments (default: numbers of words)",
    )
    parser.add_argument(
        "--batch", type=word_of(COUNT), default=Setting.batch, help=f"sequences of a micro-batch of one rank {_DEFAULT}"
    )
    parser.add_argument("--sequence", type=word_of(COUNT), default=Setting.sequence, help=f"tokens of a sequence {_DEFAULT}")
    parser.add_argument(
        "--micro-batches", type=word_of(COUNT), default=Setting.micro_batches, help=f"between two optimizer steps {_DEFAULT}"
    )
    parser.add_argument(
        "--checkpointing",
        choices=["none", "selective", "full"],
        default="none",
        help="full: blocks are computed again in backward; selective: all of them but matrix products and attention",
    )
    offload = parser.add_mutually_exclusive_group()
    offload.add_argument("--offload", action="store_true", help="keep sharded state in host memory")
    offload.add_argument("--offload-optimizer", action="store_true", help="keep the optimizer's state alone in host memory")
    offload.add_argument("--offload-disk", action="store_true", help="keep parameters and the optimizer's state in files")
    offload.add_argument("--offload-optimizer-disk", action="store_true", help="keep the optimizer's state alone in files")
    parser.add_argument("--prefetch", type=word_of(NATURAL), default=Setting.prefetch, help=f"units that are gathered ahead {_DEFAULT}")
    parser.add_argument("--search", action="store_true", help="propose settings that fit the card's memory, the fastest first")
    parser.add_argument(
        "--memory-limit",
        type=word_of(POSITIVE, float),
        metavar="GB",
        help="with --search: of a rank (default: nine tenths of the card's)",
    )
    parser.add_argument("--card", help=f"also say how long a step takes on it, by a model: {', '.join(CARDS)}, or a file of --measure")
    parser.add_argument("--measure", type=Path, metavar="FILE", help="plan nothing: measure this machine, and write a card for --card")
    parser.add_argument("--json", action="store_true", help="print one JSON object with all figures, in bytes and seconds")
    parser.add_argument("--backend", choices=["nccl", "gloo"], default=Setting.backend, help=f"whose algorithms {_DEFAULT}")


def run(options: argparse.Namespace) -> int:
    """Print the plan, or the result of a search. Returns 0, or the status of ranks that were to measure."""
    if options.measure is not None:
        return measure_in_ranks(options.measure)
    model = options.model or options.named_model
    if model is None or options.ranks is None:
        raise ArgumentError(
            "a plan got no model, or no number of ranks", expected="both", fix="for instance: fsdp2 plan llama3-8b --ranks 16"
        )
    card = None if options.card is None else card_named(options.card)
    setting = setting_of(options)
    if model.endswith(".py"):
        workload, setting = of_script(model, shlex.split(options.arguments), setting, options.ranks_per_host)
    else:
        workload = named(model, options.inputs)
    if options.search:
        limit = None if options.memory_limit is None else options.memory_limit * 1e9
        with _progress() as on_candidate:
            found = search(
                workload, setting, card, memory_limit=limit, ranks_per_host=options.ranks_per_host, on_candidate=on_candidate
            )
        return _print(found, headline(found.asked.plan), found.tables, options.json)
    planned = plan_of(workload, setting, options.ranks_per_host, card)
    return _print(planned, headline(planned), tables(planned), options.json)


def _print(result: Plan | Found, title: str, found: Sequence[Table], as_json: bool) -> int:
    if as_json:
        say_json(result)
    else:
        show(title, found)
    return 0


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, dict[str, str]], None]]:
    """A function that says on the error output which candidate is planned: on a terminal after a second, else a line each 10 s."""
    begin, width = time.monotonic(), 0
    is_terminal = sys.stderr.isatty()

    def show_line(line: str) -> None:
        nonlocal width
        sys.stderr.write(f"\r{line.ljust(width)}")
        sys.stderr.flush()
        width = len(line)

    def on_candidate(number: int, changes: dict[str, str]) -> None:
        nonlocal begin
        if time.monotonic() - begin < (_PATIENCE_S if is_terminal else _PATIENCE_OF_FILES_S):
            return
        line = f"tried {number} settings; now: {words_of(changes) or 'as asked'}"
        if is_terminal:
            show_line(line[: shutil.get_terminal_size().columns - 1])
        else:
            begin = time.monotonic()
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()

    try:
        yield on_candidate
    finally:
        if width:
            show_line("")
            sys.stderr.write("\r")


def setting_of(options: argparse.Namespace) -> Setting:
    is_hybrid = STRATEGIES[options.strategy].is_hybrid
    return Setting(
        world_size=options.ranks,
        strategy=options.strategy,
        shard_size=(options.shard_size or options.ranks_per_host) if is_hybrid else options.shard_size,
        wrap=by_class(*options.wrap) if options.wrap else "auto",
        dtype=DTYPES.get(options.dtype),
        param_dtype=DTYPES[options.param_dtype],
        reduce_dtype=DTYPES[options.reduce_dtype],
        optimizer=options.optimizer,
        batch=options.batch,
        sequence=options.sequence,
        micro_batches=options.micro_batches,
        checkpointing=options.checkpointing,
        offload=_offload_of(options),
        prefetch=options.prefetch,
        backend=options.backend,
    )


def _offload_of(options: argparse.Namespace) -> Offload:
    if options.offload_disk:
        return "disk"
    if options.offload_optimizer_disk:
        return "optimizer-disk"
    return "optimizer" if options.offload_optimizer else bool(options.offload)
