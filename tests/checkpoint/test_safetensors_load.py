"""``load_safetensors`` on real ranks and files: the values are the unsharded model's, and each rank reads its share."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp2 import CPUOffloadPolicy, MaterializationError, fully_shard
from fsdp2.checkpoint import CheckpointError, Concat, LoadReport, Split, load_safetensors
from fsdp2.checkpoint.safetensors_load import Mismatch
from harness import cpu_mesh, on_ranks
from harness.checkpoints import Odd, on_rank_0, whole
from harness.memory import PeakBytes
from harness.models import mlp, transformer
from harness.sharding import shard_blocks
from harness.training import assert_same_tensors


def stored(model, folder, but=()):
    """The folder with the model's tensors in one file, written by the library itself. Collective: yes."""
    if dist.get_rank() == 0:
        folder.mkdir(exist_ok=True)
        tied = {"two.weight", "head.weight", *but}
        tensors = {key: value.detach().clone().contiguous() for key, value in model.state_dict().items() if key not in tied}
        save_file(tensors, folder / "model.safetensors")
    dist.barrier()
    return folder


def other_and_stored(start, folder, make=mlp):
    """A model on the device ``start``, another one, and the latter's folder. Collective: yes."""
    reference = make(seed=1)
    stored(reference, folder)
    with torch.device(start):
        return make(seed=2), reference, folder


def assert_equal_models(model, reference):
    assert_same_tensors(whole(dict(model.state_dict())), reference.state_dict(), "value")


def share(model):
    """Bytes that this rank keeps of the parameters and persistent buffers."""
    buffers = [value for name, value in model.named_buffers() if name in model.state_dict()]
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in (*model.parameters(), *buffers))


# --- values and bytes -----------------------------------------------------------------------------------------------------------


@on_ranks(2, 3)
@pytest.mark.parametrize("start", ["meta", "cpu"])
def test_values_equal_the_unsharded_model_and_bytes_the_share(tmp_path, start):
    model, reference, folder = other_and_stored(start, tmp_path)
    shard_blocks(model)
    before = list(model.parameters())
    report = load_safetensors(model, folder)
    assert all(one is other for one, other in zip(before, model.parameters(), strict=True))
    assert_equal_models(model, reference)
    assert sorted(report.loaded) == sorted(reference.state_dict())
    assert [*report.missing, *report.unexpected, *report.mismatched, *report.initialized, *report.uninitialized] == []
    assert report.bytes_read == share(model)
    x = torch.randn(4, 7)
    assert torch.equal(model(x).cpu(), reference(x))


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("start", ["meta", "cpu"])
@pytest.mark.parametrize("dim", [0, -1])
def test_odd_tensors(tmp_path, start, dim):
    model, reference, folder = other_and_stored(start, tmp_path, Odd)
    fully_shard(model, mesh=cpu_mesh(), shard_placement_fn=lambda p: Shard(p.ndim - 1 if dim else 0) if p.ndim else None)
    report = load_safetensors(model, folder)
    assert_equal_models(model, reference)
    assert model.two.weight is model.one.weight
    assert torch.equal(model.cache.cpu(), reference.cache)
    assert not model.frozen.requires_grad
    assert report.initialized == (["cache"] if start == "meta" else [])
    if dim == 0:
        assert report.bytes_read == share(model)


@on_ranks(4)
@pytest.mark.parametrize("start", ["meta", "cpu"])
@pytest.mark.parametrize("how", ["hsdp", "cpu offload"])
def test_each_replica_and_each_host_reads_a_share(tmp_path, start, how):
    model, reference, folder = other_and_stored(start, tmp_path)
    shard_blocks(model, **({"mesh": cpu_mesh(2, 2)} if how == "hsdp" else {"offload_policy": CPUOffloadPolicy()}))
    report = load_safetensors(model, folder)
    assert_equal_models(model, reference)
    assert report.bytes_read == share(model)


@on_ranks(4)
@pytest.mark.parametrize("start", ["meta", "cpu"])
@pytest.mark.parametrize("hidden", [8, 10, 5, 3])
def test_tensor_parallelism_below_fully_shard(tmp_path, start, hidden):
    def make(seed):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, hidden), nn.Linear(hidden, 6))

    reference = make(1)
    folder = stored(reference, tmp_path)
    with torch.device(start):
        model = make(2)
    mesh = cpu_mesh(2, 2, names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    load_safetensors(model, folder)
    for name, param in model.named_parameters():
        expected = reference.get_parameter(name).detach()
        tp_dim = {"0.weight": 0, "0.bias": 0, "1.weight": 1}.get(name)
        for dim, axis in ((tp_dim, "tp"), (0, "dp")):  # tensor parallelism has cut first
            if dim is not None:
                chunks, rank = expected.chunk(2, dim), mesh[axis].get_local_rank()
                expected = chunks[rank] if rank < len(chunks) else expected.narrow(dim, 0, 0)
        assert torch.equal(param.to_local(), expected), name


@on_ranks(2)
def test_models_that_fsdp2_does_not_manage(tmp_path):
    """Unsharded, torch's own FSDP2, plain DTensors; from the meta device."""
    reference = mlp(seed=1)
    folder = stored(reference, tmp_path)
    for kind in ("plain", "torch", "dtensor"):
        with torch.device("meta"):
            model = mlp()
        if kind == "torch":
            for block in model.blocks:
                torch.distributed.fsdp.fully_shard(block, mesh=cpu_mesh())
            torch.distributed.fsdp.fully_shard(model, mesh=cpu_mesh())
        if kind == "dtensor":
            for module in model.modules():
                for name, param in module._parameters.items():
                    if param is not None:
                        placement = Shard(0) if param.ndim > 1 else Replicate()
                        placed = distribute_tensor(param, cpu_mesh(), [placement])
                        module._parameters[name] = nn.Parameter(placed)
        report = load_safetensors(model, folder, device="cpu")
        assert_equal_models(model, reference)
        if kind == "plain":
            assert report.bytes_read == sum(p.nbytes for p in reference.parameters())
        if kind != "dtensor":
            x = torch.randn(4, 7)
            torch.testing.assert_close(model(x), reference(x))


@on_ranks(2)
@pytest.mark.parametrize("start", ["meta", "cpu"])
def test_dtypes_are_converted_on_the_way(tmp_path, start):
    """As Tensor.to does; into another dtype each, in both directions."""
    reference = mlp(seed=1)
    wanted = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
    folder = stored(mlp(seed=1).bfloat16(), tmp_path)
    for dtype in wanted:
        with torch.device(start):
            model = mlp(seed=2).to(dtype)
        shard_blocks(model)
        load_safetensors(model, folder)
        for name, value in reference.state_dict().items():
            assert torch.equal(whole(model.state_dict()[name]), value.bfloat16().to(dtype))


@on_ranks(2)
def test_fused_weights_are_read_by_the_ranks_that_keep_them(tmp_path):
    tensors = {f"{name}.weight": torch.randn(rows, 4) for name, rows in (("q", 6), ("k", 3), ("v", 3), ("gate_up", 10))}
    on_rank_0(lambda: save_file(tensors, tmp_path / "model.safetensors"))
    with torch.device("meta"):
        model = nn.ModuleDict({name: nn.Linear(4, rows, bias=False) for name, rows in (("qkv", 12), ("gate", 5), ("up", 5))})
    fully_shard(list(model.values()), mesh=cpu_mesh())
    rules = [
        Concat(["q.weight", "k.weight", "v.weight"], "qkv.weight"),
        Split("gate_up.weight", ["gate.weight", "up.weight"]),
    ]
    report = load_safetensors(model, tmp_path, key_map=rules)
    assert torch.equal(whole(model["qkv"].weight), torch.cat([tensors[f"{name}.weight"] for name in "qkv"]))
    assert torch.equal(torch.cat([whole(model["gate"].weight), whole(model["up"].weight)]), tensors["gate_up.weight"])
    assert report.bytes_read == share(model)


@on_ranks(2)
def test_a_step_follows_and_a_loaded_model_forgets_what_was_unsharded(tmp_path):
    """The root stays unsharded after its forward; what it had gathered is not what is loaded."""
    model, reference, folder = other_and_stored("cpu", tmp_path)
    shard_blocks(model)
    x = torch.randn(4, 7)
    model(x)
    load_safetensors(model, folder)
    assert torch.equal(model(x), reference(x))
    model(x).sum().backward()
    reference(x).sum().backward()
    torch.testing.assert_close(whole(model.first.weight.grad), reference.first.weight.grad)


@on_ranks(2)
def test_names_are_those_without_wrappers(tmp_path):
    """Activation checkpointing and the compiler put modules around modules."""
    model, reference, folder = other_and_stored("meta", tmp_path)
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    model.blocks[1].up = torch.compile(model.blocks[1].up, backend="eager")
    shard_blocks(model)
    report = load_safetensors(model, folder)
    assert sorted(report.loaded) == sorted(reference.state_dict())
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(whole(ours), theirs)


def test_progress_is_shown_where_it_is_wanted(tmp_path, capsys):
    save_file(mlp().state_dict(), tmp_path / "model.safetensors")
    load_safetensors(mlp(), tmp_path)
    assert capsys.readouterr() == ("", "")  # no terminal
    load_safetensors(mlp(), tmp_path, progress=True)
    assert "loading" in capsys.readouterr().err


# --- ties, buffers, what is not in the checkpoint -------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("name", ["embedding.weight", "head.weight"])
def test_tied_parameters_come_under_any_of_their_names(tmp_path, name):
    reference = transformer(tied=True, seed=1)
    state = {key: value for key, value in reference.state_dict().items() if key not in ("embedding.weight", "head.weight")}
    on_rank_0(lambda: save_file({**state, name: reference.embedding.weight.detach()}, tmp_path / "model.safetensors"))
    with torch.device("meta"):
        model = transformer(tied=True)
    fully_shard(model.embedding, mesh=cpu_mesh())
    shard_blocks(model)
    load_safetensors(model, tmp_path)
    assert model.head.weight is model.embedding.weight
    assert_equal_models(model, reference)


@on_ranks(2)
def test_a_parameter_with_a_weak_reference_is_replaced(tmp_path):
    model, reference, folder = other_and_stored("meta", tmp_path)
    shard_blocks(model)
    kept = weakref.ref(model.first.weight)
    load_safetensors(model, folder)
    assert kept() is not model.first.weight
    assert_equal_models(model, reference)


@on_ranks(2)
def test_what_nothing_initializes_is_named_and_stays_on_the_meta_device(tmp_path):
    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("cache", torch.zeros(4), persistent=False)

    folder = stored(Cached(), tmp_path)

    def new():
        with torch.device("meta"):
            model = Cached()
        return fully_shard(model, mesh=cpu_mesh())

    with pytest.raises(MaterializationError, match="cache"):
        load_safetensors(new(), folder)
    model = new()
    report = load_safetensors(model, folder, strict=False)
    assert report.uninitialized == ["cache"]
    assert model.cache.is_meta
    model = new()
    report = load_safetensors(model, folder, init_fn=lambda module: module.cache.fill_(3) if isinstance(module, Cached) else None)
    assert report.initialized == ["cache"]
    assert torch.equal(model.cache, torch.full((4,), 3.0))
    assert report.loaded == ["linear.weight", "linear.bias"]


@on_ranks(2)
@pytest.mark.parametrize("start", ["meta", "cpu"])
def test_without_strict_missing_values_are_initialized_and_loaded_ones_stay(tmp_path, start):
    reference = mlp(seed=1)
    folder = stored(reference, tmp_path, but=("last.weight", "blocks.1.up.bias"))
    with torch.device(start):
        model = mlp(seed=2)
    shard_blocks(model)
    with pytest.raises(CheckpointError, match=r"2 keys missing(.|\n)*blocks.1.up.bias: is not in the checkpoint"):
        load_safetensors(model, folder)
    assert all(param.is_meta == (start == "meta") for param in model.parameters())
    torch.manual_seed(3)
    report = load_safetensors(model, folder, strict=False)
    assert report.missing == ["blocks.1.up.bias", "last.weight"]
    assert report.initialized == (report.missing if start == "meta" else [])
    for name, value in reference.state_dict().items():
        actual = whole(model.state_dict()[name])
        if name not in report.missing:
            assert torch.equal(actual, value), name
        else:
            assert actual.isfinite().all()
            if start == "cpu":
                assert torch.equal(actual, mlp(seed=2).state_dict()[name])


@on_ranks(2)
def test_keys_and_shapes_of_another_model_are_all_named_and_nothing_is_changed(tmp_path):
    other = mlp(seed=1, dim=11)
    other.extra = nn.Linear(2, 2)
    folder = stored(other, tmp_path, but=("last.bias",))
    model = shard_blocks(mlp(seed=2))
    before = {name: param.to_local().clone() for name, param in model.named_parameters()}
    with pytest.raises(CheckpointError) as caught:
        load_safetensors(model, folder)
    report = caught.value.report
    assert report.missing == ["last.bias"]
    assert report.unexpected == ["extra.bias", "extra.weight"]
    assert "last.weight: float32 (5, 10) in the model, F32 (5, 11) in the checkpoint" in map(str, report.mismatched)
    assert str(report.mismatched[0]) in str(caught.value)  # which shows the first few
    with pytest.raises(CheckpointError):
        load_safetensors(model, folder, strict=False)  # as load_state_dict
    assert all(torch.equal(param.to_local(), before[name]) for name, param in model.named_parameters())
    report = load_safetensors(model, folder, strict=False, ignore_mismatched=True)
    assert report.loaded == ["blocks.0.scale", "blocks.1.scale", "blocks.2.scale"]
    assert torch.equal(model.last.weight.to_local(), before["last.weight"])


# --- memory ---------------------------------------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_the_shards_one_group_more_and_two_buffers(tmp_path, dtype):
    """Of four equal layers on two ranks: no full layer anywhere."""
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(4)])
    layer_nbytes = 256 * 256 * 4
    on_rank_0(
        lambda: save_file(
            {f"{index}.weight": torch.full((256, 256), index, dtype=dtype) for index in range(4)}, tmp_path / "model.safetensors"
        )
    )
    shard_blocks(model)
    with PeakBytes() as memory:
        load_safetensors(model, tmp_path)
    shards = 4 * layer_nbytes // 2
    buffers = 0 if dtype is torch.float32 else 16 << 20  # none to read straight into place
    assert shards <= memory.peak <= shards + layer_nbytes // 2 + buffers + 4096
    assert all((param.to_local() == index).all() for index, param in enumerate(model.parameters()))


def test_a_report_shows_counts_and_the_first_names_that_need_a_look():
    mismatch = Mismatch("head.weight", (4, 2), torch.float32, (3, 2), ("float32",))
    report = LoadReport(
        loaded=[f"layers.{index}" for index in range(500)],
        missing=["a", "b", "c", "d"],
        mismatched=[mismatch],
        bytes_read=1_000,
    )
    assert str(report) == (
        "LoadReport(500 loaded; 4 missing (a, b, c, ...); "
        "1 mismatched (head.weight: float32 (4, 2) in the model, float32 (3, 2) in the checkpoint); 1,000 bytes read by this rank)"
    )
    assert str(LoadReport()) == "LoadReport(0 loaded; 0 bytes read by this rank)"
