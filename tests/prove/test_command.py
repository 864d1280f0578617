"""``fsdp2 prove`` on scripts as users start them: what it says, and its exit status."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp2 import fully_shard
from fsdp2.doctor.rank_record import RankRecord
from fsdp2.inspector.fingerprint import Fingerprint
from fsdp2.prove.judging import Run, _of_certificate, _of_checkpoint, _of_equal_ranks
from fsdp2.prove.parts import Seen
from fsdp2.ranks import Ranks
from fsdp2.testing import pretend, proves

ROOT = Path(__file__).parents[2]

SCRIPT = """
import torch, torch.distributed as dist
from torch import nn
from {module} import fully_shard
class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
    def forward(self, x):
        self.calls += 1
        return x.relu()
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), Counts(), nn.Linear(8, 4))
for layer in (model[0], model[2]):
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
torch.manual_seed(1 + dist.get_rank())
for step in range(1000):
    model(torch.randn(8, 4)).square().mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
    {fault}
    optimizer.step()
    optimizer.zero_grad()
"""


def prove(tmp_path: Path, module: str, fault: str = "", *options: str) -> tuple[int, dict[str, Any], str]:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(module=module, fault=fault))
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    command = [sys.executable, "-m", "fsdp2", "prove", "--json", "--ranks", "2", "--steps", "2", *options, str(script)]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=600, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("module", ["fsdp2", "torch.distributed.fsdp"])
def test_a_right_program_is_proven(tmp_path: Path, module: str) -> None:
    status, said, errors = prove(tmp_path, module, "", "--steps", "3", "--orders", "1")
    assert (status, said["verdict"], said["faults"]) == (0, "proven", []), (said, errors)
    assert said["schema"] == "fsdp2.prove/1"
    assert said["steps"] == 3
    holding = {each["subject"] for each in said["statements"] if each["holds"]}
    on_device = set() if pretend.missing_tools() else {"orders", "peak"}
    planned = {"plan"} if module == "fsdp2" else set()
    assert {"losses", "gradients", "parameters", "buffers", "collectives", "checkpoint"} | on_device | planned <= holding, said
    refused = next(each["said"] for each in said["statements"] if each["subject"] == "capture")  # AdamW counts its steps on the host
    assert not on_device or "a Python number changes" in refused


DOUBLED = "[each.grad._local_tensor.mul_(2) for each in model[2].parameters() if hasattr(each, 'placements')]"
LATE = """if torch.accelerator.is_available():
        with torch.pretend.stream(torch.Stream("pretend")):
            late = [each.grad._local_tensor + 0 for each in model.parameters()]
        [each.grad._local_tensor.copy_(value) for each, value in zip(model.parameters(), late)]"""
needs_device = pytest.mark.skipif(bool(pretend.missing_tools()), reason=f"needs {', '.join(pretend.missing_tools())}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "fault", "subject", "words"),
    [
        ("torch.distributed.fsdp", DOUBLED, "gradients", ("2.weight", "2 times")),
        ("fsdp2", "dist.get_rank() or step or dist.barrier()", "collectives", ("rank 0: barrier", "rank 1: ")),
        ("fsdp2", "if dist.get_rank(): continue", "doctor", ("step-on-some-ranks", "rank 1 will not")),
        ("fsdp2", "step and dist.get_rank() and 1 / 0", "run", ("rank 1 failed at train.py:23", "ZeroDivisionError")),
        pytest.param("fsdp2", LATE, "orders", ("in order 0", "is another than at once"), marks=needs_device),
        (
            "fsdp2",
            "step and dist.get_rank() and __import__('threading').Event().wait()",
            "hang",
            ("rank 1 is at train.py:23", "rank 0"),
        ),
    ],
)
def test_a_fault_is_named(tmp_path: Path, module: str, fault: str, subject: str, words: tuple[str, ...]) -> None:
    status, said, errors = prove(tmp_path, module, fault, "--timeout", "8", *(["--orders", "1"] if subject == "orders" else []))
    assert (status, said["verdict"]) == (1, "fault"), (said, errors)
    assert said["faults"][0]["subject"] == subject, said["faults"]
    told = said["faults"][0]["said"] + " ".join(said["faults"][0]["names"])
    assert all(word in told for word in words), said["faults"][0]


OURS, TORCHS = "fsdp2", "torch.distributed.fsdp"
STATE = "model[2]._get_fsdp_state()"
NEVER = f"step or not hasattr(model[2], '_get_fsdp_state') or setattr({STATE}{{}}, 'reshard', lambda *_, **__: None)"
AGAIN = "step or model[2].register_forward_hook(lambda module, *_: module.unshard() and None)"
LOCALS = "[getattr(each.grad, '_local_tensor', each.grad) for each in model.parameters()]"
ON_SIDE = """if torch.accelerator.is_available():
        side = globals().setdefault("side", torch.Stream("pretend"))
        {before}
        with torch.pretend.stream(side):
            noted = next(model.parameters()).grad._local_tensor + 1
        {after}"""
WAIT, JOIN = "side.wait_stream(torch.accelerator.current_stream())", "torch.accelerator.current_stream().wait_stream(side)"


@pytest.mark.slow
@needs_device
@pytest.mark.parametrize(
    ("module", "fault", "words", "names"),
    [
        (OURS, NEVER.format(".groups[0]"), "2 is unsharded still", ["2"]),
        (TORCHS, NEVER.format("._fsdp_param_group"), "2 is unsharded still", ["2"]),
        *((module, AGAIN, "2 is unsharded still from forward to backward", ["2"]) for module in (OURS, TORCHS)),
        (OURS, f"copies = [each.clone() for each in {LOCALS}]", "another tensor has the gradient of 0.weight", ["0.weight"]),
        (TORCHS, f"copies = [each.clone() for each in {LOCALS}[:1]]", "another tensor has the gradient of 0.weight", ["0.weight"]),
        (OURS, "globals().setdefault('kept', []).append(torch.ones(4096))", "more than after the one before", []),
        (TORCHS, "globals().setdefault('kept', []).append(torch.ones(4096))", "more than after the one before", []),
    ],
)
def test_what_is_kept_too_long_is_named(tmp_path: Path, module: str, fault: str, words: str, names: list[str]) -> None:
    status, said, errors = prove(tmp_path, module, fault, "--steps", "3", "--orders", "1")
    assert status == 1, (said, errors)
    (fault_found,) = [each for each in said["faults"] if each["subject"] == "peak"]
    assert fault_found["method"] == "measured on a stand-in"
    assert words in fault_found["said"]
    assert set(names) <= set(fault_found["names"]), fault_found


@pytest.mark.slow
@needs_device
@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (WAIT, "", "its work has not been joined: the last is aten.add"),
        ("", JOIN, "a stream that takes no part in the capture"),
        (WAIT, JOIN, "a Python number changes"),  # nothing is wrong with its streams
    ],
)
def test_a_stream_that_a_capture_would_refuse_is_named(tmp_path: Path, before: str, after: str, words: str) -> None:
    fault = ON_SIDE.format(before=before, after=after)
    _, said, errors = prove(tmp_path, OURS, fault, "--steps", "3", "--orders", "1")
    (capture,) = [each for each in said["statements"] if each["subject"] == "capture"]
    assert words in capture["said"], (capture, errors)
    assert ("train.py:" in capture["said"]) is (capture["holds"] is None), capture


@pytest.mark.slow
def test_a_program_that_cannot_run_is_no_fault(tmp_path: Path) -> None:
    status, said, _ = prove(tmp_path, "no_such_module")
    assert (status, said["verdict"]) == (2, "not run")
    assert "ModuleNotFoundError" in said["why_not_run"]
    assert list(said["seconds"]) == ["real"]  # the reference would say nothing more


@pytest.mark.slow
def test_an_interrupt_ends_it_without_a_traceback(tmp_path: Path) -> None:
    script, runs = tmp_path / "train.py", tmp_path / "runs"
    os.mkfifo(runs)
    script.write_text(f"import threading\nopen({str(runs)!r}, 'w').close()\nthreading.Event().wait()\n")
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    command = [sys.executable, "-m", "fsdp2", "prove", "--ranks", "1", str(script)]
    usual = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # jobs in the background of a shell ignore it
    environment = os.environ | {"PYTHONPATH": path}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, preexec_fn=usual) as started:
        runs.open().close()  # returns when the rank runs
        started.send_signal(signal.SIGINT)
        _, errors = started.communicate(timeout=60)
    assert started.returncode == 130, errors
    assert "interrupted" in errors
    assert "Traceback" not in errors


def copies_of_one_and_expert(on_0: int, on_1: int) -> list[dict[str, Any]]:
    made = [{"w": Seen(Fingerprint(on_0, 0.0, ()), 0, 1, 0.0, 0.0)}, {"w": Seen(Fingerprint(on_1, 0.0, ()), 0, 1, 0.0, 0.0)}]
    own = [{"expert": Seen(Fingerprint(rank, 0.0, ()), rank, 1, 0.0, 0.0)} for rank in range(2)]
    return [each | other for each, other in zip(made, own, strict=True)]


@pytest.mark.parametrize(
    ("loaded", "holds", "words"),
    [
        ({"values": copies_of_one_and_expert(3, 0)[0]}, True, "1 tensor have the same bits; 1 others differ between ranks"),
        ({"values": copies_of_one_and_expert(4, 0)[0]}, False, "w is another"),
        ({"values": copies_of_one_and_expert(3, 0)[0], "numbers": {"lr": "2"}}, False, "lr is another"),
        ({"values": {}}, False, "w is another"),
        ({"failure": "no key w"}, False, "no key w"),
        ({"kind": ""}, None, "cannot run on 1 rank"),
    ],
)
def test_a_checkpoint_must_have_the_bits_that_were_saved(loaded: dict[str, Any], holds: bool | None, words: str) -> None:
    real, resumed = (Run("", Path(), Ranks(["end"] * number)) for number in (2, 1))
    event = {"kind": "saved", "step": 4, "failure": "", "numbers": {"lr": "1"}}
    real.__dict__.update(
        records=[], events={rank: [event | {"values": each}] for rank, each in enumerate(copies_of_one_and_expert(1, 2))}
    )
    resumed.__dict__.update(records=[], why=lambda: "", events={0: [event | {"kind": "loaded", "step": 1} | loaded]})
    said = _of_checkpoint(real, resumed, None, None)
    assert said.holds is holds
    assert words in said.said


def test_divisors_of_no_gradient_are_not_looked_at() -> None:
    run = Run("real", Path(), Ranks())
    run.__dict__["events"] = {0: [{"kind": "divisors", "divisors": {"head.weight": None}, "num_tokens": 0, "is_wrong": False}]}
    said = _of_certificate(run)
    assert (said.holds, said.method) == (None, "not looked at")


@pytest.mark.parametrize("steps_on_rank_1", [0, 1])
def test_ranks_are_equal_only_where_all_have_stepped(steps_on_rank_1: int) -> None:
    run = Run("reference", Path(), Ranks())
    step = {"kind": "parameters", "step": 1, "optimizer": 0, "values": {}}
    run.__dict__.update(records=[RankRecord(0, num_steps=1)], events={0: [step], 1: [step] * steps_on_rank_1})
    assert _of_equal_ranks(run).holds is (True if steps_on_rank_1 else None)


def sharded() -> nn.Module:
    torch.manual_seed(0)
    return fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))


def step(model: nn.Module, number: int) -> None:
    torch.manual_seed(10 * number + dist.get_rank())
    model(torch.randn(2, 4)).square().mean().backward()


def step_of_one_rank(model: nn.Module, number: int) -> None:
    step(model, number)
    if dist.get_rank():
        getattr(next(model.parameters()).grad, "_local_tensor", torch.ones(1)).zero_()


@pytest.mark.slow
def test_a_test_proves_a_step() -> None:
    assert proves(step, sharded, ranks=2, steps=2).steps == 2
    with pytest.raises(AssertionError, match=r"gradients, step 1.*: 0\.weight differs"):
        proves(step_of_one_rank, sharded, ranks=2, steps=2)
