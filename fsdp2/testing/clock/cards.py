"""Device cards: what hardware can do, as data, each number with its source.

Rates are per GPU, in SI units. Peaks are from data sheets; ``*_share`` is how much of a peak is reached. Three constants of each
generation of GPUs are fitted to every other row of benchmarks/published_steps.csv: ``matmul_share``, ``tile_writes`` and
``attention_share``. All others are assumptions that were set before. docs/step_clock.md has the error on the other rows.

    NVIDIA H100 data sheet (SXM5)   https://www.nvidia.com/en-us/data-center/h100/  dense rates are half of those "with sparsity"
    NVIDIA A100 data sheet (SXM)    https://www.nvidia.com/en-us/data-center/a100/
    NVIDIA H200 data sheet (SXM)    https://www.nvidia.com/en-us/data-center/h200/
    NCCL's own tuning model         https://github.com/NVIDIA/nccl, src/graph/tuning.cc: baseLat, hwLat of rings
    NVIDIA DGX B200, GB200 NVL72    data sheets of https://www.nvidia.com/en-us/data-center/: an eighth, and a 72nd, of the whole
    NVIDIA L40S, A10G, Ada          data sheets, and the white paper of the Ada architecture (RTX 4090, products that add up in fp32)
    NVIDIA H20                      as reported (78 multiprocessors, 148 TFLOP/s in bf16): there is no public data sheet
    AMD Instinct MI300X data sheet  https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html: seven links of 64 GB/s
    NVIDIA DGX A100 data sheet      eight network cards of 200 Gbit/s
    NCCL                            up to 24 channels for a ring over NVLink, each a block that occupies a multiprocessor
    torchtitan, December 2024       https://github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md: its hosts
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Protocol:
    """How NCCL moves the data of a ring. Latencies are seconds a step."""

    name: str
    base_s: float
    inside_s: float
    between_s: float
    share: float
    """The share of the links' bandwidth that the protocol keeps."""


# tuning.cc: LL carries 4 bytes of data in 8 and keeps fewer of them under way, so that a third of the bandwidth is left.
RING_LL = Protocol("LL", base_s=3.6e-6, inside_s=0.47e-6 * 1.8, between_s=2.7e-6, share=1 / 4)
RING_SIMPLE = Protocol("Simple", base_s=8.4e-6, inside_s=3.4e-6, between_s=9.6e-6, share=1.0)


@dataclass(frozen=True, slots=True)
class HostCosts:
    """Seconds that the host takes below torch's dispatcher, which cannot be measured without the device: stated constants.

    What is above it (Python, autograd, the dispatcher) is measured live.
    """

    operator: float = 4.0e-6
    """Prepare and launch a kernel or a copy."""
    collective: float = 15.0e-6
    coalesced: float = 2.0e-6
    """Each further collective of one launch."""
    event: float = 0.7e-6
    """Record one, or let a stream wait for one."""
    memory: float = 0.4e-6
    """Take a block from the caching allocator, or give it back."""


@dataclass(frozen=True, slots=True)
class Card:
    """One kind of accelerator in hosts of ``ranks_per_host``: as many attributes as a data sheet and our assumptions have lines."""

    name: str
    flops: dict[str, float]
    """FLOP/s of dense matrix products, by the dtype's name."""
    memory_bandwidth: float
    memory_nbytes: float
    inside: float
    """Bytes/s to other GPUs of the host, one direction."""
    between: float
    """Bytes/s of one GPU's network card, one direction."""
    to_host: float
    """Bytes/s between pinned host memory and the device, one direction."""
    ranks_per_host: int = 8
    matmul_share: float = 0.70
    tile_writes: float = 0.0
    """What a matrix product needs to begin and end its tiles, as a multiple of the time in which its output is written."""
    attention_share: float = 0.35
    memory_share: float = 0.80
    link_share: float = 0.80
    collectives_take: float = 0.0
    """The share of the multiprocessors that NCCL's channels take from operators while a collective runs."""
    kernel_s: float = 2.0e-6
    """Seconds that an empty kernel takes."""
    launch_s: float = 3.0e-6
    """Seconds from the host's call to the kernel's begin on an idle stream."""
    measured_over_modeled: tuple[float, float] = (1.0, 1.0)
    """10th and 90th percentiles of published step times over the model's, on this generation of GPUs; (1, 1): none were compared."""
    is_measured: bool = False
    """The rates are measured on one machine, instead of taken from data sheets."""
    protocols: tuple[Protocol, ...] = (RING_LL, RING_SIMPLE)
    host: HostCosts = field(default_factory=HostCosts)


_HOPPER = {  # fp32 products without TF32, which is torch's default
    "BFloat16": 989.4e12,
    "Half": 989.4e12,
    "Float8_e4m3fn": 1978.9e12,
    "Float8_e5m2": 1978.9e12,
    "Float": 66.9e12,
    "Double": 66.9e12,
}
H100 = Card(
    "H100 SXM 80GB",
    _HOPPER,
    memory_bandwidth=3.35e12,
    memory_nbytes=80e9,
    inside=450e9,
    between=50e9,
    to_host=64e9,
    matmul_share=0.67,
    tile_writes=8.0,
    attention_share=0.18,
    collectives_take=24 / 132,
    measured_over_modeled=(0.94, 1.11),
)
H200 = replace(H100, name="H200 SXM 141GB", memory_bandwidth=4.8e12, memory_nbytes=141e9)
H100_96GB = replace(H100, name="H100 96GB HBM2e, 500 W", memory_bandwidth=2.4e12, memory_nbytes=96e9)
"""Of torchtitan's tables, which do not know its peak FLOP/s; ours is that of the 700 W card."""
_AMPERE = {"BFloat16": 312e12, "Half": 312e12, "Float": 19.5e12, "Double": 19.5e12}
A100_40GB = Card(
    "A100 SXM 40GB",
    _AMPERE,
    memory_bandwidth=1.555e12,
    memory_nbytes=40e9,
    inside=300e9,
    between=25e9,
    to_host=32e9,
    matmul_share=0.76,
    tile_writes=5.0,
    attention_share=0.31,
    collectives_take=24 / 108,
    measured_over_modeled=(0.92, 1.02),
)
"""In hosts with 1 600 Gbit/s of network, as a DGX A100 has; some clouds have 400: ``replace(A100_40GB, between=6.25e9)``."""
A100_80GB = replace(A100_40GB, name="A100 SXM 80GB", memory_bandwidth=2.039e12, memory_nbytes=80e9)


def _unproven(like: Card, name: str, flops: tuple[float, float, float | None], multiprocessors: int, **others: Any) -> Card:
    """A card of whose generation no published step was compared, with the fitted constants of ``like``.

    flops: of products in bf16 and fp16, in fp32, and in float8 (None: it has none)
    """
    half, single, eighth = flops
    by_dtype = {"BFloat16": half, "Half": half, "Float": single, "Double": single}
    if eighth is not None:
        by_dtype |= {"Float8_e4m3fn": eighth, "Float8_e5m2": eighth}
    taken = 24 / multiprocessors
    return replace(like, name=name, flops=by_dtype, collectives_take=taken, measured_over_modeled=(1.0, 1.0), **others)


_PCIE_4 = 32e9
B200 = _unproven(H100, "B200 180GB", (2.25e15, 75e12, 4.5e15), 148, memory_bandwidth=8e12, memory_nbytes=180e9, inside=900e9)
GB200 = _unproven(
    H100,
    "GB200 186GB, NVL72",
    (2.5e15, 80e12, 5e15),
    148,
    memory_bandwidth=8e12,
    memory_nbytes=186e9,
    inside=900e9,
    to_host=225e9,
    ranks_per_host=72,
)
"""What shares NVLink counts as one host. Two GPUs share the link to their CPU."""
H20 = _unproven(H100, "H20 96GB", (148e12, 44e12, 296e12), 78, memory_bandwidth=4e12, memory_nbytes=96e9)
MI300X = _unproven(
    H100, "MI300X 192GB", (1307.4e12, 163.4e12, 2614.9e12), 304, memory_bandwidth=5.3e12, memory_nbytes=192e9, inside=448e9
)
L40S = _unproven(A100_40GB, "L40S 48GB", (362e12, 91.6e12, 733e12), 142, memory_bandwidth=864e9, memory_nbytes=48e9, inside=_PCIE_4)
A10G = _unproven(
    A100_40GB, "A10G 24GB", (70e12, 35e12, None), 80, memory_bandwidth=600e9, memory_nbytes=24e9, inside=_PCIE_4, between=6.25e9
)
RTX_4090 = _unproven(
    A100_40GB,
    "RTX 4090 24GB",
    (165.2e12, 82.6e12, 330.3e12),
    128,
    memory_bandwidth=1.008e12,
    memory_nbytes=24e9,
    inside=_PCIE_4,
    between=1.25e9,
)
"""Without NVLink: GPUs of a host reach each other over PCIe. 10 Gbit/s between hosts."""
CARDS = {
    "a10g": A10G,
    "a100-40gb": A100_40GB,
    "a100-80gb": A100_80GB,
    "b200": B200,
    "gb200": GB200,
    "h100": H100,
    "h100-96gb": H100_96GB,
    "h20": H20,
    "h200": H200,
    "l40s": L40S,
    "mi300x": MI300X,
    "rtx4090": RTX_4090,
}
