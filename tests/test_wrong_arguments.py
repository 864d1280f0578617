"""Arguments of a wrong kind: each call takes them, or raises an error of ours that names the argument; no raw TypeError from within."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp2
from fsdp2 import FSDPError

WRONG = (None, "x", -1)

CALLS: dict[str, dict[str, Any]] = {
    "optim.flat": {"optimizer_class": torch.optim.AdamW, "params": None, "lr": 1e-3},
    "optim.offloaded": {
        "optimizer_class": torch.optim.AdamW,
        "params": None,
        "policy": fsdp2.CPUOffloadPolicy(),
        "fraction": 1.0,
        "step_in_backward": False,
        "lr": 1e-3,
    },
    "optim.Muon": {"params": None, "lr": 1e-3, "weight_decay": 0.1, "momentum": 0.9, "ns_steps": 5, "adjust_lr_fn": None},
    "optim.AnyPrecisionAdamW": {"params": None, "lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0},
    "clip_grad_norm_": {"parameters": None, "max_norm": 1.0, "norm_type": 2.0},
    "get_total_norm": {"tensors": None, "norm_type": 2.0},
    "accumulate": {"model": None, "last": True},
    "parallelize": {"model": None, "strategy": "zero3"},
    "materialize": {"model": None, "init_fn": None, "device": "cpu"},
    "summary": {"model": None, "optimizer": None},
    "set_semantics": {"semantics": "torch"},
    "set_collective_algorithms": {"algorithms": "measured"},
    "register_fsdp_forward_method": {"module": None, "method_name": "forward"},
    "fully_shard": {"module": None, "mesh": None, "reshard_after_forward": True, "mp_policy": fsdp2.MixedPrecisionPolicy()},
}
"""Valid arguments of each call; a sharded model, or its parameters, stands in the first that is None."""


@pytest.fixture(autouse=True)
def one_of_two() -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def arguments_of(name: str) -> dict[str, Any]:
    with torch.device("meta" if name == "materialize" else "cpu"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if name not in ("fully_shard", "parallelize"):
        fsdp2.fully_shard(model)
    first = next(key for key, value in CALLS[name].items() if value is None) if None in CALLS[name].values() else None
    has_params = first in ("params", "parameters", "tensors")
    return CALLS[name] if first is None else CALLS[name] | {first: list(model.parameters()) if has_params else model}


def call(name: str, arguments: dict[str, Any]) -> None:
    function: Any = fsdp2
    for part in name.split("."):
        function = getattr(function, part)
    function(**arguments)


CASES = [(name, argument) for name, arguments in CALLS.items() for argument in arguments]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "argument"), CASES)
def test_a_wrong_argument_is_taken_or_refused_with_an_error_of_ours(name: str, argument: str) -> None:
    call(name, arguments_of(name))
    for wrong in WRONG:
        with contextlib.suppress(FSDPError):
            call(name, arguments_of(name) | {argument: wrong})
    if name == "set_semantics":
        fsdp2.set_semantics("torch")


@pytest.mark.parametrize(
    ("name", "wrong", "text"),
    [
        ("optim.flat", {"optimizer_class": "AdamW"}, "flat got optimizer_class='AdamW' of type str"),
        ("optim.flat", {"lr": "x"}, "(?s)AdamW refuses these options.*lr='x'"),
        ("optim.flat", {"nope": 1}, "(?s)AdamW refuses these options.*nope=1"),
        ("optim.flat", {"params": [None]}, "flat got params=None of type NoneType"),
        ("optim.offloaded", {"params": None}, "offloaded got params=None of type NoneType"),
        ("optim.offloaded", {"params": nn.Identity()}, r"offloaded got params=Identity\(\)"),
        ("clip_grad_norm_", {"max_norm": "x"}, "clip_grad_norm_ got max_norm='x' of type str"),
    ],
)
def test_the_error_names_the_argument(name: str, wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(fsdp2.ArgumentError, match=text):
        call(name, arguments_of(name) | wrong)
