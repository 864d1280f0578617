"""Try torch's FSDP2 on the pretend accelerator, rank 0 of four, in random orders: ``python tests/court``.

    python tests/court                     # each single way of training, 8 orders each
    python tests/court --random 0:100      # 100 random programs as well
    python tests/court --only meshes hsdp  # some single ways
    python tests/court --ours              # the same programs on fsdp2

A line a program says "right", "refused: ..." (raised in the order in which work is queued), or "WRONG with seeds ...", with the
program of docs/court/ that shows the same alone. The exit status is 1 if something went wrong that has none.
"""

from __future__ import annotations

import argparse
import collections
import os
import sys
import time
import warnings

if __package__ in (None, ""):
    # ``python tests/court`` puts tests/court into sys.path; its modules are known as court.*, next to harness.
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp

import fsdp2
from court.programs import FOUND, SINGLE, draw, on_four
from court.trial import tried
from fsdp2.testing import pretend


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/court", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--random", default="0:0", metavar="FIRST:LAST", help="random programs, by number; LAST is not run")
    parser.add_argument("--only", nargs="*", default=list(SINGLE), metavar="NAME", help="single ways of training, else all")
    parser.add_argument("--orders", type=int, default=8, help="of each program")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no program later than this")
    parser.add_argument("--ours", action="store_true", help="judge fsdp2 instead")
    options = parser.parse_args()
    first, last = map(int, options.random.split(":"))
    programs = {name: SINGLE[name] for name in options.only} | {f"random {number}": draw(number) for number in range(first, last)}
    warnings.simplefilter("ignore")
    pretend.activate()
    dist.init_process_group(pretend.MODEL, store=dist.HashStore(), rank=0, world_size=4)
    fully_shard = fsdp2.fully_shard if options.ours else torch_fsdp.fully_shard
    end = time.monotonic() + options.minutes * 60
    counts: collections.Counter[str] = collections.Counter()
    for number, (name, program) in enumerate(programs.items()):
        if time.monotonic() > end:
            print(f"stopped before {name}")
            break
        verdict = tried(on_four(program), range(number * options.orders, (number + 1) * options.orders), fully_shard)
        counts.update(programs=1, orders=0 if verdict.refusal else options.orders, refused=bool(verdict.refusal))
        counts["wrong, as docs/court/ says" if name in FOUND else "wrong"] += bool(verdict.wrong)
        more = f" (docs/court/{FOUND[name]}.py)" if name in FOUND else f"\n  {program}" if name not in SINGLE else ""
        print(f"{name}: {verdict}{more if verdict.wrong else ''}", flush=True)
    print(f"torch {torch.__version__}: {dict(counts)}")
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
