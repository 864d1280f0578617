"""The methods of FSDP modules, but for state dicts. The oracle is the unsharded model, or torch's FSDP1 where it works on the CPU."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torchs
from torch import Tensor, nn
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp2
from fsdp2.compat import CPUOffload, CustomPolicy, MixedPrecision, ModuleWrapPolicy, ShardingStrategy
from fsdp2.compat import FullyShardedDataParallel as FSDP
from fsdp2.core.iteration.module_state import unit_of
from fsdp2.errors import ArgumentError, ModuleError, OrderError
from harness import device_type, on_ranks
from harness.models import Block, batches, mlp
from harness.training import assert_equal_training, fed_own_chunk, fed_whole, forward_backward, own_chunk

BLOCKS = ModuleWrapPolicy({Block})


# --- who is who ---------------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_roots_and_fsdp_modules_are_known_before_the_first_forward() -> None:
    model = nn.ModuleDict({"a": FSDP(mlp(), auto_wrap_policy=BLOCKS), "b": nn.Sequential(FSDP(nn.Linear(2, 2)))})
    assert model["a"].check_is_root()
    assert not model["a"].blocks[0].check_is_root()
    assert FSDP.fsdp_modules(model) == [model["a"], *model["a"].blocks, model["b"][0]]
    assert FSDP.fsdp_modules(model, root_only=True) == [model["a"], model["b"][0]]
    assert FSDP.fsdp_modules(nn.Linear(2, 2)) == []


class Busy(nn.Module):
    """Has attributes of its own with the names of the wrapper's."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self.rank = "mine"
        self.register_buffer("process_group", torch.ones(1))

    @property
    def world_size(self) -> str:
        return "mine as well"

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


@on_ranks(2)
def test_attributes_of_the_wrapper_do_not_hide_the_modules_own() -> None:
    model = FSDP(Busy())
    assert isinstance(model.module, nn.Linear)
    assert (model.rank, model.world_size) == ("mine", "mine as well")
    assert isinstance(model.process_group, Tensor)
    assert model(torch.ones(1, 2)).shape == (1, 2)
    assert isinstance(model._fsdp_wrapped_module.module, nn.Linear)
    plain = FSDP(nn.Linear(2, 2))
    assert (plain.rank, plain.world_size) == (dist.get_rank(), dist.get_world_size())
    assert plain.process_group is dist.group.WORLD
    assert plain.mixed_precision == MixedPrecision()
    assert plain.cpu_offload == CPUOffload()
    plain.rank = 7
    assert plain.rank == 7
    assert not hasattr(plain, "nothing_of_this_name")


def unwrapped(model: nn.Module) -> nn.Module:
    return unwrapped(model.module) if hasattr(model, "module") else model


@on_ranks(1)
def test_code_that_unwraps_ends_at_the_same_object_whatever_it_asks() -> None:
    model = FSDP(nn.Sequential(nn.Linear(2, 2)))
    found: nn.Module = model
    while isinstance(found, FSDP):
        found = found.module
    assert found is unwrapped(model) is unwrapped(found) is model.module is model._fsdp_wrapped_module
    assert (model.module if hasattr(model, "module") else model) is getattr(model, "module", None) is found
    assert not hasattr(found, "module")
    assert not hasattr(found, "_fsdp_wrapped_module")
    busy = FSDP(Busy())
    assert hasattr(busy, "module"), "one of its own"
    assert hasattr(busy._fsdp_wrapped_module, "module")


@on_ranks(2)
def test_the_module_inside_has_whatever_its_fsdp_module_has_and_runs_saves_and_is_copied_alike() -> None:
    model, plain = FSDP(mlp(), auto_wrap_policy=BLOCKS), mlp()
    inside = model.module
    assert inside.first is model.first
    assert list(inside.parameters()) == list(model.parameters())
    inside.later, model.training = nn.Linear(2, 2), False
    assert model.later is inside.later
    assert not inside.training
    del model.later
    x = batches(1)[0]
    expected, loss = plain(x), inside(x).square().mean()
    torch.testing.assert_close(inside(x), expected)
    loss.backward()
    expected.square().mean().backward()
    for param, reference in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), reference.grad)
    for state in (inside.state_dict(), copy.deepcopy(inside).state_dict(), copy.deepcopy(model).module.state_dict()):
        torch.testing.assert_close(state, plain.state_dict())
    inside.load_state_dict(mlp(seed=5).state_dict())
    torch.testing.assert_close(model.state_dict(), mlp(seed=5).state_dict())
    assert copy.deepcopy(model).module is not inside


@on_ranks(2)
def test_deepcopy_is_an_independent_fsdp_module_with_the_same_settings() -> None:
    policy = MixedPrecision(param_dtype=torch.bfloat16, keep_low_precision_grads=True, cast_root_forward_inputs=False)
    model = FSDP(mlp(), auto_wrap_policy=BLOCKS, backward_prefetch=None, mixed_precision=policy)
    other = copy.deepcopy(model)
    assert isinstance(other, FSDP)
    assert other.check_is_root()
    assert not other.blocks[0].check_is_root()
    assert unit_of(other).options.backward_prefetch is None
    assert unit_of(other).groups[0].gradients.options.grad_dtype is torch.bfloat16
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value)
    with pytest.raises(RuntimeError, match="dtype"):
        other(batches(1)[0])  # inputs are not cast, as in the original
    other.reset_iter_state()
    other(batches(1)[0].bfloat16()).sum().backward()
    assert other.first.weight.grad.dtype is torch.bfloat16


# --- training -----------------------------------------------------------------------------------------------------------------


def accumulating(model: nn.Module, x: Tensor) -> Tensor:
    """Two micro-batches, the first of them without communication."""
    halves = x.chunk(2)
    if isinstance(model, FSDP):
        with model.no_sync():
            (model(halves[0]).square().mean() / 2).backward()
    else:
        (model(halves[0]).square().mean() / 2).backward()
    loss = model(halves[1]).square().mean() / 2
    loss.backward()
    return loss


@on_ranks(2)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("offload", [False, True])
def test_no_sync_accumulates_as_the_unsharded_model_does(strategy: str, offload: bool) -> None:
    reference = mlp()
    model = FSDP(
        mlp(),
        auto_wrap_policy=BLOCKS,
        sharding_strategy=ShardingStrategy[strategy],
        cpu_offload=CPUOffload(offload_params=offload),
    )

    def on_all_chunks(unsharded: nn.Module, x: Tensor) -> Tensor:
        chunks = x.chunk(dist.get_world_size())
        for chunk in chunks:
            loss = sum(half.square().mean() / 2 for half in map(unsharded, chunk.chunk(2)))
            (loss / len(chunks)).backward()
        return torch.stack([unsharded(chunk.chunk(2)[1]).square().mean() / 2 for chunk in chunks]).mean()

    steps = fed_own_chunk(model, batches(), iteration=accumulating)
    assert_equal_training(steps, fed_whole(reference, batches(), iteration=on_all_chunks))


@on_ranks(2)
def test_no_sync_communicates_nothing_and_keeps_what_the_strategy_keeps() -> None:
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
        model = FSDP(mlp(), auto_wrap_policy=BLOCKS, sharding_strategy=strategy)
        with model.no_sync():
            forward_backward(model, batches(1)[0])
        assert all(param.grad is None for param in model.parameters())
        kept = [unit_of(module).groups[0].is_unsharded for module in model.blocks]
        assert kept == [strategy is ShardingStrategy.SHARD_GRAD_OP] * 3
        forward_backward(model, batches(1)[0])
        assert not any(unit_of(module).groups[0].is_unsharded for module in model.blocks)
        assert all(isinstance(param.grad, DTensor) for param in model.parameters())


@on_ranks(2)
@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_clip_grad_norm_is_that_of_the_unsharded_model(norm_type: float) -> None:
    replicated = {"sharding_strategy": ShardingStrategy.NO_SHARD}
    mixed = CustomPolicy(lambda module: replicated if isinstance(module, nn.LayerNorm) else isinstance(module, Block))
    for policy in (BLOCKS, mixed):
        reference, model = mlp(), FSDP(mlp(), auto_wrap_policy=policy)
        x = batches(1)[0] * 5
        forward_backward(reference, x)
        forward_backward(model, own_chunk(x))
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.01, norm_type)
        total = model.clip_grad_norm_(0.01, norm_type)
        assert type(total) is Tensor
        torch.testing.assert_close(total, expected)
        for name, param in reference.named_parameters():
            torch.testing.assert_close(model.get_parameter(name).grad.full_tensor(), param.grad)


@on_ranks(2)
def test_methods_for_the_root_are_refused_elsewhere() -> None:
    model = FSDP(mlp(), auto_wrap_policy=BLOCKS)
    for call in (
        lambda block: block.clip_grad_norm_(1.0),
        lambda block: block.no_sync().__enter__(),
        lambda block: block.register_comm_hook(None, print),
    ):
        with pytest.raises(OrderError, match="that is not the root"):
            call(model.blocks[0])


# --- communication hooks ------------------------------------------------------------------------------------------------------


def in_bf16(state: list[str], gradient: Tensor, shard: Tensor | None = None) -> None:
    """A hook of one's own (torch's need a GPU): sums in bf16, and notes what it was called with."""
    small = gradient.to(torch.bfloat16)
    dist.all_reduce(small)
    small.div_(dist.get_world_size())
    state.append("replicated" if shard is None else "sharded")
    if shard is None:
        gradient.copy_(small)
    else:
        shard.copy_(small.chunk(dist.get_world_size())[dist.get_rank()])


@on_ranks(2)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("own", [False, True])
def test_comm_hooks_reduce_as_they_do_in_fsdp1(strategy: str, own: bool) -> None:
    def state() -> Any:
        return [] if own else default_hooks.DefaultState(dist.group.WORLD)

    hook: Any = default_hooks.allreduce_hook if strategy == "NO_SHARD" else default_hooks.reduce_scatter_hook
    hook = in_bf16 if own else hook
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = torchs.FullyShardedDataParallel(
            mlp(),
            auto_wrap_policy=torchs.wrap.ModuleWrapPolicy({Block}),
            sharding_strategy=torchs.ShardingStrategy[strategy],
            device_id=torch.device(device_type()),
            use_orig_params=True,
        )
        theirs.register_comm_hook(state(), hook)
        forward_backward(theirs, own_chunk(batches(1)[0]))
        with torchs.FullyShardedDataParallel.summon_full_params(theirs, with_grads=True):
            expected = {name: param.grad.clone() for name, param in theirs.named_parameters()}
        model = FSDP(mlp(), auto_wrap_policy=BLOCKS, sharding_strategy=ShardingStrategy[strategy])
        mine = state()
        model.register_comm_hook(mine, hook)
        forward_backward(model, own_chunk(batches(1)[0]))
    if own:
        assert mine == ["replicated" if strategy == "NO_SHARD" else "sharded"] * 4, "one call for each unit"
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.grad.full_tensor(), expected[name])


@on_ranks(4)
def test_comm_hooks_are_refused_where_fsdp1_has_none() -> None:
    mesh = init_device_mesh(device_type(), (2, 2))
    hybrid = FSDP(nn.Linear(4, 4), sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh)
    with pytest.raises(ArgumentError, match="hybrid"):
        hybrid.register_comm_hook(None, print)
    model = FSDP(nn.Linear(4, 4))
    with pytest.raises(ArgumentError, match="got 'mean'"):
        model.register_comm_hook(None, "mean")
    model.register_comm_hook(None, print)
    with pytest.raises(OrderError, match="twice"):
        model.register_comm_hook(None, print)


# --- whole parameters ---------------------------------------------------------------------------------------------------------


@on_ranks(1, 3)
@pytest.mark.parametrize("offload_to_cpu", [False, True])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_summoned_parameters_are_whole_in_their_own_dtype_and_writes_are_kept(offload_to_cpu: bool, strategy: str) -> None:
    reference = mlp()
    policy = MixedPrecision(param_dtype=torch.bfloat16)
    model = FSDP(mlp(), auto_wrap_policy=BLOCKS, mixed_precision=policy, sharding_strategy=ShardingStrategy[strategy])
    optimized = list(model.parameters())
    model(batches(1)[0])  # leaves the root unsharded
    with FSDP.summon_full_params(model, offload_to_cpu=offload_to_cpu):
        for (name, param), (_, expected) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
            assert type(param) is nn.Parameter, name
            assert torch.equal(param.cpu(), expected)
            assert param.device.type == ("cpu" if offload_to_cpu else device_type())
        model.blocks[1].scale.data.fill_(3.0)
        with torch.no_grad():
            model.first.weight.add_(1.0)
    assert [id(param) for param in model.parameters()] == [id(param) for param in optimized]
    assert torch.equal(model.blocks[1].scale.full_tensor(), torch.full((1,), 3.0))
    assert torch.equal(model.first.weight.full_tensor(), reference.first.weight + 1.0)
    with FSDP.summon_full_params(model, writeback=False):
        model.first.weight.data.zero_()
    assert torch.equal(model.first.weight.full_tensor(), reference.first.weight + 1.0)


@on_ranks(2)
def test_summoned_gradients_are_whole_and_written_back() -> None:
    reference, model = mlp(), FSDP(mlp(), auto_wrap_policy=BLOCKS)
    forward_backward(reference, batches(1)[0])
    forward_backward(model, own_chunk(batches(1)[0]))
    with FSDP.summon_full_params(model, with_grads=True):
        for (name, param), (_, expected) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
            torch.testing.assert_close(param.grad, expected.grad, msg=name)
            param.grad.fill_(2.0)
    assert all(torch.equal(param.grad.to_local(), torch.full_like(param.to_local(), 2.0)) for param in model.parameters())


@on_ranks(2)
def test_summon_can_leave_children_and_other_ranks_alone() -> None:
    model = FSDP(mlp(), auto_wrap_policy=BLOCKS)
    with FSDP.summon_full_params(model, recurse=False):
        assert not isinstance(model.first.weight, DTensor)
        assert isinstance(model.blocks[0].up.weight, DTensor)
    with FSDP.summon_full_params(model, writeback=False, rank0_only=True, offload_to_cpu=True):
        assert isinstance(model.first.weight, DTensor) is (dist.get_rank() != 0)
    outer = nn.Sequential(nn.Linear(2, 2), FSDP(nn.Linear(2, 2)))
    with FSDP.summon_full_params(outer):
        assert not isinstance(outer[1].weight, DTensor)
    with FSDP.summon_full_params(outer, recurse=False):
        assert isinstance(outer[1].weight, DTensor)


@on_ranks(2)
def test_forward_without_autograd_runs_with_summoned_parameters() -> None:
    """As generation does: ``with summon_full_params(model, recurse=False): model.generate(...)``."""
    reference, model = mlp(), FSDP(mlp(), auto_wrap_policy=BLOCKS)
    x = batches(1)[0]
    for recurse in (True, False):
        with FSDP.summon_full_params(model, recurse=recurse, writeback=False), torch.no_grad():
            torch.testing.assert_close(model(x), reference(x))
            torch.testing.assert_close(model.blocks[0](model.first(x)), reference.blocks[0](reference.first(x)))
    with FSDP.summon_full_params(model), pytest.raises(OrderError, match="with autograd"):
        model(x)
    assert_equal_training(fed_own_chunk(model, batches()), fed_whole(reference, batches()))


@on_ranks(2)
def test_wrong_uses_of_summon_are_refused() -> None:
    model = FSDP(mlp(), auto_wrap_policy=BLOCKS)
    with pytest.raises(ArgumentError, match="writeback=True and rank0_only=True"), FSDP.summon_full_params(model, rank0_only=True):
        pass
    again = FSDP.summon_full_params(model)
    with FSDP.summon_full_params(model), pytest.raises(OrderError, match="inside of summon_full_params"):
        again.__enter__()
    model.first.register_forward_hook(lambda *_: FSDP.summon_full_params(model).__enter__())
    with pytest.raises(OrderError, match="inside of forward"):
        model(batches(1)[0])


@on_ranks(2)
def test_summon_ends_with_an_exception_and_shows_ties_once() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    FSDP(model)

    def fail_inside() -> None:
        with FSDP.summon_full_params(model):
            assert model[1].weight is model[0].weight
            model[0].weight.data.zero_()
            raise KeyError

    with pytest.raises(KeyError):
        fail_inside()
    assert isinstance(model[0].weight, DTensor)
    assert model[1].weight is model[0].weight
    assert model[0].weight.full_tensor().any(), "what was written before an exception is dropped"


@on_ranks(2)
def test_apply_shows_whole_parameters_to_the_function() -> None:
    model = FSDP(mlp(), auto_wrap_policy=BLOCKS)
    shapes = {}

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            shapes[module] = tuple(module.weight.shape)
            assert not isinstance(module.weight, DTensor)
            nn.init.constant_(module.weight, float(module.in_features))

    assert model.apply(init) is model
    assert len(shapes) == 8
    for module in model.modules():
        if isinstance(module, nn.Linear):
            assert torch.equal(module.weight.full_tensor(), torch.full(shapes[module], float(module.in_features)))


@on_ranks(2)
def test_summon_keeps_memory_order_and_lstms_working() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(2, 3, 3, padding=1).to(memory_format=torch.channels_last)
            self.lstm = nn.LSTM(4, 5, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.lstm(self.conv(x).flatten(1, 2))[0]

    reference = Odd()
    model = FSDP(copy.deepcopy(reference))
    x = torch.randn(2, 2, 4, 4)
    with FSDP.summon_full_params(model), torch.no_grad():
        model.conv.weight.mul_(2.0)
        torch.testing.assert_close(model.lstm(torch.ones(1, 2, 4))[0], reference.lstm(torch.ones(1, 2, 4))[0])
    reference.conv.weight.data.mul_(2.0)
    torch.testing.assert_close(model(x), reference(x))


@on_ranks(4)
def test_with_tensor_parallelism_parameters_are_dtensors_of_the_model_axis() -> None:
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))
    reference, model = mlp(dim=9), mlp(dim=9)  # of 9 + 3 features each model rank has 6
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    FSDP(model, device_mesh=mesh["dp"], auto_wrap_policy=BLOCKS)
    state = model.state_dict()
    for name, value in reference.state_dict().items():
        assert torch.equal(state[name], value), name
    with FSDP.summon_full_params(model):
        weight = model.blocks[0].up.weight
        assert isinstance(weight, DTensor)
        assert weight.device_mesh == mesh["tp"]
        assert torch.equal(weight.full_tensor(), reference.blocks[0].up.weight)
        weight.to_local().data.mul_(2.0)
    reference.blocks[0].up.weight.data.mul_(2.0)
    assert torch.equal(model.state_dict()["blocks.0.up.weight"], reference.blocks[0].up.weight)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, reference)]
    for x in batches(2):
        model(x.chunk(2)[mesh.get_local_rank("dp")]).square().mean().backward()
        forward_backward(reference, x)
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        torch.testing.assert_close(model.clip_grad_norm_(0.1), expected)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    saved = FSDP.optim_state_dict(model, optimizers[0])
    for name, param in reference.named_parameters():
        torch.testing.assert_close(saved["state"][name]["exp_avg"], optimizers[1].state[param]["exp_avg"])
    loaded = FSDP.optim_state_dict_to_load(model, optimizers[0], saved)
    optimizers[0].load_state_dict(loaded)
    again = FSDP.optim_state_dict(model, optimizers[0])
    assert all(torch.equal(again["state"][name]["exp_avg"], values["exp_avg"]) for name, values in saved["state"].items())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # the compiler looks
@on_ranks(2)
def test_compiled_blocks_train_as_the_unsharded_model() -> None:
    reference, model = mlp(), FSDP(mlp(), auto_wrap_policy=BLOCKS)
    for block in model.blocks:
        block.compile(backend="aot_eager")
    assert_equal_training(fed_own_chunk(model, batches()), fed_whole(reference, batches()))


@on_ranks(2)
def test_join_is_refused_and_uneven_work_takes_its_place():
    model = FSDP(mlp(), auto_wrap_policy=BLOCKS)
    with pytest.raises(ModuleError, match="uneven"):
        Join([model])
    stood_in = []
    with fsdp2.uneven(model) as work:
        for batch in work([torch.ones(2, 7)] * (1 + dist.get_rank()), count=len):
            work.backward(model(batch).sum())
            stood_in.append(work.stands_in)
    assert stood_in == [False, dist.get_rank() == 0]
