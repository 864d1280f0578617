"""Both libraries on the device that logs: what they are seen to do is what a schedule of theirs can be written down as."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp2.testing import pretend

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "step_clock.py"


@pytest.mark.full
@pytest.mark.skipif(bool(pretend.missing_tools()), reason=f"needs {' and '.join(pretend.missing_tools())}")
def test_a_step_of_both_libraries_communicates_waits_and_keeps_what_is_expected(tmp_path):
    found = tmp_path / "found.jsonl"
    subprocess.run([sys.executable, SCRIPT, "--rows", "host-bound", "--worlds", "8", "--steps", "1", "--json", found], check=True)
    (result,) = [json.loads(line) for line in found.read_text().splitlines()]
    units = 24 + 2  # blocks, embedding, head with norm
    numel = 24 * (4 * 512 * 512 + 3 * 512 * 1536 + 2 * 512) + 2 * 8192 * 512 + 512
    for figures in (result["upstream"], result["ours"]):
        assert figures["collectives"] == 3 * units + 1  # gathered twice, reduced; the norm of clipping
        assert figures["host_waits"] == 0
        assert figures["peak_gib"] * 2**30 > 4 * 4 * numel / 8  # parameters, gradients and two moments of AdamW, in fp32
        assert figures["new_segments"] == 0
        assert figures["host_ms"].keys() >= {"forward", "backward", "clip", "optimizer"}
        assert figures["step_ms"] >= figures["computing_ms"]
