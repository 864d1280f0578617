"""Finds the files that belong together, and their format.

folder with .metadata                         DCP, also one each for model and optimizer in folders below
folder with *_optim_states.pt, or ``latest``  DeepSpeed
folder with *.safetensors                     Hugging Face
*.pt, *.pth, *.bin, *.ckpt                    torch.save: one file, or one for each rank, whose number is the last in its name
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ...errors import ArgumentError
from ..checkpoint_folder import is_partial
from ..dcp_files import METADATA
from ..failure import failure
from .deepspeed import find_deepspeed
from .numbered import missing_numbers, shown
from .torch_file import is_torch_file

FORMATS = ("safetensors", "dcp", "torch", "fsdp1", "deepspeed")
_SUFFIXES = {".pt", ".pth", ".bin", ".ckpt", ".tar"}
_LAST_NUMBER = re.compile(r"(\d+)(?!.*\d)")
_PART = re.compile(r"-(\d+)-of-(\d+)$")


def check_format(format: str | None) -> None:
    """Raises: ArgumentError if there is no such format"""
    if format is not None and format not in FORMATS:
        raise ArgumentError(f"format is {format!r}", expected=" or ".join(FORMATS), fix="leave it out to have it detected")


@dataclass(frozen=True)
class Family:
    """Files that are one state together: of ranks, or of a state dict that was cut in several files."""

    paths: tuple[Path, ...]


def detect(path: Path) -> str:
    """The format; "torch" also for FSDP1's files, which only their content shows. Raises: CheckpointError"""
    if path.is_dir():
        if (path / METADATA).is_file() or dcp_folders(path):
            return "dcp"
        if find_deepspeed(path):
            return "deepspeed"
        if any(path.glob("*.safetensors")) or any(path.glob("*.safetensors.index.json")):
            return "safetensors"
        if families(path):
            return "torch"
    elif path.is_file():
        if path.suffix in (".safetensors", ".json"):
            return "safetensors"
        if is_torch_file(path):
            return "torch"
    else:
        raise failure(f"there is no checkpoint at {path}", expected="a folder or a file", fix="check the path", file=path)
    raise failure(
        f"{path} is no checkpoint that is known",
        items=[each.name for each in sorted(path.iterdir())][:20] if path.is_dir() else (),
        expected="a folder or file of DCP, safetensors, torch.save, FSDP1 or DeepSpeed",
        fix="name the folder that has the files themselves; or pass the format, if the files have other names",
        file=path,
    )


def dcp_folders(path: Path) -> list[Path]:
    """Folders of DCP right below, as accelerate lays out model and optimizer, without those of unfinished saves."""
    found = sorted(each.parent for each in path.glob(f"*/{METADATA}"))
    return [each for each in found if not each.name.startswith(".") and not is_partial(each.name)]


def families(folder: Path) -> list[Family]:
    """All files of torch.save in ``folder``, those together whose names differ in their last number only."""
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix in _SUFFIXES and path.is_file():
            pattern = _PART.sub(r"-*-of-\2", path.stem) if _PART.search(path.stem) else _LAST_NUMBER.sub("*", path.stem)
            found.setdefault(pattern + path.suffix, []).append(path)
    return [Family(tuple(sorted(paths, key=_number))) for paths in found.values()]


def family_of(path: Path) -> Family:
    """The files of the other ranks beside ``path``, and itself."""
    return next((each for each in families(path.parent) if path in each.paths), Family((path,)))


def is_named_part(path: Path) -> bool:
    """Whether its name says that there are others: ``pytorch_model-00001-of-00002.bin``."""
    return _PART.search(path.stem) is not None


def check_complete(family: Family) -> None:
    """Raises: CheckpointError if numbers are missing, or there are not as many files as their names say"""
    first = family.paths[0]
    parts = _PART.search(first.stem)
    world = re.search(r"world_size_(\d+)_", first.stem)
    numbers = {_number(path) for path in family.paths}
    start = 1 if parts else 0
    wanted = int(parts[2]) if parts else int(world[1]) if world else max(numbers) + 1
    missing = missing_numbers(numbers, start, wanted + start)
    if missing:
        raise failure(
            f"{first.parent} does not have the files of {'parts' if parts else 'ranks'} {shown(missing)}",
            items=[path.name for path in family.paths][:20],
            expected=f"{wanted} files like {first.name}",
            fix="add them: each has a part of the parameters that no other has",
            file=first,
        )


def _number(path: Path) -> int:
    match = _PART.search(path.stem) or _LAST_NUMBER.search(path.stem)
    return int(match[1]) if match else 0
