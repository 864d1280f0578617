"""Step times that others published, compared with those of ``fsdp2.plan(card=)``.

    python benchmarks/published_steps.py                 # all rows; 10 minutes of a core
    python benchmarks/published_steps.py --rows 0:10     # some

published_steps.csv holds llm-foundry's training benchmarks (github.com/mosaicml/llm-foundry, scripts/train/benchmarking): GPTs on
FSDP1, eager, torch 2.1, AdamW. Each is planned as it was trained: parameters stored in fp32, gathered and computed in bf16, gradients
reduced in fp32 in each micro-batch, every block a unit.

Constants of the cards were fitted to the rows with an even number; "held" is the error on the others.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp2.grouping.policies import by_class
from fsdp2.planner.api import plan_of
from fsdp2.planner.setting import Setting
from fsdp2.planner.workload import Workload, next_token_loss, tokens

TABLE = Path(__file__).with_suffix(".csv")
CARDS = {"h100_80gb": "h100", "a100_80gb": "a100-80gb", "a100_40gb": "a100-40gb"}
STRATEGIES = {"FULL_SHARD": "zero3", "SHARD_GRAD_OP": "zero2"}
Row = dict[str, str]


class Block(nn.Module):
    """Pre-norm; queries, keys and values in one product."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    """Learned positions, and an output that is tied to the token embedding."""

    def __init__(self, width: int, heads: int, layers: int, vocabulary: int, context: int) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embedding.weight)


@dataclass(frozen=True)
class Compared:
    """A row, and the seconds of its step by the model."""

    number: int
    row: Row
    modeled: float

    @property
    def error(self) -> float:
        return self.modeled / float(self.row["step_s"]) - 1

    def __str__(self) -> str:
        row = self.row
        run = f"{row['model']:9} {row['gpus']:>3} x {row['gpu']}, {row['accumulation']} x {row['micro_batch']} x {row['sequence']}"
        recomputed = ", recomputed" if row["recompute"] == "True" else ""
        return f"{self.number:3} {run}{recomputed}: {row['step_s']} s published, {self.modeled:.3f} modeled, {self.error:+.1%}"


def seconds_of(row: Row) -> float:
    """A step by the model."""
    sizes = [int(row[name]) for name in ("width", "heads", "layers", "vocabulary", "sequence")]
    workload = Workload(row["model"], lambda: GPT(*sizes), tokens, next_token_loss, repeated="blocks")
    setting = Setting(
        world_size=int(row["gpus"]),
        strategy=STRATEGIES[row["strategy"]],  # type: ignore[arg-type]
        wrap=by_class(Block),
        dtype=torch.float32,
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        batch=int(row["micro_batch"]),
        micro_batches=int(row["accumulation"]),
        sequence=int(row["sequence"]),
        checkpointing="full" if row["recompute"] == "True" else "none",
    )
    duration = plan_of(workload, setting, CARDS[row["gpu"]]).duration
    assert duration is not None
    return duration.step


def summary(name: str, compared: Sequence[Compared]) -> str:
    sizes = sorted(abs(each.error) for each in compared)
    mean = statistics.fmean(each.error for each in compared)
    return f"{name:36} {len(sizes):4} {statistics.median(sizes):7.1%} {sizes[int(0.9 * (len(sizes) - 1))]:7.1%} {mean:+7.1%}"


def pairs_in_order(compared: Sequence[Compared]) -> str:
    """Pairs of one model size and card whose published tokens/s differ by more than 3 %: how many the model puts in that order."""
    pairs = right = 0
    for index, one in enumerate(compared):
        for other in compared[:index]:
            if one.row["model"] == other.row["model"] and one.row["gpu"] == other.row["gpu"]:
                published, modeled = (a / b for a, b in zip(_rates(one), _rates(other), strict=True))
                if abs(published - 1) > 0.03:
                    pairs += 1
                    right += (published > 1) == (modeled > 1)
    return f"order of two settings of one model and card, over 3 % apart: {right} of {pairs} right"


def _rates(one: Compared) -> tuple[float, float]:
    """Tokens/s and GPU, published and modeled."""
    row = one.row
    per_gpu = int(row["accumulation"]) * int(row["micro_batch"]) * int(row["sequence"])
    return per_gpu / float(row["step_s"]), per_gpu / one.modeled


def _range(value: int, *ends: int) -> str:
    return f"to {next(end for end in ends if value <= end):7,}"


BY: dict[str, Callable[[Row], str]] = {
    "card": lambda row: row["gpu"],
    "GPUs": lambda row: _range(int(row["gpus"]), 8, 64, 512),
    "parameters (millions)": lambda row: _range(int(row["parameters"]) // 10**6, 1000, 10_000, 100_000),
    "sequence": lambda row: _range(int(row["sequence"]), 2048, 8192, 65_536),
    "recomputed": lambda row: row["recompute"],
}


def main() -> None:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("table", type=Path, nargs="?", default=TABLE)
    arguments.add_argument("--rows", default=":", help="first:last (last is not planned)")
    options = arguments.parse_args()
    with options.table.open(newline="") as file:
        rows = list(enumerate(csv.DictReader(file)))
    first, _, last = options.rows.partition(":")
    compared = []
    for number, row in rows[int(first or 0) : int(last) if last else None]:
        compared.append(Compared(number, row, seconds_of(row)))
        print(compared[-1], flush=True)
    held = [each for each in compared if each.number % 2]
    print(f"\n{'':36} rows  median    90th    mean    error of the model's step time")
    for name, some in (("all", compared), ("fitted", [each for each in compared if not each.number % 2]), ("held", held)):
        if some:
            print(summary(name, some))
    for name, kind in BY.items():
        for value in sorted({kind(each.row) for each in held}):
            print(summary(f"held, {name} {value}", [each for each in held if kind(each.row) == value]))
    print(pairs_in_order(compared))


if __name__ == "__main__":
    main()
