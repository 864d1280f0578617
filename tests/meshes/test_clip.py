"""``fsdp2.clip_grad_norm_``: every norm, over parameters of every mix of meshes and placements, as torch's on the unsharded model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp2
from fsdp2 import ArgumentError, CPUOffloadPolicy, ShardPlacementResult, fully_shard
from harness import cpu_mesh, on_ranks
from harness.models import batches, mlp
from harness.sharding import shard_blocks, with_reference
from harness.training import own_chunk

INF = float("inf")
NORMS = [2.0, 1.0, 3.5, 0.5, 0.0, -1.0, INF, -INF]


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check(model: nn.Module, reference: nn.Module, max_norm: float, norm_type: float, foreach: bool | None = None) -> None:
    """Both have the same gradients; afterwards their gradients are clipped."""
    expected = nn.utils.clip_grad_norm_(reference.parameters(), max_norm, norm_type)
    norm = fsdp2.clip_grad_norm_(model.parameters(), max_norm, norm_type, foreach=foreach)
    assert type(norm) is Tensor
    assert norm.shape == ()
    torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        if theirs.grad is None:
            assert ours.grad is None
        else:
            torch.testing.assert_close(whole(ours.grad), theirs.grad, rtol=1e-4, atol=1e-8, msg=lambda text, n=name: f"{n}: {text}")


def give_gradients(model: nn.Module, reference: nn.Module) -> None:
    """The same gradients for both, placed like the parameters; none for the last one."""
    pairs = list(zip(model.parameters(), reference.parameters(), strict=True))
    for number, pair in enumerate(pairs[:-1]):
        for param in pair:
            param.grad = torch.sin(param.detach() * 37 + number)
    for param in pairs[-1]:
        param.grad = None


# --- meshes: each returns a sharded model and the unsharded one ---------------------------------------------------------------------


def one_axis() -> tuple[nn.Module, nn.Module]:
    model = mlp()  # every block has a parameter with one row: shards are empty on all ranks but the first
    return shard_blocks(copy.deepcopy(model)), model


def offloaded() -> tuple[nn.Module, nn.Module]:
    model = mlp()
    return shard_blocks(copy.deepcopy(model), offload_policy=CPUOffloadPolicy()), model


def replicas_of_shards() -> tuple[nn.Module, nn.Module]:
    model = mlp()
    return shard_blocks(copy.deepcopy(model), mesh=cpu_mesh(2, 2)), model


def tensor_parallel() -> tuple[nn.Module, nn.Module]:
    """Some parameters on (dp, tp), among them uneven ones and _StridedShard, the others on dp alone."""
    model, reference = with_reference(mlp())
    # Names that no other test uses: DTensor's caches may answer with an equal mesh of another test's, whose groups are others.
    mesh = cpu_mesh(dist.get_world_size() // 2, 2, names=("clip_dp", "clip_tp"))
    for block in model.blocks:
        parallelize_module(block, mesh["clip_tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return shard_blocks(model, mesh=mesh["clip_dp"]), reference


def mixed_meshes() -> tuple[nn.Module, nn.Module]:
    """Matrices over rows of a grid, replicated over its columns; vectors over all ranks."""
    reference = mlp()
    world, grid = cpu_mesh(names=("dp",)), cpu_mesh(dist.get_world_size() // 2, 2, names=("edp", "ep"))

    def place(param: nn.Parameter) -> object:
        return ShardPlacementResult(Shard(1), grid) if param.ndim == 2 else None

    return shard_blocks(copy.deepcopy(reference), mesh=world, shard_placement_fn=place), reference


def expert_parallel() -> tuple[nn.Module, nn.Module]:
    """Experts are DTensors on ep, sharded over their own data-parallel mesh; the rest is sharded over all ranks; one is plain."""
    torch.manual_seed(0)
    reference = nn.Module()
    reference.gate, reference.experts = nn.Linear(5, 3), nn.Parameter(torch.randn(4, 3, 5))
    reference.ignored, reference.last = nn.Linear(2, 2), nn.Linear(3, 1)
    model = copy.deepcopy(reference)
    world, grid = cpu_mesh(names=("dp",)), cpu_mesh(dist.get_world_size() // 2, 2, names=("edp", "ep"))
    model.experts = nn.Parameter(distribute_tensor(model.experts.detach(), grid["ep"], [Shard(0)]))

    def place(param: nn.Parameter) -> object:
        return ShardPlacementResult(Shard(1), grid["edp"]) if isinstance(param, DTensor) else None

    fully_shard(model, mesh=world, shard_placement_fn=place, ignored_params=set(model.ignored.parameters()))
    return model, reference


CASES: list[Callable[[], tuple[nn.Module, nn.Module]]] = [one_axis, offloaded, tensor_parallel, mixed_meshes, expert_parallel]


@on_ranks(2)
@pytest.mark.parametrize("case", CASES)
def test_every_norm_on_two_ranks(case):
    model, reference = case()
    for norm_type in NORMS:
        give_gradients(model, reference)
        check(model, reference, 0.01, norm_type)
        check(model, reference, 1e6, norm_type, foreach=False)  # nothing to scale any more


@on_ranks(4)
@pytest.mark.parametrize("case", [*CASES[2:], replicas_of_shards])
def test_every_norm_on_four_ranks(case):
    model, reference = case()
    for norm_type in NORMS:
        give_gradients(model, reference)
        check(model, reference, 0.01, norm_type, foreach=True)


@on_ranks(2, 3)
def test_gradients_of_a_backward(world_size):
    model, reference = one_axis()
    x = batches(1)[0]
    for norm_type in (2.0, INF):
        model(own_chunk(x)).square().mean().backward()
        reference(x).square().mean().backward()
        check(model, reference, 0.01, norm_type)
        model.zero_grad()
        reference.zero_grad()


# --- gradients in one buffer ------------------------------------------------------------------------------------------------------


class Branches(nn.Module):
    """One group of three layers, of which a forward uses some."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(5, 5) for _ in range(3)])

    def forward(self, x: Tensor, branches: tuple[int, ...] = (0, 1, 2)) -> Tensor:
        for branch in branches:
            x = self.layers[branch](x)
        return x


def branches(mesh: DeviceMesh | None = None) -> tuple[nn.Module, nn.Module]:
    reference = Branches()
    return fully_shard(copy.deepcopy(reference), mesh=mesh or cpu_mesh()), reference


def backward(models: tuple[nn.Module, nn.Module], *args: object) -> None:
    for model in models:
        model(torch.ones(2, 5), *args).square().sum().backward()


def num_tensors(function: Callable[[], object], name: str) -> int:
    """How many tensors ``function`` gives to ``torch.<name>``."""
    counts = []
    original = getattr(torch, name)
    with mock.patch.object(torch, name, lambda tensors, *args: counts.append(len(tensors)) or original(tensors, *args)):
        function()
    return sum(counts)


@on_ranks(2)
def test_gradients_of_a_group_are_one_tensor_to_the_norm_and_to_the_scaling():
    model, _ = one_axis()
    num_groups = sum(len(module._get_fsdp_state().groups) for module in [*model.blocks, model])
    for name in ("_foreach_norm", "_foreach_mul_"):
        model.zero_grad()
        model(batches(1)[0]).square().mean().backward()
        assert num_tensors(lambda: fsdp2.clip_grad_norm_(model.parameters(), 1.0), name) == num_groups
    assert len(list(model.parameters())) > 2 * num_groups


@on_ranks(2)
def test_a_gradient_that_was_dropped_or_replaced_does_not_count_where_it_was():
    for change in ("drop", "replace", "frozen"):
        models = branches()
        backward(models)
        for model in models:
            param = model.layers[1].weight
            param.grad = None if change == "drop" else param.grad * 3 if change == "replace" else param.grad
        subset = [[*model.layers[0].parameters(), *model.layers[2].parameters()] for model in models]
        if change == "frozen":  # the caller leaves some out
            torch.testing.assert_close(fsdp2.clip_grad_norm_(subset[0], 0.1), nn.utils.clip_grad_norm_(subset[1], 0.1))
        check(*models, 0.01, 2.0)


@on_ranks(2)
def test_gradients_that_came_with_different_backwards_each_count_once():
    models = branches()
    backward(models, (0, 1))
    backward(models)  # the last layer's gradient lies in a new buffer, where those of the others lie too that were added to the old one
    check(*models, 0.01, 2.0)
    for model in models:
        model.zero_grad()
    backward(models, (0, 2))
    check(*models, 0.01, INF)


@on_ranks(2)
def test_a_norm_that_was_nan_does_not_stay_in_a_buffer_that_is_zeroed():
    models = branches()
    backward(models)
    for model in models:
        whole(model.layers[0].bias.grad).fill_(float("nan"))
    models[0].layers[0].bias.grad.to_local().fill_(float("nan"))
    assert fsdp2.clip_grad_norm_(models[0].parameters(), 1.0).isnan()
    for model in models:
        for param in model.parameters():
            param.grad.zero_()
    backward(models)
    check(*models, 0.01, 2.0)


@on_ranks(2)
def test_what_a_hook_writes_between_gradients_does_not_count():
    models = branches(cpu_mesh(2, 1))
    models[0].set_all_reduce_hook(lambda buffer: buffer.view(-1).copy_(torch.where(buffer == 0, torch.full_like(buffer, 5.0), buffer)))
    backward(models)
    check(*models, 0.01, 2.0)


class OfShapes(nn.Module):
    """One group for each dtype of ``shapes``: a list of shapes, or of shapes with a dtype."""

    def __init__(self, shapes: list[object]) -> None:
        super().__init__()
        torch.manual_seed(0)
        drawn = [shape if isinstance(shape[-1], torch.dtype) else (shape, torch.float32) for shape in shapes]
        self.params = nn.ParameterList([torch.randn(shape).to(dtype) for shape, dtype in drawn])

    def forward(self, x: Tensor) -> Tensor:
        return sum((param.to(torch.float64).square() * x).sum() for param in self.params)


NARROW, WIDE = torch.bfloat16, torch.float64
SHAPES: dict[str, list[object]] = {
    "empty first": [(0, 5), (5, 5), (3,)],
    "empty between, of its neighbor's strides": [(5, 5), (0, 5), (5, 5), (7,)],
    "empty last": [(5, 5), (7,), (0,)],
    "several empty ones": [(0,), (0, 5), (4, 5), (3, 0), (0,), (6,), (0, 5)],
    "nothing but empty ones": [(0, 5), (0,)],
    "shards that are empty on some ranks": [(1, 5), (1,), (0,), (1, 5), (5, 5)],
    "several dtypes": [(5, 5), ((0, 5), NARROW), ((5, 5), NARROW), (0,), (7,), ((0,), WIDE), ((3,), WIDE)],
}
CHANGES: dict[str, Callable[[nn.ParameterList], object]] = {
    "as reduced": lambda params: None,
    "the first with elements dropped": lambda params: setattr(first_with_elements(params), "grad", None),
    "the first with elements replaced": lambda params: setattr(
        first_with_elements(params), "grad", first_with_elements(params).grad * 3
    ),
    "empty ones dropped": lambda params: [setattr(param, "grad", None) for param in params if param.numel() == 0],
}


def first_with_elements(params: nn.ParameterList) -> nn.Parameter:
    return next((param for param in params if param.numel() > 0), params[0])


def calls_of_norms(params: nn.ParameterList, norm_type: float, ours: bool) -> list[Tensor]:
    """The gradients' norm and the clipped gradients; each call of ours on its own gradients, torch's once in the place of all."""
    before = [None if param.grad is None else param.grad.clone() for param in params]
    found = []
    for call in ("clip", "clip, one by one", "total", "flat"):
        for param, grad in zip(params, before, strict=True):
            param.grad = grad if grad is None else param.grad.copy_(grad)
        if not ours:  # what has no elements has no norm in torch; a norm in bf16 would be rounded
            there = [param for param in params if param.grad is not None and param.numel() > 0]
            norm = nn.utils.get_total_norm([param.grad.double() for param in there], norm_type)
            nn.utils.clip_grads_with_norm_(there, 0.01, norm)
        elif call == "total":
            norm = fsdp2.get_total_norm([param.grad for param in params if param.grad is not None], norm_type)
        elif call == "flat":
            optimizer = fsdp2.optim.flat(torch.optim.SGD, params, lr=0.0)
            optimizer.step(max_norm=0.01, norm_type=norm_type)
            norm = optimizer.grad_norm
        else:
            norm = fsdp2.clip_grad_norm_(params, 0.01, norm_type, foreach=call == "clip")
        clipped = [] if call == "total" else [whole(param.grad).clone() for param in params if param.grad is not None]
        found += [norm.float(), *clipped]
    return found


@on_ranks(2, 3)
def test_a_parameter_without_elements_changes_no_norm():
    """Two slots began at one offset, and the gradient after the empty one was counted and scaled twice."""
    for name, shapes in SHAPES.items():
        reference = OfShapes(shapes)
        model = fully_shard(copy.deepcopy(reference), mesh=cpu_mesh())
        for change, make in CHANGES.items():
            for norm_type in (2.0, 1.0, INF):
                for each in (model, reference):
                    each.zero_grad()
                    each(torch.ones(())).backward()
                    make(each.params)
                ours, theirs = (calls_of_norms(each.params, norm_type, ours=each is model) for each in (model, reference))
                place = f"{name}, {change}, norm {norm_type}"
                rtol = 1e-2 if name == "several dtypes" else 1e-5  # an average over three ranks is rounded to bf16
                for one, other in zip(ours, theirs, strict=True):
                    torch.testing.assert_close(one, other, rtol=rtol, atol=1e-8, msg=place)


def even_tensor_parallel() -> tuple[nn.Module, nn.Module]:
    """In the buffer of one group lie weights that tp cuts as well, and a bias that tp replicates."""
    torch.manual_seed(0)
    model, reference = with_reference(nn.Sequential(nn.Linear(7, 8), nn.Tanh(), nn.Linear(8, 7), nn.Linear(7, 1)))
    mesh = cpu_mesh(2, 2, names=("even_dp", "even_tp"))
    parallelize_module(model, mesh["even_tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["even_dp"]), reference


@pytest.mark.slow
@on_ranks(4)
@pytest.mark.parametrize("case", [offloaded, even_tensor_parallel, mixed_meshes, replicas_of_shards])
def test_gradients_of_a_backward_on_every_mesh(case):
    model, reference = case()
    for norm_type in (2.0, 1.0, INF):
        for each in (model, reference):
            each.zero_grad()
            each(batches(1)[0]).square().mean().backward()
        check(model, reference, 0.01, norm_type)


# --- placements --------------------------------------------------------------------------------------------------------------------


@on_ranks(4)
def test_a_tensor_counts_once_however_it_is_placed():
    mesh = cpu_mesh(2, 2, names=("a", "b"))
    torch.manual_seed(0)
    tensor = torch.randn(5, 3)
    terms = tensor / 2
    for placements in (
        (Replicate(), Replicate()),
        (Shard(0), Replicate()),
        (Replicate(), Shard(1)),
        (Shard(0), Shard(0)),
        (Shard(1), Shard(0)),
        (Partial(), Shard(1)),
        (Replicate(), Partial()),
    ):
        local = distribute_tensor(terms if Partial() in placements else tensor, mesh, [Replicate()] * 2)
        cut = [Replicate() if placement.is_partial() else placement for placement in placements]
        param = nn.Parameter(distribute_tensor(tensor, mesh, cut))
        local = local.redistribute(placements=cut).to_local().clone()
        param.grad = DTensor.from_local(local, mesh, placements, shape=tensor.shape, stride=tensor.stride(), run_check=False)
        for norm_type in NORMS:
            torch.testing.assert_close(
                fsdp2.get_total_norm([param.grad, tensor], norm_type), nn.utils.get_total_norm([tensor, tensor], norm_type)
            )
        before = fsdp2.clip_grad_norm_(param, 0.5)
        torch.testing.assert_close(before, tensor.norm())
        torch.testing.assert_close(param.grad.full_tensor(), tensor * 0.5 / (tensor.norm() + 1e-6))


@on_ranks(4)
def test_one_all_reduce_for_each_axis_over_which_anything_is_cut():
    calls = []
    for case, expected in ((one_axis, 1), (replicas_of_shards, 1), (tensor_parallel, 2), (mixed_meshes, 2), (expert_parallel, 3)):
        model, reference = case()
        give_gradients(model, reference)
        calls.clear()
        all_reduce = dist.all_reduce
        with mock.patch.object(dist, "all_reduce", lambda *args, f=all_reduce, **kwargs: calls.append(1) or f(*args, **kwargs)):
            fsdp2.clip_grad_norm_(model.parameters(), 1.0)
        assert len(calls) == expected, case.__name__


# --- what is not usual -------------------------------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("norm_type", [2.0, INF, -INF])
@pytest.mark.parametrize("value", [float("nan"), INF])
def test_a_gradient_that_is_not_finite_on_one_rank_is_so_for_all(norm_type, value):
    model, reference = one_axis()
    give_gradients(model, reference)
    grad = torch.randn(5, 10)
    grad[-1] = value  # the last rank's
    param = model.last.weight
    param.grad = distribute_tensor(grad, param.device_mesh, param.placements)
    reference.last.weight.grad = grad
    expected = nn.utils.get_total_norm([param.grad for param in reference.parameters() if param.grad is not None], norm_type)
    norm = fsdp2.get_total_norm([param.grad for param in model.parameters() if param.grad is not None], norm_type)
    torch.testing.assert_close(norm, expected, equal_nan=True)
    if not expected.isfinite():
        with pytest.raises(RuntimeError, match="The total norm of order"):
            fsdp2.clip_grad_norm_(model.parameters(), 1.0, norm_type, error_if_nonfinite=True)


@on_ranks(2)
def test_low_precision_gradients_have_a_norm_in_fp32():
    grad = torch.full((1000,), 100.0, dtype=torch.float16)  # its square overflows
    param = nn.Parameter(distribute_tensor(torch.zeros_like(grad), cpu_mesh(), [Shard(0)]))
    param.grad = distribute_tensor(grad, cpu_mesh(), [Shard(0)])
    norm = fsdp2.clip_grad_norm_([param], 1.0)
    assert norm.dtype == torch.float32
    torch.testing.assert_close(norm, grad.float().norm())
    assert param.grad.dtype == torch.float16


@on_ranks(2)
def test_a_rank_without_a_gradient_does_not_stop_the_others():
    params = [nn.Parameter(distribute_tensor(torch.ones(4), cpu_mesh(), [Shard(0)])) for _ in range(2)]
    params[0].grad = distribute_tensor(torch.full((4,), 3.0), cpu_mesh(), [Shard(0)])
    if dist.get_rank() == 0:
        params[1].grad = None
    else:
        params[1].grad = DTensor.from_local(torch.tensor([0.0, 8.0]), cpu_mesh(), [Shard(0)], run_check=False)
    torch.testing.assert_close(fsdp2.clip_grad_norm_(params, 1.0), torch.tensor(10.0))


@on_ranks(2)
def test_a_rank_without_any_gradient_has_the_norm_of_the_others():
    """It returned 0 after the all-reduce; and where gradients were fp64, it sent an fp32 number."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        whole_grad = torch.tensor([3.0, 4.0, 0.0, 0.0], dtype=dtype)
        for norm_type in NORMS:
            param = nn.Parameter(distribute_tensor(torch.ones(4, dtype=dtype), cpu_mesh(), [Shard(0)]))
            if dist.get_rank() == 0:
                param.grad = distribute_tensor(whole_grad, cpu_mesh(), [Shard(0)], src_data_rank=None)
            expected = torch.linalg.vector_norm(whole_grad[:2].double(), norm_type)  # of those that there are
            if norm_type == 0:  # of the parameters' norms, how many are not 0
                expected = torch.ones(())
            place = f"{dtype}, norm {norm_type}"
            for call in ("clip", "flat"):
                if call == "clip":
                    norm = fsdp2.clip_grad_norm_([param], 100.0, norm_type)
                else:
                    optimizer = fsdp2.optim.flat(torch.optim.SGD, [param], lr=0.0)
                    optimizer.step(max_norm=100.0, norm_type=norm_type)
                    norm = optimizer.grad_norm
                assert norm.dtype is (torch.float64 if dtype is torch.float64 else torch.float32), place
                torch.testing.assert_close(norm.double(), expected.double(), rtol=1e-6, atol=0, msg=place)


@on_ranks(2)
def test_nothing_to_clip_has_the_norm_zero():
    assert fsdp2.clip_grad_norm_([], 1.0) == 0
    model, _ = one_axis()
    for norm_type in NORMS:
        assert fsdp2.clip_grad_norm_(model.parameters(), 1.0, norm_type) == 0


@on_ranks(2)
def test_a_mesh_without_this_rank_is_refused():
    mesh = DeviceMesh("cpu", [0])
    param = nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False))
    if dist.get_rank() == 1:
        with pytest.raises(ArgumentError, match="this rank is not part of"):
            fsdp2.clip_grad_norm_([param], 1.0)
