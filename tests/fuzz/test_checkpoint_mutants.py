"""Damaged and malformed checkpoints: a reader gets the values that were saved, or an FSDPError, within bounds of time and memory.

Each mutant comes from a seed. A damaged one has other bytes than were written, and is compared with its digests before it is read; of
a malformed one the description was changed and the digests with it, so that only what is in it can be wrong: it may have any values.

    FUZZ_MUTANTS=1000 python -m pytest tests/fuzz/test_checkpoint_mutants.py    # of each format; FUZZ_SEED=123: begin with that seed
"""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import time
import traceback
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1
from torch.distributed.fsdp import StateDictType

from fsdp2.checkpoint import convert, save_full_state, save_safetensors, verify
from fsdp2.errors import FSDPError
from harness import on_ranks
from harness.bounded import bounded

QUICK, SLOW = int(os.environ.get("FUZZ_MUTANTS", "16")), 250
FIRST = int(os.environ.get("FUZZ_SEED", "0"))
MAX_SECONDS, MAX_GROWTH = 10.0, 300 << 20
BATCH = 25

pytestmark = pytest.mark.filterwarnings("ignore")  # FSDP1 and ShardedTensor are deprecated, and say so


class Small(nn.Module):
    """Dtypes, a tie, a scalar, an empty buffer."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first = nn.Linear(5, 7, bias=False)
        self.second = nn.Linear(7, 3)
        self.narrow = nn.Parameter(torch.randn(6, generator=generator).bfloat16())
        self.tied = self.narrow
        self.register_buffer("count", torch.arange(6).view(2, 3))
        self.register_buffer("scalar", torch.tensor(2.5))
        self.register_buffer("none", torch.empty(0, 3))
        with torch.no_grad():
            for param in (*self.first.parameters(), *self.second.parameters()):
                param.copy_(torch.randn(param.shape, generator=generator))


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer


# --- what is mutated --------------------------------------------------------------------------------------------------------------


def write_safetensors(folder: Path) -> Path:
    save_safetensors(Small(), folder / "in", max_shard_size=200)
    return folder / "in"


def write_torch(folder: Path) -> Path:
    model = Small()
    save_full_state(folder / "in.pt", model, stepped(model))
    return folder / "in.pt"


def write_dcp(folder: Path) -> Path:
    convert(write_torch(folder), folder / "in", to="dcp")
    return folder / "in"


def write_deepspeed(folder: Path) -> Path:
    """ZeRO 2 on two ranks."""
    path = folder / "in"
    path.mkdir()
    shapes = OrderedDict([("a", torch.Size([3, 4])), ("b", torch.Size([5]))])
    numel = sum(shape.numel() for shape in shapes.values())
    each = -(-numel // 4) * 2
    for rank in range(2):
        zero = {
            "zero_stage": 2,
            "partition_count": [2],
            "single_partition_of_fp32_groups": [torch.arange(float(numel))[rank * each : (rank + 1) * each].clone()],
            "param_alignment_paddings": None,
            "base_optimizer_state": {
                "state": {0: {"step": 3, "exp_avg": torch.arange(2.0 * each)[rank * each : (rank + 1) * each].clone()}},
                "param_groups": [{"lr": 0.5, "params": [0]}],
            },
        }
        torch.save({"optimizer_state_dict": zero}, path / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    flat = torch.arange(float(numel)).split([shape.numel() for shape in shapes.values()])  # as DeepSpeed, whose reader compares them
    module = {name: part.view(shape).bfloat16() for (name, shape), part in zip(shapes.items(), flat, strict=True)}
    torch.save({"module": module, "buffer_names": [], "param_shapes": [shapes]}, path / "mp_rank_00_model_states.pt")
    return path


def write_fsdp1(folder: Path) -> Path:
    """Sharded state dicts of model and optimizer. Collective: yes, two ranks"""
    path, rank = folder / "in", dist.get_rank()
    path.mkdir(exist_ok=True)
    torch.manual_seed(0)
    model = Fsdp1(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)), device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    with Fsdp1.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        torch.save(model.state_dict(), path / f"model_rank{rank}.pt")
        torch.save(Fsdp1.optim_state_dict(model, optimizer), path / f"optim_rank{rank}.pt")
    dist.barrier()
    return path


# --- how --------------------------------------------------------------------------------------------------------------------------


def changed(data: bytes, draw: random.Random) -> bytes:
    """``data`` with bits flipped, bytes replaced, removed, repeated, put in, or cut off."""
    size = len(data)
    at, length = draw.randrange(size + 1), draw.choice([1, 1, 2, 4, 8, 100, 1000])
    if draw.random() < 0.3:
        at = draw.choice([draw.randrange(min(size, 40) + 1), max(size - draw.randrange(80), 0)])  # lengths and directories are there
    rest = data[at + length :]
    match draw.randrange(8):
        case 0 | 1 if at < size:
            return data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]
        case 2:
            return data[:at] + draw.randbytes(min(length, size - at)) + rest
        case 3:
            return data[:at] + draw.choice([b"\0", b"\xff", b"0", b"9"]) * min(length, size - at) + rest
        case 4:
            return data[:at] + rest
        case 5:
            return data[:at] + data[at : at + length] * 2 + rest
        case 6:
            return data[:at] + draw.randbytes(length) + data[at:]
    return data[:at]


def malformed(file: Path, draw: random.Random) -> None:
    """Change what ``file`` says of itself, and its digests alike."""
    data = file.read_bytes()
    if file.suffix == ".safetensors":
        length = int.from_bytes(data[:8], "little")
        text = changed(data[8 : 8 + length].replace(b"fsdp2_crc32", b"other_crc32"), draw)
        file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    elif zipfile.is_zipfile(file) and file.suffix == ".pt":
        with zipfile.ZipFile(io.BytesIO(data)) as before, zipfile.ZipFile(file, "w") as after:
            for info in before.infolist():
                record = before.read(info)
                after.writestr(info.filename, changed(record, draw) if info.filename.endswith("data.pkl") else record)
    else:
        (file.parent / "digests.json").unlink(missing_ok=True)
        file.write_bytes(changed(data, draw))


def mutate(path: Path, draw: random.Random) -> bool:
    """Change one file of a checkpoint; whether it is damaged, and not malformed."""
    files = [path] if path.is_file() else sorted(path.iterdir())
    file = draw.choice(files)
    if draw.random() < 0.4:
        described = [each for each in files if each.suffix in (".safetensors", ".pt") or each.name == ".metadata"]
        malformed(draw.choice(described), draw)
        return False
    if draw.random() < 0.05:
        file.write_bytes(b"") if draw.random() < 0.5 else file.unlink()
    else:
        data = file.read_bytes()
        for _ in range(draw.choice([1, 1, 1, 2, 5])):
            data = changed(data, draw)
        file.write_bytes(data)
    return True


# --- what must hold ---------------------------------------------------------------------------------------------------------------


def read(path: Path, out: Path) -> Any:
    """All that a checkpoint has, as whoever converts it gets it."""
    convert(path, out, to="torch")
    values = torch.load(out, weights_only=True)
    out.unlink()
    return values


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype is other.dtype and one.shape == other.shape and bool(one.eq(other).all())
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return isinstance(other, (list, tuple)) and len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def attempt(base: Path, expected: Any, seed: int, folder: Path) -> str | None:
    """What is wrong with how a mutant of ``base`` is read."""
    draw = random.Random(f"{base.name}{seed}")
    folder.mkdir()
    path = folder / base.name
    shutil.copytree(base, path) if base.is_dir() else shutil.copy(base, path)
    is_damaged = mutate(path, draw)
    begin = time.process_time()
    problem = None
    try:
        compared = verify(path) if is_damaged else None
        values = read(path, folder / "out.pt")
        if compared is not None and not compared.unchecked and not same(values, expected):
            problem = "other values, which verify did not notice"
    except FSDPError as error:
        if "expected:" not in str(error):
            problem = f"an error that does not say what was expected: {error}"
    except Exception:
        problem = traceback.format_exc(limit=-4)
    if problem is None and is_damaged:
        try:
            read(path, folder / "again.pt")  # any values, since nobody asked
        except FSDPError:
            pass
        except Exception:
            problem = traceback.format_exc(limit=-4)
    spent = time.process_time() - begin
    left = {each.name for each in folder.iterdir()} - {path.name, "out.pt", "again.pt"}
    shutil.rmtree(folder)
    if problem is None and spent > MAX_SECONDS:
        problem = f"takes {spent:.1f} s"
    if problem is None and left:
        problem = f"leaves {sorted(left)} behind"
    return problem


def run(base: Path, first: int, count: int) -> None:
    """Raises: AssertionError naming the seeds of mutants that are read wrongly"""
    expected = read(base, base.parent / "expected.pt")
    verify(base)
    work = base.parent / "work"
    problems: dict[int, str] = {}

    def batch(seeds: range) -> dict[int, str | None]:
        return {seed: attempt(base, expected, seed, work) for seed in seeds}

    def one_by_one(seeds: range) -> None:
        for seed in seeds:
            shutil.rmtree(work, ignore_errors=True)
            alone = bounded(lambda seed=seed: batch(range(seed, seed + 1)))
            problem = alone.crash or alone.error or (alone.value or {}).get(seed)
            if problem is None and alone.growth > MAX_GROWTH:
                problem = f"takes {alone.growth} bytes"
            if problem is not None:
                problems[seed] = problem

    for begin in range(first, first + count, BATCH):
        seeds = range(begin, min(begin + BATCH, first + count))
        shutil.rmtree(work, ignore_errors=True)
        outcome = bounded(lambda seeds=seeds: batch(seeds), seconds=300)
        if outcome.crash is not None or outcome.growth > MAX_GROWTH:
            one_by_one(seeds)
        else:
            problems |= {seed: problem for seed, problem in (outcome.value or {}).items() if problem is not None}
    if problems:
        shown = "\n".join(f"seed {seed}: {problem}" for seed, problem in list(problems.items())[:5])
        raise AssertionError(f"{len(problems)} of {count} mutants: {json.dumps(sorted(problems))}\n{shown}")


WRITERS: dict[str, Callable[[Path], Path]] = {
    "safetensors": write_safetensors,
    "torch": write_torch,
    "dcp": write_dcp,
    "deepspeed": write_deepspeed,
}


@pytest.mark.parametrize("kind", WRITERS)
def test_a_few_mutants_are_read_as_saved_or_refused(kind: str, tmp_path: Path) -> None:
    run(WRITERS[kind](tmp_path), FIRST, QUICK)


@on_ranks(2, timeout=3600)
def test_a_few_mutants_of_fsdp1_are_read_as_saved_or_refused(tmp_path: Path) -> None:
    base = write_fsdp1(tmp_path)
    if dist.get_rank() == 0:
        run(base, FIRST, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("kind", WRITERS)
def test_mutants_are_read_as_saved_or_refused(kind: str, tmp_path: Path) -> None:
    run(WRITERS[kind](tmp_path), 10_000, SLOW)


@pytest.mark.slow
@on_ranks(2, timeout=3600)
def test_mutants_of_fsdp1_are_read_as_saved_or_refused(tmp_path: Path) -> None:
    base = write_fsdp1(tmp_path)
    if dist.get_rank() == 0:
        run(base, 10_000, SLOW)
