"""Private names of torch's FSDP2, used as the projects that read them use them (docs/clients.md)."""

from __future__ import annotations

import contextlib
from abc import ABC

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable_state import _get_module_state, _module_state_mapping
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard import _fully_shard as definitions
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_init import _get_post_forward_mesh_info

import fsdp2
from fsdp2.errors import ArgumentError
from harness import cpu_mesh, on_ranks
from harness.sharding import shard_blocks, with_reference


def sharded(**kwargs) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model, whole = with_reference(nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.GELU()) for _ in range(3)]))
    kwargs.setdefault("mesh", cpu_mesh(dist.get_world_size()))
    for block in model:
        fsdp2.fully_shard(block, **kwargs)
    return fsdp2.fully_shard(model, **kwargs), whole


def assert_trains_alike(model: nn.Module, whole: nn.Module) -> None:
    x = torch.ones(2, 6)
    model(x).square().sum().backward()
    whole(x).square().sum().backward()
    for param, expected in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), expected.grad)


@on_ranks(2)
def test_parameters_stay_after_forward_when_no_mesh_is_written_for_then():
    model, whole = sharded()
    for keeps in (True, False):
        for module in model.modules():  # verl
            if isinstance(module, fsdp2.FSDPModule):
                state = module._get_fsdp_state()
                state._auto_reshard_after_forward = False
                if group := state._fsdp_param_group:
                    group.post_forward_mesh_info = _get_post_forward_mesh_info(not keeps, group.mesh_info)
                    assert (group.post_forward_mesh_info is None) is keeps
        model(torch.ones(2, 6))
        assert model[0]._get_fsdp_state()._fsdp_param_group.is_unsharded is keeps
        assert model[0]._get_fsdp_state()._fsdp_param_group.is_sharded is not keeps
        model.reset_iter_state()
        assert_trains_alike(model, whole)
        model.zero_grad()
        whole.zero_grad()


@pytest.mark.slow
@on_ranks(4)
def test_a_smaller_mesh_for_after_forward_is_written():
    model, whole = sharded()
    smaller = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))["inner"]
    for module in (*model, model):
        if group := module._get_fsdp_state()._fsdp_param_group:
            group.post_forward_mesh_info = FSDPMeshInfo(smaller, shard_mesh_dim=0)
            assert group.post_forward_mesh_info.shard_mesh_size == 2
    model(torch.ones(2, 6))
    assert model[0][0].weight.to_local().shape == (3, 6)
    model.reset_iter_state()
    assert_trains_alike(model, whole)


class Tiled(torch.autograd.Function):
    """One backward for each half of the input, as tiled MLPs do it."""

    @staticmethod
    def forward(ctx, x, run, owner):
        ctx.run, ctx.owner = run, owner
        ctx.save_for_backward(x)
        with torch.no_grad():
            return torch.cat([run(part) for part in x.chunk(2)])

    @staticmethod
    def backward(ctx, gradient):
        with not_resharding(ctx.owner()):
            parts = [part.detach().requires_grad_() for part in ctx.saved_tensors[0].chunk(2)]
            for part, incoming in zip(parts, gradient.chunk(2), strict=True):
                with torch.enable_grad():
                    output = ctx.run(part)
                torch.autograd.backward(output, incoming)
        return torch.cat([part.grad for part in parts]), None, None


@contextlib.contextmanager
def not_resharding(module):
    if module is None:
        yield
        return
    group = module._get_fsdp_state()._fsdp_param_group
    before = group.reshard_after_backward
    module.set_reshard_after_backward(False, recurse=False)
    assert not group.reshard_after_backward
    try:
        yield
    finally:
        module.set_reshard_after_backward(before, recurse=False)
        module.reshard()


class TiledBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.outer = nn.Linear(6, 6)

    def forward(self, x):
        return self.outer(Tiled.apply(x, self.inner, self.owner))

    def owner(self):
        owners = [each for each in list(_module_state_mapping) if isinstance(each, fsdp2.FSDPModule) and self in each.modules()]
        return min(owners, key=lambda each: len(list(each.modules())), default=None)


@on_ranks(2)
def test_backward_in_tiles_keeps_the_parameters_between_them():
    model, whole = with_reference(nn.Sequential(TiledBlock(), TiledBlock()), shard_blocks, mesh=cpu_mesh(2))
    x = torch.randn(4, 6, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    model(x).square().sum().backward()
    whole(y).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    for param, expected in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), expected.grad)


@on_ranks(2)
def test_what_is_only_read():
    policy = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, _ = sharded(mp_policy=policy)
    block = model[0]
    state = block._get_fsdp_state()
    assert state is _get_module_state(block) is fsdp2.fully_shard.state(block)
    assert state._mp_policy.param_dtype is torch.bfloat16
    state._lazy_init()
    group = state._fsdp_param_group
    assert [param.sharded_param for param in group.fsdp_params] == list(block.parameters())
    assert group.fsdp_params[0]._module_info.module is block[0]
    assert group.fsdp_params[0]._module_info.param_name == "weight"
    assert group._reduce_dtype is torch.float32
    assert (group.gradient_divide_factor, group.force_sum_reduction_for_comms) == (None, False)
    block.set_gradient_divide_factor(1.0)
    assert group.gradient_divide_factor == 1.0
    assert isinstance(group.mesh_info, FSDPMeshInfo)
    assert group.mesh_info.shard_mesh_size == 2
    assert model._get_fsdp_state()._fsdp_param_group is None
    with pytest.raises(AttributeError):
        _ = group.fsdp_params[0].unsharded_param
    handle = block.unshard(async_op=True)
    assert group._all_gather_result is not None
    handle.wait()
    assert group._all_gather_result is None
    assert group.fsdp_params[0].unsharded_param is block[0].weight
    group._training_state = TrainingState.IDLE  # before a model is moved to the host for a while
    block.reshard()
    with pytest.raises(ArgumentError, match="IDLE"):
        group._training_state = TrainingState.FORWARD
    context = state._comm_ctx
    assert context.all_gather_state is None
    assert context.all_gather_stream == torch.cpu.current_stream()
    assert context is state._comm_ctx
    assert context is not model[1]._get_fsdp_state()._comm_ctx
    fsdp2.share_comm_ctx([model[0], model[1]])
    assert model[0]._get_fsdp_state()._comm_ctx is model[1]._get_fsdp_state()._comm_ctx


@on_ranks(2)
def test_parameters_on_two_meshes_are_two_groups():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.float64))
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    other = fsdp2.ShardPlacementResult(None, mesh)
    fsdp2.fully_shard(model, mesh=cpu_mesh(2), shard_placement_fn=lambda param: other if param is model[0].bias else None)
    state = model._get_fsdp_state()
    groups = state._fsdp_param_groups
    assert [len(group.fsdp_params) for group in groups] == [3, 1]
    assert isinstance(groups[1].mesh_info, HSDPMeshInfo)
    with pytest.raises(ArgumentError, match="_fsdp_param_groups"):
        _ = state._fsdp_param_group


class AbstractBlock(ABC, nn.Linear):
    pass


@on_ranks(2)
def test_a_subclass_put_in_the_place_of_torchs_mixin_is_a_base_of_what_is_sharded():
    original = definitions.FSDPModule

    class FSDPModuleABC(ABC, original):
        def told(self):
            return "told"

    blocks = [AbstractBlock(4, 4), AbstractBlock(4, 4)]
    definitions.FSDPModule = FSDPModuleABC
    try:
        fsdp2.fully_shard(blocks[0], mesh=cpu_mesh(2))
    finally:
        definitions.FSDPModule = original
    fsdp2.fully_shard(blocks[1], mesh=cpu_mesh(2))
    assert blocks[0].told() == "told"
    assert not hasattr(blocks[1], "told")
    for block in blocks:
        assert isinstance(block, (fsdp2.FSDPModule, original))
        block(torch.ones(2, 4)).sum().backward()
