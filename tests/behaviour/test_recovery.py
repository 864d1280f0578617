"""After an exception anywhere in an iteration, ``reset_iter_state()`` makes the next step that of a model that never failed."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from fsdp2 import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from fsdp2.errors import OrderError
from harness import cpu_mesh, on_ranks
from harness.models import Block, batches
from harness.training import assert_equal_training, assert_same_bits, fed_in_chunks, fed_own_chunk, forward_backward, own_chunk


class Trap(torch.autograd.Function):
    """Identity that raises in backward."""

    @staticmethod
    def forward(ctx, x: Tensor, error: Exception) -> Tensor:
        ctx.error = error
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        raise ctx.error


class Fails(nn.Module):
    """An MLP of blocks; ``where`` says what raises ``error`` in this forward, and the place in front of which block."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 10)
        self.blocks = nn.ModuleList(Block(10) for _ in range(3))
        self.last = nn.Linear(10, 5)
        self.where = ""
        self.error: Exception = RuntimeError("trap")

    def run(self, index: int, x: Tensor) -> Tensor:
        block = self.blocks[index]
        if index == 1:
            if self.where == "forward":
                raise self.error
            if self.where == "backward":
                x = Trap.apply(x, self.error)
        return block(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for index in range(3):
            x = self.run(index, x)
        return self.last(x)


class FailsInCheckpoint(Fails):
    """Blocks are recomputed in backward."""

    reentrant = False

    def run(self, index: int, x: Tensor) -> Tensor:
        return checkpoint(self.inside, index, x, use_reentrant=self.reentrant)

    def inside(self, index: int, x: Tensor) -> Tensor:
        return super().run(index, x)


class FailsInReentrantCheckpoint(FailsInCheckpoint):
    reentrant = True


def shard(model: nn.Module, after: bool | None = None, offload: bool = False) -> nn.Module:
    policy = CPUOffloadPolicy() if offload else OffloadPolicy()
    for block in model.blocks:
        fully_shard(block, mesh=cpu_mesh(), reshard_after_forward=after, offload_policy=policy)
    return fully_shard(model, mesh=cpu_mesh(), reshard_after_forward=after, offload_policy=policy)


def make(cls: type[Fails], after: bool | None = None, offload: bool = False) -> tuple[Fails, Fails]:
    torch.manual_seed(0)
    model = cls()
    reference = copy.deepcopy(model)
    return shard(model, after, offload), reference


def fail(model: Fails, x: Tensor, where: str, error: Exception | None = None) -> None:
    """One iteration that raises. ``where="recompute"``: inside a block that is recomputed in backward."""
    model.where, model.error = where, error or RuntimeError("trap")

    def in_recomputation(*args) -> None:
        if where == "recompute" and torch._C._current_graph_task_id() != -1:
            raise model.error

    handle = model.blocks[1].up.register_forward_hook(in_recomputation)
    with pytest.raises(type(model.error), match="trap"):
        forward_backward(model, x)
    model.error.__traceback__ = None  # torch before 2.13: a checkpoint that failed watches what is saved until its frame is gone
    handle.remove()
    model.where = ""


def assert_clean(model: nn.Module) -> None:
    assert all(isinstance(param, DTensor) for param in model.parameters())


CASES = [
    (Fails, "forward"),
    (Fails, "backward"),
    (FailsInCheckpoint, "forward"),
    (FailsInCheckpoint, "backward"),
    (FailsInCheckpoint, "recompute"),
    (FailsInReentrantCheckpoint, "backward"),
    (FailsInReentrantCheckpoint, "recompute"),
]


@on_ranks(2)
@pytest.mark.parametrize("after", [True, False, None])
@pytest.mark.parametrize(("cls", "where"), CASES)
def test_an_exception_and_a_reset_leave_no_trace(cls, where, after):
    model, reference = make(cls, after)
    assert_same_bits(fed_own_chunk(model, batches(1)), fed_in_chunks(reference, batches(1)))
    for _ in range(2):
        fail(model, own_chunk(batches(1, seed=5)[0]), where)
        model.reset_iter_state()
        assert_clean(model)
        assert all(param.grad is None for param in model.parameters())
        assert_same_bits(fed_own_chunk(model, batches(2)), fed_in_chunks(reference, batches(2)))


@on_ranks(1, 3)
@pytest.mark.parametrize(("cls", "where"), CASES[1:5])
def test_an_exception_in_the_very_first_iteration(cls, where):
    model, reference = make(cls)
    fail(model, own_chunk(batches(1, seed=5)[0]), where)
    model.reset_iter_state()
    assert_same_bits(fed_own_chunk(model, batches()), fed_in_chunks(reference, batches()))


@on_ranks(2)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_out_of_memory_then_a_smaller_batch(where):
    model, reference = make(Fails)
    fail(model, own_chunk(batches(1, seed=5)[0]), where, torch.OutOfMemoryError("trap: out of memory"))
    model.reset_iter_state()
    half = [x[:6] for x in batches()]
    assert_same_bits(fed_own_chunk(model, half), fed_in_chunks(reference, half))


@on_ranks(2)
@pytest.mark.parametrize("what", ["gather", "collect"])
def test_our_own_allocations_may_be_what_runs_out_of_memory(what):
    """Allocating the unsharded storage, or a reduce-scatter input, is where memory usually ends."""
    from unittest import mock

    from fsdp2.core.comm.streams import HostStreams
    from fsdp2.core.group.gradients import Gradients

    model, reference = make(Fails)
    calls = 0

    def fails_at(call: int, function):
        def run(self, *args):
            nonlocal calls
            calls += 1
            if calls == call:
                raise torch.OutOfMemoryError("trap")
            return function(self, *args)

        return run

    x = own_chunk(batches(1, seed=5)[0])
    forward_backward(model, x)
    model.zero_grad()
    for call in (1, 2, 3, 4, 6):
        calls = 0
        where = (HostStreams, "resize") if what == "gather" else (Gradients, "collect")
        with mock.patch.object(*where, fails_at(call, getattr(*where))):
            if what == "collect" and call > 4:
                break
            with pytest.raises(torch.OutOfMemoryError, match="trap"):
                forward_backward(model, x)
        model.reset_iter_state()
        assert_clean(model)
        assert_same_bits(fed_own_chunk(model, batches(2)), fed_in_chunks(reference, batches(2)))


@on_ranks(1, 2)
@pytest.mark.parametrize("kind", ["pre", "post", "full backward", "full backward pre", "tensor", "post accumulate"])
def test_an_exception_in_a_hook_of_the_user(kind):
    model, reference = make(Fails)

    def raises(*args):
        raise RuntimeError("trap")

    block = model.blocks[1]
    kept = []
    if kind == "tensor":
        handle = block.register_forward_hook(lambda module, args, output: kept.append(output.register_hook(raises)))
    else:
        handle = {
            "pre": block.register_forward_pre_hook,
            "post": block.register_forward_hook,
            "full backward": block.register_full_backward_hook,
            "full backward pre": block.register_full_backward_pre_hook,
            "post accumulate": block.up.weight.register_post_accumulate_grad_hook,
        }[kind](raises)
    fail(model, own_chunk(batches(1, seed=5)[0]), "")
    handle.remove()
    model.reset_iter_state()
    assert_clean(model)
    assert all(param.grad is None for param in model.parameters())
    assert_same_bits(fed_own_chunk(model, batches()), fed_in_chunks(reference, batches()))


@on_ranks(2)
def test_resetting_twice_early_and_from_a_nested_module():
    model, reference = make(Fails)
    model.reset_iter_state()
    model.blocks[0].reset_iter_state()  # no forward yet: it may still become a root
    assert_same_bits(fed_own_chunk(model, batches(1)), fed_in_chunks(reference, batches(1)))
    fail(model, own_chunk(batches(1, seed=5)[0]), "backward")
    with pytest.raises(OrderError, match="must be called on the root FSDP module"):
        model.blocks[0].reset_iter_state()
    with pytest.raises(RuntimeError):
        model.blocks[2].reset_iter_state()
    model.reset_iter_state()
    model.reset_iter_state()
    assert_same_bits(fed_own_chunk(model, batches()), fed_in_chunks(reference, batches()))
    model.reset_iter_state()
    assert_same_bits(fed_own_chunk(model, batches(2, seed=3)), fed_in_chunks(reference, batches(2, seed=3)))


@on_ranks(1, 2, 3)
def test_a_reset_discards_what_was_accumulated_without_sync():
    """torch's FSDP2 documents that, but keeps the unsharded gradients and adds them to the next step."""
    model, reference = make(Fails)
    model.set_requires_gradient_sync(False)
    forward_backward(model, own_chunk(batches(1, seed=5)[0]))
    fail(model, own_chunk(batches(1, seed=6)[0]), "backward")
    model.reset_iter_state()
    model.set_requires_gradient_sync(True)
    assert_same_bits(fed_own_chunk(model, batches()), fed_in_chunks(reference, batches()))


@on_ranks(4)
def test_a_reset_discards_partial_reductions():
    model, reference = make(Fails)
    torch.manual_seed(0)
    model = copy.deepcopy(reference)
    for block in model.blocks:
        fully_shard(block, mesh=cpu_mesh(2, 2))
    fully_shard(model, mesh=cpu_mesh(2, 2))
    model.set_requires_all_reduce(False)
    forward_backward(model, own_chunk(batches(1, seed=5)[0]))
    model.reset_iter_state()
    model.set_requires_all_reduce(True)
    fail(model, own_chunk(batches(1, seed=6)[0]), "backward")
    model.reset_iter_state()
    assert_equal_training(fed_own_chunk(model, batches()), fed_in_chunks(reference, batches()))


@on_ranks(2)
def test_a_failed_forward_keeps_the_gradients_of_micro_batches_that_succeeded():
    model, reference = make(Fails)

    def iteration(model: Fails, x: Tensor) -> Tensor:
        one, two, three = x.chunk(3)
        loss = forward_backward(model, one)
        if isinstance(model, FSDPModule):
            fail(model, two, "forward")
            model.reset_iter_state()
        return loss + forward_backward(model, three)

    assert_equal_training(
        fed_own_chunk(model, batches(), iteration=iteration), fed_in_chunks(reference, batches(), iteration=iteration)
    )


@on_ranks(2)
def test_a_failed_backward_discards_the_whole_step():
    """It was added to what earlier micro-batches left, in some parameters: nobody could tell in which."""
    model, reference = make(Fails)
    forward_backward(model, own_chunk(batches(1, seed=5)[0]))
    fail(model, own_chunk(batches(1, seed=6)[0]), "backward")
    model.reset_iter_state()
    assert all(param.grad is None for param in model.parameters())
    assert_same_bits(fed_own_chunk(model, batches()), fed_in_chunks(reference, batches()))


@on_ranks(1, 2)
def test_recovery_with_offloading():
    model, reference = make(Fails, offload=True)
    for where in ("forward", "backward"):
        fail(model, own_chunk(batches(1, seed=5)[0]), where)
        model.reset_iter_state()
        assert_same_bits(fed_own_chunk(model, batches(2)), fed_in_chunks(reference, batches(2)))


@on_ranks(2)
@pytest.mark.parametrize("where", ["first", "second"])
def test_an_exception_between_the_modules_of_a_list(where):
    torch.manual_seed(0)
    model = Fails()
    reference = copy.deepcopy(model)
    fully_shard([model.blocks[0], model.blocks[1], model.last], mesh=cpu_mesh(), mp_policy=MixedPrecisionPolicy())
    fully_shard(model, mesh=cpu_mesh())
    inner = model.blocks[0] if where == "first" else model.blocks[1]

    def raises(*args):
        raise RuntimeError("trap")

    handle = inner.up.register_forward_hook(raises)
    for _ in range(2):
        fail(model, own_chunk(batches(1, seed=5)[0]), "")
        model.reset_iter_state()
    handle.remove()
    assert_same_bits(fed_own_chunk(model, batches()), fed_in_chunks(reference, batches()))


@on_ranks(1)
def test_a_failed_iteration_keeps_nothing_alive():
    model, _ = make(Fails)
    x = own_chunk(batches(1)[0]).clone().requires_grad_()
    held = weakref.ref(x)
    try:
        model.where = "forward"
        model(x)
    except RuntimeError:
        pass
    model.reset_iter_state()
    model.error.__traceback__ = None  # whose frames have all locals
    del x
    gc.collect()
    assert held() is None
