"""Arguments and results of any shape: what goes in and comes out, and which gradients flow."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from fsdp2 import fully_shard, register_fsdp_forward_method
from harness import cpu_mesh, on_ranks
from harness.models import Attention, Block, batches, token_batches
from harness.sharding import shard_blocks, with_reference
from harness.training import (
    adamw,
    assert_equal_training,
    assert_same_tensor,
    assert_trains_as,
    assert_trains_bitwise_as,
    backward_of,
    fed_in_chunks,
    fed_own_chunk,
    fed_whole,
    own_chunk,
    sgd,
)

# --- outputs --------------------------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    hidden: Tensor
    extra: Any


@dataclasses.dataclass
class Result:
    hidden: Tensor
    extra: Any = None
    label: str = "none"


@dataclasses.dataclass(frozen=True)
class FrozenResult:
    hidden: Tensor
    extra: Any = None


SHAPES = {
    "a tuple": (lambda h, e: (h, None, e), lambda o: (o[0], o[2])),
    "a list": (lambda h, e: [h, "text", e], lambda o: (o[0], o[2])),
    "a dict": (lambda h, e: {"hidden": h, "extra": e, "none": None}, lambda o: (o["hidden"], o["extra"])),
    "an ordered dict": (lambda h, e: OrderedDict(hidden=h, extra=e), lambda o: (o["hidden"], o["extra"])),
    "a named tuple": (Pair, lambda o: (o.hidden, o.extra)),
    "a dataclass": (Result, lambda o: (o.hidden, o.extra)),
    "a frozen dataclass": (FrozenResult, lambda o: (o.hidden, o.extra)),
    "nested": (lambda h, e: {"a": [(h, {"b": Result(e, (1, None))})]}, lambda o: (o["a"][0][0], o["a"][0][1]["b"].hidden)),
}


class Wrapping(nn.Module):
    """Hands two tensors from block to block in a container, which each block opens and packs again."""

    def __init__(self, shape: str) -> None:
        super().__init__()
        self.shape = shape
        self.first = nn.Linear(7, 7)
        self.blocks = nn.ModuleList(WrappingBlock(shape) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        pack, _ = SHAPES[self.shape]
        state = pack(self.first(x), x.mean(0, keepdim=True).expand_as(x))
        for block in self.blocks:
            state = block(state)
        return state


class WrappingBlock(nn.Module):
    def __init__(self, shape: str) -> None:
        super().__init__()
        self.shape = shape
        self.block = Block(7)
        self.side = nn.Linear(7, 7)

    def forward(self, state: Any) -> Any:
        pack, unpack = SHAPES[self.shape]
        hidden, extra = unpack(state)
        return pack(self.block(hidden) + extra, torch.tanh(self.side(extra)))


@on_ranks(2, 3)
@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_tensors_travel_in_containers(shape, after):
    model, reference = with_reference(Wrapping(shape), shard_blocks, after)
    kinds = []

    def iteration(model: nn.Module, x: Tensor) -> Tensor:
        output = model(x)
        kinds.append(type(output))
        hidden, extra = SHAPES[shape][1](output)
        loss = hidden.square().mean() + extra.square().mean()
        loss.backward()
        return loss

    assert_trains_bitwise_as(model, reference, batches(), iteration=iteration)
    assert len(set(kinds)) == 1


@on_ranks(2, 3)
@pytest.mark.parametrize("used", ["hidden", "extra"])
def test_a_loss_of_one_output_alone_reaches_its_part_of_the_model(used):
    model, reference = with_reference(Wrapping("a dict"), shard_blocks)
    iteration = backward_of(lambda model, x: model(x)[used].square().mean())
    assert_trains_bitwise_as(model, reference, batches(), iteration=iteration)


class PassesThrough(nn.Module):
    """Blocks that return one input changed and another as it came, as diffusion transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 7)
        self.blocks = nn.ModuleList(PassesThroughBlock() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x, context = self.first(x), self.first(x + 1)
        for block in self.blocks:
            x, context = block(x, context=context)
        return x * context


class PassesThroughBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 7)

    def forward(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        return x + torch.tanh(self.linear(x)) * context, context


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("after", [True, False])
def test_an_input_that_is_returned_as_it_came(after):
    model = PassesThrough()
    reference, whole = copy.deepcopy(model), copy.deepcopy(model)
    shard_blocks(model, after)
    steps = fed_own_chunk(model, batches())
    # A node more on the way may change the order in which autograd adds the context's gradients: bounds, not bits.
    assert_equal_training(steps, fed_in_chunks(reference, batches()))
    assert_equal_training(steps, fed_whole(whole, batches()))


class ViewOutput(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, :7]


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("is_view", [True, False])
@pytest.mark.parametrize("after", [True, False])
def test_outputs_changed_in_place(after, is_view):
    model, reference = with_reference(ChangedInPlace(is_view), shard_blocks, after)
    assert_trains_bitwise_as(model, reference, batches())


class ChangedInPlace(nn.Module):
    def __init__(self, is_view: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ViewOutput(7, 9) if is_view else nn.Linear(7, 7) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x += 1.0
            x = x.tanh_()
        return x


class InputInPlace(nn.Module):
    """Blocks change their input in place, and the caller sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 7)
        self.blocks = nn.ModuleList(InputInPlaceBlock() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            gate = block(x)
            x = x * gate
        return x


class InputInPlaceBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2.0)
        return torch.sigmoid(self.linear(x))


@on_ranks(1, 2, 3)
def test_inputs_changed_in_place():
    model = InputInPlace()
    reference, whole = copy.deepcopy(model), copy.deepcopy(model)
    shard_blocks(model)
    steps = fed_own_chunk(model, batches())
    assert_equal_training(steps, fed_in_chunks(reference, batches()))
    assert_equal_training(steps, fed_whole(whole, batches()))


class ReturnsParameter(nn.Module):
    """One output is a parameter, another a view of one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([ReturnsParameterBlock()])

    def forward(self, x: Tensor) -> Tensor:
        y, weight, row = self.blocks[0](x)
        return y @ weight.t() + row


class ReturnsParameterBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 7))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.tanh(x), self.weight, self.weight[:, 0]


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("after", [True, False])
def test_a_parameter_as_an_output(after):
    model, reference = with_reference(ReturnsParameter(), shard_blocks, after)
    assert_trains_as(model, reference, batches())


# --- inputs ---------------------------------------------------------------------------------------------------------------------


class CrossAttention(nn.Module):
    """All blocks attend to one memory that needs a gradient."""

    def __init__(self, by_keyword: bool) -> None:
        super().__init__()
        self.by_keyword = by_keyword
        self.embedding = nn.Embedding(11, 6)
        self.encoder = Attention(6)
        self.blocks = nn.ModuleList(Attention(6) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        memory = self.encoder(self.embedding(ids.flip(1)))
        for block in self.blocks:
            x = x + (block(x, memory=memory) if self.by_keyword else block(x, memory))
        return x


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("by_keyword", [True, False])
@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_a_memory_shared_by_all_blocks(after, by_keyword, optimizer):
    model, reference = with_reference(CrossAttention(by_keyword))
    fully_shard(model.encoder, mesh=cpu_mesh(), reshard_after_forward=after)
    shard_blocks(model, after)
    steps = fed_own_chunk(model, token_batches(), optimizer)
    reference_steps = fed_in_chunks(reference, token_batches(), optimizer)
    if optimizer is sgd:
        assert_equal_training(steps, reference_steps)
    else:
        assert_equal_training(steps, reference_steps, bound=1e-5, ulps=64, but=["key.bias"])


class KeywordsOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(KeywordsOnlyBlock() for _ in range(2))

    def forward(self, *, data: dict[str, Any]) -> Tensor:
        x = data["x"]
        for block in self.blocks:
            x = block(x=x, options=[{"scale": data["scale"]}, None], name="block")
        return x


class KeywordsOnlyBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 7)

    def forward(self, *, x: Tensor, options: list[Any], name: str, missing: None = None) -> Tensor:
        assert (name, missing, options[1]) == ("block", None, None)
        return torch.tanh(self.linear(x)) * options[0]["scale"]


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("needs_input_grad", [False, True])
def test_inputs_by_keyword_and_in_containers_get_their_gradients(needs_input_grad):
    model, reference = with_reference(KeywordsOnly(), shard_blocks)
    for x in batches():
        results = []
        for each in (model, reference):
            mine = own_chunk(x).clone().requires_grad_(needs_input_grad)
            scale = torch.linspace(0.5, 1.5, 7).requires_grad_(needs_input_grad)
            output = each(data={"x": mine, "scale": scale})
            output.square().mean().backward()
            results.append((output.detach(), mine.grad, scale.grad))
        (output, grad, scale_grad), (output_, grad_, scale_grad_) = results
        assert_same_tensor(output, output_, "output")
        assert_same_tensor(grad, grad_, "gradient of the input")
        if needs_input_grad:
            torch.testing.assert_close(scale_grad, scale_grad_, rtol=1e-5, atol=1e-7)


@on_ranks(2, 3)
def test_one_tensor_given_twice_gets_one_gradient():
    model, reference = with_reference(Attention(6), fully_shard, mesh=cpu_mesh())
    x = torch.randn(4, 5, 6, requires_grad=True)
    grads = []
    for each in (model, reference):
        each(x, x).square().mean().backward()
        grads.append(x.grad)
        x.grad = None
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-6, atol=1e-8)


@on_ranks(1, 2, 3)
def test_gradients_of_inputs_by_autograd_grad():
    model, reference = with_reference(nn.Sequential(Block(7), Block(7)), shard_blocks)
    x = batches()[0].requires_grad_()
    for _ in range(2):
        (ours,) = torch.autograd.grad(model(x).square().mean(), [x])
        (theirs,) = torch.autograd.grad(reference(x).square().mean(), [x])
        assert torch.equal(ours, theirs)
    assert all(param.grad is None for param in model.parameters())


class WithMethods(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(7, 4)
        self.decoder = nn.Linear(4, 7)

    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.encoder(x))

    def decode(self, z: Tensor, *, scale: float) -> Tensor:
        return self.decoder(z) * scale

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x), scale=2.0)


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("after", [True, False])
def test_methods_registered_as_forward(after):
    model, reference = with_reference(WithMethods(), fully_shard, mesh=cpu_mesh(), reshard_after_forward=after)
    register_fsdp_forward_method(model, "encode")
    register_fsdp_forward_method(model, "decode")
    iteration = backward_of(lambda model, x: model.decode(model.encode(x), scale=2.0).square().mean())
    assert_trains_bitwise_as(model, reference, batches(), iteration=iteration)


@on_ranks(2, 3)
def test_hooks_of_the_user_see_unsharded_parameters_and_may_change_what_passes():
    model = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 5))
    seen = []

    def before(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        seen.append(type(module.weight))
        return (args[0] * 2,)

    def after(module: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
        return torch.tanh(output)

    reference = copy.deepcopy(model)
    for each in (model, reference):
        each[0].register_forward_pre_hook(before)
        each[0].register_forward_hook(after)
    fully_shard(model[0], mesh=cpu_mesh())
    fully_shard(model, mesh=cpu_mesh())
    assert_trains_bitwise_as(model, reference, batches())
    assert set(seen) == {nn.Parameter}


class Routed(nn.Module):
    """Leaves an auxiliary loss on a module inside, and its input on itself, instead of returning them."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.router = nn.Linear(dim, 3)
        self.router.aux_loss = None
        self.inner = Block(dim)
        self.seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen = x
            self.router.aux_loss = (torch.tanh(self.router(x)) @ self.router.weight).square().mean()
        return self.inner(x) * torch.sigmoid(self.router(x)[..., :1])


class RoutedBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 6)
        self.blocks = nn.ModuleList(Routed(6) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def with_stored_losses(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    for block in model.blocks:
        loss = loss + block.router.aux_loss + block.seen.square().mean()
    loss.backward()
    return loss


def stored_losses_alone(model: nn.Module, x: Tensor) -> Tensor:
    model(x)
    loss = sum(block.router.aux_loss for block in model.blocks)
    loss.backward()
    return loss


@on_ranks(2)
@pytest.mark.parametrize("after", [True, False, None])
@pytest.mark.parametrize("iteration", [with_stored_losses, stored_losses_alone])
def test_tensors_that_forward_leaves_on_modules(after, iteration):
    """Symptom: backward failed on freed storage, because it did not begin at an output."""
    model, reference = with_reference(RoutedBlocks(), shard_blocks, after)
    assert_trains_as(model, reference, batches(3), iteration=iteration)


@on_ranks(2)
@pytest.mark.parametrize("first", ["frozen", "evaluation"])
def test_tensors_that_forward_leaves_on_modules_but_not_in_the_first(first):
    """Symptom: backward failed on freed storage. Cause: what had no graph in the first forward was not looked for any more."""
    model, reference = with_reference(RoutedBlocks(), shard_blocks, True)
    for each in (model, reference):
        each.requires_grad_(first != "frozen").train(first != "evaluation")
        each(batches(1)[0])
        each.requires_grad_(True).train()
    assert_trains_as(model, reference, batches(3), iteration=stored_losses_alone)
