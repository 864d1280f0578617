"""Optimizers that quantize their states in blocks, on flat shards: no block has elements of two parameters.

The oracle is the same optimizer with a tensor for each parameter, or on the unsharded model.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import fsdp2
from fsdp2 import fully_shard
from fsdp2.checkpoint import Checkpointer
from fsdp2.core.iteration.module_state import units_in
from fsdp2.errors import ArgumentError
from fsdp2.optim import DiskOffloadPolicy, flat, offloaded
from fsdp2.optim.block_states import values_of
from fsdp2.state_bytes import measured_state_bytes
from harness import cpu_mesh, on_ranks

BLOCK = 64


class Int8(Tensor):
    """int8 codes, and a scale for each block of 64 elements."""

    lowest = -127

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Int8:
        return Tensor._make_wrapper_subclass(cls, codes.shape, device=codes.device, dtype=torch.float32)

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: None, shape: Any, stride: Any) -> Int8:
        return cls(inner["codes"], inner["scale"])

    @classmethod
    def zeros(cls, shape: torch.Size) -> Int8:
        return cls(torch.zeros(shape, dtype=torch.int8), torch.zeros(shape.numel() // BLOCK))

    def dequantize(self) -> Tensor:
        return (self.codes.float().view(-1, BLOCK) * self.scale[:, None]).view(self.codes.shape)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.copy_.default:
            assert func is torch.ops.aten.detach.default, func
            return cls(args[0].codes, args[0].scale)
        blocks = args[1].reshape(-1, BLOCK)
        scale = blocks.abs().amax(1) / 127
        args[0].scale.copy_(scale)
        args[0].codes.copy_((blocks / scale.clamp(min=1e-30)[:, None]).round().clamp(min=cls.lowest).view(args[0].shape))
        return args[0]


class LopsidedInt8(Int8):
    """As torchao's signed codes, which reach 1 and not -1: a block whose largest element is negative has none that is its scale."""

    lowest = -126


class Momentum8bit(Optimizer):
    """Its contract is torchao's: whole blocks of at least 4 096 elements are quantized, and other tensors are not."""

    kind: type[Int8] = Int8

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})
        self.block_size = BLOCK

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    fits = param.numel() >= 4096 and param.numel() % BLOCK == 0
                    state["momentum"] = self.kind.zeros(param.shape) if fits else torch.zeros_like(param)
                before = state["momentum"]
                momentum = (before.dequantize() if isinstance(before, Int8) else before) * 0.9 + param.grad
                param.sub_(momentum, alpha=group["lr"])
                state["momentum"].copy_(momentum)


class LopsidedMomentum(Momentum8bit):
    kind = LopsidedInt8


def model_of(*sizes: tuple[int, int]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(*size) for size in sizes))


def sharded(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=cpu_mesh(dist.get_world_size()))


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local()


def train(model: nn.Module, optimizer: Optimizer, first: int, stop: int) -> None:
    for step in range(first, stop):
        x = torch.randn(4, next(model.parameters()).shape[1], generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


class OnPieces:
    """The same optimizer with one ordinary tensor for each local shard, which is what it is given where blocks coincide."""

    def __init__(self, params: list[Tensor]) -> None:
        self.params = params
        self.pieces = [nn.Parameter(local(param).detach().clone()) for param in params]
        self.optimizer = Momentum8bit(self.pieces)

    def step(self, gradients: list[Tensor]) -> None:
        for piece, grad in zip(self.pieces, gradients, strict=True):
            piece.grad = local(grad).clone()
        self.optimizer.step()


WHOLE_BLOCKS = ((128, 128), (128, 960), (960, 4))
CUT_BLOCKS = ((90, 100), (100, 101), (101, 90))


@on_ranks(2)
def test_where_shards_are_whole_blocks_values_are_those_of_a_tensor_for_each_parameter():
    model = sharded(model_of(*WHOLE_BLOCKS))
    oracle = OnPieces(list(model.parameters()))
    optimizer = flat(Momentum8bit, model)
    for step in range(4):
        model(torch.randn(4, 128, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        oracle.step([param.grad for param in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    for param, piece in zip(model.parameters(), oracle.pieces, strict=True):
        assert torch.equal(local(param.detach()), piece.detach())
        assert torch.equal(local(optimizer.state[param]["momentum"]), values_of(oracle.optimizer.state[piece]["momentum"]))
    assert sum(isinstance(each, Int8) for each in optimizer.state_tensors()) == 1  # both large matrices, without the small one


@on_ranks(2)
def test_no_block_has_elements_of_two_parameters_and_padding_stays_zero_and_is_counted():
    """Shards of 50 x 90, 51 x 100 and 45 x 101 elements, none of them whole blocks: each is quantized with zeros behind it."""
    model = sharded(model_of(*CUT_BLOCKS))
    optimizer = flat(Momentum8bit, model)
    train(model, optimizer, 0, 3)
    (group,) = units_in(model.modules())[0].groups
    assert all(slot.offset % BLOCK == 0 for slot in group.plan.layout.slots)
    kept = torch.ones_like(group.flat)
    for param, slot in zip(group.plan.params, group.plan.layout.slots, strict=True):
        kept[slot.offset : slot.offset + local(param.sharded).numel()] = 0
    assert kept.sum() > 0
    assert (group.flat * kept == 0).all()
    for param in model.parameters():
        if param.dim() == 2:
            shown = local(optimizer.state[param]["momentum"]).flatten()
            blocks = nn.functional.pad(shown, (0, -len(shown) % BLOCK)).view(-1, BLOCK)
            codes = blocks / (blocks.abs().amax(1, keepdim=True) / 127)
            assert (codes - codes.round()).abs().max() < 1e-3  # one scale for each 64 elements of this parameter
    (quantized,) = [each for each in optimizer.state_tensors() if isinstance(each, Int8)]
    padded = sum(slot.numel + slot.gap for slot in group.plan.layout.slots if len(slot.cut.shape) == 2)
    assert quantized.numel() == padded
    small = sum(each.nbytes for each in optimizer.state_tensors() if not isinstance(each, Int8))
    assert measured_state_bytes(model, optimizer).optimizer == padded + padded // BLOCK * 4 + small
    assert fsdp2.summary(model, optimizer).units[0].padding > 0
    assert measured_state_bytes(model, optimizer).master == group.plan.layout.shard_numel * 4


@on_ranks(2)
@pytest.mark.parametrize(("shape", "kind"), [((2,), Momentum8bit), ((2,), LopsidedMomentum), ((2, 1), LopsidedMomentum)])
def test_a_checkpoint_goes_on_bit_for_bit_where_blocks_are_alike_and_within_a_code_elsewhere(shape, kind, tmp_path):
    """A block's scale is that of its largest value, and values that were dequantized have another one. Two replicas of one shard have
    other blocks."""
    whole = sharded(model_of(*CUT_BLOCKS))
    optimizer = flat(kind, whole)
    train(whole, optimizer, 0, 2)
    with Checkpointer(tmp_path, whole, optimizer, asynchronous=False) as checkpointer:
        checkpointer.save(2)
    saved = {name: optimizer.state[param]["momentum"].full_tensor() for name, param in whole.named_parameters()}
    train(whole, optimizer, 2, 4)
    resumed = fully_shard(model_of(*CUT_BLOCKS), mesh=cpu_mesh(*shape))
    again = flat(kind, resumed)
    Checkpointer(tmp_path, resumed, again).load()
    bound = 0 if shape == (2,) else 2 / 127
    for name, param in resumed.named_parameters():
        difference = again.state[param]["momentum"].full_tensor() - saved[name]
        assert difference.abs().max() <= bound * saved[name].abs().max()
    train(resumed, again, 2, 4)
    for param, expected in zip(resumed.parameters(), whole.parameters(), strict=True):
        difference = param.full_tensor() - expected.full_tensor()
        assert difference.abs().max() <= bound * 0.1
    ours, theirs = again.state_tensors(), optimizer.state_tensors()
    assert [type(each) for each in ours] == [type(each) for each in theirs]
    if shape == (2,):
        for one, other in zip(ours, theirs, strict=True):
            parts = [(one.codes, other.codes), (one.scale, other.scale)] if isinstance(one, Int8) else [(one, other)]
            assert all(torch.equal(*part) for part in parts)


@on_ranks(2)
def test_what_is_written_into_the_shown_state_counts_and_cuts_keep_it():
    model = sharded(model_of(*CUT_BLOCKS))
    optimizer = flat(Momentum8bit, model)
    train(model, optimizer, 0, 2)
    first = model[0].weight
    with torch.no_grad():
        local(optimizer.state[first]["momentum"]).zero_()
    before = {name: local(param.detach()).clone() for name, param in model.named_parameters()}
    momentum = local(optimizer.state[model[1].weight]["momentum"]).clone()
    for param in model.parameters():
        param.grad = None if param is model[2].weight else torch.zeros_like(param)
    optimizer.step()
    assert torch.equal(local(first.detach()), before["0.weight"])
    torch.testing.assert_close(local(model[1].weight.detach()), before["1.weight"] - 0.01 * 0.9 * momentum, rtol=0, atol=1e-6)
    assert torch.equal(local(model[2].weight.detach()), before["2.weight"])


def test_the_planner_rehearses_flat_optimizers_and_counts_the_zeros_between_blocks():
    model = model_of(*CUT_BLOCKS)
    groups = {}
    for kind in (torch.optim.AdamW, Momentum8bit):
        plan = fsdp2.plan(
            model, 2, inputs=lambda batch, _: (torch.zeros(batch, 90),), optimizer=lambda params, kind=kind: flat(kind, params)
        )
        groups[kind] = plan.groups
        assert plan.state.master == sum(group.sharded for group in plan.groups)
        assert plan.state.optimizer > 0
    assert sum(group.padding for group in groups[Momentum8bit]) > sum(group.padding for group in groups[torch.optim.AdamW])


def test_states_in_blocks_do_not_go_to_files(tmp_path):
    with pytest.raises(ArgumentError, match="quantizes its states in blocks of 64"):
        offloaded(Momentum8bit, copy.deepcopy(model_of((4, 4))), DiskOffloadPolicy(tmp_path))
