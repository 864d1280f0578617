"""dp_mesh_dims: parameters that are DTensors on a full SPMD mesh, data-parallel axes included."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor

from fsdp2 import ArgumentError, DataParallelMeshDims, MeshError, ParameterError, fully_shard
from harness import cpu_mesh, needs_torch, on_ranks
from harness.sharding import with_reference


class Model(nn.Module):
    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(6, hidden)
        self.down = nn.Linear(hidden, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Nonlinear(Model):
    """A parameter that goes through a nonlinear function: DTensor adds its gradient over all axes, and leaves it Replicate."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.sigmoid(self.log_scale)


def model_of(kind: type[Model] = Model, **options: int) -> Model:
    torch.manual_seed(0)
    return kind(**options)


def distribute(model: nn.Module, mesh: DeviceMesh) -> None:
    """Replicate, except that an axis named tp cuts ``up`` on dim 0 and ``down`` on dim 1."""

    def place(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for key, param in list(module.named_parameters(recurse=False)):
            placements = [Replicate() for _ in range(mesh.ndim)]
            if "tp" in mesh.mesh_dim_names and name in ("up", "down"):
                placements[mesh.mesh_dim_names.index("tp")] = Shard(0 if name == "up" else 1)
            module.register_parameter(key, nn.Parameter(distribute_tensor(param, mesh, placements)))

    distribute_module(model, mesh, place)


def rows(mesh: DeviceMesh, data_axes: tuple[str, ...], seed: int = 0) -> tuple[Tensor, DTensor]:
    """A batch of 8 rows, whole and as a DTensor cut over the data-parallel axes."""
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))
    placements = [Shard(0) if name in data_axes else Replicate() for name in mesh.mesh_dim_names]
    return x, distribute_tensor(x, mesh, placements)


def own_loss(model: nn.Module, x: DTensor) -> Tensor:
    """The mean over this rank's rows, as a plain tensor."""
    return model(x).redistribute(placements=x.placements).to_local().square().mean()


CASES = {
    "fsdp": ((4,), ("dp",), {"shard": "dp"}),
    "ddp": ((4,), ("dp",), {"replicate": "dp"}),
    "fsdp_tp": ((2, 2), ("dp", "tp"), {"shard": "dp"}),
    "tp_first": ((2, 2), ("tp", "dp"), {"shard": "dp"}),
    "ddp_tp": ((2, 2), ("dp", "tp"), {"replicate": "dp"}),
    "hsdp": ((2, 2), ("rep", "dp"), {"shard": "dp", "replicate": "rep"}),
    "two_shard_axes": ((2, 2), ("dp", "cp"), {"shard": ("dp", "cp")}),
    "two_replicate_axes": ((2, 2), ("a", "b"), {"replicate": ("a", "b")}),
    "two_shard_axes_tp": ((2, 1, 2), ("dp", "cp", "tp"), {"shard": ("dp", "cp")}),
    "shard_axes_around_tp": ((2, 2, 1), ("dp", "tp", "cp"), {"shard": ("dp", "cp")}),
    "hsdp_tp": ((2, 1, 2), ("rep", "dp", "tp"), {"shard": "dp", "replicate": "rep"}),
    "hsdp_flat": ((2, 2, 1), ("rep", "dp", "cp"), {"shard": ("dp", "cp"), "replicate": "rep"}),
    "two_replicate_axes_shard": ((2, 1, 2), ("a", "b", "dp"), {"replicate": ("a", "b"), "shard": "dp"}),
}


QUICK = ("fsdp", "ddp", "fsdp_tp", "hsdp", "two_shard_axes_tp", "shard_axes_around_tp")


def case(name: str) -> tuple[DeviceMesh, dict[str, object], tuple[str, ...]]:
    shape, names, dims = CASES[name]
    data = tuple(n for value in dims.values() for n in ((value,) if isinstance(value, str) else value))
    return cpu_mesh(*shape, names=names), dims, data


def check_grads(model: nn.Module, reference: nn.Module, factor: float = 1.0) -> None:
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert ours.grad.placements == ours.placements, name
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad * factor, msg=lambda m, n=name: f"{n}: {m}")


@on_ranks(4)
@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_training_equals_the_unsharded_model(name):
    """Each rank's loss is the mean over its own rows, as in plain FSDP, so that averaging gives the mean over all rows."""
    mesh, dims, data = case(name)
    model, reference = with_reference(model_of())
    distribute(model, mesh)
    fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(**dims))
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours.full_tensor(), theirs)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, reference)]
    for step in range(3):
        x, mine = rows(mesh, data, step)
        own_loss(model, mine).backward()
        reference(x).square().mean().backward()
        check_grads(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (key, ours), (other, theirs) in zip(model.state_dict().items(), reference.state_dict().items(), strict=True):
        assert key == other
        torch.testing.assert_close(ours.full_tensor(), theirs)


@needs_torch("2.12", "DataParallelMeshDims")
@on_ranks(4)
def test_placements_and_meshes_are_those_of_torch_fsdp2():
    for name, (_, _, dims) in CASES.items():
        if name == "shard_axes_around_tp":  # torch takes neighboring axes only
            continue
        if torch.__version__ >= "2.13" or all(isinstance(axes, str) for axes in dims.values()):  # before, torch kept several as several
            check_placements(name)


def check_placements(name: str) -> None:
    from torch.distributed.fsdp import DataParallelMeshDims as TorchDims
    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    mesh, dims, _ = case(name)
    ours, theirs = model_of(), model_of()
    distribute(ours, mesh)
    distribute(theirs, mesh)
    fully_shard(ours, mesh=mesh, dp_mesh_dims=TorchDims(**dims))
    torch_fully_shard(theirs, mesh=mesh, dp_mesh_dims=TorchDims(**dims))
    for (key, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert a.placements == b.placements, key
        assert a.device_mesh == b.device_mesh, key
        assert torch.equal(a.to_local(), b.to_local()), key


@on_ranks(4)
@pytest.mark.parametrize("name", ["ddp", "fsdp_tp", "hsdp", pytest.param("two_shard_axes", marks=pytest.mark.slow)])
@pytest.mark.parametrize("per_rank_loss", [True, False])
def test_a_gradient_that_dtensor_has_added_over_data_axes_is_not_multiplied(name, per_rank_loss):
    """log_scale's gradient arrives Replicate: averaging it as it is made it as many times too large as there are ranks."""
    mesh, dims, data = case(name)
    model, reference = with_reference(model_of(Nonlinear))
    distribute(model, mesh)
    fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(**dims))
    x, mine = rows(mesh, data)
    if per_rank_loss:
        own_loss(model, mine).backward()
    else:  # one loss over the whole mesh: gradients are sums of its terms, not to be averaged
        model.set_gradient_divide_factor(1.0)
        model(mine).square().mean().backward()
    reference(x).square().mean().backward()
    check_grads(model, reference)


@on_ranks(4)
@pytest.mark.parametrize("factor", [None, 1.0])
@pytest.mark.parametrize("name", ["fsdp", "fsdp_tp", "hsdp"])
def test_ranks_that_repeat_one_computation_get_its_gradient(name, factor):
    mesh, dims, _ = case(name)
    model, reference = with_reference(model_of(Nonlinear))
    distribute(model, mesh)
    fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(**dims))
    if factor is not None:
        model.set_gradient_divide_factor(factor)
    x, repeated = rows(mesh, ())
    model(repeated).square().mean().backward()
    reference(x).square().mean().backward()
    check_grads(model, reference)


@on_ranks(4)
@pytest.mark.parametrize("name", ["fsdp", "fsdp_tp", "hsdp", "two_shard_axes_tp"])
def test_clip_grad_norm_equals_the_unsharded_model(name):
    mesh, dims, data = case(name)
    model, reference = with_reference(model_of(hidden=7 if "tp" not in name else 8))
    distribute(model, mesh)
    fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(**dims))
    x, mine = rows(mesh, data)
    own_loss(model, mine).backward()
    reference(x).square().mean().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    torch.testing.assert_close(norm.full_tensor(), nn.utils.clip_grad_norm_(reference.parameters(), 0.01))
    check_grads(model, reference)


@on_ranks(4)
@pytest.mark.parametrize("name", ["fsdp", "two_shard_axes"])
def test_resharding_to_a_smaller_number_of_ranks(name):
    mesh, dims, data = case(name)
    model, reference = with_reference(model_of())
    distribute(model, mesh)
    fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(**dims), reshard_after_forward=2)
    for step in range(2):
        x, mine = rows(mesh, data, step)
        out = model(mine)
        assert isinstance(model.up.weight, DTensor)
        torch.testing.assert_close(model.up.weight.full_tensor(), reference.up.weight.data)
        out.to_local().square().mean().backward()
        reference(x).square().mean().backward()
    check_grads(model, reference)


@on_ranks(2)
def test_what_does_not_fit_is_refused_with_every_offender():
    mesh = cpu_mesh(2, 1, names=("dp", "tp"))
    model = model_of()
    with pytest.raises(ParameterError, match=r"(?s)up\.weight.*plain tensor.*up\.bias.*down\.weight"):
        fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    distribute(model, mesh)
    with pytest.raises(MeshError, match=r"nowhere.*not found in mesh\.mesh_dim_names"):
        fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="nowhere"))
    with pytest.raises(MeshError, match="twice"):
        fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp", replicate="dp"))
    with pytest.raises(ArgumentError, match="at least one"):
        DataParallelMeshDims()
    with pytest.raises(ArgumentError, match="at least one"):
        DataParallelMeshDims(shard=(), replicate=())
    with pytest.raises(MeshError, match="mesh_dim_names"):
        fully_shard(model, mesh=DeviceMesh("cpu", [0, 1]), dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    model.up.weight = nn.Parameter(distribute_tensor(torch.randn(8, 6), mesh, [Shard(0), Replicate()]))
    with pytest.raises(ParameterError, match=r"up\.weight.*Expected Replicate\(\)"):
        fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    other = DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("data", "tensor"))
    with pytest.raises(ParameterError, match="same mesh"):
        fully_shard(model, mesh=other, dp_mesh_dims=DataParallelMeshDims(shard="data"))
