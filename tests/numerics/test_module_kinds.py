"""Modules with habits of their own: copies of parameters, writes to them in forward, buffers, optimizers inside of backward."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.optim import SGD

from fsdp2 import FSDPModule, ParameterError, fully_shard
from harness import cpu_mesh, on_ranks
from harness.models import batches, mlp, token_batches, transformer
from harness.sharding import shard_blocks, with_reference
from harness.training import (
    adamw,
    assert_same_tensors,
    assert_trains_as,
    assert_trains_bitwise_as,
    fed_in_chunks,
    forward_backward,
    own_chunk,
    state_of,
)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.recurrent = kind(7, 6, num_layers=2, batch_first=True, bidirectional=True)
        self.last = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.recurrent(x)[0])


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("own_group", [True, False])
def test_recurrent_layers_which_keep_copies_of_their_parameters(kind, own_group):
    model, reference = with_reference(Recurrent(kind))
    if own_group:
        fully_shard(model.recurrent, mesh=cpu_mesh())
    fully_shard(model, mesh=cpu_mesh())
    inputs = batches(shape=(12, 4, 7))
    # oneDNN's kernels choose their order of addition by the addresses of the weights.
    assert_trains_as(model, reference, inputs, adamw, bound=1e-5, ulps=64)


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("own_group", [True, False])
def test_an_embedding_with_max_norm_shrinks_its_rows_in_place(own_group):
    model, reference = with_reference(nn.Sequential(nn.Embedding(11, 6, max_norm=1.0), nn.Linear(6, 5)))
    if own_group:
        fully_shard(model[0], mesh=cpu_mesh())
    fully_shard(model, mesh=cpu_mesh())
    ids = token_batches(1)[0]
    mine = forward_backward(model, own_chunk(ids))
    for rank, chunk in enumerate(ids.chunk(dist.get_world_size())):
        loss = reference(chunk).square().mean()
        (loss / dist.get_world_size()).backward()
        if rank == dist.get_rank():
            torch.testing.assert_close(mine, loss)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=1e-5, atol=1e-7)


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("own_group", [True, False])
@pytest.mark.parametrize("after", [True, False])
def test_an_embedding_with_max_norm_trains_as_unsharded(after, own_group):
    """torch's FSDP2 drops what forward shrank, so that its weights differ from the second step on."""
    model, reference = with_reference(nn.Sequential(nn.Embedding(11, 6, max_norm=1.0), nn.Linear(6, 5)))
    if own_group:
        fully_shard(model[0], mesh=cpu_mesh(), reshard_after_forward=after)
    fully_shard(model, mesh=cpu_mesh(), reshard_after_forward=after)
    inputs = [ids[:, 0] for ids in token_batches()]
    assert_trains_as(model, reference, inputs)
    torch.testing.assert_close(model[0].weight.full_tensor(), reference[0].weight, rtol=1e-6, atol=1e-7)


class WithBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 6)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 6))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("hidden", torch.ones(6), persistent=False)
        self.last = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.last(torch.tanh(self.first(x)) * self.scale * self.hidden)


@on_ranks(1, 2)
def test_sparse_gradients_are_refused_by_name():
    model = fully_shard(nn.Sequential(nn.Embedding(6, 4, sparse=True), nn.Linear(4, 4)), mesh=cpu_mesh())
    with pytest.raises(ParameterError, match=r"(?s)1 parameters have sparse gradients.*0\.weight.*sparse=False"):
        model(torch.arange(3)).sum().backward()
    model.reset_iter_state()
    with torch.no_grad():
        model(torch.arange(3))


@on_ranks(1, 2, 3)
def test_buffers_stay_whole_and_are_the_modules_own():
    model, reference = with_reference(WithBuffers(), fully_shard, mesh=cpu_mesh())
    assert_trains_bitwise_as(model, reference, batches())
    assert model.calls == 3
    assert torch.equal(model.scale, reference.scale)
    assert set(model.state_dict()) == set(reference.state_dict())


@on_ranks(2, 3)
def test_batch_norm_keeps_statistics_of_its_own_rows():
    model, reference = with_reference(nn.Sequential(nn.Linear(7, 6), nn.BatchNorm1d(6), nn.Linear(6, 5)), fully_shard, mesh=cpu_mesh())
    for x in batches():
        forward_backward(model, own_chunk(x))
        reference(own_chunk(x))
    assert torch.equal(model[1].running_mean, reference[1].running_mean)
    model.eval()
    x = batches(1, seed=5)[0]
    assert torch.equal(model(x), reference.eval()(x))


@on_ranks(1, 2, 3)
def test_dropout_draws_as_in_the_unsharded_model():
    model, reference = with_reference(nn.Sequential(nn.Linear(7, 6), nn.Dropout(0.5), nn.Linear(6, 5)), fully_shard, mesh=cpu_mesh())
    x = batches()[0]
    torch.manual_seed(3)
    ours = model(x)
    torch.manual_seed(3)
    assert torch.equal(ours, reference(x))


class Parametrized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = weight_norm(nn.Linear(7, 6))
        self.last = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("own_group", [True, False])
def test_parametrized_weights(own_group):
    model, reference = with_reference(Parametrized())
    if own_group:
        fully_shard(model.first, mesh=cpu_mesh())
    fully_shard(model, mesh=cpu_mesh())
    assert_trains_as(model, reference, batches())


class ParameterContainers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList([torch.randn(7, 3), torch.randn(3)])
        self.named = nn.ParameterDict({"scale": torch.randn(3), "shift": torch.randn(1)})

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.rows[0] + self.rows[1]) * self.named["scale"] + self.named["shift"]


@on_ranks(1, 2, 3)
def test_parameter_lists_and_dicts():
    model, reference = with_reference(ParameterContainers(), fully_shard, mesh=cpu_mesh())
    assert_trains_bitwise_as(model, reference, batches())


# --- an optimizer step inside of backward ---------------------------------------------------------------------------------------


def step_in_backward(model: nn.Module) -> list[torch.optim.Optimizer]:
    """One SGD for each parameter, which steps when its gradient is there and forgets it."""
    optimizers = {param: SGD([param], lr=0.1, momentum=0.9) for param in model.parameters()}

    def step(param: nn.Parameter) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step)
    return list(optimizers.values())


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("after", [True, False])
def test_an_optimizer_that_steps_inside_of_backward(after):
    model, reference = with_reference(mlp(), shard_blocks, after)
    steps = fed_in_chunks(reference, batches())
    optimizers = step_in_backward(model)
    for x, expected in zip(batches(), steps, strict=True):
        forward_backward(model, own_chunk(x))
        assert_same_tensors(state_of(model), expected.params, "value")
    assert all(param.grad is None for param in model.parameters())
    assert len(optimizers) == len(list(model.parameters()))


@on_ranks(2, 3)
def test_hooks_on_sharded_parameters_see_the_reduced_gradient_once_a_backward():
    model, reference = with_reference(mlp(), fully_shard, mesh=cpu_mesh())
    expected = fed_in_chunks(reference, batches(1))[0].grads
    seen: dict[str, Tensor] = {}
    for name, param in model.named_parameters():

        def hook(param: nn.Parameter, name: str = name) -> None:
            assert name not in seen
            seen[name] = param.grad.detach().clone()

        param.register_post_accumulate_grad_hook(hook)
    forward_backward(model, own_chunk(batches(1)[0]))
    assert_same_tensors(seen, expected, "gradient")


@on_ranks(1, 2, 3)
def test_a_learning_rate_schedule_and_parameter_groups():
    def make(params) -> SGD:
        params = list(params)
        return SGD([{"params": params[::2], "lr": 0.2}, {"params": params[1::2], "weight_decay": 0.1}], lr=0.05)

    model, reference = with_reference(transformer(), fully_shard, mesh=cpu_mesh())
    assert_trains_bitwise_as(model, reference, token_batches(), make)


@on_ranks(1, 2, 3)
def test_clipping_by_norm_and_by_value():
    model, reference = with_reference(mlp(), shard_blocks)
    optimizer, reference_optimizer = SGD(model.parameters(), lr=0.1), SGD(reference.parameters(), lr=0.1)
    for x in batches():
        forward_backward(model, own_chunk(x))
        forward_backward(reference, x)
        norms = []
        for each in (model, reference):
            norm = torch.nn.utils.clip_grad_norm_(each.parameters(), 0.05)
            norms.append(norm.full_tensor() if isinstance(each, FSDPModule) else norm)
            torch.nn.utils.clip_grad_value_(each.parameters(), 0.01)
        torch.testing.assert_close(*norms, rtol=1e-5, atol=0)
        optimizer.step()
        reference_optimizer.step()
        optimizer.zero_grad()
        reference_optimizer.zero_grad()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs, rtol=1e-5, atol=1e-6)
