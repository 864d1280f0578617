"""``apply_activation_checkpointing``: less is saved, what is computed stays, and one gather serves recomputation and backward."""

from __future__ import annotations

import copy
import functools
import inspect
import io
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import fsdp2
from fsdp2 import ActivationCheckpointPolicy, apply_activation_checkpointing, fully_shard
from fsdp2.activations import HEAVY_OPS
from fsdp2.core.group.all_gather import Gather
from fsdp2.wrap import by_class, by_name
from harness import cpu_mesh, on_ranks
from harness.models import MLP, Block, batches, mlp
from harness.sharding import shard_blocks, with_reference
from harness.training import assert_same_bits, assert_trains_bitwise_as, fed_in_chunks, fed_own_chunk, forward_backward

POLICIES = {
    "full": "full",
    "every": ActivationCheckpointPolicy(every=2),
    "class": [Block],
    "ops": ActivationCheckpointPolicy("auto", save_ops=[*HEAVY_OPS, torch.ops.aten.tanh]),
    "budget": ActivationCheckpointPolicy(max_nbytes=2500),  # some of the four
}


class DroppingBlock(Block):
    """A block with dropout, and a count of its forwards."""

    num_forwards = 0

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        DroppingBlock.num_forwards += 1
        return F.dropout(super().forward(x) * scale, 0.3, self.training)


def dropping() -> MLP:
    model = mlp(num_blocks=4)
    torch.manual_seed(0)
    model.blocks = nn.ModuleList(DroppingBlock(10) for _ in range(4))
    return model


def seeded(model: nn.Module, x: Tensor) -> Tensor:
    """An iteration whose random numbers depend on the rows alone."""
    torch.manual_seed(int(x.abs().sum() * 1000))
    return forward_backward(model, x)


@on_ranks(2, 3)
@pytest.mark.parametrize("applied", ["before", "after"])
@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_trains_as_the_plain_model_does_before_and_after_fully_shard(name, applied):
    model, reference = with_reference(dropping())
    keys = list(model.state_dict())
    if applied == "before":
        chosen = apply_activation_checkpointing(model, POLICIES[name])
        shard_blocks(model)
    else:
        shard_blocks(model)
        chosen = apply_activation_checkpointing(model, POLICIES[name])
    assert chosen == [f"blocks.{index}" for index in range(0, 4, 2 if name == "every" else 1)]
    assert list(model.state_dict()) == keys
    DroppingBlock.num_forwards = 0
    steps = fed_own_chunk(model, batches(), iteration=seeded)
    if name == "budget":  # of whose choice there is another test
        assert 8 + 2 * 4 < DroppingBlock.num_forwards < 3 * 8
    else:
        assert DroppingBlock.num_forwards == 3 * (6 if name == "every" else 8)
    assert_same_bits(steps, fed_in_chunks(reference, batches(), iteration=seeded))


@on_ranks(2)
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_one_gather_serves_recomputation_and_backward(is_checkpointed):
    model = shard_blocks(dropping())
    if is_checkpointed:
        apply_activation_checkpointing(model)
    counts: Counter[str] = Counter()
    start = Gather.start

    def counted(self: Any, *args: Any) -> None:
        counts["gathers"] += 1
        return start(self, *args)

    with mock.patch.object(Gather, "start", counted):
        for x in batches(2):
            counts.clear()
            loss = model(x).square().mean()
            assert counts["gathers"] == 1 + 4
            loss.backward()
            assert counts["gathers"] == 1 + 4 + 4


@on_ranks(2)
def test_keyword_arguments_evaluation_and_copies_go_as_before():
    model = shard_blocks(dropping())
    apply_activation_checkpointing(model)
    block = model.blocks[0]
    x = torch.randn(3, 10)
    DroppingBlock.num_forwards = 0
    with torch.no_grad():
        model.eval()(batches(1)[0])
    assert DroppingBlock.num_forwards == 4
    assert torch.equal(block(x, scale=2.0), 2 * block(x))
    model.train()
    copied = copy.deepcopy(model)
    assert_trains_bitwise_as(copied, dropping(), batches(), iteration=seeded)
    assert copied.blocks[0].forward.__self__.module is copied.blocks[0]
    assert DroppingBlock.num_forwards > 4 + 2 + 3 * 4 * 3  # the copy is checkpointed


def saved_bytes(model: nn.Module, x: Tensor) -> int:
    """Of the storages that autograd keeps of a forward, without those of parameters."""
    parameters = {param.untyped_storage().data_ptr() for param in model.parameters()}
    seen: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = model(x)
    assert kept.requires_grad
    return sum(nbytes for address, nbytes in seen.items() if address not in parameters)


@pytest.mark.parametrize("max_nbytes", [0, 50_000, 75_000, 10**9])
def test_a_budget_is_kept_and_used(max_nbytes):
    model = mlp(num_blocks=4)
    x = torch.randn(256, 7)
    of_blocks = saved_bytes(model, x) - saved_bytes(nn.Sequential(model.first, model.last), x)
    each = of_blocks / 4
    apply_activation_checkpointing(model, ActivationCheckpointPolicy(max_nbytes=max_nbytes))
    model(x)
    saved = saved_bytes(model, x) - saved_bytes(nn.Sequential(model.first, model.last), x)
    assert saved <= max(max_nbytes, 4 * 256 * 10 * 4)
    assert saved == of_blocks or saved + each > max_nbytes


@pytest.mark.parametrize("way", ["deepcopy", "save"])
def test_a_copy_of_a_model_that_has_measured_keeps_its_budget_too(way):
    """The copies of those that saved everything went on to do so, whatever the copied budget had measured then."""
    model = mlp(num_blocks=4)
    apply_activation_checkpointing(model, ActivationCheckpointPolicy(max_nbytes=75_000))
    for _ in range(2):
        model(torch.randn(2, 7)).sum().backward()
    copied = copy.deepcopy(model) if way == "deepcopy" else saved_and_loaded(model)
    x = torch.randn(256, 7)
    for _ in range(2):
        copied(x)
    assert saved_bytes(copied, x) - saved_bytes(nn.Sequential(copied.first, copied.last), x) <= 75_000


def saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize("name", POLICIES)
def test_a_checkpointed_model_is_saved_whole_and_the_loaded_one_is_checkpointed(name):
    """Pickle looks methods up by their names, and found none that is called "forward of DroppingBlock"; nor does it take operators."""
    model = dropping()
    apply_activation_checkpointing(model, POLICIES[name])
    fsdp2.apply_activation_offload(model, min_nbytes=0)
    seeded(model, batches(1)[0])
    loaded = saved_and_loaded(model)
    DroppingBlock.num_forwards = 0
    seeded(loaded, batches(1)[0])
    assert DroppingBlock.num_forwards == 4 + (2 if name == "every" else 4)
    for param, expected in zip(loaded.parameters(), model.parameters(), strict=True):
        assert torch.equal(param.grad, expected.grad)


@pytest.mark.parametrize("own", [False, True])
def test_the_signature_of_a_forward_is_the_blocks_own(own):
    """Trainers of other libraries read it to find out which columns of a dataset a model takes."""
    model = dropping()
    block = model.blocks[0]
    if own:
        block.forward = functools.partial(block.forward, scale=2.0)
    before = inspect.signature(block.forward)
    apply_activation_checkpointing(model, ActivationCheckpointPolicy(max_nbytes=0))
    fsdp2.apply_activation_offload(model)
    assert inspect.signature(block.forward) == before
    assert list(before.parameters) == ["x", "scale"]


def test_a_budget_checkpoints_everything_again_where_an_input_is_larger_than_those_that_were_measured():
    torch.manual_seed(0)
    model = dropping()
    apply_activation_checkpointing(model, ActivationCheckpointPolicy(max_nbytes=10**9))

    def num_forwards(rows: int) -> int:
        DroppingBlock.num_forwards = 0
        forward_backward(model, torch.randn(rows, 7))
        return DroppingBlock.num_forwards

    assert [num_forwards(rows) for rows in (2, 2, 1, 4, 4, 2)] == [8, 4, 4, 8, 4, 4]


def wrapped_by_torch(model: nn.Module) -> None:
    model.blocks[1] = checkpoint_wrapper(model.blocks[1])


def checkpointed_by_itself(model: nn.Module) -> None:
    model.blocks[1].gradient_checkpointing = True


@pytest.mark.parametrize(
    ("prepare", "policy", "error", "text"),
    [
        (wrapped_by_torch, [Block], fsdp2.ModuleError, "blocks.1._checkpoint_wrapped_module: blocks.1 is checkpointed by other means"),
        (checkpointed_by_itself, "full", fsdp2.ModuleError, "blocks.1: blocks.1 is checkpointed by other means"),
        (apply_activation_checkpointing, by_name("blocks.2"), fsdp2.ModuleError, "has taken blocks.2 before"),
        (apply_activation_checkpointing, by_name(r"blocks.2.up"), fsdp2.ModuleError, "blocks.2.up: .* has taken blocks.2 before"),
        (lambda model: None, by_class(Block, nn.Linear), fsdp2.ModuleError, "blocks.0.up: it is inside of blocks.0"),
        (lambda model: None, ActivationCheckpointPolicy(every=0), fsdp2.ArgumentError, "every=0"),
        (lambda model: None, ActivationCheckpointPolicy(save_ops=["mm"]), fsdp2.ArgumentError, "'mm'"),
        (lambda model: None, ActivationCheckpointPolicy(every=2, max_nbytes=1), fsdp2.ArgumentError, "together"),
        (lambda model: None, "some", fsdp2.ArgumentError, "no wrap policy"),
        (lambda model: None, [nn.Conv2d], fsdp2.ArgumentError, "matches no module"),
    ],
)
def test_a_mistake_is_an_error_by_name_and_changes_nothing(prepare, policy, error, text):
    model = mlp()
    prepare(model)
    before = {name: vars(module).get("forward") for name, module in model.named_modules()}
    with pytest.raises(error, match=text):
        apply_activation_checkpointing(model, policy)
    assert {name: vars(module).get("forward") for name, module in model.named_modules()} == before


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_budget_for_blocks_that_are_compiled_with_fullgraph_is_refused(order):
    """The compiler found "no compiled frames"."""
    model = mlp()
    for step in ("budget", "compile") if order == "before" else ("compile", "budget"):
        if step == "budget":
            apply_activation_checkpointing(model, ActivationCheckpointPolicy(max_nbytes=2500))
        else:
            model.blocks[0].compile(fullgraph=True, backend="eager")
    with pytest.raises(fsdp2.OrderError, match="a budget of activations is for Block, which is compiled with fullgraph=True"):
        model(batches(1)[0])


@on_ranks(2)
def test_a_budget_for_modules_with_units_below_is_refused():
    model = mlp()
    for block in model.blocks:
        fully_shard(block.up, mesh=cpu_mesh())
    fully_shard(model, mesh=cpu_mesh())
    apply_activation_checkpointing(model, ActivationCheckpointPolicy([Block], max_nbytes=1))
    with pytest.raises(fsdp2.OrderError, match="below which fully_shard took 1 modules"):
        model(batches(1)[0])


@on_ranks(2, 3)
@pytest.mark.parametrize("policy", ["full", "ops"])
def test_blocks_of_several_units_are_checkpointed_as_one(policy):
    model, reference = with_reference(dropping())
    for block in model.blocks:
        fully_shard(block.up, mesh=cpu_mesh())
        fully_shard(block.down, mesh=cpu_mesh())
    apply_activation_checkpointing(shard_blocks(model), POLICIES[policy])
    assert_trains_bitwise_as(model, reference, batches(), iteration=seeded)
