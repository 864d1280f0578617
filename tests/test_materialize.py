"""``materialize``: the values of the unsharded model on any mesh; and the manual ways from the meta device."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing import assert_close

from fsdp2 import ArgumentError, MaterializationError, MixedPrecisionPolicy, fully_shard, materialize
from harness import cpu_mesh, on_ranks
from harness.memory import PeakBytes
from harness.sharding import shard_blocks

DIM = 8


class Rotary(nn.Module):
    """A non-persistent buffer of floats, a persistent one of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.empty(5), persistent=False)
        self.register_buffer("count", torch.empty(3, dtype=torch.int64))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.angles.copy_(torch.arange(5.0))
        self.count.fill_(7)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.angles.sum() / self.count.sum()


class Block(nn.Module):
    """Own parameters and children; a tie inside the group; a frozen, a 0-d, a channels-last and a bf16 parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(DIM))
        self.zero_dim = nn.Parameter(torch.empty(()))
        self.frozen = nn.Parameter(torch.empty(3, 5), requires_grad=False)
        self.image = nn.Parameter(torch.empty(5, 3, 2, 2).to(memory_format=torch.channels_last))
        self.small = nn.Parameter(torch.empty(7, dtype=torch.bfloat16))
        self.attention = nn.MultiheadAttention(DIM, 2, batch_first=True)
        self.up = nn.Linear(DIM, 3 * DIM)
        self.tied = nn.Linear(DIM, 3 * DIM)
        self.tied.weight = self.up.weight
        self.norm = nn.BatchNorm1d(DIM)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.scale)
        nn.init.uniform_(self.zero_dim)
        nn.init.normal_(self.frozen)
        nn.init.normal_(self.image)
        nn.init.normal_(self.small)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x) * self.scale + self.zero_dim + self.small.sum() + self.image.mean() + self.frozen.sum()
        x = x + self.attention(x[None], x[None], x[None])[0][0]
        return x + (self.up(x) + self.tied(x)).relu()[:, :DIM]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, DIM, padding_idx=2)
        self.rotary = Rotary()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(DIM, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.rotary(self.embed(ids))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def reset(module: nn.Module) -> None:
    """The oracle's function: what ``init_fn=None`` stands for."""
    method = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if method is not None:
        method()


def normal(module: nn.Module) -> None:
    """An ``init_fn`` that writes everything a module owns, through ``.data`` and by replacing a buffer."""
    for param in module.parameters(recurse=False):
        param.data.normal_(0, 0.02)
    for name, buffer in list(module.named_buffers(recurse=False)):
        if buffer.is_floating_point():
            setattr(module, name, torch.rand(buffer.shape))
        else:
            buffer.random_(5)


def unsharded(make: Callable[[], nn.Module], init_fn: Callable[[nn.Module], object] = reset, seed: int = 3) -> nn.Module:
    model = make()
    torch.manual_seed(seed)
    with torch.no_grad():
        return model.apply(init_fn)


def sharded(make: Callable[[], nn.Module], mesh, **options: object) -> nn.Module:  # type: ignore[no-untyped-def]
    with torch.device("meta"):
        model = make()
    for block in getattr(model, "blocks", ()):
        fully_shard(block, mesh=mesh, **options)  # type: ignore[call-overload]
    return fully_shard(model, mesh=mesh, **options)  # type: ignore[call-overload, no-any-return]


def assert_same(model: nn.Module, reference: nn.Module) -> None:
    """Bitwise, with dtype and requires_grad; NaN is never right."""
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    wanted = dict(reference.named_parameters(remove_duplicate=False)) | dict(reference.named_buffers(remove_duplicate=False))
    assert tensors.keys() == wanted.keys()
    for name, expected in wanted.items():
        got = tensors[name]
        assert got.requires_grad == expected.requires_grad, name
        full = got.full_tensor() if isinstance(got, DTensor) else got
        assert_close(full.detach(), expected.detach(), rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")


def meshes(world_size: int):  # type: ignore[no-untyped-def]
    return [cpu_mesh(), cpu_mesh(2, 2)] if world_size == 4 else [cpu_mesh()]


# --- values -----------------------------------------------------------------------------------------------------------------------


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("init_fn", [None, normal], ids=["reset_parameters", "init_fn"])
def test_values_and_generator_are_those_of_the_unsharded_model(init_fn, world_size):
    for mesh in meshes(world_size):
        reference = unsharded(Net, init_fn or reset)
        generator_after = torch.get_rng_state()
        model = sharded(Net, mesh)
        before = dict(model.named_parameters())
        torch.manual_seed(3)
        assert materialize(model, init_fn) == []
        assert torch.equal(torch.get_rng_state(), generator_after)
        assert_same(model, reference)
        for name, param in model.named_parameters():
            assert param is before[name]
            assert isinstance(param, DTensor)
            assert param.device.type == "cpu"
        if init_fn is None:  # it trains like the reference, on batches that are the same on all ranks
            ids = torch.arange(10) % 13
            for net in (model, reference):
                net(ids).square().mean().backward()
            assert_close(model.blocks[1].up.weight.grad.full_tensor(), reference.blocks[1].up.weight.grad)
            assert_close(model.head.weight.grad.full_tensor(), reference.head.weight.grad)


@on_ranks(3)
def test_values_are_those_of_the_constructor_where_it_makes_children_first():
    def make():
        first = nn.Linear(5, DIM)
        layer = nn.TransformerEncoderLayer(DIM, 2, 16, dropout=0.0, batch_first=True)
        return nn.Sequential(first, layer, nn.LSTM(DIM, 3, batch_first=True))

    torch.manual_seed(3)
    reference = make()
    model = sharded(make, cpu_mesh())
    torch.manual_seed(3)
    materialize(model)
    assert_same(model, reference)
    x = torch.randn(2, 4, 5)
    assert_close(model(x)[0], reference(x)[0])


@on_ranks(2)
def test_values_do_not_depend_on_placement_mixed_precision_or_the_way_of_gathering():
    reference = unsharded(Net)
    options = {
        "shard_placement_fn": lambda param: Shard(1) if param.ndim == 2 else None,
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    model = sharded(Net, cpu_mesh(), **options)
    torch.manual_seed(3)
    materialize(model)
    assert_same(model, reference)
    assert model.embed.weight.placements == (Shard(1),)


class Owner(nn.Module):
    """Its ``reset_parameters`` reaches into its children, reads one of them, and is the only one to write ``late``."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 6), nn.Linear(6, 3)
        self.late = nn.Module()
        self.late.weight = nn.Parameter(torch.empty(4, 3))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.late.weight)
        self.first.bias.data.fill_(self.second.weight.abs().max())
        view = self.second.weight[1]
        nn.init.zeros_(self.first.weight)
        view.mul_(3)
        torch._foreach_add_([self.first.bias, self.second.bias], 1.0)


@on_ranks(1, 3)
def test_a_module_may_initialize_its_children_in_the_same_and_in_other_groups():
    reference = unsharded(Owner)
    for wrap in ((), ("second",), ("first", "late")):
        with torch.device("meta"):
            model = Owner()
        for name in wrap:
            fully_shard(getattr(model, name), mesh=cpu_mesh())
        fully_shard(model, mesh=cpu_mesh())
        torch.manual_seed(3)
        materialize(model)
        assert_same(model, reference)


@on_ranks(2)
def test_one_function_at_the_root_may_initialize_the_whole_model():
    def init_all(module: nn.Module) -> None:
        if isinstance(module, Net):
            for each in module.parameters():
                each.data.normal_()
            for buffer in module.buffers():
                buffer.fill_(3)

    reference = unsharded(Net, init_all)
    model = sharded(Net, cpu_mesh())
    torch.manual_seed(3)
    materialize(model, init_all)
    assert_same(model, reference)


@on_ranks(2)
def test_parameters_outside_of_every_group_are_materialised_as_well():
    reference = unsharded(Net)
    with torch.device("meta"):
        model = Net()
    fully_shard(model.blocks[1], mesh=cpu_mesh())  # all else stays plain
    plain = model.blocks[0].scale
    torch.manual_seed(3)
    materialize(model)
    assert_same(model, reference)
    assert model.blocks[0].scale is plain
    assert model.head.weight is model.embed.weight
    with torch.device("meta"):
        model = Net()
    fully_shard(model, mesh=cpu_mesh(), ignored_params={model.blocks[2].scale, model.embed.weight})
    torch.manual_seed(3)
    materialize(model)
    assert_same(model, reference)
    assert type(model.blocks[2].scale) is nn.Parameter


def test_an_unsharded_model_can_be_materialised_too():
    with torch.device("meta"):
        model = Net()
    torch.manual_seed(3)
    materialize(model, device="cpu")
    assert_same(model, unsharded(Net))


@on_ranks(2)
def test_attributes_of_parameters_stay_and_can_be_seen_by_the_function():
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    model.bias.keep_me = "yes"
    seen = []
    fully_shard(model, mesh=cpu_mesh())

    def init_fn(module: nn.Module) -> None:
        seen.append((type(module.bias), module.bias.keep_me, module.bias.shape))
        normal(module)

    materialize(model, init_fn)
    assert seen == [(nn.Parameter, "yes", (4,))]
    assert model.bias.keep_me == "yes"


@on_ranks(2)
def test_tensors_that_somebody_has_a_weak_reference_to_are_replaced():
    """torch cannot exchange what a weak reference points to; ties, names and later visits must survive the new objects."""
    reference = unsharded(Net)
    for shard in (True, False):
        with torch.device("meta"):
            model = Net()
        if shard:
            shard_blocks(model)
        tensors = [*model.parameters(), *model.buffers()]
        references = [weakref.ref(tensor) for tensor in tensors[::2]]
        torch.manual_seed(3)
        materialize(model, device="cpu")
        assert_same(model, reference)
        assert model.embed.weight is model.head.weight is not references[0]()
        assert model.blocks[0].up.weight is model.blocks[0].tied.weight
        model(torch.arange(8)).sum().backward()
        assert model.embed.weight.grad is not None


@on_ranks(2)
def test_hugging_face_model_with_its_own_init_weights():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, vocab_size=19, num_key_value_heads=1
    )

    def make():
        return transformers.LlamaForCausalLM(config)

    reference = make()
    for tensor in (*reference.parameters(), *reference.buffers()):
        tensor._is_hf_initialized = False  # its constructor has done it: it shall do it again
    torch.manual_seed(3)
    with torch.no_grad():
        reference.apply(reference._init_weights)
    with torch.device("meta"):
        model = make()
    for layer in model.model.layers:
        fully_shard(layer, mesh=cpu_mesh())
    fully_shard(model, mesh=cpu_mesh())
    torch.manual_seed(3)
    materialize(model, model._init_weights)
    assert_same(model, reference)
    ids = torch.arange(6)[None]
    assert_close(model(ids).logits, reference(ids).logits)


# --- what has values already --------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_what_is_not_on_the_meta_device_keeps_its_values():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3), nn.BatchNorm1d(3))
    model[0] = nn.Linear(4, 4)
    model[1].weight = nn.Parameter(torch.full((3, 4), 2.0))
    model[2].running_mean = torch.full((3,), 5.0)
    first = model[0].weight.detach().clone()
    fully_shard(model[0], mesh=cpu_mesh())
    fully_shard(model, mesh=cpu_mesh())
    torch.manual_seed(3)
    assert materialize(model) == []
    assert_close(model[0].weight.full_tensor(), first)
    assert_close(model[1].weight.full_tensor(), torch.full((3, 4), 2.0))
    assert_close(model[2].running_mean, torch.full((3,), 5.0))
    torch.manual_seed(3)
    drawn = nn.Linear(4, 3)
    assert_close(model[1].bias.full_tensor(), drawn.bias, rtol=0, atol=0)
    before = torch.get_rng_state()
    assert materialize(model) == []  # nothing is left to do
    assert torch.equal(torch.get_rng_state(), before)


# --- errors -------------------------------------------------------------------------------------------------------------------------


class Forgetful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.extra = nn.Parameter(torch.empty(5))
        self.register_buffer("mask", torch.empty(4), persistent=False)
        self.register_buffer("ticks", torch.empty(4, dtype=torch.int32))


@on_ranks(2)
def test_modules_without_reset_parameters_are_listed_before_anything_is_changed():
    model = sharded(lambda: nn.Sequential(Forgetful(), nn.Linear(2, 2)), cpu_mesh())
    state = torch.get_rng_state()
    with pytest.raises(MaterializationError) as error:
        materialize(model)
    rank = dist.get_rank()
    assert str(error.value) == (
        f"[rank {rank}] 1 modules own parameters on the meta device and have no reset_parameters()\n"
        "  0 (Forgetful): extra (5,)\n"
        "  expected: a method reset_parameters() that writes the module's own parameters and buffers\n"
        "  fix:      write one, or pass init_fn=<a function that initializes one module>; nothing was changed"
    )
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert torch.equal(torch.get_rng_state(), state)


@on_ranks(2)
def test_what_nothing_wrote_is_named_and_stays_on_the_meta_device():
    model = sharded(lambda: nn.Sequential(Forgetful(), nn.Linear(2, 2)), cpu_mesh())
    with pytest.raises(MaterializationError) as error:
        materialize(model, reset)
    assert str(error.value) == (
        f"[rank {dist.get_rank()}] 3 parameters or buffers were written by no initialization\n"
        "  0.extra\n"
        "  0.mask\n"
        "  0.ticks\n"
        "  expected: init_fn(module) of the module that owns it to write each; these stay on the meta device\n"
        "  fix:      write it there, and call materialize again; or pass strict=False and load it from a checkpoint"
    )
    on_meta = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    assert on_meta == ["0.extra", "0.mask", "0.ticks"]
    with pytest.raises(MaterializationError, match=r"0.extra"):
        model(torch.ones(1, 3))
    kept = model[0].linear.weight.full_tensor()

    def complete(module: nn.Module) -> None:
        if isinstance(module, Forgetful):
            module.extra.data.fill_(1)
            module.mask = torch.ones(4)
            module.ticks.zero_()

    assert materialize(model, complete) == []
    assert_close(model[0].linear.weight.full_tensor(), kept)
    assert_close(model[0].extra.full_tensor(), torch.ones(5))
    assert list(model.state_dict()) == ["0.extra", "0.ticks", "0.linear.weight", "0.linear.bias", "1.weight", "1.bias"]


@on_ranks(2)
def test_without_strict_what_nothing_wrote_is_nan_and_returned():
    model = sharded(lambda: nn.Sequential(Forgetful()), cpu_mesh())
    assert materialize(model, reset, strict=False) == ["0.extra", "0.mask", "0.ticks"]
    assert model[0].extra.full_tensor().isnan().all()
    assert model[0].mask.isnan().all()
    assert model[0].ticks.tolist() == [0, 0, 0, 0]


@on_ranks(2)
def test_an_exception_in_the_function_leaves_a_model_that_can_be_materialised_again():
    reference = unsharded(Net)
    model = sharded(Net, cpu_mesh())
    visited = []

    def failing(module: nn.Module) -> None:
        visited.append(module)
        reset(module)
        if isinstance(module, Block) and module is model.blocks[1]:
            raise RuntimeError("half-way")

    with pytest.raises(RuntimeError, match="half-way"):
        materialize(model, failing)
    assert model.blocks[1].scale.is_meta
    assert model.blocks[2].up.weight.is_meta
    assert isinstance(model.blocks[1].scale, DTensor)
    assert not model.blocks[0].scale.is_meta
    materialize(model)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert_close(model.rotary.angles, reference.rotary.angles)
    model(torch.arange(8)).sum().backward()


@on_ranks(1)
def test_wrong_arguments_are_refused():
    with pytest.raises(ArgumentError, match=r"expected: an nn\.Module"):
        materialize([nn.Linear(2, 2)])
    with pytest.raises(TypeError, match="init_fn='normal'"):
        materialize(nn.Linear(2, 2), "normal")
    with torch.device("meta"):
        model = nn.Linear(2, 2)

    def replace(module: nn.Module) -> None:
        module.weight = nn.Parameter(torch.ones(3, 2))

    fully_shard(model, mesh=cpu_mesh())
    with pytest.raises(MaterializationError, match=r"replaced weight of FSDPLinear by \(3, 2\)"):
        materialize(model, replace)


# --- the manual ways ----------------------------------------------------------------------------------------------------------------


@on_ranks(2, 3)
@pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete support:UserWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_to_empty_and_reset_parameters_through_dtensors_works_and_trains():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    fully_shard(model[0], mesh=cpu_mesh())
    fully_shard(model, mesh=cpu_mesh())
    for tensor in (*model.parameters(), *model.buffers()):
        assert tensor.device == torch.device("meta")
    model.to_empty(device="cpu")
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    values = [param.full_tensor().detach() for param in model.parameters()]
    assert all(value.isfinite().all() and value.abs().max() < 1 for value in values)
    reference = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    for param, value in zip(reference.parameters(), values, strict=True):
        param.data.copy_(value)
    assert_trains_like(model, reference)


@on_ranks(2)
@pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete support:UserWarning")
def test_to_empty_keeps_ties_inside_a_group():
    """torch's ``to_empty`` makes a parameter of its own for every place of a tied one; the group makes them one again."""
    model = sharded(Net, cpu_mesh())
    model.to_empty(device="cpu")
    assert model.head.weight is model.embed.weight
    assert model.blocks[0].up.weight is model.blocks[0].tied.weight
    for param in model.parameters():
        nn.init.normal_(param)
    model(torch.arange(8)).sum().backward()
    assert model.head.weight is model.embed.weight
    for block in model.blocks:
        assert block.up.weight is block.tied.weight
        assert block.up.weight.grad is not None


@on_ranks(2, 3)
def test_loading_dtensors_into_a_meta_model_with_assign_works_and_trains():
    """As in the tutorial: a full state dict, each entry distributed as ``state_dict()`` of the meta model says."""
    reference = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    full = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    fully_shard(model[0], mesh=cpu_mesh())
    fully_shard(model, mesh=cpu_mesh())
    meta = model.state_dict()
    shards = {
        name: nn.Parameter(distribute_tensor(tensor, meta[name].device_mesh, meta[name].placements)) for name, tensor in full.items()
    }
    model.load_state_dict(shards, assign=True)
    assert_trains_like(model, reference)


def assert_trains_like(model: nn.Module, reference: nn.Module) -> None:
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in (model, reference)]
    for step in range(3):
        torch.manual_seed(step)
        x = torch.randn(4, 5)
        for net, optimizer in zip((model, reference), optimizers, strict=True):
            net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for param, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        assert_close(param.full_tensor(), wanted.detach())


# --- memory -------------------------------------------------------------------------------------------------------------------------


def stack(num_blocks: int = 6, width: int = 128) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.Linear(width, width)) for _ in range(num_blocks)])


SHARDED = 6 * 2 * (128 * 128 + 128) * 4 // 2  # bytes on each of two ranks
GROUP = SHARDED // 6  # one group's shard
SLACK = 6 * 1024  # alignment and scalars


@on_ranks(2)
def test_materialize_adds_one_module_and_one_groups_shard():
    model = shard_blocks(stack())
    with PeakBytes() as live:
        materialize(model)
    module = (128 * 128 + 128) * 4
    assert SHARDED < live.peak <= SHARDED + max(module, GROUP) + SLACK


@on_ranks(2)
def test_materialize_by_one_function_at_the_root_adds_one_parameter():
    model = shard_blocks(stack())

    def init_all(module: nn.Module) -> None:
        if module is model:
            for param in module.parameters():
                nn.init.normal_(param, std=0.02)

    with PeakBytes() as live:
        materialize(model, init_all)
    assert SHARDED < live.peak <= SHARDED + 128 * 128 * 4 + GROUP + SLACK


@on_ranks(2)
def test_to_empty_adds_one_group():
    model = shard_blocks(stack())
    with PeakBytes() as live:
        model.to_empty(device="cpu")
    assert SHARDED <= live.peak <= SHARDED + GROUP + SLACK


@on_ranks(2)
@pytest.mark.parametrize("change", ["dtype", "device"])
def test_apply_adds_one_group(change):
    model = shard_blocks(stack())
    materialize(model)
    with PeakBytes() as live:
        torch._foreach_add_([param.detach().to_local() for param in model.parameters()], 0)  # count what is there
        before = live.peak
        model.to(torch.float64) if change == "dtype" else model._apply(torch.clone)
    assert SHARDED <= before <= SHARDED + SLACK
    bytes_after = SHARDED * (2 if change == "dtype" else 1)
    group_after = GROUP * (2 if change == "dtype" else 1)
    assert live.peak <= max(before, bytes_after) + group_after + SLACK


@on_ranks(2)
@pytest.mark.parametrize("assign", [True, False])
def test_loading_adds_one_group(assign):
    model = shard_blocks(stack())
    if not assign:
        materialize(model)
    meta = model.state_dict()
    with PeakBytes() as live:
        if not assign:
            torch._foreach_add_([param.detach().to_local() for param in model.parameters()], 0)
        loaded = {}
        for name, value in meta.items():
            local = torch.ones(value.to_local().shape)
            loaded[name] = nn.Parameter(DTensor.from_local(local, value.device_mesh, value.placements, run_check=False))
        del value, meta
        model.load_state_dict(loaded, assign=assign)
        loaded.clear()
        for block in model:  # the first use takes each group's parameters over
            with torch.no_grad():
                block.unshard()
                block.reshard()
    unsharded_group = 2 * GROUP
    checkpoint = 0 if assign else SHARDED
    assert live.peak <= SHARDED + checkpoint + GROUP + 2 * unsharded_group + SLACK
    assert all(param.full_tensor().eq(1).all() for param in model.parameters())
