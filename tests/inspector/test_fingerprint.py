"""Fingerprints: sums over shards are those of the whole, whatever is cut how, and one other bit shows."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fsdp2.checkpoint.shard_geometry import Cut, pieces_of
from fsdp2.inspector.fingerprint import NOTHING, Fingerprint, fingerprint


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
