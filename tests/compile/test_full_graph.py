"""Full-graph mode trains like the unsharded model, in one graph, with the collectives that its units and options promise."""

from __future__ import annotations

import copy
import re

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import Shard

import fsdp2
from fsdp2 import MixedPrecisionPolicy, fully_shard
from fsdp2.compiled import GraphSummary, graph_summaries
from harness import cpu_mesh, on_ranks
from harness.models import Transformer, batches, mlp, token_batches
from harness.training import (
    adamw,
    assert_equal_training,
    assert_same_bits,
    assert_same_tensors,
    assert_trains_as,
    fed_own_chunk,
    fed_whole,
    state_of,
)

# Under Adam a true gradient of zero turns rounding into steps.
ZERO_GRADIENT = ("attention.key.bias",)


def shard(model: nn.Module, mesh=None, **options) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, mesh=mesh or cpu_mesh(), **options)
    return fully_shard(model, mesh=mesh or cpu_mesh(), **options)


def graphed(model: nn.Module, mesh=None, backend: str = "aot_eager", bucket_bytes: int = 0, **options) -> nn.Module:
    torch._dynamo.reset()
    counters.clear()
    return fsdp2.compile(shard(model, mesh, **options), backend=backend, bucket_bytes=bucket_bytes)


def four_blocks(**options) -> Transformer:
    torch.manual_seed(0)
    return Transformer(num_blocks=4, **options)


def assert_one_capture(num_graphs: int = 1) -> None:
    assert counters["stats"]["unique_graphs"] == num_graphs
    assert not counters["graph_break"]
    assert not counters["recompiles"]


def last(model: nn.Module, kind: str) -> GraphSummary:
    return [summary for summary in graph_summaries(model) if summary.kind == kind][-1]


def counts(model: nn.Module) -> tuple[int, int, int]:
    """All-gathers in forward, all-gathers in backward, reduce-scatters in backward."""
    forward, backward = last(model, "forward"), last(model, "backward")
    assert forward.count("reduce_scatter") == forward.count("all_reduce") == 0
    return forward.count("all_gather"), backward.count("all_gather"), backward.count("reduce_scatter")


@on_ranks(2, timeout=300)
def test_training_is_one_graph_and_equals_the_unsharded_model():
    reference, model = mlp(), mlp()
    graphed(model)
    assert_trains_as(model, reference, batches(4))
    assert_one_capture()
    assert counts(model) == (4, 3, 4)  # the root is kept from forward to backward


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # torch's own, of importing inductor
@on_ranks(2, timeout=600)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_adamw_equals_eager_and_the_unsharded_model_compiled_and_not(backend):
    plain, compiled, eager, model = (four_blocks() for _ in range(4))
    shard(eager)
    graphed(model, backend=backend)
    compiled.compile(backend=backend)
    inputs = token_batches(5)
    steps = fed_own_chunk(model, inputs, adamw)
    assert_one_capture()
    assert not counters["inductor"]["fxgraph_cache_bypass"]
    for expected in (fed_own_chunk(eager, inputs, adamw), fed_whole(plain, inputs, adamw), fed_whole(compiled, inputs, adamw)):
        assert_equal_training(steps, expected, but=ZERO_GRADIENT, bound=2e-5, ulps=64)


@pytest.mark.slow
@on_ranks(2, timeout=300)
@pytest.mark.parametrize(("after", "gathered_again"), [(None, 4), (True, 5), (False, 0)])
def test_backward_gathers_again_what_forward_resharded(after, gathered_again):
    model = graphed(four_blocks(), reshard_after_forward=after)
    assert_trains_as(model, four_blocks(), token_batches(2))
    assert counts(model) == (5, gathered_again, 5)
    assert_one_capture()


@pytest.mark.slow
@on_ranks(2, timeout=300)
def test_where_backward_gathers_again_forward_saves_no_parameter():
    saved = {}
    for after in (True, False):
        model = graphed(mlp(dim=64), reshard_after_forward=after)
        fed_own_chunk(model, batches(1))
        saved[after] = last(model, "forward").output_nbytes
    weights = sum(param.numel() * 4 for param in model.parameters() if param.ndim > 1)
    biases = sum(param.numel() * 4 for param in model.parameters() if param.ndim == 1)
    first = model.first.weight.numel() * 4  # its input needs no gradient, so that backward never needs it
    assert weights - first <= saved[False] - saved[True] <= weights - first + biases


@pytest.mark.slow
@on_ranks(2, timeout=300)
@pytest.mark.parametrize(("in_a_bucket", "num_buckets"), [(1, 4), (2, 2), (3, 2), (4, 1)])
def test_units_are_merged_up_to_the_bucket_size(in_a_bucket, num_buckets):
    model = shard(four_blocks())
    group = fully_shard.state(model.blocks[0]).groups[0]
    nbytes = group.plan.layout.unsharded_numel * 4
    fsdp2.compile(model, backend="aot_eager", bucket_bytes=in_a_bucket * nbytes)
    assert_trains_as(model, four_blocks(), token_batches(2))
    assert counts(model) == (1 + num_buckets, num_buckets, 1 + num_buckets)  # the root has another reshard_after_forward
    assert max(each.nbytes for each in last(model, "forward").collectives) == in_a_bucket * nbytes


@pytest.mark.slow
@on_ranks(2, timeout=300)
def test_gathers_start_one_bucket_ahead_and_reductions_end_one_bucket_later():
    model = graphed(four_blocks())
    fed_own_chunk(model, token_batches(1))
    per_block = last(model, "forward").num_heavy // 4
    root, first, *others = last(model, "forward").collectives
    assert (root.overlapped, first.overlapped) == (0, 0)  # nothing runs before the embedding, nothing between it and block 0
    assert all(each.overlapped == per_block for each in others)
    backward = last(model, "backward")
    assert all(each.overlapped > per_block for each in backward.collectives[1:-2])
    unordered = fsdp2.compile(shard(four_blocks()), backend="aot_eager", bucket_bytes=0, reorder=False)
    fed_own_chunk(unordered, token_batches(1))
    assert all(each.overlapped == 0 for summary in graph_summaries(unordered) for each in summary.collectives)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # torch's own, of importing inductor
@on_ranks(2, timeout=600)
def test_the_generated_code_keeps_the_order():
    from torch._inductor.utils import fresh_cache, run_and_get_code

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    for layer in model:
        fully_shard(layer, mesh=cpu_mesh())
    fsdp2.compile(fully_shard(model, mesh=cpu_mesh()), bucket_bytes=0)
    with torch.no_grad(), fresh_cache():
        _, (code,) = run_and_get_code(model, torch.randn(2, 8))
    events = re.findall(r"(all_gather|wait_tensor|addmm)[a-z_]*(?:\.default)?\(", code)
    first, second = ("all_gather", "all_gather", "wait_tensor", "addmm"), ("wait_tensor", "all_gather", "addmm")
    assert events == [*first, *second, "wait_tensor", "addmm"]


@pytest.mark.slow
@on_ranks(4, timeout=300)
@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4)], ids=str)
def test_hybrid_sharding_reduces_over_both_axes(shape):
    model = graphed(mlp(), cpu_mesh(*shape))
    assert_equal_training(fed_own_chunk(model, batches(3)), fed_whole(mlp(), batches(3)))
    assert last(model, "backward").count("all_reduce") == (4 if shape[0] > 1 else 0)
    assert last(model, "backward").count("reduce_scatter") == (4 if shape[1] > 1 else 0)


@pytest.mark.slow
@on_ranks(1, 3, timeout=300)
def test_one_rank_and_three_uneven_ones():
    model = graphed(mlp())
    assert_equal_training(fed_own_chunk(model, batches(3)), fed_whole(mlp(), batches(3)))
    assert_one_capture()


@pytest.mark.slow
@on_ranks(2, 3, timeout=300)
def test_parameters_that_are_cut_on_another_dim():
    def on_dim_1(param: nn.Parameter) -> Shard | None:
        return Shard(1) if param.ndim > 1 else None

    model = graphed(mlp(), shard_placement_fn=on_dim_1)
    assert_equal_training(fed_own_chunk(model, batches(3)), fed_whole(mlp(), batches(3)))


@pytest.mark.slow
@on_ranks(2, timeout=300)
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
def test_mixed_precision_is_that_of_eager_mode(reduce_dtype):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    eager, model = shard(mlp(), mp_policy=policy), graphed(mlp(), mp_policy=policy)
    steps = fed_own_chunk(model, batches(3), adamw)
    assert all(grad.dtype == torch.float32 for step in steps for grad in step.grads.values())
    assert_same_bits(steps, fed_own_chunk(eager, batches(3), adamw))
    gathers = [each for each in last(model, "forward").collectives if each.kind == "all_gather"]
    group = fully_shard.state(model.blocks[0]).groups[0]
    assert gathers[-1].nbytes == group.plan.layout.unsharded_numel * 2


@pytest.mark.slow
@on_ranks(2, timeout=300)
def test_frozen_parameters_have_no_gradient_and_thawing_captures_again():
    reference, model = mlp(), mlp()
    for each in (reference, model):
        each.blocks[1].requires_grad_(False)
        each.blocks[0].up.weight.requires_grad_(False)
    graphed(model)
    assert_trains_as(model, reference, batches(2))
    assert counts(model)[2] == 3  # nothing of block 1 is reduced
    for each in (reference, model):
        each.blocks[1].requires_grad_(True)
    assert_trains_as(model, reference, batches(2))
    assert counts(model)[2] == 4
    for each in (reference, model):
        each.blocks[1].requires_grad_(False)
    assert_trains_as(model, reference, batches(2))
    assert_one_capture(num_graphs=2)


@pytest.mark.slow
@on_ranks(2, timeout=300)
@pytest.mark.parametrize("own_unit", [None, "embedding", "head"])
def test_tied_embeddings_stay_one_parameter(own_unit):
    reference, model = four_blocks(tied=True), four_blocks(tied=True)
    if own_unit is not None:
        fully_shard(getattr(model, own_unit), mesh=cpu_mesh())
    graphed(model)
    assert_trains_as(model, reference, token_batches(3), ulps=64)
    assert model.head.weight is model.embedding.weight
    assert_one_capture()


@pytest.mark.slow
@on_ranks(2, timeout=300)
def test_checkpoints_go_from_either_mode_to_the_other(tmp_path):
    eager, model = shard(mlp(seed=1)), graphed(mlp())
    keys, placements = list(eager.state_dict()), [value.placements for value in eager.state_dict().values()]
    fed_own_chunk(model, batches(2))
    optimizer = adamw(model.parameters())
    fed_own_chunk(model, batches(2), optimizer=optimizer)
    assert list(model.state_dict()) == keys
    assert [value.placements for value in model.state_dict().values()] == placements

    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=str(tmp_path / "of_the_graph"))
    other_optimizer = adamw(eager.parameters())
    loaded = {"model": get_model_state_dict(eager), "optimizer": get_optimizer_state_dict(eager, other_optimizer)}
    dcp.load(loaded, checkpoint_id=str(tmp_path / "of_the_graph"))
    eager.load_state_dict(loaded["model"])
    set_optimizer_state_dict(eager, other_optimizer, loaded["optimizer"])
    assert_same_tensors(state_of(eager), state_of(model), "loaded value")
    inputs = batches(2, seed=5)
    expected = fed_own_chunk(model, inputs, optimizer=optimizer)
    assert_equal_training(fed_own_chunk(eager, inputs, optimizer=other_optimizer), expected)

    before = state_of(eager)
    fresh = graphed(mlp(seed=2))
    fed_own_chunk(fresh, batches(1))
    fresh.load_state_dict(copy.deepcopy(eager.state_dict()))
    assert_same_tensors(state_of(fresh), before, "loaded value")
    assert_equal_training(fed_own_chunk(fresh, inputs), fed_own_chunk(eager, inputs))
