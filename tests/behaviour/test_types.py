"""What type checkers say of a program that uses fsdp2."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

PROGRAM = """
import torch
from torch import nn

import fsdp2
from fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
for block in net:
    fully_shard(block, reshard_after_forward=True)
model = fully_shard(net, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16), offload_policy=CPUOffloadPolicy())
reveal_type(model)  # FSDPModule
model.set_prefetch_depth(2)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
with fsdp2.accumulate(model, last=True):
    model(torch.ones(2, 4)).sum().backward()
reveal_type(fsdp2.clip_grad_norm_(model.parameters(), 1.0))  # Tensor
reveal_type(model.unshard(async_op=True))  # UnshardHandle | None
reveal_type(model.state_dict())  # dict[str, Any]
reveal_type(fsdp2.parallelize(nn.Linear(4, 4), "zero2"))  # Linear
fsdp2.parallelize(net, wrap={nn.Linear})
fsdp2.parallelize(net, wrap=[nn.Linear])
fsdp2.parallelize(net, wrap=fsdp2.wrap.by_class("Linear"))
fsdp2.parallelize(net, wrap=None)
fsdp2.parallelize(net, "zero4")  # type: ignore[arg-type]
fsdp2.parallelize(net, wrap="blocks")  # type: ignore[arg-type]
reveal_type(fsdp2.plan(net, 8, "hsdp", optimizer="sgd", offload="disk").memory.peak.nbytes)  # int
fsdp2.plan(net, 8, offload="files")  # type: ignore[arg-type]
reveal_type(fsdp2.summary(model, optimizer))  # ModelSummary
reveal_type(fsdp2.compile(model))  # FSDPModule
try:
    optimizer.step()
except fsdp2.OrderError as error:
    reveal_type(error)  # OrderError


class Gather(fsdp2.policy.AllGather):
    pass
"""


@pytest.mark.slow
def test_a_program_checks_in_strict_mode_with_the_types_that_the_pages_name(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), str(tmp_path / "program.py")]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    assert ": error:" not in said, said
    revealed = dict(re.findall(r"program.py:(\d+): note: Revealed type is \"(.*)\"", said))
    expected = {
        str(number): each.split("  # ")[1]
        for number, each in enumerate(PROGRAM.splitlines(), 1)
        if each.startswith(("reveal_type", "    reveal_type"))
    }
    assert {line: re.sub(r"\w+\.", "", kind) for line, kind in revealed.items()} == expected
