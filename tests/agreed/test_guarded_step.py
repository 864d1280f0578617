"""``guarded_step``: all ranks step, or none, and a step that none takes leaves no trace."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import fsdp2
from fsdp2.errors import ArgumentError
from harness import cpu_mesh, on_ranks
from harness.models import MLP


def sharded(strategy: str, seed: int = 0, **options) -> nn.Module:
    torch.manual_seed(seed)
    mesh = cpu_mesh(2, 2) if strategy.startswith("hsdp") else cpu_mesh()
    return fsdp2.parallelize(MLP(), strategy, wrap=None if strategy == "ddp" else "auto", mesh=mesh, **options)


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.full_tensor() for name, param in model.named_parameters()}


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Local bits of parameters and optimizer state, and the random state."""
    found = [torch.get_rng_state()]
    for param in model.parameters():
        tensors = [param, *(each for each in optimizer.state[param].values() if isinstance(each, torch.Tensor))]
        found += [each.to_local().clone() if isinstance(each, DTensor) else each.clone() for each in tensors]
    return found


def assert_same(one: list[torch.Tensor], other: list[torch.Tensor], case: object) -> None:
    assert len(one) == len(other), case
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True)), case


CASES = ((float("nan"), None), (float("inf"), 0.5), ("failed", None), ("failed", 0.5))


@on_ranks(4)
@pytest.mark.parametrize(
    ("strategies", "cases"),
    [(("hsdp",), CASES[:1]), (("zero3",), CASES[3:]), pytest.param(("ddp", "zero2", "zero3", "hsdp"), CASES, marks=pytest.mark.slow)],
    ids=["hsdp, NaN", "zero3, failed", "all"],
)
def test_no_rank_steps_if_a_gradient_of_one_is_not_finite_or_one_has_failed(strategies, cases):
    rank = dist.get_rank()
    for strategy in strategies:
        for bad, max_norm in cases:
            case = strategy, bad, max_norm
            model = sharded(strategy)
            expected = copy.deepcopy(MLP())
            expected.load_state_dict(whole(model))
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
            its = torch.optim.AdamW(expected.parameters(), lr=0.01, foreach=False)
            for step in range(3):
                x = torch.randn(4, 3, 7, generator=torch.Generator().manual_seed(step))
                is_bad = step == 1
                mine = x[rank] * (bad if is_bad and rank == 2 and bad != "failed" else 1)
                model(mine).square().mean().backward()
                before = state_of(model, optimizer)
                failed = ValueError("no label") if is_bad and rank == 3 and bad == "failed" else None
                outcome = fsdp2.guarded_step(optimizer, max_norm=max_norm, failed=failed)
                assert outcome.taken is not is_bad, case
                if is_bad:
                    assert_same(state_of(model, optimizer), before, case)
                    if bad == "failed":
                        assert outcome.why == ("rank 3: ValueError: no label",), case
                    else:
                        assert outcome.why, case
                        assert all("not finite" in why for why in outcome.why), (case, outcome)
                else:
                    torch.stack([expected(each).square().mean() for each in x]).mean().backward()
                    if max_norm is not None:
                        norm = nn.utils.clip_grad_norm_(expected.parameters(), max_norm)
                        torch.testing.assert_close(outcome.norm, norm, rtol=1e-5, atol=1e-6)
                    its.step()
                optimizer.zero_grad()
                its.zero_grad()
                said = [None] * 4
                dist.all_gather_object(said, (outcome.taken, outcome.why))
                assert said == [said[0]] * 4, case
            for name, param in expected.named_parameters():
                torch.testing.assert_close(whole(model)[name], param.detach(), rtol=1e-4, atol=1e-5, msg=str((case, name)))


@on_ranks(2)
def test_the_scaler_backs_off_on_all_ranks_and_a_failure_leaves_it_as_it_is():
    rank = dist.get_rank()
    for max_norm in (None, 1.0):
        model = sharded("zero3")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = fsdp2.optim.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        scales, taken = [], []
        for step in range(6):
            bad = float("inf") if step == 1 and rank == 1 else 1.0
            scaler.scale(model(torch.ones(2, 7) * bad).square().mean()).backward()
            failed = RuntimeError("here") if step == 3 and rank == 0 else None
            before = scaler.state_dict()
            outcome = fsdp2.guarded_step(optimizer, scaler=scaler, max_norm=max_norm, failed=failed)
            if step == 3:
                assert scaler.state_dict() == before
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
            taken.append(outcome.taken)
        assert taken == [True, False, True, False, True, True]
        assert scales == [8.0, 4.0, 4.0, 4.0, 8.0, 8.0]  # grows after the steps 2 and 4


@on_ranks(2)
def test_the_flat_optimizer_and_offloaded_parameters_are_guarded_too():
    rank = dist.get_rank()
    for offload, flat in ((False, True), (True, False)):
        model = sharded("zero3", offload_policy=fsdp2.CPUOffloadPolicy() if offload else None)
        make = fsdp2.optim.flat if flat else lambda kind, params, **options: kind(params, **options)
        optimizer = make(torch.optim.AdamW, model.parameters(), lr=0.1)
        for bad in (float("nan"), 1.0):
            before = whole(model)
            model(torch.ones(2, 7) * (bad if rank == 1 else 1.0)).square().mean().backward()
            assert fsdp2.guarded_step(optimizer).taken is (bad == 1.0)
            optimizer.zero_grad()
            after = whole(model)
            assert all(torch.equal(before[name], after[name]) for name in after) is (bad != 1.0), (offload, flat)


@on_ranks(2)
def test_wrong_arguments_raise_before_ranks_communicate():
    plain = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(ArgumentError, match="without a sharded parameter"):
        fsdp2.guarded_step(plain)
    with pytest.raises(ArgumentError, match="guarded_step got failed='x'"):
        fsdp2.guarded_step(plain, failed="x")


@on_ranks(2)
def test_its_price_is_one_all_reduce_an_axis():
    from fsdp2.inspect import Listener, listen

    kinds: list[str] = []

    class Counts(Listener):
        def issued(self, record, owner, num_ranks):
            kinds.append(f"{record.kind} {record.numel}")

    model = sharded("zero3")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 7)).square().mean().backward()
    undo = listen(Counts())
    fsdp2.guarded_step(optimizer)
    undo()
    assert kinds == ["agreement of ranks 1"]
