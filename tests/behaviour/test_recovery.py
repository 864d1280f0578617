"""After an exception anywhere in an iteration, ``reset_iter_state()`` makes the next step that of a model that never failed."""

from __future__ import annotations

import contextlib
import copy
import gc
import types
import weakref
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from fsdp2 import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
    set_semantics,
)
from fsdp2.core.comm import collectives
from fsdp2.errors import OrderError
from fsdp2.torch_names import torch_autograd
from harness import cpu_mesh, on_ranks
from harness.models import Block, batches
from harness.sharding import shard_blocks, with_reference
from harness.training import (
    assert_same_bits,
    assert_trains_as,
    assert_trains_bitwise_as,
    fed_in_chunks,
    fed_own_chunk,
    forward_backward,
    own_chunk,
)


class Trap(torch.autograd.Function):
    """Identity that raises in backward."""

    @staticmethod
    def forward(ctx, x: Tensor, error: BaseException) -> Tensor:
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
        self.error: BaseException = RuntimeError("trap")

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
    return shard_blocks(model, after, offload_policy=policy)


def make(cls: type[Fails], after: bool | None = None, offload: bool = False) -> tuple[Fails, Fails]:
    torch.manual_seed(0)
    model, reference = with_reference(cls())
    return shard(model, after, offload), reference


def fail(model: Fails, x: Tensor, where: str, error: BaseException | None = None) -> None:
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
    assert_trains_bitwise_as(model, reference, batches(1))
    for _ in range(2):
        fail(model, own_chunk(batches(1, seed=5)[0]), where)
        model.reset_iter_state()
        assert_clean(model)
        assert all(param.grad is None for param in model.parameters())
        assert_trains_bitwise_as(model, reference, batches(2))


@on_ranks(2)
@pytest.mark.parametrize("after", [True, False, None])
def test_a_forward_that_fails_under_the_memory_tracker_ends_as_without_it(after):
    """Its hooks run ours: a failed forward ended like one that had returned None, and its error was not explained."""
    model, reference = make(Fails, after)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    assert_trains_bitwise_as(model, reference, batches(1))
    explained: list[str] = []
    unit = type(model._get_fsdp_state())
    with FSDPMemTracker(model, optimizer), mock.patch.object(unit, "explain", lambda self, error: explained.append(str(error))):
        fail(model, own_chunk(batches(1, seed=5)[0]), "forward")
    assert explained == ["trap"]
    assert_clean(model)
    assert_trains_bitwise_as(model, reference, batches(2))


@on_ranks(1, 3)
@pytest.mark.parametrize(("cls", "where"), CASES[1:5])
def test_an_exception_in_the_very_first_iteration(cls, where):
    model, reference = make(cls)
    fail(model, own_chunk(batches(1, seed=5)[0]), where)
    model.reset_iter_state()
    assert_trains_bitwise_as(model, reference, batches())


@on_ranks(2)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_out_of_memory_then_a_smaller_batch(where):
    model, reference = make(Fails)
    fail(model, own_chunk(batches(1, seed=5)[0]), where, torch.OutOfMemoryError("trap: out of memory"))
    model.reset_iter_state()
    half = [x[:6] for x in batches()]
    assert_trains_bitwise_as(model, reference, half)


@on_ranks(2)
@pytest.mark.parametrize("what", ["gather", "collect"])
def test_our_own_allocations_may_be_what_runs_out_of_memory(what):
    """Allocating the unsharded storage, or a reduce-scatter input, is where memory usually ends."""
    from fsdp2.core.comm.streams import HostStreams
    from fsdp2.core.group.gradients import Gradients

    model, reference = make(Fails)
    calls = 0

    def fails_at(call: int, function):
        def run(*args):
            nonlocal calls
            calls += 1
            if calls == call:
                raise torch.OutOfMemoryError("trap")
            return function(*args)

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
        assert_trains_bitwise_as(model, reference, batches(2))


@on_ranks(2)
def test_a_forward_that_runs_out_of_memory_on_the_host_may_be_repeated():
    """Symptom: LostRankError; then the gather seemed to be complete, and forward computed with parameters that have no memory."""
    from fsdp2.core.comm.streams import HostStreams

    model, reference = make(Fails)
    x = batches(1)[0]
    told = "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"
    for _ in range(3):  # the first forward makes the storages, later ones prefetch
        with torch.no_grad():
            with mock.patch.object(HostStreams, "resize", side_effect=RuntimeError(told)), pytest.raises(RuntimeError) as caught:
                model(x)
            assert str(caught.value) == told
            assert torch.equal(model(x), reference(x))
        assert_trains_bitwise_as(model, reference, batches(1))


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
    assert_trains_bitwise_as(model, reference, batches())


@on_ranks(1, 2)
@pytest.mark.parametrize("kind", ["tensor", "post accumulate"])
def test_stop_iteration_in_a_hook_of_the_user_ends_backward_and_is_shown(kind):
    """Python makes it the cause of a RuntimeError where a generator of ours runs the hook; swallowed, it would end that one early."""
    model, reference = make(Fails)

    def raises(*args):
        raise StopIteration("trap")

    block = model.blocks[1]
    handle = (
        block.up.weight.register_post_accumulate_grad_hook(raises)
        if kind == "post accumulate"
        else block.register_full_backward_hook(raises)
    )
    with pytest.raises((StopIteration, RuntimeError)) as raised:
        forward_backward(model, own_chunk(batches(1, seed=5)[0]))
    assert repr(raised.value.__cause__ or raised.value) == "StopIteration('trap')"
    handle.remove()
    model.reset_iter_state()
    assert_clean(model)
    assert_trains_bitwise_as(model, reference, batches())


@on_ranks(2)
def test_resetting_twice_early_and_from_a_nested_module():
    model, reference = make(Fails)
    model.reset_iter_state()
    model.blocks[0].reset_iter_state()  # no forward yet: it may still become a root
    assert_trains_bitwise_as(model, reference, batches(1))
    fail(model, own_chunk(batches(1, seed=5)[0]), "backward")
    with pytest.raises(OrderError, match="must be called on the root FSDP module"):
        model.blocks[0].reset_iter_state()
    with pytest.raises(RuntimeError):
        model.blocks[2].reset_iter_state()
    model.reset_iter_state()
    model.reset_iter_state()
    assert_trains_bitwise_as(model, reference, batches())
    model.reset_iter_state()
    assert_trains_bitwise_as(model, reference, batches(2, seed=3))


@on_ranks(1, 2, 3)
def test_a_reset_discards_what_was_accumulated_without_sync():
    """torch's FSDP2 documents that, but keeps the unsharded gradients and adds them to the next step."""
    model, reference = make(Fails)
    model.set_requires_gradient_sync(False)
    forward_backward(model, own_chunk(batches(1, seed=5)[0]))
    fail(model, own_chunk(batches(1, seed=6)[0]), "backward")
    model.reset_iter_state()
    model.set_requires_gradient_sync(True)
    assert_trains_bitwise_as(model, reference, batches())


@on_ranks(4)
def test_a_reset_discards_partial_reductions():
    model, reference = make(Fails)
    torch.manual_seed(0)
    model = copy.deepcopy(reference)
    shard_blocks(model, mesh=cpu_mesh(2, 2))
    model.set_requires_all_reduce(False)
    forward_backward(model, own_chunk(batches(1, seed=5)[0]))
    model.reset_iter_state()
    model.set_requires_all_reduce(True)
    fail(model, own_chunk(batches(1, seed=6)[0]), "backward")
    model.reset_iter_state()
    assert_trains_as(model, reference, batches())


@on_ranks(2)
def test_a_failed_forward_keeps_the_gradients_of_micro_batches_that_succeeded_by_2_13s_semantics():
    """From 2.15 on, a reset drops them too (tests/numerics/test_grad_dtype.py)."""
    set_semantics("2.13")
    model, reference = make(Fails)
    set_semantics("torch")

    def iteration(model: Fails, x: Tensor) -> Tensor:
        one, two, three = x.chunk(3)
        loss = forward_backward(model, one)
        if isinstance(model, FSDPModule):
            fail(model, two, "forward")
            model.reset_iter_state()
        return loss + forward_backward(model, three)

    assert_trains_as(model, reference, batches(), iteration=iteration)


@on_ranks(2)
def test_a_failed_backward_discards_the_whole_step():
    """It was added to what earlier micro-batches left, in some parameters: nobody could tell in which."""
    model, reference = make(Fails)
    forward_backward(model, own_chunk(batches(1, seed=5)[0]))
    fail(model, own_chunk(batches(1, seed=6)[0]), "backward")
    model.reset_iter_state()
    assert all(param.grad is None for param in model.parameters())
    assert_trains_bitwise_as(model, reference, batches())


@on_ranks(1, 2)
def test_recovery_with_offloading():
    model, reference = make(Fails, offload=True)
    for where in ("forward", "backward"):
        fail(model, own_chunk(batches(1, seed=5)[0]), where)
        model.reset_iter_state()
        assert_trains_bitwise_as(model, reference, batches(2))


@on_ranks(2)
@pytest.mark.parametrize("where", ["first", "second"])
def test_an_exception_between_the_modules_of_a_list(where):
    model, reference = with_reference(Fails())
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
    assert_trains_bitwise_as(model, reference, batches())


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


# --- without reset_iter_state ----------------------------------------------------------------------------------------------------


def write_as_ema_does(model: nn.Module, through: str) -> None:
    """Halve every weight, through what ``state_dict`` gives, or through the parameters that an optimizer holds."""
    with torch.no_grad():
        values = model.state_dict().values() if through == "state dict" else model.held
        for value in values:
            value.mul_(0.5)


def caught_then_written(after: bool | None, through: str, grad: bool, cls: type[Fails] = Fails, where: str = "forward"):
    """Train a step, fail in a forward, write all weights; returns the model and its reference."""
    model, reference = make(cls, after)
    model.held, reference.held = list(model.parameters()), list(reference.parameters())
    assert_trains_bitwise_as(model, reference, batches(1))
    model.where = where
    with pytest.raises(RuntimeError, match="trap"), torch.set_grad_enabled(grad):
        model(own_chunk(batches(1, seed=5)[0]))
    model.where = ""
    model.error.__traceback__ = None
    write_as_ema_does(model, through)
    write_as_ema_does(reference, through)
    return model, reference


@on_ranks(2)
@pytest.mark.parametrize("after", [True, False, None])
@pytest.mark.parametrize("through", ["state dict", "held parameters"])
@pytest.mark.parametrize("grad", [True, False])
def test_weights_written_after_a_failed_forward_are_what_is_evaluated_and_trained(after, through, grad):
    """Symptom: what was unsharded when the forward raised stayed so, and the next evaluation and step used the old values."""
    model, reference = caught_then_written(after, through, grad)
    x = batches(1, seed=6)[0]
    with torch.no_grad():
        assert torch.equal(model(x), reference(x))
        write_as_ema_does(model, through)
        write_as_ema_does(reference, through)
        assert torch.equal(model(x), reference(x))
    assert_trains_bitwise_as(model, reference, batches(2))


@on_ranks(2)
@pytest.mark.parametrize("after", [True, None])
def test_a_failed_forward_leaves_no_more_unsharded_than_one_that_ended(after):
    model, _ = make(Fails, after)
    forward_backward(model, own_chunk(batches(1)[0]))
    model.where = "forward"
    with pytest.raises(RuntimeError, match="trap"), torch.no_grad():
        model(own_chunk(batches(1)[0]))
    assert_clean(model)


@on_ranks(2)
def test_a_submodule_is_evaluated_with_the_weights_written_after_a_failed_forward_of_its_root():
    model, reference = caught_then_written(False, "state dict", True)
    x = torch.randn(3, 10)
    with torch.no_grad():
        assert torch.equal(model.blocks[0](x), reference.blocks[0](x))


class FallsBack(Fails):
    """Catches what its second block raises and goes on without it."""

    def run(self, index: int, x: Tensor) -> Tensor:
        try:
            return self.blocks[index](x)
        except RuntimeError:
            return x


@on_ranks(2)
@pytest.mark.parametrize("after", [True, False, None])
def test_a_forward_may_catch_what_one_of_its_blocks_raises(after):
    model, reference = make(FallsBack, after)

    def raises(module: nn.Module, args) -> None:
        if model.where:
            raise RuntimeError("trap")

    for each in (model, reference):
        each.blocks[1].down.register_forward_pre_hook(raises)
    for fails in ("", "yes", "yes", ""):
        model.where = fails
        assert_trains_bitwise_as(model, reference, batches(1))
        with torch.no_grad():
            x = batches(1, seed=6)[0]
            assert torch.equal(model(x), reference(x))
            if after is not False:
                assert_clean(model)
            write_as_ema_does(model, "state dict")
            write_as_ema_does(reference, "state dict")
            assert torch.equal(model(x), reference(x))


@on_ranks(2)
def test_a_failed_forward_of_a_registered_method_is_over():
    model, reference = make(Fails, False)
    for each in (model, reference):
        each.generate = lambda x, model=each: model(x)
    register_fsdp_forward_method(model, "generate")
    x = batches(1, seed=6)[0]
    assert torch.equal(model.generate(x), reference.generate(x))
    model.where = "forward"
    with pytest.raises(RuntimeError, match="trap"):
        model.generate(x)
    model.where = ""
    write_as_ema_does(model, "state dict")
    write_as_ema_does(reference, "state dict")
    with torch.no_grad():
        assert torch.equal(model.generate(x), reference.generate(x))
    assert_trains_bitwise_as(model, reference, batches(2))


def code_in(folder: str, code: types.CodeType) -> types.CodeType:
    inner = [code_in(folder, each) if isinstance(each, types.CodeType) else each for each in code.co_consts]
    return code.replace(co_filename=folder + code.co_filename, co_consts=tuple(inner))


@contextlib.contextmanager
def torch_installed_in(folder: str):
    """Inside, the frames that call hooks have a path below ``folder``."""
    callers = (nn.Module._call_impl, nn.Module._wrapped_call_impl)
    codes = [each.__code__ for each in callers]
    try:
        for each in callers:
            each.__code__ = code_in(folder, each.__code__)
        yield
    finally:
        for each, code in zip(callers, codes, strict=True):
            each.__code__ = code


@on_ranks(2)
def test_an_interrupted_forward_is_over_wherever_torch_is_installed():
    model, reference = make(Fails, False)
    x = batches(1, seed=6)[0]
    with torch_installed_in("/home/user/fsdp2/core/"):
        model.where, model.error = "forward", KeyboardInterrupt("trap")
        with pytest.raises(KeyboardInterrupt, match="trap"):
            model(x)
        model.where = ""
        for _ in range(2):
            write_as_ema_does(model, "state dict")
            write_as_ema_does(reference, "state dict")
            with torch.no_grad():
                assert torch.equal(model(x), reference(x))


@on_ranks(2)
@pytest.mark.parametrize("after", [True, False, None])
def test_an_interrupted_forward_is_over_when_the_next_one_begins(after):
    """``KeyboardInterrupt`` is no ``Exception``: torch calls no hook then."""
    model, reference = make(Fails, after)
    assert_trains_bitwise_as(model, reference, batches(1))
    model.where, model.error = "forward", KeyboardInterrupt("trap")
    for grad in (True, False):
        with pytest.raises(KeyboardInterrupt, match="trap"), torch.set_grad_enabled(grad):
            model(own_chunk(batches(1)[0]))
    model.where = ""
    x = batches(1, seed=6)[0]
    for _ in range(2):
        write_as_ema_does(model, "state dict")
        write_as_ema_does(reference, "state dict")
        with torch.no_grad():
            assert torch.equal(model(x), reference(x))
    assert_trains_bitwise_as(model, reference, batches(2))


@on_ranks(2)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_after_a_failed_step_the_order_of_prefetches_is_that_of_the_last_whole_one(where):
    from fsdp2.core.group.param_group import ParamGroup

    model, _ = make(Fails, True)
    x = own_chunk(batches(1)[0])

    def order() -> list[str]:
        issued: list[str] = []
        issue = ParamGroup.issue

        def recorded(self, *args) -> None:
            if self.state.name == "SHARDED":
                issued.append(self.fqn)
            issue(self, *args)

        with mock.patch.object(ParamGroup, "issue", recorded):
            forward_backward(model, x)
        return issued

    order()
    usual = order()
    fail(model, x, where)
    model.zero_grad()
    assert order() == usual
    assert order() == usual


# --- a failed backward without reset_iter_state ----------------------------------------------------------------------------------


def retried(model: Fails, x: Tensor, where: str, error: BaseException, zero_grad: str) -> Tensor:
    """A step whose first attempt raises in backward; then what every training loop does."""
    if isinstance(model, FSDPModule):
        fail(model, x, where, error)
        optimizer = torch.optim.SGD(model.held, lr=0.1)
        if zero_grad == "optimizer":
            optimizer.zero_grad()
        else:
            model.zero_grad()
    return forward_backward(model, x)


@on_ranks(2)
@pytest.mark.parametrize("after", [True, False, None])
@pytest.mark.parametrize("zero_grad", ["optimizer", "model"])
@pytest.mark.parametrize(("cls", "where"), [case for case in CASES if case[1] != "forward"])
def test_a_failed_backward_then_zero_grad_then_a_retry_gives_each_gradient_once(cls, where, zero_grad, after):
    """Symptom: a reduction that was under way when backward raised was handed out with the retry: twice the gradient."""
    model, reference = make(cls, after)
    model.held = list(model.parameters())

    def iteration(each: Fails, x: Tensor) -> Tensor:
        return retried(each, x, where, RuntimeError("trap"), zero_grad)

    assert_trains_bitwise_as(model, reference, batches(), iteration=iteration)
    assert_trains_bitwise_as(model, reference, batches(1))


@on_ranks(2)
def test_a_failed_backward_is_over_when_the_next_forward_begins_though_the_engine_still_holds_its_callback():
    """Symptom: a thread of the engine dropped the callback after the retry's forward had begun, whose gradients were then lost."""
    model, reference = make(Fails)
    model.held = list(model.parameters())
    held = []
    queue = torch_autograd.queue_end_of_backward

    def iteration(each: Fails, x: Tensor) -> Tensor:
        return retried(each, x, "backward", RuntimeError("trap"), "optimizer")

    with mock.patch.object(torch_autograd, "queue_end_of_backward", lambda callback: held.append(callback) or queue(callback)):
        steps = fed_own_chunk(model, batches(), iteration=iteration)
    assert len(held) == 2 * len(batches())
    assert_same_bits(steps, fed_in_chunks(reference, batches(), iteration=iteration))


@on_ranks(2)
@pytest.mark.parametrize("error", [MemoryError("trap"), KeyboardInterrupt("trap")])
@pytest.mark.parametrize("buffers", [1, 4])
def test_what_raises_in_backward_makes_no_difference(error, buffers):
    model, reference = make(Fails)
    model.held = list(model.parameters())
    model.set_reduce_scatter_max_input_buffers(buffers)

    def iteration(each: Fails, x: Tensor) -> Tensor:
        return retried(each, x, "backward", error, "optimizer")

    assert_trains_bitwise_as(model, reference, batches(), iteration=iteration)


@on_ranks(2)
def test_a_failed_backward_without_sync_then_zero_grad_then_a_retry_gives_each_gradient_once():
    model, reference = make(Fails)
    model.held = list(model.parameters())

    def iteration(each: Fails, x: Tensor) -> Tensor:
        one, two = x.chunk(2)
        if isinstance(each, FSDPModule):
            each.set_requires_gradient_sync(False)
        loss = retried(each, one, "backward", RuntimeError("trap"), "optimizer")
        if isinstance(each, FSDPModule):
            each.set_requires_gradient_sync(True)
        return loss + forward_backward(each, two)

    assert_trains_bitwise_as(model, reference, batches(), iteration=iteration)


@on_ranks(2)
@pytest.mark.parametrize("drop", ["reset_iter_state", "zero_grad"])
def test_a_backward_that_failed_among_gradients_that_wait_is_refused_until_they_are_dropped(drop):
    """Earlier micro-batches and a part of the failed one were added up; ``optimizer.zero_grad()`` cannot reach them."""
    model, reference = make(Fails)
    model.set_requires_gradient_sync(False)
    x = own_chunk(batches(1, seed=5)[0])
    forward_backward(model, x)
    fail(model, x, "backward")
    torch.optim.SGD(model.parameters(), lr=0.1).zero_grad()
    for _ in range(2):
        with pytest.raises(OrderError, match="reset_iter_state"):
            model(x)
    getattr(model, drop)()
    model.set_requires_gradient_sync(True)
    assert_trains_bitwise_as(model, reference, batches())


@on_ranks(2)
def test_a_backward_may_be_retried_through_a_graph_that_was_retained():
    model, reference = make(Fails)
    fails = True

    def raises(grad: Tensor) -> None:
        if fails:
            raise RuntimeError("trap")

    for each in (model, reference):
        each.blocks[1].register_forward_hook(lambda module, args, output: output.register_hook(raises) and None)

    def iteration(each: Fails, x: Tensor) -> Tensor:
        nonlocal fails
        loss = each(x).square().mean()
        fails = True
        with pytest.raises(RuntimeError, match="trap"):
            loss.backward(retain_graph=True)
        each.zero_grad()
        fails = False
        loss.backward()
        return loss

    assert_trains_bitwise_as(model, reference, batches(), iteration=iteration)


@on_ranks(2)
@pytest.mark.parametrize("manual", [False, True])
def test_after_a_gradient_hook_that_raises_zero_grad_forgets_the_step(manual):
    """Finishing a reduction whose hook raised must neither fail nor hand out what is no gradient."""
    model, reference = with_reference(nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)]), shard_blocks)
    fails = [True]

    def hook(param: nn.Parameter) -> None:
        if fails[0]:
            raise ValueError("no")

    for layer in (model[0], model[2]):
        layer.weight.register_post_accumulate_grad_hook(hook)
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    model.set_manual_backward_finalization(manual)

    def step() -> None:
        model(x).sum().backward()
        if manual:
            model.finalize_backward(async_op=True).wait()

    with pytest.raises(ValueError, match="no"):
        step()
    fails[0] = False
    model.zero_grad()
    step()
    reference(x).sum().backward()
    for param, whole in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), whole.grad)


@on_ranks(2)
def test_a_hook_may_call_zero_grad():
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    shard_blocks(model)
    model[1].weight.register_post_accumulate_grad_hook(lambda param: model[1].zero_grad())
    model(torch.ones(3, 8)).sum().backward()
    assert model[1].weight.grad is None
    assert model[2].weight.grad is not None


@pytest.mark.parametrize("is_completed", [True, False], ids=["seen by a look", "waited for"])
@on_ranks(2)
def test_after_a_reduction_that_failed_nothing_is_handed_out(is_completed):
    """Its output is memory that nobody has written."""
    model, seen = fully_shard(nn.Linear(8, 8), mesh=cpu_mesh()), []
    model.weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad))
    loss = model(torch.ones(3, 8)).sum()
    with (
        mock.patch.object(collectives.Works, "finish", side_effect=RuntimeError("Connection closed by peer")),
        mock.patch.object(collectives.Works, "is_completed", return_value=is_completed),
    ):
        with pytest.raises(RuntimeError, match="Connection closed"):
            loss.backward()
        with contextlib.suppress(RuntimeError):
            model.zero_grad()
    assert seen == []
