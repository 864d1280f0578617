"""What is said, once, of an order that loses; and that nothing is said of the others."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from fsdp2 import CompileError, LosingOrderWarning, fully_shard
from harness import cpu_mesh, on_ranks
from harness.compiled import Counts, counted_compilations
from harness.models import Transformer, token_batches
from harness.training import forward_backward

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")]


def compile_blocks(counts: Counts) -> Callable[[nn.Module], nn.Module]:
    def apply(block: nn.Module) -> nn.Module:
        block.compile(backend=counts.backend)
        return block

    return apply


def build(order: str, counts: Counts) -> nn.Module:
    """A letter for what each block is given, innermost first: c compiled, w wrapped by torch.compile, s sharded, k checkpointed."""
    apply = {
        "c": compile_blocks(counts),
        "w": lambda block: torch.compile(block, backend=counts.backend),
        "s": lambda block: fully_shard(block, mesh=cpu_mesh()),
        "k": checkpoint_wrapper,
    }
    model = Transformer(num_blocks=3)
    for index in range(3):
        for letter in order:
            model.blocks[index] = apply[letter](model.blocks[index])
    return fully_shard(model, mesh=cpu_mesh())


def said_in(run: Callable[[], object], num_steps: int = 3) -> list[str]:
    """What rank 0 is told; the others are silent."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(num_steps):
            run()
    said = [str(each.message) for each in caught if isinstance(each.message, LosingOrderWarning)]
    assert not (said and dist.get_rank())
    dist.broadcast_object_list(shared := [said])
    return shared[0]


X = token_batches(1)[0]


@on_ranks(2, timeout=300)
def test_orders_that_lose_nothing_are_silent() -> None:
    for order in ("s", "ks", "sk", "cs", "sc", "sw", "kcs", "csk", "cks"):
        with counted_compilations() as counts:
            model = build(order, counts)
            assert said_in(lambda model=model: forward_backward(model, X), num_steps=2) == [], order
            assert (counts.graphs, counts.breaks) == ("c" in order or "w" in order, 0), order


@on_ranks(2, timeout=300)
def test_a_compiled_root_without_units_below_it_is_silent() -> None:
    for before in (True, False):
        with counted_compilations() as counts:
            model = Transformer(num_blocks=1)
            for each in (True, False):
                if each is before:
                    model.compile(backend=counts.backend)
                else:
                    fully_shard(model, mesh=cpu_mesh())
            assert said_in(lambda model=model: forward_backward(model, X)) == []
            assert (counts.graphs, counts.breaks) == (1, 0)


@on_ranks(2, timeout=300)
@pytest.mark.parametrize("how", ["wrapped", "in place", "a function"])
def test_a_compiled_model_around_sharded_blocks_is_told(how: str) -> None:
    with counted_compilations() as counts:
        model = build("s", counts)
        run = model
        if how == "in place":
            model.compile(backend=counts.backend)
        elif how == "wrapped":
            run = torch.compile(model, backend=counts.backend)
        else:
            run = torch.compile(lambda x: model(x), backend=counts.backend)
        said = said_in(lambda: run(X).sum().backward())
    assert len(said) == 1
    assert "torch.compile on FSDPTransformer is outside of 3 modules" in said[0]
    assert "blocks.0 (FSDPTransformerBlock)" in said[0]
    assert "call compile() on each" in said[0]


@on_ranks(2, timeout=300)
@pytest.mark.parametrize("num_below", [0, 2])
def test_a_compiled_wrapper_around_a_root_is_told_of_the_units_below_that(num_below: int) -> None:
    """A root alone costs one break, and cannot be told from a root that the compiler is on."""
    with counted_compilations() as counts:
        root = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for linear in root[:num_below]:
            fully_shard(linear, mesh=cpu_mesh())
        model = nn.Sequential(nn.Embedding(11, 4), fully_shard(root, mesh=cpu_mesh()))
        run = torch.compile(model, backend=counts.backend)
        said = said_in(lambda: run(X).sum().backward())
    assert len(said) == (num_below > 0)
    assert all("torch.compile on FSDPSequential is outside of 2 modules" in each and "1 (FSDPLinear)" in each for each in said)


@on_ranks(2, timeout=300)
def test_units_inside_of_a_compiled_block_are_told() -> None:
    """Measured: five graphs and a break at each unit, against one graph without a break."""
    with counted_compilations() as counts:
        model = Transformer(num_blocks=2)
        for block in model.blocks:
            fully_shard(block.attention, mesh=cpu_mesh())
            fully_shard(block.mlp, mesh=cpu_mesh())
            fully_shard(block, mesh=cpu_mesh())
            block.compile(backend=counts.backend)
        fully_shard(model, mesh=cpu_mesh())
        said = said_in(lambda: forward_backward(model, X))
        assert counts.graphs > 1
        assert counts.breaks > 0
    assert len(said) == 1
    assert "torch.compile on FSDPTransformerBlock is outside of 2 modules" in said[0]
    assert "blocks.0.attention (FSDPAttention)" in said[0]


@on_ranks(2, timeout=300)
@pytest.mark.parametrize("where", ["the whole model", "a block"])
def test_a_checkpoint_between_the_compiler_and_a_unit_is_told(where: str) -> None:
    """Measured: no graph at all."""
    with counted_compilations() as counts:
        model = build("sk" if where == "the whole model" else "skc", counts)
        if where == "the whole model":
            model.compile(backend=counts.backend)
        said = said_in(lambda: forward_backward(model, X))
        assert counts.graphs == 0
    assert len(said) == 1
    assert "does not compile blocks.0._checkpoint_wrapped_module (FSDPTransformerBlock)" in said[0]
    assert "fully_shard(checkpoint_wrapper(block))" in said[0]


@on_ranks(2, timeout=300)
def test_compiled_autograd_is_refused() -> None:
    """Measured elsewhere: gradients of the root's parameters are local ones, never reduced, without a word.

    A small model: the compiler traces all of torch's own backward before our hook is reached.
    """
    with counted_compilations() as counts:
        model = nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 4))
        model[1].compile(backend=counts.backend)
        fully_shard(model[1], mesh=cpu_mesh())
        fully_shard(model, mesh=cpu_mesh())
        forward_backward(model, X)
        model.zero_grad()
        with (
            torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")),
            pytest.raises(CompileError, match="backward runs under compiled autograd"),
        ):
            forward_backward(model, X)
        model.reset_iter_state()
        forward_backward(model, X)
        assert all(param.grad is not None for param in model.parameters())
