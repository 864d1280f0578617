"""Who takes published tensors: what they see, and a thread on which they may be slow or fail.

    main thread    ready? all ranks agree -> gather unit 0 -> ready? ... agree -> gather unit 1 -> ...
    its thread     ............................. unit 0 whole, used ........................ unit 1 whole, used

A rank is ready for the next unit once its consumer has made the last one whole: there are two units then, one that the consumer uses,
and one that is gathered. A rank that is not ready says so after a third of the process groups' time-out, and the ranks agree
again. So no collective waits longer than that for a consumer. If one fails, the next agreement tells all ranks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.comm.streams import streams_of
from ..errors import FSDPError, PublishError
from ..hangs.background import BackgroundThread

Piece = tuple[slice, ...]

READY, WAITING, FAILED = range(3)
"""What a rank says before a gather; the largest of all ranks' decides."""

Named = list[tuple[str, Tensor]]


class TensorMeta(NamedTuple):
    """What is known of a tensor before it comes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class Source:
    """Whole tensors by name: what ``Weights`` and ``Stream`` have in common."""

    version: int

    def metadata(self) -> list[TensorMeta]:
        """Name, dtype and shape of each tensor, in the order in which they come. Collective: no"""
        raise NotImplementedError

    def groups(self) -> Iterator[Named]:
        raise NotImplementedError

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor with its name. The last one of a unit has memory of its own: a loop still holds it while the next unit comes."""
        for group in self.groups():
            group.reverse()
            while len(group) > 1:
                yield group.pop()
            while group:
                yield _alone(*group.pop())


def _alone(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    return name, tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


class Stream(Source):
    """What a sink gets: an iterable of ``(name, tensor)``, for one time.

    version: of ``Weights`` that sends, from 1
    """

    def __init__(self, weights: Source, pieces: Mapping[str, Piece | None]) -> None:
        """pieces: by name, those of tensors that do not come whole; None: this one does not come"""
        self.version = weights.version
        self._pieces = pieces
        self._metadata = [
            meta if not piece else meta._replace(shape=tuple(torch.empty(meta.shape, device="meta")[piece].shape))
            for meta in weights.metadata()
            if (piece := pieces.get(meta.name, ())) is not None
        ]
        self._changed = threading.Condition()
        self._offered: list[Callable[[], Named]] = []  # at most one: makes a unit whole
        self._has_room = True
        self._is_begun = self._is_over = self._is_given_up = False
        self._since = time.monotonic()

    def metadata(self) -> list[TensorMeta]:
        """Name, dtype and shape of each tensor, in the order in which they come. Collective: no"""
        return self._metadata

    def groups(self) -> Iterator[Named]:
        """The tensors of one unit after another, views of one buffer: for transports that send large messages. Collective: no

        Raises: PublishError for a second iteration
        """
        if self._is_begun:
            raise PublishError(
                "a sink has iterated over its stream twice",
                expected="one iteration: the tensors of a unit are gathered once",
                fix="keep in the first one what is needed later",
            )
        self._is_begun = True
        while (taken := self._taken()) is not None:
            ready = [self._cut(taken())]
            del taken
            self._note(_has_room=True)
            yield ready.pop()

    def _cut(self, group: Named) -> Named:
        if not self._pieces:
            return group
        cuts = [(name, tensor, self._pieces.get(name, ())) for name, tensor in group]
        return [(name, tensor[piece] if piece else tensor) for name, tensor, piece in cuts if piece is not None]

    def _taken(self) -> Callable[[], Named] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._offered or self._is_over)
            if self._is_given_up:
                raise PublishError(
                    "the weights do not come to an end", expected="every rank to send", fix="see the error of Weights.send"
                )
            return self._offered.pop() if self._offered else None

    def _note(self, **values: Any) -> None:
        with self._changed:
            vars(self).update(values, _since=time.monotonic())
            self._changed.notify_all()


class Consumer:
    """Runs ``sink`` on a thread; without a sink it is ready at all times."""

    def __init__(self, sink: Callable[[Stream], Any] | None, stream: Stream, device: torch.device, timeout_s: float) -> None:
        self.problem: FSDPError | None = None
        self._sink = sink
        self._stream = stream
        self._timeout_s = timeout_s
        self._is_done = sink is None
        self._is_stuck = False
        streams = streams_of(device)
        self._on_device = streams.on(streams.compute)  # on which the tensors are made
        self._thread = BackgroundThread(self._run, stop=self._give_up, name="fsdp2_publish") if sink is not None else None

    def _run(self) -> None:
        assert self._sink is not None
        try:
            with self._on_device:
                self._sink(self._stream)
        except BaseException as error:
            self.problem = failure_of("the sink has failed", error)
        with self._stream._changed:
            self._is_done = True
            self._stream._changed.notify_all()

    def state(self, wait_s: float) -> int:
        """``READY`` for the next unit, or, after ``finish``, at its end; ``WAITING`` after ``wait_s`` at the latest."""
        stream = self._stream

        def is_ready() -> bool:
            return self._is_done or (stream._has_room and not stream._is_over)

        with stream._changed:
            left_s = stream._since + self._timeout_s - time.monotonic()
            if not stream._changed.wait_for(is_ready, min(wait_s, left_s)) and left_s <= wait_s:
                self._is_stuck = True
                self.problem = PublishError(
                    f"the sink has taken no unit for {self._timeout_s:g} s",
                    expected="a consumer that goes on",
                    fix="look at the consumer, or pass send a larger timeout",
                )
            return FAILED if self.problem is not None else READY if is_ready() else WAITING

    def offer(self, make: Callable[[], Named]) -> None:
        if not self._is_done:
            self._stream._note(_offered=[make], _has_room=False)

    def finish(self) -> None:
        """All units have been offered."""
        self._stream._note(_is_over=True)

    def leave(self, wait_s: float) -> None:
        """Tell a sink that still waits for a unit that none comes, and wait for it to end, unless it is stuck."""
        self._give_up()
        if self._thread is not None and not self._is_stuck:
            self._thread.end(wait_s)

    def _give_up(self) -> None:
        self._stream._note(_is_over=True, _is_given_up=True, _offered=[])


def failure_of(what: str, error: BaseException) -> FSDPError:
    """The error to tell other ranks."""
    if isinstance(error, FSDPError):
        return error
    problem = PublishError(
        f"{what}: {type(error).__name__}: {error}", expected="weights that arrive", fix="fix the cause, and send again"
    )
    problem.__cause__ = error
    return problem
