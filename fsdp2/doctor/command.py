"""``fsdp2 doctor train.py -- args``: a script's first steps on CPU ranks of this machine, with every check on.

    fsdp2 doctor --ranks 2 --steps 3 train.py -- --config tiny.toml

The script runs as under torchrun; ``patient.py`` is what each rank runs. Its devices are hidden: it must be able to train on the CPU.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile

from ..errors import ArgumentError
from .patient import FOLDER


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="processes on this machine (default: 2)")
    parser.add_argument(
        "--steps", type=int, default=3, metavar="N", help="optimizer steps after which the script is ended (default: 3)"
    )
    parser.add_argument("--strict", action="store_true", help="exit status 1 if there is a finding")
    parser.add_argument("script", metavar="SCRIPT", help="a Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="-- ARGS", help="the script's own arguments")


def run(options: argparse.Namespace) -> int:
    """1 where the script fails, else its status where that is not 0; else 0, or 1 with ``--strict`` and findings."""
    if not os.path.isfile(options.script) or options.ranks < 1 or options.steps < 1:
        raise ArgumentError(
            f"doctor got {options.script!r}, --ranks {options.ranks}, --steps {options.steps}",
            expected="a file of Python, and positive numbers",
            fix="for instance: fsdp2 doctor --ranks 2 train.py -- --lr 0.1",
        )
    arguments = options.arguments[1:] if options.arguments[:1] == ["--"] else options.arguments
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={options.ranks}"]
    patient = ["-m", "fsdp2.doctor.patient", str(options.steps), str(int(options.strict)), options.script, *arguments]
    with tempfile.TemporaryDirectory() as folder:
        environment = {"OMP_NUM_THREADS": "1"} | os.environ | {"CUDA_VISIBLE_DEVICES": "", FOLDER: folder}
        return subprocess.run([*launcher, *patient], env=environment, check=False).returncode
