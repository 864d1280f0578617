"""What one step launches, and what waits for what, in units of several groups; which parameters are gathered straight into place."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from fsdp2.core.comm.streams import DeviceStreams
from fsdp2.core.group.group_plan import direct_from_nbytes
from fsdp2.core.iteration.backward import Backward
from fsdp2.core.iteration.forward import Forward
from fsdp2.core.iteration.reductions import Reductions
from fsdp2.testing import pretend
from harness import on_ranks
from harness.models import batches, mlp
from harness.pretend_training import SCENARIOS_OF_SEVERAL_GROUPS, train, train_late
from harness.training import assert_same_bits, forward_backward


def launches_of_a_step(name: str) -> dict[str, int]:
    scenario = SCENARIOS_OF_SEVERAL_GROUPS[name]
    shape = scenario.mesh or (dist.get_world_size(),)
    mesh = init_device_mesh("pretend", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    model: Any = scenario.model().to("pretend")
    for module in [*model.blocks, model]:
        fsdp2.fully_shard(module, mesh=mesh, **scenario.options)
    scenario.prepare(model)
    x = batches(1, (8, 7))[0].to("pretend")
    forward_backward(model, x)
    pretend.reset_counts()
    forward_backward(model, x)
    return pretend.launches()


NUM_BLOCKS, NUM_UNITS = 3, 4


@on_ranks(4, device="pretend_model")
@pytest.mark.parametrize("name", SCENARIOS_OF_SEVERAL_GROUPS)
def test_a_unit_of_several_groups_launches_once_a_phase_and_process_group(name):
    # Forward gathers all units; backward all but the root, which stays.
    assert launches_of_a_step(name) == {
        "all_gather": NUM_UNITS + NUM_BLOCKS,
        "reduce_scatter": NUM_UNITS,
        **({"all_reduce": NUM_UNITS} if SCENARIOS_OF_SEVERAL_GROUPS[name].mesh else {}),
    }


@on_ranks(2, device="pretend")
@pytest.mark.parametrize("name", [name for name, each in SCENARIOS_OF_SEVERAL_GROUPS.items() if not each.mesh])
def test_units_of_several_groups_train_bitwise_as_on_the_cpu_in_every_order(name):
    expected = train(SCENARIOS_OF_SEVERAL_GROUPS[name], "cpu")
    for seed in (None, 0, 1):
        assert_same_bits(train_late(seed, SCENARIOS_OF_SEVERAL_GROUPS[name]), expected)


@on_ranks(4, device="pretend_model")
def test_compute_waits_for_no_reduce_scatter_of_the_same_unit():
    """Symptom: the second group's copy-in waited for the first's reduce-scatter, for each counted against the cap of inputs."""
    scenario = SCENARIOS_OF_SEVERAL_GROUPS["several_dtypes"]
    model: Any = scenario.model().to("pretend")
    fsdp2.fully_shard(model, mesh=init_device_mesh("pretend", (4,)))
    x = batches(1, (8, 7))[0].to("pretend")
    forward_backward(model, x)
    pretend.set_order(0)
    with pretend.traced() as ran:
        forward_backward(model, x)
        pretend.synchronize()
    (scatter,) = (index for index, each in enumerate(ran) if "reduce_scatter" in each)
    compute = ran[0].split()[0]
    assert [each for each in ran[scatter:] if each.startswith((f"{compute} op", f"{compute} copy"))] == []


@on_ranks(64, device="pretend_model")
def test_parameters_go_straight_into_place_by_their_size_and_by_that_of_a_ranks_piece():
    """Symptom: at 64 ranks small parameters took more passes over memory than in torch's FSDP2."""
    model = nn.Sequential(nn.Linear(128, 512), nn.Linear(512, 120)).to("pretend")  # 256 and 240 KiB of weights
    fsdp2.fully_shard(model, mesh=init_device_mesh("pretend", (64,)))
    (group,) = model._get_fsdp_state().groups
    assert [param.fqn for param in group.plan.params[: group.plan.num_direct]] == ["0.weight", "1.weight"]
    assert [direct_from_nbytes(ranks) >> 10 for ranks in (2, 8, 64, 512)] == [128, 128, 128, 1024]


@on_ranks(4, device="pretend_model")
def test_at_the_end_of_backward_compute_waits_once_for_each_stream():
    """Symptom: it waited twice for every group."""
    model = mlp().to("pretend")
    for module in [*model.blocks, model]:
        fsdp2.fully_shard(module, mesh=init_device_mesh("pretend", (4,)))
    x = batches(1, (8, 7))[0].to("pretend")
    finish, order = Reductions.finish, DeviceStreams.order
    ordered: list[Any] = []

    def counted(self: Reductions) -> None:
        with mock.patch.object(DeviceStreams, "order", lambda streams, *args: (ordered.append(args), order(streams, *args))):
            finish(self)

    with mock.patch.object(Reductions, "finish", counted):
        forward_backward(model, x)
    assert len(ordered) == 1


def gathers_when_each_module_begins(phase: type, act: Any) -> list[int]:
    """How many all-gathers have been launched when ``phase`` has begun each module, the root first."""
    seen: list[int] = []
    begin = phase.begin

    def counted(self: Any, *args: Any) -> None:
        begin(self, *args)
        seen.append(pretend.launches().get("all_gather", 0))

    pretend.reset_counts()
    with mock.patch.object(phase, "begin", counted):
        act()
    return seen


@on_ranks(4, device="pretend_model")
@pytest.mark.parametrize(
    ("depth", "forward", "backward"),
    [
        ({}, [2, 3, 4, 5, 6, 6], [1, 2, 3, 4, 5, 5]),
        ({"forward": 3}, [4, 5, 6, 6, 6, 6], [3, 4, 5, 5, 5, 5]),
        ({"forward": 3, "backward": 0}, [4, 5, 6, 6, 6, 6], [0, 1, 2, 3, 4, 5]),
        ({"forward": 0, "backward": 2}, [1, 2, 3, 4, 5, 6], [2, 3, 4, 5, 5, 5]),
        ({"forward": 3, "max_nbytes": 1}, [2, 3, 4, 5, 6, 6], [1, 2, 3, 4, 5, 5]),
    ],
)
def test_as_many_modules_are_gathered_ahead_as_asked_for(depth, forward, backward):
    """The root stays unsharded from forward to backward."""
    model: Any = mlp(num_blocks=5).to("pretend")
    for module in [*model.blocks, model]:
        fsdp2.fully_shard(module, mesh=init_device_mesh("pretend", (4,)))
    model.set_prefetch_depth(**depth)
    x = batches(1, (8, 7))[0].to("pretend")
    forward_backward(model, x)
    losses: list[Any] = []
    assert gathers_when_each_module_begins(Forward, lambda: losses.append(model(x).sum())) == forward
    assert gathers_when_each_module_begins(Backward, lambda: losses[0].backward()) == backward


@on_ranks(4, device="pretend_model")
def test_frozen_modules_that_stay_gathered_take_nothing_of_the_bytes_gathered_ahead():
    model: Any = mlp(num_blocks=5).to("pretend")
    model.blocks[1].requires_grad_(False)
    model.blocks[2].requires_grad_(False)
    for module in [*model.blocks, model]:
        fsdp2.fully_shard(module, mesh=init_device_mesh("pretend", (4,)))
    model.set_frozen_budget(1 << 20)
    of_a_block = fsdp2.inspect.units(model)[1].groups[0].unsharded_nbytes
    model.set_prefetch_depth(forward=5, max_nbytes=of_a_block)
    x = batches(1, (8, 7))[0].to("pretend")
    forward_backward(model, x)
    assert gathers_when_each_module_begins(Forward, lambda: model(x)) == [2, 3, 3, 3, 4, 4]


@on_ranks(1, device="pretend")
@pytest.mark.parametrize("depth", [(-1,), (True,), (1.0,), (1, -1), ("2",)])
def test_a_depth_that_is_no_number_of_modules_is_refused(depth):
    model: Any = fsdp2.fully_shard(mlp().to("pretend"))
    with pytest.raises(ValueError, match="set_prefetch_depth"):
        model.set_prefetch_depth(*depth)
    with pytest.raises(ValueError, match="max_nbytes"):
        model.set_prefetch_depth(2, max_nbytes=0)
