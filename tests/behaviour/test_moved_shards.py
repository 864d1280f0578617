"""Shards whose memory somebody moves: torch moves a CPU tensor into shared memory when it is sent to another process."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from torch import Tensor

from fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from fsdp2.errors import ParameterError
from fsdp2.optim import flat
from harness import cpu_mesh, on_ranks
from harness.models import batches, mlp
from harness.sharding import shard_blocks
from harness.training import MakeOptimizer, assert_equal_training, fed_in_chunks, fed_own_chunk, forward_backward


def send(local: Tensor) -> None:
    ForkingPickler(io.BytesIO()).dump(local)  # as a queue of torch.multiprocessing does


def share_storage(local: Tensor) -> None:
    local.untyped_storage().share_memory_()


def give_other_data(local: Tensor) -> None:
    local.data = local.clone()


WAYS: list[Callable[[Tensor], None]] = [send, share_storage, give_other_data]
OPTIONS: dict[str, dict[str, object]] = {
    "resharded": {},
    "kept": {"reshard_after_forward": False},
    "mixed": {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float64)},
    "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
}


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "torch": lambda params: torch.optim.SGD(params, lr=0.1),
    "flat": lambda params: flat(torch.optim.SGD, params, lr=0.1),
}


@on_ranks(1, 2)
def test_a_shard_that_was_moved_is_the_one_that_trains():
    """Symptom: after a send, forward went on with the values that the shard had then, and optimizer steps were lost."""
    for (way, (name, options)), optimizer in itertools.product(itertools.product(WAYS, OPTIONS.items()), OPTIMIZERS):
        model, reference = mlp(), mlp()
        shard_blocks(model, **options)

        def move(model=model, way=way) -> None:
            if torch.distributed.get_rank() == 0:  # one rank alone may send its shards
                for tensor in model.state_dict().values():
                    way(tensor.to_local())

        def moved_in_between(model, x, move=move) -> Tensor:
            loss = forward_backward(model, x)
            move()
            return loss

        try:
            train = OPTIMIZERS[optimizer](model.parameters())
            for seed, iteration in enumerate([forward_backward, moved_in_between, forward_backward]):
                ours = fed_own_chunk(model, batches(1, seed=seed), iteration=iteration, optimizer=train)
                assert_equal_training(
                    ours, fed_in_chunks(reference, batches(1, seed=seed), lambda params: torch.optim.SGD(params, 0.1))
                )
            x = batches(1, seed=9)[0]
            for _ in range(2):
                with torch.no_grad():  # kept parameters are not gathered again, on no rank
                    torch.testing.assert_close(model(x), reference(x))
                move()
        except AssertionError as error:
            raise AssertionError(f"{way.__name__}, {name}, {optimizer}") from error


@on_ranks(2)
def test_a_shard_that_is_given_another_dtype_or_shape_is_an_error():
    """Its bytes would be read as those of the shard's dtype, and one value would become all of them."""
    for other in (torch.ones(2, 4, dtype=torch.bfloat16), torch.ones(2, 4, dtype=torch.float64), torch.ones(1)):
        model = fully_shard(torch.nn.Linear(4, 4), mesh=cpu_mesh())
        model.weight._local_tensor.data = other
        with pytest.raises(ParameterError, match=r"the shard of weight was given data of another dtype or shape"):
            model(torch.ones(1, 4))
