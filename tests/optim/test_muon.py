"""``fsdp2.optim.Muon`` on sharded parameters: ``torch.optim.Muon`` and ``AdamW`` on the unsharded model are the oracle."""

from __future__ import annotations

import copy
import math
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from fsdp2 import fully_shard
from fsdp2.errors import ArgumentError, ParameterError
from fsdp2.optim import Muon
from fsdp2.optim.muon import orthogonalized
from fsdp2.optim.whole_matrices import Cut, Job, compute_by_owners, rounds_of
from harness import cpu_mesh, on_ranks
from harness.models import batches, mlp
from harness.sharding import shard_blocks, with_reference
from harness.training import state_of

OPTIONS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}


def unsharded_optimizers(model: nn.Module, **options: Any) -> list[torch.optim.Optimizer]:
    matrices = [param for param in model.parameters() if param.dim() == 2]
    others = [param for param in model.parameters() if param.dim() != 2]
    return [torch.optim.Muon(matrices, **OPTIONS, **options), torch.optim.AdamW(others, **OPTIONS)]


def train(model: nn.Module, optimizers: list[torch.optim.Optimizer], data: list[Tensor]) -> None:
    for x in data:
        model(x).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        state_of(model)


def assert_close(model: nn.Module, expected: nn.Module) -> None:
    """Within the rounding of the iteration, whose bf16 numbers are added times the learning rate."""
    for (name, param), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        whole = param.full_tensor() if isinstance(param, DTensor) else param
        torch.testing.assert_close(
            whole.detach().cpu(), other.detach(), rtol=0, atol=4 * 2**-8 * 0.02, msg=lambda text, name=name: f"{name}: {text}"
        )


@on_ranks(1, 2)
@pytest.mark.parametrize("adjustment", [None, "match_rms_adamw"])
def test_sharded_muon_trains_as_torchs_does_unsharded(adjustment):
    model, unsharded = shard_blocks(mlp()), mlp()
    train(model, [Muon(model, **OPTIONS, adjust_lr_fn=adjustment)], batches(3))
    train(unsharded, unsharded_optimizers(unsharded, adjust_lr_fn=adjustment), batches(3))
    assert_close(model, unsharded)


@pytest.mark.slow
@on_ranks(3)
@pytest.mark.parametrize("dim", [0, 1])
def test_uneven_and_empty_shards_on_any_dim(dim):
    model, unsharded = with_reference(nn.Sequential(nn.Linear(7, 2), nn.Tanh(), nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1)))
    fully_shard(model, mesh=cpu_mesh(3), shard_placement_fn=lambda param: Shard(dim if param.dim() > 1 else 0))
    train(model, [Muon(model, **OPTIONS)], batches(3))
    train(unsharded, unsharded_optimizers(unsharded), batches(3))
    assert_close(model, unsharded)


@pytest.mark.slow
@on_ranks(4)
def test_hsdp():
    model, unsharded = (
        shard_blocks(mlp(), mesh=dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))),
        mlp(),
    )
    train(model, [Muon(model, **OPTIONS)], batches(3))
    train(unsharded, unsharded_optimizers(unsharded), batches(3))
    assert_close(model, unsharded)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.Parameter(torch.randn(3, 7, 5) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bi,eio->ebo", x, self.experts)


class Apart(nn.Module):
    """The same experts as matrices of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ParameterList(Experts().experts.detach().unbind())

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([x @ expert for expert in self.experts])


@on_ranks(2)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_a_batch_of_experts_is_made_orthogonal_matrix_by_matrix(dim):
    model, apart = Experts(), Apart()
    fully_shard(model, mesh=cpu_mesh(2), shard_placement_fn=lambda param: Shard(dim))
    train(model, [Muon(model, **OPTIONS)], batches(3))
    train(apart, [torch.optim.Muon(apart.parameters(), **OPTIONS)], batches(3))
    whole = model.experts.full_tensor().detach().cpu()
    torch.testing.assert_close(whole, torch.stack([each.detach() for each in apart.experts]), rtol=0, atol=4 * 2**-8 * 0.02)


@on_ranks(2)
def test_groups_say_what_gets_muon_and_state_dicts_load():
    model = shard_blocks(mlp())
    first, *rest = list(model.parameters())
    groups = [{"params": [first], "use_muon": False, "lr": 0.5}, {"params": rest}]
    optimizer = Muon(groups, **OPTIONS)
    assert [group["use_muon"] for group in optimizer.param_groups] == [False, True, False]
    train(model, [optimizer], batches(2))
    assert set(optimizer.state[first]) == {"step", "exp_avg", "exp_avg_sq"}
    matrix = next(param for param in rest if param.dim() == 2)
    assert isinstance(optimizer.state[matrix]["momentum_buffer"], DTensor)

    other = shard_blocks(mlp(seed=4))
    other.load_state_dict(model.state_dict())
    one, *others = list(other.parameters())
    resumed = Muon([{"params": [one], "use_muon": False}, {"params": others}], **OPTIONS)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, [optimizer], batches(2, seed=5))
    train(other, [resumed], batches(2, seed=5))
    for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours.full_tensor(), theirs.full_tensor())


def test_what_muon_cannot_do_is_refused_by_name():
    vector, matrix = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3, 3))
    with pytest.raises(ArgumentError, match="no matrices"):
        Muon([{"params": [vector], "use_muon": True}])
    for options in ({"lr": -1.0}, {"momentum": 1.0}, {"ns_steps": 0}, {"adjust_lr_fn": "mine"}):
        with pytest.raises(ArgumentError, match=next(iter(options))):
            Muon([matrix], **options)


@pytest.mark.slow
@on_ranks(4)
def test_a_matrix_that_two_mesh_axes_cut_is_refused():
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    weight = nn.Parameter(torch.distributed.tensor.distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Shard(1)]))
    weight.grad = torch.ones_like(weight)
    with pytest.raises(ParameterError, match="one mesh axis"):
        Muon([weight]).step()


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (3, 5, 2)])
def test_singular_values_come_near_one(shape):
    torch.manual_seed(0)
    found = orthogonalized(torch.randn(shape), (3.4445, -4.775, 2.0315), 5, 1e-7)
    assert found.shape == shape
    values = torch.linalg.svdvals(found.float())
    assert float(values.min()) > 0.5
    assert float(values.max()) < 1.3


def test_owners_are_balanced_by_cost():
    assert rounds_of([9, 5, 4, 1], 2) == [[0, 1], [3, 2]]
    costs = [float(cost) for cost in (7, 7, 6, 5, 5, 4, 4, 4, 3, 2, 2, 1)]
    rounds = rounds_of(costs, 3)
    loads = [sum(costs[owners[rank]] for owners in rounds if owners[rank] is not None) for rank in range(3)]
    assert sorted(index for owners in rounds for index in owners if index is not None) == list(range(12))
    assert max(loads) <= math.ceil(sum(costs) / 3 * 4 / 3)
    assert rounds_of([], 2) == []


@on_ranks(2)
def test_the_next_matrix_is_on_its_way_while_this_one_is_made_orthogonal_and_results_return_beside_the_next():
    """Five equal matrices of two owners are three rounds; each is sent before the one ahead is computed, and no result is awaited."""
    happened: list[str] = []
    exchange = dist.all_to_all_single

    class Returning:
        """The handle of an exchange."""

        def __init__(self, work: Any, name: str) -> None:
            self.work, self.name = work, name

        def wait(self) -> None:
            happened.append(f"wait {self.name}")
            self.work.wait()

    names = iter(["0 out", "1 out", "0 back", "2 out", "1 back", "2 back"])

    def recorded(*args: Any, **options: Any) -> Returning:
        name = next(names)
        happened.append(name)
        return Returning(exchange(*args, **options), name)

    def function(matrix: Tensor) -> Tensor:
        happened.append("compute")
        return 2 * matrix

    pieces = [torch.full((2, 3), float(number)) for number in range(5)]
    cut = Cut(cpu_mesh(2).get_group(), 0, (2, 2))
    with mock.patch.object(dist, "all_to_all_single", recorded):
        results = compute_by_owners([Job(piece, torch.Size((4, 3)), cut, 1.0) for piece in pieces], function)
    assert all(torch.equal(result, 2 * piece) for result, piece in zip(results, pieces, strict=True))
    rounds = ["0 out", "1 out", "wait 0 out", "compute", "0 back", "2 out", "wait 1 out", "compute", "1 back", "wait 2 out"]
    last = ["compute"] if dist.get_rank() == 0 else []
    assert happened == [*rounds, *last, "2 back", "wait 0 back", "wait 1 back", "wait 2 back"]
