"""Copies that a step makes, and those that it does not make: one pass instead of two, and no cast on the host."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp2
from fsdp2.torch_names import torch_tensors
from harness import on_ranks
from harness.training import forward_backward

NOT_IN_FP32 = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Copies(TorchDispatchMode):
    """(device and dtype of the source, of the target) of every copy of more than one element."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[tuple[str, torch.dtype], tuple[str, torch.dtype]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name in ("aten::copy_", "aten::_to_copy") and args[0].numel() > 1:
            target, source = (args[0], args[1]) if name == "aten::copy_" else (result, args[0])
            self.seen.append(((source.device.type, source.dtype), (target.device.type, target.dtype)))
        return result


def sharded(**options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to("pretend")
    return fsdp2.fully_shard(model, mesh=init_device_mesh("pretend", (torch.distributed.get_world_size(),)), **options)


@on_ranks(4, device="pretend_model")
def test_a_shard_that_is_sent_as_a_copy_in_another_dtype_is_read_once():
    model = sharded(mp_policy=NOT_IN_FP32)
    with Copies() as copies:
        handle = model.unshard(async_op=True)
    handle.wait()
    device = "pretend"
    assert copies.seen == [((device, torch.float32), (device, torch.bfloat16))]


@on_ranks(1, device="pretend")
def test_one_rank_with_offload_casts_on_the_device():
    """Symptom: the host cast the shard, and waited for the copy of what it had cast."""
    model = sharded(mp_policy=NOT_IN_FP32, offload_policy=fsdp2.CPUOffloadPolicy())
    with Copies() as copies:
        model.unshard()
    across = [(source, target) for source, target in copies.seen if source[0] != target[0]]
    assert across != []
    assert [(source, target) for source, target in across if source[1] is not target[1]] == []


@on_ranks(4, device="pretend_model")
def test_a_parameter_without_dims_leaves_the_fused_copy_in_on():
    """``chunk_cat`` copies tensor by tensor as soon as one of them is not contiguous."""
    model = nn.Linear(8, 8).to("pretend")
    model.scale = nn.Parameter(torch.tensor(2.0, device="pretend"))
    model.register_forward_hook(lambda module, args, output: output * module.scale)
    fsdp2.fully_shard(model, mesh=init_device_mesh("pretend", (4,)))
    pieces: list[Tensor] = []
    original = torch_tensors.chunk_cat

    def watched(tensors: list[Tensor], *args: Any) -> None:
        pieces.extend(tensors)
        original(tensors, *args)

    with mock.patch.object(torch_tensors, "chunk_cat", watched):
        forward_backward(model, torch.ones(3, 8, device="pretend"))
    assert pieces != []
    assert [tuple(piece.shape) for piece in pieces if not piece.is_contiguous()] == []
