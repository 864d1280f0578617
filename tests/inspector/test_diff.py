"""Recorded runs that part at a value that the test has planted are found to part there; equal ones do not."""

from __future__ import annotations

import contextlib
import io
import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp2
from fsdp2.cli import main
from fsdp2.core.group.param_group import ParamGroup
from fsdp2.inspector.difference import Lines, differences
from fsdp2.inspector.expected import RECORD_LINE
from fsdp2.inspector.fingerprint import Fingerprints, runs_of
from fsdp2.inspector.run_folder import rank_files, read_lines
from harness import on_ranks
from harness.inspected import folder_for_all

STEPS = 3
LAYERS = 4


def built(strategy: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(LAYERS)])
    return fsdp2.parallelize(model, strategy, wrap=fsdp2.wrap.by_class(nn.Sequential))


class Fault:
    """One value of one parameter is wrong on one rank, in one phase of one step."""

    def __init__(self, phase: str, step: int, layer: int, name: str, rank: int, by: float) -> None:
        self.phase, self.step, self.param, self.rank, self.by = phase, step, f"{layer}.0.{name}", rank, by
        self.unit = str(layer)
        self.now = 1

    @property
    def is_due(self) -> bool:
        return self.now == self.step and dist.get_rank() == self.rank

    def plant(self, tensor: torch.Tensor) -> None:
        with torch.no_grad():
            tensor.data.view(-1)[-1] += self.by

    @contextlib.contextmanager
    def planted(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        (sharded,) = [param for name, param in model.named_parameters() if name == self.param]
        with contextlib.ExitStack() as undo:
            if self.phase == "gradients":
                grad = sharded.register_post_accumulate_grad_hook(lambda param: self.is_due and self.plant(param.grad.to_local()))
                undo.callback(grad.remove)
            elif self.phase == "update":
                hook = optimizer.register_step_post_hook(lambda *_: self.is_due and self.plant(sharded.detach().to_local()))
                undo.callback(hook.remove)
            else:
                finish = ParamGroup._finish_gather

                def wrong(group: ParamGroup) -> Any:
                    made = finish(group)
                    for param in group.params:
                        if self.is_due and param.fqn == self.param:
                            self.plant(param.unsharded.detach())
                    return made

                undo.enter_context(patch.object(ParamGroup, "_finish_gather", wrong))
            yield


def recorded(folder: Path, strategy: str = "zero3", fault: Fault | None = None) -> Lines:
    model = built(strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    planted = contextlib.nullcontext() if fault is None else fault.planted(model, optimizer)
    with planted, fsdp2.record(folder, model, optimizer):
        for step in range(1, STEPS + 1):
            if fault is not None:
                fault.now = step
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step * 10 + dist.get_rank()))
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()
    return {rank: read_lines(path, RECORD_LINE) for rank, path in rank_files(folder, "record", "jsonl")}


@on_ranks(2)
def test_a_planted_value_is_named_by_step_phase_unit_parameter_and_rank(world_size):
    folders = folder_for_all(), folder_for_all()
    first = recorded(folders[0])
    fault = Fault("parameters", 2, 1, "weight", rank=1, by=0.01)
    second = recorded(folders[1], fault=fault)
    found = next(differences(first, second))
    assert (found.step, found.phase, found.unit, found.param, found.who) == (2, "parameters", "1", "1.0.weight", "rank 1")
    assert found.distance == pytest.approx(0.01, rel=1e-3)
    assert not found.is_rounding
    if dist.get_rank() == 0:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            assert main(["diff", *map(str, folders)]) == 1
            assert main(["diff", "--json", *map(str, folders)]) == 1
        text, line = printed.getvalue().strip().rsplit("\n", 1)
        assert "step 2, gathered parameters of 1 on rank 1: 1.0.weight differs by more than rounding" in text
        first_one = json.loads(line)["differences"][0]
        assert (first_one["step"], first_one["param"], first_one["is_rounding"]) == (2, "1.0.weight", False)


@on_ranks(2)
def test_a_run_has_the_bits_of_itself_and_the_values_of_another_strategy(world_size):
    first, again, replicated = (recorded(folder_for_all(), strategy) for strategy in ("zero3", "zero3", "ddp"))
    assert list(differences(first, again)) == []
    assert all(each.is_rounding for each in differences(first, replicated))  # an all-reduce may add up in another order
    lines = first[0][0], replicated[0][0]
    assert lines[0]["parameters"] == lines[1]["parameters"]
    assert len(lines[0]["gradients"]) == len(lines[1]["gradients"]) == LAYERS


@on_ranks(2)
def test_what_ranks_record_adds_up_to_the_whole_tensor(world_size):
    lines = recorded(folder_for_all())
    model = built("zero3")
    for layer in range(LAYERS):
        for name in ("weight", "bias"):
            said = [lines[rank][0]["parameters"][str(layer)][f"{layer}.0.{name}"] for rank in range(world_size)]
            tensor = model.get_parameter(f"{layer}.0.{name}").full_tensor().detach()
            made = Fingerprints()
            made.take([(tensor, runs_of(tensor.shape, fsdp2.checkpoint.shard_geometry.pieces_of(tensor.shape, ())))])
            assert [each["checksum"] for each in said] == [each.checksum for each in made.all()] * world_size


@pytest.mark.slow
@on_ranks(2)
def test_twenty_planted_values_are_all_found_where_they_are(world_size):
    draw = random.Random(0)
    first = recorded(folder_for_all())
    for number in range(20):
        phase = ("parameters", "gradients", "update")[number % 3]
        step, layer, name = draw.randint(1, STEPS), draw.randrange(LAYERS), draw.choice(["weight", "bias"])
        fault = Fault(phase, step, layer, name, rank=draw.randrange(2), by=draw.choice([0.5, 1e-3]))
        found = next(differences(first, recorded(folder_for_all(), fault=fault)))
        who = f"rank {fault.rank}" if phase == "parameters" else ""
        assert (found.step, found.phase, found.unit, found.param, found.who) == (fault.step, phase, fault.unit, fault.param, who)
        assert found.distance == pytest.approx(fault.by, rel=0.01)
        assert not found.is_rounding


def test_a_folder_without_a_recording_is_an_error(tmp_path, capsys):
    assert main(["diff", str(tmp_path), str(tmp_path)]) == 2
    assert "no recording" in capsys.readouterr().err


@on_ranks(2)
def test_a_folder_that_had_a_run_of_more_ranks_has_the_ranks_of_the_last_one(world_size):
    folder = folder_for_all()
    for kind, suffix in (("record", "jsonl"), ("ledger", "jsonl"), ("trace", "json")):
        (folder / f"{kind}.rank{world_size}.{suffix}").write_text("")
    dist.barrier()
    model = built("zero3")
    with fsdp2.ledger(folder, model), fsdp2.trace(folder):
        recorded(folder)
    for kind, suffix in (("record", "jsonl"), ("ledger", "jsonl"), ("trace", "json")):
        assert [rank for rank, _ in rank_files(folder, kind, suffix)] == [0, 1], kind


def test_gradients_that_one_run_has_not_recorded_are_said_to_be_in_the_other_only_and_why(tmp_path, capsys):
    said = {"checksum": 1, "squares": 4.0, "sketch": [1.0, 1.0, 1.0, 1.0], "replica": 0, "eps": 1e-7}
    line = {"step": 1, "parameters": {}, "gradients": {"0": {"0.weight": said}}, "update": {"0": {"0.weight": said}}}
    lines = {
        "after": line,
        "in backward": {**line, "gradients": {}},
        "other": {**line, "update": {"0": {"0.weight": {**said, "checksum": 2}}}},
    }
    (found,) = differences({0: [line]}, {0: [lines["in backward"]]})
    only = "step 1, reduced gradients of 0: 0.weight was recorded in the first run only: in the second run it had no gradient"
    assert str(found) == f"{only} after backward, because the optimizer takes gradients in backward, or because forward did not use it"
    (found,) = differences({0: [{**line, "update": {}}]}, {0: [line]})
    assert str(found).endswith("0.weight was recorded in the second run only: the first run has no such parameter there")

    for name, each in lines.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "record.rank0.jsonl").write_text(f"{json.dumps(each)}\n")
    for first, common in (("after", "no bit differs"), ("other", "step 1, updated parameters of 0: 0.weight differs by rounding")):
        assert main(["diff", str(tmp_path / first), str(tmp_path / "in backward")]) == 1
        printed = capsys.readouterr().out
        assert printed.startswith(only)
        assert f"\namong the parameters that both recorded: {common}" in printed


def test_records_that_are_broken_anywhere_are_an_error_of_fsdp2_that_names_the_line_and_escapes_are_not_printed(tmp_path, capsys):
    said = {"checksum": 1, "squares": 4.0, "sketch": [1.0, 1.0, 1.0, 1.0], "replica": 0, "eps": 1e-7}
    line = {"step": 1, **{key: {"\x1b[2J": {"0.\x1b]0;pwned\x07weight": said}} for key in ("parameters", "gradients", "update")}}
    other = json.loads(json.dumps(line).replace("4.0", "5.0").replace('"checksum": 1', '"checksum": 2'))
    for name, values in (("a", line), ("b", other)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "record.rank0.jsonl").write_text(f"{json.dumps(values)}\n")

    def diff() -> tuple[int, str]:
        status = main(["diff", str(tmp_path / "a"), str(tmp_path / "b")])
        printed = "".join(capsys.readouterr())
        assert printed.replace("\n", "").isprintable(), repr(printed)
        return status, printed

    status, printed = diff()
    assert status == 1
    assert r"\x1b[2J" in printed
    file = tmp_path / "b" / "record.rank0.jsonl"
    del other["step"]
    cases = [{}, [], 1, other, {**line, "update": {"0": {"w": {**said, "sketch": [1.0]}}}}, {**line, "gradients": {"0": []}}]
    cases += [{**line, "update": {"0": {"w": {**said, key: value}}}} for key in said for value in (None, "1", -1, 10**400)]
    for values in cases:
        file.write_text(f"{json.dumps(line)}\n{json.dumps(values)}\n")
        status, printed = diff()
        assert status == 2, values
        assert f"{file}, line 2 cannot be read" in printed, (values, printed)


def calls_of_a_step(step: Callable[[], None]) -> int:
    """Python functions that a step calls on this thread."""
    calls = []
    sys.setprofile(lambda frame, event, argument: calls.append(1) if event == "call" else None)
    try:
        step()
    finally:
        sys.setprofile(None)
    return len(calls)


@on_ranks(1)
def test_records_of_a_small_step_call_few_python_functions(world_size):
    """The share of a step in which hardly anything is computed; a step of this model without records is 1."""
    folder, model = folder_for_all(), built("zero3")
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(torch.ones(2, 16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    kinds = {
        "none": contextlib.nullcontext,
        "record": lambda: fsdp2.record(folder, model, optimizer),
        "ledger": lambda: fsdp2.ledger(folder, model, optimizer),
        "trace": lambda: fsdp2.trace(folder, allocations=False),
    }
    calls = {}
    for kind, written_down in kinds.items():
        with written_down():
            for _ in range(3):
                step()
            calls[kind] = calls_of_a_step(step)
    for kind, share in (("record", 1.15), ("ledger", 1.25), ("trace", 1.25)):
        assert calls["none"] < calls[kind] < share * calls["none"], calls


@on_ranks(1)
def test_a_recording_of_every_zeroth_step_is_refused():
    with pytest.raises(fsdp2.ArgumentError, match="every=0"):
        fsdp2.record(folder_for_all(), built("zero3"), every=0)
