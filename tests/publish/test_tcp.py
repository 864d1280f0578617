"""Weights over a connection: whole, or by what has changed, and exact; a reader that is gone is an error on all ranks."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fsdp2
from fsdp2.errors import ArgumentError, PublishError
from fsdp2.publishing import Receiver, Snapshot, TensorMeta, tcp, to_socket
from fsdp2.publishing.consumer import Source
from harness import on_ranks
from harness.models import batches, mlp
from harness.sharding import shard_blocks
from harness.training import fed_own_chunk


class Reader:
    """A receiver on rank 0, whose process plays the consumer's as well. words: what the sender has said of each tensor"""

    def __init__(self) -> None:
        self.receiver = Receiver(port=0) if dist.get_rank() == 0 else None
        self.words: list[dict[str, Any]] = []
        self._pool = ThreadPoolExecutor(1)

    def sink(self, **options: Any) -> Any:
        return None if self.receiver is None else to_socket("127.0.0.1", self.receiver.port, **options)

    def next(self) -> Future[Snapshot] | None:
        return None if self.receiver is None else self._pool.submit(self.receiver.receive, 60.0)


@contextmanager
def reader() -> Iterator[Reader]:
    made = Reader()
    say = tcp._send_words

    def noted(connection: socket.socket, words: dict[str, Any]) -> None:
        if "crc" in words:
            made.words.append(words)
        say(connection, words)

    with patch.object(tcp, "_send_words", noted):
        yield made
    if made.receiver is not None:
        made.receiver.close()


def whole_bits(model: Any) -> dict[str, Tensor]:
    return {name: each.full_tensor().clone() for name, each in model.state_dict().items()}


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert sorted(found) == sorted(expected)
    for name, each in expected.items():
        assert torch.equal(found[name].view(-1).view(torch.int32), each.view(-1).view(torch.int32)), name


@on_ranks(1, 2)
@pytest.mark.parametrize("changes", [False, True])
def test_each_version_has_the_bits_of_the_weights_and_earlier_ones_stay(changes):
    model = shard_blocks(mlp())
    weights = fsdp2.publish(model)
    with reader() as there:
        sink = there.sink(changes=changes)
        kept = []
        for step in range(4):
            if step == 2:  # what compares as equal, or as unequal to itself, and has other bits
                with torch.no_grad():
                    for each in (model.blocks[0].up.weight, model.blocks[1].up.weight):
                        each.copy_(torch.full_like(each, -0.0 if each is model.blocks[0].up.weight else float("nan")))
            elif step == 1:
                with torch.no_grad():
                    model.blocks[0].up.bias.to_local().view(-1)[:1] += 1
            arrives = there.next()
            weights.send(sink)
            expected = whole_bits(model)
            if arrives is not None:
                snapshot = arrives.result()
                assert snapshot.version == step + 1
                kept.append((snapshot.tensors, expected))
        for tensors, expected in kept:
            assert_same_bits(tensors, expected)
        if kept:
            counts = [each.get("count") for each in there.words]
            num = len(kept[0][1])
            assert counts[:num] == [None] * num
            if changes:
                assert counts[num : 2 * num].count(0) == num - 1
                assert counts[3 * num :] == [0] * num
                assert kept[3][0]["first.weight"] is kept[0][0]["first.weight"]
            else:
                assert counts == [None] * 4 * num


@on_ranks(2)
def test_what_an_optimizer_changes_in_bf16_is_exact_and_less_than_all_of_it():
    model = shard_blocks(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    weights = fsdp2.publish(model, dtype=torch.bfloat16)
    with reader() as there:
        sink = there.sink(changes=True)
        for x in batches(3):
            fed_own_chunk(model, [x], optimizer=optimizer)
            arrives = there.next()
            weights.send(sink)
            expected = {name: each.to(torch.bfloat16) for name, each in whole_bits(model).items()}
            if arrives is not None:
                found = arrives.result().tensors
                assert all(torch.equal(found[name], each) for name, each in expected.items())
        if there.receiver is not None:
            assert any(each.get("count", 0) > 0 for each in there.words)


@on_ranks(2)
@pytest.mark.parametrize("way", ["a new reader", "tensors that its user has written", "gone in the middle", "nobody listens"])
def test_a_reader_without_the_version_before_gets_all_and_a_lost_one_is_an_error_on_all_ranks(way):
    model = shard_blocks(mlp())
    weights = fsdp2.publish(model)
    with reader() as there:
        sink = there.sink(changes=True)
        arrives = there.next()
        weights.send(sink)
        first = None if arrives is None else arrives.result()
        fails = way != "a new reader"
        if there.receiver is not None and first is not None:
            port = there.receiver.port
            if way == "tensors that its user has written":
                first.tensors["first.weight"].add_(1)
            else:
                there.receiver.close()
                if way != "nobody listens":
                    there.receiver = Receiver(port)
        with torch.no_grad():
            model.blocks[0].up.bias.zero_()
        receive_into = tcp._receive_into

        def goes(connection: socket.socket, memory: memoryview) -> None:
            if memory.nbytes > 64:
                connection.close()
            receive_into(connection, memory)

        with patch.object(tcp, "_receive_into", goes if way == "gone in the middle" else receive_into):
            arrives = there.next() if way != "nobody listens" else None
            if fails:
                with pytest.raises(PublishError, match="other bytes" if "written" in way else "has gone|is not reached"):
                    weights.send(sink, timeout=60.0)
                if arrives is not None:
                    with pytest.raises((PublishError, OSError)):
                        arrives.result()
            else:
                weights.send(sink)
                if arrives is not None:
                    assert arrives.result().version == 2
        if way == "nobody listens" and there.receiver is not None:
            there.receiver = Receiver(port)
        fed_own_chunk(model, batches(1))  # training goes on
        arrives = there.next()
        there.words.clear()
        weights.send(sink)
        expected = whole_bits(model)
        if arrives is not None:
            assert_same_bits(arrives.result().tensors, expected)
            if fails:
                assert not any("count" in each for each in there.words)


@on_ranks(2)
def test_a_sink_gets_the_pieces_that_it_asks_for():
    model = shard_blocks(mlp())
    weights = fsdp2.publish(model)
    whole = whole_bits(model)
    rank = dist.get_rank()
    rows = slice(5 * rank, 5 * rank + 5)

    def pieces(name: str, shape: tuple[int, ...]) -> Any:
        return None if name.startswith("last.") else (rows,) if name == "first.weight" else ()

    found: dict[str, Tensor] = {}
    seen: list[Any] = []

    def sink(stream: Any) -> None:
        seen.extend(stream.metadata())
        for group in stream.groups():
            found.update(group)

    weights.send(sink, pieces=pieces)
    assert [each.name for each in seen] == list(found)
    assert sorted(found) == sorted(name for name in whole if not name.startswith("last."))
    assert [each.shape for each in seen] == [tuple(each.shape) for each in found.values()]
    assert torch.equal(found["first.weight"], whole["first.weight"][rows])
    assert found["first.weight"]._is_view()
    for wrong in (
        lambda name, shape: rows,
        lambda name, shape: (rows,) * 4,
        lambda name, shape: 1 / 0,
        lambda name, shape: (slice(None, None, -1),),
        lambda name, shape: (slice("first", None),),
    ):
        with pytest.raises(ArgumentError, match=r"pieces, for .*, (returned|failed)"):
            weights.send(sink, pieces=wrong if rank == 1 else None)


class Sent(Source):
    """What a sink gets, without a model and its ranks."""

    def __init__(self, version: int, tensors: dict[str, Tensor]) -> None:
        self.version, self._tensors = version, tensors

    def metadata(self) -> list[TensorMeta]:
        return [TensorMeta(name, each.dtype, tuple(each.shape)) for name, each in self._tensors.items()]

    def groups(self) -> Iterator[list[tuple[str, Tensor]]]:
        yield list(self._tensors.items())


SQUARE = torch.arange(256.0).view(16, 16)
OTHER_PIECES = {
    "a tensor that is left out once": [{"a": SQUARE, "b": SQUARE}, {"a": SQUARE}, {"a": SQUARE, "b": SQUARE}],
    "as many elements": [{"a": SQUARE[:8]}, {"a": SQUARE[:, :8]}, {"a": SQUARE[8:]}],
    "the same elements": [{"a": SQUARE}, {"a": SQUARE.view(32, 8)}, {"a": SQUARE}],
    "more elements": [{"a": SQUARE[:1]}, {"a": SQUARE}, {"a": SQUARE[:1, :1]}],
    "another dtype": [{"a": SQUARE}, {"a": SQUARE.int()}, {"a": SQUARE.int().float()}],
}


@pytest.mark.parametrize("name", OTHER_PIECES)
def test_a_sink_of_changes_may_ask_for_other_pieces_each_time(name: str) -> None:
    with Receiver(0) as receiver, ThreadPoolExecutor(1) as pool:
        sink = to_socket("127.0.0.1", receiver.port, changes=True)
        for version, tensors in enumerate(OTHER_PIECES[name], start=1):
            arrives = pool.submit(receiver.receive, 60.0)
            sink(Sent(version, tensors))
            found = arrives.result().tensors
            assert list(found) == list(tensors)
            for key, each in tensors.items():
                assert (found[key].shape, found[key].dtype) == (each.shape, each.dtype)
                assert torch.equal(found[key], each)


def test_versions_of_two_sinks_with_the_same_number_are_not_taken_for_each_other() -> None:
    with Receiver(0) as receiver, ThreadPoolExecutor(1) as pool:
        sinks = [to_socket("127.0.0.1", receiver.port, changes=True) for _ in range(2)]
        for version, which in ((1, 0), (1, 1), (2, 0), (2, 1), (3, 1)):
            tensors = {f"of sink {which}": SQUARE, "of both": SQUARE + which}
            arrives = pool.submit(receiver.receive, 60.0)
            sinks[which](Sent(version, tensors))
            found = arrives.result().tensors
            assert list(found) == list(tensors)
            assert all(torch.equal(found[key], each) for key, each in tensors.items())


def test_a_sender_that_is_reset_is_an_error_of_publishing_for_the_reader() -> None:
    with Receiver(0) as receiver, ThreadPoolExecutor(1) as pool:
        arrives = pool.submit(receiver.receive, 60.0)
        with socket.create_connection(("127.0.0.1", receiver.port)) as connection:
            tcp._receive_words(connection)
            tcp._send_words(connection, {"version": 1, "sender": "", "tensors": []})
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing resets
        with pytest.raises(PublishError, match="the sender is lost"):
            arrives.result()


@pytest.mark.parametrize("resets", [False, True])
def test_senders_that_have_given_up_before_the_reader_came_are_passed_over(resets) -> None:
    """Symptom: each of them made one receive() raise, and the sender after it time out."""
    with Receiver(0) as receiver, ThreadPoolExecutor(1) as pool:
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", receiver.port)) as connection:
                if resets:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        arrives = pool.submit(receiver.receive, 60.0)
        with socket.create_connection(("127.0.0.1", receiver.port)) as connection:
            assert tcp._receive_words(connection) == {"version": None, "sender": None}
            for words in ({"version": 5, "sender": "", "tensors": []}, {}):
                tcp._send_words(connection, words)
            assert arrives.result() == Snapshot(5, {})


@pytest.mark.parametrize(
    "call",
    [
        lambda: to_socket(3, 1),
        lambda: to_socket("127.0.0.1", 1 << 16),
        lambda: to_socket("127.0.0.1", 1, changes="yes"),
        lambda: to_socket("127.0.0.1", 1, timeout=0),
        lambda: Receiver("1"),
        lambda: Receiver(0, host=None),
    ],
)
def test_wrong_arguments_are_refused(call):
    with pytest.raises(ArgumentError):
        call()


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\n\r\n", b"not JSON", b"[]", b"{}", b'{"tensors": 3}', b'{"tensors": [["w", "torch.float32", [-1]]]}']
)
def test_what_is_no_sender_is_refused(said) -> None:
    with Receiver(0) as receiver, ThreadPoolExecutor(1) as pool:
        arrives = pool.submit(receiver.receive, 60.0)
        with socket.create_connection(("127.0.0.1", receiver.port)) as connection:
            if said[:3] == b"GET":
                connection.sendall(said)
            else:
                more = b'{"name": "w", "crc": 0}'
                connection.sendall(b"".join(struct.pack("<Q", len(each)) + each for each in (said, more)))
                with suppress(OSError):  # the reader may have hung up
                    connection.shutdown(socket.SHUT_WR)
            with pytest.raises(PublishError, match=r"begins with a length|is not what to_socket sends"):
                arrives.result()
        with pytest.raises(TimeoutError):
            receiver.receive(timeout=0.01)
