"""What does a step of Muon on sharded matrices cost, where each matrix goes to one owner, or is gathered on every rank?

Transformer blocks over real gloo ranks, one thread each. ``ours`` is ``fsdp2.optim.Muon``; ``upstream`` is the usual way: every rank
all-gathers every update and makes it orthogonal itself, by the same function, with the same values. The figures are the processor time
of a rank's step, its threads for communication included, and the bytes that a rank receives from others in a step.

With ``--package``, ``upstream`` is the Muon of the package ``muon-fsdp2`` instead (to be installed; nothing else needs it): it
gathers each update in fp32 on one rank, dealt in turn, and scatters the result. It runs without the compiler, as ours does.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import common
import models
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp2.optim import Muon
from fsdp2.optim.muon import orthogonalized

LR, DECAY, MOMENTUM, COEFFICIENTS, NUM_STEPS, EPS = 0.02, 0.1, 0.95, (3.4445, -4.775, 2.0315), 5, 1e-7


class GatheringMuon:
    """Muon for matrices cut evenly on dim 0, as a loop over them."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.params = params
        self.momenta = [torch.zeros_like(param.to_local()) for param in params]

    @torch.no_grad()
    def step(self) -> None:
        for param, momentum in zip(self.params, self.momenta, strict=True):
            grad, local = param.grad.to_local(), param.to_local()
            momentum.lerp_(grad, 1 - MOMENTUM)
            update = grad.lerp(momentum, MOMENTUM).bfloat16()
            whole = torch.empty(param.shape, dtype=update.dtype)
            dist.all_gather_into_tensor(whole.view(torch.uint8), update.view(torch.uint8))
            own = orthogonalized(whole, COEFFICIENTS, NUM_STEPS, EPS).chunk(dist.get_world_size())[dist.get_rank()]
            rows, columns = param.shape
            local.mul_(1 - LR * DECAY).add_(own, alpha=-LR * max(1, rows / columns) ** 0.5)


def muon_of_package(params: list[nn.Parameter]) -> Callable[[], object]:
    """A step of the package's optimizer, which clobbers the gradients that it is given."""
    import muon_fsdp2  # here: only this comparison needs it

    options = {"lr": LR, "momentum": MOMENTUM, "weight_decay": DECAY, "nesterov": True, "rms_scale": False, "ns_steps": NUM_STEPS}
    optimizer = muon_fsdp2.Muon([{"params": params, "use_muon": True, **options}])
    grads = [param.grad.clone() for param in params]

    def step() -> None:
        with torch.compiler.set_stance("force_eager"):
            for param, grad in zip(params, grads, strict=True):
                param.grad.copy_(grad)
            optimizer.step()

    return step


def received_by(function: Callable[[], object]) -> int:
    """Bytes that this rank receives from others in collectives of ``function``."""
    nbytes = 0
    all_to_all, all_gather, gather, scatter = dist.all_to_all_single, dist.all_gather_into_tensor, dist.gather, dist.scatter

    def counted_all_to_all(output: torch.Tensor, given: torch.Tensor, sizes: list[int], *args: Any, **options: Any) -> Any:
        nonlocal nbytes
        nbytes += sum(size for rank, size in enumerate(sizes) if rank != dist.get_rank())
        return all_to_all(output, given, sizes, *args, **options)

    def counted_all_gather(output: torch.Tensor, given: torch.Tensor) -> Any:
        nonlocal nbytes
        nbytes += output.nbytes - given.nbytes
        return all_gather(output, given)

    def counted_gather(given: torch.Tensor, gather_list: list[torch.Tensor] | None = None, **options: Any) -> Any:
        nonlocal nbytes
        nbytes += sum(each.nbytes for each in (gather_list or [])[1:])  # all but its own
        return gather(given, gather_list, **options)

    def counted_scatter(output: torch.Tensor, scatter_list: list[torch.Tensor] | None = None, **options: Any) -> Any:
        nonlocal nbytes
        nbytes += output.nbytes if scatter_list is None else 0
        return scatter(output, scatter_list, **options)

    counted = {"all_to_all_single": counted_all_to_all, "all_gather_into_tensor": counted_all_gather}
    with contextlib.ExitStack() as stack:
        for name, replacement in counted.items():
            stack.enter_context(mock.patch.object(dist, name, replacement))
        package = sys.modules.get("muon_fsdp2")
        if package is not None:  # it has taken these two by name
            stack.enter_context(mock.patch.object(package, "gather", counted_gather))
            stack.enter_context(mock.patch.object(package, "scatter", counted_scatter))
        function()
    return nbytes


def run_rank(rank: int, options: argparse.Namespace, directory: str) -> None:
    """One rank; rank 0 reports. Collective: yes, over the world."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{directory}/store", options.world), rank=rank, world_size=options.world)
    mesh = init_device_mesh("cpu", (options.world,))
    steps: dict[str, Callable[[], object]] = {}
    trained: dict[str, list[nn.Parameter]] = {}
    for name in (common.UPSTREAM, common.OURS):
        torch.manual_seed(0)
        model = common.shard(models.transformer_stack(2 if options.quick else 6, 256), [], common.OURS, mesh)
        trained[name] = matrices = [param for param in model.parameters() if param.dim() == 2]
        for param in matrices:
            param.grad = torch.randn_like(param)
        if name == common.OURS:
            steps[name] = Muon(matrices, lr=LR, weight_decay=DECAY).step
        else:
            steps[name] = muon_of_package(matrices) if options.package else GatheringMuon(matrices).step
    nbytes = {name: [received_by(step) / 2**20] for name, step in steps.items()}
    samples = common.interleave(
        {name: common.slowest_rank(step, time.process_time) for name, step in steps.items()}, 5 if options.quick else 20, warmup=1
    )
    pairs = zip(trained[common.OURS], trained[common.UPSTREAM], strict=True)
    difference = max(float((one.to_local() - other.to_local()).abs().max()) for one, other in pairs)
    if rank == 0:
        for figure, unit, values in (("step of Muon, processor time", "ms", samples), ("step of Muon, received", "MiB", nbytes)):
            against = "muon-fsdp2" if options.package else "a loop of all-gathers"
            details = {"against": against, "num_matrices": len(trained[common.OURS]), "largest_difference": difference}
            common.report(common.Result.of("muon", figure, f"{options.world} ranks", unit, values, None, **details), options.json)
    dist.destroy_process_group()


def main() -> None:
    arguments = common.parser(__doc__)
    arguments.add_argument("--world", type=int, default=4, help="number of processes")
    arguments.add_argument("--package", action="store_true", help="compare with the package muon-fsdp2")
    options = arguments.parse_args()
    common.start(options, __doc__)
    common.on_ranks(run_rank, options)


if __name__ == "__main__":
    main()
