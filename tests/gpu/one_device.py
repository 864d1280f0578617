"""Checks that one device is enough for: streams, races, equality with torch's FSDP2, host waits, memory, graphs, the compiler."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn

import fsdp2
from fsdp2.core.comm.streams import DeviceStreams, use_streams
from fsdp2.core.iteration import late_comparison
from fsdp2.core.iteration.unit import PrefetchDepth
from gpu.check import Setup, check
from gpu.device import Device, Hostile, Serial, late_waits, new_memory
from harness.models import batches, mlp
from harness.peak_memory import TransientBytes, peak_of_step, transient_bytes
from harness.places import place_of_caller, places_of
from harness.pretend_training import (
    BF16,
    MORE_SCENARIOS,
    SCENARIOS,
    SCENARIOS_2D,
    SCENARIOS_OF_DEPTH,
    SCENARIOS_OF_SEVERAL_GROUPS,
    Scenario,
    train,
)
from harness.training import Step, assert_same_bits, assert_same_tensors, sgd, state_of

FAKE_FOUR = Setup(ranks=4, backend="fake")
FAKE_EIGHT = Setup(ranks=8, backend="fake")
MODELLED_FOUR = Setup(ranks=4, backend="model")
RACES = {**SCENARIOS, **SCENARIOS_2D, **SCENARIOS_OF_DEPTH, **MORE_SCENARIOS, **SCENARIOS_OF_SEVERAL_GROUPS}
STREAMS = ("compute", "gather", "reduce", "all_reduce")
ORDERS = places_of(("order",))


# ---- streams ----


@check("work on a stream runs behind the event that it waits for", part=1)
def streams_order(device: Device) -> None:
    streams = DeviceStreams(device.device)
    for _ in range(5):
        x = torch.zeros(1 << 20, device=device.device)
        device.start_late()
        x.add_(1)
        streams.order(streams.gather, streams.mark(streams.compute))
        with streams.on(streams.gather):
            y = x * 2
            device.start_late()
            y.add_(1)
        streams.order(streams.compute, streams.mark(streams.gather))
        assert y.sum().item() == 3 * y.numel()


@check("the stream inside of `on` is the current one, and None is long past", part=1)
def streams_current(device: Device) -> None:
    streams = DeviceStreams(device.device)
    outside = streams.compute
    with streams.on(streams.reduce):
        assert streams.compute == streams.reduce
    assert streams.compute == outside
    assert len({streams.copy_in, streams.gather, streams.reduce, streams.all_reduce, outside}) == 5
    streams.order(streams.reduce, None)
    streams.synchronize(None)


@check("the host waits for an event, and for nothing behind it", part=1)
def streams_synchronize(device: Device) -> None:
    streams = DeviceStreams(device.device)
    pinned = torch.zeros(1 << 16, pin_memory=True)
    x = torch.ones(1 << 16, device=device.device)
    device.start_late()
    pinned.copy_(x, non_blocking=True)
    event = streams.mark(streams.compute)
    streams.synchronize(event)
    assert event.query()
    assert pinned.sum().item() == pinned.numel()


@check("a storage is freed and allocated again on the current stream", part=1)
def streams_resize(device: Device) -> None:
    streams = DeviceStreams(device.device)
    before = device.reset_peak()
    storage = torch.empty(4 << 20, dtype=torch.uint8, device=device.device).untyped_storage()
    assert device.module.memory_allocated() - before >= 4 << 20
    streams.resize(storage, 0)
    assert device.module.memory_allocated() == before
    streams.resize(storage, 4 << 20)
    assert storage.nbytes() == 4 << 20
    assert device.module.memory_allocated() - before >= 4 << 20


# ---- races ----


def on_this_mesh(scenario: Scenario, ranks: int) -> Scenario:
    shapes = {(1, 2): (2, ranks // 2), (2, 1): (ranks, 1)} if ranks > 1 else {(1, 2): (1, 1), (2, 1): (1, 1)}
    return replace(scenario, mesh=shapes.get(scenario.mesh, scenario.mesh))


@check(
    "the CUDA sanitizer finds no race",
    part=1,
    setup=replace(FAKE_FOUR, sanitizer=True),
    timeout_s=300,
    each={name: (name,) for name in RACES},
)
def races_sanitized(device: Device, name: str) -> None:
    train(on_this_mesh(RACES[name], 4), device.type)


@check(
    "bits stay with one stream late and new and freed memory full of NaN, on one of four modeled ranks",
    part=1,
    setup=MODELLED_FOUR,
    timeout_s=120,
    each={name: (name,) for name in RACES},
)
def races_disturbed(device: Device, name: str) -> None:
    scenario = on_this_mesh(RACES[name], 4)
    expected = without_overlap(device, scenario)
    for seed, stream in enumerate(STREAMS):
        assert_same_bits(disturbed(device, scenario, Hostile(device, stream), seed), expected)


def without_overlap(device: Device, scenario: Scenario) -> list[Step]:
    with use_streams(device.device, Serial(device) if device.is_cuda else DeviceStreams(device.device)), new_memory(device):
        return in_order(device, lambda: train(scenario, device.type), None)


def disturbed(device: Device, scenario: Scenario, streams: DeviceStreams, seed: int) -> list[Step]:
    with use_streams(device.device, streams), new_memory(device, is_nan=True):
        return in_order(device, lambda: train(scenario, device.type), seed)


TORCHS = (
    "plain",
    "bf16",
    "micro_batches",
    "keep_after_forward",
    "two_deep",
    "offload",
    "offload_bf16",
    "hsdp",
    "pinned_input",
)
"""Scenarios in which torch's FSDP2 has the same bits on one rank. (After an evaluation its root hides gradients.)"""


@check(
    "control: bits of torch's FSDP2 stay with its streams late",
    part=1,
    setup=MODELLED_FOUR,
    timeout_s=120,
    each={name: (name,) for name in TORCHS},
)
def races_control(device: Device, name: str) -> None:
    """If this fails, the disturbance itself is wrong, and so may be what the rows of ours say."""
    scenario = on_this_mesh(RACES[name], 4)
    expected = in_order(device, lambda: train(scenario, device.type, torch_fsdp.fully_shard), None)
    for seed in range(2):
        with late_waits(device):
            steps = in_order(device, lambda: train(scenario, device.type, torch_fsdp.fully_shard), seed)
        assert_same_bits(steps, expected)


PLANTED = {
    "compute_uses_an_all_gather_too_early": ("Gathering.finish order 1", "plain"),
    "an_all_gather_writes_memory_in_use": ("Gather.start order 2", "plain"),
    "a_reduce_scatter_reads_too_early": ("reduction.legs_of order 1", "plain"),
    "an_all_reduce_reads_too_early": ("reduction.legs_of order 2", "hsdp"),
    "an_all_gather_does_not_wait_for_the_optimizer": ("Schedule.await_optimizer order 1", "written_on_a_side_stream"),
}


@check(
    "a planted fault is noticed",
    part=1,
    setup=MODELLED_FOUR,
    timeout_s=120,
    each=PLANTED,
)
def races_planted(device: Device, place: str, name: str) -> dict[str, Any]:
    """One order of the runtime is left out. If no disturbance notices, that nothing was found without the fault says little."""
    scenario = on_this_mesh(RACES[name], 4)
    expected = without_overlap(device, scenario)
    for attempt in range(20):
        stream = STREAMS[attempt % len(STREAMS)]
        try:
            assert_same_bits(disturbed(device, scenario, HostileWithout(device, stream, place), attempt), expected)
        except (AssertionError, RuntimeError):
            with contextlib.suppress(RuntimeError):
                device.synchronize()
            late_comparison._unread.clear()  # spoiled by the fault
            return {"attempts": attempt + 1}
    raise AssertionError(f"without {place!r} nothing changed in 20 attempts")


class HostileWithout(Hostile):
    """And one order of the runtime's code is left out."""

    def __init__(self, device: Device, late: str, place: str) -> None:
        super().__init__(device, late)
        self._place = place

    def order(self, stream: Any, event: Any) -> None:
        if ORDERS.get(place_of_caller("order")) != self._place:
            super().order(stream, event)


def in_order(device: Device, run: Callable[[], list[Step]], seed: int | None) -> list[Step]:
    """On the pretend accelerator: in the order of ``seed``, or at once."""
    if not device.is_cuda:
        from fsdp2.testing import pretend

        pretend.set_order(seed)
    steps = run()
    device.synchronize()
    return steps


# ---- numbers ----


@check(
    "bitwise what torch's FSDP2 computes",
    part=1,
    each={name: (name,) for name in TORCHS},
)
def equal_to_torch(device: Device, name: str) -> None:
    scenario = on_this_mesh(RACES[name], 1)
    ours = train(scenario, device.type)
    assert_same_bits(ours, train(scenario, device.type, torch_fsdp.fully_shard))


# ---- the host ----


def sharded(device: Device, **options: Any) -> Any:
    model: Any = mlp()
    for module in [*model.blocks, model]:
        fsdp2.fully_shard(module, mesh=device.mesh(), **options)
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


@check("no step waits for the device once the first is done", part=1, each={"fp32": ({},), "bf16": (BF16,)})
def no_host_waits(device: Device, options: dict[str, Any]) -> None:
    model = sharded(device, **options)
    optimizer = sgd(model.parameters())
    inputs = [x.to(device.device) for x in batches(4)]
    step(model, optimizer, inputs[0])
    device.synchronize()
    with device.no_host_waits():
        for x in inputs[1:]:
            step(model, optimizer, x)
    device.synchronize()


# ---- memory ----


class Wide(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(dim, dim, bias=False) for _ in range(6))
        self.head = nn.Linear(dim, dim // 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def terms(module: Any) -> TransientBytes:
    """Of its one group, from its plans."""
    (group,) = module._get_fsdp_state().groups
    return transient_bytes(
        group.plan.layout,
        group.gradients._planned.plan.layout,
        num_direct=group.plan.num_direct,
        itemsize=group.plan.dtype.itemsize,
        param_itemsize=group.plan.param_dtype.itemsize,
        reduce_itemsize=group.plan.reduce_dtype.itemsize,
        received_rows=0,
    )


@check(
    "the peak of a step is the memory plan's, and the allocator never retries",
    part=1,
    setup=FAKE_EIGHT,
    each={"fp32": ({},), "bf16": (BF16,)},
)
def peak_is_planned(device: Device, options: dict[str, Any]) -> dict[str, Any]:
    dim = 1024 if device.is_cuda else 128
    model: Any = Wide(dim).to(device.device)
    mesh = device.mesh()
    for module in [*model.blocks, model]:
        fsdp2.fully_shard(module, mesh=mesh, **options)
    x = torch.ones(2, dim, device=device.device)
    for _ in range(3):
        model(x).float().square().mean().backward()
        model.zero_grad()
    before = device.reset_peak()
    model(x).float().square().mean().backward()
    measured = device.peak_nbytes() - before
    groups = [terms(block) for block in model.blocks]
    planned = peak_of_step(groups, terms(model), prefetch=PrefetchDepth(), allocates_early=True, max_reductions=1, casts_early=True)
    assert device.num_alloc_retries() == 0
    assert 0.8 * planned <= measured <= 1.05 * planned + (2 << 20 if device.is_cuda else 64 << 10), (
        f"measured {measured}, planned {planned}"
    )
    return {"measured_mib": measured / 2**20, "planned_mib": planned / 2**20}


# ---- graphs and the compiler ----


@check(
    "a step is captured in a graph, and its replays train as eager steps do",
    part=1,
    each={"fp32": ({},), "bf16": (BF16,)},
    is_first=True,
)
def graph_capture(device: Device, options: dict[str, Any]) -> None:
    model, eager = sharded(device, **options), sharded(device, **options)
    x = batches(1)[0].to(device.device)
    optimizer, eager_optimizer = sgd(model.parameters()), sgd(eager.parameters())
    captured = fsdp2.capture(lambda x: step(model, optimizer, x))
    for _ in range(6):
        step(eager, eager_optimizer, x)
        captured(x)
    assert captured.reason is None, captured.reason
    assert captured.num_graphs == 1
    device.synchronize()
    assert_same_tensors(on_host(model), on_host(eager), "value")


def on_host(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.to_local().cpu() for name, value in state_of(model).items()}  # type: ignore[attr-defined]


@check(
    "compiled blocks train as eager ones do",
    part=1,
    timeout_s=600,
    each={"inductor": ({},), "reduce_overhead": ({"mode": "reduce-overhead"},), "inductor_bf16": ({}, BF16)},
)
def compiled_blocks(device: Device, how: dict[str, Any], options: dict[str, Any] | None = None) -> None:
    device.needs_cuda("the compiler's kernels")
    options = options or {}
    model, eager = sharded(device, **options), sharded(device, **options)
    for block in model.blocks:
        block.compile(**how)
    optimizer, eager_optimizer = sgd(model.parameters()), sgd(eager.parameters())
    for x in batches(5):
        x = x.to(device.device)
        torch.compiler.cudagraph_mark_step_begin()
        step(model, optimizer, x)
        step(eager, eager_optimizer, x)
    bound = 1e-5 if not options else 2e-2
    expected = on_host(eager)
    for name, value in on_host(model).items():
        torch.testing.assert_close(value, expected[name], atol=bound, rtol=bound, msg=lambda text, name=name: f"{name}: {text}")
