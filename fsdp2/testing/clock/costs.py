"""What one entry of a trace costs on a card: pure functions.

A matrix product takes the longer of its arithmetic, with what its tiles need to begin and end, and its memory traffic; attention
the longer of arithmetic and traffic; every other operator its traffic alone. The fewer terms a product adds up, the larger the share
of its tiles' ends. Collectives
are rings: ``base + steps * latency + bytes / bandwidth``, by the protocol that is faster, as NCCL chooses.

Worked example, H100: (16384, 4096) @ (4096, 14336) in bf16 is 2 * 16384 * 4096 * 14336 = 1.92e12 FLOP, at 0.67 * 989e12 FLOP/s 2.90 ms;
the ends of its tiles are 8 times what writing 470 MB takes, 1.12 ms.
Its 722 MB of traffic alone would take 0.27 ms. Adding two tensors of 1 GB into a third takes 3e9 / (0.8 * 3.35e12) = 1.12 ms.
"""

from __future__ import annotations

import math

from .cards import Card, Protocol
from .trace import Entry, Ranks, Seen

_MATMULS = {"mm", "addmm", "bmm", "baddbmm", "_scaled_mm"}
_WRITES_ONLY = {"fill_", "zero_", "_foreach_zero_", "copy_"}
_LOOKS_UP = {"embedding", "index_select", "gather", "index"}
COPIES = {"cat", "_chunk_cat", "split_with_sizes_copy", "_foreach_copy_", "split_copy", "stack", "clone"}


def base_name(entry: Entry) -> str:
    """``aten::mm.out`` -> ``mm``."""
    return entry.name.partition("::")[2].partition(".")[0]


def is_copy(entry: Entry) -> bool:
    """Whether it moves bytes and computes nothing."""
    return entry.kind == "copy" or (entry.kind == "op" and base_name(entry) in COPIES)


def flops_of(entry: Entry) -> float:
    """The arithmetic of matrix products, convolutions and attention; 0 for other operators."""
    name = base_name(entry)
    reads = [tensor for tensor in entry.tensors if tensor.is_read]
    if name in _MATMULS:
        left = next(tensor for tensor in (reads[1:] if "add" in name else reads) if len(tensor.sizes) >= 2)
        out = next(tensor for tensor in entry.tensors if tensor.is_written)
        return 2.0 * math.prod(out.sizes) * left.sizes[-1]
    if name in ("convolution", "convolution_backward"):
        return _flops_of_convolution(entry, reads)
    if name in ("attention", "attention_backward"):  # (batch, heads, sequence, head), causal: half of the square
        batch, heads, sequence, head = reads[0].sizes
        forward = 4.0 * batch * heads * sequence * sequence * head / 2
        return forward if name == "attention" else 2.5 * forward
    return 0.0


def _flops_of_convolution(entry: Entry, reads: list[Seen]) -> float:
    """Each weight is used once in each position of the smaller image: of the output, or of a transposed one's input."""
    written = [tensor for tensor in entry.tensors if tensor.is_written]
    if base_name(entry) == "convolution":
        image, weight, other, products = reads[0], reads[1], written[0], 1
    else:  # one product for the input's gradient and one for the weight's; the bias has a sum
        other, image, weight = reads[:3]
        products = sum(len(tensor.sizes) >= 3 for tensor in written)
    positions = min(math.prod(each.sizes[2:]) for each in (image, other))
    return 2.0 * products * image.sizes[0] * positions * math.prod(weight.sizes)


def traffic_of(entry: Entry) -> int:
    """Bytes that it reads and writes."""
    name = base_name(entry)
    written = sum(tensor.nbytes for tensor in entry.tensors if tensor.is_written)
    if name in _LOOKS_UP:
        return 2 * written
    if name == "nll_loss_forward":
        return written
    if name == "nll_loss_backward":  # it knows the other argument's sizes only
        return written

    def reads(tensor: Seen) -> bool:
        return tensor.is_read and not (tensor.is_written and name in _WRITES_ONLY | {"_foreach_copy_"})

    return written + sum(tensor.nbytes for tensor in entry.tensors if reads(tensor))


def dtype_of_product(entry: Entry) -> str:
    """Whose rate counts, of an entry that has ``flops_of``."""
    return next(tensor.dtype for tensor in entry.tensors if tensor.is_read and len(tensor.sizes) >= 2)


def operator_seconds(entry: Entry, card: Card) -> float:
    """An operator that runs alone."""
    memory = traffic_of(entry) / (card.memory_bandwidth * card.memory_share)
    flops = flops_of(entry)
    if not flops:
        return card.kernel_s + memory
    peak = card.flops[dtype_of_product(entry)]
    if base_name(entry).startswith("attention"):
        return card.kernel_s + max(memory, flops / (peak * card.attention_share))
    written = sum(tensor.nbytes for tensor in entry.tensors if tensor.is_written)
    tiles = card.tile_writes * written / card.memory_bandwidth
    return card.kernel_s + max(memory, flops / (peak * card.matmul_share) + tiles)


def copy_seconds(entry: Entry, card: Card) -> float:
    """A copy on the device (``nbytes`` are read and written together), or over the link to the host."""
    if entry.name == "on the device":
        return card.kernel_s + entry.nbytes / (card.memory_bandwidth * card.memory_share)
    pageable = 0.25  # of the link is what staging through pageable memory leaves: an assumption
    return card.kernel_s + entry.nbytes / (card.to_host * card.link_share * (1.0 if entry.other else pageable))


def collective_seconds(kind: str, nbytes: int, ranks: Ranks, card: Card) -> float:
    """nbytes: of the gathered or whole buffer. A ring over ``ranks``; over one rank a copy on the device."""
    size = len(ranks)
    if size == 1:
        return card.kernel_s + 2 * nbytes / (card.memory_bandwidth * card.memory_share)
    hosts = len({rank // card.ranks_per_host for rank in ranks})
    rounds = 2 if kind == "all_reduce" else 1
    per_host = size // hosts
    bandwidth = card.inside if hosts == 1 else min(card.inside, per_host * card.between) if per_host > 1 else card.between

    def by(protocol: Protocol) -> float:
        latency = (size - hosts) * protocol.inside_s + (hosts - 1 if hosts > 1 else 0) * protocol.between_s
        moved = nbytes * (size - 1) / size
        return protocol.base_s + rounds * (latency + moved / (bandwidth * card.link_share * protocol.share))

    return min(by(protocol) for protocol in card.protocols)
