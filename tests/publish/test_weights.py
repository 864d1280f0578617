"""``fsdp2.publish`` gives the bits of the unsharded model, and of ``full_tensor()``, whichever way the model is sharded."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import _disable_current_modes

import fsdp2
from fsdp2.errors import ArgumentError, FSDPError, MaterializationError, ParameterError
from fsdp2.publishing.unit_gather import Gathering
from fsdp2.strategy import STRATEGIES
from harness import cpu_mesh, on_ranks
from harness.memory import PeakBytes
from harness.models import batches, mlp, token_batches, transformer
from harness.sharding import with_reference
from harness.subclasses import RowInt8, wrap_weights


class Odd(nn.Module):
    """Sizes that no number of ranks divides, fewer rows than ranks, no elements, frozen and replicated parameters, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3))
        self.row = nn.Parameter(torch.randn(1, 7))
        self.nothing = nn.Parameter(torch.randn(0, 4))
        self.narrow = nn.Parameter(torch.randn(3, 3, dtype=torch.float16))
        self.wide = nn.Parameter(torch.randn(9, dtype=torch.float64))
        self.whole_numbers = nn.Parameter(torch.arange(11, dtype=torch.uint8), requires_grad=False)
        self.frozen = nn.Parameter(torch.randn(4, 2), requires_grad=False)
        self.alone = nn.Parameter(torch.randn(3, 5).t())
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("cache", torch.randn(6), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x


def in_blocks(shard: Callable[..., Any], model: Any, **options: Any) -> Any:
    for block in model.blocks:
        shard(block, **options)
    return shard(model, **options)


def in_one(shard: Callable[..., Any], model: Any, **options: Any) -> Any:
    return shard(model, ignored_params={model.alone}, **options)


def check(model: nn.Module, whole: dict[str, Tensor], case: object, dtype: torch.dtype | None = None, **options: Any) -> None:
    """Names, dtypes, shapes and bits are those of ``whole``, twice, by tensor and by group."""
    weights = fsdp2.publish(model, dtype=dtype, **options)
    cast = {name: each.to(dtype) if dtype is not None and each.is_floating_point() else each for name, each in whole.items()}
    assert {meta.name: (meta.dtype, meta.shape) for meta in weights.metadata()} == {
        name: (each.dtype, tuple(each.shape)) for name, each in cast.items()
    }, case
    for version, taken in enumerate([weights, (named for group in weights.groups() for named in group)], 1):
        got = list(taken)
        assert weights.version == version
        assert [name for name, _ in got] == [meta.name for meta in weights.metadata()], case
        for name, tensor in got:
            assert type(tensor) is Tensor, case
            assert not tensor.requires_grad, case
            assert tensor.dtype == cast[name].dtype, (case, name)
            assert torch.equal(tensor, cast[name]), (case, name, tensor, cast[name])


def full(model: nn.Module) -> dict[str, Tensor]:
    """Each tensor by ``full_tensor()``, ties under their first name."""
    state = model.state_dict()
    names = {name for name, _ in [*model.named_parameters(), *model.named_buffers()]} & state.keys()
    return {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in state.items() if name in names}


SHARDS = {"ours": fsdp2.fully_shard, "torch's": torchs_fully_shard}


def dim_1(param: nn.Parameter) -> Shard | None:
    """torch's FSDP2 refuses uneven shards of another dim than the first."""
    return Shard(1) if param.ndim == 2 and param.shape[1] % dist.get_world_size() == 0 else None


@on_ranks(1, 2, 3)
def test_every_tensor_has_the_bits_of_the_unsharded_model():
    for who, shard in SHARDS.items():
        for make in (mlp, transformer, lambda: transformer(tied=True)):
            reference = make()
            for option in ("dim 0", "dim 1", "kept"):
                model = copy.deepcopy(reference)
                in_blocks(
                    shard,
                    model,
                    mesh=cpu_mesh(),
                    shard_placement_fn=dim_1 if option == "dim 1" else None,
                    reshard_after_forward=option != "kept",
                )
                if option == "kept":
                    model(batches(1)[0] if make is mlp else token_batches(1)[0])
                check(model, full(reference), (who, make, option), torch.bfloat16 if option == "dim 1" else None)


@on_ranks(3)
def test_uneven_shards_of_another_dim():
    reference = mlp()
    options = {"mesh": cpu_mesh(), "shard_placement_fn": lambda param: Shard(param.ndim - 1)}
    check(in_blocks(fsdp2.fully_shard, copy.deepcopy(reference), **options), full(reference), "")


@on_ranks(2, 3)
def test_odd_tensors():
    for who, shard in SHARDS.items():
        torch.manual_seed(0)
        model, reference = with_reference(Odd())
        in_one(shard, model, mesh=cpu_mesh())
        for dtype in (None, torch.bfloat16):
            check(model, full(reference), (who, dtype), dtype)


@on_ranks(4)
def test_every_strategy_and_mesh():
    for strategy, row in STRATEGIES.items():
        model, reference = with_reference(mlp())
        fsdp2.parallelize(model, strategy, wrap=[type(model.blocks[0])], shard_size=2 if row.is_hybrid else None)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(batches(1)[0]).square().mean().backward()
        optimizer.step()
        weights = full(model)
        assert not torch.equal(weights["blocks.0.up.weight"], reference.blocks[0].up.weight), strategy
        check(model, weights, strategy)
        model(batches(1)[0])  # parameters may stay unsharded behind it
        check(model, weights, strategy, torch.bfloat16)
    mesh = cpu_mesh(2, 2)
    for who, shard in SHARDS.items():
        reference = mlp()
        check(in_blocks(shard, copy.deepcopy(reference), mesh=mesh), full(reference), f"hybrid, {who}")


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 9)
        self.down = nn.Linear(9, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


@on_ranks(4)
def test_tensor_parallelism_with_and_without_sharding():
    mesh = cpu_mesh(2, 2, names=("dp", "tp"))
    for who, shard in {**SHARDS, "nobody": None}.items():
        torch.manual_seed(0)
        model, reference = with_reference(nn.Sequential(Feed(), Feed(), nn.Linear(6, 2)))
        for feed in model[:2]:
            parallelize_module(feed, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if shard is not None:
            for each in (*model, model):
                shard(each, mesh=mesh["dp"])
        check(model, full(reference), who)
        check(model, full(reference), who, torch.bfloat16)


# --- names ------------------------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_key_maps_rename_fuse_across_units_and_split():
    reference = mlp(num_blocks=2)
    model = in_blocks(fsdp2.fully_shard, copy.deepcopy(reference), mesh=cpu_mesh())
    state = full(reference)
    up = [state.pop(f"blocks.{index}.up.weight") for index in range(2)]
    state["stack"] = torch.stack([state.pop(f"blocks.{index}.down.weight") for index in range(2)])
    rules = [
        fsdp2.checkpoint.Rename((r"^net\.", ""), (r"^", "net.")),
        fsdp2.checkpoint.Split("both", ["blocks.0.up.weight", "blocks.1.up.weight"], sizes=[len(up[0]), len(up[1])]),
        fsdp2.checkpoint.Unstack("stack", "blocks.#.down.weight"),
    ]
    expected = {f"net.{name}": each for name, each in (state | {"both": torch.cat(up)}).items()}
    check(model, expected, "", key_map=rules)
    check(model, expected, "", torch.bfloat16, key_map=rules)


# --- costs ------------------------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_one_all_gather_a_unit_and_the_next_one_before_the_first_tensor():
    model = in_blocks(fsdp2.fully_shard, mlp(num_blocks=3), mesh=cpu_mesh())
    weights = fsdp2.publish(model)
    calls: Counter[str] = Counter()
    real = getattr(dist, GATHER)

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls["gathers"] += 1
        return real(*args, **kwargs)

    with patch.object(dist, GATHER, counting), patch.object(dist, "all_reduce", None), patch.object(dist, "broadcast", None):
        begun = [(calls["gathers"], len(group)) for group in weights.groups()]
    assert [number for number, _ in begun] == [2, 3, 4, 4]
    assert sum(count for _, count in begun) == len(list(model.parameters()))


GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Inside, gloo's thread, which may keep buffers for a moment longer, gets others."""
    real = getattr(dist, GATHER)

    def gather(output: Tensor, input: Tensor, **how: Any) -> None:
        with _disable_current_modes():
            copy = torch.empty_like(output)
            real(copy, input.clone(), group=how["group"])
            output.copy_(copy)

    with patch.object(dist, GATHER, gather):
        yield


WIDTH = 64
UNIT = (WIDTH * WIDTH + WIDTH) * 4


def equal_units() -> nn.Module:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))
    for each in model:
        fsdp2.fully_shard(each, mesh=cpu_mesh())
    return model


@on_ranks(2)
def test_two_units_of_memory_for_a_loop_that_drops_each_tensor():
    model = equal_units()
    weights = fsdp2.publish(model)
    with apart(), PeakBytes() as memory:
        memory.touch(list(model.parameters()))
        before = memory.peak
        for _, tensor in weights:
            memory.touch(tensor)
    shard_to_send, last_tensor = UNIT // 2, WIDTH * 4
    assert 2 * UNIT <= memory.peak - before <= 2 * UNIT + shard_to_send + 2 * last_tensor + 64


@on_ranks(2)
def test_two_units_on_a_rank_with_a_sink_and_one_on_the_others():
    weights = fsdp2.publish(equal_units())
    begin_as_it_is = Gathering._begin
    for with_sink in ({0, 1}, {1}):
        memory = PeakBytes()

        def sink(stream: Any, memory: PeakBytes = memory) -> None:
            for _, tensor in stream:
                memory.touch(tensor)

        def begin(gathering: Gathering, step: Any, memory: PeakBytes = memory) -> None:
            begin_as_it_is(gathering, step)
            memory.touch(gathering._under_way)

        with apart(), patch.object(Gathering, "_begin", begin):
            weights.send(sink if dist.get_rank() in with_sink else None)
        units = 1 + (dist.get_rank() in with_sink)
        assert UNIT <= memory.peak <= units * (UNIT + WIDTH * 4 + 64), with_sink


# --- what cannot be published ------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_mistakes_raise_on_every_rank_before_a_collective_could_hang():
    model = in_blocks(fsdp2.fully_shard, mlp(num_blocks=1), mesh=cpu_mesh())
    with pytest.raises(FSDPError, match="the model itself"):
        fsdp2.publish(model.parameters())  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="floating-point dtype"):
        fsdp2.publish(model, dtype=torch.int8 if dist.get_rank() == 1 else None)
    with pytest.raises(ArgumentError, match="other ranks"):
        fsdp2.publish(model, dtype=torch.float16 if dist.get_rank() == 1 else None)
    with pytest.raises(ArgumentError, match="cannot undo"):
        fsdp2.publish(model, key_map=[("a", "b")])
    with pytest.raises(ParameterError, match="RowInt8"):
        fsdp2.publish(fsdp2.fully_shard(wrap_weights(mlp(num_blocks=1), RowInt8), mesh=cpu_mesh()))
    with torch.device("meta"):
        empty = mlp(num_blocks=1)
    with pytest.raises(MaterializationError, match=r"first\.weight"):
        fsdp2.publish(fsdp2.fully_shard(empty, mesh=cpu_mesh()))
    check(model, full(model), "still there")
