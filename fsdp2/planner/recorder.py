"""What a step allocates, computes and communicates, written down entry by entry, while its tensors have sizes and no memory.

Inside, every tensor that a program makes is a fake one: operators work out shapes and nothing else. Each storage is a *block*; the
entries say when it is allocated and freed, on which stream, and between which operators and collectives.

Worked example: ``y = x @ w`` of (4, 8) and (8, 2) in fp32 is written as ``alloc`` of 32 bytes and ``op`` of ``aten::mm``, which
reads 128 and 64 bytes and writes 32; when ``y`` dies, ``free`` follows.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..testing.clock.trace import Entry, Ranks, Seen
from . import torch_names
from .known_values import KnownValues

PARAMETERS = "sharded parameters"
UNSHARDED = "unsharded parameters"
GATHERING = "all-gather buffers"
GRADIENTS = "sharded gradients"
UNSHARDED_GRADIENTS = "unsharded gradients"
REDUCING = "reduction buffers"
OPTIMIZER = "optimizer state"
ACTIVATIONS = "activations"
TEMPORARY = "temporaries"
BUFFERS = "model buffers and inputs"

_ASKED_BY = {
    "param_group": PARAMETERS,
    "unsharded": UNSHARDED,
    "all_gather": GATHERING,
    "extensions": GATHERING,
    "smaller_mesh": GATHERING,
    "gradients": REDUCING,
    "reduce_plan": REDUCING,
    "reduction": REDUCING,
}
"""The kind of memory that a file of ``core/group`` allocates."""

_CORE = "fsdp2.core.group."
_MAKE_NOTHING = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "set_", "resize_", "lift_fresh", "detach"}
_DTYPES = {
    torch.float32: "Float",
    torch.float64: "Double",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.float8_e4m3fn: "Float8_e4m3fn",
    torch.float8_e5m2: "Float8_e5m2",
}
_ATTENTION = {
    "_scaled_dot_product_flash_attention_for_cpu": "planner::attention",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "planner::attention_backward",
}
"""Operators by the CPU's names. Devices have others for the same."""


@dataclass(slots=True, eq=False)
class Block:
    """A piece of memory.

    where: the unit that ran when it was allocated; node: in backward, the number of autograd's node
    on_host: it lies in the host's memory, which is not the device's; in_file: and there in a file that is mapped
    """

    id: int
    nbytes: int
    label: str
    phase: str
    where: str
    node: int | None
    on_host: bool = False
    in_file: bool = False


class Recorder(torch_names.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down what runs inside.

    entries: since ``take``; blocks: all that ever were, by their number; groups: ranks of each process group, by its number
    stream:  the one that work goes to; phase, where: of what runs now, set by whoever knows
    device:  tensors elsewhere lie on the host
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self.entries: list[Entry] = []
        self.blocks: list[Block] = []
        self.groups: list[Ranks] = []
        self.stream = 0
        self.phase = ""
        self.where = ""
        self._fake = torch_names.FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], Block]] = {}
        self._group_numbers: dict[dist.ProcessGroup | None, int] = {}
        self._together: list[tuple[str, int, int]] | None = None
        self._values = KnownValues()

    def take(self) -> list[Entry]:
        """The entries so far; from now on others."""
        taken, self.entries = self.entries, []
        return taken

    def put(self, kind: str, *, stream: int = 0, id: int = 0) -> None:
        self.entries.append(Entry(kind, stream=stream, id=id))

    def mark(self, phase: str) -> None:
        """``phase`` begins."""
        self.phase = phase
        self.entries.append(Entry("mark", phase))

    # --- memory ---

    def block_of(self, tensor: Tensor) -> Block | None:
        """That ``tensor`` (of a DTensor, its local tensor) lies in; None for what has not been seen, or is no memory of the plan's."""
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        found = self._alive.get(id(local.untyped_storage()))
        return None if found is None else found[1]

    def block_of_storage(self, storage: torch.UntypedStorage) -> Block | None:
        found = self._alive.get(id(storage))
        return None if found is None else found[1]

    def alive(self) -> list[Block]:
        return [block for _, block in self._alive.values() if block.nbytes > 0]

    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Resize as a stream does. A storage has a block for each time that it is allocated."""
        key = id(storage)
        before = self._alive.get(key)
        if before is not None:
            self._free(before[1])
        storage.resize_(nbytes)
        self._alive[key] = (self._reference(storage), self._new_block(nbytes, UNSHARDED if nbytes else TEMPORARY))

    def _reference(self, storage: torch.UntypedStorage) -> weakref.ref[torch.UntypedStorage]:
        key = id(storage)

        def died(_: Any) -> None:
            self._free(self._alive.pop(key)[1])

        return weakref.ref(storage, died)

    def _new_block(self, nbytes: int, label: str) -> Block:
        node = torch_names.number_of_running_node() if self.phase == "backward" else None
        block = Block(len(self.blocks), nbytes, label, self.phase, self.where, node)
        self.blocks.append(block)
        if nbytes:
            self.entries.append(Entry("alloc", stream=self.stream, id=block.id, nbytes=nbytes))
        return block

    def _free(self, block: Block) -> None:
        if block.nbytes:
            self.entries.append(Entry("free", stream=self.stream, id=block.id))

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key not in self._alive:
            block = self._new_block(storage.nbytes(), _label_by_caller())
            block.on_host = tensor.device != self._device
            self._alive[key] = (self._reference(storage), block)

    # --- operators ---

    def __torch_dispatch__(self, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None) -> Any:
        if func is torch_names.ASKS_DEVICE and isinstance(args[0], torch_names.FakeTensor):  # more than half of all calls
            return args[0].fake_device
        kwargs = kwargs or {}
        if DTensor in types:
            return NotImplemented  # let it unfold into operators on local tensors, which come back here
        if torch_names.is_inside_fake_mode():
            return func(*args, **kwargs)
        result = self._run(func, args, kwargs) if self._is_of_the_plan(args, kwargs) else func(*args, **kwargs)
        results = [each for each in _tensors(result) if _has_storage(each)]
        for each in results:
            self._see(each)
        if results or any(_has_storage(each) for each in _tensors(args)):
            self._put_operator(func, args, kwargs, results)
            self._values.follow(func, args, kwargs, results)
        return result

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """On tensors without memory. A result that depends on values is what those that are known say."""
        if _makes_views(func) and isinstance(args[0], torch_names.FakeTensor) and args[0].constant is None:  # two thirds of all
            return torch_names.views_of(self._fake, func, args[0], args, kwargs)
        try:
            with self._fake:
                if func.overloadpacket is torch_names.GROUPED_PRODUCT and args[0].dtype != torch.bfloat16:
                    return torch_names.grouped_product(args[0], args[1], args[2] if len(args) > 2 else kwargs.get("offs"))
                return func(*args, **kwargs)
        except Exception as error:
            value = self._values.computed(func, args, kwargs) if torch_names.reads_values(error) else None
            if value is None and self.phase == "optimizer" and func is torch_names.READS_NUMBER and args[0].dtype != torch.bool:
                return 1.0 if args[0].is_floating_point() else 1  # a norm or a step count, which scales an update
            if not isinstance(value, Tensor):
                if value is None:
                    raise
                return value
            with self._fake:
                result = torch.empty_like(value, device=self._device)
            self._values.note(result, value)
            return result

    @staticmethod
    def _is_of_the_plan(args: Any, kwargs: Any) -> bool:
        """Whether it is about a fake tensor, or makes one: from nothing, or on a device from one on the meta device."""
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "meta":
            return False
        given = False
        for each in (*_tensors(args), *_tensors(tuple(kwargs.values()))):
            given = True
            if isinstance(each, torch_names.FakeTensor) or (device is not None and each.is_meta):
                return True
        return not given

    def _put_operator(self, func: Any, args: Any, kwargs: Any, results: list[Any]) -> None:
        name = torch_names.name_of_operator(func)
        base = name.partition("::")[2]
        arguments, views = _roles(func)
        if base in _MAKE_NOTHING or _makes_views(func):
            return
        if base == "_chunk_cat":  # a reduction copies in its gradients
            self.relabel(_tensors(args[0]), UNSHARDED_GRADIENTS, instead_of=(ACTIVATIONS, TEMPORARY))
        seen: list[Seen] = []
        for index, (argument, is_written) in enumerate(arguments):
            given = args[index] if index < len(args) else kwargs.get(argument)
            seen += [_seen(each, True, is_written) for each in _tensors(given) if _has_storage(each)]
        for each, is_view in zip(results, [*views, *[False] * len(results)], strict=False):
            if not is_view and not any(is_written for _, is_written in arguments):
                seen.append(_seen(each, False, True))
        self.entries.append(Entry("op", _ATTENTION.get(base, name), self.stream, tensors=tuple(seen)))

    def relabel(self, tensors: Iterable[Any], label: str, instead_of: Iterable[str] | None = None) -> None:
        """Note the kind of the blocks of ``tensors``, which is known now."""
        for each in tensors:
            block = self.block_of(each) if isinstance(each, Tensor) else None
            if block is not None and (instead_of is None or block.label in instead_of):
                block.label = label

    def note_in_file(self, storage: torch.UntypedStorage) -> None:
        block = self.block_of_storage(storage)
        assert block is not None
        block.in_file = True

    # --- collectives ---

    def communicated(self, kind: str, group: dist.ProcessGroup | None, nbytes: int) -> None:
        number = self._group_numbers.get(group)
        if number is None:
            number = self._group_numbers[group] = len(self.groups)
            self.groups.append(tuple(dist.get_process_group_ranks(group)))
        if self._together is not None:
            self._together.append((kind, number, nbytes))
        else:
            self.entries.append(Entry("collective", kind, self.stream, number, 1, nbytes))

    @contextlib.contextmanager
    def launched_together(self) -> Iterator[None]:
        outer, self._together = self._together, []
        try:
            yield
        finally:
            launched, self._together = self._together, outer
            for kind, number in dict.fromkeys((kind, number) for kind, number, _ in launched):
                several = [nbytes for *which, nbytes in launched if which == [kind, number]]
                self.entries.append(Entry("collective", kind, self.stream, number, len(several), sum(several)))


def _tensors(given: Any) -> Iterator[Tensor]:
    """The tensors in an operator's arguments or results, which are at most lists of tensors."""
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, (tuple, list)):
        for each in given:
            if isinstance(each, Tensor):
                yield each
            elif isinstance(each, (tuple, list)):
                for inner in each:
                    if isinstance(inner, Tensor):
                        yield inner


def _has_storage(tensor: Tensor) -> bool:
    """Of the plan's tensors, all but sparse gradients, which no reduction takes."""
    return isinstance(tensor, torch_names.FakeTensor) and tensor.layout is torch.strided


def _seen(tensor: Tensor, is_read: bool, is_written: bool) -> Seen:
    nbytes = min(tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes())  # an expanded dim is read once
    return Seen(is_read, is_written, _DTYPES.get(tensor.dtype, str(tensor.dtype)), nbytes, tuple(tensor.shape))


@cache
def _roles(func: Any) -> tuple[list[tuple[str, bool]], list[bool]]:
    return torch_names.roles_of_arguments(func)


@cache
def _makes_views(func: Any) -> bool:
    _, views = _roles(func)
    return bool(views) and all(views)


def _label_by_caller() -> str:
    """The kind of a block, by the file of the core that asked for it; else a module of the user's, or an optimizer has."""
    frame = sys._getframe(3)
    while frame is not None:
        name: str = frame.f_globals.get("__name__", "")
        if name.startswith(_CORE):
            label = _ASKED_BY.get(name[len(_CORE) :])
            if label is not None:
                return label
        elif frame.f_code.co_name == "_call_impl":
            break
        frame = frame.f_back  # type: ignore[assignment]
    return ACTIVATIONS
