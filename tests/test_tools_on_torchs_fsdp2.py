"""Each tool says the same of a program whether fsdp2 or torch's own FSDP2 shards it: a table of tools and models."""

from __future__ import annotations

import contextlib
import io
import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.optim import Optimizer

import fsdp2
from fsdp2 import doctor, inspect
from fsdp2.cli import main
from fsdp2.errors import ModuleError
from fsdp2.hangs.report import report_of
from fsdp2.inspector.difference import differences
from fsdp2.inspector.expected import RECORD_LINE
from fsdp2.inspector.run_folder import rank_files, read_lines
from harness import cpu_mesh, on_ranks

WAYS = {"ours": fsdp2.fully_shard, "torch's": fully_shard}
NUM_STEPS = 3
NUM_SLOTS = 6  # parameters, each of which ours may align, and flags


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh()


class Nested(Block):
    """A block in a block, which is a unit of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.inner(x))


class Net(nn.Module):
    def __init__(self, is_tied: bool, block: type[Block]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.head = nn.Linear(6, 7, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Case(NamedTuple):
    options: dict[str, Any] = {}  # noqa: RUF012 (nobody writes it)
    is_tied: bool = False
    is_frozen: bool = False
    micro_batches: int = 1
    num_replicas: int = 1
    block: type[Block] = Block


CASES = {
    "plain": Case(),
    "mixed precision": Case({"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}),
    "kept after forward": Case({"reshard_after_forward": False}),
    "replicas": Case(num_replicas=2),
    "nested": Case(block=Nested),
    "nested, mixed precision, tied": Case(
        {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}, is_tied=True, block=Nested
    ),
    "tied": Case(is_tied=True),
    "frozen": Case(is_frozen=True),
    "accumulation": Case(micro_batches=2),
    "offload": Case({"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
}


def sharded(way: Any, case: Case) -> Any:
    torch.manual_seed(0)
    model, num_ranks = Net(case.is_tied, case.block), dist.get_world_size()
    model.blocks[0].requires_grad_(not case.is_frozen)
    mesh = cpu_mesh()
    if case.num_replicas > 1:
        mesh = init_device_mesh("cpu", (case.num_replicas, num_ranks // case.num_replicas), mesh_dim_names=("replicate", "shard"))
    for block in model.blocks:
        if isinstance(block, Nested):
            way(block.inner, mesh=mesh, **case.options)
        way(block, mesh=mesh, **case.options)
    return way(model, mesh=mesh, **case.options)


def tokens(step: int, rank: int) -> Tensor:
    return torch.randint(0, 7, (4, 5), generator=torch.Generator().manual_seed(97 * step + rank))


def train(model: Any, optimizer: Optimizer, case: Case, rank: int) -> None:
    for step in range(NUM_STEPS):
        for index, batch in enumerate(tokens(step, rank).chunk(case.micro_batches)):
            model.set_requires_gradient_sync(index == case.micro_batches - 1)
            model(batch).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


OURS_ALONE = "comparison of ranks before backward"
"""A collective that torch's FSDP2 lacks: it hangs where ranks run different modules."""


def said_of(report: doctor.Report) -> list[tuple[object, ...]]:
    return sorted((each.check, each.severity, sorted(each.params), each.ranks) for each in report.findings)


def by_check(model: Any, optimizer: Optimizer, case: Case, folder: Path) -> object:
    """The head trains in no optimizer; before the first step, and after some."""
    part = torch.optim.SGD([param for name, param in model.named_parameters() if "blocks" in name and param.requires_grad])
    before = said_of(doctor.check(model, part))
    assert "optimizer-misses-parameters" in [check for check, *_ in before]
    train(model, optimizer, case, dist.get_rank())
    return before, said_of(doctor.check(model, part)), said_of(doctor.check(model, optimizer))


def by_watch(model: Any, optimizer: Optimizer, case: Case, folder: Path) -> object:
    """All ranks get the same data, and nobody clears gradients."""
    optimizer.zero_grad = lambda *_, **__: None  # type: ignore[method-assign, assignment]
    with warnings.catch_warnings(), doctor.watch(model, optimizer, every=1) as watching:
        warnings.simplefilter("ignore")
        train(model, optimizer, case, rank=0)
    found = said_of(watching.report)
    assert {"same-data-on-every-rank", "gradients-not-cleared"} <= {check for check, *_ in found}, found
    return found


def by_gradient_scales(model: Any, optimizer: Optimizer, case: Case, folder: Path) -> object:
    def step(probe: Callable[[Tensor], Tensor]) -> None:
        for index, batch in enumerate(tokens(0, dist.get_rank()).chunk(case.micro_batches)):
            model.set_requires_gradient_sync(index == case.micro_batches - 1)
            (probe(model(batch).float().square().mean(-1)).mean() / case.micro_batches).backward()

    certificate = doctor.gradient_scales(model, step)
    assert certificate.num_tokens == dist.get_world_size() * 20
    assert any(certificate.divisors.values())
    return {name: each and round(each, 1) for name, each in certificate.divisors.items()}, said_of(certificate.report)


def by_record(model: Any, optimizer: Optimizer, case: Case, folder: Path) -> object:
    with fsdp2.record(folder, model, optimizer):
        train(model, optimizer, case, dist.get_rank())
    dist.barrier()
    return {rank: read_lines(path, RECORD_LINE) for rank, path in rank_files(folder, "record", "jsonl")}


def by_ledger(model: Any, optimizer: Optimizer, case: Case, folder: Path) -> object:
    with fsdp2.ledger(folder, model, optimizer, tokens=20):
        train(model, optimizer, case, dist.get_rank())
    (path,) = [path for rank, path in rank_files(folder, "ledger", "jsonl") if rank == dist.get_rank()]
    return [json.loads(line) for line in path.read_text().splitlines()]


def by_trace(model: Any, optimizer: Optimizer, case: Case, folder: Path) -> object:
    train(model, optimizer, case, dist.get_rank())  # without prefetch the first steps differ
    with fsdp2.trace(folder, allocations=False):
        train(model, optimizer, case, dist.get_rank())
    events = json.loads((folder / f"trace.rank{dist.get_rank()}.json").read_text())["traceEvents"]
    return Counter((each["ph"], each["name"]) for each in events if each["ph"] in "Xb" and OURS_ALONE not in each["name"])


def by_recording(model: Any, optimizer: Optimizer, case: Case, folder: Path) -> object:
    """What the watchdog reads."""
    with inspect.recording() as log:
        train(model, optimizer, case, dist.get_rank())
        assert log.place == ("", "")
        assert [each for each in log.records if each.stage is not inspect.Stage.DONE] == []
        steps = [each.step for each in log.records]
        records = [each for each in log.records if each.kind != OURS_ALONE]
        return Counter((each.kind, each.unit, each.phase, each.dtype, each.step - min(steps)) for each in records)


def by_watchdog(model: Any, optimizer: Optimizer, case: Case, folder: Path) -> object:
    """A rank's report from within the second block, in each step, while a watchdog looks that has nothing to say."""
    found = []

    def report(*_: object) -> None:
        made = report_of(dist.get_rank(), log)
        items = [(each.kind, each.unit, each.phase) for each in made.items if each.kind != OURS_ALONE]
        found.append((made.place, made.entered, made.failed, made.call, items))

    handle = model.blocks[1].linear.register_forward_hook(report)
    with fsdp2.watchdog(timeout=60), inspect.recording() as log:
        train(model, optimizer, case, dist.get_rank())
    handle.remove()
    assert all(phase == "forward" and unit in ("blocks.1", "blocks.1.inner") for (phase, unit), *_ in found)  # the last that began
    return [(*rest, sorted(items)) for *rest, items in found[case.micro_batches :]]  # the first step has no prefetch


def by_summary(model: Any, optimizer: Optimizer, case: Case, folder: Path) -> object:
    summary = fsdp2.summary(model)
    return summary.num_ranks, [(each.name, each.numel, each.dtypes, each.placement, each.after_forward) for each in summary.units]


def by_plan(model: Any, optimizer: Optimizer, case: Case, folder: Path) -> object:
    """A plan begins with a model that nobody has sharded, and says so."""
    with pytest.raises(ModuleError, match="has sharded already") as raised:
        fsdp2.plan(model, 2)
    return str(raised.value).partition("expected:")[2]


TOOLS = [by_plan, by_check, by_watch, by_gradient_scales, by_record, by_ledger, by_trace, by_recording, by_watchdog, by_summary]


def differing(tool: Callable[..., Any], case: Case, folder: Path) -> Iterator[str]:
    said = {}
    for who, way in WAYS.items():
        model = sharded(way, case)
        optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=0.01)
        said[who] = tool(model, optimizer, case, folder / who[:5])
        dist.barrier()
    ours, theirs = said.values()
    if tool is by_record:
        yield from (str(each) for each in differences(ours, theirs) if not each.is_rounding)
    elif tool is by_ledger:
        for one, other in zip(ours, theirs, strict=True):
            yield from compared(one, other, NUM_SLOTS + (4 if case.block is Nested else 0))
    elif ours != theirs:
        yield f"ours {ours}\n    torch's {theirs}"


def compared(one: Any, other: Any, num_slots: int) -> Iterator[str]:
    """Of two lines of a ledger: calls, and bytes but for the alignment and the flags that ours have."""
    lines = [
        {(phase, kind): each for phase, kinds in line["communication"].items() for kind, each in kinds.items() if kind != OURS_ALONE}
        for line in (one, other)
    ]
    said = [(line["step"], line["tokens"], {key: each["calls"] for key, each in calls.items()})
            for line, calls in zip((one, other), lines, strict=True)]  # fmt: skip
    if said[0] != said[1]:
        yield f"ours {said[0]}, torch's {said[1]}"
        return
    kept = ("sharded parameters", "sharded gradients", "optimizer state")
    nbytes = [{kind: line["memory"][kind] for kind in kept} for line in (one, other)]
    for each, calls in zip(nbytes, lines, strict=True):
        each.update({f"{phase} {kind}": tally["sent"] for (phase, kind), tally in calls.items()})
    for kind, ours in nbytes[0].items():
        if not nbytes[1][kind] <= ours <= nbytes[1][kind] + num_slots * 128:
            yield f"{kind}: ours {ours} bytes, torch's {nbytes[1][kind]}"


def assert_equal(cases: dict[str, Case], tools: list[Any], folder: Path) -> None:
    wrong = []
    for name, case in cases.items():
        for tool in tools:
            found = list(differing(tool, case, folder / f"{name} {tool.__name__}"))
            wrong += [f"{tool.__name__}, {name}: {each}" for each in found[:2]]
    assert not wrong, "\n".join(wrong)


@on_ranks(2)
def test_each_tool_says_the_same_of_torchs_fsdp2_as_of_ours(tmp_path):
    assert_equal({name: CASES[name] for name in ("mixed precision", "accumulation")}, TOOLS, tmp_path)


@on_ranks(2)
def test_the_ledger_has_the_buffers_of_torchs_fsdp2(tmp_path):
    case = CASES["plain"]
    model = sharded(fully_shard, case)
    line = by_ledger(model, torch.optim.SGD(model.parameters()), case, tmp_path)[-1]
    block, root = 4 * (6 * 6 + 6), 4 * (2 * (7 + 1) * 6)  # torch fills up 7 rows to 8
    assert line["memory"]["unsharded parameters"] == root + block  # the root keeps its own
    assert line["memory"]["all-gather buffers"] == root + block  # the last gather's is kept until the next one is copied out
    assert line["memory"]["reduction buffers"] == root


@on_ranks(2)
def test_diff_says_where_torchs_fsdp2_and_ours_diverge_and_why(tmp_path):
    folder_of = {}
    for name, way, case, factor in (
        ("torchs", fully_shard, "plain", None),
        ("ours", fsdp2.fully_shard, "plain", None),
        ("ours_in_bfloat16", fsdp2.fully_shard, "mixed precision", None),
        ("ours_summed", fsdp2.fully_shard, "plain", 1.0),
    ):
        model = sharded(way, CASES[case])
        if factor is not None:
            for unit in inspect.units(model):
                unit.modules[0].set_gradient_divide_factor(factor)
        folder_of[name] = tmp_path / name
        by_record(model, torch.optim.SGD(model.parameters(), lr=0.1), CASES[case], folder_of[name])
    if dist.get_rank() == 0:
        said = {name: difference_from(folder_of["torchs"], folder) for name, folder in folder_of.items()}
        assert said["torchs"] == f"no bit differs in steps 1 to {NUM_STEPS}\n"
        assert said["ours"].startswith(("first run: torch's FSDP2 on torch ", "no bit differs"))
        assert "by more than rounding: step" not in said["ours"]
        assert "float32 computed in float32, reduced in float32; the second" in said["ours_in_bfloat16"]
        assert "gradients of" in said["ours_summed"]
        assert "the second run's is 2 times the first's, so the runs divide by different numbers" in said["ours_summed"], said


def difference_from(first: Path, second: Path) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        main(["diff", str(first), str(second)])
    return said.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@on_ranks(2)
def test_each_tool_says_the_same_of_every_model(name, tmp_path):
    assert_equal({name: CASES[name]}, TOOLS, tmp_path)


TWO_BY_TWO = {
    name: CASES[name]._replace(num_replicas=2)
    for name in ("plain", "mixed precision", "tied", "frozen", "accumulation", "nested, mixed precision, tied")
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TWO_BY_TWO)
@on_ranks(4)
def test_each_tool_says_the_same_of_two_replicas_of_two_shards(name, tmp_path):
    assert_equal({name: TWO_BY_TWO[name]}, TOOLS, tmp_path)
