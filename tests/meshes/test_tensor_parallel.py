"""Tensor, sequence and expert parallelism below fully_shard: training equals the unsharded model on 2-D and 3-D meshes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from fsdp2 import MeshError, MixedPrecisionPolicy, fully_shard, materialize, set_semantics
from harness import cpu_mesh, on_ranks
from harness.sharding import with_reference


def slow(*values: object) -> list[object]:
    """Parameters of breadth, which the quick run leaves out."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


class Block(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)
        self.scale = nn.Parameter(torch.ones(dim))  # a plain tensor among DTensors

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(torch.relu(self.up(self.norm(x))))


def model_of(dim: int = 6, hidden: int = 10, num_blocks: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(dim, hidden) for _ in range(num_blocks)])


def parallelize(block: nn.Module, tp: DeviceMesh, sequence_parallel: bool) -> None:
    if sequence_parallel:
        whole_to_rows = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(0),), use_local_output=False)
        parallelize_module(block.norm, tp, whole_to_rows)
        parallelize_module(block.norm, tp, SequenceParallel(sequence_dim=0))
    # DTensors from up to down, since a local tensor cannot say that its shards are uneven.
    up = ColwiseParallel(input_layouts=Shard(0) if sequence_parallel else Replicate(), use_local_output=False)
    parallelize_module(block, tp, {"up": up, "down": RowwiseParallel()})


def train(model: nn.Module, num_data_ranks: int, data_rank: int, num_steps: int = 3) -> list[dict[str, Tensor]]:
    """Gradients (whole) of each step, of a model that sees the rows of one data-parallel rank."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    steps = []
    for step in range(num_steps):
        x = torch.randn(12, 6, generator=torch.Generator().manual_seed(step))
        model(x.chunk(num_data_ranks)[data_rank]).square().mean().backward()
        steps.append({name: whole(param.grad).clone() for name, param in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    steps.append({name: whole(param.detach()).clone() for name, param in model.named_parameters()})
    return steps


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_same(actual: list[dict[str, Tensor]], expected: list[dict[str, Tensor]], bound: float = 2e-5) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name in theirs:
            torch.testing.assert_close(ours[name], theirs[name], atol=bound, rtol=bound, msg=lambda m, n=name: f"{n}: {m}")


def meshes(shape: tuple[int, ...]) -> tuple[DeviceMesh, DeviceMesh]:
    """Data-parallel and tensor-parallel part of one mesh."""
    if len(shape) == 2:
        mesh = cpu_mesh(*shape, names=("dp", "tp"))
        return mesh["dp"], mesh["tp"]
    mesh = cpu_mesh(*shape, names=("replicate", "shard", "tp"))
    return mesh["replicate", "shard"], mesh["tp"]


def shard(model: nn.Sequential, dp: DeviceMesh, tp: DeviceMesh, sequence_parallel: bool = False, **options: object) -> None:
    for block in model:
        parallelize(block, tp, sequence_parallel)
        fully_shard(block, mesh=dp, **options)
    fully_shard(model, mesh=dp, **options)


def data_rank(dp: DeviceMesh) -> int:
    coordinate = dp.get_coordinate()
    return coordinate[0] if dp.ndim == 1 else coordinate[0] * dp.size(1) + coordinate[1]


@on_ranks(4)
@pytest.mark.parametrize("after", [None, *slow(True, False)])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("shape", [(2, 2), (2, 1, 2), *slow((1, 4), (4, 1), (1, 2, 2))], ids=str)
def test_training_equals_the_unsharded_model(shape, sequence_parallel, after):
    dp, tp = meshes(shape)
    model, reference = with_reference(model_of(), shard, dp, tp, sequence_parallel, reshard_after_forward=after)
    actual = train(model, dp.size(), data_rank(dp))
    assert_same(actual, train(reference, 1, 0))


@on_ranks(4)
def test_parameters_are_dtensors_on_both_meshes_between_steps_and_on_the_tp_mesh_within():
    dp, tp = meshes((2, 2))
    model = model_of(num_blocks=1)
    shard(model, dp, tp)
    block = model[0]
    assert block.up.weight.device_mesh.mesh_dim_names == ("dp", "tp")
    assert str(block.up.weight.placements) == "(_StridedShard(dim=0, sf=2), Shard(dim=0))"
    assert block.down.weight.placements == (Shard(0), Shard(1))
    assert block.down.bias.placements == (Shard(0), Replicate())
    assert block.scale.placements == (Shard(0),)
    seen = []
    block.up.register_forward_pre_hook(lambda module, args: seen.append(module.weight))
    model(torch.randn(3, 6))
    assert isinstance(seen[0], nn.Parameter)
    assert seen[0].device_mesh == tp
    assert seen[0].placements == (Shard(0),)
    assert block.down.bias.grad is None


@on_ranks(4)
@pytest.mark.parametrize("hidden", [7, 1, *slow(3)])
@pytest.mark.parametrize("dim", [None, *slow(1)])
def test_uneven_shards_on_the_dim_that_tensor_parallelism_cut(hidden, dim):
    dp, tp = meshes((2, 2))
    model, reference = with_reference(model_of(hidden=hidden))

    def place(param: nn.Parameter) -> Shard | None:
        return Shard(dim) if dim is not None and param.ndim > dim else None

    shard(model, dp, tp, shard_placement_fn=place)
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours.full_tensor(), theirs), name
    assert_same(train(model, 2, data_rank(dp)), train(reference, 1, 0))


@on_ranks(4)
def test_equals_torch_fsdp2_side_by_side():
    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    dp, tp = meshes((2, 2))
    theirs, ours = model_of(), model_of()
    for model, apply in ((theirs, torch_fully_shard), (ours, fully_shard)):
        for block in model:
            parallelize(block, tp, True)
            apply(block, mesh=dp)
        apply(model, mesh=dp)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert a.placements == b.placements
        assert a.device_mesh == b.device_mesh
        assert torch.equal(a.to_local(), b.to_local())
    assert_same(train(ours, 2, data_rank(dp)), train(theirs, 2, data_rank(dp)), bound=1e-6)
    for a, b in zip(ours.state_dict().items(), theirs.state_dict().items(), strict=True):
        assert a[0] == b[0]
        assert a[1].placements == b[1].placements


@on_ranks(4)
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
def test_mixed_precision(reduce_dtype):
    dp, tp = meshes((2, 2))
    model, reference = with_reference(model_of())
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    shard(model, dp, tp, True, mp_policy=policy)
    seen = []
    model[0].up.register_forward_pre_hook(lambda module, args: seen.append(module.weight))
    actual = train(model, 2, data_rank(dp), num_steps=1)
    assert seen[0].dtype == torch.bfloat16
    assert seen[0]._spec.tensor_meta.dtype == torch.bfloat16
    assert model[0].up.weight.dtype == torch.float32
    assert_same(actual[:1], train(reference, 1, 0, num_steps=1)[:1], bound=3e-2)


@on_ranks(4)
def test_state_dict_round_trip():
    dp, tp = meshes((2, 2))
    reference, model = model_of(hidden=7), model_of(hidden=7)
    shard(model, dp, tp)
    with torch.no_grad():
        for param in reference.parameters():
            param.mul_(1.25)
    state = model.state_dict()
    changed = {
        name: distribute_tensor(value, state[name].device_mesh, [Replicate()] * state[name].device_mesh.ndim).redistribute(
            placements=state[name].placements
        )
        for name, value in reference.state_dict().items()
    }
    model.load_state_dict(changed)
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours.full_tensor(), theirs), name
    assert_same(train(model, 2, data_rank(dp)), train(reference, 1, 0))


@on_ranks(4)
def test_gradient_accumulation_without_communication():
    dp, tp = meshes((2, 2))
    model, reference = with_reference(model_of(), shard, dp, tp, True)
    for step in range(3):
        model.set_requires_gradient_sync(step == 2)
        x = torch.randn(12, 6, generator=torch.Generator().manual_seed(step))
        model(x.chunk(2)[data_rank(dp)]).square().mean().backward()
        reference(x).square().mean().backward()
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, msg=lambda m, n=name: f"{n}: {m}")


@on_ranks(4)
def test_expert_and_tensor_parallelism_on_two_model_axes():
    """Experts cut on dim 0 over ep and on dim 1 or 0 over tp; dp of one rank, and of two where ep or tp has one."""
    for shape in ((1, 2, 2), (2, 2, 1), (2, 1, 2)):
        mesh = cpu_mesh(*shape, names=("dp", "ep", "tp"))
        for on_tp in (Shard(0), Shard(1), Shard(2)):
            torch.manual_seed(0)
            weight = torch.randn(5, 4, 6)

            class Experts(nn.Module):
                def __init__(self, weight: Tensor) -> None:
                    super().__init__()
                    self.weight = nn.Parameter(weight)

                def forward(self, x: Tensor) -> Tensor:
                    return (self.weight * x).sum((1, 2))

            reference = Experts(weight.clone())
            model = Experts(distribute_tensor(weight.clone(), mesh["ep", "tp"], [Shard(0), on_tp]))
            fully_shard(model, mesh=mesh["dp"])
            assert torch.equal(model.weight.full_tensor(), weight)
            x = torch.randn(2, 6)
            mine = x[mesh["dp"].get_local_rank()] if mesh["dp"].size() == 2 else x[0]
            mine = distribute_tensor(mine, mesh["ep", "tp"], [Replicate(), Replicate()])
            model(mine).sum().full_tensor().square().backward()
            losses = [reference(row).sum().square() for row in x[: mesh["dp"].size()]]
            (sum(losses) / len(losses)).backward()
            torch.testing.assert_close(model.weight.grad.full_tensor(), reference.weight.grad)


@on_ranks(4)
def test_a_mesh_of_another_root_is_refused():
    from torch.distributed.device_mesh import init_device_mesh

    _, tp = meshes((2, 2))
    other = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    block = model_of(num_blocks=1)[0]
    parallelize(block, tp, False)
    with pytest.raises(MeshError, match=r"up\.weight.*DTensor"):
        fully_shard(block, mesh=other)


@on_ranks(4)
def test_materialization_from_the_meta_device_gives_the_values_of_the_unsharded_model():
    dp, tp = meshes((2, 2))
    reference = model_of(hidden=7)
    with torch.device("meta"):
        model = nn.Sequential(*[Block(6, 7) for _ in range(2)])
    shard(model, dp, tp)
    torch.manual_seed(0)
    materialize(model)
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours.full_tensor(), theirs), name
    assert_same(train(model, 2, data_rank(dp)), train(reference, 1, 0))


@on_ranks(4)
def test_checkpoints_of_torch_are_whole_and_load_on_another_mesh(tmp_path):
    dp, tp = meshes((2, 2))
    reference, model = model_of(hidden=7), model_of(hidden=7)
    shard(model, dp, tp)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    for name, value in full.items():  # on rank 0 only
        assert torch.equal(value, reference.state_dict()[name]), name
    plain = model_of(hidden=7)
    with torch.no_grad():
        for param in plain.parameters():
            param.add_(1)
    fully_shard(plain, mesh=cpu_mesh())
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path)
    state = plain.state_dict()
    dcp.load({"model": state}, checkpoint_id=tmp_path)
    plain.load_state_dict(state)
    for (name, ours), theirs in zip(plain.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours.full_tensor(), theirs), name
    # Cut evenly, for torch's distribute_tensor cannot cut the same dim twice otherwise.
    reference, model = model_of(hidden=8, dim=8), model_of(hidden=8, dim=8)
    shard(model, dp, tp)
    set_model_state_dict(
        model, {name: value + 1 for name, value in reference.state_dict().items()}, options=StateDictOptions(full_state_dict=True)
    )
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours.full_tensor(), theirs + 1), name


@on_ranks(4)
@pytest.mark.parametrize("size", [2])
def test_resharding_to_fewer_ranks_beside_model_axes(size):
    """torch refuses this for DTensors. The mesh is 4 x 1, so that there is something to reshard on 4 ranks."""
    dp, tp = meshes((4, 1))
    model, reference = with_reference(model_of(hidden=7), shard, dp, tp, reshard_after_forward=size)
    model(torch.randn(3, 6).requires_grad_())
    between = model[0].up.weight
    assert between.device_mesh.shape == (4 // size, size, 1)
    assert torch.equal(between.full_tensor(), reference[0].up.weight)
    model.reset_iter_state()
    assert_same(train(model, 4, data_rank(dp)), train(reference, 1, 0))


@on_ranks(8)
@pytest.mark.slow
def test_all_of_it_on_eight_ranks():
    """dp x tp with resharding to two of four; replicate x shard x tp; dp x ep x tp with both model axes on one dim."""
    for shape, after in (((4, 2), 2), ((2, 2, 2), True)):
        dp, tp = meshes(shape)
        model, reference = with_reference(model_of(hidden=9), shard, dp, tp, True, reshard_after_forward=after)
        assert_same(train(model, 4, data_rank(dp)), train(reference, 1, 0))
    mesh = cpu_mesh(2, 2, 2, names=("dp", "ep", "tp"))
    for rows in (5, 8, 9):
        weight = torch.randn(rows, 3)
        layer = nn.Linear(3, rows, bias=False)
        layer.weight = nn.Parameter(distribute_tensor(weight, mesh["ep", "tp"], [Shard(0), Shard(0)]))
        fully_shard(layer, mesh=mesh["dp"])
        assert torch.equal(layer.weight.full_tensor(), weight)


@on_ranks(2)
@pytest.mark.parametrize(
    ("semantics", "reduce_dtype", "expected"),
    [("2.15", None, 1 + 1 / 256), ("2.15", torch.bfloat16, 1.0), ("2.13", None, 1.0), ("2.15", torch.float32, 1 + 1 / 256)],
)
def test_terms_on_model_axes_are_added_up_in_the_dtype_that_gradients_are_reduced_in(semantics, reduce_dtype, expected):
    """torch 2.15 widens a gradient before it is reduced over model axes; it was rounded there: 1 + 1/256 is 1 in bf16."""
    mesh = cpu_mesh(1, 2, names=("dp", "tp"))
    model = nn.Module()
    model.weight = nn.Parameter(distribute_tensor(torch.ones(4), mesh["tp"], [Replicate()]))
    model.forward = lambda x: (model.weight * x).sum().full_tensor()
    set_semantics(semantics)
    try:
        fully_shard(model, mesh=mesh["dp"], mp_policy=MixedPrecisionPolicy(torch.bfloat16, reduce_dtype, cast_forward_inputs=False))
    finally:
        set_semantics("torch")
    x = torch.full((1, 4), 1.0 if mesh.get_local_rank("tp") == 0 else 1 / 256, dtype=torch.bfloat16)
    model(DTensor.from_local(x, mesh["tp"], [Shard(0)])).backward()
    assert torch.equal(model.weight.grad.full_tensor(), torch.full((4,), expected))
