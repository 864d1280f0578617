"""Programs with a planted fault, each of which ``fsdp2 doctor`` finds and names; healthy ones, in which it finds nothing.

Each program is a function that a rank runs as ``fsdp2 doctor`` runs a script; those that hang, or abort, are scripts of
test_command.py.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2.doctor.patient import Patient
from harness import cpu_mesh, on_ranks
from harness.models import mlp, transformer

Program = Callable[[], object]
NUM_STEPS = 5  # more than the doctor asks for: it ends a program after three
fully_shard: Any = fsdp2.fully_shard
parallelize: Any = fsdp2.parallelize


def torchs_parallelize(model: nn.Module, strategy: str) -> Any:
    """What torch's ``fully_shard`` has for ``strategy``; it shards optimizer states and gradients together."""
    if strategy in ("ddp", "zero1"):
        return torchs_fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("copies", "shards")))
    return torchs_fully_shard(model, mesh=cpu_mesh(), reshard_after_forward=strategy != "zero2")


@contextlib.contextmanager
def on_torchs_fsdp2() -> Iterator[None]:
    """Inside, the programs call torch's functions."""
    names = globals()
    names.update(fully_shard=torchs_fully_shard, parallelize=torchs_parallelize)
    try:
        yield
    finally:
        names.update(fully_shard=fsdp2.fully_shard, parallelize=fsdp2.parallelize)


def sharded(model: nn.Module, **options: Any) -> Any:
    for block in getattr(model, "blocks", ()):
        fully_shard(block, **{"mesh": cpu_mesh(), **options})
    return fully_shard(model, **{"mesh": cpu_mesh(), **options})


def stack(*layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 12), *layers, nn.Linear(12, 5))


def batches(same: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets, other ones on each rank."""
    generator = torch.Generator().manual_seed(3 if same else 3 + dist.get_rank())
    for _ in range(NUM_STEPS):
        yield torch.randn(4, 7, generator=generator), torch.randn(4, 5, generator=generator)


def adamw(model: nn.Module, **options: Any) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), **options)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x).float(), y)


def train(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor] = loss_of,
    before: Callable[[], object] = lambda: None,
    after: Callable[[Tensor], object] = lambda loss: None,
    data: Iterator[tuple[Tensor, Tensor]] | None = None,
    clears: bool = True,
) -> None:
    """before, after: the optimizer's step"""
    torch.manual_seed(11 + dist.get_rank())
    for x, y in data or batches():
        value = loss(model, x, y)
        value.backward()
        before()
        optimizer.step()
        if clears:
            optimizer.zero_grad()
        after(value.detach())


# --- faults ---


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5))
        self.register_buffer("table", torch.ones(5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.table


def deferred(values: dict[str, Tensor]) -> Any:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(7, 5), Rotary())
    sharded(model).to_empty(device="cpu")
    for name, param in model.named_parameters():
        if name in values:
            param.data.copy_(distribute_tensor(values[name], param.device_mesh, param.placements))
    return model


def buffer_that_nobody_writes() -> None:
    model = deferred({"0.weight": torch.randn(5, 7), "0.bias": torch.zeros(5), "1.weight": torch.ones(5)})
    train(model, adamw(model))


def parameter_that_nobody_writes() -> None:
    model = deferred({"0.weight": torch.randn(5, 7), "1.weight": torch.ones(5)})
    model[1].table.fill_(1.0)
    train(model, adamw(model))


def language(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    tokens = (x[:, :5] * 3).long() % 11
    return model(tokens).float().square().mean() + 0 * y.sum()


def tie_cut_after_sharding() -> None:
    model = sharded(transformer(tied=True))
    model.head.weight = nn.Parameter(model.embedding.weight.detach().clone())
    train(model, torch.optim.SGD(model.parameters(), 0.1), loss=language)


def tie_cut_by_loading() -> None:
    model = transformer(tied=True)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    train(sharded(model), adamw(model), loss=language)


def tie_copied() -> None:
    model = transformer(tied=False)
    model.head.weight = nn.Parameter(model.embedding.weight.detach().clone())
    train(sharded(model), adamw(model), loss=language)


def replicas_that_begin_differently() -> None:
    torch.manual_seed(dist.get_rank())
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(nn.Linear(7, 5), mesh=mesh)
    train(model, adamw(model))


def buffers_that_differ() -> None:
    model = stack()
    model.register_buffer("scale", torch.full((), float(dist.get_rank())))
    train(sharded(model), adamw(model))


def optimizer_with_dead_parameters() -> None:
    model = sharded(stack())
    train(model, torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(3))], 0.1))


def optimizer_without_the_head() -> None:
    model = sharded(stack())
    train(model, adamw(model[0]))


def root_forgotten() -> None:
    warnings.simplefilter("ignore")  # fsdp2 warns of it as well, once in a process, which would end the script here
    model = mlp()
    for block in model.blocks:
        fully_shard(block, mesh=cpu_mesh())
    train(model, adamw(model))


def all_in_bfloat16() -> None:
    model = sharded(stack().bfloat16())
    train(model, adamw(model), loss=lambda model, x, y: loss_of(model, x.bfloat16(), y))


def wide_norm_cast_down() -> None:
    model = stack(nn.LayerNorm(12))
    model[0].bfloat16()
    model[2].bfloat16()
    fully_shard(model, mesh=cpu_mesh(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    train(model, adamw(model), loss=lambda model, x, y: loss_of(model, x.bfloat16(), y))


def root_without_policy() -> None:
    model = mlp()
    for block in model.blocks:
        fully_shard(block, mesh=cpu_mesh(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32))
    train(fully_shard(model, mesh=cpu_mesh()), adamw(model))


def clipped_by_local_norms() -> None:
    model = sharded(stack())

    def clip() -> None:
        grads = [param.grad.to_local() for param in model.parameters()]
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        for grad in grads:
            grad.mul_(0.01 / norm)

    train(model, adamw(model), before=clip)


def clipped_after_the_step() -> None:
    model = sharded(stack())
    optimizer = adamw(model)

    def clip(_: Tensor) -> None:
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.zero_grad()

    train(model, optimizer, after=clip, clears=False)


def clipped_by_an_empty_generator() -> None:
    model = sharded(stack())
    params = model.parameters()
    optimizer = torch.optim.AdamW(params)
    warnings.simplefilter("ignore")  # torch's own, of the empty generator
    train(model, optimizer, before=lambda: clip_grad_norm_(params, 1.0))


def micro_batches(
    switch: Callable[[Any, bool], object], last: bool = True, divisor: int = 2, clears: bool = False, **options: Any
) -> Program:
    def program() -> None:
        model = sharded(mlp(), **options)
        optimizer = adamw(model)
        torch.manual_seed(11 + dist.get_rank())
        for x, y in batches():
            for index in range(2):
                switch(model, last and index == 1)
                if clears:
                    optimizer.zero_grad()
                (loss_of(model, x[index::2], y[index::2]) / divisor).backward()
            optimizer.step()
            optimizer.zero_grad()

    return program


def no_switch(model: Any, last: bool) -> None:
    pass


def accumulated(divisor: int, clears: bool = True) -> Program:
    """By ``fsdp2.accumulate``, which in zero3 reduces each micro-batch."""

    def program() -> None:
        model = sharded(mlp())
        optimizer = adamw(model)
        torch.manual_seed(11 + dist.get_rank())
        for x, y in batches():
            for index in range(2):
                with accumulate(model, index == 1):
                    (loss_of(model, x[index::2], y[index::2]) / divisor).backward()
            optimizer.step()
            if clears:
                optimizer.zero_grad()

    return program


def accumulate(model: Any, last: bool) -> contextlib.AbstractContextManager[None]:
    if fully_shard is fsdp2.fully_shard:
        return fsdp2.accumulate(model, last=last)
    model.set_requires_gradient_sync(last)
    return contextlib.nullcontext()


def replicas_in_micro_batches(divisor: int) -> Program:
    def program() -> None:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        micro_batches(lambda model, last: model.set_requires_all_reduce(last), divisor=divisor, mesh=mesh)()

    return program


def mean_of_each_rank() -> None:
    model = sharded(stack())
    train(model, adamw(model), loss=lambda model, x, y: F.mse_loss(model(x[dist.get_rank() :]), y[dist.get_rank() :]))


def sum_over_ranks() -> None:
    model = sharded(stack())
    model.set_gradient_divide_factor(1.0)
    train(model, adamw(model))


def block_with_another_divisor() -> None:
    model = sharded(mlp())
    model.blocks[1].set_gradient_divide_factor(1.0)
    train(model, adamw(model))


def gradient_cleared_on_one_rank() -> None:
    model = sharded(stack())

    def clear() -> None:
        if dist.get_rank() == 1:
            model[1].weight.grad = None

    train(model, adamw(model), before=clear)


def stepped_again() -> None:
    model = sharded(stack())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train(model, optimizer, before=optimizer.step)


def axes_in_the_other_order() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", "replicate"))
    model = sharded(stack(), mesh=mesh)
    train(model, adamw(model))


def loss_in_bfloat16() -> None:
    model = sharded(stack(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    train(model, adamw(model), loss=lambda model, x, y: F.cross_entropy(model(x), y.argmax(1)))


def penalty_on_shards() -> None:
    model = sharded(mlp())
    train(model, adamw(model), loss=lambda model, x, y: model.last.weight.to_local().square().sum() + loss_of(model, x, y))


def same_data() -> None:
    model = sharded(stack())
    train(model, adamw(model), data=batches(same=True))


def same_data_with_dropout() -> None:
    model = sharded(stack(nn.Dropout(0.5)))
    train(model, adamw(model), data=batches(same=True))


def block_that_never_runs() -> None:
    model = stack()
    model.add_module("unused", nn.Linear(12, 12))
    model.forward = lambda x: model[1](model[0](x))  # type: ignore[method-assign]
    train(sharded(model), adamw(model))


def nan_in_every_step() -> None:
    model = sharded(stack())
    train(model, adamw(model), loss=lambda model, x, y: (loss_of(model, x, y) - 1e9).log())


def nan_gradients() -> None:
    """Of a loss that is a number: the slope of a root at zero, times zero."""
    model = sharded(stack())
    train(model, adamw(model), loss=lambda model, x, y: (0 * model(x)).square().sum().sqrt())


def no_target_counts() -> None:
    model = sharded(stack())
    ignored = torch.full((4,), -100)
    train(model, adamw(model), loss=lambda model, x, y: F.cross_entropy(model(x), ignored))


def loss_of_zero() -> None:
    model = sharded(stack())
    train(model, adamw(model), loss=lambda model, x, y: 0.0 * loss_of(model, x, y))


def plateau_on_a_local_loss() -> None:
    model = sharded(stack())
    optimizer = adamw(model)
    scheduler = ReduceLROnPlateau(optimizer, patience=5)
    train(model, optimizer, after=lambda loss: scheduler.step(loss.item()))


def learning_rate_of_each_rank() -> None:
    model = sharded(stack())
    train(model, adamw(model, lr=1e-3 * (1 + dist.get_rank())))


def float16_without_a_scaler() -> None:
    model = sharded(stack(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16))
    train(model, adamw(model))


def zero_grad_forgotten() -> None:
    model = sharded(stack())
    train(model, adamw(model), clears=False)


def eval_mode_left_on() -> None:
    model = sharded(stack(nn.Dropout(0.1)))
    model.eval()
    train(model, adamw(model))


def two_optimizers() -> None:
    model = sharded(stack())
    second = torch.optim.SGD(model.parameters(), 0.1)
    train(model, adamw(model), before=second.step)


def reduced_again(strategy: str, divided: bool) -> Program:
    def program() -> None:
        torch.manual_seed(0)
        model = parallelize(nn.Linear(7, 6), strategy)  # cut evenly: pieces of other sizes would abort

        def reduce() -> None:
            for param in model.parameters():
                grad = param.grad.to_local() if hasattr(param.grad, "to_local") else param.grad
                if grad.numel():
                    dist.all_reduce(grad)
                    grad.div_(dist.get_world_size() if divided else 1)

        train(model, adamw(model), loss=lambda model, x, y: model(x).square().mean(), before=reduce)

    return program


def learning_rate_zero() -> None:
    model = sharded(stack())
    train(model, adamw(model, lr=0.0))


def learning_rate_zero_by_a_schedule() -> None:
    model = sharded(stack())
    optimizer = adamw(model)
    scheduler = LambdaLR(optimizer, lambda step: max(0, step - 1000))
    train(model, optimizer, after=lambda _: scheduler.step())


def all_frozen() -> None:
    model = sharded(stack().requires_grad_(False))
    train(model, adamw(model))


def all_frozen_but_the_input() -> None:
    model = sharded(stack().requires_grad_(False))
    train(model, adamw(model), loss=lambda model, x, y: loss_of(model, x.requires_grad_(), y))


def same_dropout_on_all_ranks() -> None:
    model = sharded(stack(nn.Dropout(0.5)))
    optimizer = adamw(model)
    torch.manual_seed(0)
    for x, y in batches():
        loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()


FAULTS: list[tuple[Program, str]] = [  # the name of its check, and of what follows from it
    (buffer_that_nobody_writes, "uninitialized not-finite"),
    (parameter_that_nobody_writes, "uninitialized not-finite"),
    (tie_cut_after_sharding, "cut-tie"),
    (tie_cut_by_loading, "cut-tie"),
    (tie_copied, "cut-tie"),
    (replicas_that_begin_differently, "replicas-differ"),
    (buffers_that_differ, "buffers-differ"),
    (optimizer_with_dead_parameters, "optimizer-has-dead-parameters"),
    (optimizer_without_the_head, "optimizer-misses-parameters"),
    (root_forgotten, "never-averaged"),
    (all_in_bfloat16, "pure-low-precision"),
    (wide_norm_cast_down, "wide-parameters-cast-down pure-low-precision"),
    (root_without_policy, "root-without-policy"),
    (clipped_by_local_norms, "clip-on-local-shards"),
    (clipped_after_the_step, "clip-without-effect"),
    (clipped_by_an_empty_generator, "clip-without-effect"),
    (micro_batches(lambda model, last: model.blocks[1].set_requires_gradient_sync(last)), "accumulation-switch-on-a-part"),
    (micro_batches(lambda model, last: model.set_requires_all_reduce(last)), "accumulation-switch-without-effect"),
    (micro_batches(lambda model, last: model.set_requires_gradient_sync(last), last=False), "step-before-reduction"),
    (penalty_on_shards, "used-outside-forward"),
    (same_data, "same-data-on-every-rank"),
    (same_data_with_dropout, "same-data-on-every-rank"),
    (block_that_never_runs, "gradient-never-came"),
    (nan_in_every_step, "not-finite"),
    (nan_gradients, "not-finite"),
    (no_target_counts, "not-finite gradients-all-zero"),
    (loss_of_zero, "gradients-all-zero"),
    (plateau_on_a_local_loss, "optimizer-settings-differ"),
    (learning_rate_of_each_rank, "optimizer-settings-differ"),
    (float16_without_a_scaler, "no-loss-scaler"),
    (zero_grad_forgotten, "gradients-not-cleared"),
    (eval_mode_left_on, "eval-mode"),
    (two_optimizers, "two-optimizers"),
    (reduced_again("zero3", divided=False), "gradients-reduced-again"),
    (reduced_again("zero2", divided=True), "gradients-reduced-again"),
    (reduced_again("ddp", divided=False), "gradients-reduced-again"),
    (learning_rate_zero, "parameters-never-change"),
    (learning_rate_zero_by_a_schedule, "parameters-never-change"),
    (all_frozen, "nothing-trains"),
    (all_frozen_but_the_input, "nothing-trains"),
    (same_dropout_on_all_ranks, "same-random-numbers"),
    (micro_batches(lambda model, last: model.set_requires_gradient_sync(last), divisor=1), "gradient-scale"),
    (accumulated(divisor=1), "gradient-scale"),
    (accumulated(divisor=2, clears=False), "gradients-not-cleared"),
    (replicas_in_micro_batches(divisor=1), "gradient-scale"),
    (mean_of_each_rank, "token-weights"),
    (sum_over_ranks, "gradient-scale"),
    (block_with_another_divisor, "gradient-scale"),
    (micro_batches(no_switch, clears=True), "gradients-dropped"),
    (gradient_cleared_on_one_rank, "gradients-on-some-ranks gradient-never-came"),
    (stepped_again, "stepped-again"),
    (axes_in_the_other_order, "mesh-axes-swapped"),
    (loss_in_bfloat16, "low-precision-loss"),
]


# --- healthy programs ---


def trains(model: Callable[[], nn.Module], **options: Any) -> Program:
    def program() -> None:
        built = model()
        train(built, adamw(built), **options)

    return program


def clipped(clip: Callable[..., object]) -> Program:
    def program() -> None:
        model = sharded(mlp())
        train(model, adamw(model), before=lambda: clip(model.parameters(), 0.1))

    return program


def evaluates(keeps_graph: bool) -> Program:
    def program() -> None:
        model = sharded(stack(nn.Dropout(0.1)))

        def evaluate(_: Tensor) -> None:
            model.eval()
            with torch.set_grad_enabled(keeps_graph):
                model(torch.randn(4, 7))
            model.train()

        train(model, adamw(model), after=evaluate)

    return program


def cleared_to_zeros() -> None:
    model = sharded(stack())
    optimizer = adamw(model)
    train(model, optimizer, after=lambda _: optimizer.zero_grad(set_to_none=False), clears=False)


def cleared_between_forward_and_backward() -> None:
    model = sharded(stack())
    optimizer = adamw(model)

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        value = loss_of(model, x, y)
        optimizer.zero_grad()
        return value

    train(model, optimizer, loss=loss, clears=False)


def schedule(rate: Callable[[int], float]) -> Program:
    def program() -> None:
        model = sharded(stack())
        optimizer = adamw(model)
        scheduler = LambdaLR(optimizer, rate)
        train(model, optimizer, after=lambda _: scheduler.step())

    return program


def plateau_on_the_mean_loss() -> None:
    model = sharded(stack())
    optimizer = adamw(model)
    scheduler = ReduceLROnPlateau(optimizer, patience=0)

    def reduce(loss: Tensor) -> None:
        dist.all_reduce(loss)
        scheduler.step(loss)

    train(model, optimizer, after=reduce)


def float16_with_a_scaler() -> None:
    model = sharded(stack(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    for x, y in batches():
        scaler.scale(loss_of(model, x, y)).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def float16_scaled_by_hand() -> None:
    model = sharded(stack(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16))

    def unscale() -> None:
        for param in model.parameters():
            param.grad.div_(128.0)

    train(model, adamw(model), loss=lambda model, x, y: 128.0 * loss_of(model, x, y), before=unscale)


def two_optimizers_of_two_parts() -> None:
    """The second steps every other time, and its gradients add up meanwhile."""
    model = sharded(stack())
    first, second = adamw(model[0]), torch.optim.SGD(model[1].parameters(), 0.1)
    torch.manual_seed(11 + dist.get_rank())
    for index, (x, y) in enumerate(batches()):
        loss_of(model, x, y).backward()
        first.step()
        first.zero_grad()
        if index % 2:
            second.step()
            second.zero_grad()


def optimizer_before_sharding() -> None:
    """Its parameters are exchanged before its first step."""
    model = stack()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train(sharded(model), optimizer)


def optimizer_that_was_built_again() -> None:
    model = sharded(stack())
    unused = torch.optim.SGD(model.parameters(), 0.1)
    train(model, adamw(model))
    del unused


def two_models() -> None:
    generator, critic = sharded(stack()), sharded(nn.Linear(5, 1))
    optimizers = adamw(generator), adamw(critic)
    torch.manual_seed(11 + dist.get_rank())
    for x, y in batches():
        (critic(y).mean() - critic(generator(x).detach()).mean()).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        (-critic(generator(x)).mean()).backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        optimizers[1].zero_grad()


def low_rank_adapter() -> None:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(7, 5).requires_grad_(False)
            self.down, self.up = nn.Linear(7, 2, bias=False), nn.Linear(2, 5, bias=False)
            nn.init.zeros_(self.up.weight)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.up(self.down(x))

    torch.manual_seed(0)
    model = sharded(Adapted())
    train(model, torch.optim.AdamW([param for param in model.parameters() if param.requires_grad]))


def teacher_that_is_a_copy() -> None:
    model = transformer(tied=True)
    teacher = sharded(copy.deepcopy(model).requires_grad_(False))
    sharded(model)

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        tokens = (x[:, :5] * 3).long() % 11
        with torch.no_grad():
            target = teacher(tokens)
        return F.mse_loss(model(tokens), target + y.mean())

    train(model, adamw(model), loss=loss)


def same_inputs_and_other_targets() -> None:
    x = torch.linspace(-1, 1, 28).view(4, 7)
    model = sharded(stack())
    train(model, adamw(model), data=((x, y) for _, y in batches()))


def in_backward() -> None:
    model = sharded(stack())
    for param in model.parameters():
        optimizer = torch.optim.SGD([param], 0.1)

        def step(param: nn.Parameter, optimizer: Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        param.register_post_accumulate_grad_hook(step)
    torch.manual_seed(11 + dist.get_rank())
    for x, y in batches():
        loss_of(model, x, y).backward()


def checkpointed(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    x = x.requires_grad_()
    return F.mse_loss(checkpoint(model, x, use_reentrant=False), y)


def noisy_gradients() -> None:
    model = sharded(stack())

    def noise() -> None:
        for param in model.parameters():
            local = param.grad.to_local()
            local.add_(torch.randn_like(local), alpha=1e-3)

    train(model, adamw(model), before=noise)


def in_bfloat16() -> nn.Module:
    return sharded(stack(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))


def with_strategy(strategy: str) -> Program:
    return trains(lambda: parallelize(stack(), strategy))


HEALTHY: list[Program] = [
    trains(lambda: sharded(mlp())),
    trains(lambda: sharded(transformer(tied=True)), loss=language),
    trains(lambda: sharded(stack(nn.Dropout(0.5)))),
    trains(in_bfloat16),
    trains(lambda: sharded(stack()), loss=checkpointed),
    with_strategy("ddp"),
    with_strategy("zero1"),
    with_strategy("zero2"),
    clipped(clip_grad_norm_),
    clipped(fsdp2.clip_grad_norm_),
    micro_batches(lambda model, last: model.set_requires_gradient_sync(last)),
    micro_batches(no_switch),
    accumulated(divisor=2),
    replicas_in_micro_batches(divisor=2),
    evaluates(keeps_graph=False),
    evaluates(keeps_graph=True),
    cleared_to_zeros,
    cleared_between_forward_and_backward,
    schedule(lambda step: step / 4),
    schedule(lambda step: 0.9**step),
    plateau_on_the_mean_loss,
    float16_with_a_scaler,
    float16_scaled_by_hand,
    two_optimizers_of_two_parts,
    optimizer_before_sharding,
    optimizer_that_was_built_again,
    two_models,
    low_rank_adapter,
    teacher_that_is_a_copy,
    same_inputs_and_other_targets,
    in_backward,
    noisy_gradients,
]


def findings_in(program: Program, folder: Path) -> tuple[set[str], str]:
    """The names of checks, on all ranks, and all that was found, in words."""
    own = folder / str(dist.get_rank())
    own.mkdir(exist_ok=True)
    patient = Patient(3, str(own))
    patient.run(program)
    said: list[Any] = [None] * dist.get_world_size()
    found = list(patient.record.findings)
    dist.all_gather_object(said, ({each.check for each in found}, "\n".join([*map(str, found), patient.record.failure])))
    return set().union(*(checks for checks, _ in said)), said[dist.get_rank()][1]


TORCHS_OWN: dict[Program, str] = {
    tie_cut_after_sharding: "optimizer-has-dead-parameters",  # torch's first forward ties them again
    wide_norm_cast_down: "pure-low-precision",  # and there torch raises: two dtypes in one group
    optimizer_before_sharding: "optimizer-before-sharding",  # fsdp2 exchanges its parameters
    sum_over_ranks: "",  # torch raises: gloo has no PREMUL_SUM
    block_with_another_divisor: "",
}
"""Programs that do something else on torch's FSDP2, and what the doctor finds there."""


def assert_found(faults: list[tuple[Program, str]], folder: Path) -> None:
    wrong = []
    for program, usual in faults:
        expected = TORCHS_OWN.get(program, usual) if fully_shard is torchs_fully_shard else usual
        checks, said = findings_in(program, folder)
        if checks != set(expected.split()):
            wrong.append(f"{program.__qualname__}: expected {expected}, found {sorted(checks)}\n{said}")
    assert not wrong, "\n".join(wrong)


def assert_nothing_found(programs: list[Program], folder: Path) -> None:
    wrong = []
    for index, program in enumerate(programs):
        checks, said = findings_in(program, folder)
        if checks or said:
            wrong.append(f"{index} {program.__qualname__}: found {sorted(checks)}\n{said}")
    assert not wrong, "\n".join(wrong)


@on_ranks(2)
def test_planted_faults_of_a_step_are_found_and_named(tmp_path):
    assert_found(FAULTS[-27::2], tmp_path)


@on_ranks(2)
def test_some_healthy_programs_have_no_finding(tmp_path):
    assert_nothing_found(HEALTHY[1::4], tmp_path)


@on_ranks(2)
def test_faults_of_programs_on_torchs_fsdp2_are_found_and_named(tmp_path):
    with on_torchs_fsdp2():
        assert_nothing_found([two_models], tmp_path)  # first: nothing of fsdp2 may have counted steps before
        assert_found([*FAULTS[9:30:5], (optimizer_before_sharding, "")], tmp_path)


@pytest.mark.full
@on_ranks(2)
def test_every_fault_is_found_in_programs_on_torchs_fsdp2_and_nothing_in_healthy_ones(tmp_path):
    with on_torchs_fsdp2():
        assert_found([*FAULTS, (optimizer_before_sharding, "")], tmp_path)
        assert_nothing_found([program for program in HEALTHY if program not in TORCHS_OWN], tmp_path)


@pytest.mark.full
@on_ranks(2)
def test_every_planted_fault_is_found_and_named(tmp_path):
    assert_found(FAULTS, tmp_path)


@pytest.mark.full
@on_ranks(2)
def test_every_healthy_program_has_no_finding(tmp_path):
    assert_nothing_found(HEALTHY, tmp_path)
