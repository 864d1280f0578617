"""Whole training steps, replayed on recording streams: nothing that touches memory is left unordered, on any schedule.

Each scenario is trained twice on real ranks, on the CPU's own streams and on recording ones, which must find no race and change no
number. Then, on ranks that only pretend, every order of the runtime is left out in turn: the race check must notice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from fsdp2 import AllGather, CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, ReduceScatter, fully_shard
from fsdp2.core.comm.streams import streams_of
from fsdp2.core.group.all_gather import Gather, Gathering
from fsdp2.core.group.handing_out import HandedOut
from fsdp2.core.group.reduction import Reduction
from fsdp2.core.iteration.module_state import schedule_of
from fsdp2.torch_names import torch_collectives
from harness import cpu_mesh, on_ranks
from harness.models import MLP, Block, batches, mlp
from harness.places import Place, place_of_caller, places_of
from harness.pretend_training import unsharded_before_backward, written_in_forward
from harness.recording import Race, RaceError, RecordingStreams, recording
from harness.subclasses import RowInt8, wrap_weights
from harness.training import assert_equal_training, assert_same_bits, fed_own_chunk, fed_whole, forced, forward_backward, sgd

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)

ROWS = (24, 7)  # on four ranks, two micro-batches of three rows each


@dataclass(frozen=True)
class Scenario:
    """One way to train; ``iteration``, ``prepare`` and ``model`` are for sharded and unsharded models.

    mesh:    its shape; () is all ranks
    options: of fully_shard
    exact:   equal to training the unsharded model with whole batches
    train:   instead of ``train``
    """

    iteration: Callable[[Any, Tensor], Tensor] = forward_backward
    mesh: tuple[int, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[Any], None] = lambda model: None
    model: Callable[[], nn.Module] = mlp
    make_optimizer: Callable[[Any], Optimizer] = sgd
    private: dict[str, str] = field(default_factory=dict)
    exact: bool = True
    num_steps: int = 4
    train: Callable[[Scenario, DeviceMesh], list[Any]] | None = None


# ---- models and iterations ----


class Flexible(MLP):
    """``order``: the blocks that run, in this order; ``run``: how one runs; ``skip_scale_on``: the rank that uses no scale."""

    order: tuple[int, ...] | None = None
    skip_scale_on: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for index in self.order or range(len(self.blocks)):
            x = self.run_block(self.blocks[index], x)
        return self.last(x)

    def run_block(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)


class Checkpointed(Flexible):
    use_reentrant = False

    def run_block(self, block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=self.use_reentrant)


class Reentrant(Checkpointed):
    use_reentrant = True


def flexible(cls: type[Flexible] = Flexible) -> Flexible:
    torch.manual_seed(0)
    return cls()


def several_dtypes() -> nn.Module:
    model = mlp()
    for block in model.blocks:
        block.scale.data = block.scale.data.bfloat16()
    return model


def with_extensions() -> nn.Module:
    return wrap_weights(mlp(), RowInt8)


class SometimesUnused(nn.Module):
    """Two parameters; rank 1 does not use the second, nobody the third."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.full((4, 7), 0.1 * number) for number in range(1, 4))

    def forward(self, x: Tensor) -> Tensor:
        used = self.weights[:1] if dist.is_initialized() and dist.get_rank() == 1 else self.weights[:2]
        return torch.stack([x @ weight.t() for weight in used]).sum(0)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 7)
        self.blocks = nn.ModuleList([SometimesUnused()])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](self.first(x))


def branching() -> nn.Module:
    torch.manual_seed(0)
    return Branching()


def shards(model: nn.Module) -> bool:
    return isinstance(model, FSDPModule)


def in_changing_order(model: Any, x: Tensor) -> Tensor:
    """The second pass follows the record; the third leaves out a block that was prefetched, the fourth runs another order."""
    orders = [(0, 1, 2), (0, 1, 2), (0, 2), (2, 0, 1)]
    step = model.__dict__.setdefault("steps_done", 0)
    model.steps_done += 1
    model.order = orders[step % len(orders)]
    return forward_backward(model, x)


def with_an_evaluation(model: Any, x: Tensor) -> Tensor:
    loss = forward_backward(model, x)
    with torch.no_grad():
        model(x)
        model(x)
    return loss


def with_a_shorter_evaluation(model: Any, x: Tensor) -> Tensor:
    """It leaves out a block that was prefetched, after whose gather comes no other, and no backward cleans up behind it."""
    model.order = None
    loss = forward_backward(model, x)
    model.order = (0, 1)
    with torch.no_grad():
        model(x)
    return loss


def in_two_micro_batches(model: Any, x: Tensor, reshard_first: bool = True) -> Tensor:
    losses = []
    for number, rows in enumerate(x.chunk(2)):
        if shards(model):
            first = number == 0
            model.set_is_last_backward(not first)
            model.set_reshard_after_backward(reshard_first or not first)
        losses.append(model(rows).square().mean())
        (losses[-1] / 2).backward()
    return torch.stack(losses).mean()


def called_twice(model: Any, x: Tensor) -> Tensor:
    loss = torch.cat([model(rows) for rows in x.chunk(2)]).square().mean()
    loss.backward()
    return loss


def backward_twice(model: Any, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    (loss / 2).backward(retain_graph=True)
    (loss / 2).backward()
    return loss


def clipped(model: Any, x: Tensor) -> Tensor:
    loss = forward_backward(model, x)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return loss


def saved_and_loaded(model: Any, x: Tensor) -> Tensor:
    """Also in the middle, where the root is still unsharded and, in later steps, a prefetch was cancelled."""
    loss = model(x).square().mean()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    loss.backward()
    model.load_state_dict(state)
    return loss


def loaded_after_a_forward(model: Any, x: Tensor) -> Tensor:
    """No backward orders anything before the values are written."""
    model(x)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    return forward_backward(model, x)


def written_after_a_forward(model: Any, x: Tensor, through: Callable[[Any, Tensor], object] = lambda model, x: model(x)) -> Tensor:
    """On the host, by what the user held before: no hook tells. through: what copies the shards to the device."""
    params = list(model.parameters())
    through(model, x)
    with torch.no_grad():
        for param in params:
            param.mul_(0.5)
    return forward_backward(model, x)


def unshard_and_reshard(model: Any, x: Tensor) -> None:
    if shards(model):
        handle = model.blocks[0].unshard(async_op=True)
        model.blocks[1].unshard()
        model.blocks[1].reshard()
        handle.wait()


def moved(model: Any, x: Tensor) -> Tensor:
    loss = forward_backward(model, x)
    model._apply(torch.clone)
    return loss


class FailureError(Exception):
    pass


def fail(*args: object) -> None:
    raise FailureError


def recover(model: Any) -> None:
    if shards(model):
        model.reset_iter_state()
    model.zero_grad()


def after_a_failed_forward(model: Any, x: Tensor) -> Tensor:
    handle = model.blocks[1].down.register_forward_hook(fail)
    with contextlib.suppress(FailureError):
        model(x)
    handle.remove()
    recover(model)
    return forward_backward(model, x)


def after_a_failed_backward(model: Any, x: Tensor) -> Tensor:
    handle = model.blocks[1].down.register_full_backward_hook(fail)
    loss = model(x).square().mean()
    with contextlib.suppress(FailureError):
        loss.backward()
    handle.remove()
    recover(model)
    return forward_backward(model, x)


def unsharded_over_the_step(model: Any, x: Tensor, stale: bool = False) -> Tensor:
    """``optimizer.step()`` comes between ``unshard(async_op=True)`` and its wait, and must not be seen by the gather."""
    handle = model.__dict__.pop("handle", None)
    if handle is not None:
        handle.wait()
        if not stale:
            model.blocks[1].reshard()
    loss = forward_backward(model, x)
    if shards(model):
        model.handle = model.blocks[1].unshard(async_op=True)
    return loss


# ---- preparations ----


def units(model: Any) -> list[Any]:
    return [module for module in model.modules() if shards(module)]


def step_in_backward(model: nn.Module) -> None:
    optimizers = {param: torch.optim.SGD([param], lr=0.1, momentum=0.9) for param in model.parameters()}

    def step(param: nn.Parameter) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step)


def halve_in_a_hook(model: Any) -> None:
    streams = streams_of(torch.device("cpu"))
    for module in units(model):
        module.set_all_reduce_hook(lambda grad: grad.mul_(0.5), stream=None if streams.host_waits else "the user's")


class StockAllGather(AllGather):
    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        return torch_collectives.all_gather_single(output_tensor, input_tensor, group, async_op)


class StockReduceScatter(ReduceScatter):
    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        return torch_collectives.reduce_scatter_single(output_tensor, input_tensor, op, group, async_op)


def use_custom_communicators(model: Any) -> None:
    for module in units(model):
        module.set_custom_all_gather(StockAllGather())
        module.set_custom_reduce_scatter(StockReduceScatter())


def offload_as_on_a_device(model: Any) -> None:
    """Where streams are recorded, the flat shards are pinned host memory."""
    streams = streams_of(torch.device("cpu"))
    if isinstance(streams, RecordingStreams):
        for module in units(model):
            for group in module._get_fsdp_state().groups:
                group.plan = replace(group.plan, options=replace(group.options, pin_memory=True))
                group.gradients.follow(group.plan)
                streams.keep_on_host(group.flat)


# Each either needs an order that "plain" does not (NEEDED_BY), or goes a way that no random program of tests/pretend does: a shard
# that the user writes, a forward or backward that fails, runs twice or in another order, a custom communicator.
SCENARIOS = {
    "plain": Scenario(),
    "broadcast": Scenario(private={"all_gather": "broadcast", "reduce_scatter": "all_to_all"}),
    "bf16_direct": Scenario(options={"mp_policy": BF16}, private={"gather": "direct"}, exact=False),
    "bf16_mixed": Scenario(options={"mp_policy": BF16}, private={"gather": "mixed"}, exact=False),
    "several_dtypes": Scenario(model=several_dtypes, exact=False),
    "extensions": Scenario(model=with_extensions, exact=False),
    "extensions_direct": Scenario(model=with_extensions, private={"gather": "direct"}, exact=False),
    "extensions_unshard_over_the_step": Scenario(model=with_extensions, iteration=unsharded_over_the_step, exact=False),
    "custom_communicators": Scenario(prepare=use_custom_communicators),
    "loaded_after_a_forward": Scenario(iteration=loaded_after_a_forward),
    "moved": Scenario(iteration=moved),
    "unused": Scenario(model=branching, exact=False),
    "changing_order": Scenario(model=flexible, iteration=in_changing_order),
    "shorter_evaluation": Scenario(model=flexible, iteration=with_a_shorter_evaluation),
    "keep_between_micro_batches": Scenario(iteration=partial(in_two_micro_batches, reshard_first=False)),
    "called_twice": Scenario(iteration=called_twice),
    "backward_twice": Scenario(iteration=backward_twice),
    "checkpointed": Scenario(model=partial(flexible, Checkpointed)),
    "checkpointed_reentrant": Scenario(model=partial(flexible, Reentrant)),
    "clipped": Scenario(iteration=clipped),
    "saved_and_loaded": Scenario(iteration=saved_and_loaded),
    "failed_forward": Scenario(iteration=after_a_failed_forward),
    "failed_backward": Scenario(iteration=after_a_failed_backward),
    "unshard_over_the_step": Scenario(iteration=unsharded_over_the_step),
    "unshard_over_the_step_stale": Scenario(iteration=partial(unsharded_over_the_step, stale=True), exact=False),
    "step_in_backward": Scenario(prepare=step_in_backward),
    "all_reduce_hook": Scenario(prepare=halve_in_a_hook, exact=False),
    "all_reduce_hook_bf16": Scenario(prepare=halve_in_a_hook, options={"mp_policy": BF16}, exact=False),
    "offload": Scenario(prepare=offload_as_on_a_device, options={"offload_policy": CPUOffloadPolicy()}),
    "offload_replicated": Scenario(prepare=offload_as_on_a_device, options={"offload_policy": CPUOffloadPolicy()}, mesh=(2, 1)),
    "offload_changing_order": Scenario(
        prepare=offload_as_on_a_device,
        options={"offload_policy": CPUOffloadPolicy()},
        model=flexible,
        iteration=in_changing_order,
    ),
    "offload_evaluation": Scenario(
        prepare=offload_as_on_a_device, options={"offload_policy": CPUOffloadPolicy()}, iteration=with_an_evaluation
    ),
    "offload_accumulate": Scenario(
        prepare=offload_as_on_a_device, options={"offload_policy": CPUOffloadPolicy()}, iteration=in_two_micro_batches
    ),
    "offload_failed_backward": Scenario(
        prepare=offload_as_on_a_device, options={"offload_policy": CPUOffloadPolicy()}, iteration=after_a_failed_backward
    ),
    "offload_saved_and_loaded": Scenario(
        prepare=offload_as_on_a_device, options={"offload_policy": CPUOffloadPolicy()}, iteration=saved_and_loaded
    ),
    "offload_written_after_a_forward": Scenario(
        prepare=offload_as_on_a_device, options={"offload_policy": CPUOffloadPolicy()}, iteration=written_after_a_forward
    ),
    "offload_written_after_unshard": Scenario(
        prepare=offload_as_on_a_device,
        options={"offload_policy": CPUOffloadPolicy()},
        iteration=partial(written_after_a_forward, through=unshard_and_reshard),
    ),
    "offload_loaded_after_a_forward": Scenario(
        prepare=offload_as_on_a_device, options={"offload_policy": CPUOffloadPolicy()}, iteration=loaded_after_a_forward
    ),
}

# On four ranks.
SCENARIOS_OF_FOUR = {
    "reshard_to_two_bf16": Scenario(options={"reshard_after_forward": 2, "mp_policy": BF16}, exact=False),
    "hsdp": Scenario(mesh=(2, 2)),
    "hsdp_bf16": Scenario(mesh=(2, 2), options={"mp_policy": BF16}, exact=False),
    "hsdp_unused": Scenario(mesh=(2, 2), model=branching, exact=False),
    "hsdp_failed_backward": Scenario(mesh=(2, 2), iteration=after_a_failed_backward),
    "replicated_bf16": Scenario(mesh=(4, 1), options={"mp_policy": BF16}, exact=False),
    "replicated_unshard_over_the_step": Scenario(
        mesh=(4, 1), options={"mp_policy": BF16}, iteration=unsharded_over_the_step, exact=False
    ),
}


def train(scenario: Scenario, mesh: DeviceMesh) -> list[Any]:
    model = scenario.model()
    with forced(**scenario.private):
        for block in model.blocks:
            fully_shard(block, mesh=mesh, **scenario.options)
        fully_shard(model, mesh=mesh, **scenario.options)
    scenario.prepare(model)
    return fed_own_chunk(model, batches(scenario.num_steps, ROWS), scenario.make_optimizer, scenario.iteration)


def train_unsharded(scenario: Scenario) -> list[Any]:
    model = scenario.model()
    scenario.prepare(model)
    return fed_whole(model, batches(scenario.num_steps, ROWS), scenario.make_optimizer, scenario.iteration)


def replay(scenario: Scenario) -> None:
    mesh = cpu_mesh(*scenario.mesh)
    expected = train(scenario, mesh)
    with recording():
        steps = train(scenario, mesh)
    assert_same_bits(steps, expected)
    if scenario.exact:
        assert_equal_training(steps, train_unsharded(scenario), ulps=64)


@on_ranks(2)
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if "offload_" in name else ()) for name in SCENARIOS])
def test_no_race_in(name):
    replay(SCENARIOS[name])


@on_ranks(4)
@pytest.mark.parametrize("name", [name if name == "hsdp" else pytest.param(name, marks=pytest.mark.slow) for name in SCENARIOS_OF_FOUR])
def test_no_race_on_four_ranks_in(name):
    replay(SCENARIOS_OF_FOUR[name])


# ---- every order is needed ----

PLACES = places_of(("order", "synchronize"))


class Without(RecordingStreams):
    """Leaves out the orders at one place of the runtime's code."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self._place = place
        self.times_left_out = 0

    def order(self, stream: Any, event: Any) -> None:
        if not self._is_left_out(place_of_caller("order")):
            super().order(stream, event)

    def synchronize(self, event: Any) -> None:
        if not self._is_left_out(place_of_caller("synchronize")):
            super().synchronize(event)

    def _is_left_out(self, place: Place) -> bool:
        is_it = PLACES.get(place) == self._place
        self.times_left_out += is_it
        return is_it


def replay_on_fake_ranks(scenario: Scenario, streams: RecordingStreams) -> list[Race]:
    """The races in ``scenario`` on the backend that stands for NCCL, which goes through the same operators and moves nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        shape = scenario.mesh or (4,)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        with contextlib.suppress(RaceError), recording(streams):
            (scenario.train or train)(scenario, mesh)
    finally:
        dist.destroy_process_group()
    return streams.races


def train_with_an_optimizer_on_its_own_stream(scenario: Scenario, mesh: DeviceMesh) -> list[Any]:
    model: Any = scenario.model()
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    streams = streams_of(torch.device("cpu"))
    for x in batches(scenario.num_steps, ROWS):
        forward_backward(model, x)
        streams.order("optimizer", streams.mark(streams.compute))
        with streams.on("optimizer"):
            optimizer.step()
        schedule_of(model._get_fsdp_state()).post_optim_event = streams.mark("optimizer")  # the setter wants a real device
    return []


def train_with_unshards_on_a_side_stream(scenario: Scenario, mesh: DeviceMesh) -> list[Any]:
    """And with other work there, whose memory is what the side stream is given back."""
    model: Any = scenario.model()
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    streams = streams_of(torch.device("cpu"))
    for x in batches(scenario.num_steps, ROWS):
        streams.order("side", streams.mark(streams.compute))
        with streams.on("side"):
            model.unshard(async_op=True)
        loss = model(x).square().mean()
        with streams.on("side"):
            torch.zeros(1000)
        loss.backward()
        with streams.on("side"):
            torch.zeros(1000)
        optimizer.step()
    return []


def train_two_roots_of_which_one_is_told_that_it_is_the_last(scenario: Scenario, mesh: DeviceMesh) -> list[Any]:
    """Its backward ends before the other's in one graph, after it in one graph, and after it in a graph of its own."""
    first, second = scenario.model(), nn.Sequential(nn.Linear(5, 10), nn.Linear(10, 3))
    for module in [*first.blocks, first, second[0], second]:
        fully_shard(module, mesh=mesh)
    models: list[Any] = [first, second]
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    for index, x in enumerate(batches(3, ROWS)):
        for model, is_last in zip(models, (index == 1, index != 1), strict=True):
            model.set_is_last_backward(is_last)
        hidden = first(x)
        if index == 2:
            hidden.sum().backward()
            hidden = hidden.detach().requires_grad_()
        second(hidden).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return []


def train_extensions_with_unshards_on_a_side_stream(scenario: Scenario, mesh: DeviceMesh) -> list[Any]:
    """``unshard()`` there makes the unsharded parameters, whose memory is what the side stream is given back."""
    model: Any = wrap_weights(nn.Linear(7, 7, bias=False), RowInt8)  # without a flat group, which would order the side stream as well
    fully_shard(model, mesh=mesh)
    streams = streams_of(torch.device("cpu"))
    for x in batches(scenario.num_steps, ROWS):
        streams.order("side", streams.mark(streams.compute))
        with streams.on("side"):
            model.unshard()
        streams.order(streams.compute, streams.mark("side"))
        loss = model(x).square().mean()
        loss.backward()
        with streams.on("side"):
            torch.zeros(1000)
    return []


FAKE_SCENARIOS = {
    **{name: scenario for name, scenario in SCENARIOS.items() if "reduce_scatter" not in scenario.private},
    **SCENARIOS_OF_FOUR,
    "optimizer_on_its_own_stream": Scenario(train=train_with_an_optimizer_on_its_own_stream),
    "unshard_on_a_side_stream": Scenario(train=train_with_unshards_on_a_side_stream),
    "extensions_unshard_on_a_side_stream": Scenario(train=train_extensions_with_unshards_on_a_side_stream),
    "written_in_forward": Scenario(iteration=written_in_forward),
    "extensions_unsharded_before_backward": Scenario(model=with_extensions, iteration=unsharded_before_backward),
    "two_roots": Scenario(train=train_two_roots_of_which_one_is_told_that_it_is_the_last),
}

# Each order of the runtime, and a scenario in which it alone prevents a race.
NEEDED_BY = {
    "ExtensionGather.start order 1": "extensions",
    "ExtensionGather.let_go order 1": "extensions_unsharded_before_backward",
    "ExtensionGather.free order 1": "extensions_unshard_on_a_side_stream",
    "Gather.start order 1": "bf16_mixed",
    "Gather.start order 2": "plain",
    "LocalGather.start order 1": "replicated_bf16",
    "all_gather.send_together order 1": "several_dtypes",
    "Gathering.finish order 1": "plain",
    "Gathering.finish order 2": "unshard_on_a_side_stream",
    "Unsharded.free order 1": "unshard_on_a_side_stream",
    "reduction.legs_of order 1": "plain",
    "reduction.legs_of order 2": "hsdp",
    "HandedOut.__init__ order 1": "all_reduce_hook",
    "HandedOut._offload order 1": "offload",
    "HandedOut._offload synchronize 1": "offload_accumulate",
    "Reduction.let_go_of_copies order 1": "offload",
    "Reduction.let_go_of_copies order 2": "offload_replicated",
    "Reduction.advance order 1": "plain",
    "Reduction.finish synchronize 1": "offload",
    "Reductions._order order 1": "plain",
    "Reduction.abandon order 1": "failed_backward",
    "ParamGroup.await_host_read synchronize 1": "offload_evaluation",
    "Schedule.await_optimizer order 1": "optimizer_on_its_own_stream",
    "UnitTree.issue_for_backward order 1": "written_in_forward",
}


# Inputs are moved to another device than the CPU alone: tests/pretend takes these out.
OF_OTHER_DEVICES = {
    "ExtensionGather.let_go order 2",
    "ParamGroup._free_unused order 1",
    "Reductions._give_back order 1",
    "Schedule.await_host_input synchronize 1",
}


def test_no_order_is_without_a_scenario_that_needs_it():
    assert set(PLACES.values()) == set(NEEDED_BY) | OF_OTHER_DEVICES, "add the new order and what needs it to NEEDED_BY"


@pytest.mark.parametrize("place", NEEDED_BY)
def test_without_this_order_there_is_a_race(place):
    streams = Without(place)
    races = replay_on_fake_ranks(replace(FAKE_SCENARIOS[NEEDED_BY[place]], num_steps=3), streams)
    assert streams.times_left_out > 0
    assert races != []


@pytest.mark.parametrize(
    "name",
    [
        *SCENARIOS_OF_FOUR,
        *("plain", "bf16_direct", "bf16_mixed", "extensions_direct", "optimizer_on_its_own_stream", "two_roots"),
        *("unshard_on_a_side_stream", "extensions_unshard_on_a_side_stream"),
        *("written_in_forward", "extensions_unsharded_before_backward"),
    ],
)
def test_no_race_on_the_path_of_nccl_in(name):
    streams = RecordingStreams()
    replay_on_fake_ranks(FAKE_SCENARIOS[name], streams)
    streams.check()


@pytest.mark.parametrize(
    ("owner", "buffer", "scenario"),
    [
        (Reduction, "_input", "plain"),
        (HandedOut, "held", "hsdp_bf16"),
        (HandedOut, "held", "replicated_bf16"),
        (HandedOut, "held", "all_reduce_hook_bf16"),
        (Gathering, "held", "unshard_over_the_step"),
    ],
)
def test_a_buffer_that_is_not_held_until_its_last_use_is_a_race(owner, buffer, scenario):
    held: dict[int, object] = {}  # until it is first read, which is when the collective is issued; some are never read

    def hold(self: object, value: object) -> None:
        if owner is not HandedOut:
            held[id(self)] = value

    nothing = () if owner is HandedOut else None
    forgetful = property(lambda self: held.pop(id(self), nothing), hold)
    with mock.patch.object(owner, buffer, forgetful, create=True):
        races = replay_on_fake_ranks(replace(FAKE_SCENARIOS[scenario], num_steps=3), RecordingStreams())
    assert any("freed while still in use" in race.how for race in races)


def test_a_storage_freed_on_the_wrong_stream_is_a_race():
    """The unsharded storage belongs to compute: freed elsewhere, compute may get its memory while it is in use."""

    class Elsewhere(RecordingStreams):
        def resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
            with self.on(self.gather):
                super().resize(storage, nbytes)

    assert replay_on_fake_ranks(replace(SCENARIOS["plain"], num_steps=3), Elsewhere()) != []


def test_sending_the_shard_itself_where_the_user_may_write_is_a_race():
    """Why ``unshard(async_op=True)`` sends a copy."""
    start = Gather.start
    with mock.patch.object(Gather, "start", lambda self, flat, copy, together=None: start(self, flat, False, together)):
        races = replay_on_fake_ranks(replace(SCENARIOS["unshard_over_the_step"], num_steps=3), RecordingStreams())
    assert any("aten.add_ on compute writes" in race.how and "on gather" in str(race.earlier) for race in races)


def test_a_prefetch_that_nobody_cancels_is_a_race():
    with mock.patch("fsdp2.core.iteration.forward.release"), mock.patch("fsdp2.core.iteration.backward.release"):
        races = replay_on_fake_ranks(replace(SCENARIOS["shorter_evaluation"], num_steps=3), RecordingStreams())
    assert any("on compute writes" in race.how and "on gather" in str(race.earlier) for race in races)


def test_the_next_cast_runs_beside_the_gather_under_way():
    """It would delay the next gather if it ran behind this one."""

    class Watching(RecordingStreams):
        last_gather = 0

        def __init__(self) -> None:
            super().__init__()
            self.beside: list[bool] = []

        def mark(self, stream: Any) -> Any:
            event = super().mark(stream)
            if stream == self.gather:
                self.last_gather = event[stream]
            return event

        def on(self, stream: Any) -> Any:
            if stream == self.copy_in:
                self.beside.append(super().mark(stream).get(self.gather, 0) < self.last_gather)
            return super().on(stream)

    streams = Watching()
    replay_on_fake_ranks(replace(FAKE_SCENARIOS["bf16_direct"], num_steps=3), streams)
    # The root and three blocks: all but the root's are prefetched in forward, all but the last block's in backward. That
    # one comes twice: its memory is allocated on this stream, before it is cast.
    assert streams.beside[-8:] == [False, True, True, True, False, False, True, True]


class OnFrozenBase(Block):
    """The base is a group of its own, by its dtype."""

    def __init__(self) -> None:
        super().__init__(10)
        self.base = nn.Parameter(torch.eye(10, dtype=torch.bfloat16), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x @ self.base.float())


def on_a_frozen_base() -> nn.Module:
    model = mlp()
    model.blocks[-1] = OnFrozenBase()
    return model


@pytest.mark.parametrize(("model", "writes"), [(mlp, False), (with_extensions, False), (on_a_frozen_base, False), (mlp, True)])
def test_the_first_gather_of_backward_waits_for_the_loss_only_if_shards_were_written_since_forward(model, writes):
    """The loss computes with none of the memory that it reads and writes."""

    class Watching(RecordingStreams):
        loss = 0

        def __init__(self) -> None:
            super().__init__()
            self.behind_loss: list[bool] = []

        def on(self, stream: Any) -> Any:
            if stream == self.gather:
                self.behind_loss.append(super().mark(stream).get("compute", 0) >= self.loss)
            return super().on(stream)

    streams = Watching()

    def marks_the_loss(model: Any, x: Tensor) -> Tensor:
        if not streams.behind_loss:
            model.set_frozen_budget(1 << 20)
        output = model(x)
        if writes:
            with torch.no_grad():
                model.blocks[-1].up.bias.to_local().mul_(0.9)  # autograd has not saved it
        loss = output.square().mean()
        streams.loss = streams.mark("compute")["compute"]
        streams.behind_loss.clear()
        loss.backward()
        return loss

    replay_on_fake_ranks(Scenario(model=model, iteration=marks_the_loss, num_steps=2), streams)
    assert streams.races == []
    assert streams.behind_loss[0] is writes
    assert streams.behind_loss[-1]
    assert streams.behind_loss == sorted(streams.behind_loss)
