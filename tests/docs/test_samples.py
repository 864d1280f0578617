"""The samples on the pages of docs/howto/ and on some others run, in the order of each page, on two ranks."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import traceback
from pathlib import Path

import pytest

from fsdp2 import errors
from fsdp2.cli import main
from harness import on_ranks

DOCS = Path(__file__).parents[2] / "docs"
HOWTO = sorted(str(page.relative_to(DOCS)) for page in (DOCS / "howto").glob("*.md") if page.name != "index.md")
PAGES = ["start.md", "meaning.md", "doctor.md", "hangs.md", "uneven.md", "inspecting.md", *HOWTO]
TOCTREE = re.compile(r"```\{toctree\}\n(?::[^\n]*\n)*(.*?)```", re.DOTALL)
NEEDS = re.compile(r"<!-- needs: (\w+) -->")
BLOCK = re.compile(r"(?P<comment><!-- (?:not run|needs): [^>]+ -->\n)?```python\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE)


def samples(page: str, package: str | None = None) -> list[tuple[int, str]]:
    """Line number and text of each sample of ``page`` that runs, those that need ``package`` included."""
    text = (DOCS / page).read_text()
    return [
        (text[: found.start("code")].count("\n"), found["code"])
        for found in BLOCK.finditer(text)
        if not found["comment"] or NEEDS.findall(found["comment"]) == [package]
    ]


def page_params():
    """Each page without the samples that need a package, and again with those of each package."""
    for page in PAGES:
        text = (DOCS / page).read_text()
        if not text.startswith("<!-- needs"):
            yield pytest.param(page, None, id=page)
        for package in set(NEEDS.findall(text)):
            is_missing = importlib.util.find_spec(package) is None
            yield pytest.param(page, package, id=f"{page}-{package}", marks=pytest.mark.skipif(is_missing, reason=f"needs {package}"))


@on_ranks(2)
@pytest.mark.parametrize(("page", "package"), list(page_params()))
def test_samples_of_a_page_run(page, package, tmp_path):
    found = samples(page, package)
    assert found, "a page without a sample that runs"
    names: dict[str, object] = {"__name__": "sample"}
    before = os.getcwd()
    os.chdir(tmp_path)  # the samples' own folders lie there
    try:
        for line, code in found:
            exec(compile("\n" * line + code, str(DOCS / page), "exec"), names)
    finally:
        os.chdir(before)


@pytest.mark.slow
def test_samples_of_the_page_on_planning_run_in_one_process():
    names: dict[str, object] = {"__name__": "sample"}
    for line, code in samples("planning.md"):
        exec(compile("\n" * line + code, str(DOCS / "planning.md"), "exec"), names)


@pytest.mark.slow
def test_the_worked_example_of_the_page_on_planning_shows_what_the_command_prints(tmp_path, monkeypatch, capsys):
    pytest.importorskip("transformers")
    page = (DOCS / "planning.md").read_text()
    (tmp_path / "llama-1b.json").write_text(re.findall(r"^```json\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)[0])
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"^```console\n\$ fsdp2 (.*?)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert examples
    for command, shown in examples:
        assert main(command.split()) == 0
        printed = iter(capsys.readouterr().out.splitlines())
        for line in shown.splitlines():
            assert line == "..." or line in printed, f"{command}: {line!r} is not printed, or not in this place"


def test_no_how_to_page_is_longer_than_a_screen():
    longer = [page for page in HOWTO if len((DOCS / page).read_text().splitlines()) > 62]
    assert not longer, "move explanations to a page of the guide, or give a second task a page of its own"


def test_samples_fit_the_column_of_the_site():
    pages = sorted(page for page in DOCS.rglob("*.md") if page.name != "log.md" and "_build" not in page.parts)
    wide = [
        (page.name, line)
        for page in pages
        for found in BLOCK.finditer(page.read_text())
        for line in found["code"].splitlines()
        if len(line) > 88
    ]
    assert not wide


def test_each_page_of_the_folder_is_in_its_index():
    listed = " ".join(TOCTREE.findall((DOCS / "howto" / "index.md").read_text()))  # a table for each group of tasks
    assert sorted(f"howto/{name}.md" for name in listed.split()) == HOWTO


ERRORS = [each for each in vars(errors).values() if isinstance(each, type) and each.__module__ == errors.__name__]


def test_each_error_class_has_its_place_in_troubleshooting():
    text = (DOCS / "troubleshooting.md").read_text()
    named = {each.__name__ for each in ERRORS if each is not errors.FSDPError}
    assert named == set(re.findall(r"^### (\w+)$", text, re.MULTILINE))


@pytest.mark.parametrize("error", [each for each in ERRORS if issubclass(each, errors.FSDPError)])
def test_a_traceback_of_an_error_ends_with_the_command_that_shows_what_the_documentation_says_of_it(error, capsys):
    class Inner(error):
        """A class that is ours alone, as CheckpointErrors of lost ranks are."""

    for raised in (error("text", expected="a", fix="b"), Inner("text")):
        assert "see:" not in str(raised)
        note = raised.__notes__[0]
        assert main(note.removeprefix("  see:      python -m fsdp2 ").split()) == 0
        if error is not errors.FSDPError:
            assert f"### {error.__name__}\n" in capsys.readouterr().out
        if sys.version_info >= (3, 11):
            assert traceback.format_exception(raised)[-1].endswith(f"{note}\n")


def test_each_page_of_the_site_is_in_a_table_of_contents():
    listed = {name for block in TOCTREE.findall((DOCS / "index.md").read_text()) for name in block.split()}
    assert {page.stem for page in DOCS.glob("*.md")} - {"index", "log"} <= listed  # conf.py leaves the log out


@pytest.mark.slow
def test_pictures_are_what_their_data_gives(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("draw", DOCS / "figures" / "draw.py")
    draw = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw)
    monkeypatch.setattr(draw, "HERE", tmp_path)
    draw.main()
    for path in (DOCS / "figures").glob("*.svg"):
        assert path.read_text() == (tmp_path / path.name).read_text(), f"{path.name}: run docs/figures/draw.py"
