"""Compiled to machine code, and what else of a training step may be compiled: numbers against the unsharded model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from fsdp2 import MixedPrecisionPolicy, fully_shard
from harness import cpu_mesh, on_ranks
from harness.compiled import counted_compilations, no_recompilation
from harness.models import Transformer, batches, mlp, token_batches
from harness.training import adamw, assert_equal_training, fed_in_chunks, fed_own_chunk, sgd

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning"),  # importing inductor
]


def model_of_four() -> Transformer:
    torch.manual_seed(0)
    return Transformer(dim=8, num_blocks=4)


@on_ranks(2, timeout=600)
@pytest.mark.parametrize("order", ["cs", "kcs", "csk"])
def test_inductor_trains_as_the_plain_model_does(order: str) -> None:
    model = model_of_four()
    eager, compiled = copy.deepcopy(model), copy.deepcopy(model)
    with counted_compilations("inductor") as counts:
        for block in compiled.blocks:
            block.compile(backend=counts.backend, fullgraph=True)
        plain = fed_in_chunks(compiled, token_batches(4))
        assert counts.graphs == 1
    with counted_compilations("inductor") as counts:
        for index, block in enumerate(model.blocks):
            for letter in order:
                if letter == "c":
                    block.compile(backend=counts.backend, fullgraph=True)
                elif letter == "s":
                    fully_shard(block, mesh=cpu_mesh())
                else:
                    block = checkpoint_wrapper(block)
            model.blocks[index] = block
        fully_shard(model, mesh=cpu_mesh())
        optimizer = sgd(model.parameters())
        steps = fed_own_chunk(model, token_batches(4)[:2], optimizer=optimizer)
        with no_recompilation():
            steps += fed_own_chunk(model, token_batches(4)[2:], optimizer=optimizer)
        assert (counts.graphs, counts.breaks) == (1, 0)
    for step in steps:
        for tensors in (step.grads, step.params):
            for name in list(tensors):
                tensors[name.replace("_checkpoint_wrapped_module.", "")] = tensors.pop(name)
    assert_equal_training(steps, plain)
    assert_equal_training(steps, fed_in_chunks(eager, token_batches(4)), ulps=64)


@on_ranks(2, timeout=600)
def test_inductor_with_mixed_precision() -> None:
    """bf16 rounds once for a fused chain where eager rounds at every step: a few bf16 ulps."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, eager = model_of_four(), model_of_four()
    for each in (model, eager):
        for block in each.blocks:
            fully_shard(block, mesh=cpu_mesh(), mp_policy=policy)
            if each is model:
                block.compile(fullgraph=True)
        fully_shard(each, mesh=cpu_mesh(), mp_policy=policy)
    steps, expected = fed_own_chunk(model, token_batches(3)), fed_own_chunk(eager, token_batches(3))
    for ours, theirs in zip(steps, expected, strict=True):
        torch.testing.assert_close(ours.loss, theirs.loss, atol=1e-2, rtol=1e-2)


@on_ranks(2, timeout=600)
@pytest.mark.parametrize("make", [sgd, adamw])
def test_a_compiled_optimizer_step_over_sharded_parameters(make) -> None:
    """Symptom elsewhere: an assertion about dims in the compiler, where a gradient is a view of a flat buffer. (pytorch#176667)"""
    model, reference = mlp(), mlp()
    for block in model.blocks:
        fully_shard(block, mesh=cpu_mesh())
    fully_shard(model, mesh=cpu_mesh())
    with counted_compilations() as counts:
        optimizer = make(model.parameters())
        optimizer.step = torch.compile(optimizer.step, backend=counts.backend)
        steps = fed_own_chunk(model, batches(2), optimizer=optimizer)
        with no_recompilation():
            steps += fed_own_chunk(model, batches(2, seed=2), optimizer=optimizer)
        assert counts.graphs > 0
    # Adam turns rounding of tiny gradients into steps, and the compiled step rounds in its own way: compile the reference's, too.
    with counted_compilations() as counts:

        def make_compiled(params: Any) -> torch.optim.Optimizer:
            optimizer = make(params)
            optimizer.step = torch.compile(optimizer.step, backend=counts.backend)
            return optimizer

        expected = fed_in_chunks(reference, [*batches(2), *batches(2, seed=2)], make_compiled)
    assert_equal_training(steps, expected)
