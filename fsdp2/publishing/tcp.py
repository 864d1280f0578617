"""Published weights over a TCP connection, and their reader, which needs no process group.

The reader listens. Each ``send`` connects, and the reader says which version it has, and from which sink. By default every tensor is
sent whole. With ``changes=True``, a reader that has the last version of this sink gets only the elements whose bits have changed. A
checksum covers the whole tensor as it is afterwards. The reader answers when it has all of a version, and then ``send`` returns.

Worked example: one bf16 tensor of 4 elements; an optimizer has changed one of them

    reader     {"version": 1, "sender": "5f0c.."}
    sender     {"version": 2, "sender": "5f0c..", "tensors": [["w", "torch.bfloat16", [4]]]}
               {"name": "w", "count": 1, "crc": 1954..}    4 bytes: place 2    2 bytes: its value
               {}
    reader     {"version": 2}
"""

from __future__ import annotations

import json
import socket
import struct
import uuid
import zlib
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from ..arguments import NATURAL, POSITIVE, SWITCH, WORD, Kind, require
from ..checkpoint.file_reading import bytes_of
from ..errors import PublishError
from .consumer import Stream, TensorMeta
from .weights_file import Snapshot

_PORT = Kind(lambda value: NATURAL.holds(value) and value < 1 << 16, "a port, 0 to 65535", "29400")
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the size of an element: what is compared, so that NaNs and negative zeros count as the bits that they are."""

_DTYPES = {str(each): each for each in vars(torch).values() if isinstance(each, torch.dtype)}

_MAX_WORDS = 1 << 28
_CHUNK_NBYTES = 1 << 18


def to_socket(host: str, port: int, *, changes: bool = False, timeout: float = 60.0) -> Callable[[Stream], None]:
    """A sink that sends to a ``Receiver``, one version after another. Keep it between versions.

    changes: send the elements that have changed since the version before, if the reader has that. Exact, in the dtype that is sent
    timeout: seconds without progress on the connection after which it is lost
    Memory:  with ``changes`` the last version on the host, on the ranks that have this sink
    Raises:  the sink, PublishError: nobody listens, the reader has gone or has received other bytes

    Example:
        sink = fsdp2.publishing.to_socket("127.0.0.1", 29400, changes=True) if dist.get_rank() == 0 else None
    """
    require("to_socket", WORD, host=host)
    require("to_socket", _PORT, port=port)
    require("to_socket", SWITCH, changes=changes)
    require("to_socket", POSITIVE, timeout=timeout)
    return _Sender(host, port, changes, timeout)


class _Sender:
    def __init__(self, host: str, port: int, changes: bool, timeout: float) -> None:
        self._address, self._changes, self._timeout = (host, port), changes, timeout
        self._name = uuid.uuid4().hex  # versions of another sink may have the same numbers
        self._version: int | None = None
        self._last: dict[str, Tensor] = {}  # as it was sent, on the host

    def __call__(self, stream: Stream) -> None:
        before, self._version = self._version, None  # until this one has arrived
        base, self._last = self._last, {}
        metas = stream.metadata()
        try:
            with socket.create_connection(self._address, self._timeout) as connection:
                known = _receive_words(connection)
                if before is None or (known["sender"], known["version"]) != (self._name, before):
                    base.clear()
                listed = [[meta.name, str(meta.dtype), meta.shape] for meta in metas]
                _send_words(connection, {"version": stream.version, "sender": self._name, "tensors": listed})
                for name, tensor in stream:
                    self._send(connection, name, tensor, base.pop(name, None))
                _send_words(connection, {})
                answer = _receive_words(connection)
        except OSError as error:
            raise PublishError(
                f"the reader at {self._address[0]}:{self._address[1]} is not reached, or has gone: {type(error).__name__}: {error}",
                expected=f"a publishing.Receiver that listens there, and is in receive(); {self._timeout:g} s without progress at most",
                fix="start the reader first, or again; it then gets all tensors whole",
            ) from error
        if answer["version"] != stream.version:
            raise PublishError(
                f"the reader at {self._address[0]}:{self._address[1]} has received other bytes",
                items=answer["damaged"],
                expected="tensors with the checksums that were sent",
                fix="send again: it then gets all tensors whole",
            )
        self._version = stream.version

    def _send(self, connection: socket.socket, name: str, tensor: Tensor, last: Tensor | None) -> None:
        """last: what the reader has, if the version before had this tensor"""
        now = tensor.cpu().contiguous()
        words = {"name": name, "crc": zlib.crc32(bytes_of(now))}
        if self._changes:
            self._last[name] = now.clone() if now is tensor or now.data_ptr() == tensor.data_ptr() else now
        if last is not None and (last.shape, last.dtype) == (now.shape, now.dtype):  # its piece may be another one now
            bits, old = _bits(now), _bits(last)
            places = (bits != old).nonzero().view(-1).to(torch.int32 if bits.numel() < 1 << 31 else torch.int64)
            if places.numel() * (places.itemsize + bits.itemsize) < now.nbytes:
                _send_words(connection, {**words, "count": places.numel()})
                values = bits[places.long()]
                _send_all(connection, bytes_of(places))
                _send_all(connection, bytes_of(values))
                return
        _send_words(connection, words)
        _send_all(connection, bytes_of(now))


class Receiver:
    """The reader of ``to_socket``: listens from the moment it is made, in any process, without a process group. ``with`` closes it.

    port:    on which it listens; 0: one that is free, which ``port`` tells then
    host:    the address of this machine on which it may be reached. Whoever reaches it may send: keep it within a trusted network
    version: of the weights that it has; None: none yet

    Example:
        with fsdp2.publishing.Receiver(port=0) as receiver:
            address = ("127.0.0.1", receiver.port)  # for to_socket
    """

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        require("Receiver", _PORT, port=port)
        require("Receiver", WORD, host=host)
        self.version: int | None = None
        self._sender: str | None = None
        self._tensors: dict[str, Tensor] = {}
        self._listening = socket.create_server((host, port))
        self.port: int = self._listening.getsockname()[1]

    def __enter__(self) -> Receiver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening. Snapshots stay."""
        self._listening.close()

    def receive(self, timeout: float | None = None) -> Snapshot:
        """The next version, when it is complete. Tensors of earlier snapshots stay as they are; those that did not change are shared.

        timeout: seconds without a sender, or without progress of one; None: as long as it takes
        Raises:  TimeoutError; PublishError if the sender has gone, or bytes have changed on the way: this version is dropped then, and
                 the next one comes whole
        """
        require("receive", POSITIVE.or_none, timeout=timeout)
        self._listening.settimeout(timeout)
        while True:
            connection, _ = self._listening.accept()
            connection.settimeout(timeout)
            try:
                _send_words(connection, {"version": self.version, "sender": self._sender})
                words = _receive_words(connection)
                break
            except ValueError as error:
                connection.close()
                raise _not_ours(error) from error
            except ConnectionError:  # a sender that has given up while nobody was here
                connection.close()
            except BaseException:
                connection.close()
                raise
        self.version = None
        with connection:
            try:
                tensors, damaged = self._exchange(connection, words)
            except (TimeoutError, PublishError):
                raise
            except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
                raise _not_ours(error) from error
            except OSError as error:
                raise PublishError(
                    f"the sender is lost: {type(error).__name__}: {error}",
                    expected="all of a version",
                    fix="look at its error; send again",
                ) from error
        if damaged:
            raise PublishError(
                f"{len(damaged)} tensors of version {words['version']} have not arrived as they were sent",
                items=damaged,
                expected="the sender's checksums",
                fix="receive again: the next version comes whole",
            )
        self.version, self._sender, self._tensors = words["version"], words["sender"], tensors
        return Snapshot(words["version"], dict(tensors))

    def _exchange(self, connection: socket.socket, words: dict[str, Any]) -> tuple[dict[str, Tensor], list[str]]:
        """The tensors of a version, and the names of those that are damaged. words: what the sender says first"""
        metas = {name: TensorMeta(name, _DTYPES[dtype], tuple(shape)) for name, dtype, shape in words["tensors"]}
        tensors: dict[str, Tensor] = {}
        damaged = []
        while each := _receive_words(connection):
            name = each["name"]
            before = self._tensors[name] if "count" in each else None
            tensors[name] = self._received(connection, metas[name], before, each.get("count"))
            if zlib.crc32(bytes_of(tensors[name])) != each["crc"]:
                damaged.append(name)
        damaged += [name for name in metas if name not in tensors]
        _send_words(connection, {"version": None if damaged else words["version"], "damaged": damaged})
        return tensors, damaged

    def _received(self, connection: socket.socket, meta: TensorMeta, before: Tensor | None, count: int | None) -> Tensor:
        if before is None or count is None:
            tensor = torch.empty(meta.shape, dtype=meta.dtype, device="cpu")
            _receive_into(connection, bytes_of(tensor))
            return tensor
        if count == 0:
            return before
        tensor = before.clone()
        bits = _bits(tensor)
        places = torch.empty(count, dtype=torch.int32 if bits.numel() < 1 << 31 else torch.int64, device="cpu")
        values = torch.empty(count, dtype=bits.dtype, device="cpu")
        _receive_into(connection, bytes_of(places))
        _receive_into(connection, bytes_of(values))
        bits[places.long()] = values
        return tensor


def _not_ours(error: Exception) -> PublishError:
    return PublishError(
        f"what arrived is not what to_socket sends: {type(error).__name__}: {error}",
        expected="a sender of this library, of the same version",
        fix="look at who else uses the port",
    )


def _bits(tensor: Tensor) -> Tensor:
    """Its elements as integers, a view of shape (n,)."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(-1).view(_BITS[tensor.itemsize])


def _send_all(connection: socket.socket, memory: memoryview) -> None:
    """The time-out of ``sendall`` is for all of what it gets."""
    for start in range(0, len(memory), _CHUNK_NBYTES):
        connection.sendall(memory[start : start + _CHUNK_NBYTES])


def _send_words(connection: socket.socket, words: dict[str, Any]) -> None:
    text = json.dumps(words).encode()
    connection.sendall(struct.pack("<Q", len(text)) + text)


def _receive_words(connection: socket.socket) -> dict[str, Any]:
    head = bytearray(8)
    _receive_into(connection, memoryview(head))
    (size,) = struct.unpack("<Q", head)
    if size > _MAX_WORDS:
        raise PublishError(
            f"what arrived begins with a length of {size}",
            expected="a sender and a reader of this library, of the same version",
            fix="look at who else uses the port",
        )
    text = bytearray(size)
    _receive_into(connection, memoryview(text))
    words = json.loads(text)
    if not isinstance(words, dict):
        raise ValueError(f"{words!r}, and no names")
    return words


def _receive_into(connection: socket.socket, memory: memoryview) -> None:
    while memory:
        got = connection.recv_into(memory)
        if got == 0:
            raise ConnectionAbortedError("the other end has gone")
        memory = memory[got:]
