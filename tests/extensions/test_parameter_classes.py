"""Parameters of a class below ``nn.Parameter``: forward sees that class, its attributes and its bits, as in the unsharded model."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.testing import assert_close

from fsdp2 import MixedPrecisionPolicy
from harness import cpu_mesh, on_ranks
from harness.sharding import shard_blocks


class Packed(nn.Parameter):
    """Two values of 4 bits in a byte, as bitsandbytes' ``Params4bit`` keeps them: the layer asks the weight for its state."""

    quant_state: dict[str, Tensor | torch.Size]

    def unpacked(self) -> Tensor:
        state, packed = self.quant_state, self.data.flatten()
        codes = torch.stack([packed >> 4, packed & 15], dim=1).flatten().long()
        return (state["code"][codes].view(-1, 4) * state["absmax"][:, None]).view(state["shape"])


class Linear4bit(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = Packed(torch.randint(0, 256, (width * width // 2, 1), dtype=torch.uint8), requires_grad=False)
        self.weight.quant_state = {
            "code": torch.linspace(-1, 1, 16),
            "absmax": torch.rand(width * width // 4),
            "shape": torch.Size((width, width)),
        }
        self.adapter = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        assert type(self.weight) is Packed
        return x @ self.weight.unpacked() + self.adapter(x)


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Linear4bit(4), Linear4bit(4))


@on_ranks(2, 3)
def test_a_quantized_base_keeps_class_state_and_bits_under_each_policy():
    ranks = torch.distributed.get_world_size()
    for after in (True, False, None):
        for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(reduce_dtype=torch.float32)):
            for copied in (False, True):
                whole, model = two_layers(), two_layers()
                shard_blocks(model, after, mesh=cpu_mesh(ranks), mp_policy=policy)
                if copied:
                    model = copy.deepcopy(model)
                optimizers = [torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.1) for each in (model, whole)]
                x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
                for _ in range(3):
                    for each, optimizer in zip((model, whole), optimizers, strict=True):
                        each(x).square().sum().backward()
                        optimizer.step()
                        optimizer.zero_grad()
                for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
                    assert_close(ours.full_tensor(), theirs.data, msg=f"{after} {policy} {copied}")
