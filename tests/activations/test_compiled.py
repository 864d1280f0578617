"""Checkpointing and the compiler on the same blocks, in every order with ``fully_shard``: one graph for all that are alike, no break.

The oracle of what the compiler does is the number of its graphs; of the numbers, the plain model in eager.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from fsdp2 import ActivationCheckpointPolicy, apply_activation_checkpointing, fully_shard
from fsdp2.activations import HEAVY_OPS
from harness import cpu_mesh, on_ranks
from harness.compiled import Counts, counted_compilations, no_recompilation
from harness.models import Transformer, TransformerBlock, token_batches
from harness.sharding import with_reference
from harness.training import assert_equal_training, fed_in_chunks, fed_own_chunk, sgd

pytestmark = [
    pytest.mark.slow,
    # Dynamo looks at ``.grad`` of non-leaf inputs, and warns of it.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

POLICIES = {
    "full": "full",
    "ops": ActivationCheckpointPolicy([TransformerBlock], save_ops=HEAVY_OPS),
    "budget": ActivationCheckpointPolicy(max_nbytes=0),  # the first step measures, without the compiler
}


def steps_by_letter(counts: Counts, policy: Any) -> dict[str, Callable[[nn.Module], Any]]:
    def compile_blocks(model: nn.Module) -> None:
        for block in model.blocks:
            block.compile(backend=counts.backend, fullgraph=policy is not POLICIES["budget"])

    def shard_blocks(model: nn.Module) -> None:
        for block in model.blocks:
            fully_shard(block, mesh=cpu_mesh())

    return {"c": compile_blocks, "s": shard_blocks, "k": lambda model: apply_activation_checkpointing(model, policy)}


@on_ranks(2, timeout=300)
@pytest.mark.parametrize("order", ["".join(order) for order in itertools.permutations("cks")])
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_in_every_order_blocks_share_one_graph_and_train_as_the_plain_model(name, order, backend):
    model, reference = with_reference(Transformer(dim=6, num_blocks=4))
    with counted_compilations(backend) as counts:
        steps = steps_by_letter(counts, POLICIES[name])
        for letter in order:
            steps[letter](model)
        fully_shard(model, mesh=cpu_mesh())
        optimizer = sgd(model.parameters())
        trained = fed_own_chunk(model, token_batches(4)[:2], optimizer=optimizer)
        with no_recompilation():
            trained += fed_own_chunk(model, token_batches(4)[2:], optimizer=optimizer)
        assert counts.graphs == 1
        assert counts.breaks == 0
    assert_equal_training(trained, fed_in_chunks(reference, token_batches(4)))
