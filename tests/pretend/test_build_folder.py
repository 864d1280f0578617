"""Where the pretend device is compiled to: a folder of the user's, never one of an installation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdp2.testing.pretend import build


@pytest.mark.parametrize(
    ("variable", "is_checkout", "wanted"),
    [("elsewhere", True, "elsewhere"), (None, True, "root/build"), (None, False, "home/.cache/fsdp2/build")],
)
def test_the_device_is_compiled_outside_of_an_installation(
    variable: str | None, is_checkout: bool, wanted: str, tmp_path: Path, monkeypatch: Any
) -> None:
    (tmp_path / "root").mkdir()
    if is_checkout:
        (tmp_path / "root" / "pyproject.toml").touch()
    monkeypatch.setattr(build, "__file__", str(tmp_path / "root" / "fsdp2" / "testing" / "pretend" / "build.py"))
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    monkeypatch.delenv("FSDP2_BUILD_DIR", raising=False)
    if variable is not None:
        monkeypatch.setenv("FSDP2_BUILD_DIR", str(tmp_path / variable))
    assert build.build_folder("pretend", []).parent == tmp_path / wanted
