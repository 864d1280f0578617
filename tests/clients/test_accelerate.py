"""What accelerate does to a model before it trains, as it does it."""

from __future__ import annotations

import copy

from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from fsdp2 import fully_shard
from harness import cpu_mesh, on_ranks
from harness.models import batches, mlp
from harness.training import assert_trains_bitwise_as


@on_ranks(2)
def test_a_checkpoint_wrapper_and_the_block_that_it_wraps_are_both_sharded():
    """accelerate does that. The wrapper has the attributes of the block, and so it seemed to be sharded before."""
    model = mlp()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block)
    reference = copy.deepcopy(model)
    for wrapper in model.blocks:
        fully_shard(wrapper._checkpoint_wrapped_module, mesh=cpu_mesh())
        fully_shard(wrapper, mesh=cpu_mesh())
    fully_shard(model, mesh=cpu_mesh())
    assert_trains_bitwise_as(model, reference, batches())
