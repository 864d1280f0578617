"""Finds a checkpoint's files, their format and which belong together; ``Source`` is the result of reading them.

    folder with .metadata                         DCP; also subfolders for model and optimizer
    folder with *_optim_states.pt, or ``latest``  DeepSpeed
    folder with *.safetensors                     Hugging Face
    *.pt, *.pth, *.bin, *.ckpt                    torch.save: one file, or one per rank, named by its last number

Numbers of ranks and parts come from untrusted names: a folder with only ``model-00001-of-99999999999.bin`` lacks more
numbers than fit in memory, so at most about a hundred are listed.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...errors import ArgumentError
from ..checkpoint_folder import is_partial
from ..dcp_read import METADATA
from ..failures import failure
from ..file_reading import is_inside
from ..inert_pickle import Inert
from ..lazy_tensors import Assembled, LazyTensor, State, Stored, tensors_of
from ..torch_file import is_torch_file

Shapes = Mapping[str, tuple[int, ...]]


@dataclass
class Source:
    """A checkpoint that is open but not read.

    format:    "safetensors", "dcp", "torch", "fsdp1" or "deepspeed"
    model:     by name, each a LazyTensor or, if it is extra state, another value
    optimizer: ``{"state": {name: {key: LazyTensor or value}}, "param_groups": [{..., "params": [names]}]}``, or None
    left_out:  other contents of the files
    """

    path: Path
    format: str
    model: State
    optimizer: State | None = None
    left_out: list[str] = field(default_factory=list)

    @property
    def tensors(self) -> dict[str, LazyTensor]:
        """Those of the model."""
        return {name: value for name, value in self.model.items() if isinstance(value, LazyTensor)}


def named(value: Any, key: str) -> Any:
    """``value`` with its stored parts named ``key``, for error messages."""
    if isinstance(value, Stored):
        return replace(value, key=key)
    if isinstance(value, Assembled):
        return Assembled(value.shape, tuple((box, named(part, key)) for box, part in value.parts))
    return value


def cleaned(value: Any, where: str, left_out: list[str]) -> Any:
    """``value`` without its inert parts, whose paths are added to ``left_out``; None if nothing is left."""
    if isinstance(value, Inert):
        left_out.append(f"{where}: {value.path}")
        return None
    if isinstance(value, dict):
        clean = {key: cleaned(each, f"{where}.{key}", left_out) for key, each in value.items()}
        return {key: each for key, each in clean.items() if each is not None or value[key] is None}
    if isinstance(value, (list, tuple)):
        return type(value)(cleaned(each, f"{where}[{index}]", left_out) for index, each in enumerate(value))
    return value


def checked_source(source: Source) -> Source:
    """``source`` with only values that a target can hold. Raises: CheckpointError if it has no model"""
    if not tensors_of(source.model):
        raise failure(
            f"{source.path} has no tensors of a model",
            items=source.left_out[:20],
            expected="a state dict, alone or as 'model', 'state_dict', 'model_state_dict' or 'module' of a dict",
            fix="save the model's state dict under one of these names",
            file=source.path,
        )
    source.model = cleaned(source.model, "model", source.left_out)
    if source.optimizer is not None:
        source.optimizer = cleaned(source.optimizer, "optimizer", source.left_out)
    return source


# --- which files belong together --------------------------------------------------------------------------------------------------


FORMATS = ("safetensors", "dcp", "torch", "fsdp1", "deepspeed")
_SUFFIXES = {".pt", ".pth", ".bin", ".ckpt", ".tar"}
_LAST_NUMBER = re.compile(r"(\d+)(?!.*\d)")
_PART = re.compile(r"-(\d+)-of-(\d+)$")


def check_format(format: str | None) -> None:
    """Raises: ArgumentError if there is no such format"""
    if format is not None and format not in FORMATS:
        raise ArgumentError(f"format is {format!r}", expected=" or ".join(FORMATS), fix="leave it out to have it detected")


Family = tuple[Path, ...]
"""Files that form one state: one per rank, or parts of a state dict."""


def detect(path: Path) -> str:
    """The format; "torch" also for FSDP1's files, which only their content reveals. Raises: CheckpointError"""
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
        f"{path} is not a checkpoint of a known format",
        items=[each.name for each in sorted(path.iterdir())][:20] if path.is_dir() else (),
        expected="a folder or file of DCP, safetensors, torch.save, FSDP1 or DeepSpeed",
        fix="name the folder that holds the files, or pass the format if the files have unusual names",
        file=path,
    )


def dcp_folders(path: Path) -> list[Path]:
    """Direct subfolders of DCP, as accelerate lays out model and optimizer, except unfinished saves."""
    found = sorted(each.parent for each in path.glob(f"*/{METADATA}"))
    return [each for each in found if not each.name.startswith(".") and not is_partial(each.name)]


def families(folder: Path) -> list[Family]:
    """All files of torch.save in ``folder``, grouped if their names differ only in the last number."""
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix in _SUFFIXES and path.is_file():
            pattern = _PART.sub(r"-*-of-\2", path.stem) if _PART.search(path.stem) else _LAST_NUMBER.sub("*", path.stem)
            found.setdefault(pattern + path.suffix, []).append(path)
    return [tuple(sorted(paths, key=_number)) for paths in found.values()]


def family_of(path: Path) -> Family:
    """The files of the other ranks next to ``path``, and itself."""
    return next((each for each in families(path.parent) if path in each), (path,))


def is_named_part(path: Path) -> bool:
    """Whether its name implies other parts: ``pytorch_model-00001-of-00002.bin``."""
    return _PART.search(path.stem) is not None


def check_complete(family: Family) -> None:
    """Raises: CheckpointError if numbers are missing, or names promise more files"""
    first = family[0]
    parts = _PART.search(first.stem)
    world = re.search(r"world_size_(\d+)_", first.stem)
    numbers = {_number(path) for path in family}
    start = 1 if parts else 0
    wanted = int(parts[2]) if parts else int(world[1]) if world else max(numbers) + 1
    missing = missing_numbers(numbers, start, wanted + start)
    if missing:
        raise failure(
            f"{first.parent} does not have the files of {'parts' if parts else 'ranks'} {shown(missing)}",
            items=[path.name for path in family][:20],
            expected=f"{wanted} files like {first.name}",
            fix="add them: each holds parameters that no other file has",
            file=first,
        )


def _number(path: Path) -> int:
    match = _PART.search(path.stem) or _LAST_NUMBER.search(path.stem)
    return int(match[1]) if match else 0


def missing_numbers(numbers: Collection[int], start: int, stop: int) -> list[int]:
    """Numbers in [start, stop) that are not in ``numbers``; at most 100 more than ``numbers`` has."""
    return list(itertools.islice((number for number in range(start, stop) if number not in numbers), len(numbers) + 100))


def shown(numbers: Sequence[int]) -> str:
    """The first of them."""
    return f"{list(numbers[:20])}" + (" and more" if len(numbers) > 20 else "")


def find_deepspeed(path: Path) -> Path | None:
    """DeepSpeed's folder of states: ``path`` itself, or the subfolder that its file ``latest`` names; else None."""
    if not path.is_dir():
        return None
    if any(path.glob("*_model_states.pt")) or any(path.glob("*_optim_states.pt")):
        return path
    latest = path / "latest"
    if latest.is_file() and latest.stat().st_size < 1000:
        tag = latest.read_text(errors="replace").strip()
        if is_inside(tag) and Path(tag).name == tag and (any((path / tag).glob("*_states.pt")) or not (path / tag).exists()):
            return path / tag
    return None
