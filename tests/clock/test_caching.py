"""The model of torch's caching allocator, against its documented rules."""

from __future__ import annotations

from fsdp2.testing.clock.caching import CachingAllocator

MIB = 1 << 20


def test_sizes_are_rounded_and_segments_are_reserved_by_size():
    allocator = CachingAllocator()
    allocator.alloc(1, 1, stream=0, now=0.0)
    assert (allocator.allocated, allocator.reserved) == (512, 2 * MIB)
    allocator.alloc(2, 3 * MIB, stream=0, now=0.0)
    assert allocator.reserved == 22 * MIB
    allocator.alloc(3, 11 * MIB, stream=0, now=0.0)  # fits behind the second
    assert allocator.reserved == 22 * MIB
    allocator.alloc(4, 33 * MIB, stream=0, now=0.0)
    assert allocator.reserved == 56 * MIB


def test_freed_neighbors_become_one_block():
    allocator = CachingAllocator()
    for block in (1, 2, 3):
        allocator.alloc(block, 6 * MIB, stream=0, now=0.0)
    for block in (1, 3, 2):
        allocator.free(block)
    allocator.alloc(4, 20 * MIB, stream=0, now=0.0)
    assert (allocator.reserved, allocator.segments) == (20 * MIB, 1)


def test_the_smallest_block_that_is_large_enough_is_taken():
    allocator = CachingAllocator()
    allocator.alloc(1, 40 * MIB, stream=0, now=0.0)
    allocator.alloc(2, 20 * MIB, stream=0, now=0.0)
    allocator.free(1)
    allocator.free(2)
    allocator.alloc(3, 20 * MIB, stream=0, now=0.0)
    allocator.alloc(4, 40 * MIB, stream=0, now=0.0)
    assert allocator.reserved == 60 * MIB


def test_a_stream_gets_no_block_of_another():
    allocator = CachingAllocator()
    allocator.alloc(1, 20 * MIB, stream=0, now=0.0)
    allocator.free(1)
    allocator.alloc(2, 20 * MIB, stream=1, now=0.0)
    assert allocator.reserved == 40 * MIB


def test_a_block_that_is_still_used_is_free_later():
    allocator = CachingAllocator()
    allocator.alloc(1, 20 * MIB, stream=0, now=0.0)
    allocator.free(1, usable_from=5.0)
    allocator.alloc(2, 20 * MIB, stream=0, now=4.0)
    assert allocator.reserved == 40 * MIB
    allocator.alloc(3, 20 * MIB, stream=0, now=5.0)
    assert allocator.reserved == 40 * MIB


def test_peaks_are_counted_from_where_they_were_reset_and_empty_segments_can_be_given_back():
    allocator = CachingAllocator()
    allocator.alloc(1, 40 * MIB, stream=0, now=0.0)
    allocator.alloc(2, 3 * MIB, stream=0, now=0.0)
    allocator.free(1)
    allocator.reset_peak()
    assert (allocator.peak_allocated, allocator.peak_reserved) == (3 * MIB, 60 * MIB)
    allocator.empty_cache()
    assert (allocator.allocated, allocator.reserved) == (3 * MIB, 20 * MIB)
