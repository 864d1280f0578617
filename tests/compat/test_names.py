"""Every public name of FSDP1 can be imported from ``fsdp2.compat``, with the same arguments, and nothing of torch's FSDP1 is used."""

from __future__ import annotations

import ast
import dataclasses
import enum
import importlib
import inspect
from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed.fsdp as theirs
from torch import nn

import fsdp2.compat as ours
from fsdp2.errors import ModuleError

MODULES = ("", ".api", ".wrap", ".fully_sharded_data_parallel", ".sharded_grad_scaler")

NOT_THERE = {
    # attributes and states of torch's wrapper and its flat parameters, which FSDP1's own files import from private modules
    "FLAT_PARAM",
    "FSDP_PREFIX",
    "FSDP_WRAPPED_MODULE",
    "FlatParamHandle",
    "HandleTrainingState",
    "ProcessGroupType",
    "TrainingState",
    # sets of names that are there
    "HYBRID_SHARDING_STRATEGIES",
    "LOW_PRECISION_HOOKS",
    # the logger of torch's scaler
    "logger",
}
"""The closed list of docs/fsdp1.md: names that FSDP1's modules happen to have, and export nowhere."""


def public_names(module: ModuleType) -> list[str]:
    """What ``module`` exports, and what it defines without an underscore."""
    defined = [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and not inspect.ismodule(value)
        and getattr(value, "__module__", module.__name__).startswith("torch.distributed.fsdp")
    ]
    return sorted({*getattr(module, "__all__", ()), *defined})


def cases() -> list[tuple[str, str]]:
    return [(suffix, name) for suffix in MODULES for name in public_names(importlib.import_module(f"torch.distributed.fsdp{suffix}"))]


@pytest.mark.parametrize(("suffix", "name"), cases())
def test_public_name_can_be_imported(suffix: str, name: str) -> None:
    assert hasattr(ours, name) is (name not in NOT_THERE), f"from fsdp2.compat import {name}"


def test_what_is_not_there_is_exported_nowhere() -> None:
    for suffix in MODULES:
        exported = getattr(importlib.import_module(f"torch.distributed.fsdp{suffix}"), "__all__", ())
        assert not NOT_THERE & set(exported)


@pytest.mark.parametrize("suffix", MODULES)
def test_modules_have_the_names_of_torchs_modules(suffix: str) -> None:
    mine = importlib.import_module(f"fsdp2.compat{suffix}")
    names = public_names(importlib.import_module(f"torch.distributed.fsdp{suffix}"))
    assert [name for name in names if not hasattr(mine, name)] == [name for name in names if name in NOT_THERE]
    assert callable(ours.wrap), "the function, also after the module of the same name was imported"


@pytest.mark.parametrize("name", [name for name, value in vars(ours).items() if inspect.isclass(value) and hasattr(theirs, name)])
def test_enums_and_dataclasses_have_the_same_members_and_defaults(name: str) -> None:
    mine, torchs = getattr(ours, name), getattr(theirs, name)
    if issubclass(torchs, enum.Enum):
        assert [each.name for each in mine] == [each.name for each in torchs]
    elif dataclasses.is_dataclass(torchs) and mine.__module__.startswith("fsdp2.compat"):
        assert [(field.name, field.default) for field in dataclasses.fields(mine)] == [
            (field.name, field.default) for field in dataclasses.fields(torchs)
        ]


def parameters(function: object) -> list[tuple[str, object]]:
    return [
        (each.name, str(each.default))
        for each in inspect.signature(function).parameters.values()  # type: ignore[arg-type]
        if each.name != "self" and each.kind is not inspect.Parameter.KEYWORD_ONLY
    ]


def test_constructor_has_the_same_arguments_and_defaults() -> None:
    assert parameters(ours.FullyShardedDataParallel) == parameters(theirs.FullyShardedDataParallel)


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, value in vars(theirs.FullyShardedDataParallel).items()
        if not name.startswith("_") and name != "forward" and inspect.isroutine(getattr(theirs.FullyShardedDataParallel, name))
    ],
)
def test_methods_take_the_same_arguments(name: str) -> None:
    mine = getattr(ours.FullyShardedDataParallel, name)
    if name in ("named_parameters", "named_buffers"):  # passed on as they are
        assert callable(mine)
        return
    assert parameters(mine) == parameters(getattr(theirs.FullyShardedDataParallel, name))


@pytest.mark.parametrize("name", ["enable_wrap", "wrap", "size_based_auto_wrap_policy", "transformer_auto_wrap_policy"])
def test_policies_take_the_same_arguments(name: str) -> None:
    torchs = getattr(importlib.import_module("torch.distributed.fsdp.wrap"), name)
    assert parameters(getattr(ours, name)) == parameters(torchs)


def test_nothing_of_torchs_fsdp1_is_imported() -> None:
    """``torch.distributed.fsdp`` imports its FSDP1 itself, so what our files import is what can be asked."""
    for path in Path(ours.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.startswith("torch.distributed.fsdp")], path


def test_classes_and_instances_are_told_apart() -> None:
    assert not isinstance(nn.Linear(2, 2), ours.FullyShardedDataParallel)
    assert not issubclass(nn.Linear, ours.FullyShardedDataParallel)
    assert issubclass(ours.FullyShardedDataParallel, nn.Module)
    assert not isinstance(nn.Parameter(nn.Linear(2, 2).weight), ours.FlatParameter)


def test_a_subclass_takes_the_arguments_of_its_own_constructor() -> None:
    class Mine(ours.FullyShardedDataParallel):
        def __init__(self, width: int = 3) -> None:
            super().__init__(nn.Linear(width, width))

    assert parameters(Mine) == [("width", "3")]


def test_a_subclass_that_shards_nothing_is_an_error() -> None:
    class Mine(ours.FullyShardedDataParallel):
        def __init__(self) -> None:
            self.width = 3

    with pytest.raises(ModuleError, match=r"Mine.__init__ did not call[\s\S]*fix: "):
        Mine()
