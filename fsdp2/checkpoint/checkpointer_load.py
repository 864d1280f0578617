"""A checkpoint's content for this model on this rank: compared with the model first, then read into host memory, then handed out.

The model and the optimizer change only when all of it has been read. Names and shapes come from the checkpoint's metadata, so that
an optimizer without state needs no step to get some: a tensor of its parameter's shape is sharded like the parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..torch_names import torch_dtensors
from .dcp_read import DcpChunks, read_metadata, unflatten, unpack
from .digests import compared, dcp_parts
from .failures import failure, on_every_rank
from .file_reading import ByteReader
from .lazy_tensors import State
from .model_tensors import own_pieces
from .training_state import clean_name, host_space, named_model_state, named_optimizer_state, names_in, put_per_rank_values


@dataclass
class Restored:
    """The state in host memory; ``scheduler``, ``data`` and ``random`` packed, the last None if another number of ranks saved it."""

    step: int
    world_size: int
    model: State
    optimizer: State
    scheduler: bytes
    data: bytes
    random: bytes | None


def read_state(
    path: Path,
    process_group: dist.ProcessGroup | None,
    model: nn.Module,
    optimizer: Optimizer | None,
    given: AbstractSet[str],
    verify: tuple[int, int] | None,
    has_all_files: bool = True,
) -> Restored:
    """Read all that model, optimizer and ``given`` ("scheduler", "data") need.

    verify:        compare the files with their digests before: this rank's share, as in ``compared``
    has_all_files: False: those that this rank does not need may be missing
    Collective:    yes, over ``process_group``
    Memory:        this rank's shards of model and optimizer, in host memory
    Raises:        CheckpointError, on every rank, with nothing changed
    """

    def read() -> Restored:
        if verify is not None:
            compared(path, "dcp", dcp_parts([path], has_all_files), verify)
        reading = _Reading(path, process_group, has_all_files)
        reading.prepare(model, optimizer, given)
        reading.read()
        return reading.result(model, optimizer)

    return on_every_rank(process_group, f"cannot read {path}", read)


def files_to_read(
    path: Path, process_group: dist.ProcessGroup, model: nn.Module, optimizer: Optimizer | None, given: AbstractSet[str]
) -> set[str]:
    """The names of the files that ``read_state`` reads on this rank. Collective: no. Raises: CheckpointError"""
    reading = _Reading(path, process_group, has_all_files=False)
    reading.prepare(model, optimizer, given)
    boxes = {key: value if value is None else [piece.box for piece in own_pieces(value)] for key, value in reading.flat.items()}
    return set().union(*(reading.chunks.files(key, of_key) for key, of_key in boxes.items()))


class _Reading:
    """``flat``: the values to read, by the metadata's keys: tensors read into their memory, other values replace None."""

    def __init__(self, path: Path, process_group: dist.ProcessGroup | None, has_all_files: bool) -> None:
        self.path = path
        self.metadata = metadata = read_metadata(path, has_all_files)
        self.chunks = DcpChunks(path, metadata)
        self.flat: dict[str, Any] = {}
        self._rank = dist.get_rank(process_group)
        self._world_size = dist.get_world_size(process_group)
        self._paths: dict[str, tuple[Any, ...]] = metadata.planner_data or {}
        known = {path[0] for path in self._paths.values()}
        if not known >= {"step", "world_size", "random"}:
            raise failure(
                f"{path} was not saved by a Checkpointer: it has {', '.join(sorted(map(str, known))) or 'nothing with a name'}",
                expected="a step, a model and random states",
                fix="load it with torch.distributed.checkpoint.load",
                file=path,
            )
        self._known = known
        self._saved_by: int = sum(path[0] == "random" for path in self._paths.values())

    @property
    def _same_ranks(self) -> bool:
        return self._saved_by == self._world_size

    # --- before ---

    def prepare(self, model: nn.Module, optimizer: Optimizer | None, given: AbstractSet[str]) -> None:
        missing = (given | ({"optimizer"} if optimizer is not None else set())) - self._known
        if missing:
            raise failure(
                f"{self.path} has no state of: {', '.join(sorted(missing))}",
                expected="a checkpoint that was saved with it",
                fix="create the Checkpointer without it, or name another checkpoint",
                file=self.path,
            )
        self._add_model(named_model_state(model))
        if optimizer is not None:
            self._add_optimizer(model, optimizer)
        ranks = [self._rank] if self._same_ranks else range(self._saved_by)
        wanted = ["step", "world_size", *(["scheduler"] if "scheduler" in given else [])]
        wanted += [f"data.rank_{rank}" for rank in ranks if "data" in given]
        if self._same_ranks:
            wanted += [key for key in (f"random.rank_{self._rank}", f"own.rank_{self._rank}") if key in self._paths]
        self.flat.update(dict.fromkeys(wanted))

    def _below(self, first: str) -> dict[str, tuple[Any, ...]]:
        return {key: path for key, path in self._paths.items() if path[0] == first}

    def _add_model(self, state: State) -> None:
        saved = self._below("model")
        saved_names = {path[1] for path in saved.values()}
        problems = {name: "is not in the checkpoint" for name in state if name not in saved_names}
        problems |= dict.fromkeys(sorted(saved_names - state.keys()), "is not in the model")
        for key, path in saved.items():
            like, found = state.get(path[1]), self.metadata.state_dict_metadata[key]
            if isinstance(like, Tensor) and (isinstance(found, BytesStorageMetadata) or found.size != like.shape):
                shape = tuple(found.size) if isinstance(found, TensorStorageMetadata) else "no tensor"
                problems[path[1]] = f"{tuple(like.shape)} in the model, {shape} in the checkpoint"
            elif path[1] in state:
                self.flat[key] = self._space(key, like if isinstance(like, Tensor) else None)
        if problems:
            raise failure(
                f"{self.path} is of another model",
                problems=problems,
                expected="the model's names and shapes",
                fix="build the model as it was when the checkpoint was saved; nothing was changed",
                file=self.path,
            )

    def _add_optimizer(self, model: nn.Module, optimizer: Optimizer) -> None:
        params = {clean_name(name): param for name, param in model.named_parameters()}
        state = named_optimizer_state(model, optimizer)["state"]
        for key, path in self._below("optimizer").items():
            like = None
            if path[1] == "state":
                like = _at(state, path[2:])
                param = params.get(path[2])
                if like is None and param is not None and path[-1] != "step":  # the key of a value that is never sharded
                    like = param
            self.flat[key] = self._space(key, like)

    def _space(self, key: str, like: Tensor | None) -> Tensor | None:
        """The tensor into which ``key`` is read: sharded like ``like``, if that has the same shape."""
        found = self.metadata.state_dict_metadata[key]
        if not isinstance(found, TensorStorageMetadata):
            return None
        if like is not None and like.shape == found.size:
            return host_space(like.detach(), found.properties.dtype)
        return torch.empty(found.size, dtype=found.properties.dtype, device="cpu")

    # --- reading ---

    def read(self) -> None:
        """Read this rank's part of each tensor straight to where it belongs, and the rest. Collective: no."""
        with ByteReader() as reader:
            for key, value in self.flat.items():
                if value is None:
                    self.flat[key] = self.chunks.unpacked(key)
                    continue
                local = torch_dtensors.local_tensor(value) if isinstance(value, DTensor) else value
                for piece in own_pieces(value):
                    self.chunks.read(key, piece.box, local[piece.local.slices], reader)

    # --- after ---

    def result(self, model: nn.Module, optimizer: Optimizer | None) -> Restored:
        nested = unflatten(self.flat, self.metadata)
        for packed in nested.get("own", {}).values():
            put_per_rank_values(nested, unpack(packed))
        state = nested.get("optimizer", {})
        state = {"state": state.get("state", {}), "param_groups": state.get("param_groups", [])}
        if optimizer is not None:
            self._compare_groups(names_in(model, optimizer), state)
            self._compare_options(optimizer, state)
        return Restored(
            step=nested["step"],
            world_size=nested["world_size"],
            model=nested.get("model", {}),
            optimizer=state,
            scheduler=nested.get("scheduler", b""),
            data=self._position(nested.get("data", {})),
            random=nested.get("random", {}).get(f"rank_{self._rank}"),
        )

    def _compare_groups(self, names: list[list[str]], state: State) -> None:
        saved = [group["params"] for group in state["param_groups"]]
        if saved == names:
            return
        pairs = zip([*saved, *[[]] * len(names)], [*names, *[[]] * len(saved)], strict=False)
        different = [
            f"group {at}: {_short(set(ours) - set(theirs)) or 'nothing'} only in the optimizer, "
            f"{_short(set(theirs) - set(ours)) or 'nothing'} only in the checkpoint" + (" (another order)" * (set(ours) == set(theirs)))
            for at, (theirs, ours) in enumerate(pairs)
            if theirs != ours
        ]
        raise failure(
            f"{self.path} is of another optimizer: {len(saved)} groups of {sum(map(len, saved))} parameters, "
            f"this one has {len(names)} of {sum(map(len, names))}",
            items=different,
            expected="the same parameters in the same groups",
            fix="make the optimizer as it was when the checkpoint was saved; nothing was changed",
            file=self.path,
        )

    def _compare_options(self, optimizer: Optimizer, state: State) -> None:
        """Whether the optimizer would have all of its options after ``load_state_dict``, which replaces them by the checkpoint's."""
        like: Any = object.__new__(type(optimizer))
        vars(like).update(vars(optimizer))
        like.__setstate__({"state": {}, "param_groups": [dict(group) for group in state["param_groups"]]})  # adds what older ones lack
        lost = [
            f"group {at}: has {', '.join(sorted(map(str, theirs)))}, and no {', '.join(missing)}"
            for at, (ours, theirs) in enumerate(zip(optimizer.param_groups, like.param_groups, strict=True))
            if (missing := [key for key in optimizer.defaults if key in ours and key not in theirs])
        ]
        if lost:
            raise failure(
                f"{self.path} is of another kind of optimizer: it lacks options of {type(optimizer).__name__}",
                items=lost,
                expected="the kind of optimizer that was saved",
                fix="use that kind, or create the Checkpointer without an optimizer to load only the model; nothing was changed",
                file=self.path,
            )

    def _position(self, data: Mapping[str, bytes]) -> bytes:
        mine = data.get(f"rank_{self._rank}" if self._same_ranks else "rank_0", b"")
        if not self._same_ranks and any(not _same(unpack(mine), unpack(other)) for other in data.values()):
            raise failure(
                f"{self.path} has a data position for each of {self._saved_by} ranks, and they differ; "
                f"this run has {self._world_size} ranks",
                expected="the same number of ranks, or one position for all, such as the number of batches",
                fix="create the Checkpointer without data, and compute the position from the step",
                file=self.path,
            )
        return mine


def _at(state: Any, path: tuple[Any, ...]) -> Tensor | None:
    """The tensor at ``path`` in nested dicts; None if there is none."""
    for part in path:
        state = state.get(part) if isinstance(state, dict) else None
    return state if isinstance(state, Tensor) else None


def _short(names: AbstractSet[str]) -> str:
    shown = sorted(names)[:3]
    return ", ".join(shown) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _same(one: Any, other: Any) -> bool:
    """Equality that reaches into containers, and compares tensors by value."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(each, other[key]) for key, each in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)
