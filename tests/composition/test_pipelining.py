"""Pipeline stages that are sharded: every schedule gives the gradients of the unsharded model that saw all of the data.

4 ranks are 2 stages times 2 data-parallel ranks; each data-parallel rank splits its rows into micro-batches.
"""

import contextlib
import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.distributed.pipelining as pp
from torch import nn

import fsdp2
from fsdp2 import MixedPrecisionPolicy, fully_shard, set_semantics
from harness import cpu_mesh, device_type, needs_torch, on_ranks
from harness.models import Block
from harness.sharding import shard_blocks, with_reference
from harness.training import assert_equal_grads, sgd

DIM = 6
NUM_MICROBATCHES = 4


def whole_model(num_blocks=4):
    torch.manual_seed(0)
    return nn.Sequential(*(Block(DIM) for _ in range(num_blocks)))


def loss_of(output, target):
    return (output - target).square().mean()


def stages_of(model, mesh, per_rank, v_shaped, shard=fully_shard, **options):
    """This rank's stages; each is a slice of ``model``, all of its blocks units of their own."""
    pp_mesh, dp_mesh = mesh["pp"], mesh["dp"]
    rank, num_stages = pp_mesh.get_local_rank(), pp_mesh.size() * per_rank
    indices = [rank, num_stages - 1 - rank] if v_shaped else range(rank, num_stages, pp_mesh.size())
    length = len(model) // num_stages
    stages = []
    for index in indices:
        submodule = copy.deepcopy(model[index * length : (index + 1) * length])
        for block in submodule:
            shard(block, mesh=dp_mesh, **options)
        shard(submodule, mesh=dp_mesh, **options)
        stages.append(pp.PipelineStage(submodule, index, num_stages, torch.device("cpu"), group=pp_mesh.get_group()))
    return stages, length


def first_messages() -> contextlib.AbstractContextManager[object]:
    """In torch 2.11 every stage first sends something to both neighbors, also to one on its own rank, which gloo cannot."""
    if torch.__version__ >= "2.12" or device_type() != "cpu":
        return contextlib.nullcontext()
    return mock.patch.object(pp.PipelineStage, "_get_init_p2p_neighbors_ops", return_value=[])


SCHEDULES = {
    "gpipe": (pp.ScheduleGPipe, 1),
    "1f1b": (pp.Schedule1F1B, 1),
    "interleaved-1f1b": (pp.ScheduleInterleaved1F1B, 2),
    "looped-bfs": (pp.ScheduleLoopedBFS, 2),
    "zero-bubble": (pp.ScheduleInterleavedZeroBubble, 2),
    "zbv": (pp.ScheduleZBVZeroBubble, 2),
    "dual-pipe-v": (pp.ScheduleDualPipeV, 2),
}


@on_ranks(4)
@pytest.mark.parametrize(
    ("name", "after"),
    [(name, after) for name in SCHEDULES for after in (True, False)],
)
def test_gradients_equal_those_of_the_unsharded_model(name, after):
    make_schedule, per_rank = SCHEDULES[name]
    mesh = cpu_mesh(2, 2, names=("pp", "dp"))
    reference = whole_model()
    stages, length = stages_of(reference, mesh, per_rank, name in ("zbv", "dual-pipe-v"), reshard_after_forward=after)
    schedule = make_schedule(stages if per_rank > 1 else stages[0], NUM_MICROBATCHES, loss_fn=loss_of)
    params = [param for stage in stages for param in stage.submod.parameters()]
    optimizers = [sgd(reference.parameters()), sgd(params)]
    is_first, is_last = any(s.is_first for s in stages), any(s.is_last for s in stages)
    for step in range(3):
        torch.manual_seed(step)
        x, target = torch.randn(2, 16, DIM).unbind()
        own = slice(8 * mesh["dp"].get_local_rank(), 8 * mesh["dp"].get_local_rank() + 8)
        losses = []
        with first_messages():
            schedule.step(*([x[own]] if is_first else []), target=target[own] if is_last else None, losses=losses if is_last else None)
        loss = loss_of(reference(x), target)
        loss.backward()
        if is_last:
            total = torch.stack(losses).mean().detach()
            dist.all_reduce(total, group=mesh["dp"].get_group())
            torch.testing.assert_close(total / 2, loss.detach())
        for stage in stages:
            first = stage.stage_index * length
            wanted = reference[first : first + length]
            assert_equal_grads(
                {key: param.grad for key, param in stage.submod.named_parameters()},
                {key: param.grad for key, param in wanted.named_parameters()},
                f"step {step}: gradient",
            )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize(
    "name", ["zero-bubble", *(pytest.param(name, marks=pytest.mark.slow) for name in ("zbv", "dual-pipe-v", "1f1b"))]
)
def test_gradients_computed_in_bf16_add_up_in_fp32_over_the_micro_batches_of_every_schedule(name):
    """As torch 2.15 has it. Symptom: 2e-3 off, where weights are differentiated apart before the first whole backward."""
    make_schedule, per_rank = SCHEDULES[name]
    mesh = cpu_mesh(2, 1, names=("pp", "dp"))
    reference = whole_model().bfloat16()
    for param in reference.parameters():
        param.grad_dtype = torch.float32
    options = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16), "reshard_after_forward": False}
    set_semantics("2.15")
    try:
        stages, length = stages_of(whole_model(), mesh, per_rank, name in ("zbv", "dual-pipe-v"), **options)
    finally:
        set_semantics("torch")
    schedule = make_schedule(stages if per_rank > 1 else stages[0], NUM_MICROBATCHES, loss_fn=loss_of)
    is_first, is_last = any(s.is_first for s in stages), any(s.is_last for s in stages)
    torch.manual_seed(0)
    x, target = torch.randn(2, 8, DIM).unbind()
    with first_messages():
        schedule.step(*([x] if is_first else []), target=target if is_last else None, losses=[] if is_last else None)
    for inputs, wanted in zip(x.chunk(NUM_MICROBATCHES), target.chunk(NUM_MICROBATCHES), strict=True):
        loss_of(reference(inputs.bfloat16()), wanted).backward()
    for stage in stages:
        first = stage.stage_index * length
        for (key, param), wanted in zip(stage.submod.named_parameters(), reference[first : first + length].parameters(), strict=True):
            torch.testing.assert_close(param.grad.full_tensor(), wanted.grad / NUM_MICROBATCHES, msg=key)


@needs_torch("2.15", "finalize_gradients")
@on_ranks(2)
@pytest.mark.parametrize(
    "name",
    ["zero-bubble", *(pytest.param(name, marks=pytest.mark.slow) for name in ("interleaved-1f1b", "looped-bfs", "zbv", "dual-pipe-v"))],
)
def test_what_schedules_of_torch_2_15_ask_for_is_done_as_by_torch_bit_by_bit(name):
    """Gradients of several steps add up until one finalizes them; gathers run ahead, and reductions beside the next stage."""
    make_schedule, per_rank = SCHEDULES[name]
    mesh = cpu_mesh(2, 1, names=("pp", "dp"))
    gradients = []
    for package in (fsdp2, torch_fsdp):
        stages, _ = stages_of(
            whole_model(), mesh, per_rank, name in ("zbv", "dual-pipe-v"), package.fully_shard, reshard_after_forward=False
        )
        schedule = make_schedule(stages, NUM_MICROBATCHES, loss_fn=loss_of, defer_reduce_grad_wait=True, unshard_lookahead="auto")
        is_first, is_last = any(s.is_first for s in stages), any(s.is_last for s in stages)
        for step in range(3):
            torch.manual_seed(step)
            x, target = torch.randn(2, 8, DIM).unbind()
            given = {"target": target, "losses": []} if is_last else {}
            schedule.step(*([x] if is_first else []), finalize_gradients=step != 1, **given)
        gradients.append([param.grad.full_tensor() for stage in stages for param in stage.submod.parameters()])
    assert all(map(torch.equal, *gradients))


@on_ranks(2)
def test_what_was_accumulated_without_sync_is_reduced_in_a_last_backward_that_does_not_reach_it():
    """Symptom: ``grad`` stayed None. Cause: the end of backward looked only at units that this backward reached."""
    model, reference = with_reference(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), shard_blocks)
    x = torch.randn(4, 3)
    model.set_requires_gradient_sync(False)
    model(x).sum().backward()
    model.set_requires_gradient_sync(True)
    model[1](x).sum().backward()
    reference(x).sum().backward()
    reference[1](x).sum().backward()
    assert_equal_grads(
        {name: param.grad for name, param in model.named_parameters()},
        {name: param.grad for name, param in reference.named_parameters()},
    )
