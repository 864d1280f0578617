"""How much memory does a training step need for a moment, over the sharded parameters and gradients?

Equal transformer blocks and a batch of one token, so that activations are negligible; fake process group of 8 ranks. All
sizes are in units of one block's unsharded parameters, in ``param_dtype``. On CPU the storages alive are summed up at every
tensor operation, from before sharding on, so that a buffer kept from step to step counts as well; those of the sharded
parameters and gradients are left out. On CUDA it is ``max_memory_allocated`` less the parameters and gradients held.

Worked example, upstream in fp32, in the middle of backward: the block's own parameters, the next block's gathered output,
the block's gradients, the reduce-scatter input of the block before: 4 units.

"Without prefetch" uses the public interface: a module told to prefetch itself finds itself unsharded, and prefetches
nothing else. The target there is for ours without prefetch over upstream as it comes; a row without a target compares like
with like.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import common
import models
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary

DIM = 1024


class LiveStorages(TorchDispatchMode):
    """Knows every storage that an operation has touched and that is still alive, and its size at each later operation."""

    def __init__(self) -> None:
        super().__init__()
        self._serials = WeakIdKeyDictionary()  # storage -> its number; an address may be used again, a number is not
        self._next_serial = 0
        self.snapshots: list[dict[int, int]] | None = None  # serial -> nbytes, at each operation; None: not recording

    def serial_of(self, tensor: torch.Tensor) -> int:
        """The number of the storage under ``tensor`` (for a DTensor, under its local tensor)."""
        storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
        if storage not in self._serials:
            self._serials[storage] = self._next_serial
            self._next_serial += 1
        serial: int = self._serials[storage]
        return serial

    def serials_over(self, parameters: Iterable[torch.Tensor]) -> set[int]:
        """The numbers of the storages that contain a parameter's memory, whichever storage object the parameter has itself."""
        addresses = [p.to_local().data_ptr() for p in parameters if isinstance(p, DTensor)]
        return {
            serial
            for storage, serial in self._serials.items()
            if any(storage.data_ptr() <= address < storage.data_ptr() + storage.nbytes() for address in addresses if address)
        }

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if DTensor in types:
            return NotImplemented  # let it unfold into operations on local tensors, which come back here
        result = func(*args, **kwargs)
        for value in tree_iter((args, kwargs, result)):
            if isinstance(value, torch.Tensor) and value.device.type != "meta":
                self.serial_of(value)
        if self.snapshots is not None:
            # Storages are resized behind the dispatcher's back: ask each for its size now.
            sizes = {serial: storage.nbytes() for storage, serial in self._serials.items()}
            self.snapshots.append({serial: nbytes for serial, nbytes in sizes.items() if nbytes})
        return result


def train_step(model: nn.Module, x: torch.Tensor) -> None:
    model.zero_grad(set_to_none=True)
    model(x).sum().backward()


def turn_prefetch_off(model: nn.Module) -> None:
    """Let each block name itself as the next one; public interface, the same for both implementations."""
    for block in model.blocks:
        block.set_modules_to_forward_prefetch([block])
        block.set_modules_to_backward_prefetch([block])


@dataclass(frozen=True, slots=True)
class Peak:
    """Transient bytes at the peak of a steady step, and the largest storages of that moment, in units of a block's bytes."""

    units: float
    largest: list[float]


def transient_of(implementation: str, mesh: DeviceMesh, num_blocks: int, mixed: bool, prefetch: bool) -> Peak:
    """The peak as the sum of all storages alive."""
    dtype = torch.bfloat16 if mixed else torch.float32
    with LiveStorages() as live:
        model = models.transformer_stack(num_blocks, DIM)
        unit = models.numel_of(model) / num_blocks * dtype.itemsize
        common.shard(model, model.blocks, implementation, mesh, mixed=mixed)
        if not prefetch:
            turn_prefetch_off(model)
        x = torch.zeros(1, 1, DIM, dtype=dtype, requires_grad=True)
        for _ in range(3):
            train_step(model, x)
        live.snapshots = []
        train_step(model, x)
        parameters = list(model.parameters())
        state = {live.serial_of(t) for p in parameters for t in (p, p.grad)} | live.serials_over(parameters)
    peaks = [
        sorted((nbytes for serial, nbytes in snapshot.items() if serial not in state), reverse=True) for snapshot in live.snapshots
    ]
    peak = max(peaks, key=sum)
    return Peak(sum(peak) / unit, [nbytes / unit for nbytes in peak if nbytes > 0.02 * unit])


def transient_of_cuda(implementation: str, mesh: DeviceMesh, num_blocks: int, mixed: bool, prefetch: bool) -> Peak:
    """The peak by the caching allocator's own count, which cannot tell its parts."""
    gc.collect()
    dtype = torch.bfloat16 if mixed else torch.float32
    before = torch.cuda.memory_allocated()
    model = models.transformer_stack(num_blocks, DIM, device="cuda")
    unit = models.numel_of(model) / num_blocks * dtype.itemsize
    common.shard(model, model.blocks, implementation, mesh, mixed=mixed)
    if not prefetch:
        turn_prefetch_off(model)
    x = torch.zeros(1, 1, DIM, device="cuda", dtype=dtype, requires_grad=True)
    for _ in range(3):
        train_step(model, x)
    torch.cuda.reset_peak_memory_stats()
    train_step(model, x)
    locals_ = [t.to_local() if isinstance(t, DTensor) else t for p in model.parameters() for t in (p, p.grad)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in locals_}
    return Peak((torch.cuda.max_memory_allocated() - before - sum(storages.values())) / unit, [])


def main() -> None:
    arguments = common.parser(__doc__)
    arguments.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = arguments.parse_args()
    common.start(options, __doc__)
    mesh = common.fake_mesh(8, options.device)
    num_blocks = 4 if options.quick else 6
    measure = transient_of if options.device == "cpu" else transient_of_cuda
    sharded = [name for name in options.implementations if name != common.PLAIN]
    for mixed in (False, True):
        dtypes = "bf16, fp32 reduce" if mixed else "fp32"
        with_prefetch = {name: measure(name, mesh, num_blocks, mixed, prefetch=True) for name in sharded}
        without = {name: measure(name, mesh, num_blocks, mixed, prefetch=False) for name in sharded}
        ours_without = {name: peak for name, peak in without.items() if name == common.OURS}
        rows = (
            ("with prefetch", with_prefetch, common.Target(0.80, 0.75)),
            ("ours without, upstream with prefetch", with_prefetch | ours_without, common.Target(0.55)),
            ("both without prefetch", without, None),
        )
        for case, measured, target in rows:
            result = common.Result.of(
                "transient_memory",
                "transient peak over sharded state",
                f"{dtypes}, {case}",
                "units",
                {name: [peak.units] for name, peak in measured.items()},
                target,
                largest_storages={name: peak.largest for name, peak in measured.items()},
                device=options.device,
                num_blocks=num_blocks,
            )
            common.report(result, options.json)
            for name, peak in measured.items():
                print(f"    {name}: {peak.units:.3f} = " + " + ".join(f"{units:.3f}" for units in peak.largest) + " + rest")


if __name__ == "__main__":
    main()
