"""A first look at ``torch.compile`` below and above ``fully_shard``: it runs, and gives the same numbers."""

import pytest
import torch

from fsdp2 import fully_shard
from harness import cpu_mesh, on_ranks
from harness.models import batches, mlp
from harness.training import assert_equal_training, fed_in_chunks, fed_own_chunk

# Dynamo looks at ``.grad`` of non-leaf inputs, and warns of it.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@on_ranks(2, timeout=300)
@pytest.mark.parametrize(
    ("backend", "after"),
    [("eager", True), *(pytest.param("aot_eager", after, marks=pytest.mark.slow) for after in (True, False))],
)
def test_blocks_compiled_before_they_are_sharded(backend, after):
    torch._dynamo.reset()
    reference, model = mlp(), mlp()
    for block in model.blocks:
        block.compile(backend=backend)
        fully_shard(block, mesh=cpu_mesh(), reshard_after_forward=after)
    fully_shard(model, mesh=cpu_mesh(), reshard_after_forward=after)
    assert_equal_training(fed_own_chunk(model, batches(3)), fed_in_chunks(reference, batches(3)))


@pytest.mark.slow
@on_ranks(2, timeout=300)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_blocks_compiled_in_place_after_they_are_sharded(backend):
    torch._dynamo.reset()
    reference, model = mlp(), mlp()
    for block in model.blocks:
        fully_shard(block, mesh=cpu_mesh())
        block.compile(backend=backend)
    fully_shard(model, mesh=cpu_mesh())
    assert_equal_training(fed_own_chunk(model, batches(3)), fed_in_chunks(reference, batches(3)))


@pytest.mark.slow
@on_ranks(2, timeout=300)
def test_wrapped_blocks_and_the_whole_model():
    torch._dynamo.reset()
    reference, model = mlp(), mlp()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend="aot_eager")
        fully_shard(model.blocks[index], mesh=cpu_mesh())
    fully_shard(model, mesh=cpu_mesh())
    whole = torch.compile(model, backend="aot_eager")
    expected = fed_in_chunks(reference, batches(3))
    for step, wanted in zip(fed_own_chunk(whole, batches(3)), expected, strict=True):
        torch.testing.assert_close(step.loss, wanted.loss, atol=1e-6, rtol=1e-6)
    for name, param in model.named_parameters():
        plain = reference.get_parameter(name.replace("_orig_mod.", ""))
        torch.testing.assert_close(param.full_tensor(), plain, atol=1e-6, rtol=1e-6)
