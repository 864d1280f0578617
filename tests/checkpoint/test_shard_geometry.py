"""Integers only: which elements a rank keeps, which bytes these are, how a box is walked. No process group."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from fsdp2.checkpoint import file_reading
from fsdp2.checkpoint.file_reading import ByteReader
from fsdp2.checkpoint.shard_geometry import Box, Cut, in_order, local_shape_of, pieces_of, split


def chunk(tensor, num_chunks, index, dim):
    pieces = tensor.chunk(num_chunks, dim)
    return pieces[index] if index < len(pieces) else tensor.narrow(dim, 0, 0)


@pytest.mark.parametrize("rows", [0, 1, 4, 5, 7, 9, 16, 23])
@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (2, 2), (2, 3), (3, 2), (4, 2), (2, 4), (3, 5)])
def test_strided_cut_keeps_what_cutting_twice_keeps(rows, dp, tp):
    """(_StridedShard(0, tp), Shard(0)) on (dp, tp) is tp's chunk, of which dp cuts its own."""
    whole = torch.arange(rows * 3).view(rows, 3)
    for data, model in itertools.product(range(dp), range(tp)):
        expected = chunk(chunk(whole, tp, model, 0), dp, data, 0)
        cuts = in_order([Cut(0, dp, data, tp), Cut(0, tp, model)])
        assert local_shape_of((rows, 3), cuts) == tuple(expected.shape)
        local = torch.full(expected.shape, -1)
        for piece in pieces_of((rows, 3), cuts):
            local[piece.local.slices] = whole[piece.box.slices]
        assert torch.equal(local, expected)


def test_cuts_are_put_in_the_order_in_which_they_were_made():
    one, two, other = Cut(0, 4, 1, 6), Cut(0, 3, 2, 2), Cut(1, 5, 0)
    last = Cut(0, 2, 1)
    assert in_order([one, two, other, last]) == [Cut(0, 2, 1), Cut(0, 3, 2), Cut(0, 4, 1), other]
    assert in_order([Cut(0, 2, 0), Cut(0, 3, 1)]) == [Cut(0, 2, 0), Cut(0, 3, 1)]
    assert in_order([Cut(0, 2, 1, 2)]) == [Cut(0, 2, 1, 2)]


def test_strided_cut_alone_has_several_pieces():
    pieces = pieces_of((8, 2), [Cut(0, 2, 1, 2)])
    assert [(piece.box, piece.at) for piece in pieces] == [(Box((2, 0), (4, 2)), (0, 0)), (Box((6, 0), (8, 2)), (2, 0))]


def test_a_tensor_without_dims_is_one_element_and_an_empty_shard_no_piece():
    assert [piece.box.numel for piece in pieces_of((), ())] == [1]
    assert pieces_of((3,), [Cut(0, 4, 3)]) == []
    assert pieces_of((0, 3), ()) == []


@pytest.mark.parametrize("shape", [(), (7,), (4, 3), (3, 1, 5), (2, 3, 4)])
@pytest.mark.parametrize("max_numel", [0, 1, 4, 7, 100])
def test_split_goes_through_every_element_in_order(shape, max_numel):
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    parts = list(split(Box.whole(shape), max_numel))
    assert all(0 < part.numel <= max(max_numel, 1) for part in parts)
    assert torch.equal(torch.cat([whole[part.slices].reshape(-1) for part in parts]), whole.reshape(-1))


@pytest.mark.parametrize("seed", range(8))
def test_any_box_is_read_with_any_buffer_and_gap(tmp_path, monkeypatch, seed):
    """Against slicing; with no gap allowed, the bytes that are read are the box's."""
    choose = random.Random(seed)
    for index in range(60):
        shape = [choose.randint(1, 5) for _ in range(choose.randint(0, 4))]
        dtype = choose.choice([torch.float32, torch.int8, torch.float64, torch.bfloat16])
        whole = torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)
        path = tmp_path / f"{index}"
        path.write_bytes(b"abc" + bytes(file_reading.bytes_of(whole)))
        start = [choose.randint(0, size - 1) for size in shape]
        box = Box(tuple(start), tuple(choose.randint(low + 1, size) for low, size in zip(start, shape, strict=True)))
        gap = choose.choice([0, 8, 1000])
        monkeypatch.setattr(file_reading, "GAP_NBYTES", gap)
        monkeypatch.setattr(file_reading, "BUFFER_NBYTES", choose.choice([8, 64, 1000]))
        out = torch.empty(box.shape, dtype=choose.choice([dtype, torch.float64]))
        if out.ndim > 1 and choose.random() < 0.5:
            out = torch.empty(box.shape[::-1], dtype=out.dtype).permute(*range(out.ndim)[::-1])
        with ByteReader() as reader:
            reader.read(path, "key", 3, shape, dtype, box, out)
        assert torch.equal(out.double(), whole[box.slices].double())
        if gap == 0:
            assert reader.bytes_read == box.numel * dtype.itemsize


def test_small_gaps_are_read_along_and_large_ones_are_not(tmp_path):
    path = tmp_path / "data"
    whole = torch.arange(4 * 16384, dtype=torch.int32).view(4, 16384)
    path.write_bytes(bytes(file_reading.bytes_of(whole)))
    for columns, expected in ((slice(0, 8192), 4 * 8192 * 4), (slice(0, 16380), (3 * 16384 + 16380) * 4)):
        with ByteReader() as reader:
            out = torch.empty(4, columns.stop, dtype=torch.int32)
            reader.read(path, "key", 0, whole.shape, torch.int32, Box((0, 0), tuple(out.shape)), out)
        assert torch.equal(out, whole[:, columns])
        assert reader.bytes_read == expected
