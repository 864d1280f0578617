"""The command line as a whole: exit statuses, the version, and a program that runs by ``fsdp2 run``."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import fsdp2
from fsdp2 import run as run_module
from fsdp2.cli import COMMANDS, NEVER_QUIET, main, parser_for
from harness import cpu_mesh, on_ranks


def status_of(arguments: list[str]) -> int:
    """The exit status, whether the command returns it or argparse ends the program."""
    try:
        return main(arguments)
    except SystemExit as end:
        return int(end.code or 0)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["no-such-command"],
        ["run"],
        ["run", "no-such-script.py"],
        ["run", "-m", "no_such_module"],
        ["plan", "llama3-8b", "--ranks", "0"],
        ["plan", "llama3-8b", "--ranks", "two"],
        ["plan", "llama3-8b", "--ranks", "2", "--batch", "0"],
        ["plan", "llama3-8b", "--ranks", "2", "--prefetch", "-1"],
        ["plan", "no-such-model", "--ranks", "2"],
        ["doctor", "train.py", "--steps", "0"],
        ["doctor", "train.py", "--limit", "nan"],
        ["doctor", "no-such-script.py"],
        ["migrate", "no-such-folder"],
        ["migrate", "--parity", "train.py", "--ranks", "0"],
        ["migrate", "--parity", "no-such-script.py"],
        ["diff", "no-such-folder", "no-such-folder"],
        ["report", "no-such-folder"],
        ["measure", "no-such-folder/card.json"],
        ["explain", "no-such-symptom"],
        ["convert", "no-such-file", "out", "--to", "no-such-format"],
        ["convert", "no-such-file", "out", "--to", "dcp"],
        ["verify", "no-such-folder"],
    ],
    ids=" ".join,
)
def test_wrong_arguments_are_status_2_and_said(arguments: list[str], tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert status_of(arguments) == 2
    assert capsys.readouterr().err.strip()
    assert not list(tmp_path.iterdir())


VALID = {
    "run": ["program.py"],
    "convert": [".", "out", "--to", "dcp"],
    "verify": ["."],
    "plan": ["t5-3b", "--ranks", "2"],
    "search": ["t5-3b", "--ranks", "2", "--card", "h100"],
    "measure": ["card.json"],
    "diff": ["a", "b"],
    "report": ["."],
    "doctor": ["program.py"],
    "prove": ["program.py"],
    "explain": ["MeshError"],
    "migrate": ["."],
}


def options_of(command: str) -> list[argparse.Action]:
    (group,) = [each for each in parser_for([command])._actions if isinstance(each, argparse._SubParsersAction)]
    return [each for each in group.choices[command]._actions if each.option_strings]


def wrong_options() -> Iterator[list[str]]:
    """Of each command: an option that it lacks, and each option that has kinds of values, with a value of no kind."""
    assert VALID.keys() == COMMANDS.keys()
    for command, arguments in VALID.items():
        yield [command, "--no-such-option", *arguments]
        for option in options_of(command):
            if option.choices or option.type not in (None, Path, str):
                yield [command, option.option_strings[-1], "no-such-folder/no-such-value", *arguments]
    for verb in ("search", "measure"):
        yield ["plan", *VALID["plan"], f"--{verb}"]


@pytest.mark.parametrize("arguments", [*wrong_options()], ids=" ".join)
def test_each_option_refuses_a_wrong_value_before_anything_runs(
    arguments: list[str], tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert status_of(arguments) == 2
    said = capsys.readouterr().err
    assert "--search is the command fsdp2 search" in said or "--measure is the command fsdp2 measure" in said or "no-such-" in said
    assert not list(tmp_path.iterdir())


def test_options_of_one_name_are_one_option_in_all_commands() -> None:
    found: dict[str, set[Any]] = {}
    for command in COMMANDS:
        options = {name: each for each in options_of(command) for name in each.option_strings}
        assert ("--quiet" in options) is (command not in NEVER_QUIET)
        assert ("--format" in options) is ("--json" in options)
        for name, each in options.items():
            if name in ("--format", "--json", "--quiet"):
                found.setdefault(name, set()).add((each.dest, str(each.choices), str(each.default), each.help))
            if name.endswith("dtype"):
                found.setdefault("dtype", set()).add(each.metavar)
    assert {name for name, ways in found.items() if len(ways) > 1} == set()
    assert len(found) == 4


@pytest.mark.parametrize(
    ("words", "ranks", "own"),
    [
        ("--ranks 3 train.py a", 3, "a"),
        ("--ranks 3 train.py -- a -- b", 3, "a -- b"),
        ("train.py --ranks 3 -- a --ranks 5", 3, "a --ranks 5"),
        ("--steps 2 train.py --ranks 3 --", 3, ""),
        ("train.py --ranks 3 a", 4, "--ranks 3 a"),
    ],
)
def test_options_stand_before_the_script_or_between_it_and_the_dashes(words: str, ranks: int, own: str, monkeypatch: Any) -> None:
    seen: list[argparse.Namespace] = []
    module = importlib.import_module(COMMANDS["prove"][0])
    monkeypatch.setattr(module, "run", lambda options: seen.append(options) or 0)
    assert status_of(["prove", *words.split()]) == 0
    assert (seen[0].script, seen[0].ranks) == ("train.py", ranks)
    monkeypatch.setattr(run_module, "_is_there", lambda *_: True)
    assert run_module.checked_script("prove", seen[0]) == own.split()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("train.py --ranks 3 --lr 1", ["--ranks"]),
        ("train.py --steps=2 --json", ["--steps=2", "--json"]),
        ("train.py --lr 1", []),
        ("train.py -- --ranks 3", []),
    ],
)
def test_options_of_the_command_that_go_to_the_script_are_told(words: str, told: list[str], monkeypatch: Any, capsys: Any) -> None:
    module = importlib.import_module(COMMANDS["prove"][0])
    monkeypatch.setattr(module, "run", lambda options: 0)
    assert status_of(["prove", *words.split()]) == 0
    said = capsys.readouterr().err.splitlines()
    assert said == [f"fsdp2 prove: {each} goes to the script; an option of the command comes before the script" for each in told]


def test_diff_tells_runs_that_differ_from_folders_that_are_not_there(tmp_path: Path, capsys: Any) -> None:
    said = {"checksum": 1, "squares": 4.0, "sketch": [1.0] * 4, "replica": 0, "eps": 1e-7}
    for name, checksum in (("a", 1), ("same", 1), ("other", 2)):
        line = {"step": 1, "parameters": {}, "gradients": {}, "update": {"0": {"w": {**said, "checksum": checksum}}}}
        (tmp_path / name).mkdir()
        (tmp_path / name / "record.rank0.jsonl").write_text(f"{json.dumps(line)}\n")
    statuses = {name: main(["diff", str(tmp_path / "a"), str(tmp_path / name)]) for name in ("same", "other", "absent")}
    assert statuses == {"same": 0, "other": 1, "absent": 2}
    assert capsys.readouterr().out
    assert main(["diff", "--quiet", str(tmp_path / "a"), str(tmp_path / "other")]) == 1
    assert not capsys.readouterr().out


def test_explain_shows_sections_of_the_troubleshooting_page(capsys: Any) -> None:
    assert main(["explain"]) == 0
    titles = capsys.readouterr().out.splitlines()
    page = (Path(__file__).parents[1] / "docs" / "troubleshooting.md").read_text()
    assert titles == [line.lstrip("# ").replace("`", "") for line in page.splitlines() if line.startswith(("## ", "### "))]
    assert main(["explain", "loss", "nan"]) == 0
    said = capsys.readouterr().out.strip()
    assert said.startswith("### The loss is NaN\n")
    assert said in page
    assert main(["explain", "mesherror"]) == 0
    assert "*Fix*: slice" in capsys.readouterr().out
    assert main(["explain", "fsdp2.errors.MeshError:"]) == 0
    assert main(["explain", "rendezvous"]) == 2  # neither a title nor a text has it
    capsys.readouterr()
    assert main(["explain", "nan"]) == 0  # as a word, and not as a part of others
    assert capsys.readouterr().out.startswith("### The loss is NaN\n")


def explained(*words: str) -> list[str]:
    """The titles of the sections that ``fsdp2 explain`` shows."""
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        assert main(["explain", *words]) == 0, words
    return re.findall("^#{2,3} (.*)", shown.getvalue(), re.MULTILINE)


def next_to_a_sharded_one(dim: int) -> nn.Module:
    """A plain module with a plain and a sharded layer."""
    return nn.Sequential(nn.Linear(dim, dim), fsdp2.fully_shard(nn.Linear(dim, dim), mesh=cpu_mesh()))


@on_ranks(2)
@pytest.mark.filterwarnings("ignore:.*has no no_sync")
def test_explain_finds_raw_texts_of_torch_as_they_are_pasted() -> None:
    """These reach the user as they are: torch raises them before it calls anything of fsdp2."""
    model = fsdp2.fully_shard(nn.Linear(2, 2), mesh=cpu_mesh())
    impatient = dist.new_group(backend="gloo", timeout=timedelta(seconds=3))
    raised: dict[str, Callable[[], object]] = {
        "no_sync": lambda: model.no_sync(),
        "got mixed torch.Tensor and DTensor": lambda: nn.Linear(2, 2).load_state_dict(model.state_dict()),
        "Cannot flatten unevenly": lambda: DistributedDataParallel(next_to_a_sharded_one(3)),
        "mixed torch.Tensor and DTensor": lambda: DistributedDataParallel(next_to_a_sharded_one(2)),
        "c10d.broadcast_": lambda: DistributedDataParallel(nn.Sequential(next_to_a_sharded_one(2)[1])),
    }
    if dist.get_rank() == 0:
        raised["Timed out waiting"] = lambda: dist.all_reduce(torch.ones(1), group=impatient)
    if not dist.is_nccl_available():
        raised["NCCL built in"] = lambda: dist.new_group(backend="nccl", timeout=timedelta(minutes=1))
    if not torch.backends.cuda.is_built():
        raised["not compiled with CUDA"] = lambda: torch.ones(1, device="cuda")
        with pytest.raises(
            fsdp2.errors.DeviceError, match=r"the mesh is of cuda devices, and there are none[^?]*init_process_group\(\"gloo"
        ):
            fsdp2.fully_shard(nn.Linear(2, 2), mesh=DeviceMesh.from_group(impatient, "cuda", mesh_dim_names=("shard",)))
    texts = {"Connection closed by peer": "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:2950"}
    for words, call in raised.items():
        with pytest.raises((AssertionError, AttributeError, RuntimeError)) as caught:
            call()
        texts[words] = f"{type(caught.value).__name__}: {caught.value}"
    dist.barrier()
    for words, text in texts.items():
        for pasted in ([text], text.split()):
            found = explained(*pasted)
            assert len(found) == 1, (text, found)
            assert words.casefold() in found[0].casefold(), text


@on_ranks(1)
def test_python_itself_names_the_method_that_a_misspelt_one_is_like() -> None:
    model = fsdp2.fully_shard(nn.Linear(2, 2), mesh=cpu_mesh())
    for name in vars(fsdp2.FSDPModule):
        if name.startswith(("set_", "reset_", "unshard_")):
            with pytest.raises(AttributeError) as caught:
                getattr(model, name[:5] + name[6:])
            with contextlib.redirect_stderr(io.StringIO()) as shown:
                sys.__excepthook__(type(caught.value), caught.value, None)
            assert f"Did you mean: '{name}'?" in shown.getvalue()


def test_what_a_script_under_parity_gets_is_what_was_typed(tmp_path: Path, monkeypatch: Any) -> None:
    import fsdp2.migrate.parity as parity

    given: list[str] = []
    monkeypatch.setattr(parity, "compare", lambda script, arguments, *_: given.extend(arguments) or 0)
    typed = ["http://h//a", "./b/", "c//d"]
    assert main(["migrate", "--parity", "train.py", "--", *typed]) == 0
    assert given == typed


def test_an_error_of_ours_in_a_program_that_runs_has_its_lines(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import fsdp2\ndef train():\n    fsdp2.fully_shard(3)\ntrain()\n")
    done = subprocess.run([sys.executable, "-m", "fsdp2", "run", "program.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "line 3, in train" in done.stderr


def test_the_version_and_a_program_that_runs_with_fsdp2_for_torch(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import sys\nfrom torch.distributed.fsdp import fully_shard\n"
        "print(__name__, fully_shard.__module__, sys.argv[1:])\nsys.exit(3)\n"
    )
    for words, status, out in (
        (["--version"], 0, f"fsdp2 {importlib.metadata.version('fsdp2')}, torch {importlib.metadata.version('torch')}"),
        (["run", "program.py", "--lr", "1"], 3, "__main__ fsdp2.api ['--lr', '1']"),
    ):
        done = subprocess.run([sys.executable, "-m", "fsdp2", *words], cwd=tmp_path, capture_output=True, text=True)
        assert (done.returncode, done.stdout.strip()) == (status, out), done.stderr
