"""The corpus: every script becomes exactly the expected text, with the expected listing, and does not change any more afterwards."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from fsdp2.migrate.accelerate_config import migrate_config
from fsdp2.migrate.source import migrate_source

CORPUS = Path(__file__).parent / "corpus"
SCRIPTS = sorted(path.name for path in (CORPUS / "old").glob("*.py"))
CONFIGS = sorted(path.name for path in (CORPUS / "yaml_old").glob("*.yaml"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_becomes_the_expected_text_and_stays_so(name: str) -> None:
    path = CORPUS / "old" / name
    result = migrate_source(path.read_text(), path)
    assert result.new == (CORPUS / "new" / name).read_text()
    listing = "".join(f"{finding.shown(name)}\n" for finding in result.findings)
    assert listing == (CORPUS / "new" / f"{name}.txt").read_text()
    assert migrate_source(result.new, path).new == result.new, "a second time changes nothing"
    ast.parse(result.new)


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_comment_of_the_user_is_kept(name: str) -> None:
    old, new = ((CORPUS / folder / name).read_text() for folder in ("old", "new"))
    in_imports = {"# bf16"}
    for line in old.splitlines():
        _, mark, comment = line.partition("#")
        if mark and comment.strip() not in in_imports and '"' not in comment:
            assert comment.strip() in new


def test_function_that_returns_what_it_returns_is_no_endless_walk() -> None:
    imports = "from torch.nn.parallel import DistributedDataParallel as DDP\n"
    script = f"{imports}\ndef f(n):\n    return f(n - 1) if n else DDP(net)\n\nf(2).module.save()\n"
    assert '\n    return f(n - 1) if n else fsdp2.parallelize(net, "ddp")\n\nf(2).save()\n' in migrate_source(script).new


@pytest.mark.parametrize("name", CONFIGS)
def test_accelerate_configuration_becomes_the_expected_text_and_stays_so(name: str) -> None:
    result = migrate_config((CORPUS / "yaml_old" / name).read_text())
    assert result.new == (CORPUS / "yaml_new" / name).read_text()
    listing = "".join(f"{finding.shown(name)}\n" for finding in result.findings)
    assert listing == (CORPUS / "yaml_new" / f"{name}.txt").read_text()
    assert migrate_config(result.new).new == result.new
