"""Draws the pictures of the pages from the planner's and the clock's data: ``python docs/figures/draw.py`` writes the SVGs next to it.

    step.svg        what runs on which stream in a step of a sharded model, on the clock's H100s
    prefetch.svg    the same step's forward with no module gathered ahead, and with one
    memory.svg      what a rank's memory holds in the same step
    group.svg       where the parameters of one group lie in the ranks' flat shards and in the unsharded storage
    strategies.svg  bytes a parameter by strategy, by the formula of ``fsdp2.state_bytes``
    hsdp.svg        which ranks each collective of a step joins under HSDP, and what leaves a host, next to zero3
    steps.svg       a step's duration next to torch's, as benchmarks/strategies.py has measured it and docs/strategies.md tells
    checkpoint.svg  a checkpoint folder during a save, and where a run resumes that crashes then

Each is a function from data to SVG. Colors are readable on light and dark pages; text has one grey for both.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
from torch import nn

from fsdp2.checkpoint.checkpoint_folder import CheckpointFolder, is_partial
from fsdp2.checkpoint.dcp_read import METADATA
from fsdp2.core.plan.layout import Cut, group_layout
from fsdp2.planner.memory import _kinds
from fsdp2.planner.rehearsal import Rehearsed, rehearse
from fsdp2.planner.setting import Setting
from fsdp2.planner.streams import COMPUTE, COPY_IN, GATHER, REDUCE
from fsdp2.planner.traffic import Traffic, traffic_of
from fsdp2.planner.workload import Workload, tokens
from fsdp2.state_bytes import expected_state_bytes
from fsdp2.testing.clock.cards import H100
from fsdp2.testing.clock.timeline import Clock, Span

HERE = Path(__file__).parent
GREY = "#808890"
_TEXT = f'font-family="sans-serif" font-size="12" fill="{GREY}"'
COLORS = {
    "forward": "#4c8dd6",
    "backward": "#d98a3d",
    "optimizer": "#5aa469",
    "copy-in": "#9aa3ad",
    "all-gather": "#3fa7a1",
    "reduce-scatter": "#b565a7",
    "all-reduce": "#d9534f",
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

    def rect(self, x: float, y: float, width: float, height: float, color: str) -> None:
        self._parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.4):.1f}" height="{height:.1f}" fill="{color}"/>')

    def frame(self, x: float, y: float, width: float, height: float, color: str) -> None:
        place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="8"'
        self._parts.append(f'<rect {place} fill="none" stroke="{color}" stroke-width="2"/>')

    def polygon(self, points: Sequence[tuple[float, float]], color: str) -> None:
        text = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._parts.append(f'<polygon points="{text}" fill="{color}"/>')

    def line(self, x1: float, y1: float, x2: float, y2: float) -> None:
        self._parts.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{GREY}" stroke-dasharray="3 3"/>')

    def text(self, x: float, y: float, text: str, anchor: str = "start") -> None:
        self._parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>')

    def text_on(self, x: float, y: float, text: str, anchor: str) -> None:
        """On a colored shape: white."""
        self._parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#ffffff">{text}</text>')

    def legend(self, x: float, y: float, colors: dict[str, str]) -> None:
        """In a row from ``x`` on."""
        for name, color in colors.items():
            self.rect(x, y - 10, 11, 11, color)
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


def rehearsed(strategy: str = "zero3", shard_size: int | None = None, prefetch: int = 1) -> Rehearsed:
    """A step of ``Model`` on one of 8 ranks, bf16 with fp32 weights."""
    workload = Workload("model", Model, tokens, lambda output, inputs: output.float().mean())
    bf16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}
    setting = Setting(world_size=8, strategy=strategy, shard_size=shard_size, batch=1, sequence=4096, prefetch=prefetch, **bf16)
    return rehearse(workload, setting)


def step(data: Rehearsed) -> Svg:
    clock = Clock(H100, data.process_groups)
    clock.run(data.entries)
    end = max(span.stop for span in clock.spans)
    svg = Svg(860, 215, "A step on four streams: gathers overlap forward and backward, reductions overlap backward")
    left, width = 110.0, 740.0
    rows = {"compute": 20.0, "copy-in": 56.0, "all-gather": 92.0, "reduce-scatter": 128.0}
    for name, y in rows.items():
        svg.text(left - 8, y + 18, name, "end")
    for (name, color), start, stop in _bars(clock.spans):
        svg.rect(left + width * start / end, rows[name], width * (stop - start) / end, 26, color)
    svg.text(left, 176, "0 ms")
    svg.text(left + width, 176, f"{end * 1e3:.1f} ms", "end")
    svg.legend(left, 204, {name: color for name, color in COLORS.items() if name != "all-reduce"})
    return svg


def prefetch(by_depth: dict[int, Rehearsed]) -> Svg:
    """Compute and all-gathers of a forward for each number of modules that are gathered ahead, on one scale."""
    forwards: dict[int, list[Span]] = {}
    for depth, data in by_depth.items():
        clock = Clock(H100, data.process_groups)
        clock.run(data.entries)
        last = max(span.stop for span in clock.spans if span.stream == COMPUTE and span.phase == "forward")
        forwards[depth] = [span for span in clock.spans if span.stream in (COMPUTE, GATHER) and span.stop <= last]
    end = max(span.stop for spans in forwards.values() for span in spans)
    svg = Svg(860, 232, "A forward that gathers no module ahead, and one that gathers one: gathers then run alongside the computation")
    left, width = 110.0, 740.0
    for index, (depth, spans) in enumerate(forwards.items()):
        top = 24.0 + 92 * index
        svg.text(left, top - 8, f"set_prefetch_depth({depth})")
        rows = {"compute": top, "all-gather": top + 34}
        for name, y in rows.items():
            svg.text(left - 8, y + 18, name, "end")
        for (name, color), start, stop in _bars(spans):
            svg.rect(left + width * start / end, rows[name], width * (stop - start) / end, 26, color)
    svg.text(left, 200, "0 ms")
    svg.text(left + width, 200, f"{end * 1e3:.1f} ms", "end")
    svg.legend(left, 224, {name: COLORS[name] for name in ("forward", "all-gather")})
    return svg


def group(module: nn.Module, num_shards: int = 2) -> Svg:
    """The flat shards of ``module``'s group, and the unsharded storage, element for element."""
    params = dict(module.named_parameters())
    cuts = [Cut(tuple(param.shape), 0, num_shards) for param in params.values()]
    layout = group_layout(cuts, num_shards=num_shards, align=32)  # 128 bytes of fp32
    colors = dict(zip(params, ("#4c8dd6", "#d98a3d", "#5aa469", "#b565a7"), strict=True))
    svg = Svg(860, 238, "One group: each rank keeps a flat shard, and a gather gives every rank the unsharded storage")
    left, width = 150.0, 700.0
    scale = width / layout.unsharded_numel
    for rank in range(num_shards):
        y = 14.0 + 40 * rank
        svg.text(left - 8, y + 18, f"flat shard of rank {rank}", "end")
        svg.rect(left, y, scale * layout.shard_numel, 26, "#9aa3ad")
        for color, slot in zip(colors.values(), layout.slots, strict=True):
            svg.rect(left + scale * slot.offset, y, scale * math.prod(slot.cut.shard_shape(rank)), 26, color)
    svg.text(left + scale * layout.shard_numel + 14, 52, "one all-gather brings both together,")
    svg.text(left + scale * layout.shard_numel + 14, 68, "and lays out one parameter after another")
    y = 122.0
    svg.text(left - 8, y + 18, "unsharded storage", "end")
    svg.rect(left, y, width, 26, "#9aa3ad")
    for color, slot in zip(colors.values(), layout.slots, strict=True):
        x = left + scale * slot.unsharded_offset
        svg.rect(x, y, scale * slot.cut.numel, 26, color)
        for rank in range(num_shards):
            numel = math.prod(slot.cut.shard_shape(rank))
            if scale * numel > 60:
                svg.text_on(x + scale * numel / 2, y + 18, f"rank {rank}", "middle")
            x += scale * numel
    svg.legend(left, 190, {f"{name} {tuple(param.shape)}": colors[name] for name, param in params.items()})
    svg.legend(left, 216, {"padding, up to the next 128 bytes": "#9aa3ad"})
    return svg


def _bars(spans: Sequence[Span]) -> list[tuple[tuple[str, str], float, float]]:
    """Row and color, begin and end of what runs; spans of one color that touch are one bar."""
    names = {COMPUTE: "compute", COPY_IN: "copy-in", GATHER: "all-gather", REDUCE: "reduce-scatter"}
    open_bars: dict[str, tuple[tuple[str, str], float, float]] = {}
    done = []
    for span in sorted(spans, key=lambda span: span.start):
        name = names[span.stream]
        key = name, COLORS[span.phase if name == "compute" else name]
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
    for kind, color in KINDS.items():
        above = [base + moment.get(kind, 0) / top for base, moment in zip(below, moments, strict=True)]
        edge = [(x, bottom - height * y) for x, y in zip(xs, above, strict=True)]
        svg.polygon([*edge, *reversed([(x, bottom - height * y) for x, y in zip(xs, below, strict=True)])], color)
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
        for part, color in parts.items():
            length = width * getattr(state, part) / 16
            if length:
                svg.rect(x, y, length, 26, color)
            x += length
        svg.text(x + 8, y + 18, f"{state.total:.2f} bytes")
    svg.legend(left, 236, {"unsharded copy": parts["compute"]} | {name: parts[name] for name in ("gradients", "master", "optimizer")})
    return svg


def hsdp(zero3_data: Rehearsed, hsdp_data: Rehearsed, ranks_per_host: int = 4) -> Svg:
    """The two hosts of ``hsdp_data`` as a mesh, each collective's ranks framed; next to it what leaves a host in both steps."""
    svg = Svg(860, 300, "HSDP: ranks gather and reduce-scatter inside a host, and all-reduce shards between hosts")
    side, left, top = 62.0, 96.0, 52.0
    groups = hsdp_data.process_groups
    kinds_of = {
        group: {entry.name for entry in hsdp_data.entries if entry.kind == "collective" and groups[entry.id] == group}
        for group in groups
    }
    shard_group = next(group for group in groups if "all_gather" in kinds_of[group])
    for rank in range(8):
        host, place = divmod(rank, ranks_per_host)
        x, y = left + side * place, top + 92 * host
        for piece in range(len(shard_group)):  # of every parameter a rank keeps one
            svg.rect(x + 13 + 9 * piece, y + 12, 7, 14, KINDS["sharded parameters"] if piece == place else "#c4cbd3")
        svg.text(x + side / 2, y + 44, f"rank {rank}", "middle")
        if place == 0:
            svg.text(left - 14, y + 32, f"host {host}", "end")
    for host in range(2):
        svg.frame(left - 4, top + 92 * host, side * ranks_per_host + 8, 58, COLORS["all-gather"])
    for place in range(ranks_per_host):
        svg.frame(left + side * place + 6, top - 14, side - 12, 92 + 86, COLORS["all-reduce"])
    svg.text(left - 4, 26, "each rank keeps one of four pieces")
    svg.legend(left - 4, 254, {"all-gather, reduce-scatter: inside a host": COLORS["all-gather"]})
    svg.legend(left - 4, 276, {"all-reduce of the pieces: between hosts": COLORS["all-reduce"]})

    begin, width = 500.0, 250.0
    totals = {name: _leaves_a_host(data, ranks_per_host) for name, data in (("zero3", zero3_data), ("hsdp", hsdp_data))}
    most = max(sum(parts.values()) for parts in totals.values())
    svg.text(begin, 26, "bytes that leave a host in a step")
    for row, (name, parts) in enumerate(totals.items()):
        x, y = begin, 66.0 + 60 * row
        svg.text(x - 8, y + 22, name, "end")
        for kind, nbytes in parts.items():
            length = width * nbytes / most
            if nbytes:
                svg.rect(x, y, length, 34, COLORS[kind])
            x += length
        svg.text(x + 8, y + 22, f"{sum(parts.values()) / 1e9:.2f} GB")
    svg.legend(begin - 50, 254, {kind: COLORS[kind] for kind in ("all-gather", "reduce-scatter", "all-reduce")})
    return svg


def _leaves_a_host(data: Rehearsed, ranks_per_host: int) -> dict[str, int]:
    traffic: Sequence[Traffic] = traffic_of(data.entries, data.process_groups, ranks_per_host)
    return {
        kind: sum(each.leaves_host for each in traffic if each.kind == kind.replace("-", "_"))
        for kind in ("all-gather", "reduce-scatter", "all-reduce")
    }


def measured_steps() -> dict[str, tuple[str, int, int]]:
    """From the page's table "Step time": for each strategy of ours torch's counterpart, our milliseconds and torch's."""
    page = (Path(__file__).parents[1] / "strategies.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| ([^|]+) \| (\d+) \|", page.partition("## Step time")[2], re.MULTILINE)
    return {name: (other.replace("`", "").partition(" (")[0], int(ms), int(torchs)) for name, ms, other, torchs in rows}


def steps(data: dict[str, tuple[str, int, int]]) -> Svg:
    svg = Svg(860, 60 + 40 * len(data), "Duration of a step, fsdp2 and torch")
    left, width = 110.0, 480.0
    colors = {"fsdp2": KINDS["sharded parameters"], "torch": "#9aa3ad"}
    most = max(max(ms, torchs) for _, ms, torchs in data.values())
    for row, (name, (other, ms, torchs)) in enumerate(data.items()):
        y = 14.0 + 40 * row
        svg.text(left - 8, y + 18, name, "end")
        svg.rect(left, y, width * ms / most, 13, colors["fsdp2"])
        svg.text(left + width * ms / most + 8, y + 11, f"{ms} ms")
        svg.rect(left, y + 15, width * torchs / most, 13, colors["torch"])
        svg.text(left + width * torchs / most + 8, y + 26, f"{torchs} ms: {other}")
    svg.legend(left, 46 + 40 * len(data), colors)
    return svg


class Moment(NamedTuple):
    """A checkpoint folder at a moment of a save. names: in it, without what is random; resumes_at: what a run that starts now loads"""

    what: tuple[str, str]
    names: tuple[str, ...]
    resumes_at: str


def moments_of_a_save() -> list[Moment]:
    """What ``CheckpointFolder`` does to a real folder when a run saves step 200 next to step 100 and keeps one checkpoint."""
    found: list[Moment] = []
    with tempfile.TemporaryDirectory() as path:
        folder = CheckpointFolder(Path(path), keep_last=1)

        def look(*what: str) -> None:
            names = sorted({"partial_..." if is_partial(each.name) and each.is_dir() else each.name for each in folder.path.iterdir()})
            shown = tuple(name for name in names if name == "partial_..." or not (name.startswith(".") or is_partial(name)))
            latest = folder.latest()
            found.append(Moment((what[0], what[1]), shown, latest.name if latest else "nothing"))

        def write(partial: Path) -> None:
            (partial / "__0_0.distcp").write_bytes(b"shards")
            (partial / METADATA).write_bytes(b"metadata")

        write(folder.begin())
        folder.commit(100)
        look("before", "the save")
        partial = folder.begin()
        write(partial)
        look("ranks write", "their files")
        replace = Path.replace

        def watched(self: Path, to: Path) -> Path:
            look("complete:", "renamed")
            return replace(self, to)

        with mock.patch.object(Path, "replace", watched):
            folder.commit(200)
        look("latest", "names it")
        rename = Path.rename

        def watched_rename(self: Path, to: Path) -> Path:
            renamed = rename(self, to)
            look("the old one", "is renamed")
            return renamed

        with mock.patch.object(Path, "rename", watched_rename):
            folder.prune()
        look("and", "removed")
        folder.unlock()
    return found


def checkpoint(moments: Sequence[Moment]) -> Svg:
    """Time from left to right; a row for each name in the folder."""
    svg = Svg(860, 250, "A checkpoint folder during a save: at every moment a crash leaves a complete checkpoint to resume from")
    left, column = 120.0, 122.0
    rows = {"step_000100": 52.0, "step_000200": 84.0, "partial_...": 116.0}
    for name, y in rows.items():
        svg.text(left - 12, y + 16, f"{name}/", "end")
    svg.text(left - 12, 178, "a crash now", "end")
    svg.text(left - 12, 194, "resumes from", "end")
    for index, moment in enumerate(moments):
        x = left + column * index
        for line, text in enumerate(moment.what):
            svg.text(x + (column - 12) / 2, 20 + 15 * line, text, "middle")
        for name in moment.names:
            if name in rows:
                svg.rect(x, rows[name], column - 12, 22, "#9aa3ad" if name == "partial_..." else KINDS["optimizer state"])
        svg.rect(x, 164, column - 12, 36, KINDS["sharded parameters" if moment.resumes_at == "step_000100" else "unsharded parameters"])
        svg.text_on(x + (column - 12) / 2, 187, moment.resumes_at, "middle")
    svg.legend(left, 236, {"complete": KINDS["optimizer state"], "being written or removed": "#9aa3ad"})
    return svg


def main() -> None:
    data = rehearsed()
    pictures = {
        "step": step(data),
        "prefetch": prefetch({0: rehearsed(prefetch=0), 1: data}),
        "group": group(nn.Sequential(nn.Linear(16, 40), nn.GELU(), nn.Linear(40, 24))),
        "memory": memory(data),
        "strategies": strategies(),
        "hsdp": hsdp(data, rehearsed("hsdp", shard_size=4)),
        "steps": steps(measured_steps()),
        "checkpoint": checkpoint(moments_of_a_save()),
    }
    for name, svg in pictures.items():
        (HERE / f"{name}.svg").write_text(str(svg))


if __name__ == "__main__":
    main()
