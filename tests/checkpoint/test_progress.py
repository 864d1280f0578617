"""The progress bar of load, save and convert."""

from __future__ import annotations

import sys

import pytest

from fsdp2.checkpoint import progress


def test_a_bar_comes_once_the_work_has_taken_a_second(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It came at once, and so it flashed up for every small file."""
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress.progress_bar("loading", 4000, None) as advance:
        now = 0.9
        advance(1000)
        assert capsys.readouterr() == ("", "")
    assert capsys.readouterr() == ("", "")
    with progress.progress_bar("loading", 4000, None) as advance:
        advance(1000)
        now = 2.0
        advance(3000)
    shown = capsys.readouterr().err
    assert "loading" in shown
    assert "4.0/4.0 kB" in shown
