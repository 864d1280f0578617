"""Optional units: ranks that leave different modules out train as one process that has all ranks' data."""

from __future__ import annotations

import copy
import random

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn

import fsdp2
from fsdp2.errors import ArgumentError, OrderError
from fsdp2.inspect import Listener, listen
from harness import cpu_mesh, on_ranks
from harness.models import Block
from harness.sharding import with_reference

BF16 = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 10)
        self.blocks = nn.ModuleList(Block(10) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.to(self.first.weight.dtype))
        for block in self.blocks:
            x = block(x)
        return x


class Multimodal(nn.Module):
    """Text on all ranks; images and sounds on some; the middle block may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(7, 10)
        self.images, self.sounds = Tower(), Tower()
        self.blocks = nn.ModuleList(Block(10) for _ in range(3))
        self.last = nn.Linear(10, 3)

    def forward(self, text: Tensor, images: Tensor | None = None, sounds: Tensor | None = None, skips: bool = False) -> Tensor:
        x = self.embed(text)
        if images is not None:
            x = x + self.images(images)
        x = self.blocks[0](x)
        if not skips:
            x = self.blocks[1](x)
        if sounds is not None:
            x = x + self.sounds(sounds)
        return self.last(self.blocks[2](x))


Batch = dict[str, Tensor | bool | None]


def batch_of(numbers: random.Random, data: torch.Generator) -> Batch:
    size = numbers.randint(1, 3)
    return {
        "text": torch.randn(size, 7, generator=data),
        "images": torch.randn(size, 5, generator=data) if numbers.random() < 0.4 else None,
        "sounds": torch.randn(size, 5, generator=data) if numbers.random() < 0.4 else None,
        "skips": numbers.random() < 0.5,
    }


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return model(**batch).float().square().sum()


def run_schedule(seed: int) -> None:
    numbers, rank, world_size = random.Random(seed), dist.get_rank(), dist.get_world_size()
    strategy = numbers.choice(["zero3", "zero2", "hsdp", "hsdp_zero2", "zero1", "ddp"])
    micro_batches = numbers.choice([1, 1, 2, 3])
    frozen, recomputes, bf16, uneven, evaluates, keeps = (numbers.random() < 0.3 for _ in range(6))
    case = f"seed {seed}: {strategy}, {micro_batches=}, {frozen=}, {recomputes=}, {bf16=}, {uneven=}, {evaluates=}, {keeps=}"
    torch.manual_seed(seed)
    model = Multimodal()
    if frozen:
        model.images.requires_grad_(False)
        model.sounds.blocks[0].requires_grad_(False)
    expected = copy.deepcopy(model)
    if recomputes:
        fsdp2.apply_activation_checkpointing(model, [Block])
    mesh = cpu_mesh(2, 2) if strategy.startswith("hsdp") else cpu_mesh()
    fsdp2.parallelize(model, strategy, wrap=[Block, Tower], mesh=mesh, mp_policy=BF16 if bf16 else fsdp2.MixedPrecisionPolicy())
    for module in (model.images, model.sounds, model.blocks[1]):
        module.set_optional()
        if keeps:
            module.set_reshard_after_forward(False)
    ours = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=0.1)
    its = torch.optim.SGD(expected.parameters(), lr=0.02, momentum=0.9, weight_decay=0.1)
    data = torch.Generator().manual_seed(seed)
    tolerance = {"rtol": 5e-2, "atol": 3e-2} if bf16 else {"rtol": 1e-4, "atol": 1e-5}
    lengths = [numbers.randint(1, 3) * micro_batches if uneven else 3 * micro_batches for _ in range(world_size)]
    batches = [[batch_of(numbers, data) for _ in range(length)] for length in lengths]
    num_steps = 0

    def step() -> None:
        nonlocal num_steps
        of_step = [batch for each in batches for batch in each[num_steps * micro_batches : (num_steps + 1) * micro_batches]]
        (sum(loss_of(expected, batch) for batch in of_step) / len(of_step)).backward()
        for (name, one), other in zip(expected.named_parameters(), model.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None), f"{case}, {name}"
        for optimizer in (ours, its):
            optimizer.step()
            optimizer.zero_grad()
        if evaluates:
            with torch.no_grad():
                torch.testing.assert_close(loss_of(model, batches[rank][0]).cpu(), loss_of(expected, batches[rank][0]), **tolerance)
        num_steps += 1

    if uneven:
        with fsdp2.uneven(model) as work:
            for batch in work(batches[rank], micro_batches=micro_batches):
                work.backward(loss_of(model, batch))
                if work.is_last:
                    step()
    else:
        for number, batch in enumerate(batches[rank], start=1):
            with fsdp2.accumulate(model, last=number % micro_batches == 0):
                (loss_of(model, batch) / micro_batches).backward()
            if number % micro_batches == 0:
                step()
    assert num_steps == max(lengths) // micro_batches
    for (name, one), other in zip(expected.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(other.full_tensor().cpu(), one, msg=lambda text, name=name: f"{case}, {name}: {text}", **tolerance)


@on_ranks(4, timeout=400.0)  # of ten, twice within the limit of a test, after which nobody shows where ranks wait
@pytest.mark.parametrize(
    "seeds",
    [
        range(4),
        *(pytest.param(range(first, first + 9), marks=pytest.mark.slow) for first in range(4, 40, 9)),
        *(pytest.param(range(first, first + 10), marks=pytest.mark.full) for first in range(40, 440, 10)),
    ],
    ids=str,
)
def test_random_schedules_train_as_one_process_with_all_batches(seeds):
    for seed in seeds:
        run_schedule(seed)


def sharded(model: nn.Module, optional=("images", "sounds", "blocks.1"), **options) -> nn.Module:
    for module in reversed([each for each in model.modules() if isinstance(each, (Block, Tower))]):
        fsdp2.fully_shard(module, mesh=cpu_mesh(), **options)
    fsdp2.fully_shard(model, mesh=cpu_mesh(), **options)
    for name in optional:
        model.get_submodule(name).set_optional()
    return model


def a_batch(**given: bool) -> Batch:
    made = {"text": torch.ones(1, 7), "images": torch.ones(1, 5), "sounds": torch.ones(1, 5)}
    return {name: made[name] for name in ("text", *(each for each, is_given in given.items() if is_given))}


class Counts(Listener):
    def __init__(self) -> None:
        self.kinds: list[str] = []

    def issued(self, record, owner, num_ranks):
        self.kinds.append(record.kind)


def kinds_of_a_pass(model: nn.Module, batch: Batch, backward: bool = True) -> list[str]:
    counts = Counts()
    undo = listen(counts)
    with torch.set_grad_enabled(backward):
        loss = loss_of(model, batch)
    if backward:
        loss.backward()
    undo()
    return counts.kinds


@on_ranks(2)
def test_even_ranks_pay_one_message_a_forward_and_nobody_pays_without_an_optional_unit():
    model, plain = sharded(Multimodal()), sharded(Multimodal(), optional=())
    message = "comparison of optional units"
    for _ in range(2):  # the second time, backward prefetches
        with_all, of_plain = (kinds_of_a_pass(each, a_batch(images=True, sounds=True)) for each in (model, plain))
    assert message not in of_plain
    assert with_all.count(message) == 1
    assert sorted(kind for kind in with_all if kind != message) == sorted(of_plain)
    for _ in range(2):
        with_none, of_plain = (kinds_of_a_pass(each, a_batch()) for each in (model, plain))
    assert with_none.count("all-gather") == of_plain.count("all-gather") + 6  # in forward alone: two towers of three units
    assert with_none.count("reduce-scatter") == of_plain.count("reduce-scatter")
    assert message not in kinds_of_a_pass(model, a_batch(), backward=False)


@on_ranks(2)
def test_an_optional_unit_that_stays_unsharded_may_run_several_times_and_a_declaration_may_be_taken_back():
    model, expected = with_reference(Twice())
    fsdp2.fully_shard(model.tower, mesh=cpu_mesh(), reshard_after_forward=False).set_optional()
    fsdp2.fully_shard(model, mesh=cpu_mesh())
    for step in range(2):
        model(torch.ones(1, 4), times=2 * dist.get_rank()).sum().backward()
        (sum(expected(torch.ones(1, 4), times=2 * rank).sum() for rank in range(2)) / 2).backward()
        for one, other in zip(expected.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(other.grad.full_tensor(), one.grad, msg=lambda text, step=step: f"step {step}: {text}")
    model.tower.set_optional(False)
    assert "comparison of optional units" not in kinds_of_a_pass(model, {"x": torch.ones(1, 4), "times": 1})


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, times: int) -> Tensor:
        for _ in range(times):
            x = torch.tanh(self.tower(x))
        return self.last(x)


class Reorders(Multimodal):
    def forward(self, text: Tensor, first: str = "", **given: Tensor) -> Tensor:
        x = self.embed(text)
        for name in sorted(("images", "sounds"), key=lambda each: each != first):
            x = x + self.get_submodule(name)(torch.ones(1, 5))
        return self.last(x)


@on_ranks(2)
def test_orders_that_contradict_each_other_and_checkpoints_that_backward_cannot_follow_are_refused_on_all_ranks():
    rank = dist.get_rank()
    model = sharded(Reorders())
    with pytest.raises(OrderError, match="opposite orders"):
        model(torch.ones(1, 7), first="images" if rank == 0 else "sounds")
    model.reset_iter_state()
    model(torch.ones(1, 7), first="images").sum().backward()  # and all of them go on
    model = sharded(Multimodal())
    model.blocks[1] = Checkpointed(model.blocks[1], use_reentrant=True)
    with pytest.raises(OrderError, match=r"blocks\.1\.inner is optional, and runs in a re-entrant checkpoint"):
        loss_of(model, {"text": torch.ones(1, 7), "skips": rank == 0})
    model = sharded(Multimodal())
    model.images = Checkpointed(model.images, use_reentrant=False)  # of several units
    with pytest.raises(OrderError, match="checkpoint each unit by itself"):
        loss_of(model, a_batch(images=rank == 0)).backward()


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self.inner, self.use_reentrant = inner, use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=self.use_reentrant)


@on_ranks(2)
def test_what_ranks_cannot_leave_out_is_refused_before_they_communicate():
    model = sharded(Multimodal())
    with pytest.raises(OrderError, match="forward begins with the root, which is optional"):
        model.images(torch.ones(1, 5))
    with pytest.raises(ArgumentError, match="set_optional got optional='yes'"):
        model.images.set_optional("yes")
    model = sharded(Multimodal())
    model.set_modules_to_forward_prefetch([model.images])
    with pytest.raises(ArgumentError, match="set_modules_to_forward_prefetch"):
        loss_of(model, a_batch())
    model = Multimodal()
    model.last = nn.Linear(5, 10)
    model.last.weight = model.images.first.weight
    with pytest.raises(ArgumentError, match="images: parameters that are tied"):
        loss_of(sharded(model), a_batch())
    model = Shrinks()
    fsdp2.fully_shard(model.words, mesh=cpu_mesh()).set_optional()
    with pytest.raises(ArgumentError, match="words: an embedding with max_norm"):
        fsdp2.fully_shard(model, mesh=cpu_mesh())(torch.ones(1, dtype=torch.long))


class Shrinks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = nn.Embedding(4, 2, max_norm=1.0), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.words(x))


@on_ranks(2)
def test_gradients_that_add_up_on_unsharded_parameters_are_reduced_on_all_ranks():
    """Symptom of a rank that alone holds some: it reduces them in a backward in which nobody runs the unit, and the others wait."""
    rank = dist.get_rank()
    for semantics in ("2.13", "2.15"):
        fsdp2.set_semantics(semantics)
        try:
            torch.manual_seed(0)
            model, expected = with_reference(Multimodal(), sharded)
        finally:
            fsdp2.set_semantics("torch")
        for last in (False, True):
            model.set_requires_gradient_sync(last)
            loss_of(model, a_batch(images=rank == 0 and not last)).backward()
            for each in range(2):
                (loss_of(expected, a_batch(images=each == 0 and not last)) / 2).backward()
        for (name, one), other in zip(expected.named_parameters(), model.parameters(), strict=True):
            case = f"{semantics}, {name}"
            assert (one.grad is None) == (other.grad is None), case
            if one.grad is not None:
                torch.testing.assert_close(other.grad.full_tensor(), one.grad, msg=lambda text, case=case: f"{case}: {text}")


@on_ranks(2)
def test_nothing_waits_in_a_frozen_unit_after_micro_batches_without_reduction():
    """Symptom: parking, and a retry of a failed backward, were refused: gradients of the frozen unit waited for ever."""
    for semantics in ("2.13", "2.15"):
        fsdp2.set_semantics(semantics)
        try:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
            model[1].requires_grad_(False)
            expected = copy.deepcopy(model)
            for each in (*model, model):
                fsdp2.fully_shard(each)
        finally:
            fsdp2.set_semantics("torch")
        x = torch.ones(4, 8)
        for last in (False, True):
            model.set_requires_gradient_sync(last)
            model(x).square().mean().backward()
            expected(x).square().mean().backward()
        fsdp2.park(model)
        fsdp2.unpark(model)
        for one, other in zip(expected.parameters(), model.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None), semantics
            if one.grad is not None:
                torch.testing.assert_close(other.grad.full_tensor(), one.grad)
