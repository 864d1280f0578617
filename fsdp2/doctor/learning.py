"""Does a step teach the model something, and each rank the same? Findings are made here; ``watching.py`` knows when."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..inspect import Group, Parameter
from .finding import Finding

ALL_ZERO = Finding(
    "gradients-all-zero",
    "error",
    "all gradients were exactly zero in two steps, on all ranks",
    "the model does not learn from its data; what changes it is weight decay alone",
    "look at the loss: does it depend on the model's output, does any target count (ignore_index), is it multiplied by zero, "
    "is it too small for float16",
)
NOT_CLEARED = Finding(
    "gradients-not-cleared",
    "warning",
    "backward adds to gradients of {count} parameters with which the optimizer has stepped already",
    "each step uses the gradients of all batches so far, so updates grow with the number of steps and use outdated values",
    "call optimizer.zero_grad() between optimizer.step() and the next backward",
)
STEPPED_TWICE = Finding(
    "two-optimizers",
    "error",
    "two optimizers step {count} parameters with the same gradients",
    "each gradient is applied twice, by two rules that undo one another's state",
    "give each parameter to one optimizer; if one was built again, drop the first, and its scheduler",
)
REDUCED_AGAIN = Finding(
    "gradients-reduced-again",
    "error",
    "torch.distributed.all_reduce runs on gradients of {count} parameters, which backward has reduced already",
    "on shards it adds up different rows of a parameter; on replicas it multiplies gradients by the number of ranks",
    "remove it: backward leaves the average over all data-parallel ranks",
)
SAME_RANDOM_NUMBERS = Finding(
    "same-random-numbers",
    "warning",
    "forward drew the same random numbers on {count} data-parallel ranks in two steps",
    "dropout drops the same elements on all ranks, and noise is the same: the batch has less of it than its size says",
    "call torch.manual_seed(seed + rank) once the model has its values; random choices that must be the same on all "
    "ranks (layers that are skipped) need a torch.Generator of their own",
)


def largest_gradients(params: Iterable[Parameter]) -> dict[Parameter, float]:
    """The largest magnitude in this rank's piece of each gradient; NaN where it has one. Waits for the device once."""
    grads = {param: grad for param in params if (grad := param.grad) is not None and grad.numel() and type(grad) is Tensor}
    found: dict[Parameter, float] = {}
    by_device: dict[torch.device, list[Parameter]] = {}
    for param, grad in grads.items():
        by_device.setdefault(grad.device, []).append(param)
    for those in by_device.values():
        largest = torch.stack([grads[param].abs().max().double() for param in those]).tolist()
        found.update(zip(those, largest, strict=True))
    return found


def not_finite(largest: Mapping[Parameter, float], is_loss: bool) -> Iterator[Finding]:
    """largest: of each gradient; is_loss: the loss is not finite either"""
    names = tuple(param.fqn for param, most in largest.items() if not most < float("inf"))
    if names or is_loss:
        yield Finding(
            "not-finite",
            "error",
            f"the optimizer steps with {'a loss that is' if is_loss else 'gradients that are'} NaN or infinite",
            "where gradients are, its step makes these parameters NaN, and all losses after it",
            "find where the loss becomes NaN (log of zero, a mean of nothing, a learning rate too high): "
            "torch.autograd.set_detect_anomaly(True) names the operator; or leave out steps whose total norm is not finite",
            names,
        )


def without_scaler(groups: Iterable[Group]) -> Iterator[Finding]:
    """Call it from an optimizer's hook, whose callers tell whether a loss scaler runs the step."""
    names = tuple(
        param.fqn
        for group in groups
        if group.param_dtype is torch.float16
        for param in group.params
        if param.sharded.requires_grad and param.sharded.grad is not None
    )
    if names and not _is_called_by_a_scaler():
        yield Finding(
            "no-loss-scaler",
            "warning",
            f"{len(names)} parameters compute in float16, and no gradient scaler runs the optimizer's step",
            "float16 has no number between 0 and 6e-8: small gradients become zero, and large ones infinite",
            "scale the loss by torch.amp.GradScaler, or compute in bfloat16, which has the range of float32",
            names,
        )


def _is_called_by_a_scaler() -> bool:
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        caller = frame.f_locals.get("self") if "self" in frame.f_code.co_varnames[:1] else None
        if any("Scaler" in each.__name__ for each in type(caller).__mro__):
            return True
    return False


def in_eval_mode(model: nn.Module) -> Finding:
    kinds = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._NormBase)
    names = tuple(name for name, module in model.named_modules() if isinstance(module, kinds))
    return Finding(
        "eval-mode",
        "warning",
        "the model trains while all of its modules are in eval mode",
        "dropout drops nothing, and BatchNorm does not learn its statistics"
        + ("" if names else "; this model has neither of torch's, so that only functions that ask module.training can differ"),
        "call model.train() before training, and again after each evaluation; from_pretrained returns models in eval mode",
        names,
    )


def never_change(names: tuple[str, ...], is_rate_zero: bool) -> Finding:
    return Finding(
        "parameters-never-change",
        "error",
        "two steps of the optimizer have changed no bit of parameters whose gradients are not zero",
        "the learning rate is 0" if is_rate_zero else "the update is smaller than what their dtype can hold, or goes somewhere else",
        "look at the learning rate that the optimizer has (optimizer.param_groups[0]['lr']) and at its scheduler"
        if is_rate_zero
        else "train fp32 parameters with MixedPrecisionPolicy(param_dtype=torch.bfloat16), and build the optimizer after fully_shard",
        names,
    )


def is_rate_zero(optimizers: Iterable[Optimizer]) -> bool:
    return all(float(group.get("lr", 1.0)) == 0.0 for optimizer in optimizers for group in optimizer.param_groups)


Settings = Mapping[str, tuple[int, str]]
"""Of each hyperparameter by name: a digest of its values in all groups, and the first group's value in words."""


def settings_of(optimizers: Iterable[Optimizer]) -> Settings:
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    found: dict[str, list[str]] = {}
    for group in groups:
        for name, value in group.items():
            plain = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
            if isinstance(plain, (int, float, str, tuple)) or plain is None:
                found.setdefault(name, []).append(repr(plain))
    return {name: (zlib.crc32(repr(values).encode()), values[0]) for name, values in found.items()}


def settings_differ(by_rank: Mapping[int, Settings]) -> Iterator[Finding]:
    """by_rank: of ranks that train the same model"""
    for name in dict.fromkeys(name for settings in by_rank.values() for name in settings):
        said = {rank: settings.get(name, (0, "nothing")) for rank, settings in by_rank.items()}
        if len({digest for digest, _ in said.values()}) > 1:
            yield _apart(f"{name} is", {rank: shown for rank, (_, shown) in said.items()}, tuple(by_rank))


def metrics_differ(by_rank: Mapping[int, float]) -> Iterator[Finding]:
    """by_rank: the metric that a ReduceLROnPlateau was given"""
    if len({repr(each) for each in by_rank.values()}) > 1:
        yield _apart("ReduceLROnPlateau was given a metric of", {rank: f"{each:.6g}" for rank, each in by_rank.items()}, tuple(by_rank))


def _apart(what: str, by_rank: Mapping[int, Hashable], ranks: tuple[int, ...]) -> Finding:
    shown = ", ".join(f"{each} on rank {rank}" for rank, each in list(by_rank.items())[:4])
    return Finding(
        "optimizer-settings-differ",
        "error",
        f"{what} {shown}",
        "ranks update their shards of one parameter by different rules, so no single rule trains the model",
        "compute what schedulers are given from values that all ranks share: all_reduce the loss before scheduler.step(loss)",
        ranks=ranks,
    )


def random_state(device: torch.device) -> int:
    """A digest of the generators from which forward draws."""
    found = zlib.crc32(bytes(torch.get_rng_state().untyped_storage()))
    asks = getattr(torch.get_device_module(device.type), "get_rng_state", None) if device.type != "cpu" else None
    return found if asks is None else zlib.crc32(bytes(asks(device).untyped_storage()), found)


def step_on_some_ranks(ranks: Iterable[int], absent: Sequence[int]) -> Finding:
    """ranks: that train one model; absent: those that have not come to an optimizer's step, and will not"""
    present = next(rank for rank in ranks if rank not in absent)
    return Finding(
        "step-on-some-ranks",
        "error",
        f"rank {present} has come to optimizer.step(), and rank{'s' if len(absent) > 1 else ''} {', '.join(map(str, absent))} "
        "will not: forward has begun again there",
        "each rank steps its own shard: without a rank's step its part of every parameter stays as it is",
        "call optimizer.step(), and clipping, on all ranks, outside of `if rank == 0:`",
        ranks=tuple(absent),
    )
