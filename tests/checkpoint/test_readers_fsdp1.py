"""What torch's own FSDP1 has saved is read as the unsharded model and its optimizer, in every form that it saves.

The oracle is the unsharded model trained with the same arithmetic; and for the bits of the model, FSDP1's own full parameters.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1
from torch.distributed.fsdp import StateDictType
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from fsdp2 import fully_shard
from fsdp2.checkpoint import CheckpointError, convert, load_checkpoint, open_source
from harness import cpu_mesh, on_ranks
from harness.checkpoints import on_rank_0, read, whole
from harness.models import batches, mlp
from harness.sharding import shard_blocks
from harness.training import adamw

pytestmark = pytest.mark.filterwarnings("ignore")  # FSDP1 and ShardedTensor are deprecated, and say so

FULL, SHARDED, LOCAL = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT, StateDictType.LOCAL_STATE_DICT


def trained_by_fsdp1(orig: bool, mesh: DeviceMesh | None = None, rank: int | None = None, size: int = 2) -> tuple[Fsdp1, Any]:
    """Several FSDP instances, none of which divides evenly."""
    options = {"device_id": torch.device("cpu"), "use_orig_params": orig, "device_mesh": mesh}
    model: Any = mlp()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = Fsdp1(block, **options)
    model = Fsdp1(model, **options)
    optimizer = adamw(model.parameters())
    for x in batches(2):
        model(x.chunk(size)[dist.get_rank() if rank is None else rank]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def trained_unsharded(num_chunks: int = 2) -> tuple[nn.Module, Any]:
    model = mlp()
    optimizer = adamw(model.parameters())
    for x in batches(2):
        (sum(model(chunk).square().mean() for chunk in x.chunk(num_chunks)) / num_chunks).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def save(model: Fsdp1, optimizer: Any, folder: Path, kind: StateDictType, rank: int, how: str) -> None:
    """``how``: "ranks", one file of each rank; "dcp"; "raw", the former with every rank's own ``optimizer.state_dict()``."""
    folder.mkdir(exist_ok=True)
    with Fsdp1.state_dict_type(model, kind):
        state = model.state_dict()
        named = optimizer.state_dict() if how == "raw" else Fsdp1.optim_state_dict(model, optimizer)
    if how == "dcp":
        dcp.save({"model": state, "optimizer": named}, checkpoint_id=folder)
    else:
        torch.save(state, folder / f"model_rank{rank}.pt")
        torch.save(named, folder / f"optim_rank{rank}.pt")
    dist.barrier()


def assert_is_the_unsharded_one(source: Any, full: dict[str, Tensor], with_optimizer: bool = True) -> None:
    model, optimizer = trained_unsharded()
    assert list(source.model) == list(model.state_dict())
    for name, param in model.named_parameters():
        value = read(source.model[name])
        assert torch.equal(value, full[name]), name
        torch.testing.assert_close(value, param.detach(), atol=1e-6, rtol=1e-5)
    if not with_optimizer:
        return
    assert source.optimizer["param_groups"][0]["params"] == [name for name, _ in model.named_parameters()]
    assert source.optimizer["param_groups"][0]["lr"] == 0.01
    assert source.optimizer["state"].keys() == dict(model.named_parameters()).keys()
    for name, param in model.named_parameters():
        for key, value in optimizer.state[param].items():
            torch.testing.assert_close(read(source.optimizer["state"][name][key]), value, atol=1e-7, rtol=1e-5)


def full_params(model: Fsdp1) -> dict[str, Tensor]:
    with Fsdp1.summon_full_params(model):
        return {name.replace("_fsdp_wrapped_module.", ""): param.detach().clone() for name, param in model.named_parameters()}


CASES = [
    ("flat", FULL, "ranks"),
    ("flat", SHARDED, "ranks"),
    ("flat", SHARDED, "dcp"),
    ("flat", LOCAL, "ranks"),
    ("flat", LOCAL, "dcp"),
    ("flat", LOCAL, "raw"),
    ("original", FULL, "ranks"),
    ("original", SHARDED, "ranks"),
    ("original", SHARDED, "dcp"),
    ("original", LOCAL, "ranks"),
    ("original", LOCAL, "dcp"),
    ("original", LOCAL, "raw"),
    ("mesh", SHARDED, "ranks"),
    ("mesh", SHARDED, "dcp"),
]


@on_ranks(2)
@pytest.mark.parametrize(("params", "kind", "how"), CASES, ids=lambda each: getattr(each, "name", each))
def test_every_form_is_read_as_the_unsharded_state(tmp_path: Path, params: str, kind: StateDictType, how: str) -> None:
    model, optimizer = trained_by_fsdp1(params != "flat", cpu_mesh() if params == "mesh" else None)
    save(model, optimizer, tmp_path / "fsdp1", kind, dist.get_rank(), how)
    full = full_params(model)
    source = open_source(tmp_path / "fsdp1", shapes=mlp() if kind is LOCAL else None)
    # On the CPU, torch's own full optimizer state is wrong with use_orig_params; there is no use in reading it as anything else.
    assert_is_the_unsharded_one(source, full, with_optimizer=not (params == "original" and kind is FULL))


@on_ranks(4)
def test_two_ranks_of_fsdp1_become_four_of_fsdp2_of_either_kind_and_none(tmp_path: Path) -> None:
    mesh = cpu_mesh(2, 2, names=("member", "pair"))  # FSDP1 takes the first axis of a larger mesh for its own
    member = mesh.get_local_rank("member")
    model, optimizer = trained_by_fsdp1(True, mesh["member"], rank=member)
    folder = tmp_path / f"pair{mesh.get_local_rank('pair')}"
    save(model, optimizer, folder, SHARDED, member, "ranks")
    on_rank_0(
        lambda: convert(
            tmp_path / "pair0" / "model_rank1.pt", tmp_path / "out", to="dcp", optimizer=tmp_path / "pair0" / "optim_rank1.pt"
        )
    )
    expected, expected_optimizer = trained_unsharded()
    for shard in (fully_shard, torch_fully_shard, None):
        loaded_model = mlp(seed=5)
        if shard is not None:
            for block in loaded_model.blocks:
                shard(block, mesh=cpu_mesh())
            shard(loaded_model, mesh=cpu_mesh())
        loaded_optimizer = torch.optim.AdamW(loaded_model.parameters(), lr=1.0)
        model_state, optimizer_state = get_state_dict(loaded_model, loaded_optimizer)
        dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=tmp_path / "out")
        set_state_dict(loaded_model, loaded_optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
        assert loaded_optimizer.param_groups[0]["lr"] == 0.01
        for (name, param), other in zip(loaded_model.named_parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(whole(param), other.detach(), atol=1e-6, rtol=1e-5, msg=name)
            for key, value in expected_optimizer.state[other].items():
                torch.testing.assert_close(whole(loaded_optimizer.state[param][key]), value, atol=1e-7, rtol=1e-5)


@on_ranks(2)
def test_a_sharded_checkpoint_loads_straight_into_a_sharded_model(tmp_path: Path) -> None:
    model, optimizer = trained_by_fsdp1(False)
    save(model, optimizer, tmp_path / "fsdp1", SHARDED, dist.get_rank(), "ranks")
    full = full_params(model)
    with torch.device("meta"):
        other: Any = mlp()
    shard_blocks(other)
    report = load_checkpoint(other, tmp_path / "fsdp1")
    assert report.bytes_read <= sum(param.to_local().nbytes for param in other.parameters())
    for name, param in other.named_parameters():
        assert torch.equal(param.full_tensor(), full[name]), name


# --- bad input --------------------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_missing_mixed_and_truncated_files_are_errors_that_name_them_and_leave_nothing(tmp_path: Path) -> None:
    model, optimizer = trained_by_fsdp1(False)
    folder = tmp_path / "fsdp1"
    save(model, optimizer, folder, SHARDED, dist.get_rank(), "ranks")
    save(model, optimizer, tmp_path / "local", LOCAL, dist.get_rank(), "ranks")
    if dist.get_rank() != 0:
        return
    second = folder / "model_rank1.pt"
    data = second.read_bytes()

    def fails(match: str, **options: Any) -> None:
        for to in ("dcp", "torch", "safetensors"):
            with pytest.raises(CheckpointError, match=match):
                convert(options.get("src", folder), tmp_path / "out", to=to, progress=False)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["fsdp1", "local"]

    second.write_bytes(data[: len(data) // 2])
    fails(r"model_rank1\.pt cannot be read")
    second.unlink()
    fails(r"first\.weight .*is not whole: 35 of 70(?s:.*)of rank 1")
    (folder / "model_rank2.pt").write_bytes(data)
    fails(r"does not have the files of ranks \[1\]")
    (folder / "model_rank2.pt").unlink()
    other = {name: value if name != "first.bias" else torch.zeros(3) for name, value in mlp().state_dict().items()}
    torch.save(other, second)
    fails(r"first\.weight is not the same tensor in all files: .*model_rank1\.pt has a Stored")
    fails(r"local state dict of FSDP1: _flat_param(?s:.*)--shapes", src=tmp_path / "local" / "model_rank0.pt")
    with pytest.raises(CheckpointError, match=r"_flat_param has 135 elements"):
        open_source(tmp_path / "local", shapes=mlp(dim=11))
