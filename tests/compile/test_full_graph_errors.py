"""Where a model cannot be captured: an error of our own on every rank that names the place, and the model goes on eagerly."""

from __future__ import annotations

import copy
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp2
from fsdp2 import ArgumentError, CompileError, CPUOffloadPolicy, ModuleError, OrderError, fully_shard
from harness import cpu_mesh, on_ranks
from harness.models import MLP, batches, mlp
from harness.training import assert_trains_as, fed_own_chunk, own_chunk


class Breaking(MLP):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if x.sum().item() > 1e9:  # the line that the error is to name
            return x
        return self.last(x)


def compiled(model: nn.Module, **options) -> nn.Module:
    torch._dynamo.reset()
    return fsdp2.compile(fully_shard(model, mesh=cpu_mesh(), **options), backend="aot_eager")


@on_ranks(2, timeout=300)
def test_a_break_is_named_and_eager_goes_on():
    torch.manual_seed(0)
    reference = Breaking()
    model = compiled(copy.deepcopy(reference))
    with pytest.raises(CompileError, match=r"(?s)Breaking cannot be captured.*test_full_graph_errors\.py:\d+ in forward: if x\.sum"):
        model(own_chunk(batches(1)[0]))
    assert_trains_as(model, reference, batches(2))


class BreakingOnRank1(MLP):
    def forward(self, x: Tensor) -> Tensor:
        if dist.get_rank() == 1:
            torch._dynamo.graph_break()
        return super().forward(x)


@pytest.mark.slow
@on_ranks(2, timeout=300)
def test_a_break_on_one_rank_is_an_error_on_all():
    model = compiled(BreakingOnRank1())
    with pytest.raises(CompileError, match=r"(?s)\[rank 1\].*cannot be captured"):
        model(own_chunk(batches(1)[0]))
    fed_own_chunk(model, batches(1))


class OtherOrderOnRank1(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(7, 7), nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(self.b(x)) if dist.get_rank() == 1 else self.b(self.a(x))


@pytest.mark.slow
@on_ranks(2, timeout=300)
def test_different_graphs_on_different_ranks_are_an_error_and_not_a_hang():
    model = OtherOrderOnRank1()
    fully_shard(model.a, mesh=cpu_mesh()), fully_shard(model.b, mesh=cpu_mesh())
    torch._dynamo.reset()
    fsdp2.compile(fully_shard(model, mesh=cpu_mesh()), backend="aot_eager", bucket_bytes=0)
    with pytest.raises(CompileError, match="captured differently"):
        model(own_chunk(batches(1)[0]))


class Writing(MLP):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.first.weight.mul_(0.5)
        return super().forward(x)


@pytest.mark.slow
@on_ranks(2, timeout=300)
def test_a_forward_that_writes_to_a_parameter_is_refused_by_name():
    model = compiled(Writing())
    with pytest.raises(CompileError, match=r"(?s)writes to 1 parameters.*first\.weight: mul_"):
        model(own_chunk(batches(1)[0]))


@pytest.mark.slow
@on_ranks(2, timeout=300)
def test_where_the_compiler_is_off_nothing_runs_on_parameters_without_memory():
    model = compiled(mlp())
    with torch.compiler.set_stance("force_eager"), pytest.raises(CompileError, match="did not compile forward"):
        model(own_chunk(batches(1)[0]))
    fed_own_chunk(model, batches(1))


@on_ranks(2, timeout=300)
def test_what_a_graph_lacks_is_refused_at_the_call():
    offloaded = fully_shard(mlp(), mesh=cpu_mesh(), offload_policy=CPUOffloadPolicy(pin_memory=False))
    with pytest.raises(CompileError, match="offloaded"):
        fsdp2.compile(offloaded)
    shrinking = fully_shard(nn.Sequential(nn.Embedding(5, 3, max_norm=1.0)), mesh=cpu_mesh())
    with pytest.raises(CompileError, match="max_norm"):
        fsdp2.compile(shrinking)
    hooked = fully_shard(mlp(), mesh=cpu_mesh())
    hooked.set_all_reduce_hook(lambda tensor: None)
    with pytest.raises(CompileError, match="all-reduce hook"):
        fsdp2.compile(hooked)


@on_ranks(2, timeout=300)
def test_accumulated_gradients_are_not_forgotten():
    model = fully_shard(mlp(), mesh=cpu_mesh())
    model.set_requires_gradient_sync(False)
    model(own_chunk(batches(1)[0])).sum().backward()
    with pytest.raises(OrderError, match="accumulated without sync"):
        fsdp2.compile(model)


@on_ranks(2, timeout=300)
def test_wrong_arguments_are_refused():
    with pytest.raises(ModuleError, match="fully_shard was not applied"):
        fsdp2.compile(mlp())
    model = fully_shard(mlp(), mesh=cpu_mesh())
    for wrong in ({"backend": "eager"}, {"bucket_bytes": -1}, {"bucket_bytes": True}, {"backend": "aot_eager", "options": {"a": 1}}):
        with pytest.raises(ArgumentError):
            fsdp2.compile(model, **wrong)
    fsdp2.compile(model)
    with pytest.raises(OrderError, match="compiled already"):
        fsdp2.compile(model)
    fsdp2.uncompile(fsdp2.uncompile(model))
    with patch.object(type(model), "_compiled_call_impl", object()), pytest.raises(OrderError, match="compiled already"):
        fsdp2.compile(model)


@on_ranks(2, timeout=300)
def test_a_part_of_a_model_is_refused():
    model = mlp()
    fully_shard(model.blocks[0], mesh=cpu_mesh())
    fully_shard(model, mesh=cpu_mesh())
    model(own_chunk(batches(1)[0]))
    with pytest.raises(OrderError, match="part of a larger model"):
        fsdp2.compile(model.blocks[0])


class Refusing(MLP):
    def forward(self, x: Tensor, name: str = "") -> Tensor:
        if len(x) > 50:
            raise ValueError("at most 50 rows")
        return super().forward(x) + len(name)


@pytest.mark.slow
@on_ranks(2, timeout=300)
def test_what_the_forward_raised_is_in_the_error():
    model = compiled(Refusing())
    with pytest.raises(CompileError, match=r"(?s)test_full_graph_errors\.py:\d+ in forward: raise ValueError.*at most 50 rows"):
        model(torch.ones(60, 7))
    fed_own_chunk(model, batches(1))


@pytest.mark.slow
@on_ranks(2, timeout=300)
def test_too_many_captures_are_said_to_be_that():
    model = compiled(Refusing())
    x = own_chunk(batches(1)[0])
    with torch._dynamo.config.patch(recompile_limit=2):
        model(x, "a"), model(x, "bb")
        with pytest.raises(CompileError, match=r"(?s)recompile limit.*as a tensor"):
            model(x, "ccc")


@pytest.mark.slow
@on_ranks(2, timeout=300)
def test_what_a_graph_lacks_is_refused_when_it_is_set_later():
    model = compiled(mlp())
    fed_own_chunk(model, batches(1))
    model.set_all_reduce_hook(lambda tensor: None)
    with pytest.raises(CompileError, match="all-reduce hook"):
        model(own_chunk(batches(1)[0]))
    fed_own_chunk(model, batches(1))


@on_ranks(2, timeout=300)
def test_a_mode_inside_of_a_larger_model_is_refused():
    part = fsdp2.compile(fully_shard(mlp(), mesh=cpu_mesh()), backend="aot_eager")
    model = fully_shard(nn.Sequential(nn.Linear(7, 7), part), mesh=cpu_mesh())
    with pytest.raises(OrderError, match=r"(?s)1 parts of this FSDPSequential.*1 \(FSDPMLP\)"):
        fsdp2.compile(model)
    with pytest.raises(OrderError, match="1 \\(FSDPMLP\\) is in full-graph mode, and a part of a larger model"):
        model(own_chunk(batches(1)[0]))
    fsdp2.uncompile(part)
    model.reset_iter_state()
    fed_own_chunk(model, batches(1))
