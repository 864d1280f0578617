"""How long do 4, 8 and 64 ranks of this machine take to start, and to train four blocks for four steps with true numbers?

Wall time of a whole ``run_ranks``, forks and process groups included, of HSDP on gloo (64 ranks: 8 x 8), and the memory that a rank
has for itself. The target for 64 ranks is absolute: three minutes on two cores.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import common
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from fsdp2.ranks import Rank, run_ranks

MESHES = {4: (2, 2), 8: (2, 4), 64: (8, 8)}
WIDTH = 64


def block() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


def train(rank: Rank) -> float:
    """Returns: bytes that this process shares with no other"""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", MESHES[rank.num_ranks], mesh_dim_names=("replicate", "shard"))
    model = nn.Sequential(*(block() for _ in range(4)))
    for each in model:
        fsdp2.fully_shard(each, mesh=mesh)
    fsdp2.fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(4):
        model(torch.randn(2, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024.0 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


def run_of(num_ranks: int, private_nbytes: list[float]) -> Callable[[], float]:
    def seconds() -> float:
        begin = time.perf_counter()
        ranks = run_ranks(num_ranks, train, limit_s=900)
        took = time.perf_counter() - begin
        assert ranks.status == 0, ranks.first_failed
        private_nbytes.append(max(end.result for end in ranks))
        return took

    return seconds


def main() -> None:
    options = common.parser(__doc__).parse_args()
    common.start(options, __doc__)
    for num_ranks in MESHES:
        private_nbytes: list[float] = []
        rounds = 1 if options.quick or num_ranks == 64 else 3
        samples = common.interleave({common.OURS: run_of(num_ranks, private_nbytes)}, rounds, warmup=0)
        case = f"{num_ranks} ranks"
        target = common.Target(180.0, of="ours") if num_ranks == 64 else None
        common.report(common.Result.of("many_ranks", "start and four steps", case, "s", samples, target), options.json)
        memory = {common.OURS: [each / 2**20 for each in private_nbytes]}
        common.report(common.Result.of("many_ranks", "a rank's own memory", case, "MiB", memory), options.json)


if __name__ == "__main__":
    main()
