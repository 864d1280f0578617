"""One rank of a batch of checks: ``python -m gpu.worker DEVICE RANK RANKS FOLDER CHECK...`` (``running.py`` starts it).

It appends a line to FOLDER/RANK.jsonl when a check begins and when it ends, and stops behind the first that fails.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gpu.catalogue import CHECKS
from gpu.check import Skip
from gpu.device import PRETEND, Device


def main() -> None:
    name, rank, ranks, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    checks = [CHECKS[each] for each in sys.argv[5:]]
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    path = folder / f"{rank}.jsonl"

    def tell(check: str, status: str, **more: Any) -> None:
        with path.open("a") as file:
            file.write(json.dumps({"check": check, "status": status, "at": time.time(), **more}) + "\n")

    device = Device(name)
    os.environ["FSDP2_TEST_DEVICE"] = name
    missing = None
    try:
        device.join(rank, ranks, checks[0].setup, str(folder / "store"))
    except Skip as skip:
        missing = str(skip)
    for check in checks:
        tell(check.name, "begin")
        began = time.perf_counter()
        try:
            if missing is not None:
                raise Skip(missing)
            torch.manual_seed(0)
            if name == PRETEND:
                from fsdp2.testing import pretend

                pretend.set_order(0)
            figures = check.run(device, *check.arguments)
            device.synchronize()
            gc.collect()
        except Skip as skip:
            tell(check.name, "skip", text=str(skip))
            continue
        except BaseException as error:
            traceback.print_exc()
            sys.stderr.flush()
            headline = (str(error).strip().splitlines() or [""])[0]
            tell(check.name, "fail", text=f"{type(error).__name__}: {headline}")
            os._exit(1)  # no orderly end: other ranks may wait in a collective
        tell(check.name, "pass", seconds=time.perf_counter() - began, figures=dict(figures or {}))
    with contextlib.suppress(Exception):
        if dist.is_initialized():
            dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main()
