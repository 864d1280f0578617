"""Parameters with annotations of the package ``spmd_types``: refused by name, as torch refuses them without ``dp_mesh_dims``."""

from __future__ import annotations

import pytest
from torch import nn

from fsdp2 import DataParallelMeshDims, ParameterError, fully_shard
from harness import cpu_mesh, on_ranks


@on_ranks(2)
@pytest.mark.parametrize("dims", [None, DataParallelMeshDims(shard="dp")])
def test_annotated_parameters_are_refused_by_name_and_nothing_is_changed(dims):
    spmd_types = pytest.importorskip("spmd_types")
    mesh = cpu_mesh(1, 2, names=("dp", "tp"))
    model = nn.Linear(4, 4, bias=False)
    weight = model.weight
    spmd_types.assert_type(weight, {spmd_types.MeshAxis.of(mesh.get_group("tp")): spmd_types.I})
    with pytest.raises(ParameterError, match=r"(?s)weight \(4, 4\): has spmd_types annotations"):
        fully_shard(model, mesh=mesh["dp"] if dims is None else mesh, dp_mesh_dims=dims)
    assert model.weight is weight
    assert type(model) is nn.Linear
