"""What holds for every test in the parent process; the ranks' own rules are in ``harness/worker.py``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from harness import device_type
from harness.states import check_moves


def pytest_report_header() -> str:
    return f"torch {torch.__version__}, ranks on {device_type()} (FSDP2_TEST_DEVICE)"


def pytest_configure() -> None:
    torch.set_num_threads(1)  # as in the ranks: the same order of additions, and no fight over the cores
    check_moves()


@pytest.fixture(autouse=True)
def _fresh_process() -> Iterator[None]:
    """Seeds are 0 before each test, and no process group is left behind it."""
    torch.manual_seed(0)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("the test left its process group initialized in the parent process, for all later tests to find")
