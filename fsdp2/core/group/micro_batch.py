"""What one backward does with gradients and parameters, depending on its place among the micro-batches of a step.

Setters, ``fsdp2.accumulate`` and ``no_sync`` replace the value as a whole and put the old one back. It refuses to know how gradients
are reduced.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The switches of one unit for its next backward; the defaults are those of a step's only backward.

    reduces:            gradients are reduced over the shard axis; else they accumulate whole, in reduce dtype
    all_reduces:        what was reduce-scattered is all-reduced over the replicate axis, too; else it accumulates there
    keeps_shards:       ``all_reduces`` False keeps what was reduce-scattered even where there is no replicate axis
    reshards:           parameters are resharded after backward
    reshards_to_smaller: ... but only to each group's ``smaller`` mesh
    """

    reduces: bool = True
    all_reduces: bool = True
    keeps_shards: bool = False
    reshards: bool = True
    reshards_to_smaller: bool = False
