"""A steady step never makes the host wait for the device; where a rank misses gradients, it waits once a backward."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from fsdp2 import OrderError
from fsdp2.activations.around_forward import around_forward
from fsdp2.compiled.full_graph_mode import FullGraph
from fsdp2.core.comm.streams import DeviceStreams, use_streams
from fsdp2.testing import pretend
from harness import on_ranks
from harness.models import Block, batches, mlp
from harness.pretend_training import BF16, in_partly_reduced_micro_batches, in_two_micro_batches
from harness.training import assert_equal_grads, forward_backward, grads_of, own_chunk, sgd


@dataclass(frozen=True)
class Way:
    """strategy: as of ``fsdp2.parallelize``"""

    strategy: str = "zero3"
    options: dict[str, Any] = field(default_factory=dict)
    iteration: Callable[[Any, Tensor], Tensor] = forward_backward
    norm_type: float = 2.0


WAYS = {
    "fp32": Way(),
    "bf16": Way(options=BF16),
    "inf norm": Way(norm_type=float("inf")),
    "ddp": Way("ddp"),
    "zero1": Way("zero1"),
    "hsdp": Way("hsdp"),
    "hsdp partial": Way("hsdp", iteration=in_partly_reduced_micro_batches),
    "micro batches": Way(iteration=in_two_micro_batches),
}
QUICK = ("bf16", "hsdp partial")


def sharded(model: nn.Module, way: Way, wrap: type[nn.Module]) -> nn.Module:
    shape = (2, 1) if way.strategy == "hsdp" else (2,)
    mesh = init_device_mesh("pretend", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    return fsdp2.parallelize(model.to("pretend"), way.strategy, mesh=mesh, wrap={wrap}, **way.options)


@on_ranks(2, device="pretend")
@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in WAYS])
def test_a_steady_step_never_waits_for_the_device(name):
    way = WAYS[name]
    model = sharded(mlp(), way, Block)
    optimizer = sgd(model.parameters())
    for index, x in enumerate(batches(4)):
        x = own_chunk(x).to("pretend")
        pretend.synchronize()
        with pretend.no_host_waits() if index > 0 else contextlib.nullcontext():
            way.iteration(model, x)
            fsdp2.clip_grad_norm_(model.parameters(), 1.0, norm_type=way.norm_type)
            optimizer.step()
            optimizer.zero_grad()
    pretend.synchronize()


@on_ranks(2, device="pretend")
def test_an_embedding_that_shrinks_its_rows_makes_nobody_wait_and_keeps_what_it_shrank():
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Embedding(11, 6, max_norm=1.0), nn.Linear(6, 5))
    model = copy.deepcopy(reference).to("pretend")
    fsdp2.fully_shard(model, mesh=init_device_mesh("pretend", (2,)))
    for index, ids in enumerate(torch.randint(0, 11, (3, 2, 4))):
        reference(ids)
        own = ids[dist.get_rank()].to("pretend")
        pretend.synchronize()
        with pretend.no_host_waits() if index > 0 else contextlib.nullcontext():
            model(own).sum().backward()
    torch.testing.assert_close(model[0].weight.full_tensor().cpu(), reference[0].weight.detach())


@on_ranks(1, device="pretend")
def test_in_full_graph_mode_too_a_pinned_input_may_be_refilled_when_forward_has_returned():
    model = fsdp2.fully_shard(nn.Linear(5, 3, device="pretend"), mesh=init_device_mesh("pretend", (1,)))
    fsdp2.compile(model)
    x = torch.ones(2, 5).pin_memory()
    with mock.patch.object(FullGraph, "_new_run", return_value=torch.clone):  # no compiler knows this device
        output = model(x)
    x.fill_(7)
    assert output.cpu().eq(1).all()


class Choosing(nn.Module):
    """Every block has parameters that ``route`` leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Pair() for _ in range(3))

    def forward(self, x: Tensor, route: int | None) -> Tensor:
        for block in self.blocks:
            x = x + block(x, route)
        return x


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))

    def forward(self, x: Tensor, route: int | None) -> Tensor:
        return sum(layer(x) for index, layer in enumerate(self.layers) if route in (None, index))


@on_ranks(2, device="pretend")
@pytest.mark.parametrize("common", [True, False])
def test_the_host_waits_once_a_backward_where_a_rank_misses_gradients(common):
    """Symptom: for the flags of each group, and for a list of places on the way to the device."""
    torch.manual_seed(0)
    reference = Choosing()
    torch.manual_seed(0)
    model = sharded(Choosing(), Way(), Pair)
    routes = [0, 0 if common else 1]
    for x in batches(2, (4, 7)):
        here = own_chunk(x).to("pretend")
        model.zero_grad()
        reference.zero_grad()
        pretend.synchronize()
        pretend.reset_counts()
        model(here, routes[dist.get_rank()]).square().mean().backward()
        waits = pretend.host_waits()
        fsdp2.clip_grad_norm_(model.parameters(), 1e9)
        assert pretend.host_waits() == waits
        assert sum(waits.values()) == 1
        for route, chunk in zip(routes, x.chunk(2), strict=True):
            (reference(chunk, route).square().mean() / 2).backward()
        found = {name: grad if grad is None else grad.full_tensor().cpu() for name, grad in grads_of(model).items()}
        assert_equal_grads(found, grads_of(reference), ulps=64)


@on_ranks(2, device="pretend")
@pytest.mark.parametrize(
    ("name", "steps"), [("bf16", 5), *(pytest.param(name, 100, marks=pytest.mark.slow) for name in ("bf16", "hsdp"))]
)
def test_with_kept_storage_no_step_waits_for_the_device_or_moves_a_storage(name, steps):
    """What a graph capture asks of a step: fixed addresses, and a host that only queues."""
    way = WAYS[name]
    model = sharded(mlp(), way, Block)
    model.set_keep_unsharded_storage(True)
    optimizer = sgd(model.parameters())
    addresses = set()
    x = own_chunk(batches(1)[0]).to("pretend")
    for index in range(steps):
        with pretend.no_host_waits() if index > 0 else contextlib.nullcontext():
            way.iteration(model, x)
            optimizer.step()
            optimizer.zero_grad()
            if index > 0:
                params = [param for unit in (model, *model.blocks) for group in unit._get_fsdp_state().groups for param in group.params]
                shards = [param.sharded.to_local().data_ptr() for param in params]
                addresses.add((*shards, *(param.unsharded.data_ptr() for param in params)))
        pretend.synchronize()
    assert len(addresses) == 1
    assert all(param.unsharded.untyped_storage().nbytes() > 0 for param in params)


@on_ranks(2, device="pretend")
def test_a_static_step_does_nothing_that_a_graph_capture_refuses():
    way = WAYS["bf16"]
    model = sharded(mlp(), way, Block)
    model.set_keep_unsharded_storage(True)
    optimizer = sgd(model.parameters())
    x = own_chunk(batches(1)[0]).to("pretend")
    for index in range(4):
        pretend.synchronize()
        with pretend.capturing() if index > 1 else contextlib.nullcontext():
            way.iteration(model, x)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)


@on_ranks(2, device="pretend")
def test_a_capture_takes_activations_to_the_host_and_back():
    """Copies to the host that were under way when the capture began, and those of the capture, are asked about by nobody inside of it.

    A step captured, one that is not, and one captured again: events of a graph and events from outside never meet.
    """
    model = mlp(num_blocks=4)
    fsdp2.apply_activation_offload(model, min_nbytes=0)
    memory = around_forward(model.blocks[0]).outer.memory
    model = sharded(model, WAYS["bf16"], Block)
    model.set_keep_unsharded_storage(True)
    optimizer = sgd(model.parameters())
    x = own_chunk(batches(1)[0]).to("pretend")
    for index in range(6):
        memory.peak_nbytes = 0
        with pretend.capturing() if index in (2, 3, 5) else contextlib.nullcontext():
            forward_backward(model, x)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        assert memory.peak_nbytes > 0, index


@on_ranks(1, device="pretend")
def test_a_step_of_one_rank_is_captured():
    """Symptom: compute waited for an event of the gather stream, which had no part in the capture."""
    for name in ("fp32", "bf16"):
        mesh = init_device_mesh("pretend", (1,))
        model = fsdp2.parallelize(mlp(num_blocks=2).to("pretend"), "zero3", mesh=mesh, wrap={Block}, **WAYS[name].options)
        model.set_keep_unsharded_storage(True)
        optimizer = sgd(model.parameters())
        x = own_chunk(batches(1)[0]).to("pretend")
        for index in range(5):
            with pretend.capturing() if index in (2, 4) else contextlib.nullcontext():
                forward_backward(model, x)
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)


class Isolated(DeviceStreams):
    """While a graph is captured, a wait for an event from before the capture is an error, as on CUDA."""

    def __init__(self) -> None:
        super().__init__(torch.device("pretend", 0))
        self.captured: list[Any] = []

    def mark(self, stream: Any) -> Any:
        event = super().mark(stream)
        if self.is_capturing():
            self.captured.append(event)
        return event

    def order(self, stream: Any, event: Any) -> None:
        assert event is None or not self.is_capturing() or any(event is each for each in self.captured), (
            "an event from before the capture"
        )
        super().order(stream, event)


@on_ranks(2, device="pretend")
def test_a_captured_step_waits_for_nothing_from_before_the_capture():
    """Symptom: it waited for the event of ``set_post_optim_event``. One from inside of the capture is waited for."""
    streams = Isolated()
    with use_streams(torch.device("pretend", 0), streams):
        model = sharded(mlp(), Way(options=BF16), Block)
        model.set_keep_unsharded_storage(True)
        optimizer = sgd(model.parameters())
        x = own_chunk(batches(1)[0]).to("pretend")
        side, module = torch.Stream("pretend"), torch.get_device_module("pretend")
        for index in range(4):
            pretend.synchronize()
            with pretend.capturing() if index > 1 else contextlib.nullcontext():
                for _ in range(2):
                    forward_backward(model, x)
                    side.wait_stream(module.current_stream())
                    with module.stream(side):
                        optimizer.step()
                        optimizer.zero_grad(set_to_none=False)
                    event = streams.mark(side)
                    model.set_post_optim_event(event)
                    module.current_stream().wait_stream(side)
                with mock.patch.object(streams, "order", wraps=streams.order) as order:
                    forward_backward(model, x)
                assert any(call.args[1] is event for call in order.call_args_list)
            model.set_post_optim_event(streams.mark(side))


@on_ranks(2, device="pretend")
def test_a_captured_step_leaves_reductions_of_another_model_from_before_the_capture_to_later():
    """Symptom: the end of its backward waited for their event, which no graph can do."""
    with use_streams(torch.device("pretend", 0), Isolated()):
        other, model = (sharded(mlp(), Way(options=BF16), Block) for _ in range(2))
        model.set_keep_unsharded_storage(True)
        optimizer = sgd(model.parameters())
        x = own_chunk(batches(1)[0]).to("pretend")
        expected: dict[str, Tensor | None] = {}
        for index in range(5):
            pretend.synchronize()
            other.set_is_last_backward(False)
            forward_backward(other, x)
            with pretend.capturing() if index > 1 else contextlib.nullcontext():
                forward_backward(model, x)
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
            other.set_is_last_backward(True)
            forward_backward(other, x)
            found = grads_of(other)
            expected = expected or found
            for name, grad in found.items():
                assert torch.equal(grad.to_local().cpu(), expected[name].to_local().cpu()), (index, name)
            other.zero_grad()


@on_ranks(2, device="pretend")
def test_a_gather_that_the_user_began_before_a_capture_is_refused_in_it_by_name():
    """Symptom: the captured forward waited for its event, which no graph can do."""
    with use_streams(torch.device("pretend", 0), Isolated()):
        model = sharded(mlp(), Way(options=BF16), Block)
        model.set_keep_unsharded_storage(True)
        x = own_chunk(batches(1)[0]).to("pretend")
        for _ in range(2):
            model.blocks[0].unshard(async_op=True)
            forward_backward(model, x)
        handle = model.blocks[0].unshard(async_op=True)
        pretend.synchronize()
        with pretend.capturing(), pytest.raises(OrderError, match=r"(?s)unshard.* of blocks\.0 was under way.*fix:"):
            forward_backward(model, x)
        handle.wait()
        with pretend.capturing():
            model.blocks[1].unshard(async_op=True)
            forward_backward(model, x)


@on_ranks(1, device="pretend")
def test_the_wait_for_a_pinned_input_ends_with_its_copy():
    """At its end, forward waits for what the device had to do before it and for the copy: for none of its own work."""
    model = fsdp2.fully_shard(nn.Linear(5, 3, device="pretend"), mesh=init_device_mesh("pretend", (1,)))
    x = torch.ones(2, 5).pin_memory()
    model(x)
    pretend.synchronize()
    pretend.reset_counts()
    with pretend.traced() as ran:
        model(x)
    assert pretend.host_waits() == {"event.synchronize": 1}
    assert any("from pinned memory" in entry for entry in ran)
    assert not any("addmm" in entry for entry in ran), ran
