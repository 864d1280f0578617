"""``uneven``: ranks with different numbers of batches train as one process that has all of them."""

from __future__ import annotations

import contextlib
import copy
import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp2
from fsdp2.core.comm import agreement
from fsdp2.errors import ArgumentError, ModuleError, OrderError
from fsdp2.inspect import Listener, listen
from harness import cpu_mesh, on_ranks
from harness.models import MLP

BF16 = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class WithBuffers(nn.Module):
    """An MLP that counts its samples, as a BatchNorm does; only long batches use its second head."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = MLP()
        self.head = nn.Linear(5, 3)
        self.register_buffer("num_seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.num_seen += len(x)
        return self.head(torch.tanh(self.mlp(x.to(self.head.weight.dtype))))


def batches_of(seed: int, world_size: int, most: int) -> list[list[Tensor]]:
    """For each rank between none and ``most`` batches, of one to three samples."""
    numbers = random.Random(seed)
    data = torch.Generator().manual_seed(seed)
    return [[torch.randn(numbers.randint(1, 3), 7, generator=data) for _ in range(numbers.randint(0, most))] for _ in range(world_size)]


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).float().square().sum()


def train_unsharded(model: nn.Module, optimizer, batches: list[list[Tensor]], micro_batches: int, count) -> list[int]:
    """One process with the batches of all ranks. Returns how many each rank has in each step."""
    num_steps = -(-max(map(len, batches)) // micro_batches)
    for step in range(num_steps):
        of_ranks = [each[step * micro_batches : (step + 1) * micro_batches] for each in batches]
        of_step = [batch for each in of_ranks for batch in each]
        if count == "ranks":
            working = [each for each in of_ranks if each]
            losses = [sum(loss_of(model, batch) for batch in each) / len(each) for each in working]
            (sum(losses) / len(working)).backward()
        else:
            total = sum(1 if count is None else count(batch) for batch in of_step)
            (sum(loss_of(model, batch) for batch in of_step) / total).backward()
        optimizer.step()
        optimizer.zero_grad()
    return num_steps


def run_schedule(seed: int) -> None:
    numbers = random.Random(1000 + seed)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    strategy = numbers.choice(["zero3", "zero2", "hsdp", "hsdp_zero2", "zero1", "ddp"])
    micro_batches, count = numbers.choice([1, 1, 2, 3]), numbers.choice([None, len])
    frozen, recomputes, bf16 = (numbers.random() < 0.3 for _ in range(3))
    count = "ranks" if seed % 4 == 3 else count
    case = f"seed {seed}: {strategy}, {micro_batches=}, {count=}, {frozen=}, {recomputes=}, {bf16=}"
    torch.manual_seed(seed)
    model = WithBuffers()
    if frozen:
        model.mlp.blocks[1].requires_grad_(False)
        model.mlp.first.requires_grad_(False)
    expected = copy.deepcopy(model)
    if recomputes:
        fsdp2.apply_activation_checkpointing(model, [type(model.mlp.blocks[0])])
    mesh = cpu_mesh(2, 2) if strategy.startswith("hsdp") else cpu_mesh()
    fsdp2.parallelize(
        model, strategy, wrap=[type(model.mlp.blocks[0])], mesh=mesh, mp_policy=BF16 if bf16 else fsdp2.MixedPrecisionPolicy()
    )
    ours = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=0.1)
    its = torch.optim.SGD(expected.parameters(), lr=0.02, momentum=0.9, weight_decay=0.1)
    num_real = 0
    with fsdp2.uneven(model) as work:
        for epoch in range(2):
            batches = batches_of(10 * seed + epoch, world_size, most=4)
            num_steps = 0
            for batch in work(iter(batches[rank]), count=count, micro_batches=micro_batches):
                work.backward(loss_of(model, batch))
                num_real += 0 if work.stands_in else len(batch)
                if work.is_last:
                    ours.step()
                    ours.zero_grad()
                    num_steps += 1
            assert num_steps == (train_unsharded(expected, its, batches, micro_batches, count) if any(batches) else 0), case
            num_seen = 0
            with torch.no_grad():  # evaluation of unequal lengths
                for batch in work(batches[rank]):
                    loss_of(model, batch)
                    num_seen += not work.stands_in
            assert num_seen == len(batches[rank]), case
            num_real += sum(map(len, batches[rank]))
    assert model.num_seen == num_real, case
    tolerance = {"rtol": 5e-2, "atol": 3e-2} if bf16 else {"rtol": 1e-4, "atol": 1e-5}
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


@on_ranks(2)
@pytest.mark.parametrize("is_guarded", [False, True])
def test_a_scaler_and_clipping_in_an_uneven_loop_train_as_one_process_with_all_batches(is_guarded):
    """Two epochs; rank 1 has nothing in the second."""
    rank = dist.get_rank()
    model = small()
    torch.manual_seed(0)
    expected = nn.Sequential(nn.Linear(7, 4), nn.Linear(4, 2))
    ours, its = (torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, expected))
    scaler, guard = fsdp2.optim.GradScaler("cpu", init_scale=64.0), fsdp2.guarded(model)
    for epoch, lengths in enumerate([(1, 3), (2, 0)]):
        data = torch.Generator().manual_seed(epoch)
        batches = [[torch.randn(1 + index, 7, generator=data) for index in range(length)] for length in lengths]
        with fsdp2.uneven(model) as work:
            for batch in work(batches[rank], count=len):
                with guard if is_guarded else contextlib.nullcontext():
                    work.backward(scaler.scale(loss_of(model, batch)))
                if is_guarded:
                    assert fsdp2.guarded_step(ours, guard=guard, max_norm=0.3, scaler=scaler).taken
                else:
                    scaler.unscale_(ours)
                    fsdp2.clip_grad_norm_(model.parameters(), 0.3)
                    scaler.step(ours)
                    scaler.update()
                ours.zero_grad()
        for step in range(max(lengths)):
            of_step = [each[step] for each in batches if step < len(each)]
            (sum(loss_of(expected, batch) for batch in of_step) / sum(map(len, of_step))).backward()
            assert nn.utils.clip_grad_norm_(expected.parameters(), 0.3) > 0.3
            its.step()
            its.zero_grad()
    for one, other in zip(expected.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(other.full_tensor(), one, rtol=1e-4, atol=1e-5)


def small(**options) -> nn.Module:
    torch.manual_seed(0)
    return fsdp2.fully_shard(nn.Sequential(nn.Linear(7, 4), nn.Linear(4, 2)), mesh=cpu_mesh(), **options)


@on_ranks(2)
def test_a_parameter_that_only_a_stand_in_uses_gets_no_gradient():
    rank = dist.get_rank()
    model = fsdp2.fully_shard(Chooses(), mesh=cpu_mesh())
    with fsdp2.uneven(model) as work:  # rank 1 repeats a batch that uses ``often``; the batch of rank 0 does not
        for batch in work([torch.ones(1, 7), torch.zeros(1, 7)] if rank == 0 else [torch.ones(1, 7)]):
            work.backward(model(batch).sum())
            grads = {name: param.grad for name, param in model.named_parameters()}
            model.zero_grad()
    assert grads["often.weight"] is None
    assert torch.equal(grads["always.bias"].full_tensor(), torch.ones(2))  # one batch counts 1, so its gradient as it is


class Chooses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.often = nn.Linear(7, 2), nn.Linear(7, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.always(x) + self.often(x) if x.any() else self.always(x)


def rounds(model: nn.Module, loader, stop_at: int = 0, leave_at: int = 0, count=None) -> list[bool]:
    """Which rounds had a stand-in."""
    seen: list[bool] = []
    try:
        with fsdp2.uneven(model) as work:
            for batch in work(loader, count=count):
                seen.append(work.stands_in)
                work.backward(model(batch).sum())
                if len(seen) == stop_at:
                    work.stop()
                if len(seen) == leave_at:
                    break
    except Exception as error:
        error.num_rounds = len(seen)  # type: ignore[attr-defined]
        raise
    return seen


@on_ranks(3)
def test_a_loader_that_fails_on_one_rank_ends_the_work_of_all_and_stop_ends_it_at_one_step():
    rank = dist.get_rank()
    model = small()
    batch = torch.ones(1, 7)

    def failing():
        yield batch
        if rank == 1:
            raise ValueError("bad sample")
        yield batch

    others = "rank 1 has failed to get its next batch: ValueError: bad sample"
    with pytest.raises(ValueError if rank == 1 else OrderError, match="bad sample" if rank == 1 else others) as found:
        rounds(model, failing())
    assert found.value.num_rounds == 1
    others = "rank 2 has failed to get its next batch"
    with pytest.raises(ArgumentError if rank == 2 else OrderError, match="count returned -1" if rank == 2 else others) as found:
        rounds(model, [batch], count=lambda batch: -1 if rank == 2 else 1)
    assert found.value.num_rounds == 0
    assert rounds(model, [batch] * (3 + rank), stop_at=2 if rank == 2 else 0) == [False, False]
    assert rounds(model, [batch] * rank) == [index >= rank for index in range(2)]
    with pytest.raises(OrderError, match="rank 0 has left its loop"):
        rounds(model, [batch] * 3, leave_at=1 if rank == 0 else 0)
    assert rounds(model, [batch]) == [False]  # and all of them go on


@on_ranks(2)
def test_what_cannot_stand_in_is_refused_on_all_ranks():
    with pytest.raises(ModuleError, match="uneven got a Linear that is not sharded"):
        rounds(nn.Linear(2, 2), [])
    shrinks = fsdp2.fully_shard(nn.Embedding(4, 2, max_norm=1.0), mesh=cpu_mesh())
    with pytest.raises(ArgumentError, match="an embedding with max_norm"):
        rounds(shrinks, [])
    divided = small()
    divided.set_gradient_divide_factor(2.0)
    with pytest.raises(ArgumentError, match="set_gradient_divide_factor"):
        rounds(divided, [])
    model = small()
    with fsdp2.uneven(model) as work:
        for kwargs in ({"loader": 1}, {"loader": [], "count": 1}, {"loader": [], "micro_batches": 0}):
            with pytest.raises(ArgumentError):
                work(**kwargs)


@on_ranks(2)
def test_even_ranks_pay_one_message_a_step_and_two_at_the_end():
    kinds: list[str] = []

    class Counts(Listener):
        def issued(self, record, owner, num_ranks):
            kinds.append(record.kind)

    model = small()
    undo = listen(Counts())
    with fsdp2.uneven(model) as work:
        for batch in work([torch.ones(1, 7)] * 4, micro_batches=2):
            work.backward(model(batch).sum())
    undo()
    # Two steps, the end of the loop, and the end of the work.
    assert [kind for kind in kinds if "uneven" in kind] == ["message of uneven ranks"] * 4


@on_ranks(2)
def test_a_loop_has_stand_ins_of_its_own_whose_containers_the_program_may_change():
    """Symptom: a rank without evaluation data got a training batch, and one that stood in got a batch without what it had popped."""
    model = small()
    rank = dist.get_rank()
    with fsdp2.uneven(model) as work:
        for batch in work([{"x": torch.ones(1, 7), "y": torch.ones(1)} for _ in range(1 + rank)]):
            target = batch.pop("y")
            work.backward((model(batch["x"]).sum() - target).square().sum())
        with torch.no_grad():
            for batch in work([{"ids": torch.ones(2, 7)}] * (1 - rank)):
                assert work.stands_in is bool(rank)
                model(batch.pop("ids"))


@on_ranks(2)
def test_a_rank_that_leaves_its_loop_for_another_one_is_named():
    """Symptom: it went on with its next loop, one epoch ahead of the others."""
    model = small()

    def epochs():
        with fsdp2.uneven(model) as work:
            for _ in range(3):
                for batch in work([torch.ones(1, 7)] * 3):
                    work.backward(model(batch).sum())
                    if dist.get_rank() == 1:
                        break

    with pytest.raises(OrderError, match=r"rank 1 has left its loop"):
        epochs()


@on_ranks(2)
def test_the_end_of_a_program_waits_for_the_threads_that_carry_messages():
    """Symptom: programs aborted at their very end ("terminate called without an active exception"), under load about one in ten.

    Cause: a thread of gloo's lets go of the last message's tensors a little late, and needs the interpreter for it. Torch waits for a
    group's threads when nobody refers to the group any more, and a module global of ours did, past destroy_process_group.
    """

    def threads() -> int:
        return sum("gloo_runloop" in path.read_text() for path in Path("/proc/self/task").glob("*/comm"))

    agreement._end_messages()
    before = threads()
    model = small()
    with fsdp2.uneven(model) as work:
        for batch in work([torch.ones(1, 7)] * dist.get_rank()):
            work.backward(model(batch).sum())
    assert threads() > before
    agreement._end_messages()
    assert threads() == before
    assert model is work._model  # both are still alive, as in a program without functions
    assert rounds(model, [torch.ones(1, 7)]) == [False]  # a program may do more at its end
