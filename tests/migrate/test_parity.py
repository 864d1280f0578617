"""``fsdp2 migrate --parity`` finds the first difference, and says where it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from fsdp2.cli import main
from fsdp2.migrate import parity
from fsdp2.migrate.differences import Run, first_difference

SCRIPT = """
import os
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
model = DDP(net)
is_new = model is net
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    loss = model(torch.full((2, 4), 0.5 + dist.get_rank())).square().mean()
    {change}
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


Compare = Callable[..., tuple[int, str]]
"""(the script's text, options) -> exit status, all that was printed"""


@pytest.fixture
def compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Compare:
    """``fsdp2 migrate --parity`` of ``train.py``, in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def run(text: str, *options: str) -> tuple[int, str]:
        (tmp_path / "train.py").write_text(text)
        status = main(["migrate", "--parity", "train.py", *options])
        return status, "".join(capsys.readouterr())

    return run


@pytest.mark.slow
def test_a_script_that_saves_and_resumes_harms_no_file_and_begins_alike_on_both_sides(compare: Compare, tmp_path: Path) -> None:
    """The first run overwrote the user's checkpoint, and the second went on from it: a difference that was none."""
    change = """
    if step == 0 and os.path.exists("last.pt"):
        net[0].bias.data.fill_(float(open("last.pt").read()))
    for path in () if step < 2 else ("last.pt", os.path.join(os.path.dirname(os.path.abspath(__file__)), "beside.pt")):
        open(path, "w").write(f"{step + 7}")
    """
    (tmp_path / "last.pt").write_text("0.25")
    (tmp_path / "beside.pt").write_text("precious")
    status, said = compare(SCRIPT.replace("{change}", change.strip()))
    assert status == 0
    assert "the same for 3 steps" in said
    assert (tmp_path / "last.pt").read_text() == "0.25"
    assert (tmp_path / "beside.pt").read_text() == "precious"


def test_a_folder_that_is_too_large_to_copy_is_refused(compare: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "MAX_NBYTES", 100)
    status, said = compare(SCRIPT)
    assert status == 2
    assert "--in-place" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("pass", "the same for 3 steps on 2 ranks"),
        ("loss = loss * (1.5 if is_new and dist.get_rank() == 1 and step == 1 else 1)", "different: step 2, rank 1: loss 1 is"),
        pytest.param("is_new and step == 2 and sys.exit(3)", "the old script took 3 steps, the new one 2", marks=pytest.mark.full),
        pytest.param(
            "optimizer.param_groups[0]['lr'] = 0.2 if is_new else 0.1",
            "different: after step 1: parameter 0.weight: differs by up to",
            marks=pytest.mark.full,
        ),
        ("raise SystemExit(3) if is_new else None or ValueError('here')", "the old script failed before its first step: "),
    ],
)
def test_first_difference_is_shown_with_its_place(change: str, said: str, compare: Compare) -> None:
    status, printed = compare(SCRIPT.replace("{change}", change))
    assert said in printed
    assert status == (0 if "the same" in said else 1)


@pytest.mark.slow
@pytest.mark.parametrize("which", [pytest.param("old", marks=pytest.mark.full), "new"])
def test_script_that_hangs_is_ended_and_named_with_its_place_and_last_output(which: str, compare: Compare) -> None:
    """It was waited for without end. Rank 1 waits here for something that never comes, rank 0 in the next collective."""
    wait = f"print('step', step, flush=True); step == 2 and is_new == {which == 'new'} and dist.get_rank() and threading.Event().wait()"
    script = "import threading\n" + SCRIPT.replace("{change}", wait)
    status, printed = compare(script, "--timeout", "40")
    assert status == 1
    assert f"different: the {which} script had not ended after 40 s (--timeout)" in printed
    assert f"rank 1 is in train.py:{script[: script.index(wait)].count(chr(10)) + 1}" in printed
    assert "last output: " in printed
    assert "step 2" in printed
    assert "it had taken 2 steps" in printed


@pytest.mark.slow
def test_script_that_asks_for_input_gets_none(compare: Compare) -> None:
    status, said = compare(SCRIPT.replace("{change}", "sys.stdin.read()"), "--timeout", "60")
    assert status == 0
    assert "the same for 3 steps" in said


@pytest.mark.parametrize("timeout", ["0", "-1", "nan"])
def test_time_limit_is_a_positive_number_of_seconds(timeout: str, compare: Compare, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        compare(SCRIPT, "--timeout", timeout)
    assert f"argument --timeout: got '{timeout}'" in capsys.readouterr().err


def test_script_that_needs_no_migration_is_not_run(compare: Compare) -> None:
    status, said = compare("raise SystemExit('it ran')\n")
    assert status == 0
    assert "nothing to migrate" in said


def test_missing_script_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["migrate", "--parity", "absent.py"]) == 2
    assert "no file absent.py" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("norm", "losses", "said"),
    [
        (1.0, [0.5], ""),
        (1.00001, [0.5], ""),
        (1.1, [0.5], "step 1: the gradient norm is 1, and 1.1 in the new script"),
        (1.0, [0.5, 0.5], "step 1, rank 0: 1 backward passes, and 2 in the new script"),
        (float("nan"), [0.5], "step 1: the gradient norm is 1, and nan in the new script"),
    ],
)
def test_what_counts_as_a_difference(norm: float, losses: list[float], said: str, tmp_path: Path) -> None:
    torch.save({"params": {}, "gradients": {}}, tmp_path / "step1.pt")
    old = Run(tmp_path, 0, "", [[{"losses": [0.5], "norm": 1.0}]])
    new = Run(tmp_path, 0, "", [[{"losses": losses, "norm": norm}]])
    assert first_difference(old, new, 1e-4) == said


def _adam(folder: Path, dtype: torch.dtype, change: str = "", *, is_narrow: bool) -> Run:
    """A run of Adam in which gradients are rounded to ``dtype``, each run in its own way. The bias has no gradient but rounding.

    change: "divisor" halves the gradients of the smaller weight, "lr" doubles the learning rate
    """
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    start = {
        "a.weight": torch.randn(16, 16, generator=generator),
        "b.weight": torch.randn(8, generator=generator),
        "bias": torch.zeros(8),
    }
    params = {name: nn.Parameter(value) for name, value in start.items()}
    own = torch.Generator().manual_seed(sum(map(ord, folder.name)))
    optimizer = torch.optim.Adam(params.values(), lr=2e-3 if change == "lr" else 1e-3)
    steps = []
    for step in range(4):
        for name, param in params.items():
            exact = torch.zeros(8) if name == "bias" else torch.randn(param.shape, generator=generator)
            exact = exact * 0.3 if name == "b.weight" else exact
            noise = torch.randn(param.shape, generator=own) * torch.finfo(dtype).eps / 4
            factor = 0.5 if change == "divisor" and name == "b.weight" else 1
            param.grad = factor * (exact + noise * (exact.abs() + 0.1))
        gradients = {name: param.grad for name, param in params.items()}
        optimizer.step()
        norm = float(torch.cat([grad.flatten() for grad in gradients.values() if grad is not None]).norm())
        torch.save(
            {"params": {name: each.detach() for name, each in params.items()}, "gradients": gradients}, folder / f"step{step + 1}.pt"
        )
        steps.append({"losses": [0.5], "norm": norm, "narrow": is_narrow})
    return Run(folder, 0, "", [steps])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_runs_of_adam_that_differ_by_rounding_are_the_same_and_others_are_not(dtype: torch.dtype, tmp_path: Path) -> None:
    """Parameters were compared relative to their size: Adam moves a bias without a gradient by a learning rate in any direction."""
    is_narrow = dtype == torch.bfloat16
    old = _adam(tmp_path / "old", dtype, is_narrow=is_narrow)
    assert first_difference(old, _adam(tmp_path / "new", dtype, is_narrow=is_narrow), None) == ""
    scaled = first_difference(old, _adam(tmp_path / "scaled", dtype, "divisor", is_narrow=is_narrow), None)
    assert scaled.startswith("step 1: the gradient ")
    fast = first_difference(old, _adam(tmp_path / "fast", dtype, "lr", is_narrow=is_narrow), None)
    assert fast.startswith("after step 1: parameter a.weight: differs by up to 0.001")


ON_GPUS = """
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
device = torch.device("cuda", rank)
dist.init_process_group(backend="nccl", device_id=device)
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).cuda()
model = DDP(net.to(rank), device_ids=[rank], output_device=rank)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    x = torch.full((2, 4), 0.5, device=device) + torch.tensor(dist.get_rank()).to("cuda", non_blocking=True)
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=False):
        loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
torch.cuda.synchronize()
"""


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a computer without GPUs")
def test_a_script_for_gpus_is_compared_on_cpu_processes(compare: Compare) -> None:
    """It failed in its first lines, on both sides, so that nobody without GPUs could compare it."""
    status, said = compare(ON_GPUS)
    assert status == 0, said
    assert "the same for 3 steps" in said


FSDP1 = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

dist.init_process_group({backend})
torch.manual_seed(0)
model = FSDP(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)){device_id})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    loss = model(torch.full((2, 4), 0.5 + dist.get_rank()){moved}).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a computer without GPUs")
@pytest.mark.parametrize(
    ("backend", "device_id", "moved"), [("'gloo'", "", ""), ("'nccl'", ", device_id=torch.cuda.current_device()", ".cuda()")]
)
def test_an_fsdp1_script_is_compared_on_cpu_processes(backend: str, device_id: str, moved: str, compare: Compare) -> None:
    """FSDP1 looked for an accelerator and raised, so that no FSDP1 script could be compared without GPUs."""
    status, said = compare(FSDP1.format(backend=backend, device_id=device_id, moved=moved))
    assert status == 0, said
    assert "the same for 3 steps" in said


BF16_ADAM = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 1))
model = DDP(net)
is_new = model is net
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = torch.Generator().manual_seed(dist.get_rank())
for step in range(5):
    x = torch.randn(16, 8, generator=data)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = (model(x).float() - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    for param in model.parameters():
        param.grad *= {factor}
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factor", "said"),
    [
        ("1", "the same for 5 steps"),
        ("0.5 if is_new else 1", "different: step 1: the gradient norm is"),
        ("0.5 if is_new and param is net[5].bias else 1", "different: step 1: the gradient "),
    ],
)
def test_bf16_runs_with_adam_are_told_apart_by_their_gradients(factor: str, said: str, compare: Compare) -> None:
    """No element's move shows a wrong divisor with Adam, and the bias before a batch norm moves by a learning rate in any direction."""
    assert said in compare(BF16_ADAM.format(factor=factor))[1]
