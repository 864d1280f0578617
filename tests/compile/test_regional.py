"""``torch.compile`` on each block: hooks run outside of the graph, one graph serves all blocks, nothing is compiled again.

The oracle of what the compiler does is the plain, unsharded model compiled in the same way; of the numbers, the plain model in eager.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from fsdp2 import FSDPModule, MixedPrecisionPolicy, fully_shard
from harness import cpu_mesh, device_type, on_ranks
from harness.compiled import Counts, counted_compilations, no_recompilation
from harness.models import Block, Transformer, batches, token_batches
from harness.training import assert_equal_training, assert_same_bits, fed_in_chunks, fed_own_chunk, forward_backward, sgd

# Dynamo looks at ``.grad`` of non-leaf inputs, and warns of it.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

Apply = Callable[[nn.Module], nn.Module]


def model_of_four(dim: int = 6) -> Transformer:
    torch.manual_seed(0)
    return Transformer(dim=dim, num_blocks=4)


def in_place(counts: Counts, **options: Any) -> Apply:
    def apply(block: nn.Module) -> nn.Module:
        block.compile(backend=counts.backend, **options)
        return block

    return apply


def wrapped(counts: Counts, **options: Any) -> Apply:
    return functools.partial(torch.compile, backend=counts.backend, **options)  # type: ignore[return-value]


def checkpointed(block: nn.Module) -> nn.Module:
    return checkpoint_wrapper(block, checkpoint_impl=CheckpointImpl.NO_REENTRANT)


def prepare(model: nn.Module, *applied: Apply, **options: Any) -> nn.Module:
    """Give every block to each of ``applied`` in turn; then shard the root."""
    for index in range(len(model.blocks)):
        for apply in applied:
            model.blocks[index] = apply(model.blocks[index])
    return fully_shard(model, mesh=options.pop("mesh", None) or cpu_mesh(), **options)


def sharded(**options: Any) -> Apply:
    return functools.partial(fully_shard, mesh=options.pop("mesh", None) or cpu_mesh(), **options)


def train(model: nn.Module, inputs: list[Tensor], **options: Any) -> list[Any]:
    """Two steps, in which things may be compiled, and more in which they may not."""
    optimizer = sgd(model.parameters())
    steps = fed_own_chunk(model, inputs[:2], optimizer=optimizer, **options)
    with no_recompilation():
        return steps + fed_own_chunk(model, inputs[2:], optimizer=optimizer, **options)


def assert_same_training(actual: list[Any], expected: list[Any]) -> None:
    """Wrappers put names of their own into those of the parameters."""
    for step in actual:
        for tensors in (step.grads, step.params):
            for name in list(tensors):
                tensors[name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")] = tensors.pop(name)
    assert_equal_training(actual, expected)


# --- orders -----------------------------------------------------------------------------------------------------------------------


@on_ranks(2, timeout=300)
@pytest.mark.parametrize(
    ("order", "compiled"),
    [
        *(("cs", in_place), ("sc", wrapped), ("kcs", in_place), ("csk", in_place)),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("cs", wrapped), ("sc", in_place), ("kcs", wrapped), ("ksc", in_place), ("cks", in_place), ("csk", wrapped))
        ),
    ],
)
def test_four_blocks_share_one_graph_without_a_break(order: str, compiled: Callable[..., Apply]) -> None:
    """c: compiled, s: sharded, k: checkpointed; the first letter is the innermost."""
    model = model_of_four()
    reference = copy.deepcopy(model)
    with counted_compilations() as counts:
        steps_by_letter = {"c": compiled(counts, fullgraph=True), "s": sharded(), "k": checkpointed}
        prepare(model, *(steps_by_letter[letter] for letter in order))
        steps = train(model, token_batches(4))
        assert counts.graphs == 1
        assert counts.breaks == 0
    assert_same_training(steps, fed_in_chunks(reference, token_batches(4)))


class CheckpointsInside(nn.Module):
    """A block that checkpoints a part of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(6), Block(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(checkpoint(self.first, x, use_reentrant=False))


@pytest.mark.slow
@on_ranks(2, timeout=300)
def test_a_checkpoint_inside_of_a_compiled_block() -> None:
    model = model_of_four()
    model.blocks = nn.ModuleList(CheckpointsInside() for _ in range(4))
    reference = copy.deepcopy(model)
    with counted_compilations() as counts:
        prepare(model, in_place(counts, fullgraph=True), sharded())
        steps = train(model, token_batches(4))
        assert (counts.graphs, counts.breaks) == (1, 0)
    assert_equal_training(steps, fed_in_chunks(reference, token_batches(4)))


# --- every way to shard -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@on_ranks(3, timeout=300)
@pytest.mark.parametrize("after", [False, True])
def test_uneven_shards_that_are_kept_and_freed(after: bool) -> None:
    model = model_of_four(dim=4)
    reference = copy.deepcopy(model)
    with counted_compilations() as counts:
        prepare(model, in_place(counts, fullgraph=True), sharded(reshard_after_forward=after), reshard_after_forward=after)
        steps = train(model, token_batches(4))
        assert (counts.graphs, counts.breaks) == (1, 0)
    assert_equal_training(steps, fed_in_chunks(reference, token_batches(4)))


@pytest.mark.slow
@on_ranks(4, timeout=300)
@pytest.mark.parametrize("after", [True, 2])
def test_hsdp_and_a_smaller_mesh_after_forward(after: bool | int) -> None:
    model = model_of_four()
    reference = copy.deepcopy(model)
    shape = (2, 2) if after is True else (4,)
    mesh = init_device_mesh(device_type(), shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    with counted_compilations() as counts:
        prepare(model, in_place(counts, fullgraph=True), sharded(mesh=mesh, reshard_after_forward=after), mesh=mesh)
        steps = train(model, token_batches(4))
        assert (counts.graphs, counts.breaks) == (1, 0)
    assert_equal_training(steps, fed_in_chunks(reference, token_batches(4)))


@pytest.mark.slow
@on_ranks(2, timeout=300)
def test_mixed_precision_has_one_graph_and_the_numbers_of_eager() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = model_of_four()
    eager = copy.deepcopy(model)
    prepare(eager, sharded(mp_policy=policy), mp_policy=policy)
    with counted_compilations() as counts:
        prepare(model, in_place(counts, fullgraph=True), sharded(mp_policy=policy), mp_policy=policy)
        steps = train(model, token_batches(4))
        assert (counts.graphs, counts.breaks) == (1, 0)
    assert_same_bits(steps, fed_own_chunk(eager, token_batches(4)))


@pytest.mark.slow
@on_ranks(2, timeout=300)
def test_frozen_parameters_and_a_frozen_block() -> None:
    """As in the plain model: a graph for blocks that have the same things to train."""

    def freeze(model: nn.Module) -> nn.Module:
        for param in model.blocks[0].parameters():
            param.requires_grad_(False)
        for block in model.blocks:
            block.attention.query.weight.requires_grad_(False)
        return model

    model = freeze(model_of_four())
    reference = freeze(model_of_four())
    plain = freeze(model_of_four())
    with counted_compilations() as expected:
        for block in plain.blocks:
            in_place(expected, fullgraph=True)(block)
        fed_in_chunks(plain, token_batches(4))
    with counted_compilations() as counts:
        prepare(model, in_place(counts, fullgraph=True), sharded())
        steps = train(model, token_batches(4))
        assert counts.graphs == expected.graphs
    assert_equal_training(steps, fed_in_chunks(reference, token_batches(4)))


@pytest.mark.slow
@on_ranks(2, timeout=300)
def test_gradient_accumulation_and_prefetch_lists() -> None:
    model = model_of_four()
    reference = copy.deepcopy(model)

    def iteration(model: nn.Module, x: Tensor) -> Tensor:
        losses = []
        for index, micro_batch in enumerate(x.chunk(2)):
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(index == 1)
                model.set_reshard_after_backward(index == 1)
            losses.append(forward_backward(model, micro_batch))
        return torch.stack(losses).mean()

    with counted_compilations() as counts:
        prepare(model, in_place(counts, fullgraph=True), sharded())
        for index in range(2):
            model.blocks[index].set_modules_to_forward_prefetch([model.blocks[index + 1], model.blocks[index + 2]])
            model.blocks[index + 2].set_modules_to_backward_prefetch([model.blocks[index + 1], model.blocks[index]])
        steps = train(model, token_batches(4), iteration=iteration)
        assert (counts.graphs, counts.breaks) == (1, 0)
    assert_equal_training(steps, fed_in_chunks(reference, token_batches(4), iteration=iteration))


# --- what must be compiled again, and how often ---------------------------------------------------------------------------------------


def lives(model: nn.Module, rows: list[int]) -> None:
    """Batches of several sizes, evaluations in between, modes switched."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    for num_rows in rows:
        tokens = torch.randint(11, (num_rows, 5), generator=generator)
        model.train()
        forward_backward(model, tokens)
        model.zero_grad()
        model.eval()
        with torch.no_grad():
            model(tokens)


@pytest.mark.slow
@on_ranks(2, timeout=300)
@pytest.mark.parametrize("dynamic", [None, True, False])
def test_batch_sizes_and_evaluation_compile_no_more_than_in_the_plain_model(dynamic: bool | None) -> None:
    rows = [4, 6, 3, 8, 5, 2] if dynamic is not False else [4, 6]
    plain, model = model_of_four(), model_of_four()
    with counted_compilations() as expected:
        for block in plain.blocks:
            in_place(expected, dynamic=dynamic)(block)
        lives(plain, rows)
    with counted_compilations() as counts:
        prepare(model, in_place(counts, dynamic=dynamic), sharded())
        lives(model, rows[:3])
        with no_recompilation():
            lives(model, rows[3:])
            lives(model, rows)
        assert counts.graphs == expected.graphs
        assert counts.breaks == 0


# --- what guards must not overlook ----------------------------------------------------------------------------------------------------


class Scaled(nn.Module):
    """Blocks of one class that differ in an attribute, and in the shape of a weight."""

    def __init__(self, scale: float, hidden: int) -> None:
        super().__init__()
        self.scale = scale
        self.up, self.down = nn.Linear(7, hidden), nn.Linear(hidden, 7)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(torch.relu(self.up(x)))


class Chain(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.last = nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


@pytest.mark.slow
@on_ranks(2, timeout=300)
def test_blocks_that_differ_do_not_use_one_anothers_graph() -> None:
    """The compiler drops guards on modules that fully_shard manages; it must not drop these. (torch 2.5: pytorch#139222)"""
    model = Chain([Scaled(0.5, 8), Scaled(2.0, 8), Scaled(2.0, 12), Scaled(0.5, 8)])
    reference = copy.deepcopy(model)
    with counted_compilations() as counts:
        prepare(model, in_place(counts, fullgraph=True), sharded())
        steps = train(model, batches(4))
        assert 2 <= counts.graphs <= 4
    assert_equal_training(steps, fed_in_chunks(reference, batches(4)))


@pytest.mark.slow
@on_ranks(2, timeout=300)
def test_single_linears_compiled_inside_of_a_unit() -> None:
    model = Chain([Scaled(1.0, 8), Scaled(1.0, 12)])
    reference = copy.deepcopy(model)
    with counted_compilations() as counts:
        for block in model.blocks:
            block.up, block.down = wrapped(counts)(block.up), wrapped(counts)(block.down)
        prepare(model, sharded())
        steps = train(model, batches(4))
        assert 1 <= counts.graphs <= 4
    assert_same_training(steps, fed_in_chunks(reference, batches(4)))


class OwnLinear(nn.Linear):
    """Has its forward from torch, though its class is the user's."""


KINDS = {
    "linear": lambda: nn.Linear(7, 7),
    "subclass": lambda: OwnLinear(7, 7),
    "sequential": lambda: nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 7)),
    "own": lambda: Scaled(0.5, 8),
}


@on_ranks(2, timeout=300)
@pytest.mark.parametrize(
    ("kind", "ways"),
    [("linear", [in_place]), pytest.param("linear", [wrapped], marks=pytest.mark.slow)]
    + [pytest.param(kind, [in_place, wrapped], marks=pytest.mark.slow) for kind in ("subclass", "sequential", "own")],
)
def test_modules_whose_forward_is_from_torch_have_one_graph_without_a_break(kind: str, ways: list[Callable[..., Apply]]) -> None:
    """The compiler traced their hooks, too, or skipped their forward: it broke at each hook, or ``fullgraph=True`` raised.

    Two graphs in all: the input of the first block needs no gradient. Letters as above.
    """
    for order, compiled in itertools.product(("cs", "sc"), ways):
        for fullgraph, reshard in ((True, True), (False, False)):
            torch.manual_seed(0)
            model = Chain([KINDS[kind]() for _ in range(3)])
            reference = copy.deepcopy(model)
            with counted_compilations() as counts:
                letters = {"c": compiled(counts, fullgraph=fullgraph), "s": sharded(reshard_after_forward=reshard)}
                prepare(model, *(letters[letter] for letter in order))
                steps = train(model, batches(4))
                assert (counts.graphs, counts.breaks) == (2, 0), (kind, order, compiled.__name__, fullgraph)
            assert_same_training(steps, fed_in_chunks(reference, batches(4)))


@pytest.mark.slow
@on_ranks(2, timeout=300)
def test_a_parameter_that_is_frozen_later_is_noticed() -> None:
    model = model_of_four()
    reference = copy.deepcopy(model)
    with counted_compilations() as counts:
        prepare(model, in_place(counts, fullgraph=True), sharded())
        for each in (model, reference):
            train_first = fed_own_chunk if each is model else fed_in_chunks
            train_first(each, token_batches(2))
            each.blocks[2].attention.key.weight.requires_grad_(False)
        steps = fed_own_chunk(model, token_batches(3, seed=2))
        assert counts.graphs == 2
    assert_equal_training(steps, fed_in_chunks(reference, token_batches(3, seed=2)))
