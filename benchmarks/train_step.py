"""How long does a step of the training example take with each of its optimizers, compared with torch's FSDP2 with torch's AdamW?

``examples/train_lm.py``'s model at its default size on real gloo ranks, one thread each: forward, backward, clipping, optimizer.
``upstream`` is the same program with torch's ``fully_shard``, ``clip_grad_norm_`` and ``AdamW``. Each optimizer takes turns with it in
one process, and the slowest rank counts.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import common
import torch
import torch.distributed as dist
import torch.multiprocessing
import train_lm
from torch import nn

ARGUMENTS = {"seed": 0, "layers": 3, "width": 128, "heads": 4, "hsdp": False, "lr": 4e-3, "weight_decay": 0.1}
BATCH, CONTEXT, CLIP = 16, 128, 1.0


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, rows: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        train_lm.next_byte_loss(model, rows).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return step


def upstream_model(args: Namespace) -> nn.Module:
    torch.manual_seed(args.seed)
    model = train_lm.GPT(args.layers, args.width, args.heads)
    return common.shard(model, list(model.blocks), common.UPSTREAM, None)


def run_rank(rank: int, options: Namespace, directory: str) -> None:
    """One rank; rank 0 reports. Collective: yes, over the world."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{directory}/store", options.world), rank=rank, world_size=options.world)
    device = torch.device("cpu")
    rows = torch.randint(256, (BATCH // options.world, CONTEXT + 1), generator=torch.Generator().manual_seed(rank))
    for name in ("adamw", "flat-adamw", "anyprecision", "muon"):
        args = Namespace(**ARGUMENTS, optimizer=name)
        ours, theirs = train_lm.sharded_model(args, device), upstream_model(args)
        adamw = train_lm.make_optimizer(Namespace(**ARGUMENTS, optimizer="adamw"), theirs)
        steps = {
            common.UPSTREAM: common.slowest_rank(step_of(theirs, adamw, rows)),
            common.OURS: common.slowest_rank(step_of(ours, train_lm.make_optimizer(args, ours), rows)),
        }
        samples = common.interleave(steps, 10 if options.quick else 40, warmup=3)
        if rank == 0:
            common.report(common.Result.of("train_step", f"step with {name}", f"{options.world} ranks", "ms", samples), options.json)
    dist.destroy_process_group()


def main() -> None:
    arguments = common.parser(__doc__)
    arguments.add_argument("--world", type=int, default=2, help="number of processes")
    options = arguments.parse_args()
    common.start(options, __doc__)
    common.on_ranks(run_rank, options)


if __name__ == "__main__":
    main()
