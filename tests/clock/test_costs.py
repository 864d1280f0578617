"""What single entries cost, against numbers that data sheets and NCCL's tuning model give by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdp2.testing.clock.cards import CARDS, H100, RING_LL, RING_SIMPLE
from fsdp2.testing.clock.costs import collective_seconds, copy_seconds, flops_of, operator_seconds, traffic_of
from fsdp2.testing.clock.trace import Entry, Seen


def tensor(*sizes: int, read: bool = False, written: bool = False, dtype: str = "BFloat16") -> Seen:
    itemsize = {"BFloat16": 2, "Float": 4}[dtype]
    numel = 1
    for size in sizes:
        numel *= size
    return Seen(read, written, dtype, numel * itemsize, sizes)


def op(name: str, *tensors: Seen) -> Entry:
    return Entry("op", name, tensors=tensors)


def test_a_matrix_product_takes_the_longer_of_arithmetic_and_traffic():
    large = op("aten::mm.out", tensor(8192, 4096, read=True), tensor(4096, 14336, read=True), tensor(8192, 14336, written=True))
    assert flops_of(large) == 2 * 8192 * 4096 * 14336
    tiles = 8 * 8192 * 14336 * 2 / 3.35e12
    assert operator_seconds(large, H100) == pytest.approx(H100.kernel_s + flops_of(large) / (0.67 * 989.4e12) + tiles)
    thin = op("aten::mm.out", tensor(1, 4096, read=True), tensor(4096, 14336, read=True), tensor(1, 14336, written=True))
    assert operator_seconds(thin, H100) == pytest.approx(H100.kernel_s + traffic_of(thin) / (0.80 * 3.35e12))


def test_a_batched_and_a_biased_product_count_all_their_arithmetic():
    batched = op("aten::bmm.out", tensor(8, 16, 32, read=True), tensor(8, 32, 64, read=True), tensor(8, 16, 64, written=True))
    assert flops_of(batched) == 2 * 8 * 16 * 32 * 64
    biased = op(
        "aten::addmm.out", tensor(64, read=True), tensor(16, 32, read=True), tensor(32, 64, read=True), tensor(16, 64, written=True)
    )
    assert flops_of(biased) == 2 * 16 * 32 * 64


def test_a_convolution_uses_each_weight_in_each_position_and_its_backward_once_per_gradient():
    image, weight, bias = tensor(4, 16, 32, 32, read=True), tensor(64, 8, 3, 3, read=True), tensor(64, read=True)
    once = 2 * 4 * 15 * 15 * 64 * 8 * 9  # two groups
    forward = op("aten::convolution", image, weight, bias, tensor(4, 64, 15, 15, written=True))
    assert flops_of(forward) == once
    transposed = op("aten::convolution", tensor(4, 64, 15, 15, read=True), weight, tensor(4, 16, 32, 32, written=True))
    assert flops_of(transposed) == once
    grads = tensor(64, 8, 3, 3, written=True), tensor(64, written=True)
    given = tensor(4, 64, 15, 15, read=True), image, weight
    assert flops_of(op("aten::convolution_backward", *given, tensor(4, 16, 32, 32, written=True), *grads)) == 2 * once
    assert flops_of(op("aten::convolution_backward", *given, *grads)) == once  # of the first layer, whose input has no gradient
    assert operator_seconds(forward, H100) > H100.kernel_s + once / 989.4e12


def test_causal_attention_is_half_a_square_and_its_backward_two_and_a_half_times_that():
    q = tensor(2, 32, 8192, 128, read=True)
    forward, backward = (op(f"step_clock::{name}", q, q, q) for name in ("attention", "attention_backward"))
    assert flops_of(forward) == 2 * 2 * 32 * 8192**2 * 128
    assert flops_of(backward) == 2.5 * flops_of(forward)


def test_products_of_few_terms_are_less_efficient():
    def efficiency(terms: int) -> float:
        product = op("aten::mm", tensor(8192, terms, read=True), tensor(terms, 8192, read=True), tensor(8192, 8192, written=True))
        return flops_of(product) / operator_seconds(product, H100) / H100.flops["BFloat16"]

    assert 0.2 < efficiency(768) < efficiency(1536) < efficiency(7168) < H100.matmul_share
    attention = op("step_clock::attention", *[tensor(2, 32, 8192, 128, read=True)] * 3)
    assert operator_seconds(attention, H100) == pytest.approx(H100.kernel_s + flops_of(attention) / (0.18 * 989.4e12))


def test_filling_reads_nothing_and_looking_up_reads_what_it_finds():
    assert traffic_of(op("aten::fill_.Scalar", tensor(100, read=True, written=True))) == 200
    table, rows = tensor(1000, 10, read=True), tensor(3, 10, written=True)
    assert traffic_of(op("aten::embedding", table, rows)) == 2 * 60
    assert traffic_of(op("aten::_foreach_copy_", tensor(100, read=True, written=True), tensor(100, read=True))) == 400


def test_a_collective_takes_the_protocol_that_is_faster():
    eight = tuple(range(8))
    small, large = 1 << 10, 1 << 30
    only = {each.name: replace(H100, protocols=(each,)) for each in (RING_LL, RING_SIMPLE)}
    assert collective_seconds("all_gather", small, eight, H100) == collective_seconds("all_gather", small, eight, only["LL"])
    assert collective_seconds("all_gather", large, eight, H100) == pytest.approx(8.4e-6 + 7 * 3.4e-6 + large * 7 / 8 / (0.8 * 450e9))
    assert collective_seconds("all_reduce", large, eight, H100) == pytest.approx(
        2 * collective_seconds("reduce_scatter", large, eight, H100) - 8.4e-6
    )


def test_between_hosts_a_ring_has_the_network_cards_of_all_its_ranks_of_a_host():
    nbytes = 1 << 30
    whole, one_each = tuple(range(16)), (0, 8)
    seconds = collective_seconds("all_gather", nbytes, whole, H100)
    assert seconds == pytest.approx(8.4e-6 + 14 * 3.4e-6 + 9.6e-6 + nbytes * 15 / 16 / (0.8 * 8 * 50e9))
    assert collective_seconds("all_gather", nbytes, one_each, H100) == pytest.approx(8.4e-6 + 9.6e-6 + nbytes / 2 / (0.8 * 50e9))


def test_latency_grows_with_the_ranks_of_a_ring():
    seconds = [collective_seconds("all_gather", 1 << 20, tuple(range(world)), H100) for world in (8, 64, 512)]
    assert seconds == sorted(seconds)
    assert seconds[2] > 0.5e-3


def test_a_copy_from_pageable_memory_is_slower_than_one_from_pinned_memory():
    pinned, pageable = (Entry("copy", "from the host", other=other, nbytes=1 << 30) for other in (1, 0))
    assert copy_seconds(pinned, H100) == pytest.approx(H100.kernel_s + (1 << 30) / (0.8 * 64e9))
    assert copy_seconds(pageable, H100) > copy_seconds(pinned, H100)


def test_cards_differ_where_their_data_sheets_do():
    assert CARDS["h200"].memory_bandwidth / CARDS["h100"].memory_bandwidth == pytest.approx(4.8 / 3.35)
    assert CARDS["h200"].flops == CARDS["h100"].flops


def test_a_card_is_faster_where_its_data_sheet_says_so_and_only_compared_ones_have_a_range():
    product = op("aten::mm", tensor(8192, 8192, read=True), tensor(8192, 8192, read=True), tensor(8192, 8192, written=True))
    seconds = {name: operator_seconds(product, card) for name, card in CARDS.items()}
    slowest_first = ["a10g", "h20", "rtx4090", "a100-80gb", "l40s", "h100", "b200", "gb200"]
    assert sorted(slowest_first, key=seconds.__getitem__, reverse=True) == slowest_first
    assert {name for name, card in CARDS.items() if card.measured_over_modeled == (1.0, 1.0)} == {
        *("a10g", "b200", "gb200", "h20", "l40s", "mi300x", "rtx4090")
    }
