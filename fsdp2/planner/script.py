"""A training script as a workload: it runs up to the first forward of the model that it shards, as rank 0 of ranks that do not exist.

    fsdp2 plan train.py --ranks 64 --arguments "--config large.toml"

Until then the script runs as it is, on this machine's host: it builds its model there, and reads its first batch. Its calls of
``fully_shard`` and ``parallelize`` are noted instead of made. From them come the groups, the strategy and the dtypes; from the forward
the inputs; from its optimizer the class and its options. The script ends there: its loss is not seen.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ..errors import ArgumentError, short
from ..fsdp_module import FSDPModule
from ..optim import FlatOptimizer, OffloadedOptimizer, flat, offloaded
from ..policy import CPUOffloadPolicy, MixedPrecisionPolicy
from ..run import run_script
from ..wrap import by_name
from . import torch_names
from .setting import Setting
from .tiers import options_of
from .workload import Workload, next_token_loss, on_meta


class _ForwardBeginsError(BaseException):
    """The script has come to the forward of a sharded model. No Exception: scripts catch those."""

    def __init__(self, model: nn.Module, given: tuple[Any, ...]) -> None:
        self.model, self.given = model, given


def _do_nothing(*_: Any, **__: Any) -> None:
    pass


def _new_group(real: Any, ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any) -> Any:
    return real(ranks, timeout, None, *args, **kwargs)  # whichever backend: no rank of it exists


def _gather_whole(real: Any, output: Tensor, given: Tensor, *args: Any, **kwargs: Any) -> Any:
    work = real(output, given, *args, **kwargs)
    output.view(-1, given.numel()).copy_(given.reshape(1, -1))
    return work


def _gather_list(real: Any, outputs: list[Tensor], given: Tensor, *args: Any, **kwargs: Any) -> Any:
    work = real(outputs, given, *args, **kwargs)
    for each in outputs:
        each.copy_(given)
    return work


def _gather_objects(real: Any, outputs: list[Any], given: Any, *_: Any, **__: Any) -> None:
    outputs[:] = [given] * len(outputs)


_OF_EQUAL_RANKS: dict[str, Any] = {
    "new_group": _new_group,
    "all_gather_into_tensor": _gather_whole,
    "all_gather_single": _gather_whole,
    "all_gather": _gather_list,
    "all_gather_object": _gather_objects,
    "broadcast_object_list": _do_nothing,
}
"""What a collective gives where all ranks have what this one has; broadcasts and reductions leave this rank's values as they are."""


class _Calls:
    """What the script asked to be sharded, and how."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.options: list[dict[str, Any]] = []
        self.strategy: str | None = None
        self._classes: list[tuple[nn.Module, type[nn.Module]]] = []

    def fully_shard(self, module: Any, **options: Any) -> Any:
        for each in module if isinstance(module, (list, tuple)) else [module]:
            self._note(each, options)
        return module

    def parallelize(self, model: nn.Module, strategy: str = "zero3", **options: Any) -> nn.Module:
        self.strategy = strategy
        self._note(model, options)
        return model

    def _note(self, module: nn.Module, options: dict[str, Any]) -> None:
        self.modules.append(module)
        self.options.append(options)
        self._classes.append((module, type(module)))
        does_nothing = {name: _do_nothing for name in vars(FSDPModule) if not name.startswith("_") and not hasattr(nn.Module, name)}

        def call(model: nn.Module, *args: Any, **kwargs: Any) -> None:
            raise _ForwardBeginsError(model, (args, kwargs))

        module.__class__ = type(type(module).__name__, (type(module), FSDPModule), does_nothing | {"__call__": call})

    def give_classes_back(self) -> None:
        for module, made in self._classes:
            module.__class__ = made


def of_script(path: str, arguments: list[str], setting: Setting) -> tuple[Workload, Setting]:
    """The script's model and inputs, and ``setting`` with what the script says: groups, strategy, dtypes, optimizer, batch.

    Raises: ArgumentError if the script ends, or fails, before it runs forward of a model that it has sharded as a whole
    """
    calls = _Calls()
    try:
        with _in_its_place(setting, calls):
            run_script(path, arguments)
        reason = "it ended"
    except _ForwardBeginsError as forward:
        calls.give_classes_back()
        return _workload(Path(path).stem, forward), _setting(calls, forward, setting)
    except (Exception, SystemExit) as error:
        reason = f"it raised {type(error).__name__}: {short(str(error))}"
    raise ArgumentError(
        f"{path} did not run forward of a model that it shards: {reason}",
        expected="a script that calls fully_shard or parallelize on its model, and runs it, where torch.cuda.is_available() is False",
        fix="pass package.module:function instead, a function that returns the model, and --inputs",
    )


@contextlib.contextmanager
def _in_its_place(setting: Setting, calls: _Calls) -> Iterator[None]:
    """Inside, this process is rank 0 of the ranks of ``setting``, and sharding is noted in ``calls``."""
    ranks = str(setting.world_size)
    local = str(min(setting.world_size, setting.ranks_per_host))
    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": local, "CUDA_VISIBLE_DEVICES": ""}
    ours = importlib.import_module("fsdp2")
    replaced: list[tuple[Any, str, Any]] = [(dist, "init_process_group", _do_nothing), (dist, "destroy_process_group", _do_nothing)]
    replaced += [
        (dist, name, partial(stand_in, getattr(dist, name))) for name, stand_in in _OF_EQUAL_RANKS.items() if hasattr(dist, name)
    ]
    replaced += [(module, "fully_shard", calls.fully_shard) for module in (ours, torch_fsdp)]
    replaced += [(ours, "parallelize", calls.parallelize), (ours, "accumulate", lambda *_, **__: contextlib.nullcontext())]
    before = dict(os.environ), sys.argv, sys.path
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch_names.world_of_its_own("fake", setting.world_size))
        for owner, name, stand_in in replaced:
            stack.enter_context(torch_names.replaced(owner, name, stand_in))
        os.environ.update(environment)
        sys.path = [*sys.path]
        try:
            yield
        finally:
            environ, sys.argv, sys.path = before
            os.environ.clear()
            os.environ.update(environ)


def _workload(name: str, forward: _ForwardBeginsError) -> Workload:
    def like(given: Any) -> Any:
        if not isinstance(given, Tensor):
            return given
        values = given.detach()
        is_constant = values.numel() > 0 and bool((values == values.flatten()[0]).all())
        return tuple(values.shape), values.dtype, values.flatten()[0].item() if is_constant else 0

    described = tree_map(like, forward.given)  # a mask of ones stays one

    def inputs(batch: int, sequence: int) -> tuple[Any, ...]:
        made: tuple[Any, ...] = tree_map(_made, described, is_leaf=_is_description)
        return made

    def loss(output: Any, given: tuple[Any, ...]) -> Tensor:
        own = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
        if isinstance(own, Tensor):
            return own
        words = [each for each in tree_leaves(given) if isinstance(each, Tensor) and each.ndim == 2 and not each.is_floating_point()]
        return next_token_loss(output, (words[0] if words else None,))

    return Workload(name, lambda: on_meta(forward.model), inputs, loss, call=lambda model, given: model(*given[0], **given[1]))


def _is_description(given: Any) -> bool:
    return isinstance(given, tuple) and len(given) == 3 and isinstance(given[1], torch.dtype)


def _made(given: Any) -> Any:
    return torch.full(given[0], given[2], dtype=given[1], device=torch.get_default_device()) if _is_description(given) else given


def _setting(calls: _Calls, forward: _ForwardBeginsError, setting: Setting) -> Setting:
    names = {module: name for name, module in forward.model.named_modules()}
    outside = [type(module).__name__ for module in calls.modules if module not in names]
    if outside:
        raise ArgumentError(
            f"the script runs {type(forward.model).__name__} first, and shards {len(outside)} modules outside of it: {short(outside)}",
            expected="forward of one model whose root is sharded as well",
            fix="call fully_shard on the model after its blocks, or pass package.module:function",
        )
    last = calls.options[-1]
    policy = last.get("mp_policy") or MixedPrecisionPolicy()
    mesh = last.get("mesh")
    if mesh is not None and mesh.size() != setting.world_size:
        raise ArgumentError(
            f"the script shards over {mesh.size()} of {setting.world_size} ranks",
            expected="data parallelism alone, over all ranks",
            fix=f"fsdp2 plan with --ranks {mesh.size()}, and without the script's tensor or pipeline parallelism",
        )
    is_hybrid = mesh is not None and mesh.ndim == 2
    keeps = all(options.get("reshard_after_forward") is False for options in calls.options)
    strategy: Any = calls.strategy or ("hsdp" if is_hybrid else "zero2" if keeps else "zero3")
    blocks = "|".join(re.escape(names[module]) for module in calls.modules if names[module])
    first = next((each for each in tree_leaves(forward.given) if isinstance(each, Tensor) and each.ndim), None)
    return replace(
        setting,
        strategy=strategy,
        shard_size=mesh.size(1) if is_hybrid and mesh is not None else last.get("shard_size", setting.shard_size),
        wrap=last.get("wrap", "auto") if calls.strategy else by_name(f"({blocks})$") if blocks else None,
        param_dtype=policy.param_dtype,
        reduce_dtype=policy.reduce_dtype,
        optimizer=_optimizer_of(forward.model) or setting.optimizer,
        batch=setting.batch if first is None else first.shape[0],
        sequence=first.shape[1] if first is not None and first.ndim > 1 else 1,
        offload=setting.offload or isinstance(last.get("offload_policy"), CPUOffloadPolicy),
    )


def _optimizer_of(model: nn.Module) -> Any:
    """A function that makes an optimizer like the script's: its class and options, one group for all parameters. None: it has none."""
    params = set(model.parameters())
    for made in [each for each in gc.get_objects() if issubclass(type(each), torch.optim.Optimizer)]:
        if not params.isdisjoint(param for group in made.param_groups for param in group["params"]):
            optimizer_class: Any = type(made)
            if isinstance(made, OffloadedOptimizer):
                return partial(offloaded, made.optimizer_class, policy=made.policy, **options_of(made))
            if isinstance(made, FlatOptimizer):
                return partial(flat, made.optimizer_class, **options_of(made))
            return partial(optimizer_class, **options_of(made))
    return None
