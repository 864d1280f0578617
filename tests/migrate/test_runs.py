"""The corpus runs: before the rewrite on torch, after it on fsdp2, with the same losses, gradient norms and parameters."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from fsdp2.cli import main
from fsdp2.migrate.source import migrate_source

CORPUS = Path(__file__).parent / "corpus"

SAME = [
    *("fsdp1_auto_wrap", "fsdp1_checkpointing", "fsdp1_cpu_offload", "fsdp1_custom_policy", "fsdp1_ema", "fsdp1_hybrid"),
    *("fsdp1_ignored", "fsdp1_kwargs", "fsdp1_legacy_optim", "fsdp1_manual_wrap", "fsdp1_meta", "fsdp1_no_shard", "fsdp1_no_sync"),
    *("fsdp1_partial", "fsdp1_precision", "fsdp1_resume_full", "fsdp1_sharded_checkpoint", "fsdp1_star"),
    *("fsdp1_subclass", "fsdp1_buffers", "ddp_ema"),
    *("fsdp1_containers", "fsdp1_t5", "ddp_compress_hook", "ddp_containers", "ddp_flag", "ddp_no_sync", "ddp_plain", "ddp_zero"),
    *("fsdp2_hsdp", "fsdp2_import", "fsdp2_state_dict"),
]
"""Scripts that run on the CPU before the rewrite."""

IN_CI = [
    "fsdp1_auto_wrap",
    "fsdp1_checkpointing",
    "fsdp1_hybrid",
    "fsdp1_t5",
    "fsdp1_resume_full",
    "ddp_plain",
    "ddp_zero",
    "fsdp2_state_dict",
]
"""Those of them that run in ``make test-slow``, one for each family of rewrites; ``make test-full`` runs the others."""

ONLY_AFTER = ["ddp_join", "deepspeed_json", "deepspeed_trainer", "deepspeed_zero2", "fsdp1_hybrid_nodes"]
"""Scripts that need DeepSpeed, or the GPUs of a node, before the rewrite, or whose ranks take different numbers of steps."""

UNCHANGED = ["ddp_custom_hook", "deepspeed_left"]

TOLERANCE = {  # rounding in bf16 and fp16: whose sum is rounded when differs between the frameworks
    "fsdp1_precision": "2e-2",
    "fsdp1_t5": "2e-2",
    "fsdp1_buffers": "2e-2",
    "ddp_compress_hook": "2e-2",
}
ARGUMENTS = {"fsdp1_t5": ["--save-model"]}  # saving fails on the CPU with FSDP1, which frees what it hands out


def test_each_script_of_the_corpus_is_run_or_said_not_to_be() -> None:
    assert sorted([*SAME, *ONLY_AFTER, *UNCHANGED]) == sorted(path.stem for path in CORPUS.glob("*.py"))


@pytest.mark.parametrize("name", [pytest.param(each, marks=pytest.mark.slow if each in IN_CI else pytest.mark.full) for each in SAME])
def test_old_and_new_train_alike(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    script = CORPUS / f"{name}.py"
    options = ["--tolerance", TOLERANCE.get(name, "1e-4"), "--steps", "6"]
    status = main(["migrate", "--parity", str(script), *options, "--", *ARGUMENTS.get(name, [])])
    said = capsys.readouterr().out
    assert status == 0, said
    assert f"{script}: the same for" in said


@pytest.mark.slow
@pytest.mark.parametrize("name", ONLY_AFTER)
def test_rewritten_script_trains(name: str, tmp_path: Path) -> None:
    losses = _losses(_run(name, tmp_path))
    assert all(loss == loss and loss < 10 for loss in losses)
    if name == "ddp_join":
        assert losses == pytest.approx(_losses(_run(name, tmp_path, rewritten=False)), rel=1e-4)
        assert len(losses) == 3
    if name == "deepspeed_zero2":
        assert losses == pytest.approx(_zero2_without_ranks(), rel=1e-4)
    if name == "fsdp1_hybrid_nodes":
        by_strategy = [losses[start : start + 2] for start in (0, 2, 4)]
        assert by_strategy[0] == by_strategy[1] == pytest.approx(by_strategy[2], rel=1e-5)


def _zero2_without_ranks() -> list[float]:
    """The losses of deepspeed_zero2's first rank, computed by one process that has both ranks' data."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    generators = [torch.Generator().manual_seed(rank) for rank in range(2)]
    losses = []
    for _ in range(3):
        of_ranks = [model(torch.randn(4, 6, generator=each)).square().mean() for each in generators]
        (sum(of_ranks) / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(of_ranks[0].item())
    return losses


def _run(name: str, folder: Path, rewritten: bool = True) -> str:
    """What the first rank of the script prints."""
    old = CORPUS / f"{name}.py"
    (folder / old.name).write_text(migrate_source(old.read_text(), old).new if rewritten else old.read_text())
    path = os.pathsep.join(filter(None, [str(CORPUS.parents[2]), os.environ.get("PYTHONPATH")]))
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(folder / f"{name}.py")]
    done = subprocess.run(torchrun, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _losses(printed: str) -> list[float]:
    words = printed.split()
    return [float(after) for word, after in pairwise(words) if word == "loss"]
