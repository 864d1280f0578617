"""What programs' names mean on the reference, and that they mean what they did afterwards."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.fsdp as torch_fsdp
import torch.distributed.tensor as torch_tensor
from torch import nn

import fsdp2
from fsdp2 import reference, strategy
from fsdp2.prove.stand_ins import on_the_reference
from harness import on_ranks


def imported(**names: Any) -> types.ModuleType:
    """A program's module that has imported these names already."""
    module = types.ModuleType("a_program")
    vars(module).update(names)
    sys.modules[module.__name__] = module
    return module


@on_ranks(2)
def test_install_lets_all_names_mean_the_reference() -> None:
    theirs, ours = torch_fsdp.fully_shard, fsdp2.fully_shard
    program = imported(theirs=theirs, ours=ours, kind=torch_fsdp.FSDPModule, our_kind=fsdp2.FSDPModule)
    calls: list[Callable[[], Any]] = [
        *(lambda: torch_fsdp.fully_shard, lambda: fsdp2.fully_shard, lambda: strategy.fully_shard),
        *(lambda: program.theirs, lambda: program.ours),
    ]
    with fsdp2.install(reference=True):
        for call in calls:
            model = call()(nn.Linear(4, 4))
            assert isinstance(model, reference.ReferenceModule)
            assert isinstance(model, torch_fsdp.FSDPModule)
            assert isinstance(model, program.kind)
            assert isinstance(model, program.our_kind)
            assert type(model.weight) is nn.Parameter  # whole
        assert isinstance(fsdp2.parallelize(nn.Linear(4, 4), "zero3", wrap=None), reference.ReferenceModule)
    del sys.modules[program.__name__]
    assert [call() for call in calls] == [theirs, ours, ours, theirs, ours]
    assert not isinstance(fsdp2.fully_shard(nn.Linear(4, 4)), reference.ReferenceModule)


@on_ranks(2)
def test_whole_parameters_are_dtensors_to_programs_and_tensors_to_torch() -> None:
    names = ("uneven", "guarded_step", "park", "unpark", "accumulate")
    usual = {name: getattr(fsdp2, name) for name in names}
    program = imported(DTensor=torch_tensor.DTensor, **usual)
    with on_the_reference(None):
        model = fsdp2.fully_shard(nn.Linear(4, 4))
        assert isinstance(model.weight, program.DTensor)
        assert isinstance(model.weight, torch_tensor.DTensor)
        torch.testing.assert_close(model.weight, model.weight.detach().clone())
        torch.testing.assert_close(model.weight.detach().to_local(), model.weight.chunk(2)[torch.distributed.get_rank()])
        assert all(getattr(program, name) is getattr(fsdp2, name) is not usual[name] for name in names)
    del sys.modules[program.__name__]
    assert program.DTensor is torch_tensor.DTensor
    assert all(getattr(program, name) is getattr(fsdp2, name) is usual[name] for name in names)


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1, bias=False)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.linear(x)


@on_ranks(2)
def test_a_stand_in_contributes_nothing_on_the_reference() -> None:
    """Rank 0 has no batches, or one of three: the gradient is that of all batches together, in one process."""
    rank = torch.distributed.get_rank()
    for own in ([0, 3], [1, 2]):
        torch.manual_seed(0)
        model, alone = Counts(), Counts()
        alone.load_state_dict(model.state_dict())
        batches = [[torch.full((2 + each, 4), 1.0 + each) for each in range(3)][:number] for number in own]
        with on_the_reference(None):
            fsdp2.fully_shard(model)
            with fsdp2.uneven(model) as work:
                for x in work(batches[rank], count=len, micro_batches=3):
                    work.backward(model(x).square().sum())
        everything = torch.cat([each for of_rank in batches for each in of_rank])
        alone(everything).square().mean().backward()
        torch.testing.assert_close(model.linear.weight.grad, alone.linear.weight.grad, msg=f"{own}")
        assert model.calls == own[rank], own
