"""``convert`` and ``fsdp2 convert``: every target, as its own library reads it; whole or not at all; in bounded memory."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from fsdp2 import ArgumentError
from fsdp2.checkpoint import Checkpointer, CheckpointError, convert, open_source, save_full_state, write_shapes
from fsdp2.checkpoint.conversion import targets
from fsdp2.checkpoint.file_reading import ByteReader
from fsdp2.cli import main
from harness import cpu_mesh, on_ranks
from harness.checkpoints import trained
from harness.models import batches, mlp, transformer
from harness.sharding import shard_blocks
from harness.training import adamw

TARGETS = ("dcp", "torch", "safetensors")


class Odd(nn.Module):
    """Dtypes, strides, empty and 0-d tensors, ties, extra state."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.wide = nn.Parameter(torch.randn(5, 3, 4, generator=generator).permute(2, 0, 1))
        self.small = nn.Parameter(torch.randn(9, generator=generator).bfloat16())
        self.tied = self.small
        self.scalar = nn.Parameter(torch.randn((), generator=generator))
        self.register_buffer("none", torch.empty(0, 3))
        self.register_buffer("count", torch.arange(6, dtype=torch.int64).view(2, 3))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("tail", torch.arange(10.0)[4:])
        self.extra = {"epoch": seed}

    def get_extra_state(self) -> dict[str, int]:
        return self.extra

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.extra = state


def assert_same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        if isinstance(value, Tensor):
            assert actual[name].dtype is value.dtype, name
            assert torch.equal(actual[name], value), name
        else:
            assert actual[name] == value


def load_target(path: Path, to: str, like: dict[str, Any]) -> dict[str, Any]:
    """The model's state, by the libraries' own readers."""
    if to == "torch":
        return torch.load(path, weights_only=True, mmap=True)  # type: ignore[no-any-return]
    if to == "safetensors":
        return load_file(path / "model.safetensors")
    state = {name: torch.empty_like(value) if isinstance(value, Tensor) else {"epoch": 0} for name, value in like.items()}
    dcp.load({"model": state}, checkpoint_id=path, no_dist=True)
    return state


def stepped(model: nn.Module, x: Tensor | None = None) -> torch.optim.Optimizer:
    """The optimizer of one step."""
    optimizer: torch.optim.Optimizer = adamw(model.parameters())
    model(batches(1)[0] if x is None else x).sum().backward()
    optimizer.step()
    return optimizer


quiet_dcp = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@quiet_dcp
@pytest.mark.parametrize("band_nbytes", [64 << 20, 48], ids=["whole", "bands"])
@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("through", TARGETS)
def test_every_target_is_read_by_its_own_library_and_converts_on(tmp_path: Path, through: str, to: str, band_nbytes: int) -> None:
    model = Odd(seed=3)
    expected = dict(model.state_dict())
    torch.save(model.state_dict(), tmp_path / "start.pt")
    with patch.object(targets, "BAND_NBYTES", band_nbytes):
        convert(tmp_path / "start.pt", tmp_path / "middle", to=through)
        convert(tmp_path / "middle", tmp_path / "end", to=to)
    if "safetensors" in (through, to):
        del expected["_extra_state"]
    if through == "safetensors" or (through, to) == ("torch", "safetensors"):  # DCP cannot say that two tensors are one
        del expected["tied"]
    found = load_target(tmp_path / "end", to, expected)
    assert found.keys() == expected.keys()
    assert_same(found, expected)
    if to == through == "torch":
        assert found["tied"].data_ptr() == found["small"].data_ptr()
        assert all(value.data_ptr() % 64 == 0 for value in found.values() if isinstance(value, Tensor) and value.numel())


def test_only_floating_point_tensors_of_the_model_get_the_dtype(tmp_path: Path) -> None:
    model = transformer()
    optimizer = stepped(model, torch.zeros(1, 5, dtype=torch.int64))
    model.register_buffer("count", torch.arange(3))
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer), "epoch": 4}
    torch.save(state, tmp_path / "a.pt")
    done = convert(tmp_path / "a.pt", tmp_path / "b.pt", to="torch", dtype=torch.float16)
    assert done.left_out == ("a.pt: epoch",)
    found = torch.load(tmp_path / "b.pt", weights_only=True)
    assert found["model"]["count"].dtype is torch.int64
    assert_same(found["model"], {name: value.half() for name, value in model.named_parameters()})
    for name, param in model.named_parameters():
        assert_same(found["optimizer"]["state"][name], optimizer.state[param])


def test_an_optimizer_with_numbers_gets_names_where_the_order_tells_them(tmp_path: Path) -> None:
    model = mlp()
    optimizer = stepped(model)
    save_full_state(tmp_path / "a.pt", model, optimizer)
    convert(tmp_path / "a.pt", tmp_path / "b.pt", to="torch")
    found = torch.load(tmp_path / "b.pt", weights_only=True)
    again = torch.optim.AdamW(mlp().parameters(), lr=5.0)
    again.load_state_dict(found["optimizer"])
    assert again.param_groups[0]["lr"] == 0.01
    for new, old in zip(again.param_groups[0]["params"], model.parameters(), strict=True):
        assert_same(again.state[new], optimizer.state[old])
    model.register_buffer("more", torch.ones(1))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="numbers its 22 parameters, and the model's state has 23"):
        open_source(tmp_path / "a.pt")
    assert open_source(tmp_path / "a.pt", with_optimizer=False).left_out == ["the optimizer"]


@on_ranks(2)
@pytest.mark.parametrize("flatten", [False, True])
def test_upstream_fsdp2_becomes_the_unsharded_model_and_optimizer(tmp_path: Path, flatten: bool) -> None:
    model: Any = shard_blocks(mlp(), fully_shard=torch_fully_shard)
    optimizer = trained(model)
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    dcp.save({"model": model_state, "optim": optimizer_state}, checkpoint_id=tmp_path / "dcp")
    torch.save(model_state, tmp_path / f"dtensors_world_size_2_rank_{dist.get_rank()}.pt")
    dist.barrier()
    expected = {name: param.full_tensor() for name, param in model.named_parameters()}
    moments = {name: optimizer.state[param]["exp_avg"].full_tensor() for name, param in model.named_parameters()}
    if dist.get_rank() == 0:
        convert(tmp_path / "dcp", tmp_path / "out.pt", to="torch")
        found = torch.load(tmp_path / "out.pt", weights_only=True)
        assert_same(found["model"], expected)
        plain = torch.optim.AdamW(mlp().parameters())
        plain.load_state_dict(found["optimizer"])
        for param, moment in zip(plain.param_groups[0]["params"], moments.values(), strict=True):
            assert torch.equal(plain.state[param]["exp_avg"], moment)
        convert(tmp_path / "dtensors_world_size_2_rank_0.pt", tmp_path / "out", to="safetensors")
        assert_same(load_file(tmp_path / "out" / "model.safetensors"), expected)
    dist.barrier()


@on_ranks(2)
def test_a_checkpoint_of_checkpointer_converts(tmp_path: Path) -> None:
    model: Any = torch_fully_shard(mlp(), mesh=cpu_mesh())
    optimizer = trained(model)
    with Checkpointer(tmp_path / "run", model, optimizer) as checkpointer:
        checkpointer.save(2)
        latest = checkpointer.latest()
    expected = {name: param.full_tensor() for name, param in model.named_parameters()}
    if dist.get_rank() == 0:
        assert latest is not None
        for index, source in enumerate((latest, tmp_path / "run")):  # the folder stands for its latest
            assert convert(source, tmp_path / f"{index}.pt", to="torch").optimizer
        done = convert(latest, tmp_path / "out.pt", to="torch")
        assert done.optimizer
        with pytest.raises(CheckpointError, match="an optimizer's state"):  # nothing is lost unasked
            convert(latest, tmp_path / "out", to="safetensors")
        convert(latest, tmp_path / "out", to="safetensors", with_optimizer=False)
        assert_same(torch.load(tmp_path / "out.pt", weights_only=True)["model"], expected)
    dist.barrier()


# --- the command, and bad input ---------------------------------------------------------------------------------------------------


@quiet_dcp
def test_the_command_converts_and_says_what_it_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"model": mlp().state_dict(), "epoch": 1}, tmp_path / "a.pt")
    source, target = str(tmp_path / "a.pt"), str(tmp_path / "out")
    assert main(["convert", source, target, "--to", "safetensors", "--dtype", "bf16", "--max-shard-size", "1KB"]) == 0
    assert "22 tensors from torch" in (out := capsys.readouterr().out)
    assert "left out: a.pt: epoch" in out
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert load_file(tmp_path / "out" / index["weight_map"]["last.bias"])["last.bias"].dtype is torch.bfloat16
    assert main(["convert", source, target, "--to", "safetensors"]) == 1
    assert "exists" in capsys.readouterr().err
    assert main(["convert", source, target, "--to", "safetensors", "--force", "--quiet"]) == 0
    assert capsys.readouterr().out == ""
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), mlp().state_dict())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt", "out"]


@quiet_dcp
def test_keys_say_where_model_and_optimizer_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    student, teacher = mlp(), mlp(seed=1)
    optimizer = stepped(student)
    state = {"nets": {"student": student.state_dict(), "teacher": teacher.state_dict()}, "adam": optimizer.state_dict(), "epoch": 3}
    torch.save(state, tmp_path / "a.pt")
    source, target = str(tmp_path / "a.pt"), str(tmp_path / "b.pt")
    assert main(["convert", source, target, "--to", "torch", "--model-key", "nets.student", "--optimizer-key", "adam"]) == 0
    found = torch.load(target, weights_only=True)
    assert_same(found["model"], student.state_dict())
    assert found["optimizer"]["state"].keys() == dict(student.named_parameters()).keys()
    convert(source, tmp_path / "c.pt", to="torch", model_key="nets.teacher")
    assert_same(torch.load(tmp_path / "c.pt", weights_only=True), teacher.state_dict())
    capsys.readouterr()
    assert main(["convert", source, target, "--to", "torch", "--force", "--model-key", "nets.other"]) == 1
    assert "student" in (error := capsys.readouterr().err)
    assert "nothing under nets.other" in error


@pytest.mark.parametrize("to", TARGETS)
def test_a_failure_in_the_middle_leaves_what_was_there(tmp_path: Path, to: str, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(mlp().state_dict(), tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "out", to=to)
    before = _content(tmp_path)
    read = ByteReader.read
    calls: list[str] = []

    def fail(self: ByteReader, path: Path, key: str, *arguments: Any) -> None:
        calls.append(key)
        if key == "last.bias" or len(calls) == 20:
            raise OSError(28, "No space left on device")
        read(self, path, key, *arguments)

    with patch.object(ByteReader, "read", fail):
        assert main(["convert", str(tmp_path / "a.pt"), str(tmp_path / "out"), "--to", to, "--force"]) == 1
        assert main(["convert", str(tmp_path / "a.pt"), str(tmp_path / "new"), "--to", to]) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert len(calls) > 3
    assert _content(tmp_path) == before


def _content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _runs_code(path: Path) -> bytes:
    class Exploit:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {path}",)

    buffer = io.BytesIO()
    torch.save({"model": {"weight": torch.ones(2)}, "epoch": Exploit()}, buffer)
    return buffer.getvalue()


def test_code_in_a_file_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_bytes(_runs_code(tmp_path / "ran"))
    source = open_source(tmp_path / "a.pt")
    assert source.left_out == ["a.pt: epoch"]
    assert not (tmp_path / "ran").exists()


def cut_short(path: Path) -> None:
    torch.save(mlp().state_dict(), path)
    os.truncate(path, path.stat().st_size * 2 // 3)


STRANGER = {"state": {"first.weight": {"exp_avg": torch.ones(3, 3)}}, "param_groups": [{"params": ["first.weight"]}]}
BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (cut_short, "cannot be read"),
    "legacy": (
        lambda path: torch.save(mlp().state_dict(), path, _use_new_zipfile_serialization=False),
        "cannot be read(?s:.*)an older one with torch.load",
    ),
    "pickle": (lambda path: path.write_bytes(b"PK\x03\x04" + pickle.dumps(mlp().state_dict())), "cannot be read"),
    "no model": (lambda path: torch.save({"epoch": 3}, path), "has no tensors of a model"),
    "complex": (lambda path: torch.save({"weight": torch.ones(3, dtype=torch.complex128)}, path), "complex128"),
    "text": (lambda path: path.write_text("weights"), "is not a checkpoint of a known format"),
    "absent": (lambda path: None, "there is no checkpoint"),
    "optimizer of another model": (
        lambda path: torch.save({"model": mlp().state_dict(), "optimizer": STRANGER}, path),
        r"first\.weight: \(10, 7\) in the model, exp_avg \(3, 3\)",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_files_are_errors_that_name_them(tmp_path: Path, kind: str) -> None:
    write, match = BAD[kind]
    write(tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=match) as raised:
        convert(tmp_path / "a.pt", tmp_path / "out", to="dcp")
    assert "a.pt" in str(raised.value) or raised.value.key
    assert [path.name for path in tmp_path.iterdir()] in ([], ["a.pt"])


def test_two_models_in_a_folder_and_parts_that_are_missing_are_errors(tmp_path: Path) -> None:
    (tmp_path / "two").mkdir()
    for name in ("good.pt", "better.pt"):
        torch.save(mlp().state_dict(), tmp_path / "two" / name)
    with pytest.raises(CheckpointError, match=r"has 2 models(?s:.*)better\.pt(?s:.*)good\.pt"):
        open_source(tmp_path / "two")
    (tmp_path / "parts").mkdir()
    torch.save(mlp().state_dict(), tmp_path / "parts" / "pytorch_model-00001-of-00002.bin")
    with pytest.raises(CheckpointError, match=r"parts \[2\]"):
        open_source(tmp_path / "parts")


def test_ours_says_which_parameters_the_numbers_are(tmp_path: Path) -> None:
    """Groups in another order than the model, frozen parameters and buffers hide it; torch loads the file none the less."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    model[1].requires_grad_(False)
    groups = [{"params": model[2].parameters(), "lr": 0.5}, {"params": model[0].parameters()}]
    optimizer = torch.optim.AdamW(groups)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    save_full_state(tmp_path / "a.pt", model, optimizer)
    convert(tmp_path / "a.pt", tmp_path / "b.pt", to="torch")
    found = torch.load(tmp_path / "b.pt", weights_only=True)["optimizer"]["state"]
    assert found.keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert_same(found["2.bias"], optimizer.state[model[2].bias])
    torch.optim.AdamW(groups).load_state_dict(torch.load(tmp_path / "a.pt", weights_only=True)["optimizer"])


@pytest.mark.parametrize(("name", "next_name"), [("epoch_3.pt", "epoch_4.pt"), ("step_0100.pt", "step_200.pt"), ("v1.bin", "v2.bin")])
def test_a_number_in_the_name_of_a_whole_state_makes_it_no_part(tmp_path: Path, name: str, next_name: str) -> None:
    torch.save(mlp().state_dict(), tmp_path / name)
    for path in (tmp_path / name, tmp_path):
        assert open_source(path).model.keys() == mlp().state_dict().keys()
    torch.save(mlp(seed=1).state_dict(), tmp_path / next_name)
    convert(tmp_path / name, tmp_path / "out", to="safetensors")
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), mlp().state_dict())


def test_targets_that_would_harm_the_source_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"weight": torch.ones(3)}, folder / "model.safetensors")
    for target in (folder, folder / "in", tmp_path):
        with pytest.raises(CheckpointError, match="is the source of the conversion, contains it, or lies in it"):
            convert(folder, target, to="dcp", force=True)
    (tmp_path / "file").write_text("precious")
    with pytest.raises(CheckpointError, match="is a file"):
        convert(folder, tmp_path / "file", to="dcp", force=True)
    with pytest.raises(ArgumentError, match="to is 'onnx'"):
        convert(folder, tmp_path / "out", to="onnx")
    assert (tmp_path / "file").read_text() == "precious"


@quiet_dcp
def test_the_optimizer_of_an_unsharded_dcp_folder_loads_by_name(tmp_path: Path) -> None:
    model = mlp()
    optimizer = stepped(model)
    torch.save({"state_dict": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "out", to="dcp")
    other = mlp(seed=4)
    loaded = torch.optim.AdamW(other.parameters(), lr=9.0)
    model_state, optimizer_state = get_state_dict(other, loaded)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=tmp_path / "out", no_dist=True)
    set_state_dict(other, loaded, model_state_dict=model_state, optim_state_dict=optimizer_state)
    assert_same(dict(other.state_dict()), dict(model.state_dict()))
    for new, old in zip(other.parameters(), model.parameters(), strict=True):
        assert_same(loaded.state[new], optimizer.state[old])


def test_shapes_are_written_in_order(tmp_path: Path) -> None:
    with torch.device("meta"):
        write_shapes(mlp(), tmp_path / "shapes.json")
    shapes = json.loads((tmp_path / "shapes.json").read_text())
    assert list(shapes.items()) == [(name, list(param.shape)) for name, param in mlp().named_parameters()]


# --- memory -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("source", "to"), [("torch", "dcp"), ("dcp", "torch"), ("torch", "safetensors")])
def test_peak_memory_is_bands_and_buffers_however_large_the_checkpoint(tmp_path: Path, source: str, to: str) -> None:
    """400 MB in tensors of 200 MB; bands of 64 MiB, 3 buffers of 16 MiB, and 60 MB for imports and what comes and goes."""
    script = """
        import resource, sys, torch
        from fsdp2.checkpoint import convert
        src, dst, to = sys.argv[1:]
        torch.ones(1 << 20).sum()
        import torch.distributed.checkpoint, rich.progress
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        convert(src, dst, to=to, progress=False)
        print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
    """
    make = f"""
        import torch
        torch.save({{str(i): torch.full((50_000_000,), float(i)) for i in range(2)}}, {str(tmp_path / "start")!r})
        from fsdp2.checkpoint import convert
        if {source!r} != "torch":
            convert({str(tmp_path / "start")!r}, {str(tmp_path / "source")!r}, to={source!r})
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", textwrap.dedent(make)], check=True, env=environment, timeout=300)
    path = tmp_path / ("start" if source == "torch" else "source")
    command = [sys.executable, "-c", textwrap.dedent(script), str(path), str(tmp_path / "out"), to]
    done = subprocess.run(command, check=True, env=environment, timeout=300, stdout=subprocess.PIPE, text=True)
    assert int(done.stdout.split()[-1]) <= (64 << 20) + 3 * (16 << 20) + 60_000_000


def test_a_dtype_that_torch_has_not_is_named(tmp_path: Path) -> None:
    """Found by a mutant of a header: a KeyError."""
    header = b'{"a":{"dtype":"F4","shape":[4],"data_offsets":[0,2]}}'
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"ab")
    with pytest.raises(CheckpointError, match="has a in F4") as caught:
        convert(tmp_path, tmp_path.parent / f"{tmp_path.name}.pt", to="torch")
    assert caught.value.key == "a"


@quiet_dcp
def test_the_room_that_is_asked_for_is_that_of_what_is_written(tmp_path: Path) -> None:
    """A tie counted twice, and bf16 as fp32, so that a disk with room for all of it was refused."""
    weight = torch.randn(100, 100)
    torch.save({"a": weight, "b": weight}, tmp_path / "in.pt")
    cases = [("torch", None, 40_000), ("safetensors", None, 40_000), ("dcp", None, 80_000), ("torch", torch.bfloat16, 20_000)]
    for number, (to, dtype, nbytes) in enumerate(cases):
        for free, fits in ((nbytes - 1, False), (nbytes, True)):
            with patch("shutil.disk_usage", lambda _, free=free: SimpleNamespace(free=free)):
                refused = (
                    contextlib.nullcontext()
                    if fits
                    else pytest.raises(CheckpointError, match=f"would have {nbytes} bytes, and .* has {free} bytes free")
                )
                with refused:
                    convert(tmp_path / "in.pt", tmp_path / f"out_{number}", to=to, dtype=dtype)
