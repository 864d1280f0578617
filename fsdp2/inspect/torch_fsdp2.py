"""``fsdp2.inspect`` for modules of torch's own FSDP2, by the private names of its states (torch 2.11 to 2.15).

Events come from the methods of torch's groups, which tell when they gather and reduce, and from hooks on the modules. An all-reduce
over replicas is part of torch's reduction, not an event of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..core.group.param import Owner
from ..torch_names import torch_autograd, torch_name, torch_tensors
from .events import Listener, Record
from .views import Group, Kind, Parameter, Unit, storages_of

_get_module_state = torch_name("torch.distributed._composable_state._get_module_state", lambda module: None)
# If gone, torch's own modules are not inspected.
_TorchFSDPState = torch_name("torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState")


def state_of(module: nn.Module) -> Any:
    """The state that torch's own ``fully_shard`` has put on a module, or None."""
    state = _get_module_state(module)
    return state if isinstance(state, _TorchFSDPState) else None


def states(model: nn.Module) -> list[tuple[str, Any]]:
    """torch's states below ``model``, each once, with the name of its first module."""
    found: dict[int, tuple[str, Any]] = {}
    for name, module in model.named_modules():
        state = state_of(module)
        if state is not None:
            found.setdefault(id(state), (name, state))
    return list(found.values())


def units(model: nn.Module) -> list[Unit]:
    prefixes = {id(module): f"{name}." if name else "" for name, module in model.named_modules()}
    return [_unit(name, state, prefixes) for name, state in states(model)]


def _unit(name: str, state: Any, prefixes: dict[int, str]) -> Unit:
    groups = _groups_of(state)
    return Unit(
        name=name,
        event_name=lambda: name or "the root",
        modules=state._modules,
        groups=[_group(name, group, state._mp_policy, prefixes) for group in groups],
        borrowed=(),
        mp_policy=state._mp_policy,
        reshard_after_forward=_resharded_over(state, groups),
        is_kept_as_root=bool(state._auto_reshard_after_forward),
        reduces=lambda: all(group.reduce_grads for group in groups),
        all_reduces=lambda: all(group.all_reduce_grads for group in groups),
        on_backward_end=lambda call: _around(state, "_root_post_backward_final_callback", after=call),
    )


def _resharded_over(state: Any, groups: list[Any]) -> bool | int:
    """As the user asked for it: torch itself lets a root keep its parameters."""
    if state._auto_reshard_after_forward or not groups or groups[0].post_forward_mesh_info is groups[0].mesh_info:
        return True
    smaller = groups[0].post_forward_mesh_info
    return False if smaller is None else int(smaller.shard_mesh_size)


def _groups_of(state: Any) -> list[Any]:
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []  # torch 2.11


def _group(name: str, group: Any, policy: Any, prefixes: dict[int, str]) -> Group:
    info = group.mesh_info
    cuts, copies = info.shard_mesh_dim is not None, info.replicate_mesh_dim is not None
    num_shards = info.shard_mesh_size if cuts else 1
    dtype = group.fsdp_params[0].sharded_param.dtype
    computed = policy.param_dtype if policy.param_dtype is not None and dtype.is_floating_point else dtype
    slots = sum(param.padded_sharded_param_size.numel() for param in group.fsdp_params)
    return Group(
        name=name,
        params=[_parameter(param, prefixes, num_shards if cuts else None) for param in group.fsdp_params],
        device=group.device,
        ranks=frozenset(info.mesh.mesh.flatten().tolist()),
        num_shards=num_shards if cuts else None,
        num_replicas=info.replicate_mesh_size if copies else None,
        shard_group=info.shard_process_group if cuts else None,
        replicate_group=info.replicate_process_group if copies else None,
        dtype=dtype,
        param_dtype=computed,
        reduce_dtype=policy.reduce_dtype or (computed if torch_tensors.INSTALLED_SEMANTICS == "2.13" else dtype),
        chosen_dtype=policy.param_dtype,
        is_offloaded=group.fsdp_params[0].offload_to_cpu,
        sharded_nbytes=slots * dtype.itemsize,
        padding_nbytes=0,
        unsharded_nbytes=slots * num_shards * computed.itemsize,
        divide_factor=lambda: group.gradient_divide_factor,
        has_unreduced=lambda: any(
            param.unsharded_accumulated_grad is not None or _leaf_grad(param) is not None for param in group.fsdp_params
        ),
        memory=lambda: _memory(group),
    )


def _parameter(param: Any, prefixes: dict[int, str], num_shards: int | None) -> Parameter:
    info = param._module_info
    places = [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]
    dim = None if num_shards is None else param.fsdp_placement.dim

    def piece_of(whole: Tensor) -> Tensor:
        if dim is None or num_shards is None:
            return whole
        chunks, rank = whole.chunk(num_shards, dim), param.mesh_info.shard_mesh_rank
        return chunks[rank] if rank < len(chunks) else whole.narrow(dim, 0, 0)

    return Parameter(
        fqn=prefixes.get(id(info.module), "") + info.param_name,
        owners=[Owner(*place) for place in places],
        sharded=param.sharded_param,
        shape=tuple(param._orig_size),
        dim=dim,
        num_shards=num_shards or 1,
        unsharded=lambda: getattr(param, "_unsharded_param", None),
        piece_of=piece_of,
    )


def _leaf_grad(param: Any) -> Tensor | None:
    return getattr(getattr(param, "_unsharded_param", None), "grad", None)


def _memory(group: Any) -> Iterator[tuple[Kind, torch.UntypedStorage]]:
    for param in group.fsdp_params:
        grads = (param.sharded_param.grad, _leaf_grad(param), param.unsharded_accumulated_grad, group._partial_reduce_output)
        yield from (("parameters", storage) for storage in storages_of(param._sharded_param_data))
        smaller = getattr(param, "_sharded_post_forward_param_data", None)  # of ``reshard_after_forward=<int>``
        whole = param.all_gather_outputs if smaller is None else [*param.all_gather_outputs, smaller]
        yield from (("unsharded", storage) for each in whole for storage in storages_of(each))
        yield from (("gradients", storage) for grad in grads if grad is not None for storage in storages_of(grad))


# --- events -------------------------------------------------------------------------------------------------------------------------


@contextmanager
def heard(name: str, state: Any, listener: Listener) -> Iterator[None]:
    """Inside, ``listener`` hears of the unit ``name``."""
    unit = name or "the root"
    with ExitStack() as undo:

        def begin(phase: str, *_: Any) -> None:
            if not torch.compiler.is_compiling():  # a graph has no place for what a listener does
                listener.begins(phase, unit)

        def resume(*_: Any) -> None:
            if not torch.compiler.is_compiling():
                listener.resumes()

        def end(phase: str, *_: Any) -> None:
            if not torch.compiler.is_compiling():
                listener.ends(phase, unit)
                listener.resumes()
                if phase == "forward" and state._is_root:
                    listener.leaves()

        for module in state._modules:
            undo.callback(module.register_forward_pre_hook(functools.partial(begin, "forward"), prepend=True).remove)
            undo.callback(module.register_forward_pre_hook(resume).remove)
            undo.callback(module.register_forward_hook(functools.partial(end, "forward")).remove)
        for group in _groups_of(state):
            events = _GroupEvents(group, state._mp_policy, unit, listener)
            for method, before, after in (
                ("unshard", events.gathers, None),
                ("wait_for_unshard", events.waits, events.gathered),
                ("pre_backward", functools.partial(begin, "backward"), listener.resumes),
                ("post_backward", events.reduces, functools.partial(end, "backward")),
                ("finalize_backward", None, events.reduced),
            ):
                undo.callback(_around(group, method, before, after))
        undo.callback(_around(state, "_root_post_backward_final_callback", after=listener.leaves))
        yield


class _GroupEvents:
    """Says when one of torch's groups gathers and reduces. under_way: by kind"""

    def __init__(self, group: Any, policy: Any, unit: str, listener: Listener) -> None:
        self._group, self._policy, self._unit, self._listener = group, policy, unit, listener
        self._under_way: dict[str, Record] = {}

    def gathers(self) -> None:
        group = self._group
        skips = not group.unshard_in_backward and group._training_state.name == "PRE_BACKWARD"
        if group._all_gather_result is None and not group.is_unsharded and not skips:
            self._begin("all-gather", self._policy.param_dtype, lambda: group._all_gather_process_group)

    def waits(self) -> None:
        if "all-gather" in self._under_way:
            self._listener.waits(self._under_way["all-gather"])

    def gathered(self) -> None:
        self._end("all-gather")

    def reduces(self) -> None:
        params = self._group.fsdp_params
        if self._group.reduce_grads and any(
            _leaf_grad(each) is not None or each.unsharded_accumulated_grad is not None for each in params
        ):
            dtype = self._policy.reduce_dtype or self._policy.param_dtype
            self._begin("reduce-scatter", dtype, lambda: self._group._reduce_scatter_process_group)

    def reduced(self) -> None:
        if "reduce-scatter" in self._under_way:
            self._listener.waits(self._under_way["reduce-scatter"])
        self._end("reduce-scatter")

    def _begin(self, kind: str, dtype: torch.dtype | None, over: Callable[[], dist.ProcessGroup]) -> None:
        if self._group.mesh_info.shard_mesh_dim is None or over().size() == 1:
            return
        params, num_ranks = self._group.fsdp_params, over().size()
        phase = "backward" if torch_autograd.current_graph_task() != -1 else "forward"
        numel = self._group.mesh_info.shard_mesh_size * sum(param.padded_sharded_param_size.numel() for param in params)
        told = str(dtype or params[0].sharded_param.dtype).removeprefix("torch.")
        record = self._under_way[kind] = Record(0, over().group_name, kind, self._unit, phase, 0, numel, told)
        self._listener.issued(record, self._group, num_ranks)

    def _end(self, kind: str) -> None:
        if kind in self._under_way:
            self._listener.done(self._under_way.pop(kind))


def _around(
    owner: Any, method: str, before: Callable[[], None] | None = None, after: Callable[[], None] | None = None
) -> Callable[[], None]:
    """Call ``before`` and ``after`` around a method of one object, until the returned function is called."""
    usual, calls, had_one = getattr(owner, method), [before, after], method in vars(owner)

    @functools.wraps(usual)
    def call(*args: Any, **kwargs: Any) -> Any:
        before, after = calls
        if before is not None:
            before()
        result = usual(*args, **kwargs)
        if after is not None:
            after()
        return result

    def undo() -> None:
        calls[:] = None, None  # others may have put theirs around it
        if vars(owner).get(method) is call:
            if had_one:
                setattr(owner, method, usual)
            else:
                delattr(owner, method)

    setattr(owner, method, call)
    return undo
