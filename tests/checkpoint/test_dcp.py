"""torch's own checkpoint tools with our modules: state dicts with every option, and DCP's files from anything into anything.

The oracle is the unsharded model, and torch's FSDP2 where it is about being alike.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import Optimizer

from fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from fsdp2.checkpoint.checkpointer import borrow_group, give_back
from harness import cpu_mesh, on_ranks
from harness.checkpoints import trained, whole
from harness.models import MLP, batches, mlp, token_batches, transformer
from harness.sharding import shard_blocks
from harness.training import adamw, assert_same_bits, fed_own_chunk, sgd

FULL = StateDictOptions(full_state_dict=True)
FULL_ON_CPU = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def sharded(model: nn.Module, shard: Callable[..., Any] = fully_shard, **options: Any) -> nn.Module:
    return shard_blocks(model, fully_shard=shard, **options)  # type: ignore[no-any-return]


def both(model: nn.Module, optimizer: Optimizer, **options: Any) -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer, **options), strict=True))


def loaded(model: nn.Module, optimizer: Optimizer, folder: Path, process_group: Any = None) -> None:
    """DCP's files in ``folder`` into both."""
    state = both(model, optimizer)
    dcp.load(state, checkpoint_id=folder, process_group=process_group)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def assert_same(actual: Any, expected: Any, where: str = "state") -> None:
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), where
        for key in expected:
            assert_same(actual[key], expected[key], f"{where}[{key!r}]")
    elif isinstance(expected, Tensor):
        assert isinstance(actual, Tensor), where
        assert torch.equal(actual.cpu(), expected.cpu()), where
    elif isinstance(expected, (list, tuple)):  # torch makes lists of an optimizer's tuples when it distributes a full state
        assert len(actual) == len(expected)
        for pair in zip(actual, expected, strict=True):
            assert_same(*pair, where)
    else:
        assert actual == expected, where


# --- state_dict -------------------------------------------------------------------------------------------------------------------


@on_ranks(2, 3)
def test_state_dict_is_sharded_dtensors_without_communication() -> None:
    """Rank 0 alone takes it, after a forward that leaves the root unsharded: a collective would hang."""
    reference, model = mlp(), sharded(mlp())
    if dist.get_rank() == 0:
        state = model.state_dict()
        assert list(state) == list(reference.state_dict())
        assert all(isinstance(value, DTensor) and value.placements == (Shard(0),) for value in state.values())
    model(batches(1)[0])
    if dist.get_rank() == 1:
        model.state_dict()
    assert_same(whole(model.state_dict()), dict(reference.state_dict()))


@on_ranks(2)
def test_state_dict_of_a_submodule_and_of_one_that_is_unsharded() -> None:
    reference, model = mlp(), sharded(mlp())
    model.blocks[1].unshard()
    assert_same(whole(model.blocks[1].state_dict()), dict(reference.blocks[1].state_dict()))
    assert_same(whole(model.first.state_dict()), dict(reference.first.state_dict()))


# --- get and set, option by option ------------------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("options", [None, StateDictOptions(cpu_offload=True), FULL, FULL_ON_CPU], ids=["", "cpu", "full", "full cpu"])
def test_get_gives_what_it_gives_for_torch_fsdp2(options: StateDictOptions | None) -> None:
    ours, theirs = sharded(mlp()), sharded(mlp(), torch_fully_shard)
    optimizers = trained(ours), adamw(theirs.parameters())
    set_optimizer_state_dict(theirs, optimizers[1], get_optimizer_state_dict(ours, optimizers[0]))
    set_model_state_dict(theirs, get_model_state_dict(ours))
    mine, expected = both(ours, optimizers[0], options=options), both(theirs, optimizers[1], options=options)
    for actual, wanted in zip(mine.values(), expected.values(), strict=True):
        assert {name: type(value) for name, value in actual.items()} == {name: type(value) for name, value in wanted.items()}
        assert_same(whole(actual), whole(wanted))


@on_ranks(2, 3)
@pytest.mark.parametrize("make_optimizer", [adamw, sgd])
def test_full_state_from_rank_0_goes_into_another_sharding(make_optimizer: Any) -> None:
    model = sharded(mlp())
    optimizer = trained(model, make_optimizer)
    state, optimizer_state = get_state_dict(model, optimizer, options=FULL_ON_CPU)
    assert bool(state) is (dist.get_rank() == 0)
    expected = whole(both(model, optimizer))
    other = fully_shard(mlp(seed=4), mesh=cpu_mesh(), shard_placement_fn=lambda param: Shard(param.ndim - 1))
    optimizer = make_optimizer(other.parameters())
    # Not set_state_dict: given {} it skips the model, on these ranks alone, and hangs (torch 2.13, with its own FSDP2 as well).
    set_model_state_dict(other, state, options=FROM_RANK_0)
    set_optimizer_state_dict(other, optimizer, optimizer_state, options=FROM_RANK_0)
    assert_same(whole(both(other, optimizer)), expected)


@on_ranks(2)
def test_full_state_that_every_rank_has_is_distributed() -> None:
    reference = mlp(seed=3)
    model = sharded(mlp())
    set_model_state_dict(model, reference.state_dict(), options=FULL)
    assert_same(whole(model.state_dict()), dict(reference.state_dict()))


@on_ranks(2)
def test_full_state_from_rank_0_goes_into_a_model_on_the_meta_device() -> None:
    reference = mlp(seed=3)
    with torch.device("meta"):
        model = MLP()
    sharded(model)
    model.to_empty(device=cpu_mesh().device_type)
    set_model_state_dict(model, reference.state_dict() if dist.get_rank() == 0 else {}, options=FROM_RANK_0)
    assert_same(whole(model.state_dict()), dict(reference.state_dict()))
    assert_same_bits(fed_own_chunk(model, batches(2)), fed_own_chunk(sharded(mlp(seed=3)), batches(2)))


@on_ranks(2)
def test_strict_refuses_and_not_strict_takes_what_fits() -> None:
    model = sharded(mlp())
    before = whole(model.state_dict())
    state = {name: value for name, value in mlp(seed=3).state_dict().items() if name != "last.bias"} | {"extra": torch.ones(1)}
    with pytest.raises(RuntimeError, match=r"last\.bias|extra"):
        set_model_state_dict(model, dict(state), options=FULL)
    options = StateDictOptions(full_state_dict=True, strict=False)
    found = set_model_state_dict(model, dict(state), options=options)
    assert found.unexpected_keys == ["extra"]
    now = whole(model.state_dict())
    assert torch.equal(now["last.bias"], before["last.bias"])
    assert torch.equal(now["first.weight"], state["first.weight"])


@on_ranks(2)
def test_submodules_and_frozen_parameters() -> None:
    model = sharded(mlp())
    model.blocks[0].requires_grad_(False)
    block = model.blocks[1]
    with pytest.warns(FutureWarning, match="submodules"):
        state = get_model_state_dict(model, submodules={block}, options=StateDictOptions(keep_submodule_prefixes=False))
    assert_same(whole(state), whole(block.state_dict()))
    state = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
    assert not any(name.startswith("blocks.0.") for name in state)
    assert len(state) == len(mlp().state_dict()) - len(block.state_dict())

    optimizer = adamw(model.parameters())
    fed_own_chunk(model, batches(1), optimizer=optimizer)
    full = get_optimizer_state_dict(model, optimizer, options=FULL)
    other = sharded(mlp(seed=2))
    other.blocks[0].requires_grad_(False)
    loaded = adamw(other.parameters())
    set_optimizer_state_dict(other, loaded, copy.deepcopy(full), options=FULL)
    assert_same(whole(get_optimizer_state_dict(other, loaded)), full)


@on_ranks(2)
def test_flattened_optimizer_state_is_set_again() -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model = sharded(mlp())
    optimizer = trained(model)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    assert "state.first.weight.exp_avg" in state
    other = sharded(mlp())
    loaded = adamw(other.parameters())
    set_optimizer_state_dict(other, loaded, state, options=options)
    assert_same(whole(get_optimizer_state_dict(other, loaded)), whole(get_optimizer_state_dict(model, optimizer)))


@on_ranks(2)
@pytest.mark.parametrize("how", ["offloaded", "mixed", "tied"])
def test_state_dicts_of_other_kinds_of_modules(how: str) -> None:
    """Offloaded parameters, bf16 in forward, tied parameters: state is fp32, whole, and goes back."""
    options: dict[str, dict[str, Any]] = {
        "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        "mixed": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)},
    }
    reference = transformer(tied=how == "tied")
    model = sharded(copy.deepcopy(reference), **options.get(how, {}))
    assert_same(get_model_state_dict(model, options=FULL), dict(reference.state_dict()))
    new = transformer(tied=how == "tied", seed=5).state_dict()
    set_model_state_dict(model, dict(new) if dist.get_rank() == 0 else {}, options=FROM_RANK_0)
    assert_same(whole(model.state_dict()), dict(new))
    model(token_batches(1)[0]).float().square().mean().backward()


# --- DCP: from anything into anything -----------------------------------------------------------------------------------------------


def mesh_over(num_ranks: int) -> DeviceMesh:
    """1-D, over the first ranks of 4. Collective: yes, over all."""
    name = cpu_mesh().device_type
    if num_ranks == 4:
        return cpu_mesh()
    if num_ranks == 2:
        return init_device_mesh(name, (2, 2), mesh_dim_names=("other", "shard"))["shard"]
    return init_device_mesh(name, (4, 1), mesh_dim_names=("other", "shard"))["shard"]


def dp_tp(model: nn.Module) -> nn.Module:
    mesh = cpu_mesh(2, 2, names=("dp", "tp"))
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return sharded(model, mesh=mesh["dp"])


KINDS: dict[str, Callable[[nn.Module], tuple[int, nn.Module]]] = {
    "4 ranks": lambda model: (4, sharded(model)),
    "2 ranks": lambda model: (2, sharded(model, mesh=mesh_over(2))),
    "1 rank": lambda model: (1, sharded(model, mesh=mesh_over(1))),
    "hsdp": lambda model: (4, sharded(model, mesh=cpu_mesh(2, 2))),
    "dp x tp": lambda model: (4, dp_tp(model)),
    "kept unsharded": lambda model: (4, sharded(model, reshard_after_forward=False)),
    "resharded to 2": lambda model: (4, sharded(model, reshard_after_forward=2)),
    "dim 1": lambda model: (4, sharded(model, shard_placement_fn=lambda param: Shard(param.ndim - 1))),
    "torch's fsdp2": lambda model: (4, sharded(model, torch_fully_shard)),
    "torch's hsdp": lambda model: (4, sharded(model, torch_fully_shard, mesh=cpu_mesh(2, 2))),
    "unsharded": lambda model: (1, model),
}
PAIRS = [
    ("4 ranks", "2 ranks"),
    ("2 ranks", "hsdp"),
    ("hsdp", "1 rank"),
    ("1 rank", "dp x tp"),
    ("dp x tp", "4 ranks"),
    ("4 ranks", "torch's fsdp2"),
    ("torch's hsdp", "kept unsharded"),
    ("unsharded", "resharded to 2"),
    ("resharded to 2", "unsharded"),
    ("dim 1", "2 ranks"),
]
ALL_PAIRS = [(source, target) for source in KINDS for target in KINDS if (source, target) not in PAIRS]


def built(kind: str, seed: int) -> tuple[bool, nn.Module, Optimizer, Any]:
    """Whether this rank takes part, model, optimizer with a state, and the process group for DCP. Collective: yes, over 4 ranks."""
    ranks, model = KINDS[kind](mlp(13, 2, seed=seed))
    groups = {4: None, 2: mesh_over(2).get_group(), 1: mesh_over(1).get_group()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    here = dist.get_rank() < ranks
    if here:
        model(batches(1)[0]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return here, model, optimizer, groups[ranks]


def from_one_into_the_other(source: str, target: str, folder: Path) -> None:
    here, model, optimizer, process_group = built(source, seed=0)
    if here:
        state = both(model, optimizer)
        dcp.save(state, checkpoint_id=folder, process_group=process_group)
        expected = whole(state)
        logits = model(batches(1)[0]).detach()
    dist.barrier()
    here, model, optimizer, process_group = built(target, seed=1)
    if here:
        loaded(model, optimizer, folder, process_group)
        found = whole(both(model, optimizer))
        if dist.get_rank() == 0:
            assert_same(found, expected)
        again = model(batches(1)[0]).detach()
        if dist.get_rank() == 0:
            torch.testing.assert_close(again, logits)
    dist.barrier()


@on_ranks(4)
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_files_of_one_kind_load_into_another(source: str, target: str, tmp_path: Path) -> None:
    from_one_into_the_other(source, target, tmp_path)


@pytest.mark.full
@on_ranks(4)
@pytest.mark.parametrize(("source", "target"), ALL_PAIRS)
def test_files_of_any_kind_load_into_any_other(source: str, target: str, tmp_path: Path) -> None:
    from_one_into_the_other(source, target, tmp_path)


@on_ranks(2)
@pytest.mark.parametrize("stateful", [True, False])
def test_async_save_holds_what_was_there_when_it_was_called(tmp_path: Path, stateful: bool) -> None:
    model = sharded(mlp())
    optimizer = trained(model)
    expected = whole(model.state_dict())
    process_group = borrow_group(None)  # the thread's collectives must not get between those of training
    state = {"model": model if stateful else model.state_dict()}
    future = dcp.async_save(state, checkpoint_id=tmp_path, process_group=process_group)
    fed_own_chunk(model, batches(1), optimizer=optimizer)
    future.result()
    give_back(process_group, None)
    other = sharded(mlp(seed=1))
    state = {"model": other}
    dcp.load(state, checkpoint_id=tmp_path)  # a module has state_dict and load_state_dict
    assert_same(whole(other.state_dict()), expected)


@on_ranks(2)
def test_file_of_one_rank_holds_its_shards_and_no_more(tmp_path: Path) -> None:
    """Sharded parameters are views of one buffer: written as such, each of 20 entries would bring all of it."""
    model = sharded(mlp(64))
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path)
    nbytes = sum(param.to_local().numel() * 4 for param in model.parameters())
    entries = len(list(model.parameters()))
    assert (tmp_path / f"__{dist.get_rank()}_0.distcp").stat().st_size < nbytes + 3000 * entries


@on_ranks(2)
def test_resume_through_dcp_is_bit_exact(tmp_path: Path) -> None:
    model = sharded(mlp())
    optimizer = trained(model)
    dcp.save(both(model, optimizer), checkpoint_id=tmp_path)
    expected = fed_own_chunk(model, batches(2, seed=8), optimizer=optimizer)

    model = sharded(mlp(seed=1))
    optimizer = adamw(model.parameters())
    loaded(model, optimizer, tmp_path)
    assert_same_bits(fed_own_chunk(model, batches(2, seed=8), optimizer=optimizer), expected)
