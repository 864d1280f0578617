"""Settings of the environment that undo what sharded training counts on. Names and values only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from .finding import Finding, Severity

_SETTINGS: tuple[tuple[str, tuple[str, ...], Severity, str, str], ...] = (
    (
        "CUDA_DEVICE_MAX_CONNECTIONS",
        ("1",),
        "warning",
        "all streams share one queue of the device: a reduce-scatter or an all-gather waits for kernels that it should overlap",
        "unset it, unless tensor parallelism with overlap asks for it",
    ),
    ("CUDA_LAUNCH_BLOCKING", ("1",), "warning", "the host waits for each kernel, and nothing overlaps", "unset it"),
    (
        "TORCH_NCCL_BLOCKING_WAIT",
        ("1", "true", "yes", "y"),
        "warning",
        "the host waits for each collective, and nothing overlaps",
        "unset it; TORCH_NCCL_ASYNC_ERROR_HANDLING ends a process whose collective has failed",
    ),
    (
        "TORCH_DISTRIBUTED_DEBUG",
        ("DETAIL",),
        "note",
        "each collective is preceded by another one that compares shapes, on the host",
        "unset it, or set INFO, once the fault that it was set for is found",
    ),
    ("NCCL_P2P_DISABLE", ("1",), "note", "devices of one host talk through its memory instead of NVLink or PCIe", "unset it"),
    (
        "NCCL_IB_DISABLE",
        ("1",),
        "note",
        "hosts talk over sockets instead of InfiniBand or RoCE",
        "unset it, where there is such a fabric",
    ),
    ("PYTORCH_NO_CUDA_MEMORY_CACHING", ("1",), "warning", "each allocation waits for the device", "unset it"),
)


def environment_findings(environment: Mapping[str, str], device_type: str) -> Iterator[Finding]:
    """device_type: of the mesh; on the CPU none of these settings matters but what torch.distributed reads"""
    for name, values, severity, why, fix in _SETTINGS:
        value = environment.get(name, "")
        if value.lower() not in [each.lower() for each in values]:
            continue
        if device_type == "cpu" and not name.startswith("TORCH_DISTRIBUTED"):
            continue
        yield Finding("environment", severity, f"{name}={value} is set", why, fix)
