"""DeepSpeed's ZeRO checkpoints: fp32 parameters and the optimizer's moments, out of every rank's flat buffers.

A folder has ``*_model_states.pt`` (names and shapes of the parameters, buffers) and ``*_optim_states.pt`` (the buffers), of each rank:

    stage 3     each parameter, padded to a multiple of the number of ranks, is cut evenly; rank r has the r-th parts of all parameters,
                one after another, in the concatenation of its ``fp32_flat_groups``. The parameters' values are nowhere else
    stage 1, 2  the parameters of each group, one after another (with paddings that the file may name), are cut in one place per rank

The moments of the optimizer lie like the parameters. It refuses to run DeepSpeed's code, or to have it installed.

Source: deepspeed/utils/zero_to_fp32.py and ``state_dict`` of its ZeRO optimizers, DeepSpeed 0.19
(https://github.com/deepspeedai/DeepSpeed).

Worked example, stage 3 on 2 ranks, parameters a (3,) and b (2, 2): rank 0's flat group is a[0], a[1], b[0, 0], b[0, 1], rank 1's
a[2], padding, b[1, 0], b[1, 1].
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..failures import failure
from ..file_reading import ByteReader
from ..inert_pickle import Inert
from ..lazy_tensors import LazyTensor, State, slice_of
from ..shard_geometry import Box
from ..torch_file import read_torch_file, refuse_exchanged
from .source import Source, missing_numbers, shown

_RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_(model|optim)_states\.pt$")
_FIX = "complete the copy: every rank has its own files"
_COMPARED = 4096  # elements of each parameter and rank, or one row


def read_deepspeed(folder: Path) -> Source:
    """Raises: CheckpointError naming the file that is missing, cut short or of another checkpoint"""
    optim_paths = _by_rank(folder, "optim")
    optims = [_dict(read_torch_file(path), path, "optimizer_state_dict") for path in optim_paths]
    zero = [_dict(each["optimizer_state_dict"], path, "zero_stage") for each, path in zip(optims, optim_paths, strict=True)]
    stage = _plain(zero[0]["zero_stage"])
    count = _plain(zero[0].get("partition_count"))
    count = max(count) if isinstance(count, (list, tuple)) else count
    if count != len(zero) or any(_plain(each["zero_stage"]) != stage for each in zero):
        raise failure(
            f"{folder} has {len(zero)} *_optim_states.pt of stages {sorted({str(_plain(each['zero_stage'])) for each in zero})}",
            expected=f"one of each of {count} ranks, of one save",
            fix=_FIX,
            file=folder,
        )
    model_paths = _by_rank(folder, "model") if stage == 3 else sorted(folder.glob("*mp_rank_*_model_states.pt"))
    if len(model_paths) != (len(zero) if stage == 3 else 1):
        raise failure(
            f"{folder} has {len(model_paths)} *_model_states.pt",
            items=[path.name for path in model_paths][:20],
            expected=f"{len(zero) if stage == 3 else 1} for ZeRO stage {stage} on {len(zero)} ranks without model parallelism",
            fix=_FIX,
            file=folder,
        )
    models = [_dict(read_torch_file(path), path, "param_shapes") for path in model_paths]
    shapes = [{name: tuple(shape) for name, shape in group.items()} for group in models[0]["param_shapes"]]
    for each, path in zip(models, model_paths, strict=True):
        if [list(group) for group in each["param_shapes"]] != [list(group) for group in shapes]:
            raise failure(f"{path} has other parameters than {model_paths[0].name}", expected="files of one save", fix=_FIX, file=path)
    buffers_key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    flats = [list(_dict(each, path, buffers_key)[buffers_key]) for each, path in zip(zero, optim_paths, strict=True)]
    for paths in (optim_paths, model_paths):
        refuse_exchanged(paths)
    layout = (_Stage3 if stage == 3 else _Stage2)(shapes, zero)
    layout.check(flats, optim_paths)
    if isinstance(layout, _Stage2):
        layout.refuse_exchanged(models[0].get("module") or {}, flats, optim_paths)
    model = _model(models, layout, flats)
    left_out = [f"{key} of {model_paths[0].name}" for key in models[0] if key not in _USED]
    optimizer = _optimizer(zero, shapes, layout)
    return Source(folder, "deepspeed", model, optimizer, left_out if optimizer is not None else [*left_out, "the optimizer"])


_USED = {
    "buffer_names",
    "ds_version",
    "frozen_param_fragments",
    "frozen_param_shapes",
    "module",
    "optimizer",
    "param_shapes",
    "shared_params",
}


def _by_rank(folder: Path, kind: str) -> list[Path]:
    """The files of all ranks, by rank. Raises: CheckpointError naming ranks without file"""
    found: dict[int, Path] = {}
    parallel = []
    for path in sorted(folder.glob(f"*_{kind}_states.pt")):
        match = _RANK.search(path.name)
        if match and int(match[2]) == 0:
            found[int(match[1])] = path
        elif match:
            parallel.append(path.name)
    if parallel:
        raise failure(
            f"{folder} was saved with model parallelism",
            items=parallel[:20],
            expected="mp_rank_00 alone",
            fix="convert it to DeepSpeed's universal checkpoint, and that to one model, first",
            file=folder / parallel[0],
        )
    missing = missing_numbers(found, 0, max(found, default=0) + 1)
    if missing:
        raise failure(
            f"{folder} does not have the {kind} states of ranks {shown(missing)}",
            expected=f"a zero_pp_rank_<rank>_mp_rank_00_{kind}_states.pt of every rank",
            fix=_FIX,
            file=folder / f"zero_pp_rank_{missing[0]}_mp_rank_00_{kind}_states.pt",
        )
    return [found[rank] for rank in sorted(found)]


def _dict(value: Any, path: Path, key: str) -> dict[Any, Any]:
    if not isinstance(value, dict) or key not in value:
        raise failure(f"{path} has no {key}", expected="a file of DeepSpeed's ZeRO 1, 2 or 3", fix=_FIX, file=path, key=key)
    return value


def _plain(value: Any) -> Any:
    """An enum's value."""
    return value.args[0] if isinstance(value, Inert) and value.args else value


class _Stage3:
    """Where the parameters are in the flat buffers of stage 3."""

    def __init__(self, shapes: list[dict[str, tuple[int, ...]]], zero: list[dict[Any, Any]]) -> None:
        self.shapes = {name: shape for group in shapes for name, shape in group.items()}
        self._world_size = len(zero)
        self._at: dict[str, int] = {}
        self.numel = 0  # of every rank's buffers together
        for name, shape in self.shapes.items():
            self._at[name] = self.numel
            self.numel += -(-math.prod(shape) // self._world_size)

    def check(self, flats: list[list[LazyTensor]], paths: list[Path]) -> None:
        for flat, path in zip(flats, paths, strict=True):
            numel = sum(part.shape[0] for part in flat)
            if numel != self.numel:
                raise failure(
                    f"{path} has {numel} elements of parameters",
                    expected=f"{self.numel}: the shapes in the model states, over {self._world_size} ranks",
                    fix=_FIX,
                    file=path,
                )

    def locate(self, name: str, flats: Sequence[Sequence[LazyTensor]]) -> LazyTensor:
        shape = self.shapes[name]
        numel = -(-math.prod(shape) // self._world_size)
        return slice_of([slice_of(each, self._at[name], (numel,)) for each in flats], 0, shape)


class _Stage2:
    """Where the parameters are in the flat buffers of stages 1 and 2."""

    def __init__(self, shapes: list[dict[str, tuple[int, ...]]], zero: list[dict[Any, Any]]) -> None:
        self.shapes = {name: shape for group in shapes for name, shape in group.items()}
        paddings = zero[0].get("param_alignment_paddings") or [[0] * len(group) for group in shapes]
        self._at: dict[str, tuple[int, int]] = {}
        self._numels = []
        for index, group in enumerate(shapes):
            at = 0
            for (name, shape), padding in zip(group.items(), paddings[index], strict=True):
                self._at[name] = index, at
                at += math.prod(shape) + padding
            self._numels.append(at)

    def check(self, flats: list[list[LazyTensor]], paths: list[Path]) -> None:
        align = 2 * len(flats)
        for index, numel in enumerate(self._numels):
            found = sum(flat[index].shape[0] for flat in flats)
            if -(-found // align) != -(-numel // align):
                raise failure(
                    f"group {index} has {found} elements in the files of {len(flats)} ranks",
                    expected=f"{numel} and padding: the shapes in the model states",
                    fix=_FIX,
                    file=paths[0],
                )

    def refuse_exchanged(self, module: State, flats: list[list[LazyTensor]], paths: list[Path]) -> None:
        """Raises: CheckpointError if a rank's rows of a parameter are not those of the model's own weights, rounded to 16 bits

        Few rows of each are compared. In stage 3 no file has a parameter of another rank: only names of files tell ranks apart there.
        """
        with ByteReader() as reader:
            for name, (group, at) in self._at.items():
                shape, weight = self.shapes[name], module.get(name)
                row_numel = math.prod(shape[1:])
                if not isinstance(weight, LazyTensor) or weight.shape != shape or not shape or not row_numel:
                    continue
                stop = 0
                for flat, path in zip(flats, paths, strict=True):
                    start, stop = stop, stop + flat[group].shape[0]
                    first, last = max(-(-(start - at) // row_numel), 0), min((stop - at) // row_numel, shape[0])
                    if first >= last:
                        continue
                    last = min(last, first + max(_COMPARED // row_numel, 1))
                    box = Box.whole(shape).with_range(0, first, last)
                    values = torch.empty(2, *box.shape, device="cpu")
                    for lazy, out in zip((self.locate(name, flats), weight), values, strict=True):
                        lazy.read(box, out, reader)
                    if torch.isclose(values[0], values[1], rtol=0.02, atol=1e-6).float().mean() < 0.5:
                        raise failure(
                            f"{path} has other values of {name} than the model states, in rows {first} to {last - 1}",
                            expected="the file of each rank under its own name, of one save",
                            fix=_FIX,
                            file=path,
                            key=name,
                        )

    def locate(self, name: str, flats: Sequence[Sequence[LazyTensor]]) -> LazyTensor:
        group, start = self._at[name]
        return slice_of([each[group] for each in flats], start, self.shapes[name])


def _model(models: list[dict[Any, Any]], layout: _Stage3 | _Stage2, flats: list[list[LazyTensor]]) -> State:
    """The model's state, in the order of the module's; ties from ``shared_params``."""
    first = models[0]
    found: State = {name: layout.locate(name, flats) for name in layout.shapes}
    for name, shape in (first.get("frozen_param_shapes") or {}).items():
        parts = [each["frozen_param_fragments"][name] for each in models]
        found[name] = slice_of(parts, 0, tuple(shape)) if isinstance(layout, _Stage3) else parts[0]
    module = first.get("module") or {}
    found |= {name: module[name] for name in first.get("buffer_names", ()) if name in module}
    for name, other in dict(first.get("shared_params") or {}).items():
        if other in found:
            found[name] = found[other]
    return {name: found[name] for name in [*module, *found] if name in found}


def _optimizer(zero: list[dict[Any, Any]], shapes: list[dict[str, tuple[int, ...]]], layout: _Stage3 | _Stage2) -> State | None:
    """The optimizer's state by name; None if the files have it in an unknown form."""
    bases: list[Any] = [each.get("optimizer_state_dict", each.get("base_optimizer_state")) for each in zero]
    if not all(isinstance(base, dict) and {"state", "param_groups"} <= base.keys() for base in bases):
        return None
    state: State = {name: {} for name in layout.shapes}
    first = bases[0]["state"]
    for key in dict.fromkeys(key for values in first.values() for key in values):
        example = next(values[key] for values in first.values() if key in values)
        if isinstance(example, LazyTensor) and example.shape:
            flats = [[values[key] for _, values in sorted(base["state"].items())] for base in bases]
            for name in state:
                state[name][key] = layout.locate(name, flats)
        else:
            for name in state:
                state[name][key] = example
    return {"state": state if first else {}, "param_groups": _groups(bases[0]["param_groups"], shapes)}


def _groups(groups: list[State], shapes: list[dict[str, tuple[int, ...]]]) -> list[State]:
    """The optimizer's groups with names. Its parameters are flat buffers, one for each entry of ``shapes``: in stage 3 several a group.

    Raises: CheckpointError if they are not
    """
    if sum(len(group["params"]) for group in groups) != len(shapes):
        raise failure(
            f"the optimizer has {[len(group['params']) for group in groups]} flat parameters",
            expected=f"{len(shapes)}, one for each list of shapes in the model states",
            fix="convert without the optimizer",
        )
    rest = iter(shapes)
    return [
        {key: value for key, value in group.items() if key != "params"}
        | {"params": [name for _ in group["params"] for name in next(rest)]}
        for group in groups
    ]
