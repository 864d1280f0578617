"""Programs whose parts don't go together: each is an error of ours, on every rank, that names the parameter and the fix."""

from __future__ import annotations

import inspect
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fsdp2
from fsdp2 import OrderError, fully_shard, user_warnings
from harness import cpu_mesh, on_ranks
from harness.models import batches, mlp
from harness.user_warnings import warned_on_rank_0

X = batches(1)[0]


class WithAdapter(nn.Module):
    """A layer and a low-rank one next to it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(base.in_features, 2), nn.Linear(2, base.out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


@on_ranks(2)
def test_a_wrapper_that_came_after_fully_shard_cannot_take_what_is_sharded():
    model = fully_shard(mlp(), mesh=cpu_mesh())
    model.last = WithAdapter(model.last)
    with pytest.raises(OrderError, match=r"(?s)2 parameters were sharded by an earlier.*base.weight.*base.bias.*fix:"):
        fully_shard(model.last, mesh=cpu_mesh())
    for added in (model.last.down, model.last.up):  # as the error says
        fully_shard(added, mesh=cpu_mesh())
    model(X).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


@on_ranks(2)
def test_a_late_tie_cannot_be_sharded_again():
    model = fully_shard(mlp(), mesh=cpu_mesh())
    other = nn.Linear(10, 5)
    other.weight = model.last.weight
    with pytest.raises(OrderError, match=r"1 parameters were sharded by an earlier"):
        fully_shard(other, mesh=cpu_mesh())
    dist.barrier()


@on_ranks(2)
def test_ddp_does_not_wrap_what_is_sharded_unless_it_is_told_to_ignore_it():
    model = fully_shard(mlp(), mesh=cpu_mesh())
    with pytest.raises(OrderError, match=r"(?s)DistributedDataParallel got a MLP.*fix:"):
        DistributedDataParallel(model)
    assert not hasattr(model, "_ddp_params_and_buffers_to_ignore")
    assert "_ddp_params_and_buffers_to_ignore" not in dict(inspect.getmembers(model))
    model.plain = nn.Linear(2, 2)
    model._ddp_params_and_buffers_to_ignore = [name for name, _ in model.named_parameters() if not name.startswith("plain")]
    DistributedDataParallel(model)


@on_ranks(2)
def test_a_mesh_with_the_name_of_a_model_axis_is_warned_of_once():
    mesh = cpu_mesh(1, 2, names=("dp", "tp"))
    with mock.patch.object(user_warnings, "_told", set()):
        with warned_on_rank_0(UserWarning, r"(?s)takes the mesh \('dp', 'tp'\) as \(replicate, shard\).*fix:") as shown:
            model = mlp()
            for module in (*model.blocks, model):
                fully_shard(module, mesh=mesh)
        assert len(shown) == (dist.get_rank() == 0)
        fully_shard(mlp(), mesh=mesh["dp"])
        fully_shard(mlp(), mesh=cpu_mesh(1, 2, names=("replicate", "shard")))


def test_a_name_that_fsdp2_lacks_points_to_the_right_one():
    for name, meant in (("no_sync", "accumulate"), ("fully_sharded", "fully_shard"), ("clip_grad_norm", "clip_grad_norm_")):
        with pytest.raises(AttributeError, match=f"did you mean {meant!r}"):
            getattr(fsdp2, name)
    with pytest.raises(AttributeError, match=r"has no attribute 'xyzzy'$"):
        fsdp2.xyzzy  # noqa: B018
