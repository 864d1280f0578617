"""Does fsdp2 beat upstream FSDP2 where DESIGN says it has to? Runs every benchmark and prints one table.

    python benchmarks/run.py            every figure, minutes
    python benchmarks/run.py --quick    fewer and smaller samples, wider spreads
    python benchmarks/run.py --only host_time python_calls

A missed target is marked and is no failure; a script that crashes is, and makes the exit status 1.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import common

SCRIPTS = (
    "host_time",
    "python_calls",
    "optimizer",
    "muon",
    "optimizer_memory",
    "train_step",
    "memory_passes",
    "transient_memory",
    "gloo_step",
    "compile",
    "full_graph",
    "strategies",
    "import_time",
    "load_safetensors",
    "checkpoints",
    "doctor",
    "inspector",
    "many_ranks",
    "publish",
)


def run_script(name: str, arguments: list[str]) -> int:
    """Run one benchmark, show what it prints except the JSON lines, and return its exit status."""
    command = [sys.executable, str(Path(__file__).with_name(f"{name}.py")), *arguments]
    begin = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith("{"):
                print(line, end="", flush=True)
    print(f"  [{name}: {time.perf_counter() - begin:.0f} s, exit status {process.returncode}]\n", flush=True)
    return process.returncode


def main() -> int:
    arguments = common.parser(__doc__)
    arguments.add_argument("--only", nargs="+", choices=SCRIPTS, default=SCRIPTS, help="the benchmarks to run")
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        collected = Path(directory) / "results.jsonl"
        collected.touch()
        passed_on = ["--json", str(collected), "--implementations", *options.implementations]
        if options.quick:
            passed_on.append("--quick")
        crashed = [name for name in options.only if run_script(name, passed_on) != 0]
        lines = collected.read_text().splitlines()
    if options.json is not None:
        with options.json.open("a") as file:
            file.writelines(line + "\n" for line in lines)
    results = [common.Result.from_json(line) for line in lines]
    print(common.table(results))
    verdicts = [result.verdict() for result in results]
    print(f"\n{verdicts.count('stretch')} stretch, {verdicts.count('met')} met, {verdicts.count('MISSED')} missed")
    if crashed:
        print("crashed: " + ", ".join(crashed), file=sys.stderr)
    return 1 if crashed else 0


if __name__ == "__main__":
    sys.exit(main())
