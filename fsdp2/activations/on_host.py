"""Activations that are on the host between forward and backward, copied on a stream of their own alongside the computation.

The storages of all that autograd saves in a module's forward go to the host, each once, even if several views of it are saved. The
first of them that backward asks for brings all of that call back, and starts with those of the call before.

Note: memory of a copy. Device memory is allocated and freed on compute alone. What leaves is held until the copy is done, or until the
next module but one runs, when compute is ordered after it; what comes back is waited for by compute before its first use, and if
nobody uses it, before it is freed.

Worked example, calls a, b, c of three blocks

    forward     run a | copy a out, run b | copy b out, run c (the last of a forward stays)
    backward    ask for b, start a; b's backward | a's backward
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..core.comm.streams import Event, Streams, streams_of
from ..errors import OrderError
from ..torch_names import torch_compiler, torch_tensors
from .storages import StorageMap, has_storage, parameter_storages


class OnHost:
    """One storage, whose bytes are on the host. It lives as long as a graph needs it.

    device:         where it was, and will be again
    left:           after the copy to the host
    is_overwritten: it was written while it may have been copied
    """

    def __init__(self, host: HostMemory, data: Tensor, streams: Streams) -> None:
        """data: (n,) bytes of the storage"""
        self._memory = host
        self._streams = streams
        self.device = data.device
        pin_memory = host.pin_memory and data.device.type != "cpu"
        self._bytes = torch.empty(data.numel(), dtype=torch.uint8, device="cpu", pin_memory=pin_memory)
        self._back: Tensor | None = None
        self._arrived: Event = None
        self._is_used = False
        self.is_overwritten = False
        streams.order(streams.offload, streams.mark(streams.compute))
        with streams.on(streams.offload), torch.no_grad():
            self._bytes.copy_(data, non_blocking=True)
        self.left = streams.mark(streams.offload)
        host.nbytes += data.numel()
        host.peak_nbytes = max(host.peak_nbytes, host.nbytes)

    def allocate(self) -> bool:
        """Make room for it on the device; False if it is there."""
        if self._back is not None:
            return False
        self._back = torch.empty(self._bytes.numel(), dtype=torch.uint8, device=self.device)
        return True

    def copy_back(self) -> None:
        """Copy on the current stream."""
        assert self._back is not None
        with torch.no_grad():
            self._back.copy_(self._bytes, non_blocking=True)

    def arrives(self, event: Event) -> None:
        self._arrived = event

    def storage(self) -> torch.UntypedStorage:
        """The storage on the device, as compute sees it."""
        assert self._back is not None
        if not self._is_used:
            self._streams.order(self._streams.compute, self._arrived)
            self._is_used = True
        return self._back.untyped_storage()

    def __del__(self) -> None:
        self._memory.nbytes -= self._bytes.numel()
        if self._back is not None and not self._is_used:  # see Note: memory of a copy
            self._streams.order(self._streams.compute, self._arrived)


class Saved(NamedTuple):
    """What autograd keeps in place of a tensor: where its storage is, and which view of it the tensor was."""

    call: Call
    storage: OnHost
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Kept(NamedTuple):
    """What autograd keeps of a tensor that stays on the device, with its version then."""

    call: Call
    tensor: Tensor
    version: int


class _Leaving(NamedTuple):
    tensor: Tensor
    version: int
    storage: OnHost
    call: int
    is_captured: bool  # by a graph


class HostMemory:
    """The storages that one ``apply_activation_offload`` call has put on the host.

    max_nbytes: that may be there at a time; what does not fit stays on the device
    min_nbytes: smaller storages stay
    nbytes, peak_nbytes: there now, and at most so far
    last:       the module whose backward began first: backward asks at once for what it saves, so that stays on the device
    """

    def __init__(self, max_nbytes: int | None, min_nbytes: int, pin_memory: bool) -> None:
        self.max_nbytes = max_nbytes
        self.min_nbytes = min_nbytes
        self.pin_memory = pin_memory
        self.nbytes = self.peak_nbytes = 0
        self.last: weakref.ref[nn.Module] | None = None
        self._in_forward = True
        self._known: StorageMap[tuple[int, weakref.ref[OnHost]]] = StorageMap()
        self._leaving: deque[_Leaving] = deque()
        self._num_calls = 0
        self._before: weakref.ref[Call] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return HostMemory, (self.max_nbytes, self.min_nbytes, self.pin_memory)

    def begin(self, module: nn.Module) -> Call:
        """``module`` is about to run, with autograd."""
        self._in_forward = True
        self._known.prune()
        self._num_calls += 1
        self._let_go(self._num_calls - 2)
        call = Call(self, module, self._before)
        self._before = weakref.ref(call)
        return call

    def put(self, tensor: Tensor, module: nn.Module) -> OnHost | None:
        """The storage of ``tensor`` on the host; None if it is to stay."""
        version = tensor._version
        known = self._known.get(tensor)
        found = known[1]() if known is not None and known[0] == version else None
        if found is not None:
            return found
        nbytes = tensor.untyped_storage().nbytes()
        if nbytes < max(self.min_nbytes, 1) or (self.last is not None and self.last() is module):
            return None
        if self.max_nbytes is not None and self.nbytes + nbytes > self.max_nbytes:
            return None
        if torch_tensors.storage_key(tensor) in parameter_storages(module):
            return None
        data = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        streams = streams_of(tensor.device)
        made = OnHost(self, data, streams)
        self._known.put(tensor, (version, weakref.ref(made)))
        self._leaving.append(_Leaving(tensor, version, made, self._num_calls, streams.is_capturing()))
        self._let_go(0)
        return made

    def _let_go(self, of_calls: int) -> None:
        """Forget the tensors whose copy is done, and order compute after the copies of the first ``of_calls`` calls."""
        while self._leaving:
            tensor, version, storage, call, is_captured = self._leaving[0]
            streams = streams_of(tensor.device)
            if is_captured is streams.is_capturing():  # else no stream may wait, nor need it: the host did before the capture
                if call > of_calls and not streams.has_passed(storage.left):
                    return
                streams.order(streams.compute, storage.left)
            if tensor._version != version:
                storage.is_overwritten = True
            self._leaving.popleft()

    def begin_backward(self, module: nn.Module) -> None:
        """Backward asks for a tensor that was saved in ``module``, maybe not for the first one."""
        if self._in_forward:
            self._in_forward = False
            self.last = weakref.ref(module)
        # Of a graph's copies nothing outlives the graph.
        self._let_go(self._num_calls if self._leaving and self._leaving[0].is_captured else 0)


class Call:
    """One forward of a module: what autograd saves in it."""

    def __init__(self, memory: HostMemory, module: nn.Module, before: weakref.ref[Call] | None) -> None:
        """before: the call before it"""
        self._memory = memory
        self._module = module
        self._device = next(
            (tensor.device for each in module.modules() for tensor in each._parameters.values() if tensor is not None), None
        )
        self._before = before
        self._storages: list[weakref.ref[OnHost]] = []

    @torch_compiler.dynamo_disabled
    def pack(self, tensor: Tensor) -> Saved | Kept:
        """The object that autograd keeps in place of ``tensor``."""
        if has_storage(tensor) and tensor.device == self._device and not tensor.is_conj() and not tensor.is_neg():
            storage = self._memory.put(tensor, self._module)
            if storage is not None:
                self._storages.append(weakref.ref(storage))
                return Saved(self, storage, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))
        return Kept(self, tensor, tensor._version)

    @torch_compiler.dynamo_disabled
    def unpack(self, saved: Saved | Kept) -> Tensor:
        """The tensor that ``saved`` stands for. Raises: OrderError if it was changed in place since, as autograd does."""
        self._memory.begin_backward(self._module)
        self._fetch()
        before = None if self._before is None else self._before()
        if before is not None:
            before._fetch()
        if isinstance(saved, Kept):
            if saved.tensor._version != saved.version:
                raise _changed(saved.tensor.dtype, saved.tensor.size())
            return saved.tensor
        if saved.storage.is_overwritten:
            raise _changed(saved.dtype, saved.size)
        storage = saved.storage.storage()
        return torch.empty(0, dtype=saved.dtype, device=storage.device).set_(storage, saved.offset, saved.size, saved.stride)

    def _fetch(self) -> None:
        """Start to bring back what graphs still need."""
        alive = [storage for each in self._storages if (storage := each()) is not None]
        coming = [storage for storage in alive if storage.allocate()]
        self._storages.clear()  # what has died since is not asked for, and what comes is held by the graph
        if not coming:
            return
        streams = streams_of(coming[0].device)
        streams.order(streams.offload, streams.mark(streams.compute))
        with streams.on(streams.offload):
            for storage in coming:
                storage.copy_back()
        arrived = streams.mark(streams.offload)
        for storage in coming:
            storage.arrives(arrived)


def _changed(dtype: torch.dtype, size: torch.Size) -> OrderError:
    return OrderError(
        f"a tensor {tuple(size)} of {dtype} that backward needs was changed in place since forward",
        expected="saved tensors to stay as they are until backward",
        fix="use the operator that makes a new tensor, or change a clone",
    )
