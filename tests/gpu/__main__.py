"""Check fsdp2 on GPUs, one or several: ``python tests/gpu`` from the checkout, or ``make gpu``.

    python tests/gpu                       # everything that this computer's GPUs can show; minutes
    python tests/gpu --list                # the names of all checks
    python tests/gpu --only graph races    # those whose names contain one of these
    python tests/gpu --budget 60           # minutes; 15 by default, and a check that would begin later is skipped
    python tests/gpu --device pretend      # what can be shown without a GPU: this program's own test

It prints a table and writes results.json and results.md, again after each check. The last line says in words what was shown. The exit
status is 0 if nothing failed, 1 if a check failed, and 3 if there is no GPU, in which case nothing was checked.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

if __package__ in (None, ""):
    # ``python tests/gpu`` puts tests/gpu into sys.path; its modules are known as gpu.*, and harness lies beside it.
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    sys.path.insert(0, os.path.dirname(sys.path[0]))

from gpu.catalogue import CHECKS
from gpu.device import PRETEND, count, describe
from gpu.report import SEND, in_words, show_table, write
from gpu.running import Row, run_all

NO_GPU = 3


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python tests/gpu", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", choices=["cuda", PRETEND], default="cuda")
    parser.add_argument("--only", nargs="+", metavar="PART_OF_NAME", help="checks whose names contain one of these")
    parser.add_argument("--budget", type=float, default=15.0, metavar="MINUTES", help="no check begins later than this")
    parser.add_argument("--list", action="store_true", help="print the names and run nothing")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="the folder for results.json and results.md")
    options = parser.parse_args(arguments)
    checks = [each for name, each in CHECKS.items() if not options.only or any(part in name for part in options.only)]
    checks.sort(
        key=lambda each: (not each.is_first, each.part, str(each.setup))
    )  # those of one setup share processes; stable in the rest
    if options.list:
        for each in checks:
            print(f"{each.name:60}  {each.title}")
        return 0
    if count(options.device) == 0:
        print("There is no CUDA device here, or this torch was built without CUDA, so nothing was checked.")
        return NO_GPU
    about = describe(options.device)

    so_far: list[Row] = []

    def tell(row: Row) -> None:
        print(f"{row.status:4}  {row.title}  ({row.seconds:.1f} s)", flush=True)
        so_far.append(row)
        write(so_far, about, options.out)

    rows = run_all(checks, options.device, tell, budget_s=options.budget * 60)
    show_table(rows, about)
    paths = write(rows, about, options.out)
    print(SEND.format(names=" and ".join(map(str, paths))))
    print(in_words(rows, about))
    return 1 if any(row.status == "fail" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
