"""The GitHub action of docs/prove.md: its inputs reach the command, and the command's verdict its summary and its status."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".github" / "actions" / "prove"


def action() -> dict[str, Any]:
    return YAML(typ="safe").load(FOLDER / "action.yml")


def test_the_page_and_the_steps_name_the_inputs_that_there_are() -> None:
    said = action()
    used = set(re.findall(r"inputs\.([\w-]+)", str(said["runs"]["steps"])))
    page = (ROOT / "docs" / "prove.md").read_text()
    assert set(said["inputs"]) == used
    assert all(f"`{name}`" in page for name in (*said["inputs"], *said["outputs"]))
    assert not any("${{" in step["run"] for step in said["runs"]["steps"])  # a shell would run what an input says


@pytest.mark.slow
def test_the_verdict_is_its_summary_and_its_status(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys\nraise SystemExit(f'got {sys.argv[1:]}')\n")
    step = action()["runs"]["steps"][-1]
    files = {name: str(tmp_path / name) for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY", "VERDICT")}
    given = {"SCRIPT": "train.py", "ARGUMENTS": "--lr 1", "RANKS": "1", "STEPS": "2", "ORDERS": "0"}
    assert given.keys() | {"VERDICT"} == step["env"].keys()
    paths = {
        "PATH": [str(Path(sys.executable).parent), os.environ["PATH"]],
        "PYTHONPATH": [str(ROOT), os.environ.get("PYTHONPATH", "")],
    }
    environment = os.environ | files | given | {name: os.pathsep.join(filter(None, each)) for name, each in paths.items()}
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    summary = Path(files["GITHUB_STEP_SUMMARY"]).read_text()
    assert "not run" in summary
    assert "got ['--lr', '1']" in summary
