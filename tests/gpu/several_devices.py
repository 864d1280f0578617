"""Checks that need several devices: every way to start NCCL, every mesh, ranks that are slow at random, and what NCCL alone has."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn

import fsdp2
from gpu.check import Setup, Skip, check
from gpu.device import Device, Hostile
from gpu.one_device import RACES, STREAMS, TORCHS, disturbed, graph_capture, on_host, on_this_mesh, sharded, step, without_overlap
from harness.pretend_training import BF16, train
from harness.training import assert_equal_training, assert_same_bits, assert_same_tensors, forced, grads_of, own_chunk, sgd

ALL = Setup(ranks=0)
WITH_DEVICE_ID = Setup(ranks=0, backend="nccl", device_id=True)
STARTS = {
    f"{backend}, {'device_id' if device_id else 'lazy'}": Setup(ranks=0, backend=backend, device_id=device_id)  # type: ignore[arg-type]
    for backend in ("nccl", "mixed", "none")
    for device_id in (False, True)
}


def shape_of(name: str) -> tuple[int, ...]:
    ranks = dist.get_world_size()
    if name in ("halves", "reshard_to_half") and (ranks < 4 or ranks % 2 != 0):
        raise Skip(f"an even number of devices, at least 4: here are {ranks}")
    return {"flat": (), "halves": (2, ranks // 2), "replicas": (ranks, 1), "reshard_to_half": ()}[name]


@check("trains as torch's FSDP2 does, however NCCL was started", part=2, setups=STARTS, each={"plain": ("flat", "plain")})
def started_equal_to_torch(device: Device, mesh: str, name: str) -> None:
    several_equal_to_torch(device, mesh, name)


@check(
    "trains as torch's FSDP2 does",
    part=2,
    setup=WITH_DEVICE_ID,
    each={
        f"{mesh}_{scenario}": (mesh, scenario)
        for mesh in ("flat", "halves", "replicas", "reshard_to_half")
        for scenario in TORCHS
        if "hsdp" not in scenario
    },
)
def several_equal_to_torch(device: Device, mesh: str, name: str) -> None:
    """Sums are added in another order where what travels is laid out in another way; on two ranks there is one order only."""
    shape = shape_of(mesh)
    scenario = replace(RACES[name], mesh=shape)
    if mesh == "reshard_to_half":
        scenario = replace(scenario, options={**scenario.options, "reshard_after_forward": dist.get_world_size() // 2})
    ours, theirs = train(scenario, device.type), train(scenario, device.type, torch_fsdp.fully_shard)
    if "bf16" not in name:
        assert_equal_training(ours, theirs, ulps=256)
    else:
        assert_equal_training(ours, theirs, bound=1e-2, ulps=1 << 17)  # gradients of bf16 forwards; fp32 has 2**16 ulps in one of bf16


class Slow(nn.Module):
    """Hands on its input after a random time, of the host or of the device, that differs between ranks."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.chance = random.Random(dist.get_rank())
        self._device = [device]

    def forward(self, x: Tensor) -> Tensor:
        if self.chance.random() < 0.1:
            time.sleep(self.chance.random() * 0.005)
        if self.chance.random() < 0.1:
            self._device[0].start_late(self.chance.random() * 0.005)
        return x


@check(
    "bits stay with one stream late and new and freed memory full of NaN, over NCCL",
    part=2,
    setup=ALL,
    timeout_s=120,
    each={name: (name,) for name in RACES},
)
def races_over_nccl(device: Device, name: str) -> None:
    ranks = dist.get_world_size()
    if RACES[name].mesh == (2, 2) and ranks % 2 != 0:
        raise Skip(f"an even number of devices: here are {ranks}")
    scenario = replace(RACES[name], mesh=(2, ranks // 2)) if RACES[name].mesh == (2, 2) else on_this_mesh(RACES[name], ranks)
    expected = without_overlap(device, scenario)
    for seed, stream in enumerate(STREAMS):
        assert_same_bits(disturbed(device, scenario, Hostile(device, stream), seed), expected)


@check(
    "500 steps with ranks that are slow at random end where steps without end",
    part=2,
    setup=ALL,
    timeout_s=180,
    each={"one_communicator": (False,), "two_communicators": (True,)},
)
def random_delays(device: Device, separate: bool) -> dict[str, Any]:
    """separate: reduce-scatters have a communicator of their own, so that two of NCCL's kernels may wait for other ranks at a time"""
    num_steps = 500 if device.is_cuda else 4
    ends = []
    for is_slow in (False, True):
        torch.manual_seed(0)
        model = sharded(device)
        model.set_separate_reduce_scatter_group(separate)
        if is_slow:
            for block in model.blocks:
                slow = Slow(device)
                block.register_forward_pre_hook(lambda module, args, slow=slow: slow(args[0]))
                block.register_full_backward_hook(lambda module, grads, _, slow=slow: (slow(grads[0]),))
        optimizer = sgd(model.parameters())
        generator = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(num_steps):
            step(model, optimizer, torch.randn(3, 7, generator=generator).to(device.device))
        ends.append(on_host(model))
    assert_same_tensors(ends[1], ends[0], "value")
    return {"steps": num_steps}


class Choosing(nn.Module):
    """Rank 0 uses both layers, the others the first alone; nobody uses the third."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))

    def forward(self, x: Tensor, both: bool) -> Tensor:
        return self.layers[0](x) + self.layers[1](x) if both else self.layers[0](x)


@check("parameters that some ranks leave out get the mean of what the others have", part=2, setup=ALL)
def unused_parameters(device: Device) -> None:
    torch.manual_seed(0)
    reference = Choosing()
    torch.manual_seed(0)
    model = fsdp2.fully_shard(Choosing(), mesh=device.mesh())
    ranks = dist.get_world_size()
    x = torch.randn(3 * ranks, 7, generator=torch.Generator().manual_seed(1))
    model(own_chunk(x).to(device.device), dist.get_rank() == 0).square().mean().backward()
    for rank, rows in enumerate(x.chunk(ranks)):
        (reference(rows, rank == 0).square().mean() / ranks).backward()
    whole = {name: None if grad is None else grad.full_tensor().cpu() for name, grad in grads_of(model).items()}  # type: ignore[attr-defined]
    torch_grads = grads_of(reference)
    for name, grad in torch_grads.items():
        assert (whole[name] is None) == (grad is None), name
        if grad is not None:
            torch.testing.assert_close(whole[name], grad, msg=lambda text, name=name: f"{name}: {text}")


def trained(device: Device, prepare: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = sharded(device)
    prepare(model)
    optimizer = sgd(model.parameters())
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(10):
        step(model, optimizer, torch.randn(3, 7, generator=generator).to(device.device))
    device.synchronize()
    return on_host(model)


def close(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in ours.items():
        torch.testing.assert_close(value, expected[name], msg=lambda text, name=name: f"{name}: {text}")


@check("a separate process group for reduce-scatters changes no number", part=2, setup=ALL)
def separate_reduce_scatter_group(device: Device) -> None:
    expected = trained(device, lambda model: None)
    close(trained(device, lambda model: model.set_separate_reduce_scatter_group(True)), expected)


def in_symmetric_memory(model: Any, reductions: bool) -> None:
    """Of every unit, since the setter is not recursive. Reductions take it only where they add, which the setter looks at."""
    for module in [model, *model.blocks]:
        module.set_force_sum_reduction_for_comms(reductions)
        module.set_symm_mem_for_comm()


@check(
    "symmetric memory changes no number",
    part=2,
    setup=WITH_DEVICE_ID,
    each={"all_gathers": (False,), "reduce_scatters_too": (True,)},
    is_first=True,
)
def symmetric_memory(device: Device, reductions: bool) -> None:
    """Where the devices have it, an error in the setter is a failure."""
    device.needs_cuda("NCCL's symmetric memory")
    nccl: Any = torch.cuda.nccl
    if nccl.version() < (2, 27):
        raise Skip(f"NCCL 2.27: here is {'.'.join(map(str, nccl.version()))}")
    ranks = dist.get_world_size()
    if not all(torch.cuda.can_device_access_peer(device.device, other) for other in range(ranks) if other != device.device.index):
        raise Skip("devices that reach each other's memory")
    expected = trained(device, lambda model: None)
    close(trained(device, lambda model: in_symmetric_memory(model, reductions)), expected)


@check(
    "a step with NCCL is captured in a graph, and its replays train as eager steps do",
    part=2,
    setup=WITH_DEVICE_ID,
    each={"fp32": ({},), "bf16": (BF16,)},
    is_first=True,
)
def graph_capture_with_nccl(device: Device, options: dict[str, Any]) -> None:
    graph_capture(device, options)


@check("direct against packed all-gathers, time by bytes a rank", part=2, setup=ALL, timeout_s=600)
def direct_or_packed(device: Device) -> dict[str, Any]:
    """Figures: direct's time over packed's, for eight parameters of so many KiB a rank. Below 1 the plan should be direct."""
    figures = {}
    ranks = dist.get_world_size()
    for kib in (1, 4, 16, 64, 256, 1024) if device.is_cuda else (1, 4):
        times = {}
        for gather in ("direct", "packed"):
            model: Any = nn.ParameterList(torch.zeros(ranks, kib * 256) for _ in range(8))
            with forced(gather=gather):
                fsdp2.fully_shard(model, mesh=device.mesh())
            samples = []
            for _ in range(20 if device.is_cuda else 2):
                device.synchronize()
                dist.barrier()
                began = time.perf_counter()
                model.unshard()
                device.synchronize()
                samples.append(time.perf_counter() - began)
                model.reshard()
            times[gather] = statistics.median(samples)
        figures[f"{kib}_kib"] = times["direct"] / times["packed"]
    return figures
