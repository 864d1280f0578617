"""``open_source``: a checkpoint of any format as one ``Source``: names and lazy tensors of model and optimizer.

It finds the format, has its reader read the descriptions, and picks model and optimizer from them. An optimizer's state
ends up by name. Names come from the state itself (DCP, FSDP1's ``optim_state_dict`` and its older forms), from
``param_names`` (in the groups, or next to them in a file of ``save_full_state``), or, where parameters are numbers,
from the model's order.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn

from ...arguments import PATH, SWITCH, WORD, require
from ...errors import FSDPError
from ..checkpoint_folder import CheckpointFolder
from ..dcp_read import read_dcp
from ..failures import failure
from ..file_reading import ByteReader
from ..lazy_tensors import DTYPES, LazyTensor, State, Stored, tensors_of
from ..safetensors_files import open_checkpoint
from ..torch_file import read_torch_file, refuse_exchanged
from ..training_state import clean_name
from .deepspeed import read_deepspeed
from .rank_files import Ranks, has_flat_params, is_sharded, merge, resolve, shapes_of, unflattened, unflattened_optimizer
from .source import (
    Family,
    Shapes,
    Source,
    check_complete,
    check_format,
    checked_source,
    dcp_folders,
    detect,
    families,
    family_of,
    find_deepspeed,
    is_named_part,
)

_MODEL_NAMES = ("model", "state_dict", "model_state_dict", "model_state", "module", "weights")
_OPTIMIZER_NAMES = ("optimizer", "optim", "optimizer_state_dict", "optim_state_dict", "optimizer_state", "optim_state")
_AROUND = ("app", "state")


Keys = tuple[str | None, str | None]
"""The keys of a file's model and optimizer, joined by dots for nested dicts; None: under a usual name."""


def open_source(
    path: str | os.PathLike[str],
    *,
    format: str | None = None,
    optimizer: str | os.PathLike[str] | None = None,
    shapes: nn.Module | Shapes | str | os.PathLike[str] | None = None,
    with_optimizer: bool = True,
    model_key: str | None = None,
    optimizer_key: str | None = None,
) -> Source:
    """Open a checkpoint of any of the formats; no tensor is read.

    path:           a folder or file; one file of FSDP1's stands for those of all ranks, a ``Checkpointer``'s folder for its latest
    format:         None: by what the files are
    optimizer:      the optimizer's files, if they are neither in ``path`` nor next to it
    shapes:         the parameters' names and shapes, in order, for local state dicts of FSDP1: a model (not wrapped, also on the meta
                    device), a dict, or a JSON file of ``write_shapes``
    with_optimizer: False: ignore the optimizer's state
    model_key, optimizer_key: where a file has them, for instance "ema" or "nets.student"; None: under one of the usual names

    Collective: no
    Memory:     descriptions of the tensors: some hundred bytes per shard
    Raises:     CheckpointError naming file and key: truncated, a rank's file missing, files of different saves, unknown
                format

    Example:
        fsdp2.checkpoint.save_safetensors(model, folder)
        source = fsdp2.checkpoint.open_source(folder)
        {name: tensor.shape for name, tensor in source.model.items()}
    """
    check_format(format)
    require("open_source", PATH, path=path)
    require("open_source", PATH.or_none, optimizer=optimizer)
    require("open_source", SWITCH, with_optimizer=with_optimizer)
    require("open_source", WORD.or_none, model_key=model_key, optimizer_key=optimizer_key)
    try:
        return _opened(_latest(Path(path)), format, optimizer, shapes_of(shapes), with_optimizer, (model_key, optimizer_key))
    except FSDPError:
        raise
    except Exception as error:  # readers look for what programs write; damage may be anywhere in it
        raise failure(
            f"{path} cannot be understood: {type(error).__name__}: {error}",
            expected="files as the program with this format writes them",
            fix="copy it again; nothing was changed",
            file=Path(path),
        ) from error


def _latest(path: Path) -> Path:
    """The latest checkpoint, if ``path`` is a ``Checkpointer``'s folder; else ``path`` itself."""
    return (CheckpointFolder(path, None).latest() if path.is_dir() else None) or path


def _opened(
    path: Path, format: str | None, optimizer: str | os.PathLike[str] | None, known: Shapes | None, with_optimizer: bool, keys: Keys
) -> Source:
    source = _read(path, format or detect(path), keys)
    if optimizer is not None and with_optimizer:
        source.optimizer = _read(Path(optimizer), detect(Path(optimizer)), (None, keys[1])).optimizer
    if source.optimizer is not None and not with_optimizer:
        source.optimizer = None
        source.left_out.append("the optimizer")
    return checked_source(_finished(source, known))


def _finished(source: Source, shapes: Shapes | None) -> Source:
    """Without wrappers' prefixes, with parameters in place of flat ones, the optimizer by name."""
    model: State = {clean_name(name): value for name, value in source.model.items()}
    refuse_one_name(source.model)
    optimizer = source.optimizer
    if source.format == "torch" and (has_flat_params(model) or any(isinstance(value, Ranks) for value in model.values())):
        source.format = "fsdp1"
    if _needs_shapes(model) and shapes is None:
        example = next(name for name, value in model.items() if isinstance(value, LazyTensor | Ranks))
        raise failure(
            f"{source.path} is a local state dict of FSDP1: {example} and the like are flattened, without shapes",
            expected="names and shapes of the model's parameters, in order",
            fix="pass shapes (--shapes FILE): the model, or a JSON file that write_shapes wrote",
            file=source.path,
            key=example,
        )
    numbered = optimizer is not None and any(isinstance(key, int) for key in optimizer["state"])
    if numbered and optimizer is not None and shapes is not None and _needs_shapes(model):
        optimizer = unflattened_optimizer(optimizer, model, shapes)
    if has_flat_params(model) and shapes is not None:
        model = unflattened(model, shapes)
    else:
        model = {name: resolve(value, (shapes or {}).get(name), name) for name, value in model.items()}
    if optimizer is not None:
        optimizer = by_name(_resolved(optimizer, model), model)
    return Source(source.path, source.format, model, optimizer, source.left_out)


def _needs_shapes(model: State) -> bool:
    if has_flat_params(model):
        return True
    ranks = [value for value in model.values() if isinstance(value, Ranks)]
    if any(not value.are_alike for value in ranks):
        return True
    shapes = [value.values[0].shape for value in ranks] + [value.shape for _, value in tensors_of(model)]
    return bool(ranks) and all(len(shape) <= 1 for shape in shapes)  # no matrix anywhere: parts of one each, of equal size


def _resolved(optimizer: State, model: State) -> State:
    """Tensors for ``Ranks``, which have the shape of their parameter."""
    state: State = {}
    for name, values in optimizer["state"].items():
        param = model.get(clean_name(name)) if isinstance(name, str) else None
        shape = param.shape if isinstance(param, LazyTensor) else None
        state[name] = {key: resolve(value, shape, f"{name}.{key}") for key, value in values.items()}
    groups = [{key: resolve(value, None, key) for key, value in group.items()} for group in optimizer["param_groups"]]
    return {**optimizer, "state": state, "param_groups": groups}


# --- formats ----------------------------------------------------------------------------------------------------------------------


def _read(path: Path, kind: str, keys: Keys) -> Source:
    if kind == "safetensors":
        return Source(path, kind, dict(open_checkpoint(path).tensors))
    if kind == "deepspeed":
        return read_deepspeed(find_deepspeed(path) or path)
    if kind == "dcp":
        folders = [path] if not dcp_folders(path) else dcp_folders(path)
        return _combined(path, kind, [_picked(folder, kind, read_dcp(folder), keys) for folder in folders])
    together = families(path) if path.is_dir() else [family_meant(path)]
    return _combined(path, kind, [_picked(each[0], kind, _merged(each), keys) for each in together])


def family_meant(path: Path) -> Family:
    """The file, with those of the other ranks if it holds only a part."""
    return family_of(path) if _is_part(path, read_torch_file(path)) else (path,)


def _is_part(path: Path, root: Any) -> bool:
    """Whether ``path`` holds only part of a state. A number in its name does not tell: it may be an epoch."""
    tensors = _all_values(root)
    return is_named_part(path) or any(is_sharded(each) for each in tensors) or all(len(each.shape) == 1 for each in tensors)


def _all_values(tree: Any) -> list[Any]:
    if isinstance(tree, LazyTensor | Ranks) or is_sharded(tree):
        return [] if isinstance(tree, LazyTensor) and not tree.shape else [tree]
    items = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    return [found for each in items for found in _all_values(each)]


def _merged(family: Family) -> Any:
    roots = [(path, read_torch_file(path)) for path in family]
    if len(roots) > 1 or _is_part(*roots[0]):
        check_complete(family)
    if len(roots) > 1 and not is_named_part(family[0]):
        if any(_is_part(*each) for each in roots):
            refuse_exchanged(family)
        else:
            _refuse_steps(roots)
    return merge(roots)


def _refuse_steps(roots: list[tuple[Path, Any]]) -> None:
    """Reject whole states of several steps, whose file names differ in a number; copies of one state are fine.

    Raises: CheckpointError if a floating-point tensor differs at its beginning or end
    """
    of_files = [{name: next(lazy.stored()) for name, lazy in tensors_of(root) if lazy.shape} for _, root in roots]
    shapes = [{name: each.shape for name, each in tensors.items()} for tensors in of_files]
    if any(each != shapes[0] for each in shapes):
        return  # parts of a flattened state, which its reader knows
    values = [{name: _ends(each) for name, each in tensors.items() if DTYPES[each.dtype].is_floating_point} for tensors in of_files]
    for (path, _), each in zip(roots, values, strict=True):
        differing = [name for name in each if each[name] != values[0][name]]
        if differing:
            raise failure(
                f"{path} and {roots[0][0].name} are each a whole state, and differ in {len(differing)} tensors",
                items=differing[:20],
                expected="files of the ranks of one save; these look like several steps of a run, or buffers differ between ranks",
                fix="name the right file, not its folder",
                file=path,
                key=differing[0],
            )


def _ends(stored: Stored, nbytes: int = 4096) -> list[bytes]:
    count = min(nbytes, stored.nbytes)
    with ByteReader() as reader:
        places = stored.offset, stored.offset + stored.nbytes - count
        return [reader.content(stored.path, stored.key, at, count) for at in places]


def _combined(path: Path, kind: str, found: list[Source]) -> Source:
    """One source from several files or folders. Raises: CheckpointError if two have a model or an optimizer"""
    models = [each for each in found if each.model]
    optimizers = [each for each in found if each.optimizer is not None]
    if len(models) > 1 or len(optimizers) > 1:
        twice = models if len(models) > 1 else optimizers
        raise failure(
            f"{path} has {len(twice)} {'models' if twice is models else 'optimizers'}",
            items=[str(each.path) for each in twice],
            expected="one model, and at most one optimizer",
            fix="name one file (of any rank) or one folder; the optimizer's may lie next to it",
            file=path,
        )
    model = models[0] if models else Source(path, kind, {})
    optimizer = optimizers[0].optimizer if optimizers else None
    left_out = [each for source in found for each in source.left_out]
    return Source(path, model.format, model.model, optimizer, left_out)


def _picked(path: Path, kind: str, root: Any, keys: Keys) -> Source:
    """The model and the optimizer in a file's content."""
    if keys != (None, None):
        chosen = {name: _at(path, root, key) for name, key in zip(("model", "optimizer"), keys, strict=True) if key is not None}
        root = chosen | {name: value for name, value in root.items() if name not in ("model", "optimizer")}  # ``_at`` has found a dict
    while isinstance(root, dict) and len(root) == 1 and next(iter(root)) in _AROUND and isinstance(next(iter(root.values())), dict):
        root = next(iter(root.values()))
    if not isinstance(root, dict):
        return Source(path, kind, {}, None, [f"{path.name}: {type(root).__name__}"])
    if looks_like_optimizer(root):
        return Source(path, kind, {}, root)
    if is_flattened(root):
        return Source(path, kind, {}, nested(root))
    model_name = next((name for name in _MODEL_NAMES if isinstance(root.get(name), dict) and _all_values(root[name])), None)
    optimizer_name = next((name for name in _OPTIMIZER_NAMES if name in root and _as_optimizer(root[name]) is not None), None)
    if model_name is None and optimizer_name is None:
        tensors = {name: value for name, value in root.items() if isinstance(name, str) and not isinstance(value, dict)}
        is_state = any(isinstance(value, LazyTensor | Ranks) for value in tensors.values())
        return Source(path, kind, dict(root) if is_state else {}, None, [] if is_state else [f"{path.name}: {name}" for name in root])
    left_out = [f"{path.name}: {name}" for name in root if name not in (model_name, optimizer_name)]
    model = dict(root[model_name]) if model_name is not None else {}
    return Source(path, kind, model, _as_optimizer(root[optimizer_name]) if optimizer_name is not None else None, left_out)


def _at(path: Path, root: Any, key: str) -> Any:
    """The value under ``key`` in ``root``. Raises: CheckpointError that lists the keys there are"""
    found = root
    for part in key.split("."):
        if not isinstance(found, dict) or part not in found:
            names = list(map(str, found)) if isinstance(found, dict) else []
            raise failure(
                f"{path} has nothing under {key}",
                items=names[:20],
                expected="one of these keys" if names else "a dict there",
                fix="pass a key that the file has: --model-key, --optimizer-key",
                file=path,
                key=key,
            )
        found = found[part]
    return found


def _as_optimizer(value: Any) -> State | None:
    """The optimizer's state, even in a list of one; else None."""
    if isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    if looks_like_optimizer(value):
        return value  # type: ignore[no-any-return]
    return nested(value) if is_flattened(value) else None


# --- forms of an optimizer's state ------------------------------------------------------------------------------------------------


def looks_like_optimizer(value: Any) -> bool:
    return isinstance(value, dict) and {"state", "param_groups"} <= value.keys() and isinstance(value["state"], dict)


def nested(flat: State) -> State:
    """Undo ``flatten_optimizer_state_dict``: keys ``state.<name>.<key>`` and ``param_groups.<name>.<key>``."""
    state: dict[str, State] = {}
    options: dict[str, State] = {}
    for path, value in flat.items():
        kind, _, rest = path.partition(".")
        name, _, key = rest.rpartition(".")
        ({"state": state, "param_groups": options}[kind]).setdefault(name, {})[key] = value
    groups: list[State] = []
    for name, values in options.items():  # parameters of equal options were in one group, or might as well have been
        group = next((each for each in groups if {k: v for k, v in each.items() if k != "params"} == values), None)
        if group is None:
            groups.append(group := {**values, "params": []})
        group["params"].append(name)
    return {"state": state, "param_groups": groups}


def refuse_one_name(names: Iterable[str]) -> None:
    """Raises: CheckpointError if two differ only in wrappers' prefixes, so that one would replace the other"""
    first: dict[str, str] = {}
    for name in names:
        if first.setdefault(clean_name(name), name) != name:
            raise failure(
                f"{first[clean_name(name)]} and {name} are one name without the prefixes of wrappers",
                expected="one value for each parameter",
                fix="remove the wrong one, and save the file again",
                key=name,
            )


def is_flattened(value: Any) -> bool:
    return isinstance(value, dict) and bool(value) and all(str(key).startswith(("state.", "param_groups.")) for key in value)


def by_name(optimizer: State, model: State) -> State:
    """``optimizer`` with names for parameters; each group in the order of ``model``, as in ``model.parameters()``.

    Raises: CheckpointError if parameters are numbers that cannot be mapped to names
    """
    groups = [dict(group) for group in optimizer["param_groups"]]
    keys = [*optimizer["state"], *(param for group in groups for param in group["params"])]
    if any(isinstance(key, int) for key in keys):
        names = _names_of_numbers(optimizer, model)
    else:
        names = {key: clean_name(key) for key in keys if isinstance(key, str)}
        refuse_one_name(names)
    foreign = [key for key in keys if key not in names]
    if foreign:
        raise failure(
            f"the optimizer has state of {str(foreign[0])[:100]}",
            expected="names or numbers of parameters",
            fix="save it with FSDP.optim_state_dict, or torch.distributed.checkpoint.state_dict.get_optimizer_state_dict",
        )
    order = {name: index for index, name in enumerate(model)}
    for group in groups:
        group["params"] = sorted((names[param] for param in group["params"]), key=lambda name: order.get(name, len(order)))
        group.pop("param_names", None)
    state = {names[key]: value for key, value in optimizer["state"].items()}
    _check_shapes(state, model)
    return {"state": state, "param_groups": groups}


def _names_of_numbers(optimizer: State, model: State) -> dict[Any, str]:
    numbers = [number for group in optimizer["param_groups"] for number in group["params"]]
    named = optimizer.get("param_names") or [name for group in optimizer["param_groups"] for name in group.get("param_names", ())]
    if len(named) == len(numbers):
        return {number: clean_name(name) for number, name in zip(numbers, named, strict=True)}
    first_at: dict[Any, str] = {}
    for name, value in model.items():
        if isinstance(value, LazyTensor):
            first_at.setdefault(value, name)
    names = list(first_at.values())
    if len(names) == len(numbers) and sorted(numbers) == list(range(len(numbers))) and numbers == sorted(numbers):
        return dict(zip(numbers, names, strict=True))
    raise failure(
        f"the optimizer numbers its {len(numbers)} parameters, and the model's state has {len(names)} tensors",
        expected="one parameter for each tensor, in one order; buffers, frozen parameters and groups hide which is which",
        fix="save it by name: get_optimizer_state_dict, or an optimizer made with model.named_parameters(); or convert without it",
    )


def _check_shapes(state: State, model: State) -> None:
    """Raise an error if a moment's shape is not its parameter's: it belongs to another parameter."""
    wrong: dict[str, str] = {}
    for name, values in state.items():
        param = model.get(name)
        for key, value in tensors_of(values):
            if key in ("exp_avg", "momentum_buffer") and isinstance(param, LazyTensor) and value.shape != param.shape:
                wrong[name] = f"{param.shape} in the model, {key} {value.shape}"
    if wrong:
        raise failure(
            f"the optimizer's state is not of this model: {len(wrong)} tensors do not fit",
            problems=wrong,
            expected="moments of the shapes of the parameters",
            fix="name the files of one save",
        )
