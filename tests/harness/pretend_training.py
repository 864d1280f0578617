"""Ways to train on the pretend accelerator, ours or torch's FSDP2, and what came of every step, on the host."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2.testing import pretend
from harness.mesh import moved_to
from harness.models import batches, mlp
from harness.subclasses import RowInt8, RowInt8ForBoth, wrap_weights
from harness.training import Step, fed_own_chunk, forced, forward_backward, sgd

BF16 = {"mp_policy": fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
BF16_ALL = {"mp_policy": fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)}


@dataclass(frozen=True)
class Scenario:
    """One way to train. mesh: its shape, () for all ranks; private: fields of ``GroupOptions``."""

    options: dict[str, Any] = field(default_factory=dict)
    mesh: tuple[int, ...] = ()
    prepare: Callable[[Any], None] = lambda model: None
    iteration: Callable[[Any, Tensor], Tensor] = forward_backward
    model: Callable[[], nn.Module] = mlp
    private: dict[str, str] = field(default_factory=dict)
    num_steps: int = 3


def in_two_micro_batches(model: Any, x: Tensor, reduce_first: bool = True) -> Tensor:
    losses = []
    for index, rows in enumerate(x.chunk(2)):
        model.set_is_last_backward(index == 1)
        model.set_requires_gradient_sync(reduce_first or index == 1)
        losses.append(model(rows).square().mean())
        (losses[-1] / 2).backward()
    return torch.stack(losses).mean()


def in_partly_reduced_micro_batches(model: Any, x: Tensor) -> Tensor:
    losses = []
    for index, rows in enumerate(x.chunk(2)):
        model.set_is_last_backward(index == 1)
        model.set_requires_all_reduce(index == 1)
        losses.append(model(rows).square().mean())
        (losses[-1] / 2).backward()
    return torch.stack(losses).mean()


def with_an_evaluation(model: Any, x: Tensor) -> Tensor:
    loss = forward_backward(model, x)
    with torch.no_grad():
        return loss + model(x).square().mean()


def unsharded_over_the_step(model: Any, x: Tensor) -> Tensor:
    """Writes come between ``unshard(async_op=True)`` and its wait, after which what was gathered is looked at.

    Not the optimizer's alone: the collective that averages the losses before its step waits for the gather.
    """
    handle = model.__dict__.pop("handle", None)
    seen = 0.0
    if handle is not None:
        handle.wait()
        seen = model.blocks[1].up.weight.detach().sum()
    loss = forward_backward(model, x)
    model.handle = model.blocks[1].unshard(async_op=True)
    with torch.no_grad():
        for param in model.blocks[1].parameters():
            param.to_local().mul_(0.9)
    return loss.detach() + seen


def with_a_shorter_evaluation(model: Any, x: Tensor) -> Tensor:
    """It leaves out a block that was prefetched, and no backward cleans up behind it."""
    blocks = model.blocks
    loss = forward_backward(model, x)
    model.blocks = nn.ModuleList(list(blocks)[:2])
    with torch.no_grad():
        model(x)
    model.blocks = blocks
    return loss


def unsharded_on_a_side_stream(model: Any, x: Tensor) -> Tensor:
    """With other work there, whose memory is what the side stream is given back."""
    module = torch.get_device_module(x.device)
    if x.device.type == "cpu":
        return forward_backward(model, x)
    side = model.__dict__.setdefault("side", torch.Stream(x.device))
    side.wait_stream(module.current_stream())
    with module.stream(side):
        model.unshard(async_op=True)
    loss = model(x).square().mean()
    with module.stream(side):
        torch.zeros(1000, device=x.device)
    loss.backward()
    with module.stream(side):
        torch.zeros(1000, device=x.device)
    return loss


def unsharded_at_once_on_a_side_stream(model: Any, x: Tensor) -> Tensor:
    """``unshard()`` there makes the unsharded parameters, whose memory is what the side stream is given back."""
    if x.device.type == "cpu":
        return forward_backward(model, x)
    module = torch.get_device_module(x.device)
    side = model.__dict__.setdefault("side", torch.Stream(x.device))
    side.wait_stream(module.current_stream())
    with module.stream(side):
        model.unshard()
    module.current_stream().wait_stream(side)
    loss = model(x).square().mean()
    loss.backward()
    with module.stream(side):
        torch.zeros(1000, device=x.device)
    module.current_stream().wait_stream(side)  # so that the host, which reads the gradients, has the side stream run as well
    return loss


def from_the_second_step_on(iteration: Callable[[Any, Tensor], Tensor], model: Any, x: Tensor) -> Tensor:
    """The first step makes the unsharded parameters on compute."""
    if "had_a_step" in model.__dict__:
        return iteration(model, x)
    model.had_a_step = True
    return forward_backward(model, x)


def with_forward_on_a_side_stream(model: Any, x: Tensor) -> Tensor:
    """Backward is called elsewhere; autograd computes it on the side stream, which then is given back that memory."""
    if x.device.type == "cpu":
        return forward_backward(model, x)
    module = torch.get_device_module(x.device)
    side = model.__dict__.setdefault("side", torch.Stream(x.device))
    side.wait_stream(module.current_stream())
    with module.stream(side):
        loss = model(x).square().mean()
    loss.backward()
    with module.stream(side):
        for numel in (100, 300, 1000):
            torch.zeros(numel, device=x.device)
    module.current_stream().wait_stream(side)
    return loss


def beside_another_root(model: Any, x: Tensor) -> Tensor:
    """Its backward is not the last; that of a root without offload is, and afterwards the host reads the gradients of the first."""
    model.set_is_last_backward(False)
    loss = forward_backward(model, x)
    return loss + forward_backward(model.another[0], x)


def shard_another(model: Any) -> None:
    """In a tuple, so that it is no submodule."""
    device = model._get_fsdp_state().device
    another = moved_to(device.type, mlp())
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for module in [*another.blocks, another]:
        fsdp2.fully_shard(module, mesh=mesh)
    model.another = (another,)


def sum_only(model: Any) -> None:
    for module in [model, *model.blocks]:
        module.set_force_sum_reduction_for_comms(True)


def written_in_forward(model: Any, x: Tensor) -> Tensor:
    """The shards of the last block, behind its forward: backward gathers it first, with the new values.

    The block is recomputed: backward would raise for parameters that autograd has saved, as in the unsharded model.
    """
    block = model.blocks[-1]

    def write(*args: object) -> None:
        with torch.no_grad():
            for param in block.parameters():
                param.to_local().mul_(0.9)

    handle = block.register_forward_hook(write)
    block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    try:
        loss = model(x).square().mean()
        handle.remove()
        loss.backward()
    finally:
        del block.forward
    return loss


def unsharded_before_backward(model: Any, x: Tensor) -> Tensor:
    """Between forward and backward one block is unsharded, looked at, and resharded."""
    loss = model(x).square().mean()
    model.blocks[0].unshard()
    seen = model.blocks[0].up.weight.detach().sum()
    model.blocks[0].reshard()
    loss.backward()
    return loss.detach() + seen


def fed_from_pinned_memory(model: Any, x: Tensor) -> Tensor:
    """Which is refilled as soon as forward has returned."""
    if x.device.type == "cpu":
        return forward_backward(model, x)
    host = x.cpu().pin_memory()
    loss = model(host).square().mean()
    host.fill_(7)
    loss.backward()
    return loss


def written_on_a_side_stream(model: Any, x: Tensor) -> Tensor:
    """As an optimizer on a stream of its own writes, of whose end the model is told."""
    side = None if x.device.type == "cpu" else model.__dict__.setdefault("side", torch.Stream(x.device))
    if side is not None:
        side.wait_stream(torch.accelerator.current_stream())
    with torch.no_grad(), contextlib.nullcontext() if side is None else torch.get_device_module(x.device).stream(side):
        for param in model.parameters():
            param.to_local().mul_(0.9)
    if side is not None:
        model.set_post_optim_event(side.record_event())
    return forward_backward(model, x)


def unsharded_behind_a_step_on_a_side_stream(model: Any, x: Tensor) -> Tensor:
    """As an optimizer on a stream of its own writes; then parameters are unsharded by hand, and looked at."""
    loss = forward_backward(model, x).detach()
    module = None if x.device.type == "cpu" else torch.get_device_module(x.device)
    side = None if module is None else model.__dict__.setdefault("side", torch.Stream(x.device))
    for async_op in (False, True):
        if module is not None:
            side.wait_stream(module.current_stream())
        with torch.no_grad(), contextlib.nullcontext() if module is None else module.stream(side):
            for param in model.parameters():
                param.to_local().mul_(0.9)
        if side is not None:
            model.set_post_optim_event(side.record_event())
        block = model.blocks[1]
        handle = block.unshard(async_op=async_op)
        if handle is not None:
            handle.wait()
        loss += block.up.weight.detach().sum()
        block.reshard()
        if module is not None:
            module.current_stream().wait_stream(side)  # the optimizer of the test writes on this one
    return loss


def with_a_penalty_on_the_slope(model: Any, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    output = model(x)
    (slope,) = torch.autograd.grad(output.sum(), [x], create_graph=True)
    loss = output.square().mean() + slope.square().mean()
    loss.backward()
    return loss


def with_extensions() -> nn.Module:
    return wrap_weights(mlp(), RowInt8)


class Even(nn.Module):
    """Two ranks share all rows evenly, for torch's FSDP2 leaves padding to extensions; the root has no parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(7, 8), nn.Linear(8, 8), nn.Linear(8, 4)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def with_even_extensions() -> nn.Module:
    return wrap_weights(Even(), RowInt8ForBoth)


def with_a_root_of_extensions_alone() -> nn.Module:
    model = mlp()
    model.first.bias = model.last.bias = None
    return wrap_weights(model, RowInt8)


def several_dtypes() -> nn.Module:
    model = mlp()
    for block in model.blocks:
        block.scale.data = block.scale.data.bfloat16()
    return model


class FailureError(Exception):
    """Planted."""


def after_a_failed_backward(model: Any, x: Tensor) -> Tensor:
    def fail(*args: object) -> None:
        raise FailureError

    handle = model.blocks[1].down.register_full_backward_hook(fail)
    loss = model(x).square().mean()
    with contextlib.suppress(FailureError):
        loss.backward()
    handle.remove()
    model.reset_iter_state()
    model.zero_grad()
    return forward_backward(model, x)


def halve_in_a_hook(model: Any) -> None:
    for module in [model, *model.blocks]:
        device = next(module.parameters()).device
        stream = None if device.type == "cpu" else torch.Stream(device)
        module.set_all_reduce_hook(lambda grad: grad.mul_(0.5), stream=stream)


def prefetch_two_deep(model: Any) -> None:
    order = [model, *model.blocks]
    for index, module in enumerate(order):
        module.set_modules_to_forward_prefetch(order[index + 1 : index + 3])
        module.set_modules_to_backward_prefetch(order[max(index - 2, 1) : index][::-1])


def gather_three_ahead(model: Any) -> None:
    if isinstance(model, fsdp2.FSDPModule):
        model.set_prefetch_depth(3)


SCENARIOS = {
    "plain": Scenario(),
    "bf16": Scenario(options=BF16),
    "bf16_mixed": Scenario(options=BF16, private={"gather": "mixed"}),
    "evaluation": Scenario(iteration=with_an_evaluation),
    "keep_after_forward": Scenario(options={"reshard_after_forward": False}),
    "micro_batches": Scenario(iteration=in_two_micro_batches),
    "micro_batches_unreduced": Scenario(iteration=lambda model, x: in_two_micro_batches(model, x, reduce_first=False)),
    "two_deep": Scenario(prepare=prefetch_two_deep),
    "offload": Scenario(options={"offload_policy": fsdp2.CPUOffloadPolicy()}),
    "offload_bf16": Scenario(options={**BF16, "offload_policy": fsdp2.CPUOffloadPolicy()}),
}
SCENARIOS_OF_SUMS = {  # whose division follows the launch of several groups; on modeled ranks every order may be wrong alike
    "several_dtypes_summed": Scenario(model=several_dtypes, prepare=sum_only),
    "replicated_several_dtypes_summed": Scenario(model=several_dtypes, mesh=(2, 1), prepare=sum_only),
}
SCENARIOS_2D = {
    "hsdp": Scenario(mesh=(1, 2)),
    "replicated": Scenario(mesh=(2, 1)),
    "replicated_bf16": Scenario(mesh=(2, 1), options=BF16),
    "replicated_bf16_all": Scenario(mesh=(2, 1), options=BF16_ALL),
    "replicated_partial": Scenario(mesh=(2, 1), iteration=in_partly_reduced_micro_batches),
    "replicated_partial_bf16": Scenario(mesh=(2, 1), options=BF16, iteration=in_partly_reduced_micro_batches),
}
SCENARIOS_OF_DEPTH = {  # which torch's FSDP2 has not
    "depth": Scenario(prepare=gather_three_ahead),
    "depth_offload_bf16": Scenario(
        prepare=gather_three_ahead, options={**BF16, "offload_policy": fsdp2.CPUOffloadPolicy()}, private={"gather": "mixed"}
    ),
}
MORE_SCENARIOS = {  # which torch's FSDP2 does not train, or which add nothing on real ranks
    "offload_micro_batches": Scenario(options={"offload_policy": fsdp2.CPUOffloadPolicy()}, iteration=in_two_micro_batches),
    "offload_evaluation": Scenario(options={"offload_policy": fsdp2.CPUOffloadPolicy()}, iteration=with_an_evaluation),
    "hsdp_partial": Scenario(mesh=(1, 2), iteration=in_partly_reduced_micro_batches),
    "unshard_over_the_step": Scenario(iteration=unsharded_over_the_step),
    "shorter_evaluation": Scenario(iteration=with_a_shorter_evaluation),
    "unshard_on_a_side_stream": Scenario(iteration=unsharded_on_a_side_stream),
    "unshard_on_a_side_stream_later": Scenario(iteration=partial(from_the_second_step_on, unsharded_on_a_side_stream)),
    "extensions_unshard_on_a_side_stream": Scenario(model=with_extensions, iteration=unsharded_on_a_side_stream),
    "extensions_on_a_side_stream_later": Scenario(
        model=with_a_root_of_extensions_alone, iteration=partial(from_the_second_step_on, unsharded_at_once_on_a_side_stream)
    ),
    "forward_on_a_side_stream": Scenario(iteration=with_forward_on_a_side_stream),
    "forward_on_a_side_stream_bf16": Scenario(iteration=with_forward_on_a_side_stream, options=BF16),
    "beside_another_root": Scenario(
        iteration=beside_another_root, prepare=shard_another, options={"offload_policy": fsdp2.CPUOffloadPolicy()}
    ),
    "bf16_mixed_written_on_a_side_stream": Scenario(options=BF16, private={"gather": "mixed"}, iteration=written_on_a_side_stream),
    "hsdp_bf16_all_micro_batches": Scenario(mesh=(1, 2), options=BF16_ALL, iteration=in_two_micro_batches),
    "written_on_a_side_stream": Scenario(iteration=written_on_a_side_stream),
    "unshard_behind_a_step_on_a_side_stream": Scenario(iteration=unsharded_behind_a_step_on_a_side_stream),
    "replicated_bf16_unshard_on_a_side_stream": Scenario(mesh=(2, 1), options=BF16, iteration=unsharded_on_a_side_stream),
    "replicated_written_on_a_side_stream": Scenario(mesh=(2, 1), iteration=written_on_a_side_stream),
    "extensions": Scenario(model=with_extensions),
    "extensions_direct": Scenario(model=with_extensions, private={"gather": "direct"}),
    "extensions_direct_unshard_over_the_step": Scenario(
        model=with_extensions, private={"gather": "direct"}, iteration=unsharded_over_the_step
    ),
    "extensions_on_a_side_stream": Scenario(model=with_a_root_of_extensions_alone, iteration=unsharded_at_once_on_a_side_stream),
    "written_in_forward": Scenario(iteration=written_in_forward),
    "extensions_unsharded_before_backward": Scenario(model=with_extensions, iteration=unsharded_before_backward),
    "pinned_input": Scenario(iteration=fed_from_pinned_memory),
    "penalty": Scenario(iteration=with_a_penalty_on_the_slope),
    "failed_backward": Scenario(iteration=after_a_failed_backward),
    "replicated_failed_backward": Scenario(mesh=(2, 1), iteration=after_a_failed_backward),
    "replicated_micro_batches_bf16_all": Scenario(mesh=(2, 1), options=BF16_ALL, iteration=in_two_micro_batches),
    "all_reduce_hook": Scenario(prepare=halve_in_a_hook),
    "all_reduce_hook_bf16": Scenario(prepare=halve_in_a_hook, options=BF16_ALL),
}

SCENARIOS_OF_SEVERAL_GROUPS = {  # in each block
    "several_dtypes": Scenario(model=several_dtypes),
    "extensions": Scenario(model=with_extensions),
    "several_dtypes_offload": Scenario(model=several_dtypes, options={"offload_policy": fsdp2.CPUOffloadPolicy()}),
    "several_dtypes_hsdp": Scenario(model=several_dtypes, mesh=(2, 2)),
}


def train(scenario: Scenario, device_type: str, fully_shard: Any = fsdp2.fully_shard) -> list[Step]:
    """A few steps of a model on ``device_type``; what came of them, on the host."""
    shape = scenario.mesh or (dist.get_world_size(),)
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    model: Any = moved_to(device_type, scenario.model())
    options = dict(scenario.options)
    if fully_shard is torch_fsdp.fully_shard:
        translate = {"mp_policy": torch_fsdp.MixedPrecisionPolicy, "offload_policy": torch_fsdp.CPUOffloadPolicy}
        for name, torchs in translate.items():
            if name in options:
                known = {each.name: getattr(options[name], each.name) for each in fields(torchs)}
                options[name] = torchs(**known)
    with forced(**scenario.private):
        for module in [*model.blocks, model]:
            fully_shard(module, mesh=mesh, **options)
    scenario.prepare(model)
    inputs = [x.to(device_type) for x in batches(scenario.num_steps, (8, 7))]
    return on_host(fed_own_chunk(model, inputs, sgd, scenario.iteration))


def on_host(steps: list[Step]) -> list[Step]:
    def local(tensor: Tensor | None) -> Any:
        if isinstance(tensor, DTensor):
            tensor = tensor.to_local()
        return None if tensor is None else tensor.detach().cpu()

    def locals_of(tensors: dict[str, Any]) -> dict[str, Any]:
        return {name: local(tensor) for name, tensor in tensors.items()}

    return [Step(local(step.loss), locals_of(step.grads), locals_of(step.params)) for step in steps]


def train_late(seed: int | None, scenario: Scenario, **more: Any) -> list[Step]:
    pretend.set_order(seed)
    steps = train(scenario, "pretend", **more)
    pretend.synchronize()
    return steps
