"""Which backend carries a collective: asked of the process group for a device type, never read from what the user wrote."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp2 import fully_shard
from fsdp2.core.comm import backends
from fsdp2.core.comm.backends import backend_of
from fsdp2.core.group.group_plan import direct_from_nbytes
from harness import cpu_mesh, on_ranks


@pytest.mark.parametrize("written", [None, "gloo", "cpu:gloo"])
def test_the_backend_of_the_cpu_is_gloo_however_it_was_written(written, tmp_path):
    dist.init_process_group(written, store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        assert backend_of(dist.group.WORLD, "cpu") == "gloo"
        assert backend_of(dist.new_group(), "cpu") == "gloo"
        assert backend_of(None, "cpu") == ""
    finally:
        dist.destroy_process_group()


@on_ranks(2)
def test_a_backend_written_as_a_mixed_string_gathers_and_reduces_as_gloo_does():
    """get_backend returned "cpu:gloo", which no choice of an algorithm knew: the CPU lost its packed gather and its broadcasts."""
    mesh = cpu_mesh()
    assert backend_of(mesh.get_group(), "cpu") == "gloo"
    written = dist.new_group(backend="cpu:gloo")
    assert dist.get_backend(written) == "cpu:gloo"
    model = nn.Linear(300, 300)
    fully_shard(model, mesh=dist.DeviceMesh.from_group(written, "cpu"))
    model(torch.ones(2, 300)).sum().backward()
    group = model._get_fsdp_state().groups[0]
    assert group.plan.unsharded_nbytes > direct_from_nbytes(2)  # so that other backends gather the weight straight into place
    assert group.plan.num_direct == 0
    assert group.gradients.backends == ("gloo", "")
    assert not backends.is_stream_ordered(backend_of(written, "cpu"))
