"""Parameters that are registered after ``fully_shard``: ``fsdp2.adopt`` shards them where they are."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor, Shard

import fsdp2
from fsdp2.errors import MeshError, ModuleError, OrderError, ParkedError
from harness import cpu_mesh, on_ranks
from harness.models import batches, mlp
from harness.training import adamw, assert_equal_training, fed_own_chunk, fed_whole
from harness.user_warnings import warned_on_rank_0


class Adapted(nn.Module):
    """A linear layer with an adapter around it, whose parameters no module's forward reads but its own."""

    def __init__(self, base: nn.Linear, rank: int = 3) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.ParameterDict({"default": torch.linspace(-1, 1, rank * base.out_features).view(rank, -1)})

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.down(x) @ self.up["default"]


def adapt(model: Any) -> None:
    torch.manual_seed(3)
    for param in model.parameters():
        param.requires_grad_(False)
    for block in model.blocks:
        block.up = Adapted(block.up)
    model.last = Adapted(model.last)


MESHES: dict[str, Any] = {"1-D": cpu_mesh, "HSDP": lambda: cpu_mesh(2, 2)}
WHERE: dict[str, dict[str, Any]] = {
    "as the unit": {},
    "replicated": {"mesh": lambda: cpu_mesh(4, 1)},
    "by dim 1": {"shard_placement_fn": lambda p: Shard(p.ndim - 1)},
}
BEFORE = {
    "nothing": lambda model: None,
    "a step": lambda model: model(batches(1)[0]).sum().backward(),
    "an evaluation": torch.no_grad()(lambda model: model(batches(1)[0])),
    "a kept unshard": lambda model: model.blocks[0].unshard(),
}
OPTIONS = {"default": {}, "kept": {"reshard_after_forward": False}, "two": {"reshard_after_forward": 2}}


@on_ranks(4)
@pytest.mark.parametrize(("mesh", "options"), [("1-D", "default"), ("1-D", "kept"), ("1-D", "two"), ("HSDP", "default")])
def test_late_adapters_train_as_in_the_unsharded_model(mesh: str, options: str):
    for where, before in itertools.product(WHERE, BEFORE):
        reference = mlp()
        model = fsdp2_sharded(copy.deepcopy(reference), mesh=MESHES[mesh](), **OPTIONS[options])
        BEFORE[before](model)
        model.zero_grad()
        adapt(reference)
        adapt(model)
        made = {key: value() if key == "mesh" else value for key, value in WHERE[where].items()}
        named = fsdp2.adopt(model, **made)
        assert sorted(named) == sorted(name for name, param in reference.named_parameters() if param.requires_grad)
        assert fsdp2.adopt(model) == []
        assert all(isinstance(param, DTensor) for param in model.parameters())
        if where == "replicated":
            assert all(param.to_local().shape == param.shape for param in model.parameters() if param.requires_grad)
        steps = fed_own_chunk(model, batches(3), adamw)
        assert_equal_training(steps, fed_whole(reference, batches(3), adamw))
        copied = copy.deepcopy(model)
        for each in (model, copied):
            whole = {name: value.full_tensor() for name, value in get_model_state_dict(each).items()}
            for name, expected in reference.state_dict().items():
                torch.testing.assert_close(whole[name], expected, msg=f"{where}, {before}: {name}")


def fsdp2_sharded(model: Any, **options: Any) -> Any:
    for block in model.blocks:
        fsdp2.fully_shard(block, **options)
    return fsdp2.fully_shard(model, **options)


@on_ranks(2)
def test_adopted_adapters_accumulate_and_are_gathered_with_their_unit():
    reference, model = mlp(), fsdp2_sharded(mlp(), mp_policy=fsdp2.MixedPrecisionPolicy(reduce_dtype=torch.float64))
    model.set_requires_gradient_sync(False)
    adapt(reference)
    adapt(model)
    fsdp2.adopt(model)
    rows = [x.chunk(2)[dist.get_rank()] for x in batches(2)]
    model(rows[0]).square().mean().backward()
    model.set_requires_gradient_sync(True)
    model(rows[1]).square().mean().backward()
    for x in batches(2):
        reference(x).square().mean().backward()
    for (name, param), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (param.grad is None) == (expected.grad is None), name
        if expected.grad is not None:
            torch.testing.assert_close(param.grad.full_tensor(), expected.grad)
    unit = fsdp2.inspect.units(model)[1]
    assert [len(group.params) for group in unit.groups] == [6, 2]


@on_ranks(2)
def test_adopted_parameters_are_saved_and_loaded_by_their_module_alone():
    model, reference = fsdp2_sharded(mlp(), mesh=cpu_mesh(), reshard_after_forward=False), mlp()
    adapt(model)
    adapt(reference)
    fsdp2.adopt(model)
    model(batches(1)[0])
    adapter, expected = model.blocks[0].up, {name: value + 1 for name, value in reference.blocks[0].up.state_dict().items()}
    assert all(isinstance(value, DTensor) for value in adapter.state_dict().values())
    adapter.load_state_dict(expected)
    reference.blocks[0].up.load_state_dict(expected)
    assert {name: value.full_tensor().tolist() for name, value in adapter.state_dict().items()} == {
        name: value.tolist() for name, value in expected.items()
    }
    assert_equal_training(fed_own_chunk(model, batches(2)), fed_whole(reference, batches(2)))


class Stem(nn.Module):
    """A model without parameters of its own, for which two blocks are one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.scale(x.to(self.scale.weight.dtype)) if hasattr(self, "scale") else x


@on_ranks(2)
def test_adopted_parameters_follow_the_policy_of_their_module_and_keep_their_names():
    def sharded(reduces: Any, mesh: Any) -> Any:
        model = Stem()
        fsdp2.fully_shard(model.blocks[0], mesh=mesh, mp_policy=fsdp2.MixedPrecisionPolicy(reduce_dtype=torch.float64))
        fsdp2.fully_shard([model.blocks[1], model.blocks[2]], mesh=cpu_mesh())
        fsdp2.fully_shard(model, mesh=cpu_mesh(), mp_policy=reduces)
        model.scale, model.blocks[2].extra = nn.Linear(7, 7), nn.Linear(2, 2, bias=False)
        return model

    model = sharded(fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False), cpu_mesh())
    assert fsdp2.adopt(model) == ["blocks.2.extra.weight", "scale.weight", "scale.bias"]
    root, *_ = fsdp2.inspect.units(model)
    assert model(torch.ones(2, 7)).dtype == torch.bfloat16
    assert [len(group.params) for group in root.groups] == [2]
    model = sharded(fsdp2.MixedPrecisionPolicy(), cpu_mesh(2, 1))
    before = [type(param) for param in model.parameters()]
    with pytest.raises(MeshError, match="scale"):
        fsdp2.adopt(model)
    assert [type(param) for param in model.parameters()] == before
    assert "scale.bias" in fsdp2.adopt(model, mesh=cpu_mesh())


@on_ranks(2)
def test_adopt_is_refused_where_it_cannot_be_right():
    with pytest.raises(ModuleError, match="adopt got MLP"):
        fsdp2.adopt(mlp())
    with pytest.raises(ModuleError, match="adopt got int"):
        fsdp2.adopt(3)  # type: ignore[arg-type]
    model = fsdp2_sharded(mlp(), mesh=cpu_mesh())
    adapt(model)
    model.requires_grad_(True)
    with warned_on_rank_0(UserWarning, r"fsdp2\.adopt"):
        loss = model(batches(1)[0]).sum()
    with pytest.raises(OrderError, match="a backward to come"):
        fsdp2.adopt(model)
    loss.backward()
    model.zero_grad()
    fsdp2.park(model)
    with pytest.raises(ParkedError):
        fsdp2.adopt(model)
    fsdp2.unpark(model)
    ignored = set(model.last.parameters()) - {model.last.base.weight, model.last.base.bias}
    assert len(fsdp2.adopt(model, ignored_params=ignored)) == 6
    model(batches(1)[0])  # without a warning of what is ignored
