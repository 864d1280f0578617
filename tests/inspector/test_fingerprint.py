"""Fingerprints: sums over shards are those of the whole, whatever is cut how, and one other bit shows."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fsdp2.checkpoint.shard_geometry import Cut, pieces_of
from fsdp2.inspector.fingerprint import NOTHING, Fingerprint, Fingerprints, runs_of


def fingerprint(local, shape, pieces):
    made = Fingerprints()
    made.take([(local, runs_of(shape, pieces))])
    return made.all()[0]


def whole(tensor: Tensor) -> Fingerprint:
    return fingerprint(tensor, tensor.shape, pieces_of(tensor.shape, ()))


def of_shards(tensor: Tensor, dim: int, num_shards: int) -> Fingerprint:
    made = NOTHING
    for rank, shard in enumerate(torch.chunk(tensor, num_shards, dim)):
        made += fingerprint(shard, tensor.shape, pieces_of(tensor.shape, [Cut(dim, num_shards, rank)]))
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("dim", "num_shards"), [(0, 2), (0, 3), (1, 4)])
def test_fingerprints_of_shards_add_up_to_that_of_the_whole(dtype, dim, num_shards):
    tensor = torch.randn(7, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected, made = whole(tensor), of_shards(tensor, dim, num_shards)
    assert made.checksum == expected.checksum
    assert made.squares == pytest.approx(tensor.double().square().sum().item())
    assert made.distance(expected) < 1e-12


def test_one_bit_or_two_values_in_each_others_place_change_the_checksum():
    tensor = torch.randn(100, generator=torch.Generator().manual_seed(0))
    bit, swapped = tensor.clone(), tensor[[1, 0, *range(2, 100)]]
    bit.view(torch.int32)[37] ^= 1
    assert len({whole(each).checksum for each in (tensor, bit, swapped, tensor.clone())}) == 3


def test_one_wrong_value_of_many_is_as_far_as_it_is_wrong():
    tensor = torch.randn(1000, 300, generator=torch.Generator().manual_seed(0))
    wrong = tensor.clone()
    wrong[500, 7] += 0.25
    assert whole(tensor).distance(whole(wrong)) == pytest.approx(0.25, rel=1e-5)


def test_rounding_of_all_values_is_about_the_norm_of_the_difference():
    tensor = torch.randn(1000, 300, generator=torch.Generator().manual_seed(0))
    rounded = tensor.bfloat16().float()
    assert whole(tensor).distance(whole(rounded)) == pytest.approx((tensor - rounded).norm().item(), rel=1)


def test_a_scalar_and_an_empty_tensor_have_fingerprints():
    assert whole(torch.tensor(3.0)).norm == 3
    assert whole(torch.ones(0, 4)) == NOTHING
    assert math.isnan(whole(torch.tensor([math.nan])).norm)


def test_what_is_taken_is_as_it_was_then_and_large_tensors_are_the_sum_of_their_runs():
    """Values are looked at later, 2**18 elements at a time; between, an optimizer has written to them, and their memory is free."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator) for shape in ((300, 1000), (3, 5), (700, 800), (), (2, 2))]
    tensors += [torch.zeros(600, 1000), tensors[0].bfloat16()]  # of the zeros a run has no squares, and a checksum
    made = Fingerprints()
    for each in tensors:
        kept = each.clone()
        made.take([(kept, runs_of(each.shape, pieces_of(each.shape, ())))])
        kept.fill_(7)
    assert [each.checksum for each in made.all()] == [whole(each).checksum for each in tensors]
    for each, expected in zip(made.all(), tensors, strict=True):
        assert each.norm == pytest.approx(expected.double().norm().item())
    halves = [whole(tensors[5]), of_shards(tensors[5], 0, 7), of_shards(tensors[5], 1, 3)]
    assert len({each.checksum for each in halves}) == 1
