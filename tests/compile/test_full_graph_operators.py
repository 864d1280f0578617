"""Our algorithms for gloo in a graph: the numbers of eager mode, started early and waited for late like the stock collectives."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

import fsdp2
from fsdp2 import fully_shard
from fsdp2.compiled import graph_summaries, operators
from harness import cpu_mesh, on_ranks
from harness.models import Transformer, batches, mlp, token_batches
from harness.training import adamw, assert_equal_training, fed_own_chunk, fed_whole, forced


def rows_of_rank(rank: int, num_ranks: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(num_ranks * 5, generator=torch.Generator().manual_seed(rank)).to(dtype)


@on_ranks(2, 3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_algorithm_gives_what_the_ranks_have(dtype):
    group, num_ranks, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    of_ranks = [rows_of_rank(each, num_ranks, dtype) for each in range(num_ranks)]
    for algorithm in ("stock", "broadcast"):
        assert torch.equal(operators.all_gather(of_ranks[rank], group, algorithm), torch.cat(of_ranks))
    in_order = sum(each.view(num_ranks, 5)[rank] for each in of_ranks)
    for algorithm in ("pairwise", "all_to_all"):
        source = of_ranks[rank].clone()
        assert torch.equal(operators.reduce_scatter(source, "sum", group, algorithm), in_order)
        assert torch.equal(source, of_ranks[rank])  # the compiler may read it again


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # torch's own, of importing inductor
@on_ranks(2, 3, timeout=600)
@pytest.mark.parametrize(
    ("backend", "reduce_scatter"),
    [
        *itertools.product(["aot_eager"], ["pairwise", "all_to_all", "stock"]),
        ("inductor", "pairwise"),
        *(pytest.param("inductor", name, marks=pytest.mark.full) for name in ("all_to_all", "stock")),
    ],
)
def test_training_equals_the_unsharded_model_by(reduce_scatter, backend):
    torch.manual_seed(0)
    model, plain = mlp(), mlp()
    plain.load_state_dict(model.state_dict())
    torch._dynamo.reset()
    with forced(all_gather="stock" if reduce_scatter == "stock" else "broadcast", reduce_scatter=reduce_scatter):
        for block in model.blocks:
            fully_shard(block, mesh=cpu_mesh())
        fsdp2.compile(fully_shard(model, mesh=cpu_mesh()), backend=backend, bucket_bytes=0)
    assert_equal_training(fed_own_chunk(model, batches(4), adamw), fed_whole(plain, batches(4), adamw), bound=2e-5, ulps=64)


@pytest.mark.slow
@on_ranks(2, timeout=300)
def test_they_overlap_compute_as_the_stock_collectives_do():
    overlapped = {}
    for kind, all_gather, reduce_scatter in (("stock", "stock", "stock"), ("own", "broadcast", "pairwise")):
        torch.manual_seed(0)
        model = Transformer(num_blocks=4)
        with forced(all_gather=all_gather, reduce_scatter=reduce_scatter):
            for block in model.blocks:
                fully_shard(block, mesh=cpu_mesh())
            fsdp2.compile(fully_shard(model, mesh=cpu_mesh()), backend="aot_eager", bucket_bytes=0)
        fed_own_chunk(model, token_batches(1))
        overlapped[kind] = [(each.kind, each.nbytes, each.overlapped) for graph in graph_summaries(model) for each in graph.collectives]
    assert overlapped["own"] == overlapped["stock"]
    assert any(each for _, _, each in overlapped["own"])
