"""The report's page: what it says of a run, and that a browser draws it."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdp2
from fsdp2.cli import main
from fsdp2.doctor.finding import Finding
from fsdp2.inspector.report.figures import memory, steps, timeline
from fsdp2.inspector.report.page import page_of
from fsdp2.inspector.report.reading import Run, read_run
from fsdp2.inspector.report.tables import measured_peak
from fsdp2.inspector.run_folder import write_json

FINDING = Finding("large-root", "note", "the root <holds> most", "it is gathered at once", "wrap blocks", ("head.weight",))


def run_folder(folder: Path) -> Path:
    """Of one step on two ranks that nobody has run: 2 MiB allocated at most, 3 MiB planned."""
    names = {"forward": (1, "forward", 0.0, 40.0), "backward": (1, "backward", 50.0, 40.0), "optimizer": (1, "optimizer", 95.0, 5.0)}
    for rank in range(2):
        events: list[dict[str, Any]] = [
            {"ph": "X", "pid": rank, "tid": tid, "cat": cat, "name": name, "ts": ts, "dur": dur, "args": {"unit": "", "phase": cat}}
            for name, (tid, cat, ts, dur) in names.items()
        ]
        for cat, ts in (("forward", 10.0), ("backward", 60.0)):
            said = {"unit": "layers.0", "phase": cat}
            events.append(
                {"ph": "X", "pid": rank, "tid": 2, "cat": cat, "name": f"{cat} of layers.0", "ts": ts, "dur": 20.0, "args": said}
            )
        gather = {"pid": rank, "tid": 2, "cat": "all-gather", "id": f"{rank}.0", "name": "all-gather of layers.0"}
        events += [{"ph": "b", "ts": 2.0, "args": {}, **gather}, {"ph": "e", "ts": 8.0, **gather}]
        events += [
            {"ph": "C", "pid": rank, "name": "bytes", "ts": ts, "args": {"allocated": mib << 20}} for ts, mib in ((5.0, 1), (65.0, 2))
        ]
        write_json(folder / f"trace.rank{rank}.json", {"traceEvents": events, "metadata": {}})
        line = {
            "step": 1,
            "rank": rank,
            "time": 0.0,
            "duration_ms": 100.0,
            "tokens": 64,
            "memory": {"sharded parameters": 1 << 20},
            "allocator_peak": None,
            "communication": {"forward": {"all-gather": {"calls": 1, "nbytes": 2 << 20, "sent": 1 << 20, "exposed_ms": 2.0}}},
            "exposed_ms": 2.0,
            "hooks_ms": 1.0,
        }
        (folder / f"ledger.rank{rank}.jsonl").write_text(json.dumps(line) + "\n")
    moments = [{"phase": phase, "where": "layers.0", "nbytes": mib << 20} for phase, mib in (("forward", 1), ("backward", 3))]
    plan = {
        "peak": {"nbytes": 3 << 20, "by_kind": {}, "phase": "backward", "where": "layers.0"},
        "most": {"sharded parameters": 1 << 20},
        "moments": moments,
        "traffic": [{"phase": "forward", "kind": "all_gather", "ranks": 2, "launches": 1, "sent": 1 << 20, "leaves_host": 0}],
    }
    finding = {name: getattr(FINDING, name) for name in FINDING.__slots__}
    about = {"ranks": 2, "device": "cpu", "torch": torch.__version__, "fsdp2": "0", "model": "GPT", "plan": plan, "findings": [finding]}
    write_json(folder / "run.json", about)
    return folder


def test_the_page_says_what_was_measured_beside_what_was_planned_and_what_the_doctor_found(tmp_path, capsys):
    folder = run_folder(tmp_path)
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out.strip() == str(folder / "report.html")
    page = (folder / "report.html").read_text()
    body = page[page.index("<body>") :]
    said = html.unescape(re.sub(r"<[^>]+>", " ", body))
    for text in ("GPT on 2 x cpu", "1,280", "2.10 MB", "3.15 MB", "large-root", "the root <holds> most", "host waits, ms"):
        assert text in said
    assert "<holds>" not in body
    assert not re.search(r'(src|href)="', body)  # it needs nothing else
    run = read_run(folder)
    assert measured_peak(run) == 2 << 20
    planned = memory(run)["data"][-1]
    assert planned["name"] == "allocated, planned"
    assert planned["y"][:2] == [1.048576, 3.145728]
    drawn = {trace["name"]: trace for trace in timeline(run)["data"]}
    assert drawn["all-gather"]["y"] == ["rank 0  all-gather", "rank 1  all-gather"]
    assert drawn["all-gather"]["x"] == [0.006, 0.006]


def test_a_folder_without_a_run_is_an_error_of_one_line_each(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert "neither a ledger nor a trace" in capsys.readouterr().err


ATTACK = '"><img src=x onerror=alert(1)></script><!--<script>\x1b[2J\ud800'


def attacked(value: Any) -> Any:
    """``value`` with the attack in the place of each text, but for those that choose what is drawn."""
    if isinstance(value, dict):
        return {key: each if key in ("ph", "id") else attacked(each) for key, each in value.items()}
    if isinstance(value, list):
        return [attacked(each) for each in value]
    return ATTACK + value if isinstance(value, str) else value


def test_no_text_of_a_run_becomes_code_of_the_page(tmp_path):
    """A finding's severity stood unescaped in an attribute. Here every text of all files holds markup, a script's end and a comment."""
    folder = run_folder(tmp_path)
    honest = (main(["report", str(folder)]), (folder / "report.html").read_text())[1]
    for path in folder.glob("*.json*"):
        path.write_text(json.dumps(attacked(json.loads(path.read_text()))) + "\n")
    assert main(["report", str(folder)]) == 0
    page = (folder / "report.html").read_text()

    def tags(text: str) -> list[str]:
        text = text[text.index("<body>") :]
        return sorted(set(re.findall(r"<[a-z!/][^ >]*", text)))

    assert tags(page) == tags(honest)
    assert "<!--" not in page[page.index("<body>") :]
    assert "onerror=alert(1)&gt;" in page[page.index("<body>") :]


def paths_below(value: Any) -> Iterator[tuple[Any, ...]]:
    """The place of each value in ``value``, itself included."""
    yield ()
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in parts:
        yield from ((key, *below) for below in paths_below(each))


def broken(value: Any, path: tuple[Any, ...], other: Any) -> Any:
    if not path:
        return other
    copy = value.copy()
    copy[path[0]] = broken(value[path[0]], path[1:], other)
    return copy


OTHERS = [None, -(10**400), "\ud800", [None], {}]


def test_a_file_that_is_broken_anywhere_is_a_page_or_an_error_of_fsdp2_that_names_it(tmp_path, monkeypatch):
    monkeypatch.setattr("fsdp2.inspector.report.page._plotly", lambda: "")
    folder = run_folder(tmp_path)
    num_refused = 0
    for name in ("run.json", "ledger.rank1.jsonl", "trace.rank0.json"):
        whole = (folder / name).read_text()
        texts = ["{", '{"a": 1}\n', "[" * 100_000, "\n", "\xff\n"]
        values = json.loads(whole)
        texts += [json.dumps(broken(values, path, other)) + "\n" for path in paths_below(values) for other in OTHERS]
        for text in texts:
            (folder / name).write_text(text)
            try:
                page_of(read_run(folder))
            except fsdp2.ArgumentError as error:
                num_refused += name in str(error)
            except Exception as error:
                raise AssertionError(f"{name}: {text[:400]}") from error
        (folder / name).write_text(whole)
    assert num_refused > 100
    (folder / "ledger.rank1.jsonl").unlink()
    os.mkfifo(folder / "ledger.rank1.jsonl")
    with pytest.raises(fsdp2.ArgumentError, match=r"ledger\.rank1\.jsonl cannot be read: it is no file"):
        read_run(folder)


def test_of_many_ranks_the_slowest_are_drawn_first_and_a_line_names_them(tmp_path):
    """All 64 ranks take as long as rank 37, for which the others wait; it stood behind the 16 that were drawn."""
    folder = run_folder(tmp_path)
    line = json.loads((folder / "ledger.rank0.jsonl").read_text())
    trace = (folder / "trace.rank0.json").read_text()
    for rank in range(64):
        waits = 0.0 if rank == 37 else 60.0 + rank / 100
        (folder / f"ledger.rank{rank}.jsonl").write_text(json.dumps({**line, "exposed_ms": waits}) + "\n")
        (folder / f"trace.rank{rank}.json").write_text(trace)
    run = read_run(folder)
    drawn = [trace["name"] for trace in steps(run)["data"]]
    assert drawn[:3] == ["rank 37", "rank 37 waits", "rank 0"]
    assert len(drawn) == 32
    assert timeline(run)["layout"]["yaxis"]["categoryarray"][-1] == "rank 37  main thread"
    assert main(["report", str(folder)]) == 0
    page = html.unescape((folder / "report.html").read_text())
    assert "Slow ranks, by a step's time without waits: rank 37 with 100.0 ms; the median of 64 ranks is" in page
    assert "16 of 64 ranks are drawn, the slowest first." in page


def test_without_plotly_the_report_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    assert main(["report", str(run_folder(tmp_path))]) == 2
    assert "pip install 'fsdp2[report]'" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_a_browser_draws_the_page_without_an_error(tmp_path):
    assert main(["report", str(run_folder(tmp_path))]) == 0
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", "--virtual-time-budget=20000"]
    url = (tmp_path / "report.html").as_uri()
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    ended = subprocess.run(["chromium", *flags, profile, "--dump-dom", url], capture_output=True, text=True, timeout=300, check=True)
    root = re.search(r"<html[^>]*>", ended.stdout)
    assert 'data-failures="[]"' in root[0]
    assert 'data-drawn="3"' in root[0]
    assert ended.stdout.count('class="bars"') + ended.stdout.count("barlayer") > 0


def test_of_a_run_without_a_trace_the_ledger_is_shown(tmp_path):
    folder = run_folder(tmp_path)
    for path in folder.glob("trace.*"):
        path.unlink()
    run = read_run(folder)
    assert isinstance(run, Run)
    assert timeline(run) is None
    assert measured_peak(run) is None


def test_a_plan_knows_the_course_of_its_step():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3)])
    planned = fsdp2.plan(model, 2, backend="gloo", inputs=lambda batch, sequence: (torch.zeros(batch, sequence, 64),))
    moments = planned.memory.moments
    assert max(each.nbytes for each in moments) == planned.memory.peak.nbytes
    order = list(dict.fromkeys((each.phase, each.where) for each in moments if each.where in ("0", "1", "2")))
    assert order[:3] == [("forward", name) for name in "012"]
    assert [each for each in order if each[0] == "backward"] == [("backward", name) for name in "210"]
