"""What an extension is given, when, and what becomes of what it returns: the contract of torch's FSDP2."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as upstream
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.two_tensor import TwoTensor

import fsdp2
from fsdp2 import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from fsdp2.errors import ExtensionError, FSDPError
from fsdp2.policy import AllGather
from harness import cpu_mesh, on_ranks
from harness.models import mlp
from harness.sharding import with_reference
from harness.subclasses import InDtype, RowInt8, Wrapper, wrap_weights
from harness.training import assert_same_tensors


def linear(rows: int = 5, kind: Any = RowInt8, columns: int = 7) -> nn.Linear:
    torch.manual_seed(0)
    return wrap_weights(nn.Linear(columns, rows), kind)


def run(model: nn.Module, columns: int = 7) -> Tensor:
    torch.manual_seed(1)
    loss = model(torch.randn(3, columns)).square().mean()
    loss.backward()
    return loss


# --- what it is given -------------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_the_new_signature_is_told_of_the_whole_parameter():
    model = linear(kind=InDtype)
    policy = MixedPrecisionPolicy(param_dtype=torch.float32)
    fully_shard(model, mesh=cpu_mesh(), mp_policy=policy)
    InDtype.seen.clear()
    model.unshard()
    ((mesh, size, stride, module, given),) = InDtype.seen
    assert mesh == cpu_mesh()
    assert size == torch.Size((5, 7))
    assert isinstance(size, torch.Size)
    assert stride == (7, 1)
    assert module is model
    assert given is policy


@on_ranks(4)
def test_with_hybrid_sharding_it_sees_the_shard_axis_only():
    model = linear(kind=InDtype)
    fully_shard(model, mesh=cpu_mesh(2, 2))
    InDtype.seen.clear()
    model.unshard()
    assert InDtype.seen[0][0] == cpu_mesh(2, 2)["shard"]


@contextmanager
def counted_gathers() -> Iterator[list[tuple[int, torch.dtype]]]:
    """(elements, dtype) of every tensor that is broadcast or all-gathered."""
    seen: list[tuple[int, torch.dtype]] = []
    from fsdp2.core.comm import collectives

    original = collectives.all_gather

    def spy(outputs, inputs, *args):
        seen.extend((each.numel(), each.dtype) for each in inputs)
        return original(outputs, inputs, *args)

    with mock.patch.object(collectives, "all_gather", spy):
        yield seen


@on_ranks(2)
def test_all_tensors_of_a_unit_travel_in_one_collective_as_bytes_where_dtypes_differ():
    model = nn.Sequential(linear(6), linear(5))
    fully_shard(model, mesh=cpu_mesh())
    with counted_gathers() as seen:
        model.unshard()
    rows = 32 + 16  # 3 * 7 bytes and 3 * 4, each in multiples of 16
    biases = 2 * 4  # 3 rows of each, in slots of 16 bytes
    assert seen == [(2 * rows + 4 * biases, torch.uint8)]


@on_ranks(2)
def test_tensors_of_one_dtype_travel_in_it():
    model = linear(6, InDtype)
    model.bias = None
    fully_shard(model, mesh=cpu_mesh())
    with counted_gathers() as seen:
        model.unshard()
    assert seen == [(24, torch.bfloat16)]  # 3 * 7 elements, in a multiple of 16 bytes


@on_ranks(2)
@pytest.mark.parametrize("dim", [0, 1])
def test_what_extensions_send_starts_at_multiples_of_16_bytes(dim):
    """Symptom: three rows of 5 int8, and the tensor behind them began at byte 15."""
    kind = RowInt8 if dim == 0 else InDtype
    model = nn.Sequential(linear(6, kind, columns=5), linear(5, kind, columns=6))
    fully_shard(model, mesh=cpu_mesh(), shard_placement_fn=lambda param: Shard(min(dim, param.ndim - 1)))
    starts: list[int] = []
    original = torch._foreach_copy_

    def watched(targets, sources, *args):
        starts.extend(target.data_ptr() - target.untyped_storage().data_ptr() for target in targets)
        return original(targets, sources, *args)

    with mock.patch.object(torch, "_foreach_copy_", watched):
        model.unshard()
    assert len(starts) > 1
    assert [start for start in starts if start % 16 != 0] == []


class RecordingGather(AllGather):
    def __init__(self) -> None:
        self.calls: list[tuple[int, torch.dtype]] = []

    def allocate(self, size, *, dtype, device):
        self.calls.append((size[0], dtype))
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        assert input_tensor.data_ptr() == output_tensor.chunk(group.size())[group.rank()].data_ptr()
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


@on_ranks(2)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_custom_communicator_carries_them():
    model, other = fully_shard(linear(5), mesh=cpu_mesh()), fully_shard(linear(5), mesh=cpu_mesh())
    comm = RecordingGather()
    model.set_custom_all_gather(comm)
    assert torch.equal(run(model), run(other))
    assert (2 * (3 * 7 + 3 * 4), torch.uint8) in comm.calls


# --- what becomes of what it returns ---------------------------------------------------------------------------------------------


def extended(model: nn.Module) -> Any:
    (group,) = [group for group in model._get_fsdp_state().groups if group.plan.has_own_memory]
    return group


@on_ranks(2)
@pytest.mark.parametrize("kind", [RowInt8, InDtype])
def test_reshard_frees_its_tensors_and_the_unsharded_parameter_stays_the_same(kind):
    model = fully_shard(linear(6, kind), mesh=cpu_mesh())
    model.unshard()
    weight = model.weight
    assert type(weight) is nn.Parameter
    before = weight.detach().clone()
    storages = [storage for storage, _ in extended(model).unsharded.gather._made.storages]
    assert all(storage.size() > 0 for storage in storages)
    assert weight.untyped_storage()._cdata in {storage._cdata for storage in storages}
    version = weight._version
    model.reshard()
    assert isinstance(model.weight, DTensor)
    assert [storage.size() for storage in storages] == [0] * len(storages)
    model.unshard()
    assert model.weight is weight
    assert weight._version == version
    assert torch.equal(weight, before)


@on_ranks(2)
def test_a_prefetch_that_is_cancelled_leaves_nothing_behind():
    model = fully_shard(linear(6), mesh=cpu_mesh())
    for _ in range(2):
        model.unshard(async_op=True)
        model.reshard()
        assert extended(model).gathering is None
        assert extended(model).unsharded.gather._made is None  # nothing was filled yet
    assert isinstance(model.weight, DTensor)
    run(model)


@on_ranks(2)
def test_what_is_written_between_an_asynchronous_unshard_and_its_wait_is_not_sent():
    model = fully_shard(linear(6), mesh=cpu_mesh())
    model.unshard()
    expected = model.weight.detach().clone()
    model.reshard()
    handle = model.unshard(async_op=True)
    extended(model).params[0].local._values.fill_(9)
    handle.wait()
    assert torch.equal(model.weight, expected)


@on_ranks(2)
def test_inference_mode_first_and_training_after():
    model = fully_shard(linear(6), mesh=cpu_mesh(), reshard_after_forward=False)
    with torch.inference_mode():
        model(torch.randn(3, 7))
    run(model)
    assert model.weight.grad is not None


class Broken(RowInt8):
    fails = False

    def fsdp_post_all_gather(self, *args: Any, **kwargs: Any) -> Any:
        if Broken.fails:
            raise ZeroDivisionError
        return super().fsdp_post_all_gather(*args, **kwargs)


@on_ranks(2)
@pytest.mark.parametrize("first", [True, False])
def test_after_an_exception_in_an_extension_the_next_step_is_valid(first):
    model = fully_shard(linear(6, Broken), mesh=cpu_mesh())
    Broken.fails = False
    if not first:
        run(model)
    Broken.fails = True
    try:
        with pytest.raises(ZeroDivisionError):
            run(model)
    finally:
        Broken.fails = False
    model.reset_iter_state()
    assert isinstance(model.weight, DTensor)
    run(model)


# --- where it comes from ----------------------------------------------------------------------------------------------------------


def pre(self: Tensor, mesh: Any) -> Any:
    return (self.to(torch.bfloat16),), None


def post(self: Tensor, gathered: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
    (values,) = gathered
    if out is not None:
        out.copy_(values)
        return None
    cast = values.to(param_dtype)
    return cast, (values, cast)


def patch(local: Tensor) -> None:
    local.fsdp_pre_all_gather = pre.__get__(local)
    local.fsdp_post_all_gather = post.__get__(local)


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("kind", [None, Wrapper])
def test_methods_may_be_put_on_local_tensors_after_materialization(kind):
    """Plain tensors too; their neighbors in the group stay what they are."""
    with torch.device("meta"):
        model = nn.Linear(7, 5)
        if kind is not None:
            wrap_weights(model, kind)
    fully_shard(model, mesh=cpu_mesh())
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    reference = nn.Linear(7, 5)
    with torch.no_grad():
        for param, whole in zip(model.parameters(), reference.parameters(), strict=True):
            shards = whole.chunk(dist.get_world_size())
            if dist.get_rank() < len(shards):
                param._local_tensor.copy_(shards[dist.get_rank()])
    patch(model.weight._local_tensor)
    with torch.no_grad():
        reference.weight.copy_(reference.weight.to(torch.bfloat16).float())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(3, 7, generator=torch.Generator().manual_seed(1))
    assert torch.equal(model(x), reference(x))
    for _ in range(2):
        run(model)
        optimizer.step()
        optimizer.zero_grad()
    assert hasattr(model.weight._local_tensor, "fsdp_pre_all_gather")


@on_ranks(2)
def test_methods_may_be_put_on_plain_local_tensors_after_the_first_step():
    model, reference = with_reference(nn.Linear(7, 5), fully_shard, mesh=cpu_mesh())
    x = torch.randn(3, 7)
    assert torch.equal(model(x), reference(x))
    model.reshard()
    patch(model.weight._local_tensor)
    reference.weight.data.copy_(reference.weight.to(torch.bfloat16).float())
    for _ in range(2):
        assert torch.equal(model(x), reference(x))
        model.reshard()
    run(model)
    assert hasattr(model.weight._local_tensor, "fsdp_pre_all_gather")


@on_ranks(2)
def test_a_local_tensor_may_be_exchanged_for_one_of_another_kind():
    model = fully_shard(nn.Linear(7, 6), mesh=cpu_mesh())
    run(model)
    values = model.weight._local_tensor.clone()
    model.weight._local_tensor = RowInt8(values)
    run(model)
    assert type(model.weight._local_tensor) is RowInt8
    model.weight._local_tensor = values
    run(model)
    assert not any(group.plan.has_own_memory for group in model._get_fsdp_state().groups)


# --- beside torch's FSDP2 -------------------------------------------------------------------------------------------------------


def two_pre(self: TwoTensor, mesh: Any) -> Any:
    return (self.a, self.b), None


def two_post(self: TwoTensor, gathered: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
    a, b = gathered
    if out is None:
        return TwoTensor(a, b).to(param_dtype), (a, b)
    if a.dtype == param_dtype:
        assert a.untyped_storage().data_ptr() == out.a.untyped_storage().data_ptr()
        assert b.untyped_storage().data_ptr() == out.b.untyped_storage().data_ptr()
    else:
        out.a.copy_(a)
        out.b.copy_(b)
    return None


@contextmanager
def two_tensors_have_extensions() -> Iterator[None]:
    TwoTensor.fsdp_pre_all_gather, TwoTensor.fsdp_post_all_gather = two_pre, two_post
    try:
        yield
    finally:
        del TwoTensor.fsdp_pre_all_gather, TwoTensor.fsdp_post_all_gather


def two_tensor_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
    for module in model:
        weight = module.weight.detach()
        module.weight = nn.Parameter(TwoTensor(weight, weight.clone()))
    return model


@on_ranks(2)
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_subclass_that_stays_one_unsharded_trains_as_under_torchs_fsdp2(reshard, dtype):
    steps: list[list[Tensor]] = []
    with two_tensors_have_extensions():
        for api in (upstream, fsdp2):
            model = two_tensor_model()
            options = {"mesh": cpu_mesh(), "reshard_after_forward": reshard, "mp_policy": api.MixedPrecisionPolicy(dtype)}
            for module in model:
                api.fully_shard(module, **options)
            api.fully_shard(model, **options)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            generator = torch.Generator().manual_seed(dist.get_rank())
            seen: list[Tensor] = []
            for _ in range(3):
                out = model(torch.randn(4, 8, generator=generator))
                assert type(out) is TwoTensor
                out.sum().backward()
                for param in model.parameters():
                    assert type(param._local_tensor) is TwoTensor
                    assert type(param.grad._local_tensor) is Tensor
                    seen += [param.grad._local_tensor.clone(), param._local_tensor.a.clone(), param._local_tensor.b.clone()]
                optimizer.step()
                optimizer.zero_grad()
            steps.append(seen)
    for theirs, ours in zip(*steps, strict=True):
        torch.testing.assert_close(ours, theirs, atol=0, rtol=0)


# --- what else one does with a model ----------------------------------------------------------------------------------------------


def values(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: local._values.clone() if isinstance(local := param._local_tensor, Wrapper) else local.clone()
        for name, param in model.named_parameters()
    }


@on_ranks(2, 3)
@pytest.mark.parametrize("assign", [False, True])
def test_state_dicts_keep_the_subclass(assign):
    model, other = fully_shard(linear(5), mesh=cpu_mesh()), fully_shard(linear(5), mesh=cpu_mesh())
    with torch.no_grad():
        for param in other.parameters():
            param.zero_()
    run(other)
    state = model.state_dict()
    assert type(state["weight"]._local_tensor) is RowInt8
    other.load_state_dict(state, assign=assign)
    assert_same_tensors(values(other), values(model), "loaded value")
    assert torch.equal(run(other), run(model))
    assert type(other.weight._local_tensor) is RowInt8


@on_ranks(2, 3)
def test_deepcopy_and_casts_keep_the_subclass():
    model = fully_shard(linear(5), mesh=cpu_mesh())
    run(model)
    other = copy.deepcopy(model)
    assert isinstance(other, FSDPModule)
    assert_same_tensors(values(other), values(model), "copied value")
    model.double()
    assert model.weight.dtype == torch.float64
    assert type(model.weight._local_tensor) is RowInt8
    other.weight.grad = model.weight.grad = None
    model(torch.randn(3, 7, dtype=torch.float64)).sum().backward()
    assert model.weight.grad.dtype == torch.float64


@on_ranks(2, 3)
def test_materialize_gives_a_subclass_on_the_meta_device_the_unsharded_models_values():
    reference = mlp(9)
    with torch.device("meta"):
        model = wrap_weights(mlp(9), RowInt8)
    fully_shard(model, mesh=cpu_mesh())
    torch.manual_seed(3)
    fsdp2.materialize(model, init)
    torch.manual_seed(3)
    reference.apply(init)
    for name, param in reference.named_parameters():
        shards = param.detach().chunk(dist.get_world_size())
        mine = shards[dist.get_rank()] if dist.get_rank() < len(shards) else param.detach()[:0]
        local = model.get_parameter(name)._local_tensor
        assert type(local) is (RowInt8 if param.ndim > 1 else Tensor)
        assert torch.equal(local._values if param.ndim > 1 else local, mine), name


def init(module: nn.Module) -> None:
    for param in module.parameters(recurse=False):
        nn.init.normal_(param)


@on_ranks(2)
def test_attributes_of_users_are_kept_and_inner_tensors_of_the_whole_parameter_are_not():
    model = linear(5)
    model.weight.no_weight_decay = True
    fully_shard(model, mesh=cpu_mesh(), offload_policy=CPUOffloadPolicy())
    assert model.weight.no_weight_decay
    assert "_values" not in vars(model.weight)


# --- errors -----------------------------------------------------------------------------------------------------------------------


class Half(Wrapper):
    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self._values,), None


class Uncuttable(RowInt8):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        if func is torch.ops.aten.split.Tensor:
            raise NotImplementedError("no split")
        return super().__torch_dispatch__(func, types, args, kwargs)


@on_ranks(2)
@pytest.mark.parametrize(
    ("kind", "what"), [(Half, "has fsdp_pre_all_gather but no fsdp_post_all_gather"), (Uncuttable, "NotImplementedError: no split")]
)
def test_what_cannot_be_sharded_is_refused_before_anything_is_changed(kind, what):
    model = nn.Sequential(nn.Linear(7, 7), linear(6, kind))
    before = list(model.parameters())
    with pytest.raises(ExtensionError, match=r"1\.weight") as caught:
        fully_shard(model, mesh=cpu_mesh())
    assert what in str(caught.value)
    assert isinstance(caught.value, (FSDPError, AssertionError, NotImplementedError))
    assert not isinstance(model, FSDPModule)
    assert all(now is then for now, then in zip(model.parameters(), before, strict=True))


@on_ranks(2)
def test_weights_that_are_not_contiguous_are_refused():
    model = nn.Linear(7, 6)
    model.weight = nn.Parameter(RowInt8(torch.randn(7, 6).t()))
    with pytest.raises(ExtensionError, match="not contiguous"):
        fully_shard(model, mesh=cpu_mesh())


class ThreeArguments(RowInt8):
    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any) -> Any:
        raise AssertionError


class Bare(RowInt8):
    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return self._values


class Squeezed(RowInt8):
    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self._values.flatten()[::2].contiguous(),), None


@on_ranks(2)
@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (ThreeArguments, "takes (mesh: 'Any', outer_size: 'Any', outer_stride: 'Any')"),
        (Bare, "returned a Tensor"),
        (Squeezed, "whose dim 0 has the size of the shard's, or 3, which it is padded to"),
    ],
)
def test_extensions_that_break_the_contract_are_named_on_all_ranks(kind, what):
    model = fully_shard(linear(5, kind), mesh=cpu_mesh())
    with pytest.raises(ExtensionError, match="fsdp_pre_all_gather of weight") as caught:
        run(model)
    assert what in str(caught.value)


class Growing(RowInt8):
    calls = 0

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        Growing.calls += 1
        return (*super().fsdp_pre_all_gather(mesh)[0], torch.zeros(Growing.calls)), "metadata"

    def fsdp_post_all_gather(self, gathered: Any, *args: Any, **kwargs: Any) -> Any:
        return super().fsdp_post_all_gather(gathered[:2], *args, **kwargs)


@on_ranks(2)
def test_shapes_that_differ_between_steps_are_an_error():
    Growing.calls = 0
    model = fully_shard(linear(6, Growing), mesh=cpu_mesh())
    run(model)
    with pytest.raises(ExtensionError, match="the same shapes and dtypes every time"):
        run(model)


class Opaque(Wrapper):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and type(args[0]) is not cls:
            raise NotImplementedError("no values")
        return super().__torch_dispatch__(func, types, args, kwargs)


@on_ranks(2)
def test_a_subclass_that_has_neither_extension_nor_values_is_named_at_the_first_unshard():
    model = fully_shard(linear(6, Opaque), mesh=cpu_mesh())
    with pytest.raises(ExtensionError, match="weight of type Opaque cannot be all-gathered"):
        run(model)
