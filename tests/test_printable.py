"""What results show: as ``print`` does everywhere, and nothing that a terminal, or a command, would obey."""

from __future__ import annotations

import html
import re
from pathlib import Path

import torch
from torch import nn

import fsdp2
from fsdp2.doctor import Finding, Report
from fsdp2.printable import printable

PACKAGE = Path(fsdp2.__file__).parent


def test_what_a_terminal_would_obey_is_written_as_its_escape():
    assert printable("layers.0\n\tÄ 中") == "layers.0\n\tÄ 中"
    hostile = "\x1b[2J\x07\x9b31m\u202eevil\r\x7f"
    assert printable(hostile) == r"\x1b[2J\x07\x9b31m\u202eevil\r\x7f"
    assert printable("\ud800").encode() == rb"\ud800"
    for text in (
        str(fsdp2.ArgumentError(f"got {hostile}", expected=hostile, fix=hostile, items=[hostile])),
        str(fsdp2.ArgumentError(hostile)),
        str(Finding("padding", "note", hostile, hostile, hostile, (hostile,))),
    ):
        assert text.replace("\n", "").isprintable(), repr(text)


def test_commands_print_through_say_alone():
    """Any other write to standard output is one of these."""
    allowed = {
        "printable.py": 1,
        "cli.py": 1,  # versions
        "planner/measure.py": 1,  # a file of the caller's, a device
        "migrate/command.py": 1,  # a patch, which must be as the source is
        "migrate/parity.py": 1,
        "doctor/finding.py": 1,  # of a report's text, which is printable
    }
    found = {}
    for path in PACKAGE.rglob("*.py"):
        writes = re.findall(r"sys\.stdout\)?\.write(?:lines)?\(", path.read_text())
        if writes:
            found[path.relative_to(PACKAGE).as_posix()] = len(writes)
    assert found == allowed


def test_results_look_in_a_prompt_and_in_a_notebook_as_they_are_printed():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    results = [
        fsdp2.summary(net),
        fsdp2.wrap.plan(net, {nn.Linear}),
        fsdp2.plan(net, 2, inputs=lambda batch, _: (torch.ones(batch, 4),)),
        Report((Finding("lr", "note", "it is 0", "why", "fix"),)),
    ]
    for result in results:
        assert repr(result) == str(result)
        assert result._repr_html_() == f"<pre>{html.escape(str(result))}</pre>"
        assert len(str(result)) > 40
