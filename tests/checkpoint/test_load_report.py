"""What a load did, in a line: hundreds of names are no answer."""

from __future__ import annotations

import torch

from fsdp2.checkpoint import LoadReport
from fsdp2.checkpoint.safetensors_load import Mismatch


def test_a_report_shows_counts_and_the_first_names_that_need_a_look():
    mismatch = Mismatch("head.weight", (4, 2), torch.float32, (3, 2), ("float32",))
    report = LoadReport(
        loaded=[f"layers.{index}" for index in range(500)],
        missing=["a", "b", "c", "d"],
        mismatched=[mismatch],
        bytes_read=1_000,
    )
    assert str(report) == (
        "LoadReport(500 loaded; 4 missing (a, b, c, ...); "
        "1 mismatched (head.weight: float32 (4, 2) in the model, float32 (3, 2) in the checkpoint); 1,000 bytes read by this rank)"
    )
    assert str(LoadReport()) == "LoadReport(0 loaded; 0 bytes read by this rank)"
