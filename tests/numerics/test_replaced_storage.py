"""Whatever moves, casts, loads or materialises parameters between steps: the next step uses the new values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from harness import on_ranks
from harness.models import batches, mlp
from harness.sharding import shard_blocks, with_reference
from harness.training import (
    adamw,
    assert_same_bits,
    assert_same_tensors,
    assert_trains_bitwise_as,
    fed_in_chunks,
    fed_own_chunk,
    forced,
    own_chunk,
    sgd,
    state_of,
)


def trained_twice(model, reference, between, reference_between, make_optimizer=sgd, optimizer_lives=True):
    """Two steps, ``between``, two steps more: the same in both; the same optimizer throughout if it lives."""
    optimizer = make_optimizer(model.parameters())
    reference_optimizer = make_optimizer(reference.parameters())
    first = batches(2, seed=1)
    assert_same_bits(
        fed_own_chunk(model, first, optimizer=optimizer), fed_in_chunks(reference, first, lambda params: reference_optimizer)
    )
    identities = [id(param) for param in model.parameters()]
    between(model)
    reference_between(reference)
    if optimizer_lives:
        assert [id(param) for param in model.parameters()] == identities
    else:
        optimizer = make_optimizer(model.parameters())
        reference_optimizer = make_optimizer(reference.parameters())
    dtype = next(model.parameters()).dtype
    second = [x.to(dtype) for x in batches(2, seed=2)]
    assert_same_bits(
        fed_own_chunk(model, second, optimizer=optimizer), fed_in_chunks(reference, second, lambda params: reference_optimizer)
    )


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_optimizers_keep_their_parameters_for_life(optimizer):
    model, reference = with_reference(mlp(), shard_blocks)
    identities = {name: id(param) for name, param in model.named_parameters()}
    assert_trains_bitwise_as(model, reference, batches(), optimizer)
    assert {name: id(param) for name, param in model.named_parameters()} == identities


def halved(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor * 0.5 for name, tensor in model.state_dict().items()}


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("gather", ["direct", "packed"])
def test_loading_a_state_dict_between_steps(gather):
    model, reference = with_reference(mlp())
    with forced(gather=gather):
        shard_blocks(model)
    load = lambda model: model.load_state_dict(halved(model))  # noqa: E731
    trained_twice(model, reference, load, load, adamw)


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("gather", ["direct", "packed"])
def test_loading_by_assignment_between_steps(gather):
    """assign=True registers new parameters, as in the unsharded model: an optimizer made before has lost them."""
    model, reference = with_reference(mlp())
    with forced(gather=gather):
        shard_blocks(model)
    load = lambda model: model.load_state_dict(halved(model), assign=True)  # noqa: E731
    trained_twice(model, reference, load, load, adamw, optimizer_lives=False)


@on_ranks(1, 2, 3)
def test_changing_the_dtype_of_the_model_between_steps():
    model, reference = with_reference(mlp(), shard_blocks)
    trained_twice(model, reference, nn.Module.double, nn.Module.double, optimizer_lives=False)
    assert all(param.dtype == torch.float64 for param in model.parameters())
    assert all(param.to_local().dtype == torch.float64 for param in model.parameters())


@on_ranks(1, 2, 3)
def test_parameters_keep_their_identity_where_modules_do():
    model = shard_blocks(mlp())
    whole = mlp()
    identities = [id(param) for param in model.parameters()]
    model.double()
    whole.double()
    assert [id(param) for param in model.parameters()] == identities
    assert_same_tensors(state_of(model), state_of(whole), "value")
    model.float()
    assert [id(param) for param in model.parameters()] == identities
    assert torch.equal(model(batches()[0]), whole.float()(batches()[0]))


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("call", ["cpu", "to", "share", "apply"])
def test_calls_that_may_move_parameters_between_steps(call):
    def move(model: nn.Module) -> None:
        if call == "cpu":
            model.cpu()
        elif call == "to":
            model.to(torch.float64).to(torch.float32)
        elif call == "apply":
            model._apply(lambda tensor: tensor.clone())
        else:
            for param in model.parameters():
                param.data = param.data.clone()

    model, reference = with_reference(mlp(), shard_blocks)
    trained_twice(model, reference, move, move, adamw)


@on_ranks(1, 2, 3)
def test_values_written_in_place_between_steps():
    def write(model: nn.Module) -> None:
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.5)
            torch._foreach_add_(list(model.parameters()), 0.125)
            model.first.weight.zero_()
            nn.init.constant_(model.last.bias, 0.25)

    model, reference = with_reference(mlp(), shard_blocks)
    trained_twice(model, reference, write, write)


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("after", [True, False])
def test_values_written_between_steps_are_seen_even_if_parameters_were_kept(after):
    """With reshard_after_forward=False an evaluation leaves parameters unsharded: the next forward must not use old ones."""
    model, whole = with_reference(mlp(), shard_blocks, reshard_after_forward=after)
    sharded = list(model.parameters())
    x = batches()[0]
    with torch.no_grad():
        assert torch.equal(model(x), whole(x))
        for param in (*sharded, *whole.parameters()):
            param.mul_(0.5)
        assert torch.equal(model(x), whole(x))


@on_ranks(1, 2, 3)
def test_a_parameter_replaced_by_another_dtensor():
    model, reference = with_reference(mlp(), shard_blocks)
    values = torch.arange(70.0).view(10, 7) / 70

    def replace(model: nn.Module) -> None:
        old = model.first.weight
        if isinstance(old, DTensor):
            model.first.weight = nn.Parameter(distribute_tensor(values, old.device_mesh, old.placements))
        else:
            model.first.weight = nn.Parameter(values.clone())

    trained_twice(model, reference, replace, replace, optimizer_lives=False)


# --- from the meta device ---------------------------------------------------------------------------------------------------------


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("gather", ["direct", "packed", "mixed"])
def test_a_model_materialised_from_meta_by_to_empty_and_a_state_dict(gather):
    reference = mlp()
    with torch.device("meta"):
        model = mlp()
    with forced(gather=gather):
        shard_blocks(model)
    assert all(param.is_meta for param in model.parameters())
    model.to_empty(device="cpu")
    for name, param in model.named_parameters():
        value = dict(reference.named_parameters())[name]
        with torch.no_grad():
            param.copy_(distribute_tensor(value.detach(), param.device_mesh, param.placements))
    assert_trains_bitwise_as(model, reference, batches(), adamw)


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("assign", [True, False])
def test_a_model_materialised_from_meta_by_loading(assign):
    reference = mlp()
    with torch.device("meta"):
        model = mlp()
    shard_blocks(model)
    if not assign:
        model.to_empty(device="cpu")
    state = {
        name: distribute_tensor(reference.state_dict()[name], param.device_mesh, param.placements)
        for name, param in model.state_dict().items()
    }
    model.load_state_dict(state, assign=assign)
    assert_trains_bitwise_as(model, reference, batches(), adamw)


@on_ranks(1, 2, 3)
def test_reset_parameters_after_to_empty():
    """Values that need no generator are those of the unsharded model."""
    with torch.device("meta"):
        model = nn.Sequential(nn.LayerNorm(7), nn.LayerNorm(7))
    shard_blocks(model)
    model.to_empty(device="cpu")
    for module in model:
        module.reset_parameters()
    reference = nn.Sequential(nn.LayerNorm(7), nn.LayerNorm(7))
    assert_trains_bitwise_as(model, reference, batches())


@on_ranks(2, 3)
def test_a_state_dict_saved_in_the_middle_of_training_is_that_of_the_unsharded_model():
    model, reference = with_reference(mlp(), shard_blocks)
    fed_own_chunk(model, batches())
    fed_in_chunks(reference, batches())
    model(own_chunk(batches()[0]))  # leaves the root unsharded, for a backward that does not come
    saved = model.state_dict()
    assert all(isinstance(value, DTensor) for value in saved.values())
    assert_same_tensors(saved, reference.state_dict(), "value")
