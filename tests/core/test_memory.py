"""Peak memory is a sum that can be written down: ``peak_memory.peak_of_step`` says it, real training steps are held to it.

    peak = sharded parameters + optimizer state                                   (there before the step)
         + root unsharded + K unsharded or on their way + packed and cast buffers + unsharded gradients
         + reduce inputs, outputs and what the algorithm receives into + sharded gradients so far + activations

Every storage alive is counted at every operation, so that nothing hides; the sum must not be a fantasy either, so it may exceed
what was measured by a tenth at most.
"""

from __future__ import annotations

import contextlib
import gc
import time
import weakref
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any, get_args
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from fsdp2 import MixedPrecisionPolicy, fully_shard
from fsdp2.core.comm import backends, collectives
from fsdp2.core.group.all_gather import Gathering
from fsdp2.core.group.reduction import Reduction
from fsdp2.core.iteration.unit import PrefetchDepth
from fsdp2.core.setup import build
from harness import cpu_mesh, on_ranks
from harness.memory import PeakBytes, covered_bytes
from harness.peak_memory import TransientBytes, peak_of_step, transient_bytes

DIM = 128
BLOCKS = 6
ACTIVATIONS = 64 << 10  # a batch of two rows, and some scalars and flags


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 4 * DIM)
        self.down = nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Model(nn.Module):
    """Equal blocks; the root's own group is as large as a quarter of one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(DIM, 2 * DIM)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def shard(mesh: DeviceMesh, gather: str, **options: Any) -> Model:
    model = Model()
    with patch.dict(build.private_options, gather=gather):
        for block in model.blocks:
            fully_shard(block, mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer | None, x: Tensor) -> None:
    model(x).float().square().mean().backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


def terms(module: nn.Module) -> TransientBytes:
    """The terms of the module's one group, from its plans."""
    (group,) = module._get_fsdp_state().groups
    reduce_layout = group.gradients._planned.plan.layout
    nbytes = reduce_layout.unsharded_numel * group.plan.reduce_dtype.itemsize
    backend = dist.get_backend(group.mesh.shard_group)
    ranks = group.mesh.shard_size
    algorithm = group.options.reduce_scatter or backends.choose_reduce_scatter(backend, ranks, nbytes, "cpu")
    received_rows = {"stock": 0, "all_reduce": 0, "pairwise": ranks - 2, "all_to_all": ranks}[algorithm]
    return transient_bytes(
        group.plan.layout,
        reduce_layout,
        num_direct=group.plan.num_direct,
        itemsize=group.plan.dtype.itemsize,
        param_itemsize=group.plan.param_dtype.itemsize,
        reduce_itemsize=group.plan.reduce_dtype.itemsize,
        received_rows=received_rows,
    )


def explained_peak(model: Model, prefetch: PrefetchDepth, max_reductions: int) -> int:
    """The sum, beyond the sharded state, from the model's plans."""
    first = model.blocks[0]._get_fsdp_state().groups[0]
    on_device = not first.streams.host_waits
    return peak_of_step(
        [terms(block) for block in model.blocks],
        terms(model),
        prefetch=prefetch,
        allocates_early=first.plan.num_direct > 0 or on_device,
        max_reductions=max_reductions,
        casts_early=on_device,
    )


def assert_peak_is_explained(model: Model, *, prefetch: bool, max_reductions: int, depth: PrefetchDepth | None = None) -> None:
    """One step of a model in its steady state, with optimizer state, against the sum."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if not prefetch:
        for unit in (*model.blocks, model):  # naming itself, a unit prefetches nothing
            unit.set_modules_to_forward_prefetch([unit])
            unit.set_modules_to_backward_prefetch([unit])
    x = torch.randn(2, DIM)
    for _ in range(3):
        step(model, optimizer, x)
    state = [*model.parameters(), *(each for state in optimizer.state.values() for each in state.values())]
    storages = [(each.to_local() if isinstance(each, DTensor) else each).untyped_storage() for each in state]
    sharded = covered_bytes((storage.data_ptr(), storage.nbytes()) for storage in storages)
    with PeakBytes() as live:
        live.touch(tensors_of(model))
        live.touch(state)
        between_steps = live.peak
        step(model, None, x)
    # All that there is between steps is the sharded state: nothing is kept unsharded, no buffer is left over.
    assert sharded <= between_steps <= sharded + ACTIVATIONS
    explained = explained_peak(model, depth or PrefetchDepth(int(prefetch)), max_reductions)
    transient = live.peak - sharded
    assert 0.9 * explained <= transient <= explained + ACTIVATIONS, (
        f"transient peak {transient}, explained {explained}; sharded state {sharded}; a block has {terms(model.blocks[0])}; "
        f"largest storages at the peak: {sorted((nbytes for _, nbytes in live.at_peak), reverse=True)[:40]}"
    )


def tensors_of(model: nn.Module) -> list[Tensor]:
    """Every tensor that is reachable from the units of ``model``: their buffers, plans and views."""
    found: list[Tensor] = []
    seen: set[int] = set()
    left: list[Any] = [module._get_fsdp_state() for module in (*model.blocks, model)]
    while left:
        each = left.pop()
        if id(each) in seen or isinstance(each, (type, ModuleType, FunctionType, nn.Module)):
            continue
        seen.add(id(each))
        if isinstance(each, Tensor):
            found.append(each)
        else:
            left += gc.get_referents(each)
    return found


@contextlib.contextmanager
def slow_reductions() -> Iterator[None]:
    """Every reduce-scatter is under way until it is waited for; and then gloo's threads let go of the buffers.

    They do so a moment after ``wait`` returns, when they get Python's lock: until then they keep one more buffer alive.
    """
    advance, finish = Reduction.advance, Gathering.finish

    def advance_and_let_go(self: Reduction) -> None:
        held = [] if self._input is None else [self._input.untyped_storage()]
        references = [weakref.ref(storage) for storage in held]
        del held
        advance(self)
        wait_until_freed(references)

    def finish_and_let_go(self: Gathering) -> None:
        buffers = () if self.pending is None else self.pending._buffers
        own = {id(self.sender.plan.storage), id(self.flat.untyped_storage())}
        storages = [tensor.untyped_storage() for tensor in tree_leaves(list(map(list, buffers)))]
        references = [weakref.ref(storage) for storage in storages if id(storage) not in own]
        del buffers, storages
        finish(self)
        wait_until_freed(references)

    with (
        patch.object(collectives.Works, "is_completed", lambda self: False),
        patch.object(Reduction, "advance", advance_and_let_go),
        patch.object(Gathering, "finish", finish_and_let_go),
    ):
        yield


def wait_until_freed(references: list[Any]) -> None:
    until = time.monotonic() + 5
    while any(reference() is not None for reference in references):
        assert time.monotonic() < until, "a buffer is kept alive behind its collective"
        time.sleep(0)  # lets other threads have the lock


POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "bf16 all": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
}


@pytest.fixture
def fake_mesh() -> Iterator[DeviceMesh]:
    """Eight ranks, of which this process is rank 0; collectives are complete when they return."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield init_device_mesh("cpu", (8,))
    dist.destroy_process_group()


@pytest.mark.parametrize("prefetch", [True, False], ids=["prefetch", "no prefetch"])
@pytest.mark.parametrize("gather", ["direct", "packed", "mixed"])
@pytest.mark.parametrize("policy", POLICIES)
def test_peak_is_the_sum_on_the_fake_process_group(policy, gather, prefetch, fake_mesh):
    model = shard(fake_mesh, gather, mp_policy=POLICIES[policy])
    assert_peak_is_explained(model, prefetch=prefetch, max_reductions=0)


@pytest.mark.parametrize("depth", [PrefetchDepth(0), PrefetchDepth(3), PrefetchDepth(9, 5 * DIM * DIM * 4)], ids=str)
@pytest.mark.parametrize("gather", ["direct", "packed"])
def test_what_is_gathered_ahead_is_in_the_sum(depth, gather, fake_mesh):
    model = shard(fake_mesh, gather)
    model.set_prefetch_depth(depth.units, max_nbytes=depth.max_nbytes)
    assert_peak_is_explained(model, prefetch=True, max_reductions=0, depth=depth)


@on_ranks(2, 3)
@pytest.mark.parametrize(
    ("policy", "gather", "prefetch"),
    [("fp32", "packed", True), ("fp32", "direct", True), ("bf16", "packed", True), ("bf16", "packed", False)],
)
def test_peak_is_the_sum_on_gloo(policy, gather, prefetch):
    """With every reduce-scatter under way until it is waited for, which is the most that it can cost."""
    model = shard(cpu_mesh(), gather, mp_policy=POLICIES[policy])
    with slow_reductions():
        assert_peak_is_explained(model, prefetch=prefetch, max_reductions=1)


@on_ranks(3)
@pytest.mark.parametrize("algorithm", get_args(backends.ReduceScatterAlgorithm))
def test_peak_counts_what_the_reduce_scatter_receives_into(algorithm):
    with patch.dict(build.private_options, reduce_scatter=algorithm):
        model = shard(cpu_mesh(), "packed")
    with slow_reductions():
        assert_peak_is_explained(model, prefetch=True, max_reductions=1)


@on_ranks(4, device="pretend_model")
@pytest.mark.parametrize("policy", ["bf16", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fp32", "bf16 all"))])
def test_an_accelerators_allocator_measures_the_sum(policy):
    """By ``max_memory_allocated``. Of direct gathers: there, a packed buffer goes back as soon as its copy-out is queued."""
    model = shard(cpu_mesh(), "direct", mp_policy=POLICIES[policy])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(2, DIM).to("pretend")
    for _ in range(3):
        step(model, optimizer, x)
    device = torch.get_device_module("pretend")
    device.reset_peak_memory_stats()
    between_steps = device.memory_allocated()
    step(model, None, x)
    transient = device.max_memory_allocated() - between_steps
    explained = explained_peak(model, PrefetchDepth(), max_reductions=1)
    assert 0.9 * explained <= transient <= explained + ACTIVATIONS


@on_ranks(2)
def test_more_reductions_in_flight_cost_one_input_and_output_each():
    model = shard(cpu_mesh(), "packed")
    model.set_reduce_scatter_max_input_buffers(2)
    with slow_reductions():
        assert_peak_is_explained(model, prefetch=True, max_reductions=2)


def test_the_sum_for_equal_groups_is_the_one_of_the_docstring():
    group = TransientBytes(
        unsharded=1000,
        gather_buffers=900,
        unsharded_grads=990,
        reduce_input=1010,
        reduce_output=100,
        reduce_received=30,
        sharded_grads=100,
    )
    root = TransientBytes(50, 0, 50, 50, 10, 0, 10)
    options = {"prefetch": PrefetchDepth(), "max_reductions": 1}
    so_far = 100 * 3  # of 6: unit 1 computes, unit 2 reduces, 3 4 5 are done
    common = root.unsharded + root.unsharded_grads + so_far + 1000 + 990 + 1010 + 100 + 30
    assert peak_of_step([group] * 6, root, allocates_early=False, **options) == common + 900
    assert peak_of_step([group] * 6, root, allocates_early=True, **options) == common + 1000 + 900
    options["prefetch"] = PrefetchDepth(2)
    so_far = 100 * 2  # unit 2 computes, unit 3 reduces: two are left to gather
    assert peak_of_step([group] * 6, root, allocates_early=True, **options) == common - 100 + 2 * (1000 + 900)
