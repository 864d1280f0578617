"""No command obeys, or lets a terminal obey, what a name says."""

from __future__ import annotations

import re
from pathlib import Path

import fsdp2
from fsdp2.doctor import Finding
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
