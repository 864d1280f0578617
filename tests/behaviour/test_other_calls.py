"""Calls other than the root's forward: methods, submodules, lists of modules called in parts, several forwards and backwards."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp2 import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from harness import cpu_mesh, on_ranks
from harness.models import batches, mlp, token_batches, transformer
from harness.sharding import shard_blocks, with_reference
from harness.training import (
    assert_equal_grads,
    assert_equal_training,
    assert_trains_as,
    assert_trains_bitwise_as,
    backward_of,
    fed_in_chunks,
    fed_own_chunk,
    forward_backward,
    grads_of,
    own_chunk,
)


def count_collectives(run) -> dict[str, int]:
    """How many all-gathers and reductions our groups issue while ``run()`` runs."""
    from fsdp2.core.group.all_gather import Gather
    from fsdp2.core.group.reduction import Reduction

    counts = {"gather": 0, "reduce": 0}
    start, reduce = Gather.start, Reduction.__init__

    def counted_start(self, *args):
        counts["gather"] += 1
        return start(self, *args)

    def counted_reduce(self, *args, **kwargs):
        counts["reduce"] += 1
        reduce(self, *args, **kwargs)

    with mock.patch.object(Gather, "start", counted_start), mock.patch.object(Reduction, "__init__", counted_reduce):
        run()
    return counts


# --- methods --------------------------------------------------------------------------------------------------------------------


class Generator(nn.Module):
    """``generate`` runs forward several times, and after that a parameter of the root itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))
        self.scale = nn.Parameter(torch.rand(7))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x * self.scale

    def generate(self, x: Tensor, times: int = 3) -> Tensor:
        for _ in range(times):
            x = self(x) + self.scale
        return x * self.scale

    def score(self, x: Tensor, *, bias: Tensor) -> dict[str, Tensor]:
        return {"score": (self.blocks[0](x) * self.scale + bias).sum()}


@on_ranks(2, 3)
@pytest.mark.parametrize("after", [True, False, None])
def test_generate_runs_forward_inside_and_uses_parameters_after_it(after):
    model, reference = with_reference(Generator(), shard_blocks, after)
    register_fsdp_forward_method(model, "generate")
    x = own_chunk(batches()[0])
    with torch.no_grad():
        assert torch.equal(model.generate(x, times=2), reference.generate(x, times=2))
    assert after is False or all(isinstance(param, DTensor) for param in model.parameters())
    assert_trains_bitwise_as(model, reference, batches())
    with torch.inference_mode():
        torch.testing.assert_close(model.generate(x), reference.generate(x))


@on_ranks(1, 2, 3)
def test_training_through_registered_methods():
    model, reference = with_reference(Generator(), shard_blocks)
    for method in ("generate", "score"):
        register_fsdp_forward_method(model, method)
    iteration = backward_of(lambda model, x: model.generate(x).square().mean() + model.score(x, bias=x[0])["score"] / x.numel())
    assert_trains_as(model, reference, batches(), iteration=iteration)


@on_ranks(1, 2, 3)
def test_a_method_of_one_module_of_a_list():
    """The norm's method alone, then both modules: the pass through the list is not confused."""
    model, reference = with_reference(transformer())
    for net in (model, reference):
        net.norm.normed = net.norm.forward
    fully_shard([model.norm, model.head], mesh=cpu_mesh())
    fully_shard(model, mesh=cpu_mesh())
    register_fsdp_forward_method(model.norm, "normed")

    def iteration(model: nn.Module, ids: Tensor) -> Tensor:
        loss = model(ids).square().mean()
        loss.backward()
        extra = model.norm.normed(torch.ones(2, 6)).square().mean()
        extra.backward()
        return loss + extra

    assert_trains_as(model, reference, token_batches(), iteration=iteration)


# --- submodules -----------------------------------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("after", [True, False, None])
@pytest.mark.parametrize("first", [True, False], ids=["before the root", "after the root"])
def test_a_submodule_called_by_itself(first, after):
    """torch's FSDP2 refuses the root after a submodule ran; here the root takes over."""
    model, reference = with_reference(mlp(), shard_blocks, after)

    def iteration(model: nn.Module, x: Tensor) -> Tensor:
        hidden = torch.cat([x, x[:, :3]], dim=1)
        if first:
            loss = forward_backward(model.blocks[1], hidden) + forward_backward(model, x)
        else:
            loss = forward_backward(model, x) + forward_backward(model.blocks[1], hidden)
        with torch.no_grad():
            return loss + model.blocks[0](hidden).mean()

    assert_trains_as(model, reference, batches(), iteration=iteration)


@on_ranks(2)
def test_a_submodule_before_the_root_and_one_backward_for_both():
    model, reference = with_reference(mlp(), shard_blocks)

    def iteration(model: nn.Module, x: Tensor) -> Tensor:
        loss = model.blocks[2](torch.cat([x, x[:, :3]], dim=1)).square().mean() + model(x).square().mean()
        loss.backward()
        return loss

    assert_trains_as(model, reference, batches(), iteration=iteration)


@on_ranks(2)
def test_calls_of_a_submodule_leave_the_record_of_the_root_alone():
    """The record of a forward decides what is prefetched; each module that begins a forward has its own."""
    model = shard_blocks(mlp())
    x = own_chunk(batches()[0])
    for _ in range(2):
        forward_backward(model, x)
        with torch.no_grad():
            model.blocks[1](torch.ones(2, 10))
    schedule = model._get_fsdp_state().schedule
    assert [unit.fqn for unit in schedule.tree.records[model._get_fsdp_state()]] == ["", "blocks.0", "blocks.1", "blocks.2"]


# --- chunked loss -----------------------------------------------------------------------------------------------------------------


class NormAndHead(nn.Module):
    """Forward ends with the norm; the head runs on each chunk afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 10)
        self.blocks = nn.ModuleList(nn.Linear(10, 10) for _ in range(2))
        self.norm = nn.LayerNorm(10)
        self.head = nn.Linear(10, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.norm(x)


def chunk_by_chunk(model: nn.Module, x: Tensor) -> Tensor:
    """Forward and backward of the head for one chunk after another, then the backward of the rest."""
    hidden = model(x)
    leaf = hidden.detach().requires_grad_()
    losses = []
    for chunk in leaf.chunk(2):
        loss = model.head(chunk).square().mean() / 2
        loss.backward()
        losses.append(loss.detach())
    hidden.backward(leaf.grad)
    return torch.stack(losses).sum()


def all_chunks_at_once(model: nn.Module, x: Tensor) -> Tensor:
    """All chunks forward, then one backward through everything."""
    loss = torch.stack([model.head(chunk).square().mean() / 2 for chunk in model(x).chunk(2)]).sum()
    loss.backward()
    return loss


@on_ranks(2, 3)
@pytest.mark.parametrize("after", [True, False, None])
@pytest.mark.parametrize("iteration", [chunk_by_chunk, all_chunks_at_once])
def test_a_loss_in_chunks_through_a_list_of_norm_and_head(iteration, after):
    model, reference = with_reference(NormAndHead())
    for block in model.blocks:
        fully_shard(block, mesh=cpu_mesh(), reshard_after_forward=after)
    fully_shard([model.norm, model.head], mesh=cpu_mesh(), reshard_after_forward=after)
    fully_shard(model, mesh=cpu_mesh())
    assert_trains_as(model, reference, batches(), iteration=iteration)
    assert all(isinstance(param, DTensor) for param in model.parameters())
    with torch.no_grad():
        model.head(model(own_chunk(batches()[0])))
    assert after is False or all(isinstance(param, DTensor) for param in model.parameters())


@on_ranks(2)
def test_a_chunk_costs_one_gather_and_one_reduction():
    model = NormAndHead()
    fully_shard([model.norm, model.head], mesh=cpu_mesh())
    fully_shard(model, mesh=cpu_mesh())
    x = own_chunk(batches()[0])
    chunk_by_chunk(model, x)
    counts = count_collectives(lambda: chunk_by_chunk(model, x))
    # Gathers: root and list in forward, the list once for each of two chunks, both again for the norm's backward and the rest.
    assert counts == {"gather": 6, "reduce": 4}


@on_ranks(2)
def test_casts_apply_to_each_module_of_a_list_and_to_each_of_its_calls():
    model = NormAndHead()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    fully_shard([model.norm, model.head], mesh=cpu_mesh(), mp_policy=policy)
    fully_shard(model, mesh=cpu_mesh())
    seen = []
    for module in (model.norm, model.head):
        module.register_forward_pre_hook(lambda module, args: seen.append((args[0].dtype, module.weight.dtype)))
    hidden = model(own_chunk(batches()[0]))
    assert hidden.dtype == torch.float64
    for chunk in hidden.chunk(3):
        out = model.head(chunk)
        assert out.dtype == torch.float64
        out.sum().backward(retain_graph=True)
    assert seen == [(torch.bfloat16, torch.bfloat16)] * 4


@on_ranks(2)
def test_one_pass_through_a_list_is_reduced_once():
    model = mlp()
    fully_shard([model.blocks[0], model.blocks[1], model.last], mesh=cpu_mesh())
    fully_shard(model, mesh=cpu_mesh(), reshard_after_forward=True)
    x = own_chunk(batches()[0])
    forward_backward(model, x)
    assert count_collectives(lambda: forward_backward(model, x)) == {"gather": 4, "reduce": 2}


# --- several forwards, several backwards ------------------------------------------------------------------------------------------


@on_ranks(2, 3)
@pytest.mark.parametrize("after", [True, False, None])
def test_dpo_four_forwards_of_policy_and_reference_before_one_backward(after):
    policy, teacher = mlp(seed=0), mlp(seed=1)
    plain, plain_teacher = copy.deepcopy(policy), copy.deepcopy(teacher)
    shard_blocks(policy, after)
    shard_blocks(teacher, after)

    def dpo(teacher: nn.Module):
        def iteration(model: nn.Module, x: Tensor) -> Tensor:
            chosen, rejected = x, -x
            with torch.no_grad():
                margin = teacher(chosen).sum(-1) - teacher(rejected).sum(-1)
            loss = -F.logsigmoid(model(chosen).sum(-1) - model(rejected).sum(-1) - margin).mean()
            loss.backward()
            return loss

        return iteration

    steps = fed_own_chunk(policy, batches(), iteration=dpo(teacher))
    assert_equal_training(steps, fed_in_chunks(plain, batches(), iteration=dpo(plain_teacher)))


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("after", [True, None])
def test_gan_two_models_whose_backwards_cross(after):
    def make() -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(0)
        generator = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 7))
        return generator, nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 1))

    def train(generator: nn.Module, critic: nn.Module, steps: int) -> dict[str, Tensor]:
        g_opt = torch.optim.SGD(generator.parameters(), lr=0.1)
        d_opt = torch.optim.SGD(critic.parameters(), lr=0.1)
        for x in batches(steps):
            fake = generator(x)
            (critic(fake.detach()).mean() - critic(x).mean()).backward()
            d_opt.step()
            d_opt.zero_grad()
            (-critic(fake).mean()).backward()
            g_opt.step()
            g_opt.zero_grad()
            d_opt.zero_grad()
        return {f"{i}.{name}": p.detach() for i, net in enumerate((generator, critic)) for name, p in net.named_parameters()}

    expected = train(*make(), steps=3)
    generator, critic = make()
    for net in (generator, critic):
        for layer in net:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=cpu_mesh(), reshard_after_forward=after)
        fully_shard(net, mesh=cpu_mesh(), reshard_after_forward=after)
    for name, value in train(generator, critic, steps=3).items():
        torch.testing.assert_close(value.full_tensor(), expected[name], msg=name)


@on_ranks(2, 3)
@pytest.mark.parametrize("after", [True, False, None])
def test_backward_of_two_losses_of_one_forward(after):
    model, reference = with_reference(mlp(), shard_blocks, after)

    def iteration(model: nn.Module, x: Tensor) -> Tensor:
        out = model(x)
        one, two, three = out[:, :2].square().mean(), out[:, 2:].mean(), out.tanh().mean()
        one.backward(retain_graph=True)
        two.backward(retain_graph=True)
        three.backward()
        return one + two + three

    assert_trains_as(model, reference, batches(), iteration=iteration)


@on_ranks(2)
@pytest.mark.parametrize("after", [True, False, None])
def test_a_module_called_several_times_is_not_gathered_again_if_it_is_kept(after):
    model = nn.Sequential(nn.Linear(7, 7), nn.Tanh())
    fully_shard(model[0], mesh=cpu_mesh(), reshard_after_forward=after)
    fully_shard(model, mesh=cpu_mesh())
    x = own_chunk(batches()[0]).clone().requires_grad_()

    def step() -> None:
        model(model(model(x))).sum().backward()

    step()
    counts = count_collectives(step)
    assert counts["reduce"] == 1
    assert counts["gather"] == (1 if after is False else 6)


# --- through autograd in other ways -----------------------------------------------------------------------------------------------


class Smooth(nn.Module):
    """Nonlinear inside the blocks and linear at the end; second derivatives of everything are not zero."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 9)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 9)) for _ in range(2))
        self.last = nn.Linear(9, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def penalty(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (grad.norm(dim=1) - 1).square().mean()


def only_the_penalty(model: nn.Module, x: Tensor) -> Tensor:
    loss = penalty(model, x)
    loss.backward()
    return loss


def critic_with_penalty(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).mean() - model(x.flip(0)).square().mean() + penalty(model, x)
    loss.backward()
    return loss


def penalty_through_backward(model: nn.Module, x: Tensor) -> Tensor:
    """The first backward accumulates into parameters as well."""
    x = x.clone().requires_grad_()
    loss = model(x).square().mean()
    loss.backward(create_graph=True, inputs=[x])
    loss = loss + x.grad.square().mean()
    x.grad = None  # or autograd graph and gradient would keep each other alive
    loss.backward()
    return loss


@on_ranks(2, 3)
@pytest.mark.parametrize("after", [True, False, None])
@pytest.mark.parametrize("iteration", [only_the_penalty, critic_with_penalty, penalty_through_backward])
@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
def test_gradient_penalties(iteration, after):
    """torch's FSDP2 fails here on storage that the first backward freed."""
    model, reference = with_reference(Smooth(), shard_blocks, after)
    assert_trains_as(model, reference, batches(), iteration=iteration, ulps=64)


@on_ranks(2)
def test_a_penalty_of_a_linear_model_and_of_several_inputs():
    class Bilinear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Bilinear(7, 7, 3)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.inner(x, y)

    model, reference = with_reference(Bilinear())
    fully_shard(model.inner, mesh=cpu_mesh())
    fully_shard(model, mesh=cpu_mesh(), reshard_after_forward=True)

    def iteration(model: nn.Module, x: Tensor) -> Tensor:
        one, two = x.clone().requires_grad_(), (x * 2).requires_grad_()
        grads = torch.autograd.grad(model(one, two).square().sum(), (one, two), create_graph=True)
        loss = sum(grad.square().mean() for grad in grads)
        loss.backward()
        return loss

    assert_trains_as(model, reference, batches(), iteration=iteration, ulps=64)


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("after", [True, None])
def test_autograd_grad_of_an_input_leaves_no_gradient_on_parameters(after):
    model, reference = with_reference(mlp(), shard_blocks, after)
    x = own_chunk(batches()[0]).clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(x).square().sum(), x)
    (expected,) = torch.autograd.grad(reference(x).square().sum(), x)
    assert torch.equal(grad, expected)
    assert all(isinstance(param, DTensor) and param.grad is None for param in model.parameters())
    assert_trains_bitwise_as(model, reference, batches())


# --- views and changes in place -----------------------------------------------------------------------------------------------------


class Returns(nn.Module):
    """Returns what ``how`` says, made with its own parameters."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor):
        if self.how == "input changed in place":
            x.add_(1)
            x.mul_(self.linear.weight[0])
            return self.linear(x)
        h = self.linear(x) + 1  # nothing that autograd saves
        return {
            "tensor": h,
            "view": h.view(-1, 2, 4),
            "view of a view": h.view(-1, 2, 4).transpose(0, 1),
            "half": h[:, :4],
            "both": (h, h.view(-1, 2, 4)),
            "chunks": h.chunk(2, dim=1),
            "slices": [h[:, :4], h[:, 4:]],
        }[self.how]


WAYS = ["tensor", "view", "view of a view", "half", "both", "chunks", "slices"]


class Outer(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first = nn.Linear(7, 8)
        self.blocks = nn.ModuleList([Returns(how)])
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out = self.blocks[0](self.first(x))
        if isinstance(out, (tuple, list)):
            first = out[0]
            if self.how != "chunks":  # autograd itself refuses to change one of several views that one operator made
                first += 1
                first *= 2
            return self.last(torch.cat([each.flatten(1) for each in out], dim=1)[:, :8])
        out += 1
        out *= 2
        out.relu_()
        if self.how == "view of a view":
            out = out.transpose(0, 1)
        return self.last(F.pad(out.flatten(1), (0, 8 - out.flatten(1).shape[1])))


@on_ranks(2)
@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("how", [*WAYS, "input changed in place"])
def test_outputs_that_are_views_and_changed_in_place(how, after):
    """torch's FSDP2 warns that a change in place of a view drops its hook, and then fails on freed parameters."""
    model, reference = with_reference(Outer(how), shard_blocks, after)
    assert_trains_bitwise_as(model, reference, batches())


class TwoInputsInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 7)
        self.blocks = nn.ModuleList([InPlace()])

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.blocks[0](h * 2, other=[h + 1, x])


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 7)

    def forward(self, x: Tensor, other: list[Tensor]) -> Tensor:
        x.add_(other[0])
        other[0].sigmoid_()
        return self.linear(x) * other[0] + x


@on_ranks(1, 2)
def test_several_inputs_changed_in_place():
    """As outputs of one custom Function, as torch's FSDP2 makes them, they could not be."""
    model, reference = with_reference(TwoInputsInPlace(), shard_blocks)
    assert_trains_bitwise_as(model, reference, batches())


class Passes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(9, 7))

    def forward(self, how: str, x: Tensor | None = None):
        if how == "the parameter":
            return self.table
        if how == "a view of it":
            return self.table[:4]
        return x, self.table[:1] + 0


class UsesTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Passes()])
        self.first = nn.Linear(7, 7)

    def forward(self, x: Tensor, how: str = "the parameter") -> Tensor:
        if how == "an input passed through":
            x, row = self.blocks[0](how, self.first(x))
            x += 1
            return x * row
        return self.first(x) @ self.blocks[0](how).T


@on_ranks(2)
@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("how", ["the parameter", "a view of it", "an input passed through"])
def test_modules_that_return_a_parameter_or_an_input(how, after):
    """torch's FSDP2 frees a parameter that was returned before it is used."""
    model, reference = with_reference(UsesTable(), shard_blocks, after)
    iteration = backward_of(lambda model, x: model(x, how).square().mean())
    assert_trains_bitwise_as(model, reference, batches(), iteration=iteration)
    x = own_chunk(batches()[0])
    with torch.no_grad():
        torch.testing.assert_close(model(x, how), reference(x, how))
    hooks = model.blocks[0].table._backward_hooks or {}
    assert len(hooks) == 0


# --- what is used where -------------------------------------------------------------------------------------------------------------


@on_ranks(2, 3)
def test_a_module_that_runs_on_one_rank_only_under_ddp_rules_gets_its_gradient_everywhere():
    """The block runs everywhere, as it must; its second layer takes part on rank 0 only."""

    class Choosing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.never = nn.Linear(7, 7), nn.Linear(7, 7), nn.Linear(7, 7)

        def forward(self, x: Tensor, both: bool) -> Tensor:
            return self.one(x) + self.two(x) if both else self.one(x)

    model, reference = with_reference(Choosing(), fully_shard, mesh=cpu_mesh())
    x = batches()[0]
    model(own_chunk(x), dist.get_rank() == 0).square().mean().backward()
    for rank, chunk in enumerate(x.chunk(dist.get_world_size())):
        (reference(chunk, rank == 0).square().mean() / dist.get_world_size()).backward()
    assert model.never.weight.grad is None
    assert_equal_grads(grads_of(model), grads_of(reference))
