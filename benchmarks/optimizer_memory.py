"""How many bytes of state does each optimizer keep for an element of the parameters that a rank has?

Two transformer blocks on a fake process group of 8 ranks, after one step. Numbers of steps do not count. Next to each figure stands the
formula: two moments for AdamW, one more value for Kahan summation, one momentum for Muon's matrices. torchao's optimizers take part
where it is installed; they quantize shards of at least 4 096 elements, and keep the others whole.
"""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import common
import models
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp2.optim import AnyPrecisionAdamW, Muon, flat

try:
    import torchao.optim as torchao
except ImportError:
    torchao = None

FP32, BF16 = torch.float32, torch.bfloat16

# name: dtype of the parameters, bytes by formula, and how the optimizer is made
CASES: dict[str, tuple[torch.dtype, float, Callable[[nn.Module], Optimizer]]] = {
    "AdamW, fp32": (FP32, 8, lambda model: torch.optim.AdamW(model.parameters())),
    "flat AdamW, fp32": (FP32, 8, lambda model: flat(torch.optim.AdamW, model)),
    "AnyPrecisionAdamW, bf16": (BF16, 4, lambda model: AnyPrecisionAdamW(model.parameters())),
    "the same with Kahan summation": (BF16, 6, lambda model: AnyPrecisionAdamW(model.parameters(), use_kahan_summation=True)),
    "Muon, fp32": (FP32, 4, lambda model: Muon(model, ns_steps=1)),
}
if torchao is not None:
    CASES["torchao's AdamW8bit"] = (FP32, 2 * (1 + 4 / 256), lambda model: torchao.AdamW8bit(model.parameters()))
    CASES["torchao's AdamW4bit"] = (FP32, 2 * (1 / 2 + 4 / 128), lambda model: torchao.AdamW4bit(model.parameters()))


def nbytes_of(value: object) -> int:
    """Bytes that this rank keeps; for a quantized tensor its codes and scales, because all share one table of values."""
    if isinstance(value, DTensor):
        value = value.to_local()
    if not isinstance(value, Tensor) or value.dim() == 0:
        return 0
    return value.codes.nbytes + value.scale.nbytes if hasattr(value, "codes") else value.nbytes


def main() -> None:
    options = common.parser(__doc__).parse_args()
    common.start(options, __doc__)
    mesh = common.fake_mesh(8)
    for case, (dtype, formula, make) in CASES.items():
        model = models.transformer_stack(2, 256).to(dtype)
        common.shard(model, model.blocks, common.OURS, mesh)
        optimizer = make(model)
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        with mock.patch.object(torch, "compile", lambda function, **options: function):  # torchao's step, a minute each
            optimizer.step()
        numel = sum(param.to_local().numel() for param in model.parameters())
        nbytes = sum(nbytes_of(value) for state in optimizer.state.values() for value in state.values())
        result = common.Result.of(
            "optimizer_memory", "optimizer state", case, "bytes an element", {common.OURS: [nbytes / numel]}, None, formula=formula
        )
        common.report(result, options.json)
        print(f"    by formula {formula:.3g}")


if __name__ == "__main__":
    main()
