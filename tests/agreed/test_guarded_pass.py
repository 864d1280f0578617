"""``guarded``: an exception in a pass on some ranks makes all ranks skip the step, and train as if it had not been."""

from __future__ import annotations

import contextlib
import copy
import random
import re

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2.core.group.param_group import ParamGroup
from fsdp2.errors import ArgumentError, OrderError
from harness import cpu_mesh, on_ranks
from harness.models import Block

BF16 = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Fails:
    """Counts the places that a pass comes to, and raises at one of them. at: -1: at none"""

    def __init__(self) -> None:
        self.at, self.num_passed, self.error = -1, 0, lambda: ValueError("bad sample")

    def arm(self, at: int, error=None) -> None:
        self.at, self.num_passed, self.error = at, 0, error or (lambda: ValueError("bad sample"))

    def __call__(self) -> None:
        self.num_passed += 1
        if self.num_passed - 1 == self.at:
            raise self.error()


class _May(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, fails: Fails) -> Tensor:
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor):
        ctx.fails()
        return grad, None


class FailingBlock(Block):
    def __init__(self, dim: int, fails: Fails) -> None:
        super().__init__(dim)
        self.fails = [fails]

    def forward(self, x: Tensor) -> Tensor:
        self.fails[0]()
        x = super().forward(_May.apply(x, self.fails[0]))
        self.fails[0]()
        return x


class Tower(nn.Linear):
    pass


class Model(nn.Module):
    """Comes to a place where it may fail before, in and after each block, in forward, recomputation and backward."""

    def __init__(self, fails: Fails) -> None:
        super().__init__()
        self.fails = [fails]
        self.first, self.last = nn.Linear(7, 10), nn.Linear(10, 3)
        self.tower = Tower(5, 10)
        self.blocks = nn.ModuleList(FailingBlock(10, fails) for _ in range(3))
        self.register_buffer("num_seen", torch.zeros(()))

    def forward(self, x: Tensor, image: Tensor | None = None) -> Tensor:
        self.num_seen += len(x)
        torch.rand(3)
        x = self.first(x.to(self.first.weight.dtype))
        if image is not None:
            x = x + self.tower(image.to(x.dtype))
        for block in self.blocks:
            self.fails[0]()
            x = block(x)
        return self.last(_May.apply(x, self.fails[0]))


Batch = tuple[Tensor, Tensor | None]


def batch_of(numbers: random.Random, data: torch.Generator, optional: bool) -> Batch:
    image = torch.randn(2, 5, generator=data)
    return torch.randn(2, 7, generator=data), image if not optional or numbers.random() < 0.5 else None


def loss_of(model: nn.Module, batch: Batch, fails: Fails) -> Tensor:
    fails()
    loss = _May.apply(model(*batch).float(), fails).square().sum()
    fails()
    return loss


def local_bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Of all that a step may change on this rank."""
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [each for state in optimizer.state.values() for each in state.values() if isinstance(each, Tensor)]
    return [torch.get_rng_state(), *(getattr(each, "_local_tensor", each).detach().clone() for each in tensors)]


def run_schedule(seed: int) -> None:
    numbers, rank, world_size = random.Random(seed), dist.get_rank(), dist.get_world_size()
    strategy = numbers.choice(["zero3", "zero2", "hsdp", "hsdp_zero2", "zero1", "ddp"])
    micro_batches, adamw = numbers.choice([1, 1, 2, 3]), numbers.random() < 0.5
    frozen, recomputes, bf16, optional, uneven, resharded = (numbers.random() < 0.3 for _ in range(6))
    case = (
        f"seed {seed}: {strategy}, {micro_batches=}, {adamw=}, {frozen=}, {recomputes=}, {bf16=}, {optional=}, {uneven=}, {resharded=}"
    )
    torch.manual_seed(seed)
    fails = Fails()
    model = Model(fails)
    if frozen:
        model.blocks[0].requires_grad_(False)
        model.first.requires_grad_(optional)  # else the tower alone would make its output need a gradient
    expected = copy.deepcopy(model)
    if recomputes:
        fsdp2.apply_activation_checkpointing(model, [FailingBlock])
    mesh = cpu_mesh(2, 2) if strategy.startswith("hsdp") else cpu_mesh()
    wrap = [FailingBlock, *([Tower] if optional else [])]
    fsdp2.parallelize(model, strategy, wrap=wrap, mesh=mesh, mp_policy=BF16 if bf16 else fsdp2.MixedPrecisionPolicy())
    if optional:
        model.tower.set_optional()
    if resharded and strategy == "zero3":
        model.blocks[1].set_reshard_after_forward(False)
    make = torch.optim.AdamW if adamw else torch.optim.SGD
    ours, its = (make(each.parameters(), lr=0.01, weight_decay=0.1) for each in (model, expected))
    guard = fsdp2.guarded(model)
    data = torch.Generator().manual_seed(seed)
    num_places = 0
    for step in range(5):
        lengths = [numbers.randint(0, micro_batches) if uneven else micro_batches for _ in range(world_size)]
        num_passes = max(*lengths, 1)
        lengths[0] = num_passes if max(lengths) == 0 else lengths[0]
        all_batches = [[batch_of(numbers, data, optional) for _ in range(length)] for length in lengths]
        failing = {each: numbers.randrange(num_passes) for each in range(world_size) if step > 0 and numbers.random() < 0.3}
        place = [numbers.random() for _ in range(world_size)][rank] * num_places
        at = [int(place) if failing.get(rank) == index else -1 for index in range(num_passes)]
        before = local_bits(model, ours)
        has_raised = False
        with fsdp2.uneven(model) if uneven else contextlib.nullcontext() as work:
            rounds = work(all_batches[rank], micro_batches=micro_batches) if work else all_batches[rank]
            for index, batch in enumerate(rounds):
                fails.arm(at[index])
                with contextlib.nullcontext() if work else fsdp2.accumulate(model, last=index == num_passes - 1), guard:
                    loss = loss_of(model, batch, fails)
                    work.backward(loss) if work else (loss / micro_batches).backward()
                    fails()
                has_raised |= 0 <= at[index] < fails.num_passed
                num_places = num_places or fails.num_passed
        assert has_raised == (rank in failing), case
        outcome = fsdp2.guarded_step(ours, guard=guard)
        assert outcome.taken is not bool(failing), (case, outcome)
        assert len(outcome.why) == len(failing), (case, outcome)
        for each, why in zip(sorted(failing), outcome.why, strict=True):
            assert why.startswith(f"rank {each}: ValueError: bad sample; fsdp2: in "), (case, why)
        ours.zero_grad()
        if failing:
            after = local_bits(model, ours)
            assert len(before) == len(after), case
            assert all(map(torch.equal, before, after)), (case, step)
            continue
        fails.arm(-1)
        losses = [loss_of(expected, batch, fails) for each in all_batches for batch in each]
        (sum(losses) / len(losses)).backward()
        its.step()
        its.zero_grad()
    tolerance = {"rtol": 5e-2, "atol": 6e-2} if bf16 else {"rtol": 1e-4, "atol": 2e-5}
    for (name, one), other in zip(expected.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(other.full_tensor().cpu(), one, msg=lambda text, name=name: f"{case}, {name}: {text}", **tolerance)


@on_ranks(4, timeout=400.0)  # of ten, twice within the limit of a test, after which nobody shows where ranks wait
@pytest.mark.parametrize(
    "seeds",
    [
        range(4),
        *(pytest.param(range(first, first + 13), marks=pytest.mark.slow) for first in range(4, 30, 13)),
        *(pytest.param(range(first, first + 10), marks=pytest.mark.full) for first in range(30, 150, 10)),
    ],
    ids=str,
)
def test_random_schedules_train_as_one_process_without_the_failed_steps(seeds):
    for seed in seeds:
        run_schedule(seed)


def small() -> tuple[nn.Module, Fails, torch.optim.Optimizer]:
    torch.manual_seed(0)
    fails = Fails()
    model = Model(fails)
    fsdp2.fully_shard([model.first, model.last], mesh=cpu_mesh())  # one unit of two modules
    for block in model.blocks:
        fsdp2.fully_shard(block, mesh=cpu_mesh())
    fsdp2.fully_shard(model, mesh=cpu_mesh())
    return model, fails, torch.optim.SGD(model.parameters(), lr=0.1)


X = torch.ones(2, 7)


@on_ranks(2)
def test_a_rank_that_fails_anywhere_is_named_with_the_place_and_a_lack_of_memory_with_bytes():
    model, fails, optimizer = small()
    scaler = fsdp2.optim.GradScaler("cpu", init_scale=8.0)
    guard, places = fsdp2.guarded(model), []
    at, num_places = -1, 0
    while at <= num_places:
        fails.arm(at if dist.get_rank() == 1 else -1, lambda: MemoryError("no memory"))
        before = local_bits(model, optimizer)
        with guard:
            scaler.scale(loss_of(model, (X, None), fails)).backward()
            fails()
        outcome = fsdp2.guarded_step(optimizer, guard=guard, scaler=scaler)
        assert (guard.failed is not None) is (dist.get_rank() == 1 and not outcome.taken)
        told = [num_places or fails.num_passed]
        dist.broadcast_object_list(told)
        [num_places] = told
        assert outcome.taken is (at in (-1, num_places))
        if not outcome.taken:
            [why] = outcome.why
            assert all(map(torch.equal, before, local_bits(model, optimizer))), at
            assert why.startswith("rank 1: MemoryError: no memory; fsdp2: in "), why
            assert "of 5 groups that are unsharded take" in why, why
            places.append(why.partition("fsdp2: in ")[2].partition("; its shards")[0])
        optimizer.zero_grad()
        at += 1
    assert scaler.get_scale() == 8.0
    forwards = [place for number in range(3) for place in ("forward of the root", *[f"forward of blocks.{number}"] * 2)]
    backwards = [f"backward, after that of {name} had begun" for name in ("the root", "blocks.2", "blocks.1", "blocks.0")]
    assert places == ["the code before forward", *forwards, "the loss", "the loss", *backwards, "the code after backward"], places


LACKS_OF_MEMORY = {
    "Python": lambda: MemoryError(),
    "a device": lambda: torch.OutOfMemoryError("Allocation on device"),
    "the CPU": lambda: torch.empty(1 << 60, dtype=torch.uint8),  # raises
    "a library": lambda: RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "the system": lambda: OSError(12, "Cannot allocate memory"),
}
NUMBERS = (
    "shards of parameters take [1-9].*, gradients .*, states of optimizers [1-9].*that are unsharded take .*largest unit unsharded"
)


@on_ranks(2)
@pytest.mark.parametrize("recomputes", [False, True])
def test_a_rank_without_memory_makes_all_skip_the_step_and_says_what_takes_it(recomputes):
    """In forward, in backward or a recomputation, and in the first step behind its first micro-batch."""
    model, fails, _ = small()
    if recomputes:
        fsdp2.apply_activation_checkpointing(model, [FailingBlock])
    optimizer = torch.optim.AdamW(model.parameters())
    guard, places = fsdp2.guarded(model), set()
    cases = [(error, at) for error in LACKS_OF_MEMORY.values() for at in (3, 12, 14)]
    for error, at in [cases[0], (None, -1), *cases, (None, -1)]:
        before = local_bits(model, optimizer)
        for is_last in (False, True):
            fails.arm(at if dist.get_rank() == 1 and is_last else -1, error)
            with fsdp2.accumulate(model, last=is_last), guard:
                loss_of(model, (X, None), fails).backward()
        outcome = fsdp2.guarded_step(optimizer, guard=guard)
        assert outcome.taken is (at == -1)
        if not outcome.taken:
            assert all(map(torch.equal, before, local_bits(model, optimizer)))
            [why] = outcome.why
            assert re.search(NUMBERS if optimizer.state else NUMBERS.replace("optimizers [1-9]", "optimizers 0 B"), why), why
            places.add(why.partition("fsdp2: in ")[2].partition(" ")[0])
        optimizer.zero_grad()
    assert {place.strip(",") for place in places} == {"forward", "backward"}


@on_ranks(2)
def test_a_rank_without_memory_in_the_first_pass_or_in_a_gather_says_what_takes_it_and_ends():
    model, fails, _ = small()
    optimizer = torch.optim.AdamW(model.parameters())
    guard, told = fsdp2.guarded(model), NUMBERS.replace("optimizers [1-9]", "optimizers ")
    fails.arm(3, MemoryError)
    with pytest.raises(OrderError, match=rf"(?s)no pass has been complete before it.*MemoryError.*{told}"), guard:
        loss_of(model, (X, None), fails).backward()
    model.reset_iter_state()
    for lacks in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if lacks:
                patch.setattr(ParamGroup, "issue", lambda *args: LACKS_OF_MEMORY["the CPU"]())
            expected = pytest.raises(OrderError, match=rf"(?s)made memory for that.*{told}") if lacks else contextlib.nullcontext()
            with expected, guard:
                fails.arm(-1)
                loss_of(model, (X, None), fails).backward()
    assert fsdp2.guarded_step(optimizer, guard=guard, failed=ValueError()).taken is False


@on_ranks(2)
def test_what_cannot_be_served_leaves_the_guard_on_the_rank_that_failed():
    model, fails, optimizer = small()
    guard = fsdp2.guarded(model)

    def run(at: int = -1, error=None, model=model) -> None:
        fails.arm(at, error)
        with guard:
            loss_of(model, (X, None), fails).backward()

    for at in (2, 12):  # in forward and in backward of the first pass
        with pytest.raises(OrderError, match=r"has failed in .* no pass has been complete before it") as found:
            run(at)
        assert type(found.value.__cause__) is ValueError
        model.reset_iter_state()
    run()
    with pytest.raises(KeyboardInterrupt):
        run(3, KeyboardInterrupt)
    with pytest.raises(OrderError, match="as it is"):
        run(3, lambda: OrderError("as it is", expected="", fix=""))
    run()
    issue = ParamGroup.issue
    for fails_in in ("blocks.1", ""):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ParamGroup, "issue", lambda group, *args: 1 / 0 if group.fqn == fails_in else issue(group, *args))  # noqa: B023
            with pytest.raises(OrderError, match="while fsdp2 communicated, or made memory"):
                run()
        model.reset_iter_state()
        run()
    assert fsdp2.guarded_step(optimizer, guard=guard).taken
    with pytest.raises(OrderError, match="gradient sync has changed inside"), guard, fsdp2.accumulate(model, last=False):
        model(X)
    model.reset_iter_state()
    fails.arm(2)
    with guard, contextlib.suppress(ValueError):  # the program has caught it, and goes on
        model(X)
    with pytest.raises(OrderError, match="do not run the same modules in the same order"):
        run(2)


@on_ranks(2)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_whose_recomputation_alone_has_the_order_are_not_served(reentrant):
    model = fsdp2.fully_shard(nn.Sequential(*(fsdp2.fully_shard(nn.Linear(7, 7), mesh=cpu_mesh()) for _ in range(2))), mesh=cpu_mesh())
    guard = fsdp2.guarded(model)
    model.forward = lambda x: checkpoint(lambda y: model[1](model[0](y)), x, use_reentrant=reentrant)
    for is_first in (True, False):
        with contextlib.nullcontext() if is_first else pytest.raises(OrderError, match="checkpoint"), guard:
            model(X.clone().requires_grad_()).sum().backward()
            if not is_first:
                raise ValueError


@on_ranks(2)
def test_an_evaluation_is_served_too():
    model, fails, _ = small()
    guard = fsdp2.guarded(model)
    for at in (-1, 3, -1):
        fails.arm(at if dist.get_rank() == 0 else -1)
        with torch.no_grad(), guard:
            loss_of(model, (X, None), fails)
        assert (guard.failed is not None) is (at == 3 and dist.get_rank() == 0)
        guard.failed = None


BACKWARDS = {  # of two forwards; and whether a pass that fails in between is served
    "one of both": ((X, 2 * X), lambda losses: sum(losses).backward(), True),
    "one for each": ((X, 2 * X), lambda losses: [loss.backward() for loss in losses], False),
    "the first only": ((X, 2 * X), lambda losses: losses[0].backward(), False),
    "twice": ((X,), lambda losses: [losses[0].backward(retain_graph=kept) for kept in (True, False)], False),
}


@on_ranks(2)
@pytest.mark.parametrize("name", BACKWARDS)
def test_a_backward_that_does_not_reach_all_forwards_before_it_is_not_served(name):
    inputs, backward, is_served = BACKWARDS[name]
    model, _, optimizer = small()
    guard = fsdp2.guarded(model)
    for is_last in (False, False, True):
        expected = contextlib.nullcontext() if is_served or not is_last else pytest.raises(OrderError, match="a backward ran again")
        with expected as found, guard:
            losses = [model(x).square().sum() for x in inputs]
            if is_last and (dist.get_rank() == 1 or not is_served):
                raise ValueError("bad sample")
            backward(losses)
        if found is not None:
            assert type(found.value.__cause__) is ValueError
            return
        assert fsdp2.guarded_step(optimizer, guard=guard).taken is not is_last
        optimizer.zero_grad()


@on_ranks(2)
def test_a_guard_inside_of_another_is_refused_and_leaves_no_trace():
    model, _, optimizer = small()
    expected = copy.deepcopy(model)
    guard = fsdp2.guarded(model)
    for inner in (guard, fsdp2.guarded(model), fsdp2.guarded(model.blocks[0])):
        with pytest.raises(OrderError, match="has begun inside of another"), guard, inner:
            raise AssertionError
        with guard:
            model(X).square().sum().backward()
        assert fsdp2.guarded_step(optimizer, guard=guard).taken
        model.zero_grad()
    its = torch.optim.SGD(expected.parameters(), lr=0.1)
    for _ in range(3):
        expected(X).square().sum().backward()
        its.step()
        its.zero_grad()
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours.to_local(), theirs.to_local())


@on_ranks(2)
def test_a_model_that_communicates_by_itself_is_refused():
    model = fsdp2.fully_shard(nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4)), mesh=cpu_mesh())
    with pytest.raises(ArgumentError, match="1: a SyncBatchNorm"):
        fsdp2.guarded(model)
    mesh = cpu_mesh(1, 2, names=("dp", "tp"))
    model = parallelize_module(nn.Sequential(nn.Linear(4, 4)), mesh["tp"], {"0": ColwiseParallel()})
    fsdp2.fully_shard(model, mesh=mesh["dp"])
    with pytest.raises(ArgumentError, match="axes of tensor parallelism"):
        fsdp2.guarded(model)


@on_ranks(2)
def test_several_modules_of_a_unit_on_an_spmd_mesh():
    torch.manual_seed(0)
    mesh, model = cpu_mesh(names=("dp",)), nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    expected = copy.deepcopy(model)
    distribute_module(model, mesh)
    fsdp2.fully_shard([model[0], model[2]], mesh=mesh, dp_mesh_dims=fsdp2.DataParallelMeshDims(shard="dp"))
    fsdp2.fully_shard(model, mesh=mesh, dp_mesh_dims=fsdp2.DataParallelMeshDims(shard="dp"))
    guard = fsdp2.guarded(model)
    for _ in range(2):
        with guard:
            model(distribute_tensor(torch.ones(2, 4), mesh, [Shard(0)])).to_local().square().sum().backward()
        expected(torch.ones(1, 4)).square().sum().backward()
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


@on_ranks(2)
def test_a_step_after_guarded_passes_needs_their_guard():
    """A rank's failure would be forgotten: what it did not compute is missing in the others' gradients."""
    model, fails, optimizer = small()
    guard = fsdp2.guarded(model)
    for at in (-1, 4):
        fails.arm(at if dist.get_rank() == 1 else -1)
        with guard:
            loss_of(model, (X, None), fails).backward()
        for step in (fsdp2.guarded_step, torch.optim.SGD.step):
            with pytest.raises(ArgumentError, match="guard=guard"):
                step(optimizer)
        assert fsdp2.guarded_step(optimizer, guard=guard).taken is (at == -1)
        optimizer.zero_grad()
    loss_of(model, (X, None), fails).backward()
    assert fsdp2.guarded_step(optimizer).taken
    optimizer.step()


@on_ranks(2)
def test_optimizers_of_one_pass_all_step_or_none_does():
    """Symptom: the first one's ``guarded_step`` forgot the failure, and the second stepped on the gradients of one rank."""
    model, fails, _ = small()
    params = list(model.parameters())
    one, other = (torch.optim.SGD(each, lr=0.1) for each in (params[::2], params[1::2]))
    guard = fsdp2.guarded(model)
    for at in (-1, 4, -1):
        fails.arm(at if dist.get_rank() == 1 else -1)
        before = local_bits(model, one)
        with guard:
            loss_of(model, (X, None), fails).backward()
        assert fsdp2.guarded_step(one, guard=guard).taken is (at == -1)
        if at == -1:
            other.step()  # all passes are whole
        else:
            with pytest.raises(ArgumentError, match="guard=guard"):
                other.step()
            for optimizer in (other, one, other):
                outcome = fsdp2.guarded_step(optimizer, guard=guard)
                assert not outcome.taken
                assert outcome.why[0].startswith("rank 1: ValueError: bad sample")
            assert all(map(torch.equal, before, local_bits(model, one)))
        model.zero_grad()
    loss_of(model, (X, None), fails).backward()
    for optimizer in (one, other):
        optimizer.step()
