"""How many bytes does the collective path read and write per unsharded byte in a training step?

Every copy, cast, split, concatenation, division and fill around the collectives is memory bandwidth taken from the model.
All tensor operations of a steady step are counted, at each tensor's size in bytes, and the plain model's count is taken off;
what remains is the collective path. The collectives themselves are not counted, nor are views and allocations. Fake process
group of 8 ranks, every group resharded after forward, so each parameter is gathered twice and reduced once.

Worked example, upstream in fp32: a gather copies the shard in (1/8 read, 1/8 written) and the result out (1 + 1), twice; the
gradients are copied in once (1 + 1): 2 * 2.25 + 2 = 6.5 bytes for each unsharded byte. Bytes are those of ``param_dtype``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import common
import models
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

# In place, and yet nothing of the old value is read.
_OVERWRITES = {
    "aten::copy_", "aten::_foreach_copy_", "aten::zero_", "aten::_foreach_zero_", "aten::fill_", "aten::normal_",
    "aten::uniform_", "fsdp::copy_",
}  # fmt: skip
# No pass over the data, although the schema alone does not say so.
_FREE = {
    "aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided", "aten::resize_",
    "aten::set_", "aten::_local_scalar_dense", "aten::is_same_size", "aten::record_stream",
}  # fmt: skip


class CountBytes(TorchDispatchMode):
    """Counts, by operation, the bytes that run through it: ``by_op[name]``, read and written together.

    An operation reads its tensor arguments and writes its results and those arguments which its schema marks as written;
    an ``out`` argument is not read. A result that shares its storage with an argument is a view and costs nothing.
    The operation seen is the outermost one, so a custom operation is counted once and not again for what it calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_op: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if DTensor in types:
            return NotImplemented  # let it unfold into operations on local tensors, which come back here
        result = func(*args, **kwargs)
        name = func._schema.name
        if not name.startswith(("c10d::", "_c10d_functional::")) and name not in _FREE:
            self.by_op[name] += _bytes_through(func, args, kwargs, result)
        return result


def _bytes_through(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    name, schema = func._schema.name, func._schema
    if name == "fsdp::all_gather_copy_in":  # writes into a slice of its second argument; its schema does not say so
        return 2 * sum(_nbytes(t) for t in args[0])
    read, written = 0, 0
    argument_storages: set[int] = set()
    for index, argument in enumerate(schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        tensors = [t for t in tree_iter(value) if isinstance(t, Tensor)]
        argument_storages.update(t.untyped_storage()._cdata for t in tensors)
        nbytes = sum(map(_nbytes, tensors))
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written:
            written += nbytes
        if not is_written or not (argument.is_out or name in _OVERWRITES):
            read += nbytes
    results = [t for t in tree_iter(result) if isinstance(t, Tensor)]
    fresh = [t for t in results if t.untyped_storage()._cdata not in argument_storages]
    if not written and not fresh and results:
        return 0  # a view
    return read + written + sum(map(_nbytes, fresh))


def _nbytes(tensor: Tensor) -> int:
    """Distinct bytes of ``tensor``: an expanded dimension (stride 0) counts once."""
    numel = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        numel *= size if stride != 0 or size == 0 else 1
    return numel * tensor.element_size()


def bytes_of_a_step(model: torch.nn.Module, dim: int, dtype: torch.dtype) -> Counter[str]:
    """Bytes by operation in the fourth step: forward and backward of a batch of one sequence of two tokens."""
    x = torch.zeros(1, 2, dim, dtype=dtype, requires_grad=True)
    counter = CountBytes()
    for _ in range(4):
        model.zero_grad(set_to_none=True)
        counter.by_op.clear()
        with counter:
            model(x).sum().backward()
    return counter.by_op


def main() -> None:
    options = common.parser(__doc__).parse_args()
    common.start(options, __doc__)
    num_blocks = 1 if options.quick else 2
    cases = [
        ("large even", 8, 1024, 8, (common.Target(0.40, 0.31), common.Target(0.65, 0.55))),  # weights of 4 MiB and more
        ("small", 8, 128, 8, (common.Target(0.93), common.Target(0.93))),
        ("large uneven", 8, 1001, 7, (common.Target(0.93), common.Target(0.93))),  # no weight's rows divide by 8
        ("small, 64 ranks", 64, 128, 8, (common.Target(0.95), common.Target(0.95))),  # 2 elements of a bias a rank
    ]
    for case, world_size, dim, num_heads, targets in cases:
        mesh = common.fake_mesh(world_size)
        for mixed, target in zip((False, True), targets, strict=True):
            dtype = torch.bfloat16 if mixed else torch.float32
            counts = {}
            for name in options.implementations:
                model = models.transformer_stack(num_blocks, dim, num_heads)
                unsharded_nbytes = models.numel_of(model) * dtype.itemsize
                common.shard(model, model.blocks, name, mesh, mixed=mixed)
                counts[name] = bytes_of_a_step(model, dim, dtype)
                del model
            passes = {name: [by_op.total() / unsharded_nbytes] for name, by_op in counts.items()}
            by_op = {
                name: {
                    op: nbytes / unsharded_nbytes
                    for op in counter
                    if (nbytes := counter[op] - counts[common.PLAIN][op]) / unsharded_nbytes > 0.001
                }
                for name, counter in counts.items()
                if name != common.PLAIN
            }
            result = common.Result.of(
                "memory_passes",
                "bytes read + written per unsharded byte",
                f"{case}, {'bf16, fp32 reduce' if mixed else 'fp32'}",
                "B/B",
                common.over_plain(passes),
                target,
                by_op=by_op,
                world_size=world_size,
                largest_parameter_mib=4 * dim * dim * dtype.itemsize / 2**20,
            )
            common.report(result, options.json)
            for name, ops in by_op.items():
                print(f"    {name}: " + "  ".join(f"{op} {value:.3f}" for op, value in sorted(ops.items(), key=lambda o: -o[1])))
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
