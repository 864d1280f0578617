"""A process group in which one process plays rank 0 of any number: the others gather its data, and reduce multiples of it.

One device is enough to run every scenario with data that pass through gathers and reductions, written by kernels on the stream that the
caller's collective would run on. What arrives is finite and the same in every run, so that a collective that runs too early or too
late changes the result. The arithmetic is that of the pretend accelerator's model (``fsdp2/testing/pretend/csrc/collectives.cpp``), by
which this file is tested. What real ranks do, it cannot show.

    all-gather of x                  x, x, ...
    reduce-scatter of rows a, b      a + a * (1 + 1/8) + ...      (rank 0's row; AVG divides, PREMUL_SUM multiplies each rank's first)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp2.core.comm.backends import declare_backend

BACKEND = "fsdp2_modeled"


class _Done(dist._Work):  # private: torch has no public base class for works that Python makes
    """An asynchronous collective ran on the group's stream; ``wait`` orders the current stream behind it."""

    def __init__(self, event: torch.Event | None, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._event = event
        self._tensors = tensors
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        self._future.set_result(list(tensors))

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if self._event is not None:
            torch.accelerator.current_stream().wait_event(self._event)
        return True

    def is_completed(self) -> bool:
        return self._event is None or bool(self._event.query())

    def get_future(self) -> Any:
        return self._future


class Modeled(dist.ProcessGroup):
    """The collectives that FSDP issues, and those of meshes and state dicts."""

    def __init__(self, rank: int, size: int, device_type: str) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self._device_type = device_type
        self._stream: Any = None

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return BACKEND

    @property
    def pg_name(self) -> str:
        return str(dist.distributed_c10d._world.pg_names[self])

    @property
    def group_name(self) -> str:
        return self.pg_name

    # --- collectives ---

    def all_gather_single(self, output: Tensor, input_: Tensor, options: Any = None) -> _Done:
        return self.all_gather_single_coalesced([output], [input_], options)

    def all_gather_single_coalesced(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], options: Any = None) -> _Done:
        def run() -> None:
            for output, input_ in zip(outputs, inputs, strict=True):
                row = input_.reshape(-1).clone()  # the input may be a row of the output
                output.view(self._size, -1).copy_(row.expand(self._size, -1))

        return self._run(run, options, outputs, inputs)

    def reduce_scatter_single(self, output: Tensor, input_: Tensor, options: Any) -> _Done:
        return self.reduce_scatter_single_coalesced([output], [input_], options)

    def reduce_scatter_single_coalesced(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], options: Any) -> _Done:
        def run() -> None:
            for output, input_ in zip(outputs, inputs, strict=True):
                self._reduce(output, input_.view(self._size, -1)[self._rank], options.reduceOp)

        return self._run(run, options, outputs, inputs)

    def allreduce(self, tensors: Sequence[Tensor], options: Any) -> _Done:
        return self.allreduce_coalesced(tensors, options)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], options: Any) -> _Done:
        def run() -> None:
            for tensor in tensors:
                self._reduce(tensor, tensor, options.reduceOp)

        return self._run(run, options, tensors)

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], options: Any = None) -> _Done:
        def run() -> None:
            for row, input_ in zip(outputs, inputs, strict=True):
                for output in row:
                    output.copy_(input_)

        return self._run(run, options, *outputs)

    def broadcast(self, tensors: Sequence[Tensor], options: Any = None) -> _Done:
        return _Done(None, tensors)

    def barrier(self, options: Any = None) -> _Done:
        return _Done(None, ())

    _allgather_base = all_gather_single  # torch 2.11 and 2.12
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _start_coalescing(self, device: torch.device) -> None:
        pass

    def _end_coalescing(self, device: torch.device) -> None:
        pass

    # --- how they run ---

    def _run(self, run: Callable[[], None], options: Any, *tensors: Sequence[Tensor]) -> _Done:
        """On the current stream; asynchronously, on a stream of the group behind it, as NCCL does."""
        held = [each for those in tensors for each in those]
        if held[0].device.type == "cpu" or not getattr(options, "asyncOp", False):
            with torch.no_grad():
                run()
            return _Done(None, held)
        module = torch.get_device_module(self._device_type)
        if self._stream is None:
            self._stream = module.Stream()
        self._stream.wait_event(module.current_stream().record_event())
        with module.stream(self._stream), torch.no_grad():
            run()
        return _Done(self._stream.record_event(), held)

    def _reduce(self, output: Tensor, row: Tensor, op: Any) -> None:
        kind, factor = op.__getstate__() if op.op == dist.ReduceOp.PREMUL_SUM else (op.op, None)
        rows = [row * (1.0 + other / 8.0) if row.is_floating_point() else row for other in range(self._size)]
        if factor is not None:
            rows = [each.mul(factor) for each in rows]
        total = rows[0].clone()
        for each in rows[1:]:
            if kind in (dist.ReduceOp.MIN, dist.ReduceOp.MAX):
                total = torch.minimum(total, each) if kind == dist.ReduceOp.MIN else torch.maximum(total, each)
            elif kind in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.PREMUL_SUM):
                total.add_(each)
            else:
                raise NotImplementedError(f"a modeled {kind}")
        if kind == dist.ReduceOp.AVG:
            total.div_(self._size)
        output.view(-1).copy_(total.view(-1))


def register(device_type: str) -> None:
    """Once a process: ``init_process_group(BACKEND, ...)`` then makes such groups."""

    def make(store: Any, rank: int, size: int, timeout: timedelta) -> Modeled:
        return Modeled(rank, size, device_type)

    dist.Backend.register_backend(BACKEND, make, devices=["cpu", device_type])
    declare_backend(BACKEND, averages=True)
