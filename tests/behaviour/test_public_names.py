"""A guard: what torch's FSDP2 has in public, in the installed version, is here too, with the same arguments and defaults.

When a new torch adds something, the test that fails names it.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as theirs
from torch.distributed.fsdp import FSDPModule as TheirModule

import fsdp2 as ours
from fsdp2 import compat

PRIVATE_IN_USE = {"_set_unshard_async_op", "_get_fsdp_state"}  # which other libraries call
METHODS = sorted(
    name for name, value in vars(TheirModule).items() if callable(value) and (not name.startswith("_") or name in PRIVATE_IN_USE)
)
CLASSES = ["MixedPrecisionPolicy", "OffloadPolicy", "CPUOffloadPolicy", "DataParallelMeshDims"]
HANDLES = ["UnshardHandle", "GradientReductionHandle"]
LATER_ARGUMENTS = {"dp_mesh_dims"}  # which the oldest torch that we run on has not
FUNCTIONS = ["fully_shard", "register_fsdp_forward_method", "share_comm_ctx"]


def comparable(default: Any) -> Any:
    return (type(default).__name__, vars(default)) if dataclasses.is_dataclass(default) else default


def arguments(function: Any) -> dict[str, tuple[Any, Any]]:
    """Of each argument its kind and default."""
    parameters = inspect.signature(inspect.unwrap(function)).parameters
    return {name: (each.kind, comparable(each.default)) for name, each in parameters.items() if name not in ("self", "cls")}


def known_to_torch(found: dict[str, tuple[Any, Any]], function: Any) -> dict[str, tuple[Any, Any]]:
    """Without arguments of a later torch; of what policies of ours say by default, as much as this torch's policies have fields for."""
    wanted = arguments(function)
    result = {}
    for name, (kind, default) in found.items():
        if name in LATER_ARGUMENTS and name not in wanted:
            continue
        if isinstance(default, tuple) and name in wanted and isinstance(wanted[name][1], tuple):
            default = default[0], {key: value for key, value in default[1].items() if key in wanted[name][1][1]}
        result[name] = kind, default
    return result


@pytest.mark.parametrize("name", METHODS)
def test_method_is_overridden_with_the_same_arguments_and_defaults(name):
    assert name in vars(ours.FSDPModule), f"torch {theirs.__name__} has a method {name} that fsdp2.FSDPModule does not override"
    assert arguments(vars(ours.FSDPModule)[name]) == arguments(vars(TheirModule)[name])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_has_the_same_arguments_and_defaults(name):
    assert known_to_torch(arguments(getattr(ours, name)), getattr(theirs, name)) == arguments(getattr(theirs, name))


@pytest.mark.parametrize("name", [name for name in CLASSES if hasattr(theirs, name)])
def test_policy_has_the_same_fields_and_defaults_of_its_own(name):
    """What torch's class adds would be inherited, and do nothing."""
    own = inspect.get_annotations(getattr(ours, name))
    wanted = {each.name: (each.kw_only, each.default) for each in dataclasses.fields(getattr(theirs, name))}
    found = {each.name: (each.kw_only, each.default) for each in dataclasses.fields(getattr(ours, name)) if each.name in own}
    assert {key: value for key, value in found.items() if key in wanted} == wanted


@pytest.mark.parametrize("name", [name for name in HANDLES if hasattr(theirs, name)])
def test_handle_has_the_same_methods_of_its_own(name):
    for method, value in vars(getattr(theirs, name)).items():
        if callable(value) and not method.startswith("_"):
            assert arguments(vars(getattr(ours, name))[method]) == arguments(value)


@pytest.mark.parametrize("name", [name for name in CLASSES + HANDLES if hasattr(theirs, name)])
def test_objects_of_ours_are_instances_of_torchs_class(name):
    made = getattr(ours, name)(**({"shard": "dp"} if name == "DataParallelMeshDims" else {}))
    assert isinstance(made, getattr(theirs, name))


@pytest.mark.parametrize(
    "policy",
    [
        ours.MixedPrecisionPolicy(torch.bfloat16, param_dtype_override_fn=comparable),
        ours.OffloadPolicy(),
        ours.CPUOffloadPolicy(pin_memory=False),
        ours.DataParallelMeshDims("dp", replicate=("a", "b")),
    ],
)
def test_a_policy_is_a_value_with_all_of_its_fields(policy):
    """Whatever fields and methods torch's class of the same name has."""
    for same in (dataclasses.replace(policy), pickle.loads(pickle.dumps(policy)), copy.deepcopy(policy)):
        assert (type(same), same, hash(same), repr(same)) == (type(policy), policy, hash(policy), repr(policy))
    fields = ", ".join(f"{key}={value!r}" for key, value in vars(policy).items())
    assert repr(policy) == f"{type(policy).__name__}({fields})"
    assert [each.name for each in dataclasses.fields(policy)] == list(vars(policy))


def test_every_public_name_of_fsdp2_in_torch_is_here():
    """FSDP1's names are in ``fsdp2.compat`` (tests/compat/test_names.py)."""
    of_fsdp1 = {name for name, value in vars(compat).items() if getattr(value, "__module__", "").startswith("fsdp2.compat")}
    of_fsdp2 = {name for name in theirs.__all__ if name not in of_fsdp1}
    assert of_fsdp2 - set(ours.__all__) == set()
