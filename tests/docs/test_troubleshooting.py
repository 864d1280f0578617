"""The samples of docs/troubleshooting.md on two ranks: in each section of an error class the first raises it, and the second runs."""

from __future__ import annotations

import contextlib
import re
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode

from fsdp2 import errors
from harness import on_ranks

PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
BLOCK = re.compile(r"```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
COMPILING = {"CompileError", "LosingOrderWarning"}


def sections() -> tuple[str, dict[str, list[str]]]:
    """The lines with which all samples begin, and the samples of each error class."""
    introduction, *parts = PAGE.read_text().partition("\n## By error class\n")[2].split("\n### ")
    return BLOCK.findall(introduction)[0], {part.partition("\n")[0]: BLOCK.findall(part) for part in parts}


@on_ranks(2, timeout=300)
@pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning", "ignore:The .grad attribute of a Tensor")  # the compiler's own
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] if name in COMPILING else []) for name in sections()[1]])
def test_the_first_sample_of_an_error_class_raises_it_and_the_second_runs(name):
    begin, samples = sections()
    raising, mended = samples[name]
    torch._dynamo.reset()
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    names: dict[str, object] = {"__name__": "sample", "folder": folder[0]}
    with warnings.catch_warnings():
        warnings.simplefilter("error", errors.LosingOrderWarning)
        warnings.simplefilter("error", errors.DoctorWarning)
        exec(compile(begin, str(PAGE), "exec"), names)
        # Without an accelerator a fake tensor stands for the one that is on it.
        devices = FakeTensorMode() if name == "DeviceError" else contextlib.nullcontext()
        with devices, pytest.raises(getattr(errors, name)) as caught:
            exec(compile(raising, str(PAGE), "exec"), names)
        assert caught.type is getattr(errors, name)
        exec(compile(mended, str(PAGE), "exec"), names)
