"""``python constraints/release_notes.py v1.2.0``: prints what CHANGELOG.md says of that version, for the page of the release.

It fails where the tag, ``pyproject.toml`` and the changelog do not name the same version. Worked example: the tag v1.2.0 needs
``version = "1.2.0"`` and a section ``## [1.2.0] - 2027-01-31``, of which all lines up to the next ``## `` are printed.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def version_of(pyproject: str) -> str:
    """The version that ``pyproject`` (the file's text) builds."""
    found = re.search(r'^version = "(.+)"$', pyproject, re.MULTILINE)
    if found is None:
        raise SystemExit('pyproject.toml has no line version = "..."')
    return found[1]


def notes_of(changelog: str, version: str) -> str:
    """The section of ``version`` in ``changelog`` (the file's text), without its heading."""
    found = re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    if found is None or not found[1].strip():
        raise SystemExit(f"CHANGELOG.md has no section '## [{version}] - YYYY-MM-DD' with lines in it: rename Unreleased")
    return found[1].strip() + "\n"


def main(tag: str) -> None:
    version = version_of((ROOT / "pyproject.toml").read_text())
    if tag != f"v{version}":
        raise SystemExit(f"the tag is {tag}, and pyproject.toml builds version {version}: they must agree")
    print(notes_of((ROOT / "CHANGELOG.md").read_text(), version), end="")


if __name__ == "__main__":
    main(*sys.argv[1:])
