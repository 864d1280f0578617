"""The bytes around a tensor's own in a file of ``torch.save``, so that the tensor's bytes are written as they lie in memory, once.

Such a file is a zip of uncompressed records. ``torch.save`` copies a tensor in pieces of a few KB through Python, and is as slow as a
disk; here the tensor is one write.

Worked example, a (2,) fp32 tensor: records ``archive/data.pkl`` (which says dtype, shape and that the storage is "0"),
``archive/byteorder``, ``archive/version``, then ``archive/data/0`` with its 8 bytes, then the directory, which repeats the records'
names, lengths and CRC-32 and says where they begin.

Source: PKWARE's APPNOTE.TXT 6.3, sections 4.3 and 4.5.3 (records of 4 GiB and more).
"""

from __future__ import annotations

import functools
import struct
import zlib

_ELSEWHERE = 0xFFFFFFFF  # the number is in an extra field
LARGE = _ELSEWHERE
"""Numbers from here on are."""
_DATE = 0x21  # 1 January 1980, the first there is


class _Zip:
    """Local headers and records, and of each its line in the directory."""

    def __init__(self, large: int) -> None:
        self._large = large
        self.directory = b""
        self.count = 0

    def header(self, name: str, nbytes: int, crc: int, at: int) -> bytes:
        """The bytes before the record of ``nbytes`` bytes; they begin at ``at`` from the beginning of the zip."""
        path = f"archive/{name}".encode()
        large = nbytes >= self._large
        size = _ELSEWHERE if large else nbytes
        extra = struct.pack("<HHQQ", 1, 16, nbytes, nbytes) if large else b""
        version = 45 if large or at >= self._large else 20
        common = struct.pack("<HHHHHIIIH", version, 0, 0, 0, _DATE, crc, size, size, len(path))
        fields = ((nbytes, nbytes) if large else ()) + ((at,) if at >= self._large else ())
        more = struct.pack(f"<HH{len(fields)}Q", 1, 8 * len(fields), *fields) if fields else b""
        self.directory += b"PK\x01\x02" + struct.pack("<H", version) + common
        self.directory += struct.pack("<HHHHII", len(more), 0, 0, 0, 0, _ELSEWHERE if at >= self._large else at) + path + more
        self.count += 1
        return b"PK\x03\x04" + common + struct.pack("<H", len(extra)) + path + extra

    def end(self, at: int) -> bytes:
        """The directory, which begins at ``at``."""
        nbytes = len(self.directory)
        tail = b""
        if at >= self._large:
            tail = b"PK\x06\x06" + struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, self.count, self.count, nbytes, at)
            tail += b"PK\x06\x07" + struct.pack("<IQI", 0, at + nbytes, 1)
        tail += b"PK\x05\x06" + struct.pack(
            "<HHHHIIH", 0, 0, self.count, self.count, nbytes, _ELSEWHERE if at >= self._large else at, 0
        )
        return self.directory + tail


def around(description: bytes, data: memoryview) -> tuple[bytes, bytes]:
    """The bytes before and behind ``data`` in a file whose ``data.pkl`` is ``description``; the latter are the directory."""
    head, in_head, tail, in_tail = _without_crc(description, len(data), LARGE)
    crc = struct.pack("<I", zlib.crc32(data))
    return head[:in_head] + crc + head[in_head + 4 :], tail[:in_tail] + crc + tail[in_tail + 4 :]


def data_behind(start: bytes, description: bytes, nbytes: int) -> bool:
    """Whether ``start`` are the bytes before ``nbytes`` bytes of data in such a file, for any data."""
    head, in_head, *_ = _without_crc(description, nbytes, LARGE)
    return start[:in_head] == head[:in_head] and start[in_head + 4 :] == head[in_head + 4 :]


def head_nbytes(description: bytes, nbytes: int) -> int:
    return len(_without_crc(description, nbytes, LARGE)[0])


@functools.lru_cache(maxsize=10_000)
def _without_crc(description: bytes, nbytes: int, large: int) -> tuple[bytes, int, bytes, int]:
    """Both for ``nbytes`` bytes of data, and where in each its CRC-32 goes: a training saves the same shapes again and again."""
    zipped = _Zip(large)
    head = b""
    for name, record in (("data.pkl", description), ("byteorder", b"little"), ("version", b"3\n")):
        head += zipped.header(name, len(record), zlib.crc32(record), len(head)) + record
    in_head, in_tail = len(head) + 14, len(zipped.directory) + 16
    head += zipped.header("data/0", nbytes, 0, len(head))
    return head, in_head, zipped.end(len(head) + nbytes), in_tail
