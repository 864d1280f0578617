"""Wherever a step runs out of device memory, the next one trains the model as if the batch had been skipped."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from fsdp2.core.group.param_group import GroupState
from fsdp2.testing import pretend
from harness import on_ranks
from harness.mesh import moved_to
from harness.models import batches, mlp
from harness.pretend_training import BF16, forward_backward, on_host, several_dtypes, with_extensions
from harness.subclasses import RowInt8, wrap_weights
from harness.training import Step, fed_own_chunk, forced, sgd


class ReleasedInt8(RowInt8):
    """What arrives is freed at once."""

    def fsdp_post_all_gather(self, gathered: Any, metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None) -> Any:
        made = super().fsdp_post_all_gather(gathered, metadata, param_dtype, out=out)
        return None if made is None else (made[0], (made[0],))

    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> bool:
        return True


def with_released_extensions() -> nn.Module:
    return wrap_weights(mlp(), ReleasedInt8)


WAYS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "several dtypes": (several_dtypes, {}),
    "bf16": (several_dtypes, BF16),
    "bf16 in place": (several_dtypes, BF16),  # casts are written into the unsharded storage
    "smaller mesh": (several_dtypes, {"reshard_after_forward": 2}),
    "extensions": (with_extensions, {}),
    "extensions in place": (with_extensions, {}),  # gathered straight into their outputs
    "extensions that release": (with_released_extensions, {}),
    "offload": (several_dtypes, {"offload_policy": fsdp2.CPUOffloadPolicy()}),
}


def groups_of(model: Any) -> list[Any]:
    return [group for module in (model, *model.blocks) for group in fsdp2.fully_shard.state(module).groups]


def trained(name: str, limit: int | None) -> tuple[list[Step], bool, int, int]:
    """What two steps gave, between which a third got ``limit`` bytes; whether it failed; and how many bytes it took, and were left."""
    gc.collect()  # what earlier tests have left would give room
    with pretend.limited_memory(1 << 30):  # every block is a segment of its own, so memory in use gives no room to others
        return _trained(name, limit)


def _trained(name: str, limit: int | None) -> tuple[list[Step], bool, int, int]:
    make, options = WAYS[name]
    model = moved_to("pretend", make())
    mesh = init_device_mesh("pretend", (4,))
    with forced(**({"gather": "direct" if "extensions" in name else "mixed"} if "in place" in name else {})):
        for module in [*model.blocks, model]:
            fsdp2.fully_shard(module, mesh=mesh, **options)
    inputs = [x.to("pretend") for x in batches(3, (8, 7))]
    optimizer = sgd(model.parameters())
    steps = fed_own_chunk(model, inputs[:1], optimizer=optimizer)
    failed, took = False, 0
    pretend.synchronize()
    if limit is not None:
        with pretend.limited_memory(limit):
            torch.pretend.reset_peak_memory_stats()
            before = pretend.memory_stats()["reserved"]
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", UserWarning)  # torch's: the hook that ends the forward had no memory either
                    forward_backward(model, inputs[1])
            except torch.OutOfMemoryError:
                failed = True
            took = pretend.memory_stats()["peak_reserved"] - before
    gc.collect()
    check_nothing_is_left(model)
    optimizer.zero_grad()
    with torch.no_grad():
        for param in optimizer.param_groups[0]["params"]:
            param.mul_(0.9)
    steps += fed_own_chunk(model, inputs[2:], optimizer=optimizer)
    pretend.synchronize()
    kept = sum(storage.nbytes() for group in groups_of(model) for storage in storages_of(group))
    return on_host(steps), failed, took, kept


def storages_of(group: Any) -> list[torch.UntypedStorage]:
    unsharded = group.unsharded
    return unsharded.storages() if not group.plan.has_own_memory else [storage for storage, _ in unsharded.gather._made.storages]


def check_nothing_is_left(model: Any) -> None:
    for group in groups_of(model):
        assert (group.gathering is None) == (group.state is not GroupState.UNSHARDING)
        unsharded = group.unsharded
        if group.state is GroupState.SHARDED and unsharded is not None:
            assert sum(storage.nbytes() for storage in storages_of(group)) == 0
        if group.state is GroupState.RESHARDED and not group.plan.has_own_memory:
            assert unsharded.storage.nbytes() == 0


def check_limits(name: str, num_limits: int) -> None:
    pretend.set_order(0)
    expected, _, _, kept = trained(name, None)
    _, failed, most, _ = trained(name, 1 << 30)
    assert not failed
    assert most > 5_000
    failures = 0
    for number in range(num_limits):
        limit = most * number // num_limits
        steps, failed, _, left = trained(name, limit)
        failures += failed
        wrong = [key for ours, right in zip(steps, expected, strict=True) for key in right.params if not same(ours, right, key)]
        assert wrong == [], f"with {limit} bytes"
        assert left == kept, f"with {limit} bytes"
    assert failures > num_limits // 2


def same(ours: Step, right: Step, name: str) -> bool:
    def equal(a: Tensor | None, b: Tensor | None) -> bool:
        return a is b if a is None or b is None else torch.equal(a, b)

    return equal(ours.params[name], right.params[name]) and equal(ours.grads[name], right.grads[name])


@on_ranks(4, device="pretend_model")
def test_a_step_without_memory_for_all_of_it_is_as_if_it_had_not_been():
    """Symptom: a group whose gather had not been sent passed for unsharded, with the values of the step before, or none at all."""
    check_limits("bf16", 6)


@pytest.mark.slow
@on_ranks(4, device="pretend_model", timeout=600)
@pytest.mark.parametrize("num_limits", [12, pytest.param(40, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", WAYS)
def test_a_step_may_run_out_of_memory_anywhere(name, num_limits):
    check_limits(name, num_limits)


def unsharded_again(limit: int) -> tuple[bool, Tensor]:
    """Whether an unshard had too little memory, and what the forward after it gives."""
    gc.collect()
    with pretend.limited_memory(1 << 30):
        model = moved_to("pretend", several_dtypes())
        mesh = init_device_mesh("pretend", (4,))
        for module in [*model.blocks, model]:
            fsdp2.fully_shard(module, mesh=mesh, **BF16)
        x = batches(1, (8, 7))[0].to("pretend")
        with torch.no_grad():
            model(x)
            failed = False
            with pretend.limited_memory(limit):
                try:
                    model.blocks[1].unshard()
                except torch.OutOfMemoryError:
                    failed = True
            return failed, model(x).cpu()


def wrong_limits() -> list[int]:
    pretend.set_order(0)
    failed, expected = unsharded_again(1 << 20)
    assert not failed
    wrong, failures = [], 0
    for limit in range(0, 12 << 10, 512):
        try:
            failed, found = unsharded_again(limit)
        except RuntimeError:
            failed, found = True, expected.new_zeros(())
        failures += failed
        if not torch.equal(found, expected):
            wrong.append(limit)
    assert failures > 3
    return wrong


@pytest.mark.slow
@on_ranks(4, device="pretend_model")
def test_an_unshard_that_had_too_little_memory_gathers_again():
    """Symptom: forward computed with memory that nobody had filled."""
    assert wrong_limits() == []
