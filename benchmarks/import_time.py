"""How long does ``import fsdp2`` take, once torch and its FSDP are imported, and does it pull in the compiler?

CPU time of the import statement in a fresh process each; next to it, what ``torch.distributed.fsdp`` takes over ``torch``. The
target is an absolute time. ``torch._dynamo`` takes longer than all the rest, so none of its modules may have been imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import common

# What each implementation adds to, and what it imports.
_IMPORTS = {common.UPSTREAM: ("torch", "torch.distributed.fsdp"), common.OURS: ("torch.distributed.fsdp", "fsdp2")}

_TIME_OF_IMPORT = """
import time, {base}
begin = time.process_time()
import {package}
print(time.process_time() - begin)
"""
_COUNT_OF_DYNAMO = """
import sys, {package}
print(sum(name.split(".")[:2] == ["torch", "_dynamo"] for name in sys.modules))
"""


def printed_by(program: str) -> float:
    """The number that ``program`` prints, in a fresh interpreter that finds this checkout's packages."""
    paths = [str(common.REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return float(done.stdout)


def importer(template: str, implementation: str) -> Callable[[], float]:
    base, package = _IMPORTS[implementation]
    program = template.format(base=base, package=package)
    return lambda: printed_by(program)


def main() -> None:
    options = common.parser(__doc__).parse_args()
    common.start(options, __doc__)
    rounds = 3 if options.quick else 9
    names = [name for name in options.implementations if name != common.PLAIN]
    for case, template, unit, bound, samples_wanted in (
        ("CPU time over its base", _TIME_OF_IMPORT, "s", 0.1, rounds),
        ("torch._dynamo modules loaded", _COUNT_OF_DYNAMO, "modules", 0.0, 1),
    ):
        functions = {name: importer(template, name) for name in names}
        samples = common.interleave(functions, samples_wanted, warmup=1 if samples_wanted > 1 else 0)
        result = common.Result.of("import_time", "import", case, unit, samples, common.Target(bound, of="ours"))
        common.report(result, options.json)


if __name__ == "__main__":
    main()
