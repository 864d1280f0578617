"""``fsdp2 migrate`` as a command: what it shows and writes, its exit status, files that depend on each other, bad input."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdp2.cli import main

IMPORT_ONLY = "from torch.distributed.fsdp import fully_shard\n\nfully_shard(model)\n"
CUSTOM = "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n\n\nclass Mine(FSDP):\n    pass\n"


@pytest.fixture
def file(tmp_path: Path) -> Callable[[str, str], Path]:
    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
        return path

    return write


def test_diff_is_the_default_and_changes_no_file(file: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = file("train.py", IMPORT_ONLY)
    assert main(["migrate", str(path)]) == 0
    assert "-from torch.distributed.fsdp import fully_shard\n+from fsdp2 import fully_shard\n" in capsys.readouterr().out
    assert path.read_text() == IMPORT_ONLY


def test_write_changes_the_file_once(file: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = file("train.py", IMPORT_ONLY)
    assert main(["migrate", "--write", str(path)]) == 0
    assert path.read_text() == IMPORT_ONLY.replace("torch.distributed.fsdp", "fsdp2")
    assert main(["migrate", str(path)]) == 0
    assert capsys.readouterr().out == ""


def test_line_ends_of_the_file_are_kept(file: Any) -> None:
    python = file("a.py", IMPORT_ONLY.replace("\n", "\r\n"))
    config = file("b.yaml", "distributed_type: FSDP\r\nfsdp_config:\r\n  fsdp_sharding_strategy: 1\r\n")
    assert main(["migrate", "--write", str(python), str(config)]) == 0
    for path in (python, config):
        assert path.read_bytes().count(b"\r\n") == path.read_bytes().count(b"\n") > 2


def test_what_is_left_is_listed_with_its_line_and_status_1(file: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = file("train.py", CUSTOM)
    assert main(["migrate", "--write", str(path)]) == 1
    assert f"{path}:4: compat: a subclass of FSDP" in capsys.readouterr().out
    assert "from fsdp2.compat import FullyShardedDataParallel as FSDP" in path.read_text()


def test_files_that_share_values_stay_on_compat_together(file: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = file("settings.py", "from torch.distributed.fsdp import MixedPrecision\n\nprecision = MixedPrecision()\n")
    imports = "from settings import precision\nfrom torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n"
    file("train.py", f"{imports}\nmodel = FSDP(net, mixed_precision=precision)\n")
    apart = file("other/apart.py", "from torch.distributed.fsdp import MixedPrecision\n\nprecision = MixedPrecision()\n")
    file(".venv/ignored.py", CUSTOM)
    assert main(["migrate", "--write", str(tmp_path)]) == 1
    listed = capsys.readouterr().out
    assert "train.py:4: compat: mixed_precision=precision: its value is not made in this file" in listed
    assert ".venv" not in listed
    assert settings.read_text() == "from fsdp2.compat import MixedPrecision\n\nprecision = MixedPrecision()\n"
    assert apart.read_text() == "import fsdp2\n\nprecision = fsdp2.MixedPrecisionPolicy()\n"


def test_unused_imports_of_a_package_are_kept(file: Any) -> None:
    path = file("__init__.py", "from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision\n")
    assert main(["migrate", "--write", str(path)]) == 0
    assert path.read_text() == "from fsdp2.compat import FullyShardedDataParallel, MixedPrecision\n"


def test_what_is_no_python_is_listed_and_left(file: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path, binary = file("train.py", "def (:\n"), file("latin.py", "")
    binary.write_bytes(b"x = '\xe9'\n")
    assert main(["migrate", "--write", str(path), str(binary)]) == 1
    listed = capsys.readouterr().out
    assert f"{path}:1: left: not migrated: it is no Python" in listed
    assert f"{binary}:1: left: not migrated: it is not UTF-8" in listed


@pytest.mark.parametrize(("arguments", "said"), [([], "got no PATH"), (["absent"], "nothing to migrate in absent")])
def test_no_file_is_an_error(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["migrate", *arguments]) == 1
    assert said in capsys.readouterr().err


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    real = builtins.__import__

    def without_libcst(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "libcst":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_libcst)
    assert main(["migrate", "train.py"]) == 1
    assert 'pip install "fsdp2[cli]"' in capsys.readouterr().err
