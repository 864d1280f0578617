"""Which modules FSDP1's policies choose: the oracle is torch's own traversal, with a wrapper that only notes what it gets."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp.wrap as theirs
from torch import nn

import fsdp2.compat as ours
from fsdp2.compat.auto_wrap import chosen_modules
from fsdp2.errors import ArgumentError, OrderError


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(dim, 1)
        self.up = nn.Linear(dim, 4 * dim)
        self.norm = nn.BatchNorm1d(dim)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList(Block(4) for _ in range(3))
        self.head = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 40), nn.Linear(40, 4)))
        self.shared = self.blocks[0].up


def torchs_choice(model: nn.Module, policy: Callable[..., bool], ignored: set[nn.Module]) -> list[nn.Module]:
    """In order: children before parents."""
    order: list[nn.Module] = []

    def note(module: nn.Module, **kwargs: Any) -> nn.Module:
        order.append(module)
        return module

    params = {param for module in ignored for param in module.parameters()}
    theirs._recursive_wrap(model, policy, note, ignored, params, only_wrap_children=True)
    return order


def names(model: nn.Module, modules: list[nn.Module]) -> list[str]:
    found = {module: name for name, module in reversed(list(model.named_modules()))}
    return [found[module] for module in modules]


def our_choice(model: nn.Module, policy: Any, ignored: set[nn.Module], mixed_precision: Any = None) -> list[nn.Module]:
    params = {param for module in ignored for param in module.parameters()}
    return [module for module, _ in chosen_modules(model, policy, ignored, params, mixed_precision)]


@pytest.mark.parametrize("ignores", [False, True])
@pytest.mark.parametrize("min_num_params", [1, 60, 100, 200, 330, 10_000])
def test_size_based_policy_chooses_what_torchs_chooses(min_num_params: int, ignores: bool) -> None:
    model = Model()
    ignored = set(model.blocks[1].modules()) if ignores else set()
    mine = functools.partial(ours.size_based_auto_wrap_policy, min_num_params=min_num_params)
    torchs = functools.partial(theirs.size_based_auto_wrap_policy, min_num_params=min_num_params)
    expected = list(dict.fromkeys(torchs_choice(model, torchs, ignored)))
    assert names(model, our_choice(model, mine, ignored)) == names(model, expected)


def test_size_based_policy_has_its_sets_as_arguments_and_as_attributes() -> None:
    model = Model()
    for policy in (ours.size_based_auto_wrap_policy, theirs.size_based_auto_wrap_policy):
        assert nn.MultiheadAttention in policy.FORCE_LEAF_MODULES
        assert nn.ModuleList in policy.EXCLUDE_WRAP_MODULES
    arguments = {"min_num_params": 50, "force_leaf_modules": {Block}, "exclude_wrap_modules": {nn.Linear}}
    mine = functools.partial(ours.size_based_auto_wrap_policy, **arguments)
    # A ModuleList that is chosen is no unit here: its forward never runs.
    torchs = functools.partial(theirs.size_based_auto_wrap_policy, **arguments)
    expected = [name for name in names(model, torchs_choice(model, torchs, set())) if name != "blocks"]
    assert names(model, our_choice(model, mine, set())) == expected


class OfBlocks(ours._Policy):
    def _run_policy(self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: dict[str, Any]) -> Any:
        return {module: dict(root_kwargs) for module in root_module.modules() if isinstance(module, Block)}


def kinds() -> dict[str, tuple[Any, Any]]:
    def is_block(module: nn.Module) -> bool:
        return isinstance(module, Block)

    return {
        "transformer": (
            functools.partial(ours.transformer_auto_wrap_policy, transformer_layer_cls={Block}),
            functools.partial(theirs.transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        ),
        "lambda": (
            functools.partial(ours.lambda_auto_wrap_policy, lambda_fn=is_block),
            functools.partial(theirs.lambda_auto_wrap_policy, lambda_fn=is_block),
        ),
        "or": (
            functools.partial(ours._or_policy, policies=[ours.ModuleWrapPolicy({Block}), ours.ModuleWrapPolicy({nn.Embedding})]),
            functools.partial(theirs._or_policy, policies=[theirs.ModuleWrapPolicy({Block}), theirs.ModuleWrapPolicy({nn.Embedding})]),
        ),
        "classes": (ours.ModuleWrapPolicy([nn.Linear, Block]), theirs.ModuleWrapPolicy([nn.Linear, Block])),
        "custom": (ours.CustomPolicy(lambda module: is_block(module)), theirs.ModuleWrapPolicy([Block])),
        "the user's": (OfBlocks(), theirs.ModuleWrapPolicy([Block])),
        "torch's": (theirs.ModuleWrapPolicy({Block}), theirs.ModuleWrapPolicy({Block})),
        "torch's custom": (theirs.CustomPolicy(is_block), theirs.ModuleWrapPolicy({Block})),
    }


@pytest.mark.parametrize("kind", list(kinds()))
def test_other_policies_choose_what_torchs_choose(kind: str) -> None:
    model = Model()
    mine, torchs = kinds()[kind]
    inside_attention = {name for name in dict(model.named_modules()) if ".attention." in name}
    expected = [name for name in names(model, list(dict.fromkeys(torchs_choice(model, torchs, set())))) if name not in inside_attention]
    assert names(model, our_choice(model, mine, set())) == expected


def test_always_wrap_policy_takes_everything_that_has_a_forward() -> None:
    model = Model()
    chosen = names(model, our_choice(model, ours.always_wrap_policy, set()))
    assert set(chosen) == {
        name
        for name, module in model.named_modules()
        if name and not isinstance(module, nn.ModuleList) and ".attention." not in name and name != "shared"
    }


def test_custom_policy_gives_arguments_of_its_own() -> None:
    model = Model()
    policy = ours.CustomPolicy(lambda module: {"forward_prefetch": True} if module is model.embed else isinstance(module, Block))
    chosen = dict(chosen_modules(model, policy, set(), set(), None))
    assert chosen[model.embed] == {"forward_prefetch": True}
    assert chosen[model.blocks[0]] == {}


@pytest.mark.parametrize("policy", [ours.ModuleWrapPolicy({Block}), functools.partial(ours.size_based_auto_wrap_policy)])
def test_batch_norms_get_units_of_their_own_with_mixed_precision(policy: Any) -> None:
    model = Model()
    chosen = dict(chosen_modules(model, policy, set(), set(), ours.MixedPrecision(param_dtype=torch.bfloat16)))
    assert all(chosen[block.norm] == {"mixed_precision": None} for block in model.blocks)
    without = chosen_modules(model, policy, set(), set(), ours.MixedPrecision(_module_classes_to_ignore=()))
    assert not any(isinstance(module, nn.BatchNorm1d) for module, _ in without)


def test_something_else_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"auto_wrap_policy='Block'[\s\S]*ModuleWrapPolicy"):
        our_choice(Model(), "Block", set())
    with pytest.raises(ValueError, match="returned 1 for"):
        our_choice(Model(), ours.CustomPolicy(lambda module: 1), set())


# --- by hand ------------------------------------------------------------------------------------------------------------------


def test_wrap_calls_the_wrapper_inside_of_enable_wrap_and_returns_the_module_elsewhere() -> None:
    module = nn.Linear(2, 2)
    calls: list[dict[str, Any]] = []

    def wrapper(module: nn.Module, **kwargs: Any) -> nn.Module:
        calls.append(kwargs)
        return nn.Sequential(module)

    assert ours.wrap(module) is module
    with ours.enable_wrap(wrapper_cls=wrapper, one=1, two=2):
        assert ours.wrap(module, two=3)[0] is module
    assert calls == [{"one": 1, "two": 3}]
    assert ours.wrap(module) is module


def test_enable_wrap_does_not_nest_and_ends_with_an_exception() -> None:
    with (
        pytest.raises(OrderError, match="inside of enable_wrap"),
        ours.enable_wrap(wrapper_cls=nn.Sequential),
        ours.enable_wrap(wrapper_cls=nn.Sequential),
    ):
        pass
    module = nn.Linear(2, 2)
    assert ours.wrap(module) is module


def test_policies_are_values_that_can_be_printed_and_copied() -> None:
    policy = ours.ModuleWrapPolicy({Block})
    assert repr(policy) == "ModuleWrapPolicy({Block})"
    assert copy.copy(policy)(module=Block(4), recurse=False, nonwrapped_numel=0)
