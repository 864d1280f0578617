"""Ranks with different numbers of batches: all run forward and backward equally often, and a rank without work contributes nothing.

Before each optimizer step every rank tells the others how many micro-batches it has for the step, and what they count. All ranks run
as often as the rank with the most. A rank with fewer repeats a batch that it has had, its *stand-in*, so that it takes part in every
gather and reduction in the same order. This rank drops the gradients of a stand-in before they are reduced, and flags its parameters as
unused. So sums over ranks are sums over real batches, and each loss is scaled by (ranks / what all batches count).

Worked example, 2 ranks, one micro-batch per step, count=len; rank 1 has one batch less

    rank 0     batch of 4    batch of 2                        scale 2 / 8, then 2 / 2
    rank 1     batch of 4    the same 4 again, stands_in       its gradients are dropped in the second step

Messages travel over a process group of their own, on the host: they wait for no device, and never meet a collective of the model.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..arguments import COUNT, Kind, require
from ..core.comm.agreement import messages_over
from ..core.comm.collective_log import during
from ..core.iteration.module_state import ModuleState
from ..core.modules.tensors import map_tensors
from ..core.plan.mesh import DataParallelMesh
from ..errors import ArgumentError, MeshError, OrderError
from ..strategy import accumulating, sharded_units
from ..torch_names import torch_collectives, torch_tensors

_WORKING, _FAILED, _STOPS, _LEFT = range(4)
_LOSS = Kind(lambda value: isinstance(value, Tensor), "a tensor", "loss")
_COUNT = Kind(lambda value: value in (None, "ranks") or callable(value), 'a function of a batch, None or "ranks"', "len")
_LOADER = Kind(lambda value: isinstance(value, Iterable), "batches to iterate over", "loader")


@contextlib.contextmanager
def uneven(model: nn.Module) -> Iterator[Work]:
    """Around loops in which ranks may have different numbers of batches, none included: ``for batch in work(loader)``.

    model:      one that ``parallelize`` or ``fully_shard`` was called on, with the same mesh for all of its groups
    Collective: yes, over all data-parallel ranks: the first makes a process group for the host's messages; the end, one message
    Raises:     ModuleError for a model that is not sharded; MeshError and ArgumentError for what stand-ins cannot do; OrderError on all
                ranks if one has left its loop earlier than others, or has failed to get its next batch

    Example:
        with fsdp2.uneven(model) as work:
            for batch in work([x] * (1 + dist.get_rank()), count=len):
                work.backward(model(batch).sum())
                optimizer.step()
                optimizer.zero_grad()
    """
    units = sharded_units("uneven", model)
    mesh = _common_mesh(units)
    refuse_what_cannot_stand_in("uneven", model, units)
    messages_over(mesh)
    work = Work(model, units, mesh)
    yield work
    work._leave()


class Work:
    """What ``uneven`` gives: it yields batches, and knows which are only stand-ins.

    stands_in: the batch of this round is one that this rank has had before (or another rank's, if it has had none): run forward and
               backward on it as on any other, and leave it out of metrics. Gradients are dropped; buffers are restored afterwards.
    is_last:   the round is the last one before the optimizer's step
    scale:     by which ``backward`` multiplies a loss
    """

    stands_in = False
    is_last = True
    scale = 1.0

    def __init__(self, model: nn.Module, units: Sequence[ModuleState], mesh: DataParallelMesh) -> None:
        self._model = model
        self._units = units
        self._mesh = mesh
        self._loop = 0
        self._stand_in: list[Any] = []  # none or one
        self._stops = False
        self._buffers: list[tuple[Tensor, Tensor]] = []

    def __call__(
        self, loader: Iterable[Any], *, count: Callable[[Any], float] | Literal["ranks"] | None = None, micro_batches: int = 1
    ) -> Iterator[Any]:
        """The batches of ``loader``, and stand-ins until the rank with the most has had its last one.

        count:         what a batch counts, such as its samples or its tokens that are not padding: the gradients of a step are those of
                       the sum of all ranks' losses, divided by what all their batches count. None: each batch counts 1. "ranks": each
                       rank that has a batch for the step counts 1, and its losses are averaged first. Stand-ins count nothing.
        micro_batches: how many batches each rank takes for one step. They are taken at once; a step ends where ``is_last`` is True.
        Collective:    yes, one message per step
        """
        require("uneven's work", _LOADER, loader=loader)
        require("uneven's work", _COUNT, count=count)
        require("uneven's work", COUNT, micro_batches=micro_batches)
        return self._rounds(loader, count, micro_batches)

    def backward(self, loss: Tensor) -> None:
        """``(loss * scale).backward()``. loss: a sum over what ``count`` counts, in any dtype; a scaler's ``scale(loss)`` works too"""
        require("uneven's backward", _LOSS, loss=loss)
        if self.scale != 1.0:
            loss = loss * self.scale
        loss.backward()  # type: ignore[no-untyped-call]
        self._restore_buffers()

    def stop(self) -> None:
        """End the loop on all ranks when this step is over. A rank that uses ``break`` instead makes all of them raise OrderError."""
        self._stops = True

    # --- rounds ---

    def _rounds(
        self, loader: Iterable[Any], count: Callable[[Any], float] | Literal["ranks"] | None, micro_batches: int
    ) -> Iterator[Any]:
        before = self.stands_in, self.is_last, self.scale
        source: Iterator[Any] | None = None
        nothing = contextlib.nullcontext()
        self._stops = False
        self._loop += 1
        self._stand_in = []  # another loop's batches may have other fields
        try:
            while True:
                batches: list[Any] = []
                counted, failure = 0.0, None
                try:
                    if not self._stops:
                        source = iter(loader) if source is None else source
                        for batch in itertools.islice(source, micro_batches):
                            counted += _checked_count(count(batch)) if callable(count) else 1.0
                            batches.append(batch)
                except Exception as error:
                    failure = error
                num_rounds = self._agree_on_step(batches, float(bool(batches)) if count == "ranks" else counted, failure)
                if num_rounds == 0:
                    return
                if count == "ranks":
                    self.scale /= max(len(batches), 1)
                for index in range(num_rounds):
                    self.is_last = index == num_rounds - 1
                    if index < len(batches):
                        self._stand_in = [_with_own_containers(batches[index])]
                    with nothing if self.is_last else accumulating(self._units), self._standing_in(index >= len(batches)):
                        yield batches[index] if index < len(batches) else _with_own_containers(self._stand_in[0])
        finally:
            self._stand_in = []
            self.stands_in, self.is_last, self.scale = before

    @contextlib.contextmanager
    def _standing_in(self, stands_in: bool) -> Iterator[None]:
        self.stands_in = stands_in
        if not stands_in:
            yield
            return
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in self._model.buffers()]
        self._contribute(False)
        ran: list[nn.Module] = []
        num_served = sum(unit.num_served for unit in self._units)
        handles = [unit.modules[0].register_forward_pre_hook(lambda module, args: ran.append(module)) for unit in self._units]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._contribute(True)
            self._restore_buffers()
        if not ran and num_served == sum(unit.num_served for unit in self._units):
            raise OrderError(
                "a round with a stand-in ran no sharded module, in which other ranks wait for this rank",
                expected="forward and backward on each batch of work(loader), stand-ins included",
                fix="run the model before you look at work.stands_in, which is for metrics",
            )

    def _contribute(self, contributes: bool) -> None:
        for unit in self._units:
            unit.set_micro_batch(replace(unit.micro_batch, contributes=contributes))

    @torch.no_grad()
    def _restore_buffers(self) -> None:
        for buffer, value in self._buffers:
            buffer.copy_(value)
        self._buffers = []

    def _agree_on_step(self, batches: Sequence[Any], counted: float, failure: Exception | None) -> int:
        """How many rounds the next step has; 0: all ranks end. Sets ``scale``, and gets a stand-in if this rank needs one."""
        status = _FAILED if failure is not None else _STOPS if self._stops else _WORKING
        has_stand_in = bool(batches or self._stand_in)
        rows = self._tell(_Row(len(batches), status, has_stand_in, _rank(), self._loop, counted, _in_short(failure)))
        if failure is not None:
            raise failure
        _refuse_ended(rows)
        num_rounds = max(row.num_batches for row in rows)
        if num_rounds == 0 or any(row.status == _STOPS for row in rows):
            return 0
        total = math.fsum(row.counted for row in rows)
        self.scale = self._mesh.size / total if total > 0 else 0.0
        if any(row.num_batches < num_rounds for row in rows):
            _refuse_gradients_on_leaves(self._units)
        if any(row.num_batches < num_rounds and not row.has_stand_in for row in rows):
            self._send_stand_in(batches, next(row.rank for row in rows if row.num_batches > 0))
        return num_rounds

    def _leave(self) -> None:
        rows = self._tell(_Row(0, _LEFT, False, _rank(), self._loop, 0.0, _HAS_LEFT))
        if any(row.status != _LEFT for row in rows):
            _refuse_ended(rows)

    # --- messages ---

    def _tell(self, mine: _Row) -> list[_Row]:
        """The rows of all ranks. Collective: yes"""
        messages = messages_over(self._mesh)
        if messages is None:
            return [mine]
        sent = torch.frombuffer(bytearray(_ROW.pack(*mine)), dtype=torch.uint8)
        got = sent.new_empty(self._mesh.size * sent.numel())
        with during("message of uneven ranks", messages, sent):
            torch_collectives.all_gather_single(got, sent, messages, async_op=False)
        return [_Row(*fields) for fields in _ROW.iter_unpack(bytes(got.tolist()))]

    def _send_stand_in(self, batches: Sequence[Any], source: int) -> None:
        """Send the first batch of rank ``source`` to all ranks. A rank that has had none keeps it. Collective: yes"""
        sent: list[Any] = [None, None]
        if _rank() == source:
            moved: list[bool] = []
            sent = [map_tensors(functools.partial(_to_host, moved), batches[0]), moved]
        messages = messages_over(self._mesh)
        with during("stand-in of uneven ranks", messages):
            dist.broadcast_object_list(sent, src=source, group=messages, device=torch.device("cpu"))
        if not self._stand_in and not batches:
            flags, device = iter(sent[1]), self._units[0].device
            self._stand_in = [map_tensors(lambda tensor: tensor.to(device) if next(flags) else tensor, sent[0])]


class _Row(NamedTuple):
    """What a rank tells the others before a step. loop: which of its loops it is in; text: why it has failed, or that it has left"""

    num_batches: int
    status: int
    has_stand_in: bool
    rank: int
    loop: int
    counted: float
    text: bytes


_HAS_LEFT = b"has left its loop"
_TEXT_NBYTES = 215
_ROW = struct.Struct(f"<2q?2qd{_TEXT_NBYTES}s")  # 256 bytes


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _in_short(failure: Exception | None) -> bytes:
    return b"" if failure is None else f"has failed to get its next batch: {type(failure).__name__}: {failure}".encode()


def _with_own_containers(batch: Any) -> Any:
    """``batch`` with the same tensors, in containers that the program may change: it may ``pop`` from what it got."""
    return torch_tensors.pytree.tree_map(lambda leaf: leaf, batch)


def _to_host(moved: list[bool], tensor: Tensor) -> Tensor:
    moved.append(tensor.device.type != "cpu")
    return tensor.cpu()


def _checked_count(value: Any) -> float:
    counted = float(value)
    if not 0 <= counted < math.inf:
        raise ArgumentError(
            f"count returned {value!r} for a batch",
            expected="how many samples or tokens of it the loss sums over: a number, 0 or more",
            fix="pass for instance count=len",
        )
    return counted


def _refuse_ended(rows: Sequence[_Row]) -> None:
    first = min(row.loop for row in rows)
    texts = {row.rank: row.text if row.status in (_FAILED, _LEFT) else _HAS_LEFT if row.loop > first else b"" for row in rows}
    ended = [f"rank {rank} {text.rstrip(bytes(1)).decode(errors='replace')}" for rank, text in texts.items() if text]
    if ended:
        raise OrderError(
            f"{len(ended)} of {len(rows)} ranks ended their uneven work before the others",
            items=ended,
            expected="each rank to go on until its loop ends by itself, which is at the same place on all ranks",
            fix="see the error of that rank; to end early, call work.stop() instead of leaving the loop",
        )


def _common_mesh(units: Sequence[ModuleState]) -> DataParallelMesh:
    meshes = list({group.mesh.groups: group.mesh for unit in units for group in unit.groups}.values())
    if len(meshes) != 1:
        raise MeshError(
            f"uneven got a model whose parameters are on {len(meshes)} meshes",
            expected="one mesh for all of them, so that one set of ranks agrees on each step",
            fix="shard all modules over the same mesh; give all ranks equally many batches otherwise",
        )
    return meshes[0]


def refuse_what_cannot_stand_in(caller: str, model: nn.Module, units: Sequence[ModuleState]) -> None:
    """Raise ArgumentError for what would let a stand-in leave a trace, or would divide gradients otherwise. All ranks, or none."""
    found = []
    for unit in units:
        name = unit.fqn or type(unit.modules[0]).__name__
        if unit.max_norm_weights:
            found.append(f"{name}: an embedding with max_norm, whose forward writes its rows")
        options = [group.gradients.options for group in unit.groups]
        if any(each.divide_factor is not None for each in options):
            found.append(f"{name}: set_gradient_divide_factor, where the batches' counts divide")
        if any(each.comm is not None for each in options):
            found.append(f"{name}: set_custom_reduce_scatter, whose buffers do not say which gradients are there")
    if any(type(module._compiled_call_impl).__name__ == "FullGraph" for module in model.modules()):
        found.append("fsdp2.compile, whose graph reduces what it computes")
    if found:
        raise ArgumentError(
            f"{caller} got a model on which a rank cannot stand in",
            items=found,
            expected="a model without these",
            fix="leave them out, or give all ranks equally many batches",
        )


def _refuse_gradients_on_leaves(units: Sequence[ModuleState]) -> None:
    if any(group.gradients.adds_up_on_leaves for unit in units for group in unit.groups):
        raise OrderError(
            "a rank stands in while set_requires_gradient_sync(False) adds gradients up on the unsharded parameters",
            expected="micro-batches of uneven's loop alone",
            fix="pass work(loader, micro_batches=...) instead of switching the sync off",
        )
