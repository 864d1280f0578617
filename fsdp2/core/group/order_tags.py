"""Tags: elements after a reduction's gradients, which show each rank afterwards whether all reduced the same group.

A tag is the group's number in binary digits, then the digits' complements. If all ranks send the same tag, each digit
or its complement stays exactly zero in the sum, also after averaging, scaling, rounding and further sums. If two ranks
send different tags, some digit and its complement are both not zero, and these digits tell one number from the other.
(If a divisor made the sum too small for its dtype, both are zero, which tells nothing.)

Worked example, 3 digits; rank 0 reduces group 5, rank 1 group 4, averaged

    tag of 5   1 0 1   0 1 0      tag of 4   1 0 0   0 1 1      mean   1 0 .5   0 1 .5: they differ in the last digit
"""

from __future__ import annotations

from torch import Tensor

NUM_DIGITS = 10
"""Enough for 1024 groups over the same ranks; beyond, groups whose numbers differ by a multiple of 1024 share a tag.
A usual block's flags and a tag fit into the 32 elements that are free after fp32 gradients anyway."""

TAG_NUMEL = 2 * NUM_DIGITS


def tag_of(number: int) -> list[int]:
    """The tag, (TAG_NUMEL,): zeros and ones."""
    digits = [number >> place & 1 for place in reversed(range(NUM_DIGITS))]
    return [*digits, *(1 - digit for digit in digits)]


def are_mixed(tags: Tensor) -> list[bool]:
    """For each reduced tag, whether ranks reduced different groups. tags: (n, TAG_NUMEL), on the host"""
    is_there = tags.abs() > 0  # False for NaN
    mixed: list[bool] = (is_there[:, :NUM_DIGITS] & is_there[:, NUM_DIGITS:]).any(1).tolist()
    return mixed


def number_instead(number: int, tag: Tensor) -> int | None:
    """The group that other ranks reduced instead of ``number``, modulo 1024; None if there seem to be several.

    tag: (TAG_NUMEL,), on the host, mixed
    """
    instead = number % (1 << NUM_DIGITS)
    shares = []
    for place, (digit, complement) in enumerate(tag.double().abs().view(2, NUM_DIGITS).T.tolist()):
        if digit > 0 and complement > 0:
            instead ^= 1 << (NUM_DIGITS - 1 - place)
            shares.append(min(digit, complement) / (digit + complement))
    # As many ranks have sent each digit of one other group.
    return instead if max(shares) < 1.25 * min(shares) else None
