"""``fsdp2.inspect`` shows the same of a model whether fsdp2 or torch's own FSDP2 has sharded it."""

from __future__ import annotations

import functools
import warnings
from collections import Counter

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fsdp2
from fsdp2 import inspect
from fsdp2.core.group.param import ShardedParam
from fsdp2.core.iteration.module_state import named_units
from harness import cpu_mesh, on_ranks

MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Tied(nn.Module):
    """5 blocks' worth of what can differ: uneven rows, a tie, a frozen parameter, and one that the root keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.blocks[1].bias.requires_grad_(False)

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x).relu()
        return self.head(x)


def shard(way, mesh, **options) -> nn.Module:
    torch.manual_seed(0)
    model = Tied()
    for block in model.blocks:
        way(block, mesh=mesh, **options)
    way(model, mesh=mesh, **options)
    return model


def params_below(model: nn.Module) -> list[ShardedParam]:
    return [param for _, unit in named_units(model) for group in unit.groups for param in group.params]


def said_of(model: nn.Module) -> list[object]:
    return [
        (
            unit.name,
            [type(module).__name__.removeprefix("FSDP") for module in unit.modules],
            unit.reshard_after_forward,
            unit.is_kept_as_root,
            unit.reduces(),
            unit.all_reduces(),
            unit.accumulates(),
            unit.ranks,
            [
                (
                    *(group.name, group.device, group.ranks, group.num_shards, group.num_replicas, group.is_offloaded),
                    *(
                        group.dtype,
                        group.param_dtype,
                        group.reduce_dtype,
                        group.chosen_dtype,
                        group.divide_factor(),
                        group.has_unreduced(),
                    ),
                    *(group.shard_group and dist.get_process_group_ranks(group.shard_group),),
                    *(group.replicate_group and dist.get_process_group_ranks(group.replicate_group),),
                )
                for group in unit.groups
            ],
            sorted(
                (
                    *(param.fqn, param.shape, param.dim, param.num_shards, param.dtype, param.numel, len(param.owners)),
                    *(param.sharded.placements, tuple(param.local.shape), param.local.sum().item()),
                    *(param.piece_of(torch.arange(param.numel).view(param.shape)).flatten().tolist(),),
                    *(None if param.unsharded() is None else tuple(param.unsharded().shape),),
                    *(None if param.grad is None else round(param.grad.double().sum().item(), 4),),
                )
                for group in unit.groups
                for param in group.params
            ),
        )
        for unit in inspect.units(model)
    ]


def kept(model: nn.Module) -> Counter[str]:
    """Bytes by kind, without alignment, which is ours alone."""
    found: Counter[str] = Counter()
    for group in (group for unit in inspect.units(model) for group in unit.groups):
        storages = {storage.data_ptr(): (kind, storage.nbytes()) for kind, storage in group.memory() if storage.nbytes()}
        for kind, nbytes in storages.values():
            found[kind] += nbytes
        share = {"parameters": 1, "unsharded": (group.num_shards or 1) * group.param_dtype.itemsize / group.dtype.itemsize}
        for kind, times in share.items():
            found[kind] -= int(group.padding_nbytes * times) if kind in (each for each, _ in storages.values()) else 0
    return found


class Heard(inspect.Listener):
    def __init__(self) -> None:
        self.collectives: list[object] = []
        self.begun: list[object] = []
        self.num_done = self.num_left = 0

    def issued(self, record, owner, num_ranks):
        if record.unit:
            self.collectives.append((record.kind, record.unit, record.phase, record.dtype, num_ranks))

    def done(self, record):
        self.num_done += bool(record.unit)

    def begins(self, phase, unit):
        self.begun.append((phase, unit))

    def leaves(self):
        self.num_left += 1


def cases():
    if dist.get_world_size() == 2:
        yield "plain", cpu_mesh(2), {}
        yield "mixed, kept", cpu_mesh(2), {"mp_policy": MIXED, "reshard_after_forward": False}
    else:
        yield "replicas", init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")), {"mp_policy": MIXED}
        yield "fewer ranks", cpu_mesh(4), {"reshard_after_forward": 2}


def compare() -> None:
    x = (torch.arange(4) + dist.get_rank()) % 7
    for name, mesh, options in cases():
        ours, theirs = (shard(way, mesh, **options) for way in (fsdp2.fully_shard, fully_shard))
        assert said_of(ours) == said_of(theirs), name
        heard = Heard(), Heard()
        for model, listener in zip((ours, theirs), heard, strict=True):
            undo = inspect.listen(listener)
            model(x)
            undo()
        first, second = kept(ours)["unsharded"], kept(theirs)["unsharded"]
        assert first == second or (name == "fewer ranks" and first and second), name  # which are aligned apart
        for model, listener in zip((ours, theirs), heard, strict=True):
            undo = inspect.listen(listener)
            model(x).square().sum().backward()
            undo()
            model(x)  # nobody hears this one
        first, second = heard
        assert Counter(map(str, first.begun)) == Counter(map(str, second.begun)), name
        kinds = ("all-gather", "reduce-scatter")
        of_kinds = [[each for each in listener.collectives if each[0] in kinds] for listener in heard]
        assert of_kinds[0] == of_kinds[1], (name, of_kinds)
        assert first.num_left == second.num_left == 3, name
        assert second.num_done == len(second.collectives), name
        for model in (ours, theirs):
            for unit in inspect.units(model):
                unit.modules[0].reshard()
        assert said_of(ours) == said_of(theirs), name
        assert kept(ours)["parameters"] == kept(theirs)["parameters"], name


@on_ranks(2)
def test_two_ranks_show_the_same_of_fsdp2_and_of_torchs_fsdp2():
    compare()


@on_ranks(4)
def test_four_ranks_show_the_same_of_replicas_and_of_smaller_meshes():
    compare()


@on_ranks(2)
def test_the_end_of_a_backward_is_told_until_it_is_undone():
    for way in (fsdp2.fully_shard, fully_shard):
        model, ends = shard(way, cpu_mesh(2)), []
        root = inspect.units(model)[0]
        first, second = (root.on_backward_end(functools.partial(ends.append, who)) for who in "ab")
        model(torch.arange(4)).sum().backward()
        first()  # not the last one that was asked for
        model(torch.arange(4)).sum().backward()
        second()
        model(torch.arange(4)).sum().backward()
        assert Counter(ends) == {"a": 1, "b": 2}, way


@on_ranks(2)
def test_summary_and_check_take_a_model_of_torchs_fsdp2():
    ours, theirs = (fsdp2.summary(shard(way, cpu_mesh(2), mp_policy=MIXED)) for way in (fsdp2.fully_shard, fully_shard))
    for one, other in zip(ours.units, theirs.units, strict=True):
        assert (one.name, one.numel, one.dtypes, one.placement, one.after_forward) == (
            *(other.name, other.numel, other.dtypes, other.placement, other.after_forward),
        )
    assert ours.num_ranks == theirs.num_ranks
    model = shard(fully_shard, cpu_mesh(2))
    optimizer = torch.optim.AdamW(list(model.parameters())[1:])
    assert [finding.check for finding in fsdp2.doctor.check(model, optimizer)] == ["optimizer-misses-parameters"]
    with torch.no_grad():
        model(torch.arange(4))  # torch's root stays unsharded
    (found,) = fsdp2.doctor.check(model, torch.optim.AdamW(model.parameters()))
    assert (found.check, found.severity) == ("optimizer-before-sharding", "error")  # it would step the unsharded parameters
    model.reshard()
    assert fsdp2.doctor.check(model, torch.optim.AdamW(model.parameters())).findings == ()


@on_ranks(2)
def test_a_look_at_a_submodule_renames_nothing():
    model = shard(fsdp2.fully_shard, cpu_mesh(2))
    model(torch.arange(4)).sum().backward()
    names = [param.fqn for param in params_below(model)]
    assert [param.fqn for unit in inspect.units(model.blocks[0]) for group in unit.groups for param in group.params] == [
        "weight",
        "bias",
    ]
    fsdp2.summary(model.blocks[0])
    assert [param.fqn for param in params_below(model)] == names
    assert "blocks.0.weight" in names


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).relu()


class Counting(inspect.Listener):
    def __init__(self) -> None:
        self.begun: list[str] = []

    def begins(self, phase: str, unit: str) -> None:
        self.begun.append(f"{phase} {unit}")


@on_ranks(2)
def test_a_listener_that_listens_twice_is_undone_twice():
    model, listener = shard(fsdp2.fully_shard, cpu_mesh(2)), Counting()
    first, second = inspect.listen(listener), inspect.listen(listener)
    first()
    first()
    model(torch.arange(4))
    assert "forward the root" in listener.begun
    second()
    listener.begun.clear()
    model(torch.arange(4))
    assert listener.begun == []


@on_ranks(2)
def test_blocks_of_torchs_fsdp2_compile_whole_while_somebody_listens():
    model, listener = nn.Sequential(Block(), Block()), Counting()
    for block in model:
        block.compile(backend="eager", fullgraph=True)
        fully_shard(block, mesh=cpu_mesh(2))
    fully_shard(model, mesh=cpu_mesh(2))
    undo = inspect.listen(listener)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler looks at gradients of tensors that are no leaves
        model(torch.ones(2, 4)).sum().backward()
    undo()
    assert "forward the root" in listener.begun
    torch.compiler.reset()


def test_states_by_other_keys_than_parameters_are_no_states_of_parameters():
    param = nn.Parameter(torch.ones(4, 3))
    optimizer = torch.optim.AdamW([param])
    param.sum().backward()
    optimizer.step()
    optimizer.state["schedule"] = {"rows": torch.ones(4)}  # type: ignore[index]
    optimizer.state[param]["row"] = torch.ones(4)
    assert [each.shape for each in inspect.state_tensors(optimizer)] == [(4, 3), (4, 3)]
    assert len(inspect.state_tensors(optimizer, of_any_shape=True)) == 5  # the step, too
