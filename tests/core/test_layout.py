"""Where every element lives: examples, and properties over many shapes, rank counts and alignments. No process group."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp2.core.group.rank_pieces import assemble, disassemble
from fsdp2.core.iteration.unit import PrefetchDepth
from fsdp2.core.plan.layout import (
    Cut,
    GroupLayout,
    gather_plan,
    group_layout,
    round_up,
    rows_of,
)
from harness.peak_memory import peak_of_step, transient_bytes

SHAPES = [(1,), (5,), (8, 3), (3, 8), (7, 1, 2), (1, 6), (0, 4), (4, 0), (2, 9), (33, 2)]
RANKS = [1, 2, 3, 4, 7, 8]
CUTS = [Cut(shape, dim, ranks) for shape in SHAPES for dim in (None, *range(len(shape))) for ranks in RANKS]
GROUPS = [
    [(5, 4), (4,)],
    [(8, 8), (8,), (1,)],
    [(3,), (0, 5), (2, 2)],
    [()],
    [(7, 3), (), (129, 2), (64,)],
]


def numbered(shape: tuple[int, ...]) -> Tensor:
    """Elements that are all different, and not zero."""
    return torch.arange(1, math.prod(shape) + 1).view(shape)


def cuts_of(shapes: list[tuple[int, ...]], ranks: int) -> list[Cut]:
    return [Cut(shape, 0 if shape else None, ranks) for shape in shapes]


def flat_shard(layout: GroupLayout, wholes: list[Tensor], rank: int) -> Tensor:
    """What ``rank`` keeps of ``wholes``, laid out; padding is zero."""
    flat = torch.zeros(layout.shard_numel, dtype=torch.int64)
    for slot, whole in zip(layout.slots, wholes, strict=True):
        piece = own_piece(whole, slot.cut, rank)
        flat[slot.offset : slot.offset + piece.numel()] = piece.flatten()
    return flat


def own_piece(whole: Tensor, cut: Cut, rank: int) -> Tensor:
    if cut.dim is None:
        return whole
    rows = rows_of(cut.shape[cut.dim], rank, cut.num_shards)
    return whole.narrow(cut.dim, rows.start, len(rows))


# --- rows and cuts ----------------------------------------------------------------------------------------------------------------


def test_rows_of_an_uneven_split_and_of_a_rank_that_gets_nothing():
    rows = [rows_of(5, rank, 4) for rank in range(4)]
    assert [(each.start, each.stop) for each in rows] == [(0, 2), (2, 4), (4, 5), (5, 5)]
    assert len(rows[3]) == 0
    assert (rows_of(0, 1, 2).start, rows_of(0, 1, 2).stop) == (0, 0)


@pytest.mark.parametrize("ranks", RANKS)
def test_rows_are_those_of_torch_chunk(ranks):
    for num_rows in range(40):
        chunks = torch.arange(num_rows).chunk(ranks) if num_rows else []
        expected = [chunk.tolist() for chunk in chunks] + [[]] * (ranks - len(chunks))
        found = [list(range(rows.start, rows.stop)) for rows in (rows_of(num_rows, rank, ranks) for rank in range(ranks))]
        assert found == expected


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_shards_are_those_of_torch_chunk_and_hold_every_element_once(cut):
    whole = numbered(cut.shape)
    shapes = [cut.shard_shape(rank) for rank in range(cut.num_shards)]
    assert all(math.prod(shape) <= cut.slot_numel for shape in shapes)
    assert math.prod(shapes[0]) == cut.slot_numel
    if cut.dim is None:
        assert shapes == [cut.shape] * cut.num_shards
        return
    chunks = list(whole.chunk(cut.num_shards, cut.dim)) if cut.shape[cut.dim] else []
    for rank, shape in enumerate(shapes):
        piece = own_piece(whole, cut, rank)
        assert tuple(piece.shape) == shape
        if rank < len(chunks):
            assert torch.equal(piece, chunks[rank])
        else:
            assert piece.numel() == 0
    elements = [element for rank in range(cut.num_shards) for element in own_piece(whole, cut, rank).flatten().tolist()]
    assert sorted(elements) == whole.flatten().tolist()


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_row_major_means_that_the_slots_begin_with_the_parameter(cut):
    if cut.dim is None:
        assert cut.is_row_major  # every slot is the parameter
        return
    whole = numbered(cut.shape)
    slots = disassemble(whole, cut)
    assert slots.shape == (cut.num_shards, cut.slot_numel)
    begins = torch.equal(slots.flatten()[: cut.numel], whole.flatten())
    # The order may also come out right by chance, where a dim is 0 or a rank has everything.
    assert begins or not cut.is_row_major
    assert slots.flatten()[cut.numel :].count_nonzero() == 0 or not cut.is_row_major


@pytest.mark.parametrize("cut", [cut for cut in CUTS if cut.dim is not None], ids=str)
def test_assembling_undoes_disassembling(cut):
    whole = numbered(cut.shape)
    back = torch.full(cut.shape, -1)
    assemble(disassemble(whole, cut), cut, back)
    assert torch.equal(back, whole)
    pieces = [own_piece(whole, cut, rank).flatten() for rank in range(cut.num_shards)]
    padded = [torch.nn.functional.pad(piece, (0, cut.slot_numel - piece.numel())) for piece in pieces]
    assert torch.equal(disassemble(whole, cut), torch.stack(padded))


class CountedOperators(TorchDispatchMode):
    """How many operators ran inside that copy or fill."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func._schema.name in ("aten::copy_", "aten::new_zeros", "aten::cat", "aten::clone")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("columns", "most"), [(64 * 3, 1), (64 * 3 - 5, 2)])
def test_a_cut_over_64_ranks_is_assembled_and_disassembled_by_as_few_operators_as_one_over_2(columns, most):
    """Symptom: a copy for each rank and parameter, 64 launches."""
    cut = Cut((4, columns), 1, 64)
    whole = numbered(cut.shape)
    with CountedOperators() as counted:
        slots = disassemble(whole, cut)
    assert counted.count == most + (columns % 64 != 0)  # padding is filled with zeros first
    with CountedOperators() as counted:
        assemble(slots, cut, torch.empty_like(whole))
    assert counted.count == most


@pytest.mark.parametrize(
    ("units", "max_nbytes", "reach"), [(1, None, 1), (0, None, 0), (0, 10, 0), (9, None, 3), (3, 1000, 2), (3, 899, 1), (3, 1, 1)]
)
def test_units_are_gathered_ahead_by_number_and_by_bytes_but_the_next_in_any_case(units, max_nbytes, reach):
    assert PrefetchDepth(units, max_nbytes).reach([400, 500, 300]) == reach


# --- groups -----------------------------------------------------------------------------------------------------------------------


def test_the_example_of_the_docstring():
    layout = group_layout(cuts_of([(5, 4), (4,)], 2), num_shards=2, align=32)
    assert [(slot.numel, slot.offset, slot.gap, slot.unsharded_offset) for slot in layout.slots] == [(12, 0, 20, 0), (2, 32, 30, 64)]
    assert (layout.shard_numel, layout.unsharded_numel) == (64, 128)
    assert [slot.unsharded_numel for slot in layout.slots] == [24, 4]


def test_round_up():
    assert [round_up(numel, 32) for numel in (0, 1, 31, 32, 33)] == [0, 32, 32, 32, 64]
    assert round_up(7, 1) == 7


@pytest.mark.parametrize("align", [1, 4, 32, 64])
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("shapes", GROUPS, ids=str)
def test_slots_are_aligned_disjoint_and_cover_the_flat_shard_with_their_gaps(shapes, ranks, align):
    layout = group_layout(cuts_of(shapes, ranks), num_shards=ranks, align=align)
    stop = 0
    for slot in layout.slots:
        assert slot.offset == stop
        assert slot.offset % align == 0
        assert slot.unsharded_offset % align == 0
        assert 0 <= slot.gap < align
        assert slot.unsharded_numel >= slot.cut.numel  # the whole parameter fits into its region
        stop = slot.offset + slot.numel + slot.gap
    assert stop == layout.shard_numel
    assert layout.shard_numel % align == 0


def test_no_block_of_elements_has_parts_of_two_parameters_whatever_they_are_aligned_to():
    """12 + 2 elements a rank, at multiples of 32 elements for the hardware and of 20 for an optimizer's blocks: at multiples of 160."""
    layout = group_layout(cuts_of([(5, 4), (4,)], 2), num_shards=2, align=32, block=20)
    assert [(slot.offset, slot.gap) for slot in layout.slots] == [(0, 148), (160, 158)]
    assert layout.shard_numel == 320


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("shapes", GROUPS, ids=str)
def test_every_element_lives_exactly_once_on_some_rank_and_padding_is_zero(shapes, ranks):
    """A number for each element of the group: over all ranks each appears once (of a 0-d parameter: on every rank)."""
    cuts = cuts_of(shapes, ranks)
    layout = group_layout(cuts, num_shards=ranks, align=32)
    bases = [0, *itertools.accumulate(math.prod(shape) for shape in shapes)]
    wholes = [numbered(shape) + base for shape, base in zip(shapes, bases, strict=False)]
    kept = torch.cat([flat_shard(layout, wholes, rank) for rank in range(ranks)])
    numbers, counts = kept[kept != 0].unique(return_counts=True)
    assert numbers.tolist() == list(range(1, bases[-1] + 1))
    replicated = {element for whole, cut in zip(wholes, cuts, strict=True) if cut.dim is None for element in whole.flatten().tolist()}
    assert all(count == (ranks if number in replicated else 1) for number, count in zip(numbers.tolist(), counts.tolist(), strict=True))
    assert (kept == 0).sum() == kept.numel() - counts.sum()


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("shapes", GROUPS, ids=str)
def test_gathering_slot_by_slot_gives_the_parameters_where_the_layout_says(shapes, ranks):
    """The all-gather and its copy-out, in integers: the slots of all ranks, one after another, in the region of each parameter."""
    layout = group_layout(cuts_of(shapes, ranks), num_shards=ranks, align=32)
    wholes = [numbered(shape) for shape in shapes]
    rows = torch.stack([flat_shard(layout, wholes, rank) for rank in range(ranks)])
    storage = torch.full((layout.unsharded_numel,), -1)
    for slot in layout.slots:
        region = storage[slot.unsharded_offset : slot.unsharded_offset + slot.unsharded_numel]
        region.view(ranks, slot.numel).copy_(rows[:, slot.offset : slot.offset + slot.numel])
    for slot, whole in zip(layout.slots, wholes, strict=True):
        assert torch.equal(storage[slot.unsharded_offset : slot.unsharded_offset + whole.numel()].view(whole.shape), whole)
        behind = storage[slot.unsharded_offset + whole.numel() : slot.unsharded_offset + slot.unsharded_numel]
        if slot.cut.dim is not None:
            assert behind.count_nonzero() == 0  # what an uneven parameter leaves of its region


def test_regions_of_the_unsharded_storage_do_not_overlap():
    layout = group_layout(cuts_of([(129, 2), (3,), (64, 64)], 4), num_shards=4, align=32)
    regions = [(slot.unsharded_offset, slot.unsharded_offset + slot.unsharded_numel) for slot in layout.slots]
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(regions))
    assert regions[-1][1] <= layout.unsharded_numel


def test_an_empty_group_has_no_size():
    layout = group_layout([], num_shards=4, align=32)
    assert (layout.shard_numel, layout.unsharded_numel, layout.slots) == (0, 0, ())


# --- the gather plan --------------------------------------------------------------------------------------------------------------


def plan_of(cuts: list[Cut], mode: str, direct_from_numel: int = 100) -> tuple[tuple[int, ...], tuple[int, ...]]:
    direct, packed = gather_plan(cuts, mode=mode, direct_from_numel=direct_from_numel)
    assert sorted(direct + packed) == list(range(len(cuts)))  # each parameter travels one way
    assert direct == sorted(direct)
    assert packed == sorted(packed)
    return tuple(direct), tuple(packed)


def test_large_parameters_travel_directly_and_small_ones_packed():
    cuts = cuts_of([(20, 10), (99,), (10, 10)], 2)
    assert plan_of(cuts, "auto") == ((0, 2), (1,))
    assert plan_of(cuts, "packed") == ((), (0, 1, 2))
    assert plan_of(cuts, "direct") == ((0, 1, 2), ())
    assert plan_of(cuts, "mixed") == ((0, 2), (1,))


def test_what_is_not_cut_on_its_outermost_dim_or_is_empty_travels_packed_whatever_is_asked():
    cuts = [Cut((20, 20), 1, 2), Cut((), None, 2), Cut((0, 5), 0, 2), Cut((1, 400), 1, 2), Cut((201, 2), 0, 2)]
    for mode in ("auto", "direct"):
        assert plan_of(cuts, mode) == ((3, 4), (0, 1, 2))  # one row cut on dim 1 is cut on its outermost; uneven may go


def test_packed_slots_lie_in_one_piece_behind_the_direct_ones():
    cuts = cuts_of([(3,), (40, 10), (5,), (50, 10)], 2)
    direct, packed_cuts = plan_of(cuts, "auto")
    layout = group_layout([cuts[index] for index in (*direct, *packed_cuts)], num_shards=2, align=32)
    packed = layout.slots[len(direct) :]
    assert [slot.cut.shape for slot in packed] == [(3,), (5,)]
    assert sum(slot.numel + slot.gap for slot in packed) == layout.shard_numel - packed[0].offset


# --- memory -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_direct", [0, 1, 2])
def test_transient_bytes_of_a_group(num_direct):
    cuts = cuts_of([(64, 10), (32,)], 4)
    layout = group_layout(cuts, num_shards=4, align=64)  # slots of 160 + 32 and 8 + 56 elements
    reduce_layout = group_layout([*cuts, Cut((8,), 0, 4)], num_shards=4, align=64)  # and 2 + 62 of flags
    terms = transient_bytes(
        layout,
        reduce_layout,
        num_direct=num_direct,
        itemsize=4,
        param_itemsize=2,
        reduce_itemsize=4,
        received_rows=2,
    )
    packed_numel = [256, 64, 0][num_direct]
    assert terms.unsharded == 4 * 256 * 2
    assert terms.gather_buffers == 4 * packed_numel * 2
    assert terms.unsharded_grads == (640 + 32) * 2
    assert terms.reduce_input == 4 * 320 * 4
    assert terms.reduce_output == 320 * 4
    assert terms.reduce_received == 2 * 320 * 4
    assert terms.sharded_grads == 320 * 4
    assert peak_of_step([], terms, prefetch=PrefetchDepth(), allocates_early=True, max_reductions=1) > 0
