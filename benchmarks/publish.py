"""What does it cost to hand a consumer every whole parameter: ``fsdp2.publish`` against ``full_tensor()`` of each parameter?

500 parameters in 50 units, on torch's own FSDP2 for both, so that only the gathering differs; every tensor is looked at and dropped.
Collectives, their bytes, bytes copied and the peak above the model are of one more pass, seen by torch's dispatcher.
"""

from __future__ import annotations

import argparse
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import common
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import fsdp2

NUM_UNITS, LINEARS_A_UNIT = 50, 5
TARGET = common.Target(0.2)
COPIES = ("cat", "copy_", "_to_copy", "clone", "split_with_sizes_copy")


class Cost(TorchDispatchMode):
    """Inside: ``collectives``, and MiB ``received`` by them, ``copied`` by operators that copy, and at the ``peak``."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._of_model = {param.to_local().untyped_storage().data_ptr() for param in model.parameters()}
        self.collectives = 0
        self.received = self.copied = self.peak = 0.0
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if any(issubclass(each, torch.distributed.tensor.DTensor) for each in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        made = [each for each in tree_iter(result) if isinstance(each, Tensor) and type(each) is Tensor]
        name = func._schema.name.split("::")[1]
        if "allgather" in name or "all_gather" in name:
            self.collectives += 1
            self.received += (
                sum(each.nbytes for each in made or [each for each in tree_iter(args[:1]) if isinstance(each, Tensor)]) / 2**20
            )
        if name in COPIES:
            self.copied += sum(each.nbytes for each in made) / 2**20
        self._alive |= {id(each.untyped_storage()): weakref.ref(each.untyped_storage()) for each in made}
        self._alive = {key: each for key, each in self._alive.items() if each() is not None}
        alive = [
            storage for each in self._alive.values() if (storage := each()) is not None and storage.data_ptr() not in self._of_model
        ]
        self.peak = max(self.peak, sum(each.nbytes() for each in alive) / 2**20)
        return result


def built(width: int, mesh: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(*(nn.Linear(width, width) for _ in range(LINEARS_A_UNIT))) for _ in range(NUM_UNITS)))
    for unit in model:
        torch.distributed.fsdp.fully_shard(unit, mesh=mesh)
    torch.distributed.fsdp.fully_shard(model, mesh=mesh)
    return model


def run_rank(rank: int, options: argparse.Namespace, directory: str) -> None:
    """One rank; rank 0 reports. Collective: yes, over the world."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{directory}/store", options.world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=options.world)
    mesh = init_device_mesh("cpu", (options.world,))
    for width in (64, 256):
        model = built(width, mesh)
        for dtype in (None, torch.bfloat16):
            weights = fsdp2.publish(model, dtype=dtype)

            def one_by_one(model: nn.Module = model, dtype: torch.dtype | None = dtype) -> Iterator[tuple[str, Tensor]]:
                with torch.no_grad():
                    for name, param in model.named_parameters():
                        whole = param.full_tensor()
                        yield name, whole if dtype is None else whole.to(dtype)

            ours, theirs = dict(weights), dict(one_by_one())
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
            del ours, theirs
            ways: dict[str, Callable[[], Any]] = {common.OURS: weights.__iter__, common.UPSTREAM: one_by_one}
            timed = {name: common.slowest_rank(lambda each=each: [None for _ in each()]) for name, each in ways.items()}
            samples = common.interleave(timed, options.rounds or (5 if options.quick else 15), warmup=2)
            costs = {}
            for name, each in ways.items():
                with Cost(model) as cost:
                    for _ in each():
                        pass
                costs[name] = {
                    "collectives": cost.collectives,
                    **{what: round(getattr(cost, what), 2) for what in ("received", "copied", "peak")},
                }
                if rank == 0:
                    print(f"    {name}: {costs[name]} (MiB)")
            if rank == 0:
                whole_mib = sum(param.numel() for param in model.parameters()) * 4 / 2**20
                case = f"{width} wide, {whole_mib:.0f} MiB in fp32, {'fp32' if dtype is None else 'bf16'} sent"
                common.report(
                    common.Result.of(
                        "publish",
                        f"500 whole parameters, {options.world} ranks",
                        case,
                        "ms",
                        samples,
                        TARGET if options.world == 2 else None,
                        cost=costs,
                    ),
                    options.json,
                )
    dist.destroy_process_group()


def main() -> None:
    arguments = common.parser(__doc__)
    arguments.add_argument("--world", type=int, default=2, help="number of processes; the target is for 2")
    arguments.add_argument("--rounds", type=int, help="samples of each way")
    options = arguments.parse_args()
    common.start(options, __doc__)
    common.on_ranks(run_rank, options)


if __name__ == "__main__":
    main()
