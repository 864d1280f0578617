"""The state of a training loop on this rank: model and optimizer by name, random number generators, and copies in host memory.

The layout is that of ``torch.distributed.checkpoint.state_dict``; names carry no prefixes of wrappers:

    {"state": {"head.weight": {"step": tensor(3.), "exp_avg": DTensor}}, "param_groups": [{"lr": 0.1, "params": ["head.weight"]}]}

An optimizer's state is taken as it is: torch's ``get_optimizer_state_dict`` takes a step with zero gradients if there
is no state yet, and Adam then counts one step more than a run without a checkpoint.

Plain tensors may differ between ranks: each rank's batch norm sees its own batches. DCP saves such a tensor from an
arbitrary rank. Here the checkpoint holds the lowest rank's value under the tensor's name, and separately the values of
ranks that differ, which a load uses only on the same number of ranks.
"""

from __future__ import annotations

import bisect
import contextlib
import copy
import hashlib
import random
import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..errors import meta_error
from ..torch_names import torch_dtensors, torch_tensors
from .failures import failure
from .file_reading import bytes_of
from .lazy_tensors import State
from .model_tensors import WRAPPERS

wants_shards: ContextVar[bool] = ContextVar("fsdp2_wants_shards", default=False)
"""True inside ``named_model_state``: there FSDP1's modules return DTensors instead of whole tensors."""


def clean_name(name: str) -> str:
    """``name`` without the prefixes that activation checkpointing and the compiler add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def named_model_state(model: nn.Module) -> State:
    """``model.state_dict()`` under clean names: DTensors, nothing copied. Collective: no.

    Raises: MaterializationError if a part of it is still on the meta device
    """
    token = wants_shards.set(True)
    try:
        if next(model.parameters(), None) is None and not model.state_dict():
            return {}  # torch's refuses
        state: State = get_model_state_dict(model)
    finally:
        wants_shards.reset(token)
    on_meta = {name: value for name, value in state.items() if isinstance(value, Tensor) and value.is_meta}
    if on_meta:
        devices = {value.device_mesh.device_type for value in on_meta.values() if hasattr(value, "device_mesh")}
        items = [f"{name} {tuple(value.shape)}" for name, value in on_meta.items()]
        raise meta_error(items, next(iter(devices), torch_tensors.default_device_type()))
    return state


def load_into(model: nn.Module, state: State) -> None:
    """Load a result of ``named_model_state`` into the model. Collective: no."""
    if state:  # torch's refuses an empty one
        set_model_state_dict(model, state)


def put_back(model: nn.Module, state: State) -> None:
    """As ``load_into``, but if the model's own loading fails, its tensors still get their values."""
    with contextlib.suppress(Exception):
        load_into(model, state)
    for name, tensor in named_model_state(model).items():
        if isinstance(tensor, Tensor):
            tensor.copy_(state[name])


def names_in(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """The names of the parameters of each of the optimizer's groups. A state dict taken first makes modules show sharded parameters.

    Raises: CheckpointError locating parameters that are not the model's
    """
    known = {id(param): clean_name(name) for name, param in model.named_parameters()}  # the first name of each
    groups = [group["params"] for group in optimizer.param_groups]
    foreign = [
        f"param_groups[{at}]['params'][{index}]: {type(param).__name__} {tuple(param.shape)}"
        for at, params in enumerate(groups)
        for index, param in enumerate(params)
        if id(param) not in known
    ]
    if foreign:
        raise failure(
            f"the optimizer has {len(foreign)} parameters that the model does not have",
            items=foreign,
            expected="an optimizer over the model's parameters",
            fix="make the optimizer after fully_shard, from model.parameters()",
        )
    return [[known[id(param)] for param in params] for params in groups]


def named_optimizer_state(model: nn.Module, optimizer: Optimizer) -> State:
    """``optimizer.state_dict()`` with names in place of numbers; nothing copied, no step taken. Collective: no."""
    names = names_in(model, optimizer)
    raw = optimizer.state_dict()
    name_of: dict[Any, str] = {}
    groups = []
    for group, named in zip(raw["param_groups"], names, strict=True):
        name_of.update(zip(group["params"], named, strict=True))
        groups.append(group | {"params": named})
    return {"state": {name_of[number]: dict(each) for number, each in raw["state"].items()}, "param_groups": groups}


def numbered_optimizer_state(state: State, names: list[list[str]]) -> State:
    """A result of ``named_optimizer_state`` for ``optimizer.load_state_dict``; ``names`` are the optimizer's."""
    number_of: dict[str, int] = {}
    groups = []
    for group, named in zip(state["param_groups"], names, strict=True):
        for name in named:
            number_of[name] = len(number_of)
        groups.append(group | {"params": [number_of[name] for name in named]})
    return {"state": {number_of[name]: each for name, each in state["state"].items()}, "param_groups": groups}


def map_values(change: Callable[[Any], Any], state: Any) -> Any:
    """``state`` with every leaf of its dicts and lists changed; tuples are leaves."""
    if isinstance(state, dict):
        return {key: map_values(change, value) for key, value in state.items()}
    if isinstance(state, list):
        return [map_values(change, value) for value in state]
    return change(state)


# --- values that differ between ranks ---------------------------------------------------------------------------------------------


KeyPath = tuple[Any, ...]


def value_digests(state: dict[str, Any]) -> dict[KeyPath, bytes]:
    """Digests of the plain tensors of ``state``, by their path of keys, for ranks to compare."""
    return {path: _digest(tensor) for path, tensor in _plain_tensors(state, ()).items()}


def take_per_rank_values(state: dict[str, Any], of_ranks: Sequence[dict[KeyPath, bytes]], rank: int) -> dict[KeyPath, Tensor]:
    """Remove from ``state``, and return, the tensors that differ from those of the lowest rank that has them.

    of_ranks: ``value_digests`` of every rank
    rank:     this one
    """
    first: dict[KeyPath, bytes] = {}
    for each in of_ranks:
        for path, digest in each.items():
            first.setdefault(path, digest)
    own: dict[KeyPath, Tensor] = {}
    for path in [path for path, digest in of_ranks[rank].items() if digest != first[path]]:
        into = state
        for key in path[:-1]:
            into = into[key]
        own[path] = into.pop(path[-1])
    return own


def put_per_rank_values(state: dict[str, Any], own: dict[KeyPath, Tensor]) -> None:
    """Undo ``take_per_rank_values`` on a loaded state, which may hold only the model."""
    for path, tensor in own.items():
        if path[0] not in state:
            continue
        into = state
        for key in path[:-1]:
            into = into[key]
        into[path[-1]] = tensor


def _plain_tensors(state: Any, path: KeyPath) -> dict[KeyPath, Tensor]:
    if isinstance(state, dict):
        return {found: each for key, value in state.items() for found, each in _plain_tensors(value, (*path, key)).items()}
    return {path: state} if isinstance(state, Tensor) and not isinstance(state, DTensor) else {}


def _digest(tensor: Tensor) -> bytes:
    tensor = tensor.contiguous()
    return hashlib.sha256(bytes_of(tensor)).digest() + f"{tensor.dtype} {tuple(tensor.shape)}".encode()


# --- random number generators -----------------------------------------------------------------------------------------------------


def random_state(device_type: str) -> dict[str, Any]:
    """This rank's random state of Python, NumPy if imported, and torch; for ``torch.load(weights_only=True)``.

    device_type: "cuda" and so on: include the generator of the current device; "cpu": none
    """
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {"python": [version, list(numbers), gauss], "torch": torch.get_rng_state()}
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        kind, key, *rest = numpy.random.get_state()
        state["numpy"] = [str(kind), key.tolist(), *(float(each) if isinstance(each, float) else int(each) for each in rest)]
    if device_type != "cpu":
        state[device_type] = torch.get_device_module(device_type).get_rng_state()
    return state


def set_random_state(state: dict[str, Any], device_type: str) -> None:
    """Restore a result of ``random_state``; generators that it does not have stay unchanged."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy as np

        kind, key, *rest = state["numpy"]
        np.random.set_state((kind, np.array(key, dtype=np.uint32), *rest))
    if device_type in state:
        torch.get_device_module(device_type).set_rng_state(state[device_type])


# --- copies in host memory --------------------------------------------------------------------------------------------------------


class Spare(dict[Any, list[Tensor]]):
    """Host memory of a copy, by device, shape, strides and dtype. Writing to new memory takes several times as long.

    copied: the device's events after which that copy may be read
    """

    def __init__(self) -> None:
        super().__init__()
        self.copied: list[Any] = []


def host_copy(state: Any, *, shared: bool = False, spare: Spare | None = None, flats: Sequence[Tensor] = ()) -> Any:
    """``state`` with every tensor copied; of a DTensor, this rank's shard. Collective: no.

    Copies from a device are page-locked and queued on its current stream: after all work that has been started, and before all
    that is started later, whoever writes then. Tensors that lie in one buffer are one copy.

    shared: do not copy tensors in host memory: for a caller that finishes before they change
    spare:  memory to use, that of a copy which nobody reads any more; holds this copy's afterwards, which may be read after
            its events. Without it the host waits for the copies
    flats:  contiguous buffers of parameters and of states, in which tensors of ``state`` lie
    Memory: this rank's shards of ``state``, in host memory, with the padding of ``flats``
    """
    found: list[Tensor] = []

    def note(value: Any) -> None:
        local = torch_dtensors.local_tensor(value) if isinstance(value, DTensor) else value
        if isinstance(local, Tensor) and not (shared and local.device.type == "cpu"):
            found.append(local)

    map_values(note, state)
    buffers = {id(tensor): place for tensor, place in zip(found, _places(found, flats), strict=True)}
    spaces: dict[int, Tensor] = {}  # by id of the buffer
    used: dict[Any, list[Tensor]] = {}

    def host_of(tensor: Tensor) -> Tensor:
        buffer, offset = buffers[id(tensor)]
        if id(buffer) not in spaces:
            kind = buffer.device, buffer.shape, buffer.stride(), buffer.dtype
            if spare and spare.get(kind):
                space = spare[kind].pop()
            else:
                space = torch.empty_like(buffer, device="cpu", requires_grad=False, pin_memory=buffer.device.type != "cpu")
            used.setdefault(kind, []).append(space)
            spaces[id(buffer)] = space.copy_(buffer.detach(), non_blocking=True)
        space = spaces[id(buffer)]
        return space if buffer is tensor else space.as_strided(tensor.shape, tensor.stride(), offset)

    def copy_of(value: Any) -> Any:
        if isinstance(value, DTensor):
            return torch_dtensors.new_dtensor(copy_of(torch_dtensors.local_tensor(value)), torch_dtensors.spec_of(value))
        if not isinstance(value, Tensor):
            return copy.deepcopy(value)
        return host_of(value) if id(value) in buffers else value.detach()

    result = map_values(copy_of, state)
    devices = {tensor.device for tensor in found if tensor.device.type != "cpu"}
    events = [torch.get_device_module(device.type).current_stream(device).record_event() for device in devices]
    if spare is None:
        for event in events:
            event.synchronize()
    else:
        spare.clear()
        spare.update(used)
        spare.copied = events
    return result


def _places(tensors: Sequence[Tensor], flats: Sequence[Tensor]) -> list[tuple[Tensor, int]]:
    """For each tensor the buffer to copy, one of ``flats`` or itself, and its offset there in elements."""
    starts = sorted((flat.data_ptr(), index) for index, flat in enumerate(flats) if flat.numel())
    places = []
    for tensor in tensors:
        found = tensor, 0
        if starts and type(tensor) in (Tensor, nn.Parameter) and tensor.numel():
            at = bisect.bisect(starts, (tensor.data_ptr(), len(flats))) - 1
            flat = flats[starts[max(at, 0)][1]]
            offset = (tensor.data_ptr() - flat.data_ptr()) // flat.itemsize
            if (flat.dtype, flat.device) == (tensor.dtype, tensor.device) and 0 <= offset <= flat.numel() - tensor.numel():
                found = flat, offset
        places.append(found)
    return places


def host_space(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Uninitialized host memory for this rank's shard of ``like``."""
    if isinstance(like, DTensor):
        spec = torch_dtensors.spec_of(like)
        assert spec.tensor_meta is not None
        local = host_space(torch_dtensors.local_tensor(like), dtype)
        return torch_dtensors.new_dtensor(local, replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=dtype)))
    return torch.empty_like(like, dtype=dtype, device="cpu", requires_grad=False)
