"""Gradients of one reduction lie in one buffer, so an elementwise operation can run over the buffer itself.

Between two gradients lies padding, which a reduction leaves zero. Zeros change no sum of powers and no maximum, and a
product with a number leaves them zero, unless that number is NaN. A user may replace or drop a gradient: its old place
is not padding, and no joined tensor reaches over it.

Worked example, a buffer in which a reduction handed out w1, w2 and b; the user has dropped the gradient of w2

    buffer     [w1 .. | w2 . | b ...]
    joined     [w1 ..]        [b ...]
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .core.group.handing_out import GRADIENTS, PlacedGradients


def forget_padding(tensors: Sequence[Tensor]) -> None:
    """Forget that the padding between the gradients joined in ``tensors`` is zero: it may not be any more."""
    for tensor in tensors:
        vars(tensor if tensor._base is None else tensor._base).pop(GRADIENTS, None)


def joined(grads: Sequence[Tensor], kinds: Sequence[int]) -> tuple[list[Tensor], list[int]]:
    """Tensors that have the elements of ``grads``, and zeros; and the kind of each tensor.

    grads: local tensors. Neighbors in one buffer of one of ``kinds`` become one tensor, a view of the buffer.
    """
    tensors: list[Tensor] = []
    kinds_found: list[int] = []
    places: dict[int, tuple[Tensor, PlacedGradients, dict[int, int]]] = {}
    buffers = [grad._base for grad in grads]
    starts = [0, *(index for index in range(1, len(grads)) if buffers[index] is not buffers[index - 1])]
    for start, stop in zip(starts, [*starts[1:], len(grads)], strict=True) if grads else ():
        part, part_kinds, buffer = grads[start:stop], kinds[start:stop], buffers[start]
        noted: PlacedGradients | None = None if buffer is None else vars(buffer).get(GRADIENTS)
        if buffer is None or noted is None:
            tensors += part
            kinds_found += part_kinds
        elif id(buffer) not in places and _are_all(part, part_kinds, noted):
            strides, end = noted
            tensors.append(buffer[next(iter(strides)) : end])
            kinds_found.append(part_kinds[0])
        else:
            _, _, kind_at = places.setdefault(id(buffer), (buffer, noted, {}))
            for grad, kind in zip(part, part_kinds, strict=True):
                offset = int(grad.storage_offset())
                if offset not in kind_at and noted[0].get(offset) == grad.stride():
                    kind_at[offset] = kind
                else:
                    tensors.append(grad)
                    kinds_found.append(kind)
    for buffer, noted, kind_at in places.values():
        _join_in(buffer, noted, kind_at, tensors, kinds_found)
    return tensors, kinds_found


def _are_all(grads: Sequence[Tensor], kinds: Sequence[int], noted: PlacedGradients) -> bool:
    """Whether ``grads`` are all gradients of their buffer, of one kind: this finds the usual case without a loop."""
    strides, _ = noted
    if len(grads) != len(strides) or kinds.count(kinds[0]) != len(kinds):
        return False
    return dict(zip(map(Tensor.storage_offset, grads), map(Tensor.stride, grads), strict=True)) == strides


def _join_in(buffer: Tensor, noted: PlacedGradients, kind_at: dict[int, int], tensors: list[Tensor], kinds: list[int]) -> None:
    """Add to ``tensors`` and ``kinds`` the stretches of ``buffer`` with gradients in ``kind_at``, of one kind."""
    start: int | None = None
    strides, end = noted
    for offset in (*strides, end):
        if start is not None and (offset not in kind_at or kind_at[offset] != kinds[-1]):
            tensors.append(buffer[start:offset])
            start = None
        if start is None and offset in kind_at:
            start = offset
            kinds.append(kind_at[offset])
