"""What the court tries: the ways of training that torch's FSDP2 offers, singly and combined at random."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

import fsdp2
from harness.models import mlp
from harness.pretend_training import (
    BF16,
    BF16_ALL,
    MORE_SCENARIOS,
    SCENARIOS,
    SCENARIOS_2D,
    FailureError,
    Scenario,
    after_a_failed_backward,
    halve_in_a_hook,
    in_partly_reduced_micro_batches,
    in_two_micro_batches,
    prefetch_two_deep,
    sum_only,
    unsharded_before_backward,
    unsharded_over_the_step,
    with_a_shorter_evaluation,
    with_an_evaluation,
    written_on_a_side_stream,
)
from harness.training import forward_backward

OFFLOAD = {"offload_policy": fsdp2.CPUOffloadPolicy()}

# --- what is set before training ----------------------------------------------------------------------------------------------------


def units(model: Any) -> list[Any]:
    return [model, *model.blocks]


def four_input_buffers(model: Any) -> None:
    model.set_reduce_scatter_max_input_buffers(4)


def double_in_a_hook(model: Any) -> None:
    """On the stream that torch chooses."""
    for module in units(model):
        module.set_all_reduce_hook(lambda grad: grad.mul_(2))


def keep_after_backward(model: Any) -> None:
    model.set_reshard_after_backward(False)


def gather_on_the_current_stream(model: Any) -> None:
    model._set_unshard_async_op(True)


def reduce_in_a_group_of_its_own(model: Any) -> None:
    model.set_separate_reduce_scatter_group(True)


def fill_unused(model: Any) -> None:
    model.set_reduce_scatter_unused_params(True)


def divide_by_three(model: Any) -> None:
    for module in units(model):
        module.set_gradient_divide_factor(3.0)


class OwnGather(AllGather):
    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class OwnScatter(ReduceScatter):
    allocate = OwnGather.allocate

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def communicate_by_own_means(model: Any) -> None:
    for module in units(model):
        module.set_custom_all_gather(OwnGather())
        module.set_custom_reduce_scatter(OwnScatter())


def nothing(model: Any) -> None: ...


def partly_frozen() -> nn.Module:
    model = mlp()
    model.blocks[1].requires_grad_(False)
    model.blocks[2].up.weight.requires_grad_(False)
    return model


# --- one step -----------------------------------------------------------------------------------------------------------------------


def prefetch_toggled(model: Any, x: Tensor) -> Tensor:
    """One micro-batch prefetches as it was told to, the next one does not."""
    losses = []
    for index, rows in enumerate(x.chunk(2)):
        for module in units(model):
            module.set_modules_to_forward_prefetch([])
            module.set_modules_to_backward_prefetch([])
        if index == 0:
            prefetch_two_deep(model)
        losses.append(model(rows).square().mean())
        (losses[-1] / 2).backward()
    return torch.stack(losses).mean()


def evaluated_before_backward(model: Any, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    with torch.no_grad():
        seen = model(x).square().mean()
    loss.backward()
    return loss.detach() + seen


def two_forwards_two_backwards(model: Any, x: Tensor) -> Tensor:
    losses = [model(rows).square().mean() for rows in x.chunk(2)]
    model.set_is_last_backward(False)
    (losses[1] / 2).backward()
    model.set_is_last_backward(True)
    (losses[0] / 2).backward()
    return torch.stack(losses).mean()


def unsharded_by_hand(model: Any, x: Tensor) -> Tensor:
    """All blocks ahead of forward, on the stream that computes."""
    handles = [block.unshard(async_op=True) for block in model.blocks]
    handles[1].wait()
    return forward_backward(model, x)


def kept_over_micro_batches(model: Any, x: Tensor) -> Tensor:
    """As pipeline schedules do: only the last backward reduces and reshards."""
    losses = []
    for index, rows in enumerate(x.chunk(2)):
        model.set_is_last_backward(index == 1)
        model.set_reshard_after_backward(index == 1)
        model.set_requires_gradient_sync(index == 1)
        losses.append(model(rows).square().mean())
        (losses[-1] / 2).backward()
    return torch.stack(losses).mean()


def backward_split(model: Any, x: Tensor) -> Tensor:
    """Zero bubbles: gradients of inputs first, those of weights later, then one reduction, as torch's pipeline stages ask for it."""
    inputs = x.clone().requires_grad_()
    model.set_is_last_backward(False)
    model.set_reshard_after_backward(False)
    model.set_requires_gradient_sync(False)
    loss = model(inputs).square().mean()
    torch.autograd.grad(loss, inputs, retain_graph=True)
    params = [param for param in model.parameters() if param.requires_grad]
    for param, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
        param.grad = grad if param.grad is None else param.grad + grad
    model.set_is_last_backward(True)
    model.set_reshard_after_backward(True)
    model.set_requires_gradient_sync(True)
    context = model._get_fsdp_state()._state_ctx
    for state in context.all_states:
        for group in state._fsdp_param_groups:
            group.post_backward()
    if hasattr(context, "manual_backward_finalization_active"):
        context.manual_backward_finalization_active = False
    model._get_fsdp_state()._root_post_backward_final_callback()
    return loss.detach()


def finalized_by_hand(model: Any, x: Tensor) -> Tensor:
    """Of torch 2.15: the reductions of two backwards run while something else computes."""
    model.set_manual_backward_finalization(True)
    losses = []
    for index, rows in enumerate(x.chunk(2)):
        model.set_requires_gradient_sync(index == 1)
        losses.append(model(rows).square().mean())
        (losses[-1] / 2).backward()
    reductions = model.finalize_backward(async_op=True)
    meanwhile = torch.stack(losses).square().sum()
    reductions.wait()
    return torch.stack(losses).mean() + meanwhile


def after_a_failed_forward(model: Any, x: Tensor) -> Tensor:
    def fail(*args: object) -> None:
        raise FailureError

    handle = model.blocks[1].up.register_forward_pre_hook(fail)
    with contextlib.suppress(FailureError):
        model(x)
    handle.remove()
    model.reset_iter_state()
    model.zero_grad()
    return forward_backward(model, x)


def stepped_in_backward(model: Any, x: Tensor) -> Tensor:
    """Each parameter's optimizer runs as soon as its gradient is reduced."""
    if "in_backward" not in model.__dict__:
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(lambda param: param.to_local().sub_(param.grad.to_local(), alpha=0.1))
        model.in_backward = True
    with torch.enable_grad():
        return forward_backward(model, x)


def recomputed(model: Any, x: Tensor) -> Tensor:
    for block in model.blocks:
        if "plain" not in block.__dict__:
            block.plain = block.forward
            block.forward = partial(checkpoint, block.plain, use_reentrant=False)
    return forward_backward(model, x)


def beside_another(model: Any, x: Tensor, share: bool = True) -> Tensor:
    """Two stages of a pipeline on one rank: both run forward, then both backward; the second backward is the last one."""
    if "another" not in model.__dict__:
        another: Any = mlp(seed=1).to(x.device)
        for module in [*another.blocks, another]:
            torch_fsdp.fully_shard(module, mesh=init_device_mesh(x.device.type, (dist.get_world_size(),)))
        another.set_is_last_backward(not share)  # else docs/court/shared_context.py
        model.another = (another,)
        if share:
            torch_fsdp.share_comm_ctx([model, another])
    (another,) = model.another
    losses = [model(x).square().mean(), another(x).square().mean()]
    another.zero_grad()
    losses[1].backward()
    losses[0].backward()
    return losses[0].detach() + sum(param.grad.to_local().sum() for param in another.parameters())


# --- several meshes -----------------------------------------------------------------------------------------------------------------


@cache
def pairs_and_all(device: str) -> tuple[FSDPMeshInfo, FSDPMeshInfo]:
    pairs = init_device_mesh(device, (2, 2), mesh_dim_names=("rest", "pair"))["pair"]
    return FSDPMeshInfo(pairs, shard_mesh_dim=0), FSDPMeshInfo(init_device_mesh(device, (4,)), shard_mesh_dim=0)


def on_two_meshes(param: nn.Parameter) -> ShardPlacementResult:
    """Matrices over all ranks, the rest over pairs: two groups in each unit."""
    return ShardPlacementResult(Shard(0), pairs_and_all(param.device.type)[param.ndim == 2])


def turn_the_order_of_groups(model: Any) -> None:
    """After the first forward: the group that waits for earlier inputs now reduces last, as if hooks ran the other way round."""

    def turn(*args: object) -> None:
        handle.remove()
        for module in units(model):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                group._param_group_index = group._num_param_groups - 1 - group._param_group_index

    handle = model.register_forward_hook(turn)


NOT_UPSTREAMS = ("written_in_forward", "beside_another_root", "extensions", "penalty", "unshard_behind_a_step")
"""Writes between forward and backward; another root, of ours; extensions that pad; a backward through what backward has resharded;
an optimizer's event that a call of ``unshard()`` should wait for. torch's documentation promises none of them."""

SINGLE = {
    **SCENARIOS,
    **SCENARIOS_2D,
    **{name: scenario for name, scenario in MORE_SCENARIOS.items() if not name.startswith(NOT_UPSTREAMS)},
    "prefetch_toggled": Scenario(iteration=prefetch_toggled),
    "evaluated_before_backward": Scenario(iteration=evaluated_before_backward),
    "two_forwards_two_backwards": Scenario(iteration=two_forwards_two_backwards),
    "unsharded_by_hand": Scenario(iteration=unsharded_by_hand),
    "kept_over_micro_batches": Scenario(iteration=kept_over_micro_batches),
    "backward_split": Scenario(iteration=backward_split),
    "backward_split_hsdp_bf16": Scenario(iteration=backward_split, mesh=(2, 2), options=BF16_ALL),
    "finalized_by_hand": Scenario(iteration=finalized_by_hand),
    "finalized_by_hand_hsdp_bf16": Scenario(iteration=finalized_by_hand, mesh=(2, 2), options=BF16_ALL),
    "finalized_by_hand_offload": Scenario(iteration=finalized_by_hand, options=OFFLOAD),
    "failed_forward": Scenario(iteration=after_a_failed_forward),
    "failed_forward_prefetched": Scenario(iteration=after_a_failed_forward, prepare=prefetch_two_deep, options=BF16),
    "failed_backward_hsdp": Scenario(iteration=after_a_failed_backward, mesh=(2, 2), options=BF16_ALL),
    "failed_backward_offload": Scenario(iteration=after_a_failed_backward, options=OFFLOAD),
    "stepped_in_backward": Scenario(iteration=stepped_in_backward),
    "recomputed": Scenario(iteration=recomputed),
    "shared_context": Scenario(iteration=beside_another),
    "shared_context_bf16": Scenario(iteration=beside_another, options=BF16_ALL),
    "contexts_apart": Scenario(iteration=partial(beside_another, share=False)),
    "input_buffers": Scenario(prepare=four_input_buffers),
    "input_buffers_micro_batches_bf16": Scenario(prepare=four_input_buffers, iteration=in_two_micro_batches, options=BF16_ALL),
    "hsdp_partial_bf16": Scenario(mesh=(2, 2), iteration=in_partly_reduced_micro_batches, options=BF16_ALL),
    "hsdp_hook_bf16": Scenario(mesh=(2, 2), prepare=double_in_a_hook, options=BF16_ALL),
    "hook_on_torchs_stream": Scenario(prepare=double_in_a_hook),
    "hook_on_torchs_stream_bf16": Scenario(prepare=double_in_a_hook, options=BF16_ALL),
    "hsdp_offload": Scenario(mesh=(2, 2), options=OFFLOAD),
    "hsdp_offload_bf16": Scenario(mesh=(2, 2), options={**BF16_ALL, **OFFLOAD}, iteration=in_two_micro_batches),
    "reshard_to_two": Scenario(options={"reshard_after_forward": 2}),
    "own_comms": Scenario(prepare=communicate_by_own_means),
    "reduce_group": Scenario(prepare=reduce_in_a_group_of_its_own),
    "gather_on_the_current_stream": Scenario(prepare=gather_on_the_current_stream),
    "kept_after_backward": Scenario(prepare=keep_after_backward),
    "divided_bf16": Scenario(prepare=divide_by_three, options=BF16_ALL),
    "meshes": Scenario(options={"shard_placement_fn": on_two_meshes}),
    "meshes_turned": Scenario(options={"shard_placement_fn": on_two_meshes}, prepare=turn_the_order_of_groups),
    "meshes_turned_bf16": Scenario(
        options={"shard_placement_fn": on_two_meshes, **BF16_ALL}, prepare=turn_the_order_of_groups, iteration=in_two_micro_batches
    ),
}

FOUND = {
    "all_reduce_hook_bf16": "all_reduce_hook",
    "hook_on_torchs_stream_bf16": "all_reduce_hook",
    "forward_on_a_side_stream": "forward_on_a_stream",
    "forward_on_a_side_stream_bf16": "forward_on_a_stream",
    "offload_evaluation": "offloaded_parameters",
    "replicated_written_on_a_side_stream": "optimizer_event",
    "unshard_on_a_side_stream": "unshard_on_a_stream",
    "unshard_on_a_side_stream_later": "unshard_on_a_stream",
}
"""What goes wrong in some version of torch, and the program of docs/court/ that shows it alone."""

# --- random ones --------------------------------------------------------------------------------------------------------------------

MESHES: tuple[tuple[int, ...], ...] = ((), (), (), (2, 2), (4, 1))
PREPARATIONS = (
    nothing,
    prefetch_two_deep,
    four_input_buffers,
    sum_only,
    communicate_by_own_means,
    reduce_in_a_group_of_its_own,
    gather_on_the_current_stream,
    fill_unused,
    divide_by_three,
)
ITERATIONS = (
    forward_backward,
    in_two_micro_batches,
    partial(in_two_micro_batches, reduce_first=False),
    in_partly_reduced_micro_batches,
    with_an_evaluation,
    with_a_shorter_evaluation,
    prefetch_toggled,
    evaluated_before_backward,
    two_forwards_two_backwards,
    unsharded_by_hand,
    unsharded_before_backward,
    unsharded_over_the_step,
    kept_over_micro_batches,
    backward_split,
    after_a_failed_forward,
    after_a_failed_backward,
    recomputed,
    beside_another,
    written_on_a_side_stream,
)


def both(first: Callable[[Any], None], second: Callable[[Any], None], model: Any) -> None:
    first(model)
    second(model)


def draw(number: int) -> Scenario:
    """Nothing in it is a fault that docs/court/ describes."""
    chance = random.Random(number)
    mesh, iteration = chance.choice(MESHES), chance.choice(ITERATIONS)
    prepare = partial(both, *(chance.choice(PREPARATIONS) for _ in range(2)))
    if iteration is written_on_a_side_stream:
        prepare = prefetch_two_deep  # others gather where nobody promises to wait for an optimizer
    options: dict[str, Any] = {**chance.choice([{}, BF16, BF16_ALL])}
    options["reshard_after_forward"] = chance.choice([None, True, False] if mesh else [None, True, False, 2])
    if mesh == (4, 1) and iteration is written_on_a_side_stream:
        mesh = (2, 2)  # else docs/court/optimizer_event.py
    backwards_follow = iteration not in (with_an_evaluation, with_a_shorter_evaluation, unsharded_over_the_step)
    if backwards_follow and iteration is not written_on_a_side_stream and chance.random() < 0.25:
        options |= OFFLOAD  # else docs/court/offloaded_parameters.py
    if chance.random() < 0.15 and not mesh:
        options["shard_placement_fn"] = on_two_meshes
        prepare = partial(both, chance.choice([nothing, turn_the_order_of_groups]), prepare)
    elif not mesh and chance.random() < 0.15 and iteration is forward_backward and not options.keys() & {*BF16_ALL, *OFFLOAD}:
        prepare = partial(both, chance.choice([halve_in_a_hook, double_in_a_hook]), prepare)  # else docs/court/all_reduce_hook.py
    return Scenario(options, mesh, prepare, iteration, chance.choice([mlp, mlp, partly_frozen]), num_steps=2)


def on_four(scenario: Scenario) -> Scenario:
    return replace(scenario, mesh={(1, 2): (2, 2), (2, 1): (4, 1)}.get(scenario.mesh, scenario.mesh))
