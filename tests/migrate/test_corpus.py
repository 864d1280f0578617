"""The corpus: each script changes exactly as expected, with the expected findings, and a second migration changes nothing more.

``expected/<name>`` holds the difference between the script and its migration, then the findings; ``regenerate.py`` writes it.
"""

from __future__ import annotations

import ast
import difflib
from pathlib import Path

import pytest

from fsdp2.migrate.accelerate_config import migrate_config
from fsdp2.migrate.source import migrate_source

CORPUS = Path(__file__).parent / "corpus"
SCRIPTS = sorted(path.name for path in CORPUS.glob("*.py"))
CONFIGS = sorted(path.name for path in CORPUS.glob("*.yaml"))


def migrated(path: Path) -> tuple[str, str]:
    """The text of a script or configuration after its migration, and the expected file's text: difference and findings."""
    old = path.read_text()
    result = migrate_source(old, path) if path.suffix == ".py" else migrate_config(old)
    difference = difflib.unified_diff(old.splitlines(keepends=True), result.new.splitlines(keepends=True), "old", "new", n=1)
    return result.new, "".join([*difference, *(f"{finding.shown(path.name)}\n" for finding in result.findings)])


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_becomes_the_expected_text_and_stays_so(name: str) -> None:
    path = CORPUS / name
    new, said = migrated(path)
    assert said == (CORPUS / "expected" / f"{name}.diff").read_text()
    assert migrate_source(new, path).new == new, "a second time changes nothing"
    ast.parse(new)


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_comment_of_the_user_is_kept(name: str) -> None:
    new, _ = migrated(CORPUS / name)
    in_imports = {"# bf16"}
    for line in (CORPUS / name).read_text().splitlines():
        _, mark, comment = line.partition("#")
        if mark and comment.strip() not in in_imports and '"' not in comment:
            assert comment.strip() in new


def test_function_that_returns_what_it_returns_is_no_endless_walk() -> None:
    imports = "from torch.nn.parallel import DistributedDataParallel as DDP\n"
    script = f"{imports}\ndef f(n):\n    return f(n - 1) if n else DDP(net)\n\nf(2).module.save()\n"
    assert '\n    return f(n - 1) if n else fsdp2.parallelize(net, "ddp")\n\nf(2).save()\n' in migrate_source(script).new


@pytest.mark.parametrize(
    ("join", "body"),
    [
        ("model.join()", "loss.backward()\n        break"),
        ("model.join(divide_by_initial_world_size=False)", "loss.backward()"),
        ("model.join() as joined", "loss.backward()"),
        ("model.join()", "print(loss)"),
    ],
)
def test_a_join_whose_loop_may_end_early_or_that_divides_otherwise_is_left_with_a_word_on_uneven(join: str, body: str) -> None:
    imports = "from torch.nn.parallel import DistributedDataParallel as DDP\n"
    script = imports + "model = DDP(net)\nwith {join}:\n    for x in xs:\n        {body}\n"
    assert (
        "with fsdp2.uneven(model) as work:\n    for x in work(xs):\n"
        in migrate_source(script.format(join="model.join()", body="x.backward()")).new
    )
    result = migrate_source(script.format(join=join, body=body))
    assert f"with {join}:" in result.new
    assert any("use `with fsdp2.uneven(model) as work:`" in finding.text for finding in result.findings)


@pytest.mark.parametrize("name", CONFIGS)
def test_accelerate_configuration_becomes_the_expected_text_and_stays_so(name: str) -> None:
    new, said = migrated(CORPUS / name)
    assert said == (CORPUS / "expected" / f"{name}.diff").read_text()
    assert migrate_config(new).new == new
