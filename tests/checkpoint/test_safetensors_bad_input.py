"""Files that are damaged, malicious or of another model, and disks that fail: a clear error, and everything is as it was."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import resource
import struct
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

import fsdp2.checkpoint.folder_commit as commit
import fsdp2.checkpoint.safetensors_plan as save_plan
from fsdp2 import FSDPError, fully_shard
from fsdp2.checkpoint import CheckpointError, load_safetensors, save_safetensors
from fsdp2.checkpoint.file_reading import is_inside
from harness import cpu_mesh, on_ranks
from harness.checkpoints import CrashError, crash_at, of_every_rank, on_rank_0
from harness.models import mlp
from harness.sharding import shard_blocks

INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))


def write(folder, weight_map=None):
    """A sound checkpoint of two files."""
    state = net().state_dict()
    save_file({key: state[key] for key in ("0.weight", "0.bias")}, folder / FIRST)
    save_file({key: state[key] for key in ("1.weight", "1.bias")}, folder / SECOND)
    weight_map = weight_map or {key: FIRST if key.startswith("0") else SECOND for key in state}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def edit_header(change):
    """A damage: the header of the second file after ``change(fields)``, its tensors as they were."""

    def damage(folder):
        data = (folder / SECOND).read_bytes()
        length = struct.unpack("<Q", data[:8])[0]
        fields = json.loads(data[8 : 8 + length])
        fields = change(fields) or fields
        text = json.dumps(fields).encode()
        (folder / SECOND).write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])

    return damage


def edit_bytes(change):
    return lambda folder: (folder / SECOND).write_bytes(change((folder / SECOND).read_bytes()))


def edit_index(change):
    def damage(folder):
        fields = json.loads((folder / INDEX).read_text())
        change(fields["weight_map"])
        (folder / INDEX).write_text(json.dumps(fields))

    return damage


def raw_header(text, data=b""):
    return lambda folder: (folder / SECOND).write_bytes(struct.pack("<Q", len(text)) + text + data)


def only_pickles(folder):
    for path in list(folder.iterdir()):
        path.unlink()
    (folder / "pytorch_model.bin").write_text("")


DAMAGES = {
    "tensors truncated": (edit_bytes(lambda data: data[:-5]), rf"{SECOND} is truncated.*1.weight is not whole"),
    "header truncated": (edit_bytes(lambda data: data[:40]), rf"{SECOND} ends within its header"),
    "empty file": (edit_bytes(lambda data: b""), rf"{SECOND} is 0 bytes long"),
    "bytes behind": (edit_bytes(lambda data: data + b"xyz"), rf"{SECOND} has 3 bytes after its last tensor"),
    "another format": (edit_bytes(lambda data: b"\x80\x02}q\x00(X\x06\x00" + data), rf"{SECOND} has a header of \d+ bytes"),
    "huge header": (edit_bytes(lambda data: struct.pack("<Q", 2**62) + data), rf"{SECOND} has a header of \d+ bytes"),
    "no JSON": (raw_header(b'{"1.weight":'), rf"{SECOND} has a corrupt header"),
    "no text": (raw_header(b"\xff\xfe\xfd"), rf"{SECOND} has a corrupt header"),
    "deep JSON": (raw_header(b"[" * 100_000), rf"{SECOND} has a corrupt header"),
    "a list": (raw_header(b"[1, 2]"), rf"{SECOND} has a header that is a list"),
    "a shape of more bytes than there are": (
        raw_header(b'{"a":{"dtype":"F32","shape":[4294967296,4294967296,4294967296],"data_offsets":[0,0]}}'),
        r"gives a 0 bytes",
    ),
    "twice the same key": (raw_header(b'{"a": 1, "a": 2}'), r"'a' occurs twice"),
    "metadata": (edit_header(lambda fields: {**fields, "__metadata__": {"a": 3}}), r"__metadata__ that is not text"),
    "an entry": (edit_header(lambda fields: {**fields, "1.bias": 3}), r"corrupt header: 1.bias is 3"),
    "a negative dim": (edit_header(lambda fields: fields["1.bias"].update(shape=[-2])), r"corrupt header: 1.bias"),
    "a boolean dim": (edit_header(lambda fields: fields["1.bias"].update(shape=[True, 2])), r"corrupt header: 1.bias"),
    "offsets backwards": (edit_header(lambda fields: fields["1.bias"].update(data_offsets=[8, 0])), r"corrupt header: 1.bias"),
    "another shape than bytes": (edit_header(lambda fields: fields["1.bias"].update(shape=[3])), r"gives 1.bias 8 bytes"),
    "another dtype than bytes": (edit_header(lambda fields: fields["1.bias"].update(dtype="F64")), r"gives 1.bias 8 bytes"),
    "overlapping": (edit_header(lambda fields: fields["1.weight"].update(data_offsets=[0, 48])), r"has 1.weight at byte"),
    "a gap": (
        edit_header(lambda fields: {k: {**v, "data_offsets": [o + 8 for o in v["data_offsets"]]} for k, v in fields.items()}),
        r"has 1.bias at byte \d+",
    ),
    "a shape of another model": (edit_header(lambda fields: fields["1.weight"].update(shape=[3, 4])), r"1.weight: float32 \(2, 6\)"),
    "integers for floats": (edit_header(lambda fields: fields["1.bias"].update(dtype="I32")), r"1.bias: float32 .* I32 \(2,\)"),
    "a dtype of the future": (edit_header(lambda fields: fields["1.bias"].update(dtype="F4")), r"1.bias: float32 .* F4 \(2,\)"),
    "another name": (edit_index(lambda index: index.update({"2.bias": SECOND})), rf"{SECOND} does not have 1 keys.*\n  2.bias"),
    "a missing file": (lambda folder: (folder / SECOND).unlink(), rf"that are not there\n  {SECOND}: 2 keys, 1.weight among them"),
    "a folder as file": (edit_index(lambda index: index.update({"0.bias": "."})), r"files (that are not there|outside of)"),
    "a path above": (edit_index(lambda index: index.update({"0.bias": "../x.safetensors"})), r"outside of its folder\n  0.bias: '../x"),
    "an absolute path": (edit_index(lambda index: index.update({"0.bias": "/etc/passwd"})), r"outside of its folder\n  0.bias: '/etc"),
    "a path of Windows": (edit_index(lambda index: index.update({"0.bias": "..\\x"})), r"outside of its folder"),
    "no file name": (edit_index(lambda index: index.update({"0.bias": 3})), r"has no weight_map of keys to files"),
    "a key less": (edit_index(lambda index: index.pop("1.bias")), r"1.bias: is not in the checkpoint"),
    "an index that is no JSON": (lambda folder: (folder / INDEX).write_text("{"), rf"{INDEX} is corrupt"),
    "an index of nothing": (lambda folder: (folder / INDEX).write_text("[]"), rf"{INDEX} has no weight_map"),
    "no checkpoint": (lambda folder: [path.unlink() for path in folder.iterdir()], r"has no model.safetensors and no"),
    "pickles": (only_pickles, r"has no model.safetensors and no(.|\n)*pytorch_model.bin(.|\n)*convert"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoints_are_refused_with_file_and_key_and_the_model_is_unchanged(tmp_path, damage):
    do, text = DAMAGES[damage]
    write(tmp_path)
    load_safetensors(net(), tmp_path)
    do(tmp_path)
    model = net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=text) as caught:
        load_safetensors(model, tmp_path)
    assert isinstance(caught.value, FSDPError)
    assert caught.value.file is not None
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with torch.device("meta"):
        model = net()
    with pytest.raises(CheckpointError):
        load_safetensors(model, tmp_path)
    assert all(param.is_meta for param in model.parameters())


def test_random_damage_is_a_checkpoint_error_or_harmless(tmp_path):
    """Any byte of the header changed, any length cut off: nothing but CheckpointError."""
    write(tmp_path)
    data = (tmp_path / SECOND).read_bytes()
    generator = torch.Generator().manual_seed(0)
    for index in range(8 + int.from_bytes(data[:8], "little")):
        damaged = bytearray(data)
        damaged[index] = int(torch.randint(256, (), generator=generator))
        if index % 3 == 0:
            damaged = damaged[: int(torch.randint(len(data), (), generator=generator))]
        (tmp_path / SECOND).write_bytes(damaged)
        with contextlib.suppress(CheckpointError):
            load_safetensors(net(), tmp_path)


def test_names_that_lead_out_of_a_folder():
    assert all(map(is_inside, ("a.safetensors", "sub/a.safetensors", "a..b")))
    assert not any(map(is_inside, ("", ".", "..", "a/../b", "/a", "\\a", "C:\\a", "C:a", "..\\a", "//host/a", "a\0b")))


@on_ranks(3)
def test_every_rank_raises_alike(tmp_path):
    if dist.get_rank() == 0:
        write(tmp_path)
        os.truncate(tmp_path / SECOND, (tmp_path / SECOND).stat().st_size - 1)
    dist.barrier()
    model = fully_shard(net(), mesh=cpu_mesh())
    with pytest.raises(CheckpointError, match="truncated") as caught:
        load_safetensors(model, tmp_path)
    said = of_every_rank((str(caught.value).partition("]")[2], caught.value.file, caught.value.key))
    assert said[0] == said[1] == said[2]
    assert said[0][1:] == (str(tmp_path / SECOND), "1.weight")


def test_a_disk_that_fails_while_reading_names_file_and_key(tmp_path):
    write(tmp_path)
    with patch("os.preadv", side_effect=OSError(errno.EIO, "Input/output error")), pytest.raises(CheckpointError) as caught:
        load_safetensors(net(), tmp_path)
    assert "cannot be read at 0.bias: Input/output error" in str(caught.value)
    assert (caught.value.file, caught.value.key) == (str(tmp_path / FIRST), "0.bias")
    with patch("os.preadv", return_value=0), pytest.raises(CheckpointError, match="has become shorter"):
        load_safetensors(net(), tmp_path)


def fails_at(num_calls, outcome):
    """``os.preadv`` that after ``num_calls`` raises ``outcome`` or returns it."""
    real, left = os.preadv, [num_calls]

    def preadv(*args):
        if left[0] > 0:
            left[0] -= 1
            return real(*args)
        if isinstance(outcome, OSError):
            raise outcome
        return outcome

    return patch("os.preadv", preadv)


@on_ranks(4)
@pytest.mark.parametrize("start", ["meta", "cpu"])
@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize("failure", ["disk", "shorter", "unseen"])
def test_what_fails_on_one_rank_alone_fails_on_every_rank_and_the_model_is_unchanged(tmp_path, start, axes, failure):
    """A disk that gives up after the headers, a file that was cut since, a file that one node does not see."""
    on_rank_0(lambda: write(tmp_path))
    with torch.device(start):
        model = net()
        for param in model.parameters():
            nn.init.constant_(param, 7.0)
    mesh = cpu_mesh() if axes == 1 else cpu_mesh(2, 2)
    shard_blocks(model, mesh=mesh)
    params = list(model.parameters())
    damage = {
        "disk": lambda: fails_at(1, OSError(errno.EIO, "Input/output error")),
        "shorter": lambda: fails_at(1, 0),
        "unseen": lambda: patch("pathlib.Path.is_file", lambda path: path.suffix == ".json"),
    }[failure]
    text = {"disk": "Input/output error", "shorter": "has become shorter", "unseen": "files that are not there"}[failure]
    with damage() if dist.get_rank() == 2 else contextlib.nullcontext(), pytest.raises(CheckpointError, match=text) as caught:
        load_safetensors(model, tmp_path)
    assert "[rank 2]" in str(caught.value)
    assert caught.value.file is not None
    assert caught.value.key is not None
    for param, before in zip(model.parameters(), params, strict=True):
        assert param is before
        assert param.to_local().is_meta if start == "meta" else (param.to_local() == 7.0).all()
    load_safetensors(model, tmp_path)
    assert torch.equal(model[1].weight.full_tensor(), net()[1].weight)
    model(torch.ones(2, 4)).sum().backward()


@on_ranks(2)
def test_in_place_overwrites_what_it_has_read(tmp_path):
    on_rank_0(lambda: write(tmp_path))
    model = fully_shard(net(), mesh=cpu_mesh())
    for param in model.parameters():
        nn.init.constant_(param, 7.0)
    damage = fails_at(1, OSError(errno.EIO, "Input/output error")) if dist.get_rank() == 1 else contextlib.nullcontext()
    with damage, pytest.raises(CheckpointError, match="Input/output error"):
        load_safetensors(model, tmp_path, in_place=True)
    assert not all((param.to_local() == 7.0).all() for param in model.parameters())
    assert (model[1].bias.to_local() == 7.0).all() or dist.get_rank() == 0


# --- saving ---------------------------------------------------------------------------------------------------------------------


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@on_ranks(2)
@pytest.mark.parametrize(("max_shard_size", "num_writers", "failing_rank"), [("5GB", 1, 0), (1000, 1, 0), (1000, 2, 1)])
@pytest.mark.parametrize("earlier", [None, "5GB", 1000])
def test_a_full_disk_raises_on_every_rank_and_the_earlier_checkpoint_is_there(
    tmp_path, max_shard_size, num_writers, earlier, failing_rank
):
    folder = tmp_path / "folder"
    if earlier is not None:
        save_safetensors(shard_blocks(mlp(seed=1)), folder, earlier)
    model = shard_blocks(mlp(seed=2))
    dist.barrier()
    before = contents(folder) if earlier is not None else {}
    dist.barrier()
    real, room = os.write, [700]

    def write(file, data):
        if dist.get_rank() != failing_rank:
            return real(file, data)
        if room[0] == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = real(file, data[: room[0]])
        room[0] -= written
        return written

    with patch.object(commit.os, "write", write), pytest.raises(CheckpointError, match="No space left on device") as caught:
        save_safetensors(model, folder, max_shard_size, num_writers=num_writers)
    assert caught.value.file is not None
    said = of_every_rank(str(caught.value))
    assert said[0] == said[1]
    dist.barrier()
    assert contents(folder) == before
    if earlier is not None:
        load_safetensors(model, folder)
        assert torch.equal(model.last.weight.full_tensor(), mlp(seed=1).last.weight)
    dist.barrier()
    save_safetensors(model, folder, max_shard_size, num_writers=num_writers)  # with room again


@on_ranks(2)
def test_a_limit_of_the_operating_system_is_reported_as_well(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    model = shard_blocks(mlp())
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
        with pytest.raises(CheckpointError, match="File too large") as caught:
            save_safetensors(model, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.key in mlp().state_dict()
    dist.barrier()  # rank 0 raises when all agree, and gives up the folder's lock on its way out
    assert contents(tmp_path) == {}


@on_ranks(2)
def test_a_folder_that_cannot_be_written_to(tmp_path):
    model = shard_blocks(mlp())
    (tmp_path / f"file{dist.get_rank()}").write_text("")
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"Not a directory|File exists"):
        save_safetensors(model, tmp_path / "file0" / "folder")
    read_only = OSError(errno.EROFS, "Read-only file system")
    with patch.object(commit.os, "open", side_effect=read_only), pytest.raises(CheckpointError, match="Read-only file system"):
        save_safetensors(model, tmp_path / "folder")
    if os.geteuid() != 0:  # root may write anywhere
        (tmp_path / "closed").mkdir(mode=0o555, exist_ok=True)
        with pytest.raises(CheckpointError, match="Permission denied"):
            save_safetensors(model, tmp_path / "closed")


KINDS = {"single": 10**9, "several": 60, "more": 30}


def saved(model, folder, kind):
    return save_safetensors(model, folder, KINDS[kind])


QUICK = {("several", "several"), ("single", "several"), ("several", "single"), ("single", "single"), ("more", "more")}


def models(config):
    """Two models, full of 1 and of 2."""
    both = {1: net(), 2: net()}
    for value, model in both.items():
        model.config = config(value)
        for param in model.parameters():
            nn.init.constant_(param, value)
    return both


def killed_saves(both, tmp_path, old, new):
    """Folders in which the second model was saved over the first: each save was killed one call later than the one before."""
    for number in itertools.count():
        folder = tmp_path / str(number)
        saved(both[1], folder, old)
        try:
            with crash_at(number, [(os, "replace"), (os, "fsync"), (Path, "replace"), (Path, "unlink")]):
                saved(both[2], folder, new)
            return
        except CrashError:
            yield folder


def value_in(folder):
    model = net()
    load_safetensors(model, folder)
    (value,) = {value.item() for param in model.parameters() for value in param.detach().unique()}
    return value


class Config:
    """Like one of transformers: it writes itself."""

    def __init__(self, value):
        self.value = value

    def save_pretrained(self, folder):
        (Path(folder) / "config.json").write_text(str(self.value))


@pytest.mark.parametrize("same", [True, False, None], ids=["same config", "other config", "no config"])
@pytest.mark.parametrize(
    ("old", "new"), [pytest.param(*each, marks=() if each in QUICK else pytest.mark.slow) for each in itertools.product(KINDS, KINDS)]
)
def test_a_crash_at_any_moment_leaves_the_earlier_or_the_new_checkpoint_whole(tmp_path, old, new, same):
    """After every rename and removal a reader finds one of the two, never a mixture; a save after the crash succeeds.

    A config that changes is away until both fit, and comes back with the next save; one that does not is there all the time.
    """
    both = models((lambda value: None) if same is None else (lambda value: Config(1 if same else value)))
    away = 0
    configs = [] if same is None else ["config.json"]
    for folder in killed_saves(both, tmp_path, old, new):
        config = folder / "config.json"
        value = value_in(folder)
        assert value in (1, 2)
        away += not config.exists()
        assert not config.exists() or float(config.read_text()) == (1 if same else value)
        commit.make_folder(folder)  # what every save begins with
        assert same is None or float(config.read_text()) == (1 if same else value_in(folder))
        assert not list(folder.glob(".*"))
        files = saved(both[2], folder, new).files
        assert value_in(folder) == 2
        assert same is None or float(config.read_text()) == (1 if same else 2)
        assert {path.name for path in folder.iterdir()} == {*configs, *files, *([INDEX] if new != "single" else [])}
    assert same is None or (away == 0 if same else away > 1)
    crashes = int(folder.name) + 1
    assert crashes > 3
    assert value_in(tmp_path / str(crashes)) == 2


def test_an_error_tells_the_whole_key_whatever_is_in_it(tmp_path):
    """Symptom: ``key`` was "odd" for a buffer "odd: name". Cause: it was read out of the message, up to the first colon."""
    model = net()
    model.register_buffer("odd: name", torch.ones(2, dtype=torch.complex128))
    with pytest.raises(CheckpointError) as caught:
        save_safetensors(model, tmp_path)
    assert caught.value.key == "odd: name"


def without_the_index(path, to, replace=os.replace):
    if Path(to).name == INDEX:
        raise OSError(5, "Input/output error")
    replace(path, to)


def of_a_wrong_dtype(*arguments, build_header=save_plan.build_header):
    return build_header(*arguments).replace(b'"F32"', b'"F64"')


ERRORS = {
    "an unforeseen one while the config is away": (
        commit,
        "_files_of_index",
        lambda folder: next(iter(())),
        "StopIteration",
    ),
    "a file that the safetensors library refuses": (save_plan, "build_header", of_a_wrong_dtype, "the safetensors library refuses"),
    "the index cannot be renamed": (commit.os, "replace", without_the_index, "Input/output error"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_an_error_leaves_the_earlier_weights_and_their_config(tmp_path, monkeypatch, case):
    owner, name, failing, text = ERRORS[case]
    model = net()
    model.config = Config(1)
    saved(model, tmp_path, "several")
    before = contents(tmp_path)
    model.config = Config(2)
    monkeypatch.setattr(owner, name, failing)
    with pytest.raises(CheckpointError, match=text):
        saved(model, tmp_path, "several")
    monkeypatch.undo()
    assert contents(tmp_path) == before
