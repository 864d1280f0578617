"""The device that the tests run on, and the meshes that their bodies use."""

from __future__ import annotations

import math
import os
from functools import cache

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

_DEFAULT_NAMES = {1: ("shard",), 2: ("replicate", "shard")}


def device_type() -> str:
    """``"cpu"`` (gloo), or what the environment variable FSDP2_TEST_DEVICE says: ``"cuda"`` (NCCL, one GPU a rank)."""
    return os.environ.get("FSDP2_TEST_DEVICE", "cpu")


def moved_to(device_type: str, model: nn.Module) -> nn.Module:
    """``model.to``, which leaves tied parameters tied: on devices that torch does not know, as on meta, it makes one for each place."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return model.to(device_type)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def cpu_mesh(*shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    """The mesh of this shape over all ranks, on the CPU unless FSDP2_TEST_DEVICE says otherwise.

    shape: ``cpu_mesh()`` is the 1-D mesh over all ranks, ``cpu_mesh(2, 2)`` two replicas of two shards
    names: of the axes; by default ``("shard",)``, ``("replicate", "shard")``, and for more axes ``("axis0", ...)``

    Collective: yes, over all ranks, at the first call with these arguments. Later calls, in later tests too, return
    the same object, since every new mesh costs process groups. A body that needs a mesh of its own makes one.
    """
    import torch.distributed as dist

    shape = shape or (dist.get_world_size(),)
    if math.prod(shape) != dist.get_world_size():
        raise ValueError(f"cpu_mesh{shape} has {math.prod(shape)} ranks, but this test runs on {dist.get_world_size()}")
    return _mesh(shape, names or _DEFAULT_NAMES.get(len(shape)) or tuple(f"axis{i}" for i in range(len(shape))))


@cache
def _mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    return init_device_mesh(device_type(), shape, mesh_dim_names=names)
