"""``torch.compile`` on the whole model: it breaks at the hooks and nowhere else, and says so."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed.fsdp as upstream
from torch import Tensor, nn

from fsdp2 import fully_shard
from harness import cpu_mesh, on_ranks
from harness.compiled import Counts, counted_compilations, no_recompilation
from harness.models import Block, batches
from harness.training import assert_same_bits, fed_in_chunks, fed_own_chunk, forward_backward, sgd

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore::fsdp2.LosingOrderWarning"),
]


class Unrolled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.a, self.b, self.c, self.last = nn.Linear(7, 7), Block(7), Block(7), Block(7), nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.c(self.b(self.a(self.first(x)))).relu())


class Looped(Unrolled):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in (self.a, self.b, self.c):
            x = block(x)
        return self.last(x.relu())


def sharded(cls: type[Unrolled], shard: Callable[..., nn.Module] = fully_shard) -> nn.Module:
    torch.manual_seed(0)
    model = cls()
    for block in (model.a, model.b, model.c):
        shard(block, mesh=cpu_mesh())
    return shard(model, mesh=cpu_mesh())


def compiled(model: nn.Module, counts: Counts, in_place: bool) -> nn.Module:
    if not in_place:
        return torch.compile(model, backend=counts.backend)
    model.compile(backend=counts.backend)
    return model


EXPECTED = {Unrolled: (3, 3), Looped: (1, 0)}
"""Graphs and breaks. Unrolled: what is before a block, a block, what is behind the last; a break at each of three blocks. Looped: the
compiler does not resume inside of a loop, so that it gives the loop's function up, and compiles the blocks."""


@on_ranks(2, timeout=300)
@pytest.mark.parametrize("cls", [Unrolled, Looped])
@pytest.mark.parametrize("in_place", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_whole_model_breaks_at_its_units_only(cls: type[Unrolled], in_place: bool) -> None:
    torch.manual_seed(0)
    reference = cls()
    with counted_compilations() as counts:
        model = sharded(cls)
        running = compiled(model, counts, in_place)
        optimizer = sgd(model.parameters())
        steps = fed_own_chunk(running, batches(2), optimizer=optimizer)
        with no_recompilation():
            steps += fed_own_chunk(running, batches(2, seed=2), optimizer=optimizer)
        assert (counts.graphs, counts.breaks) == EXPECTED[cls]
    for step in steps:
        for tensors in (step.grads, step.params):
            for name in list(tensors):
                tensors[name.removeprefix("_orig_mod.")] = tensors.pop(name)
    assert_same_bits(steps, fed_in_chunks(reference, [*batches(2), *batches(2, seed=2)]))


@pytest.mark.slow
@on_ranks(2, timeout=300)
@pytest.mark.parametrize("cls", [Unrolled, Looped])
def test_no_more_graphs_and_breaks_than_upstream(cls: type[Unrolled]) -> None:
    found = []
    for shard in (upstream.fully_shard, fully_shard):
        with counted_compilations() as counts:
            model = compiled(sharded(cls, shard), counts, in_place=False)
            for x in batches(4):
                forward_backward(model, x)
            found.append((counts.graphs, counts.breaks, counts.num_ops))
    theirs, ours = found
    assert ours[:2] <= theirs[:2]
    assert ours[2] >= theirs[2]  # at least as many operations are compiled


@on_ranks(2, timeout=300)
def test_batch_sizes_and_evaluation_do_not_fill_the_cache() -> None:
    with counted_compilations() as counts:
        model = compiled(sharded(Unrolled), counts, in_place=True)

        def live(rows: int) -> None:
            forward_backward(model.train(), torch.randn(rows, 7))
            with torch.no_grad():
                model.eval()(torch.randn(rows, 7))

        for rows in (4, 6, 3):
            live(rows)
        with no_recompilation():
            for rows in (8, 5, 4, 12):
                live(rows)
        assert counts.breaks == 3 * 2 * 2  # forward with and without gradients, static and dynamic shapes


@pytest.mark.slow
@on_ranks(2, timeout=300)
def test_a_model_compiled_before_it_is_sharded() -> None:
    torch.manual_seed(0)
    model = Looped()
    reference = copy.deepcopy(model)
    with counted_compilations() as counts:
        whole = torch.compile(model, backend=counts.backend)
        for block in (model.a, model.b, model.c):
            fully_shard(block, mesh=cpu_mesh())
        fully_shard(whole, mesh=cpu_mesh())
        steps = fed_own_chunk(whole, batches(4))
        assert (counts.graphs, counts.breaks) == EXPECTED[Looped]
    expected = fed_in_chunks(reference, batches(4))
    torch.testing.assert_close([step.loss for step in steps], [step.loss for step in expected], atol=1e-6, rtol=1e-6)
