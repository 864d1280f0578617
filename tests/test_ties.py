"""A parameter shared by modules of different groups stays one parameter and trains as in the unsharded model."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from fsdp2 import MixedPrecisionPolicy, OrderError, ParameterError, fully_shard
from harness import cpu_mesh, on_ranks
from harness.sharding import with_reference


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


class TiedLM(nn.Module):
    def __init__(self, vocabulary=11, dim=6):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(2))
        self.head = nn.Linear(dim, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(model, ids):
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("own_unit", [("embedding",), ("head",), ("embedding", "head")])
@pytest.mark.parametrize("after", [None, True, False])
def test_a_tied_language_model_trains_with_embedding_and_head_in_different_groups(own_unit, after, world_size):
    model, reference = with_reference(TiedLM())
    options = {"mesh": cpu_mesh(), "reshard_after_forward": after}
    for block in model.blocks:
        fully_shard(block, **options)
    for name in own_unit:
        fully_shard(getattr(model, name), **options)
    fully_shard(model, **options)
    assert model.head.weight is model.embedding.weight
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (reference, model)]
    for step in range(4):
        ids = torch.randint(0, 11, (12, 5), generator=torch.Generator().manual_seed(step))
        loss_of(reference, ids).backward()
        loss_of(model, ids.chunk(world_size)[dist.get_rank()]).backward()
        assert model.head.weight is model.embedding.weight
        for (name, expected), (got_name, got) in zip(reference.named_parameters(), model.named_parameters(), strict=True):
            assert got_name == name
            assert_close(got.grad.full_tensor(), expected.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            assert_close(model(ids), reference(ids))
        assert set(model.state_dict()) == set(reference.state_dict())


@on_ranks(2)
def test_a_tie_between_groups_with_different_dtypes_is_refused_with_both_names():
    model = TiedLM()
    fully_shard(model.embedding, mesh=cpu_mesh())
    with pytest.raises(ParameterError, match=r"(?s)head.weight.*tied to weight.*param_dtype.*fix:"):
        fully_shard(model, mesh=cpu_mesh(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


@on_ranks(2)
def test_a_tie_between_groups_with_different_placements_is_refused():
    model = TiedLM()
    fully_shard(model.embedding, mesh=cpu_mesh())
    with pytest.raises(ParameterError, match="another placement"):
        fully_shard(model, mesh=cpu_mesh(), shard_placement_fn=lambda p: torch.distributed.tensor.Shard(p.ndim - 1))


@on_ranks(2)
@pytest.mark.parametrize("frozen_at_first", [False, True])
def test_a_tie_that_sharding_one_side_would_cut_is_an_error_in_the_first_backward_of_its_plain_side(frozen_at_first):
    """Before, the two drifted apart without a word: the plain side's gradient is nobody's."""
    model, ids = TiedLM(), torch.zeros(1, 2, dtype=torch.long)
    model.embedding.requires_grad_(not frozen_at_first)
    fully_shard(model.embedding, mesh=cpu_mesh())
    model.requires_grad_(True)
    with pytest.raises(OrderError, match=r"(?s)weight was sharded while a module outside.*fully_shard on the root"):
        loss_of(model, ids).backward()
    model.embedding.reset_iter_state()
    fully_shard(model, mesh=cpu_mesh())
    model.zero_grad()
    reference = TiedLM()
    reference.load_state_dict({name: value.full_tensor() for name, value in model.state_dict().items()})
    loss_of(model, ids).backward()
    loss_of(reference, ids).backward()
    assert model.head.weight is model.embedding.weight
    for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert_close(param.grad.full_tensor(), expected.grad)


@on_ranks(2)
def test_a_parameter_that_was_sharded_may_be_held_and_looked_at():
    model, ids = TiedLM(), torch.zeros(1, 2, dtype=torch.long)
    before = dict(model.named_parameters())
    fully_shard(model, mesh=cpu_mesh())
    loss_of(model, ids).backward()
    for name, param in model.named_parameters():
        assert_close(param.full_tensor(), before[name].data)
        assert before[name].grad is None
        assert copy.deepcopy(before[name]).requires_grad


LATE_TIES = [
    (units, direction, loaded, param_dtype)
    for units in ([], ["head"], ["embedding", "head"], ["embedding"], ["blocks.0", "blocks.1", "head"], [["embedding", "head"]])
    for direction in ("head", "embedding")  # the module that gets the other one's parameter
    for loaded in (False, True)  # a loader has replaced the parameter of both
    for param_dtype in (None, torch.bfloat16)
]


@on_ranks(2)
def test_a_tie_made_between_fully_shard_and_the_first_forward_trains_as_one_made_before():
    ids = torch.arange(10).view(2, 5)
    for units, direction, loaded, param_dtype in LATE_TIES:
        case = f"{units} {direction} {loaded} {param_dtype}"
        torch.manual_seed(0)
        early, late = with_reference(TiedLM())
        late.head.weight = nn.Parameter(torch.randn_like(late.head.weight))
        late.embedding.weight = nn.Parameter(early.embedding.weight.detach().clone())
        if direction == "embedding":
            late.head.weight, late.embedding.weight = late.embedding.weight, late.head.weight
        policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
        for model in (early, late):
            for names in units:
                modules = [model.get_submodule(name) for name in ([names] if isinstance(names, str) else names)]
                fully_shard(modules if len(modules) > 1 else modules[0], mesh=cpu_mesh(2), mp_policy=policy)
            fully_shard(model, mesh=cpu_mesh(2), mp_policy=policy)
        kept, given = (late.embedding, late.head) if direction == "head" else (late.head, late.embedding)
        if loaded:
            kept.weight = nn.Parameter(kept.weight.detach().clone())
        given.weight = kept.weight
        optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in (early, late)]
        for _ in range(3):
            for model, optimizer in zip((early, late), optimizers, strict=True):
                loss_of(model, ids).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert late.head.weight is late.embedding.weight, case
        for ours, theirs in zip(late.parameters(), early.parameters(), strict=True):
            assert torch.equal(ours.full_tensor(), theirs.full_tensor()), case


@on_ranks(2)
def test_a_tie_made_after_the_first_forward_is_refused_by_name():
    for units in (["embedding", "head"], ["blocks.0", "head"], ["head"], []):
        model = TiedLM()
        model.head.weight = nn.Parameter(model.embedding.weight.detach().clone())
        for name in units:
            fully_shard(model.get_submodule(name), mesh=cpu_mesh(2))
        fully_shard(model, mesh=cpu_mesh(2), reshard_after_forward=True)
        model(torch.tensor([1, 2, 3]))
        model.head.weight = model.embedding.weight
        with pytest.raises(ParameterError, match=r"(?s)Linear.weight\) and embedding.weight were made one parameter after the first"):
            model(torch.tensor([1, 2, 3]))


@on_ranks(2)
def test_a_late_tie_of_modules_that_are_sharded_differently_is_refused_by_both_names():
    model = TiedLM()
    model.head.weight = nn.Parameter(model.embedding.weight.detach().clone())
    fully_shard(model.head, mesh=cpu_mesh(2), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    fully_shard(model, mesh=cpu_mesh(2))
    model.head.weight = model.embedding.weight
    with pytest.raises(ParameterError, match=r"head.weight .* to embedding.weight, which has another param_dtype"):
        model(torch.tensor([1, 2, 3]))


@on_ranks(2)
def test_sharded_parameters_may_change_places():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.two(torch.tanh(self.one(x)))

    model, reference = with_reference(Pair())
    fully_shard(model.one, mesh=cpu_mesh(2))
    fully_shard(model, mesh=cpu_mesh(2))
    for each in (reference, model):
        each.one.weight, each.two.weight = each.two.weight, each.one.weight
        each(torch.ones(2, 4)).sum().backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert_close(ours.grad.full_tensor(), theirs.grad)
