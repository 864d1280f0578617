"""Notes of a release: the changelog's section of the version that the tag and pyproject.toml name."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CHANGELOG = """# Changelog

## [Unreleased]

## [1.2.0] - 2027-01-31

### Added
- A thing.

## [1.1.0] - 2026-12-01

- Another.
"""


def test_the_citation_has_the_version_of_the_package(release_notes):
    (cited,) = [line for line in (ROOT / "CITATION.cff").read_text().splitlines() if line.startswith("version: ")]
    assert cited == f"version: {release_notes.version_of((ROOT / 'pyproject.toml').read_text())}"


@pytest.fixture
def release_notes():
    spec = importlib.util.spec_from_file_location("release_notes", ROOT / "constraints" / "release_notes.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("version", "notes"), [("1.2.0", "### Added\n- A thing.\n"), ("1.1.0", "- Another.\n")])
def test_the_notes_of_a_version_are_its_section_of_the_changelog(release_notes, version, notes):
    assert release_notes.notes_of(CHANGELOG, version) == notes


@pytest.mark.parametrize("version", ["1.3.0", "Unreleased", "1.2"])
def test_a_version_without_a_section_is_not_released(release_notes, version):
    with pytest.raises(SystemExit, match="has no section"):
        release_notes.notes_of(CHANGELOG, version)


def test_a_tag_of_another_version_is_not_released(release_notes):
    version = release_notes.version_of((ROOT / "pyproject.toml").read_text())
    with pytest.raises(SystemExit, match="they must agree"):
        release_notes.main(f"v{version}.1")
