"""Draws the pictures of the pages from the planner's and the clock's data: ``python docs/figures/draw.py`` writes the SVGs beside it.

    step.svg        what runs on which stream in a step of a sharded model, on the clock's H100s
    memory.svg      what a rank's memory holds in the same step
    strategies.svg  bytes a parameter by strategy, by the formula of ``fsdp2.state_bytes``

Each is a function from data to SVG. Colours are readable on light and dark pages; text has one grey for both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from fsdp2.planner.memory import _kinds
from fsdp2.planner.rehearsal import Rehearsed, Setting, rehearse
from fsdp2.planner.streams import COMPUTE, COPY_IN, GATHER, REDUCE
from fsdp2.planner.workload import Workload, tokens
from fsdp2.state_bytes import expected_state_bytes
from fsdp2.testing.clock.cards import H100
from fsdp2.testing.clock.timeline import Clock, Span

HERE = Path(__file__).parent
GREY = "#808890"
_TEXT = f'font-family="sans-serif" font-size="12" fill="{GREY}"'
COLOURS = {
    "forward": "#4c8dd6",
    "backward": "#d98a3d",
    "optimizer": "#5aa469",
    "copy-in": "#9aa3ad",
    "all-gather": "#3fa7a1",
    "reduce-scatter": "#b565a7",
}
KINDS = {  # from the bottom of the picture to its top
    "sharded parameters": "#4c8dd6",
    "optimizer state": "#5aa469",
    "sharded gradients": "#d98a3d",
    "unsharded parameters": "#3fa7a1",
    "all-gather buffers": "#8fd0cb",
    "unsharded gradients": "#b565a7",
    "reduction buffers": "#d9a7d0",
    "activations": "#c9b44a",
    "temporaries": "#9aa3ad",
}


class Svg:
    """An SVG of ``width`` x ``height``, written shape by shape."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{title}" {_TEXT}>',
            f"<title>{title}</title>",
        ]

    def rect(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        self._parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.4):.1f}" height="{height:.1f}" fill="{colour}"/>')

    def polygon(self, points: Sequence[tuple[float, float]], colour: str) -> None:
        text = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._parts.append(f'<polygon points="{text}" fill="{colour}"/>')

    def line(self, x1: float, y1: float, x2: float, y2: float) -> None:
        self._parts.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{GREY}" stroke-dasharray="3 3"/>')

    def text(self, x: float, y: float, text: str, anchor: str = "start") -> None:
        self._parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>')

    def legend(self, x: float, y: float, colours: dict[str, str]) -> None:
        """In a row from ``x`` on."""
        for name, colour in colours.items():
            self.rect(x, y - 10, 11, 11, colour)
            self.text(x + 16, y, name)
            x += 26 + 6.6 * len(name)

    def __str__(self) -> str:
        return "\n".join([*self._parts, "</svg>"]) + "\n"


class Block(nn.Module):
    """A perceptron of a transformer's proportions: enough to see parameters, activations and gradients come and go."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Four blocks between an embedding and a head."""

    def __init__(self, width: int = 4096, vocabulary: int = 8192) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def rehearsed() -> Rehearsed:
    """A step of ``Model`` on one of 8 ranks, bf16 with fp32 weights."""
    workload = Workload("model", Model, tokens, lambda output, inputs: output.float().mean())
    bf16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}
    return rehearse(workload, Setting(world_size=8, strategy="zero3", batch=1, sequence=4096, **bf16))


def step(data: Rehearsed) -> Svg:
    clock = Clock(H100, data.process_groups)
    clock.run(entry for entry in data.entries if not entry.name.startswith("prim::"))  # asks a tensor something: no kernel
    end = max(span.stop for span in clock.spans)
    svg = Svg(860, 215, "A step on four streams: gathers run beside forward and backward, reductions beside backward")
    left, width = 110.0, 740.0
    rows = {"compute": 20.0, "copy-in": 56.0, "all-gather": 92.0, "reduce-scatter": 128.0}
    for name, y in rows.items():
        svg.text(left - 8, y + 18, name, "end")
    for (name, colour), start, stop in _bars(clock.spans):
        svg.rect(left + width * start / end, rows[name], width * (stop - start) / end, 26, colour)
    svg.text(left, 176, "0 ms")
    svg.text(left + width, 176, f"{end * 1e3:.1f} ms", "end")
    svg.legend(left, 204, COLOURS)
    return svg


def _bars(spans: Sequence[Span]) -> list[tuple[tuple[str, str], float, float]]:
    """Row and colour, begin and end of what runs; spans of one colour that touch are one bar."""
    names = {COMPUTE: "compute", COPY_IN: "copy-in", GATHER: "all-gather", REDUCE: "reduce-scatter"}
    open_bars: dict[str, tuple[tuple[str, str], float, float]] = {}
    done = []
    for span in sorted(spans, key=lambda span: span.start):
        name = names[span.stream]
        key = name, COLOURS[span.phase if name == "compute" else name]
        bar = open_bars.get(name)
        if bar is not None and bar[0] == key and span.start - bar[2] < 2e-6:
            open_bars[name] = key, bar[1], max(bar[2], span.stop)
            continue
        if bar is not None:
            done.append(bar)
        open_bars[name] = key, span.start, span.stop
    return [*done, *open_bars.values()]


def memory(data: Rehearsed) -> Svg:
    kinds = _kinds(data.before, data.blocks, data.entries)
    now = Counter[str]()
    for block in data.before:
        now[kinds[block.id]] += block.nbytes
    moments: list[dict[str, int]] = [dict(now)]
    marks: list[tuple[int, str]] = []
    for entry in data.entries:
        if entry.kind == "mark":
            marks.append((len(moments), entry.name))
        elif entry.kind in ("alloc", "free"):
            block = data.blocks[entry.id]
            now[kinds[block.id]] += block.nbytes if entry.kind == "alloc" else -block.nbytes
            moments.append(dict(now))
    top = max(sum(moment.get(kind, 0) for kind in KINDS) for moment in moments)
    svg = Svg(860, 330, "What a rank's memory holds over a step")
    left, width, bottom, height = 70.0, 780.0, 260.0, 240.0
    xs = [left + width * index / (len(moments) - 1) for index in range(len(moments))]
    below = [0.0] * len(moments)
    for kind, colour in KINDS.items():
        above = [base + moment.get(kind, 0) / top for base, moment in zip(below, moments, strict=True)]
        edge = [(x, bottom - height * y) for x, y in zip(xs, above, strict=True)]
        svg.polygon([*edge, *reversed([(x, bottom - height * y) for x, y in zip(xs, below, strict=True)])], colour)
        below = above
    for index, name in marks:
        x = xs[min(index, len(xs) - 1)]
        svg.line(x, bottom - height, x, bottom)
        is_last = x > left + 0.95 * width
        svg.text(left + width if is_last else x + 4, bottom + 16, name, "end" if is_last else "start")
    svg.text(left - 6, bottom - height + 10, f"{top / 1e9:.1f} GB", "end")
    svg.text(left - 6, bottom, "0", "end")
    names = list(KINDS)
    svg.legend(left, 300, {name: KINDS[name] for name in names[:5]})
    svg.legend(left, 322, {name: KINDS[name] for name in names[5:]})
    return svg


def strategies(world_size: int = 8, shard_size: int = 4) -> Svg:
    names = ("ddp", "zero1", "zero2", "zero3", "hsdp")
    parts = {"compute": "#3fa7a1", "gradients": "#d98a3d", "master": "#4c8dd6", "optimizer": "#5aa469"}
    bf16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}
    svg = Svg(860, 250, f"Bytes a parameter on one of {world_size} ranks, by strategy")
    left, width = 70.0, 640.0
    for row, name in enumerate(names):
        y = 14 + 38 * row
        state = expected_state_bytes(name, 1, world_size=world_size, shard_size=shard_size, **bf16)
        svg.text(left - 8, y + 18, name, "end")
        x = left
        for part, colour in parts.items():
            length = width * getattr(state, part) / 16
            if length:
                svg.rect(x, y, length, 26, colour)
            x += length
        svg.text(x + 8, y + 18, f"{state.total:.2f} bytes")
    svg.legend(left, 236, {"unsharded copy": parts["compute"]} | {name: parts[name] for name in ("gradients", "master", "optimizer")})
    return svg


def main() -> None:
    data = rehearsed()
    for name, svg in (("step", step(data)), ("memory", memory(data)), ("strategies", strategies())):
        (HERE / f"{name}.svg").write_text(str(svg))


if __name__ == "__main__":
    main()
