"""Full-graph mode in the ways in which a model is called: evaluation, accumulation, other batch sizes, checkpointing, both modes."""

from __future__ import annotations

import copy
import dataclasses
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2 import CompileError, MixedPrecisionPolicy, fully_shard
from fsdp2.compiled import graph_summaries
from harness import cpu_mesh, on_ranks
from harness.models import MLP, batches, mlp, token_batches, transformer
from harness.training import (
    adamw,
    assert_equal_grads,
    assert_equal_training,
    assert_same_tensors,
    assert_trains_as,
    fed_in_chunks,
    fed_own_chunk,
    fed_whole,
    grads_of,
    own_chunk,
    sgd,
)
from harness.user_warnings import warned_on_rank_0

pytestmark = pytest.mark.slow


def graphed(model: nn.Module, backend: str = "aot_eager", bucket_bytes: int = 0, **options) -> nn.Module:
    torch._dynamo.reset()
    counters.clear()
    for block in getattr(model, "blocks", ()):
        fully_shard(block, mesh=cpu_mesh(), **options)
    fully_shard(model, mesh=cpu_mesh(), **options)
    return fsdp2.compile(model, backend=backend, bucket_bytes=bucket_bytes)


def backward(model: nn.Module, x: Tensor) -> None:
    model(x).square().mean().backward()


@on_ranks(2, timeout=300)
def test_evaluation_between_steps_captures_once_more_and_never_again():
    reference, model = mlp(), graphed(mlp())
    evaluated = batches(1, seed=9)[0]
    for _ in range(3):
        assert_equal_training(fed_own_chunk(model, batches(1)), fed_whole(reference, batches(1)))
        model.eval()
        with torch.no_grad():
            torch.testing.assert_close(model(evaluated), reference(evaluated), atol=1e-6, rtol=1e-6)
        model.train()
    assert [summary.kind for summary in graph_summaries(model)] == ["forward", "backward", "inference"]
    assert counters["stats"]["unique_graphs"] == 2


@on_ranks(2, timeout=300)
def test_other_batch_sizes_are_captured_once_more_as_dynamic():
    reference, model = mlp(), graphed(mlp())
    for rows in (12, 8, 20, 4, 16):
        x = batches(1, shape=(rows, 7), seed=rows)
        assert_equal_training(fed_own_chunk(model, x), fed_whole(reference, x))
    assert counters["stats"]["unique_graphs"] == 2


@on_ranks(2, timeout=300)
def test_several_forwards_before_one_backward_add_up():
    reference, model = mlp(), graphed(mlp())
    first, second = batches(2)
    for each, feed in ((reference, lambda x: x), (model, own_chunk)):
        loss = each(feed(first)).square().mean() + each(feed(second)).tanh().mean()
        loss.backward()
    assert_equal_grads(grads_of(model), grads_of(reference))


@on_ranks(2, timeout=300)
@pytest.mark.parametrize("sync", [True, False])
def test_accumulated_gradients_are_the_sum_whether_each_is_reduced_or_not(sync):
    reference, model = mlp(), graphed(mlp())
    inputs = batches(3)
    for index, x in enumerate(inputs):
        model.set_requires_gradient_sync(sync or index == len(inputs) - 1)
        backward(model, own_chunk(x))
        backward(reference, x)
    assert_equal_grads(grads_of(model), grads_of(reference))


class CheckpointedMLP(MLP):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.last(x)


@on_ranks(2, timeout=300)
@pytest.mark.parametrize("after", [None, False])
def test_activation_checkpointing_is_captured_with_the_rest(after):
    torch.manual_seed(0)
    reference = CheckpointedMLP()
    model = graphed(copy.deepcopy(reference), reshard_after_forward=after)
    assert_trains_as(model, reference, batches(3))
    forward, backward_graph = graph_summaries(model)
    assert (forward.count("all_gather"), backward_graph.count("all_gather")) == (4, 0 if after is False else 3)
    assert not counters["graph_break"]
    assert backward_graph.num_heavy > graph_summaries_without_checkpointing(after)


def graph_summaries_without_checkpointing(after: bool | None) -> int:
    model = graphed(mlp(), reshard_after_forward=after)
    backward(model, own_chunk(batches(1)[0]))
    return graph_summaries(model)[1].num_heavy


class PartlyUsed(MLP):
    """Uses its blocks' biases not at all, and its last layer only while training."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + F.linear(block.norm(x), block.up.weight)[..., : x.shape[-1]]
        return self.last(x) if self.training else x


@on_ranks(2, timeout=300)
def test_unused_parameters_keep_no_gradient():
    torch.manual_seed(0)
    reference = PartlyUsed()
    model = copy.deepcopy(reference)
    torch._dynamo.reset()
    fully_shard(model, mesh=cpu_mesh())
    fsdp2.compile(model, backend="aot_eager")
    steps = fed_own_chunk(model, batches(2), adamw)
    assert_equal_training(steps, fed_in_chunks(reference, batches(2), adamw))
    assert steps[0].grads["blocks.0.up.bias"] is None
    assert steps[0].grads["last.bias"] is not None
    model.eval(), reference.eval()
    assert fed_own_chunk(model, batches(1))[0].grads["last.bias"] is None


@on_ranks(2, timeout=300)
def test_eager_and_graph_take_turns_on_one_model():
    reference, model = mlp(), graphed(mlp())
    optimizers = [sgd(reference.parameters()), sgd(model.parameters())]
    for index, x in enumerate(batches(6)):
        if index % 2 == 1:
            fsdp2.uncompile(model)
        elif index > 0:
            fsdp2.compile(model, backend="aot_eager", bucket_bytes=0)
        for each, optimizer, own in zip((reference, model), optimizers, (x, own_chunk(x)), strict=True):
            backward(each, own)
            optimizer.step()
            optimizer.zero_grad()
    values = {name: param.full_tensor() for name, param in model.named_parameters()}
    for name, value in reference.named_parameters():
        torch.testing.assert_close(values[name], value.data, atol=1e-6, rtol=1e-6)


@on_ranks(2, timeout=300)
def test_changed_settings_and_dtypes_are_captured_again():
    reference, model = mlp(), graphed(mlp())
    assert_trains_as(model, reference, batches(1))
    model.set_reshard_after_forward(False)
    for block in model.blocks:
        block.set_gradient_divide_factor(1.0)
    model.set_gradient_divide_factor(1.0)
    backward(model, own_chunk(batches(1)[0]))
    backward(reference, batches(1)[0])
    doubled = {name: grad * 2 for name, grad in grads_of(reference).items()}
    assert_equal_grads(grads_of(model), doubled)
    assert graph_summaries(model)[-1].count("all_gather") == 0
    model.zero_grad()
    model.double()
    out = model(own_chunk(batches(1)[0]).double())
    assert out.dtype == torch.float64


@on_ranks(2, timeout=300)
def test_reduce_scatters_with_a_process_group_of_their_own_use_it():
    reference, model = mlp(), graphed(mlp())
    model.set_separate_reduce_scatter_group()
    exchanges: list[dist.ProcessGroup] = []

    def exchange(*args, group: dist.ProcessGroup, **kwargs):
        exchanges.append(group)
        return dist.distributed_c10d.all_to_all_single(*args, group=group, **kwargs)

    with mock.patch.object(dist, "all_to_all_single", exchange):
        steps = fed_own_chunk(model, batches(2))
    assert_equal_training(steps, fed_in_chunks(reference, batches(2)))
    assert len(set(exchanges)) == 1
    assert exchanges[0] is not cpu_mesh().get_group()


@on_ranks(2, timeout=300)
def test_hooks_of_the_user_and_of_the_optimizer_run():
    model = graphed(mlp())
    seen: list[str] = []
    model.blocks[0].up.weight.register_post_accumulate_grad_hook(lambda param: seen.append(type(param.grad).__name__))
    backward(model, own_chunk(batches(1)[0]))
    assert seen == ["DTensor"]


@on_ranks(2, timeout=300)
def test_a_copy_of_a_model_in_the_mode_runs_eagerly_and_by_itself():
    model = graphed(mlp())
    fed_own_chunk(model, batches(1))
    other = copy.deepcopy(model)
    before = grads_of(model)
    fed_own_chunk(other, batches(1))
    assert not graph_summaries(other)
    assert_same_tensors(grads_of(model), before, "gradient")


@on_ranks(2, timeout=300)
def test_two_models_of_one_class_do_not_run_each_others_graphs():
    references = mlp(), mlp(seed=3)
    models = [fsdp2.compile(fully_shard(mlp(seed=seed), mesh=cpu_mesh()), backend="aot_eager") for seed in (0, 3)]
    for model, reference in zip(models, references, strict=True):
        assert_trains_as(model, reference, batches(2))


class Named(nn.Module):
    """Takes a dict and keywords, and returns a dict; in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(7, 5)

    def forward(self, batch: dict[str, Tensor], *, scale: float) -> dict[str, Tensor]:
        out = self.inner(batch["x"])
        return {"out": out * scale, "mask": batch["mask"]}


@on_ranks(2, timeout=300)
def test_inputs_and_outputs_in_containers_are_cast():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    torch._dynamo.reset()
    model = fsdp2.compile(fully_shard(Named(), mesh=cpu_mesh(), mp_policy=policy), backend="aot_eager")
    x = batches(1)[0]
    result = model({"x": x, "mask": x[:, 0] > 0}, scale=2.0)
    assert (result["out"].dtype, result["mask"].dtype) == (torch.float32, torch.bool)
    weight, bias = model.inner.weight.full_tensor().bfloat16(), model.inner.bias.full_tensor().bfloat16()
    torch.testing.assert_close(result["out"], (F.linear(x.bfloat16(), weight, bias) * 2.0).float())


@on_ranks(2, timeout=300)
def test_a_list_of_modules_that_is_one_unit():
    reference, model = transformer(), transformer()
    fully_shard([model.norm, model.head], mesh=cpu_mesh())
    graphed(model)
    assert_trains_as(model, reference, token_batches(2), ulps=64)


@on_ranks(2, timeout=300)
def test_settings_and_freezes_are_captured_once_each_and_found_again():
    """Nine stages of freezing were one more than the compiler compiles of one function; settings that came back were captured again."""
    torch.manual_seed(0)
    reference = nn.Sequential(*[nn.Linear(7, 7) for _ in range(9)])
    model = graphed(copy.deepcopy(reference))
    for index in range(9):
        assert_trains_as(model, reference, batches(1))
        model[index].requires_grad_(False), reference[index].requires_grad_(False)
    model.requires_grad_(True), reference.requires_grad_(True)
    for after in (False, True, False):
        model.set_reshard_after_forward(after)
        assert_trains_as(model, reference, batches(1))
    assert counters["stats"]["unique_graphs"] == 9 + 2
    assert not counters["recompiles"]


@dataclasses.dataclass
class Unknown:
    out: Tensor
    weight: Tensor


class ReturnsWeight(MLP):
    """Stand-ins have no memory: to return one was a crash at its first use."""

    def __init__(self, kind: type = list) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> object:
        out, weight = super().forward(x), self.last.weight
        return Unknown(out, weight) if self.kind is Unknown else [out, {"weight": weight}, weight[:2]]


@on_ranks(2, timeout=300)
def test_parameters_that_forward_returns():
    torch.manual_seed(0)
    reference = ReturnsWeight()
    model = graphed(copy.deepcopy(reference))
    for each, x in ((reference, batches(1)[0]), (model, own_chunk(batches(1)[0]))):
        out, named, part = each(x)
        (out.square().mean() + named["weight"].square().sum() + part.sum()).backward()
    assert_equal_grads(grads_of(model), grads_of(reference))
    with torch.no_grad():
        torch.testing.assert_close(model(own_chunk(batches(1)[0]))[1]["weight"], reference.last.weight.data)
    unknown = graphed(ReturnsWeight(Unknown))
    with pytest.raises(CompileError, match=r"(?s)returns 1 parameters inside of a Unknown\n  last\.weight"):
        unknown(own_chunk(batches(1)[0]))
    assert unknown(own_chunk(batches(1)[0])).weight.shape == unknown.last.weight.shape


class Weighted(MLP):
    def forward(self, x: Tensor, weight: float) -> Tensor:
        return super().forward(x) * weight


@on_ranks(2, timeout=300)
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # torch's own, of importing inductor
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_float_that_changes_at_each_step_becomes_an_input(backend):
    torch.manual_seed(0)
    reference = Weighted()
    model = graphed(copy.deepcopy(reference), backend)
    x = batches(1)[0]
    for step in range(1, 5):
        torch.testing.assert_close(model(own_chunk(x), 0.1 * step), own_chunk(reference(x, 0.1 * step)), atol=1e-5, rtol=1e-5)
    assert counters["stats"]["unique_graphs"] == 2


@on_ranks(2, timeout=300)
def test_a_compiler_around_the_mode_leaves_it_alone():
    model = graphed(mlp())
    around = torch.compile(model, backend="aot_eager")
    for x in batches(3):
        backward(around, own_chunk(x))
    assert counters["stats"]["unique_graphs"] == 1
    assert sum(counters["graph_break"].values()) <= 1


@on_ranks(2, timeout=300)
def test_parameters_that_are_nobodys_are_told():
    model = graphed(mlp())
    backward(model, own_chunk(batches(1)[0]))
    model.last.adapter = nn.Linear(2, 2)
    with warned_on_rank_0(UserWarning, "2 trainable parameters were registered below FSDPMLP"):
        backward(model, own_chunk(batches(1)[0]))
