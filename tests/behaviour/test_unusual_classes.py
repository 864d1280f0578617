"""Modules whose classes lay out their instances otherwise than ``nn.Module`` does, have metaclasses, or guard their attributes.

Symptom: TypeError "object layout differs" after everything had been registered. Cause: an instance can change to a class only if both
descend from the same first base in C, and a class with ABC or Generic first does not descend from ``nn.Module`` there.
"""

from __future__ import annotations

import abc
import copy
import inspect
from abc import ABC
from typing import Any, Generic, Protocol, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp2 import FSDPModule, fully_shard, parallelize
from fsdp2.compat import FullyShardedDataParallel, ModuleWrapPolicy
from fsdp2.sharded_class import sharded_class
from fsdp2.torch_names.torch_modules import TorchFSDPModule
from fsdp2.wrap import by_class
from harness import cpu_mesh, on_ranks
from harness.models import batches
from harness.training import assert_equal_training, fed_own_chunk, fed_whole

T = TypeVar("T")


class AbstractFirst(ABC, nn.Linear):
    @abc.abstractmethod
    def scale(self) -> float: ...

    def forward(self, x: Tensor) -> Tensor:
        return self.scale() * super().forward(x)


class ConcreteOfAbstract(AbstractFirst):
    def scale(self) -> float:
        return 2.0


class GenericFirst(Generic[T], nn.Linear): ...


class Scaled(Protocol):
    def scale(self) -> float: ...


class ProtocolFirst(Scaled, nn.Linear):
    def scale(self) -> float:
        return 2.0


class AbstractMixin(ABC):  # noqa: B024 (as found in users' code)
    def scale(self) -> float:
        return 2.0


class AbstractMixinFirst(AbstractMixin, nn.Linear): ...


class AbstractLast(nn.Linear, ABC): ...


class Slotted(nn.Linear):
    __slots__ = ("note",)


class Naming(type):
    """A metaclass that writes down the classes it makes."""

    made: list[str] = []  # noqa: RUF012

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> Naming:
        mcs.made.append(name)
        return super().__new__(mcs, name, bases, namespace)


class WithMetaclass(nn.Linear, metaclass=Naming): ...


class NamingAbstract(Naming, abc.ABCMeta): ...


class WithMetaclassAndAbstractFirst(ABC, nn.Linear, metaclass=NamingAbstract): ...


class Guarded(nn.Linear):
    """Takes no attribute that it does not know, once it is made."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__class__":
            raise AttributeError("the class is fixed")
        super().__setattr__(name, value)


class Tagged(type):
    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any], *, tag: str) -> Tagged:
        return super().__new__(mcs, name, bases, namespace)

    def __init__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], *, tag: str) -> None:
        super().__init__(name, bases, namespace)


class NeedsTag(nn.Linear, metaclass=Tagged, tag="a"): ...


CLASSES = [
    ConcreteOfAbstract,
    GenericFirst,
    ProtocolFirst,
    AbstractMixinFirst,
    AbstractLast,
    Slotted,
    WithMetaclass,
    WithMetaclassAndAbstractFirst,
    Guarded,
]


class Net(nn.Module):
    def __init__(self, cls: type[nn.Linear]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one = cls(7, 9)
        self.two = cls(9, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.tanh(self.one(x)))


def by_fully_shard(model: Net) -> None:
    for module in (model.one, model.two, model):
        fully_shard(module, mesh=cpu_mesh())


def by_parallelize(model: Net) -> None:
    parallelize(model, wrap=by_class(type(model.one)), mesh=cpu_mesh())


def by_fsdp1(model: Net) -> None:
    for module in (model.one, model.two, model):
        FullyShardedDataParallel(module, device_mesh=cpu_mesh())


@on_ranks(2)
@pytest.mark.parametrize(
    ("cls", "shard"),
    [
        *((cls, by_fully_shard) for cls in CLASSES),
        (ConcreteOfAbstract, by_parallelize),
        (ConcreteOfAbstract, by_fsdp1),
        *(
            pytest.param(cls, shard, marks=pytest.mark.slow)
            for shard in (by_parallelize, by_fsdp1)
            for cls in CLASSES
            if cls is not ConcreteOfAbstract
        ),
    ],
)
def test_a_module_of_any_class_trains_as_unsharded(cls, shard):
    model, whole = Net(cls), Net(cls)
    shard(model)
    assert_equal_training(fed_own_chunk(model, batches(2)), fed_whole(whole, batches(2)))


@on_ranks(2)
@pytest.mark.parametrize("cls", CLASSES)
def test_the_sharded_class_stands_between_ours_and_torchs_and_knows_the_users(cls):
    model = Net(cls)
    by_fully_shard(model)
    mro = type(model.one).__mro__
    assert mro[1:3] == (FSDPModule, cls)
    assert mro[-2:] == (TorchFSDPModule, object)
    assert type(model.one).__name__ == f"FSDP{cls.__name__}"
    assert isinstance(model.one, cls)
    assert isinstance(model.one, FSDPModule)
    assert type(model.one) is type(model.two)
    assert type(type(model.one)(2, 3)) is cls  # as slicing a container makes one
    twin = copy.deepcopy(model)
    assert type(twin.one) is type(model.one)
    assert_equal_training(fed_own_chunk(twin, batches(1)), fed_own_chunk(model, batches(1)))


def list_by_fully_shard(model: nn.Sequential) -> None:
    fully_shard([model[0], model[1]], mesh=cpu_mesh())


def linears_by_parallelize(model: nn.Sequential) -> None:
    parallelize(model, wrap=by_class(nn.Linear), mesh=cpu_mesh())


def linears_by_fsdp1(model: nn.Sequential) -> None:
    FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), device_mesh=cpu_mesh())


@on_ranks(2)
@pytest.mark.parametrize("apply", [list_by_fully_shard, linears_by_parallelize, linears_by_fsdp1])
def test_a_metaclass_that_refuses_our_class_does_so_before_anything_changes(apply):
    model = nn.Sequential(nn.Linear(4, 4), NeedsTag(4, 4))
    with pytest.raises(TypeError, match="tag"):
        apply(model)
    assert [type(each) for each in model.modules()] == [nn.Sequential, nn.Linear, NeedsTag]
    assert all(type(param) is nn.Parameter for param in model.parameters())
    assert not any(vars(each)["_forward_pre_hooks"] for each in model.modules())
    fully_shard(model, mesh=cpu_mesh())  # the others may still be sharded, by one that can be
    model(torch.ones(2, 4)).sum().backward()
    dist.barrier()


@on_ranks(2)
def test_a_module_of_generated_code_trains_as_the_one_that_it_was_traced_from():
    """Functions made by ``exec`` have no module, as the forwards of torch.fx's graph modules."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    traced = torch.fx.symbolic_trace(copy.deepcopy(net))
    fully_shard(traced, mesh=cpu_mesh())
    x = torch.randn(2, 4)
    for model in (net, traced):
        model(x).square().sum().backward()
    for expected, param in zip(net.parameters(), traced.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), expected.grad)


def test_forward_of_a_sharded_module_of_torch_has_the_arguments_that_it_had():
    """``inspect.getfullargspec`` follows no ``__wrapped__``: it saw ``*args, **kwargs``."""
    fresh = [nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)), nn.MultiheadAttention(4, 2), nn.TransformerEncoderLayer(4, 2, 4)]
    for plain in fresh:
        forward = sharded_class(plain, FSDPModule).forward
        for look in (inspect.signature, inspect.getfullargspec):
            assert look(forward) == look(type(plain).forward), (plain, look)
