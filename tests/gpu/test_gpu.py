"""``make gpu`` without a GPU: its checks run on the pretend accelerator, and what goes wrong in them becomes a failed row."""

from __future__ import annotations

import json
import os
from unittest import mock

import pytest
import torch

import gpu.__main__ as program
from fsdp2.testing import pretend
from gpu import device, planted  # noqa: F401  # which registers the planted checks
from gpu.check import CHECKS
from gpu.device import new_memory
from gpu.report import markdown, summary, write
from gpu.running import OUT_OF_TIME, Row, run_all
from gpu.several_devices import in_symmetric_memory
from harness import pretend_training
from harness.pretend_training import SCENARIOS_OF_SUMS

ROWS = [
    Row("a", "a sum is a sum", 1, "pass", 1.5, figures={"ratio": 0.51234}, kind="sums"),
    Row("b", "a | b", 2, "fail", 0.5, "rank 1: AssertionError: three is not four\nTraceback ...", kind="quotients"),
    Row("c", "graphs", 3, "skip", text="needs several devices: here is 1", kind="graphs"),
]
needs_compiler = pytest.mark.skipif(bool(pretend.missing_tools()), reason="the pretend accelerator is compiled first")


@pytest.fixture
def planted_checks(monkeypatch):
    """As many devices as the body is told, and processes that know the planted checks."""
    pretend.library()
    monkeypatch.setenv("GPU_CHECK_PLANTED", "1")

    def run(*names: str, devices: int = 1) -> dict[str, Row]:
        monkeypatch.setenv("GPU_CHECK_DEVICES", str(devices))
        return {row.name: row for row in run_all([CHECKS[name] for name in names], "pretend")}

    return run


# ---- what becomes of a check ----


@needs_compiler
def test_a_check_that_fails_is_a_failed_row_with_what_it_printed_and_the_next_is_run(planted_checks):
    rows = planted_checks("planted_pass", "planted_skip", "planted_wrong", "planted_last")
    assert {name: row.status for name, row in rows.items()} == {
        "planted_pass": "pass",
        "planted_skip": "skip",
        "planted_wrong": "fail",
        "planted_last": "pass",
    }
    assert rows["planted_pass"].figures == {"sum": 3.0}
    assert rows["planted_skip"].text == "needs a unicorn"
    assert rows["planted_wrong"].text.startswith("rank 0: AssertionError: three is not four")
    assert "this was printed before it failed" in rows["planted_wrong"].text


@pytest.mark.slow
@needs_compiler
def test_a_check_that_crashes_or_hangs_is_a_failed_row_with_its_output_and_the_next_is_run(planted_checks):
    rows = planted_checks("planted_crash", "planted_hang", "planted_last")
    assert rows["planted_crash"].status == rows["planted_hang"].status == "fail"
    assert "ended by SIGSEGV" in rows["planted_crash"].text
    assert "this was printed before it crashed" in rows["planted_crash"].text
    assert "did not end within 1 s" in rows["planted_hang"].text
    assert "in planted_hang" in rows["planted_hang"].text  # its stack
    assert rows["planted_last"].status == "pass"


@pytest.mark.slow
@needs_compiler
def test_a_rank_that_fails_alone_is_named_though_the_other_waits_for_it(planted_checks):
    rows = planted_checks("planted_one_rank", "planted_pass:two", "planted_several", devices=2)
    assert rows["planted_one_rank"].text.startswith("rank 1: RuntimeError: rank 1 alone")
    assert rows["planted_pass:two"].status == "pass"
    assert rows["planted_several"].figures == {"ranks": 2.0}


@needs_compiler
def test_what_one_device_cannot_show_is_a_skip_that_says_so(planted_checks):
    rows = planted_checks("planted_several", "planted_pass:two", "races_sanitized:plain")
    assert {row.text for row in rows.values()} == {
        "needs several devices: here is 1",
        "needs 2 devices: here are 1",
        "needs CUDA: its sanitizer",
    }
    assert {row.status for row in rows.values()} == {"skip"}


@pytest.mark.slow
@needs_compiler
def test_processes_that_do_not_start_fail_every_check_at_once(planted_checks, monkeypatch):
    monkeypatch.setenv("FSDP2_BUILD_DIR", "/dev/null/no")
    rows = planted_checks("planted_pass", "planted_last")
    assert all(row.status == "fail" and row.text.startswith("no check of this setup was run") for row in rows.values())


@needs_compiler
def test_what_would_begin_after_the_budget_is_a_skip_and_rows_are_saved_as_they_end(planted_checks, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(program, "CHECKS", {name: CHECKS[name] for name in ("planted_pass", "planted_last")})
    saved = []
    monkeypatch.setattr(program, "write", lambda rows, about, out: saved.append(len(rows)) or write(rows, about, out))
    assert program.main(["--device", "pretend", "--out", str(tmp_path), "--budget", "0"]) == 0
    assert {row["text"] for row in json.loads((tmp_path / "results.json").read_text())["rows"]} == {OUT_OF_TIME}
    assert saved == [1, 2, 2]


def test_graphs_and_symmetric_memory_come_first(capsys):
    program.main(["--list"])
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert {name.partition(":")[0] for name in names[:5]} == {"graph_capture", "graph_capture_with_nccl", "symmetric_memory"}


# ---- the checks themselves ----


def names_of(*parts: str) -> list[str]:
    return [name for name in CHECKS if any(part in name for part in parts)]


def assert_nothing_fails(rows: dict[str, Row]) -> None:
    failed = {name: row.text for name, row in rows.items() if row.status == "fail"}
    assert failed == {}
    missing = {row.text for row in rows.values() if row.status == "skip"}
    assert all(text.startswith(("needs CUDA", "needs an even number", "needs benchmarks/step_clock.py")) for text in missing), missing


@pytest.mark.slow
@needs_compiler
def test_every_check_for_one_device_that_needs_no_gpu_passes_on_the_pretend_one(planted_checks):
    """Of the disturbed races a few: tests/pretend has them all."""
    of_races = names_of(
        "races_disturbed:extensions_direct",
        "races_disturbed:replicated_bf16_all",
        "races_disturbed:depth_offload_bf16",
        "races_planted",
        "races_control:plain",
        "races_control:two_deep",
        "races_control:offload_bf16",
        "races_control:pinned_input",
    )
    names = [
        name
        for name, each in CHECKS.items()
        if (each.part == 1 and "planted" not in name and "races" not in name)
        or "one device" in name
        or each.run.__name__ == "transient_memory"
    ]
    rows = planted_checks(*of_races, *names)
    assert_nothing_fails(rows)
    assert sum(row.status == "pass" for row in rows.values()) > 15


@pytest.mark.slow
@needs_compiler
def test_every_check_for_several_devices_that_needs_no_gpu_passes_on_two_pretend_ones(planted_checks):
    names = [name for name, each in CHECKS.items() if each.part == 2 and "planted" not in name]
    left_out = {"mixed, device_id", "nccl, lazy"}  # which are here what the others are
    names = [name for name in names if not any(name.endswith(each) for each in left_out)]
    some = (
        "races_over_nccl:plain",
        "races_over_nccl:several_dtypes_hsdp",
        "several_equal_to_torch:flat_micro_batches",
    )  # they are many
    wide = ("races_over_nccl", "several_equal_to_torch")
    names = [name for name in names if not name.startswith(wide) or name in some]
    names.sort(key=lambda name: str(CHECKS[name].setup))
    rows = planted_checks(*names, *names_of("step_time:large:all"), devices=2)
    assert_nothing_fails(rows)
    assert sum(row.status == "pass" for row in rows.values()) >= 12


def test_rows_of_races_have_every_scenario_but_those_in_which_all_orders_are_wrong_alike():
    """Scenarios of a greater depth were in no row."""
    known = [each for name, each in vars(pretend_training).items() if name == "MORE_SCENARIOS" or name.startswith("SCENARIOS")]
    names = {name for scenarios in known for name in scenarios} - SCENARIOS_OF_SUMS.keys()
    for row in ("races_sanitized", "races_disturbed", "races_over_nccl"):
        assert set(names_of(f"{row}:")) == {f"{row}:{name}" for name in names}


def test_every_row_of_equality_with_torchs_fsdp2_has_a_control():
    """Three of nine had none: two deep, offload in bf16, pinned input."""
    compared, controlled = ([name for name in CHECKS if name.startswith(row)] for row in ("equal_to_torch:", "races_control:"))
    assert len(compared) >= 9
    assert [name.partition(":")[2] for name in controlled] == [name.partition(":")[2] for name in compared]


def test_every_unit_is_in_the_row_of_symmetric_memory():
    """The setter is not recursive, and leaves out reductions that do not add: the row had the root's all-gathers alone."""
    for reductions in (False, True):
        model = mock.Mock(blocks=[mock.Mock(), mock.Mock()])
        in_symmetric_memory(model, reductions)
        for module in (model, *model.blocks):
            assert module.method_calls == [
                mock.call.set_force_sum_reduction_for_comms(reductions),
                mock.call.set_symm_mem_for_comm(),
            ]


def test_runs_that_are_compared_take_the_same_algorithms_and_one_of_them_new_memory_full_of_nan():
    """The run that is right was without deterministic algorithms, whose bits may be others."""
    on_cuda = mock.Mock(is_cuda=True)
    filled = torch.utils.deterministic.fill_uninitialized_memory
    for is_nan in (False, True):
        with new_memory(on_cuda, is_nan):
            assert torch.are_deterministic_algorithms_enabled()
            assert bool(torch.empty(64).isnan().all()) or not is_nan
            assert torch.utils.deterministic.fill_uninitialized_memory is is_nan
        assert not torch.are_deterministic_algorithms_enabled()
        assert torch.utils.deterministic.fill_uninitialized_memory is filled
    with new_memory(mock.Mock(is_cuda=False), True):
        assert not torch.are_deterministic_algorithms_enabled()


def test_every_name_is_the_name_of_one_check():
    assert all(name == each.name for name, each in CHECKS.items())
    assert len({each.title for each in CHECKS.values()}) == len(CHECKS)


# ---- the program ----


def test_without_a_gpu_it_says_so_in_one_sentence_and_ends_with_status_3(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert program.main(["--out", str(tmp_path / "out")]) == 3
    said = capsys.readouterr().out.strip()
    assert said == "There is no CUDA device here, or this torch was built without CUDA, so nothing was checked."
    assert not (tmp_path / "out").exists()


@needs_compiler
def test_it_prints_a_table_writes_both_files_says_where_to_send_them_and_ends_with_1_if_a_row_failed(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(program, "run_all", lambda checks, device, tell, budget_s: [tell(row) or row for row in ROWS])
    assert program.main(["--device", "pretend", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "1 passed, 1 failed, 1 skipped" in said
    assert "Please attach" in said
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", "results.md"}
    assert said.splitlines()[-1] == "On 1 x pretend. WRONG: quotients. Shown: sums. Not shown: graphs."
    monkeypatch.setattr(program, "run_all", lambda checks, device, tell, budget_s: ROWS[:1])
    assert program.main(["--device", "pretend", "--out", str(tmp_path)]) == 0


def test_the_files_hold_every_row_and_the_output_of_those_that_failed(tmp_path):
    as_json, as_markdown = write(ROWS, {"gpu": "a card", "torch": "2.13"}, tmp_path)
    found = json.loads(as_json.read_text())
    assert found["about"]["gpu"] == "a card"
    assert [row["status"] for row in found["rows"]] == ["pass", "fail", "skip"]
    assert found["rows"][0]["figures"] == {"ratio": 0.51234}
    text = as_markdown.read_text()
    assert "| one device | a sum is a sum | pass | 1.5 | ratio 0.5123 |" in text
    assert "| several devices | a / b | fail |" in text
    assert "Traceback ..." in text
    assert "needs several devices: here is 1" in text
    assert text == markdown(ROWS, {"gpu": "a card", "torch": "2.13"})
    assert summary(ROWS) == "1 passed, 1 failed, 1 skipped"


def test_the_pretend_accelerator_is_as_many_devices_as_it_is_told(monkeypatch):
    monkeypatch.setenv("GPU_CHECK_DEVICES", "8")
    assert device.count("pretend") == 8
    assert os.environ.get("GPU_CHECK_PLANTED") is None
