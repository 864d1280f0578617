"""Parameters with annotations of the package ``spmd_types``: plain tensors in forward, DTensors on the full mesh between steps."""

from __future__ import annotations

import contextlib
import copy
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import fsdp2
from fsdp2 import DataParallelMeshDims, MixedPrecisionPolicy, ParameterError, fully_shard
from harness import cpu_mesh, needs_torch, on_ranks

spmd = pytest.importorskip("spmd_types")


def axes_of(mesh: DeviceMesh) -> dict[str, object]:
    return {name: spmd.MeshAxis.of(mesh.get_group(name)) for name in mesh.mesh_dim_names}


def types_are_on(mesh: DeviceMesh) -> contextlib.AbstractContextManager:
    """Axes of one rank are none to the package."""
    return spmd.set_current_mesh(frozenset(axis for axis in axes_of(mesh).values() if axis.size() > 1))


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in {"gain": (6,), "shift": (6,), "up": (8, 6), "down": (6, 8)}.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.relu(F.linear(x * self.gain * self.shift, self.up)), self.down)


class Annotated(Whole):
    """This rank's part of ``Whole``: a parameter of each type that there is on tp."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        tp = mesh.get_group("tp")
        self._tp = lambda: tp  # which deepcopy leaves alone
        self.up = nn.Parameter(self.up.detach().chunk(tp.size(), 0)[tp.rank()].clone())
        self.down = nn.Parameter(self.down.detach().chunk(tp.size(), 1)[tp.rank()].clone())
        for name, type_ in {"gain": spmd.I, "shift": spmd.R, "up": spmd.S(0), "down": spmd.S(1)}.items():
            spmd.assert_type(self.get_parameter(name), {tp: type_})

    def forward(self, x: Tensor) -> Tensor:
        x = spmd.convert(x * self.gain, self._tp(), src=spmd.I, dst=spmd.R, backward_options={"op_dtype": torch.float32})
        hidden = torch.relu(F.linear(x * self.shift, self.up))
        return spmd.all_reduce(F.linear(hidden, self.down), self._tp(), src=spmd.P, dst=spmd.I, op_dtype=torch.float32)


MESHES = {
    "tp": ((1, 2), ("dp", "tp"), {"shard": "dp"}),
    "dp": ((2, 1), ("dp", "tp"), {"shard": "dp"}),
    "dp_tp": ((2, 2), ("dp", "tp"), {"shard": "dp"}),
    "tp_dp": ((2, 2), ("tp", "dp"), {"shard": "dp"}),
    "ddp_tp": ((2, 2), ("dp", "tp"), {"replicate": "dp"}),
    "hsdp": ((2, 2, 1), ("rep", "dp", "tp"), {"shard": "dp", "replicate": "rep"}),
    "hsdp_tp": ((2, 1, 2), ("rep", "dp", "tp"), {"shard": "dp", "replicate": "rep"}),
    "dp_cp_tp": ((2, 1, 2), ("dp", "cp", "tp"), {"shard": ("dp", "cp")}),
}


def sharded_on(name: str, **options: object) -> tuple[nn.Module, DeviceMesh, DataParallelMeshDims]:
    shape, names, dims = MESHES[name]
    mesh = cpu_mesh(*shape, names=names)
    dims = DataParallelMeshDims(**dims)
    with types_are_on(mesh):
        model = nn.Sequential(Annotated(mesh))
        fully_shard(model[0], mesh=mesh, dp_mesh_dims=dims, **options)
        fully_shard(model, mesh=mesh, dp_mesh_dims=dims, **options)
    return model, mesh, dims


def own_rows(x: Tensor, mesh: DeviceMesh) -> Tensor:
    for name in mesh.mesh_dim_names:
        if name != "tp":
            x = x.chunk(mesh.get_group(name).size())[mesh.get_local_rank(name)]
    return x.clone()


def backward(model: nn.Module, x: Tensor, mesh: DeviceMesh, checked: bool) -> None:
    from spmd_types.checker import typecheck

    mine = own_rows(x, mesh)
    data = [mesh.get_group(name) for name in mesh.mesh_dim_names if name != "tp"]
    with types_are_on(mesh), typecheck() if checked else contextlib.nullcontext():
        spmd.assert_type(mine, {mesh.get_group("tp"): spmd.I} | dict.fromkeys(data, spmd.V))
        loss = model(mine).square().mean()
        for group in data:
            if group.size() > 1:
                loss = spmd.reinterpret(loss, group, src=spmd.V, dst=spmd.P)
        loss.backward()


def train(name: str, checked: bool, **options: object) -> None:
    model, mesh, _ = sharded_on(name, **options)
    reference = nn.Sequential(Whole())
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, reference)]
    for step in range(3):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        backward(model, x, mesh, checked)
        reference(x).square().mean().backward()
        for (key, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert isinstance(ours, DTensor), key
            assert ours.grad.placements == ours.placements, key
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, msg=lambda m, key=key: f"{key}: {m}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs.detach())


@on_ranks(2)
@pytest.mark.parametrize("name", ["tp", "dp"])
@pytest.mark.parametrize("checked", [False, True], ids=["unchecked", "typechecked"])
def test_training_on_one_axis_equals_the_unsharded_model(name, checked):
    train(name, checked)


@on_ranks(4)
@pytest.mark.parametrize("name", [n if n == "dp_tp" else pytest.param(n, marks=pytest.mark.slow) for n in MESHES if len(n) > 2])
@pytest.mark.parametrize("checked", [pytest.param(False, marks=pytest.mark.slow), True], ids=["unchecked", "typechecked"])
def test_training_on_several_axes_equals_the_unsharded_model(name, checked):
    train(name, checked)


@on_ranks(2)
def test_parameters_kept_after_forward_or_cut_on_another_dim_train_alike():
    train("dp", checked=True, reshard_after_forward=False)
    train("dp", checked=True, shard_placement_fn=lambda param: torch.distributed.tensor.Shard(param.ndim - 1))


@on_ranks(4)
@pytest.mark.slow
def test_resharding_to_fewer_ranks_keeps_annotations():
    mesh = cpu_mesh(4, 1, names=("dp", "tp"))
    with types_are_on(mesh):
        model = nn.Sequential(Annotated(mesh))
        fully_shard(model[0], mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"), reshard_after_forward=2)
    reference = nn.Sequential(Whole())
    x = torch.randn(8, 6)
    torch.distributed.broadcast(x, 0)
    backward(model, x, mesh, checked=True)
    reference(x).square().mean().backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


@on_ranks(2)
@pytest.mark.parametrize("name", ["tp", "dp"])
def test_forward_sees_plain_tensors_with_the_annotations_and_the_sharded_parameters_have_none(name):
    model, mesh, _ = sharded_on(name)
    original = Annotated(mesh)
    assert not any(spmd.has_local_type(param) for param in model.parameters())
    model.unshard()
    model[0].unshard()
    data = {axis: spmd.R for key, axis in axes_of(mesh).items() if key != "tp" and axis.size() > 1}
    for (key, shown), param in zip(model[0].named_parameters(), original.parameters(), strict=True):
        assert type(shown) is nn.Parameter, key
        assert torch.equal(shown, param), key
        assert spmd.get_local_type(shown) == spmd.get_local_type(param) | data, key
        assert spmd.get_partition_spec(shown) == spmd.get_partition_spec(param), key


@on_ranks(2)
def test_materialization_from_the_meta_device_gives_the_values_of_the_unsharded_model():
    mesh = cpu_mesh(1, 2, names=("dp", "tp"))
    model = nn.Linear(6, 4, device="meta")  # this rank's half
    for param in model.parameters():
        spmd.assert_type(param, {mesh.get_group("tp"): spmd.S(0)})
    with types_are_on(mesh):
        fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    torch.manual_seed(1)
    fsdp2.materialize(model)
    torch.manual_seed(1)
    reference = nn.Linear(6, 8)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours.full_tensor(), theirs)
    x = torch.ones(2, 6)
    torch.testing.assert_close(model(x), reference(x).chunk(2, dim=1)[mesh.get_local_rank("tp")])


@on_ranks(2)
def test_what_a_user_hangs_on_a_parameter_stays_there():
    mesh = cpu_mesh(1, 2, names=("dp", "tp"))
    model = Annotated(mesh)
    model.up.no_weight_decay, model.up.tag = None, "up"
    with types_are_on(mesh):
        fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    assert model.up.no_weight_decay is None
    assert model.up.tag == "up"


@on_ranks(2)
def test_a_copy_of_a_sharded_model_trains_alike_and_loads_the_whole_state():
    model, mesh, _ = sharded_on("tp")
    backward(model, torch.ones(8, 6), mesh, checked=True)
    model.zero_grad()
    other = copy.deepcopy(model)
    for param in other.parameters():
        nn.init.zeros_(param)
    other.load_state_dict({f"0.{key}": value for key, value in Whole().state_dict().items()})
    for each in (model, other):
        backward(each, torch.ones(8, 6), mesh, checked=True)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.full_tensor(), two.full_tensor())
        assert torch.equal(one.grad.full_tensor(), two.grad.full_tensor())


@on_ranks(2)
def test_gradients_are_clipped_by_the_norm_of_the_unsharded_model():
    model, mesh, _ = sharded_on("tp")
    reference = Whole()
    backward(model, torch.ones(8, 6), mesh, checked=False)
    reference(torch.ones(8, 6)).square().mean().backward()
    theirs = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    torch.testing.assert_close(fsdp2.clip_grad_norm_(model.parameters(), 0.1), theirs)


def annotations(name: str, mesh: DeviceMesh) -> dict[object, object]:
    dp, tp = (axes_of(mesh)[key] for key in ("dp", "tp"))
    return {
        "no dims": {tp: spmd.I},
        "not R on dp": {dp: spmd.I, tp: spmd.I},
        "nothing on tp": {dp: spmd.R},
        "varying": {tp: spmd.V},
        "partial": {tp: spmd.P},
        "cut on dp": {dp: spmd.S(0), tp: spmd.I},
        "no current mesh": {tp: spmd.I},
    }[name]


REFUSALS = {
    "no dims": "need a full mesh with named axes, and dp_mesh_dims",
    "not R on dp": "has the spmd_types annotation I on the data-parallel axis",
    "nothing on tp": "has no spmd_types annotation on 'tp'",
    "varying": r"has the spmd_types annotation V on 'tp'; expected I, R, or S\(dim\)",
    "partial": "has the spmd_types annotation P on 'tp'",
    "cut on dp": r"has the spmd_types annotation S\(0\) on the data-parallel axis",
    "no current mesh": r"has no spmd_types annotations on \['dp'\], and no spmd_types.set_current_mesh",
}


@on_ranks(4)
@pytest.mark.parametrize(
    "name", [n if n in ("no dims", "not R on dp", "no current mesh") else pytest.param(n, marks=pytest.mark.slow) for n in REFUSALS]
)
def test_what_cannot_be_kept_is_refused_by_name_and_nothing_is_changed(name):
    mesh = cpu_mesh(2, 2, names=("dp", "tp"))
    model = nn.Linear(4, 4, bias=False)
    weight = model.weight
    spmd.assert_type(weight, annotations(name, mesh))
    where = contextlib.nullcontext() if name == "no current mesh" else types_are_on(mesh)
    dims = {"mesh": mesh["dp"]} if name == "no dims" else {"mesh": mesh, "dp_mesh_dims": DataParallelMeshDims(shard="dp")}
    with where, pytest.raises(ParameterError, match=rf"(?s)weight \(4, 4\): .*{REFUSALS[name]}"):
        fully_shard(model, **dims)
    assert model.weight is weight
    assert type(model) is nn.Linear


@on_ranks(4)
@pytest.mark.parametrize("name", ["dp_tp", pytest.param("hsdp_tp", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@needs_torch("2.14", "spmd_types in its FSDP2")
def test_placements_and_gradients_are_those_of_torch(name, dtype):
    import torch.distributed.fsdp as upstream

    ours, mesh, dims = sharded_on(name, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    theirs = nn.Sequential(Annotated(mesh))
    options = {
        "mesh": mesh,
        "dp_mesh_dims": upstream.DataParallelMeshDims(shard=dims.shard, replicate=dims.replicate),
        "mp_policy": upstream.MixedPrecisionPolicy(param_dtype=dtype),
    }
    with types_are_on(mesh):
        upstream.fully_shard(theirs[0], **options)
        upstream.fully_shard(theirs, **options)
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    for model in (ours, theirs):
        backward(model, x, mesh, checked=True)
    for (key, one), two in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert one.placements == two.placements, key
        assert one.shape == two.shape, key
        assert one.grad.placements == two.grad.placements, key
        assert one.grad.dtype == two.grad.dtype, key
        assert torch.equal(one.grad.to_local(), two.grad.to_local()), key


@on_ranks(2)
def test_programs_that_have_loaded_an_old_version_of_the_package_shard_without_annotations():
    """torchtitan 0.3 holds the package at 0.2, where `fully_shard` raised AttributeError: it cannot exempt functions."""
    model = nn.Linear(4, 4)
    expected = copy.deepcopy(model)(torch.ones(2, 4))
    with mock.patch.dict(vars(spmd)):
        del spmd.register_no_typecheck
        fully_shard(model, mesh=cpu_mesh())
        torch.testing.assert_close(model(torch.ones(2, 4)), expected)
