"""Run a program with fsdp2 in the place of torch's FSDP2: ``python -m fsdp2.run script.py args...``.

    torchrun --nproc-per-node 8 -m fsdp2.run train.py --config llama.toml
    torchrun --nproc-per-node 8 -m fsdp2.run -m torchtitan.train --config llama.toml
    python -m fsdp2.run --fsdp1 old_script.py         # FSDP1's names as well

The program sees its own ``sys.argv`` and ``__main__``, as if Python had been given it.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys

from .installation import install


def main(arguments: list[str] | None = None) -> None:
    """Install, say so once on rank 0, and run the script or module that ``arguments`` (None: the command line) name."""
    parser = argparse.ArgumentParser(prog="python -m fsdp2.run", description="Run a program on fsdp2 instead of torch's FSDP2.")
    parser.add_argument("--fsdp1", action="store_true", help="FSDP1's names as well, by fsdp2.compat")
    parser.add_argument("-m", dest="is_module", action="store_true", help="PROGRAM is a module, as for python -m")
    parser.add_argument("program", metavar="PROGRAM", help="a Python file, or with -m a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments")
    options = parser.parse_args(arguments)
    installation = install(fsdp1=options.fsdp1)
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"{installation!r}\n")
    sys.argv = [options.program, *options.arguments]
    if options.is_module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(options.program, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(options.program)))
        runpy.run_path(options.program, run_name="__main__")


if __name__ == "__main__":
    main()
