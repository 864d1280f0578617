"""``fsdp2.inspect`` for modules of torch's own FSDP2, by the private names of its states (torch 2.11 to 2.15).

Events come from the methods of torch's groups, which tell when they gather and reduce, and from hooks on the modules. They go to the
log that ours go to; hooks are there while somebody reads it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from ..core.comm import collective_log
from ..core.comm.streams import streams_of
from ..core.group.param import Owner
from ..torch_names import torch_name, torch_tensors
from .views import Group, Kind, Parameter, Unit, storages_of

_STATE: Any = torch_name("torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState")
_GROUP: Any = torch_name("torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup")
_ALL_STATES: Any = torch_name("torch.distributed._composable_state._module_state_mapping", {})
_get_module_state = torch_name("torch.distributed._composable_state._get_module_state", lambda module: None)
# If gone, torch's own modules are not inspected.


def state_of(module: nn.Module) -> Any:
    """The state that torch's own ``fully_shard`` has put on a module, or None."""
    state = _get_module_state(module)
    return state if isinstance(state, _STATE) else None


def living_states() -> list[Any]:
    """torch's states in this process, each once."""
    found = (reference() for reference in list(_ALL_STATES.values()))
    return list(dict.fromkeys(state for state in found if isinstance(state, _STATE)))


def root_of(state: Any) -> nn.Module:
    """The module whose forward begins its steps; before the first one, the outermost that is sharded."""
    if state._state_ctx.all_states:
        root: nn.Module = state._state_ctx.all_states[0]._modules[0]
        return root
    around: list[nn.Module] = [each._modules[0] for each in living_states() if state._modules[0] in set(each._modules[0].modules())]
    return max(around, key=lambda module: len(list(module.modules())))


def known(tensors: Iterable[Tensor]) -> dict[int, tuple[Any, Any]]:
    """The parameters, and their states, of those that are one: sharded, unsharded, or the original, to which torch gives a number."""
    everything = parameters()
    numbers = {getattr(param, "_orig_param_uid", None): (param, state) for param, state in everything.values()}
    numbers.pop(None, None)
    found = {id(each): everything.get(id(each), numbers.get(getattr(each, "_fsdp_orig_uid", None))) for each in tensors}
    return {key: each for key, each in found.items() if each is not None}


def parameters() -> dict[int, tuple[Any, Any]]:
    """Each living parameter and its state, by the ids of the sharded and of the unsharded parameter."""
    shown = [
        (each, param, state)
        for state in living_states()
        for group in _groups_of(state)
        for param in group.fsdp_params
        for each in (param.sharded_param, getattr(param, "_unsharded_param", None))
    ]
    return {id(each): (param, state) for each, param, state in shown if each is not None}


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


_event_names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def _event_name(state: Any) -> str:
    """Its name from its root, which a root's first forward settles."""
    if state in _event_names:
        return _event_names[state]
    names = {each: name or "the root" for name, each in states(root_of(state))}
    if state._is_root is not None:
        _event_names.update(names)
    return names.get(state, "a module that its root has lost")


def _unit(name: str, state: Any, prefixes: dict[int, str]) -> Unit:
    groups = _groups_of(state)
    return Unit(
        name=name,
        event_name=lambda: _event_name(state),
        made_by="torch's FSDP2",
        modules=state._modules,
        groups=[_group(name, group, state._mp_policy, prefixes) for group in groups],
        borrowed=(),
        mp_policy=state._mp_policy,
        reshard_after_forward=_resharded_over(state, groups),
        is_kept_as_root=bool(state._auto_reshard_after_forward),
        reduces=lambda: all(group.reduce_grads for group in groups),
        all_reduces=lambda: all(group.all_reduce_grads for group in groups),
        reshards=lambda: all(group.reshard_after_backward for group in groups),
        accumulates=lambda: not all(group.reduce_grads and group.all_reduce_grads for group in groups),
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
        params=[parameter(param, prefixes) for param in group.fsdp_params],
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


def groups_of_process() -> list[Group]:
    """All living groups but those of a rehearsal, which have no memory."""
    found = [(state, group) for state in living_states() for group in _groups_of(state)]
    return [
        _group("", group, state._mp_policy, {})
        for state, group in found
        if not any(isinstance(param._sharded_param_data, torch_tensors.FakeTensor) for param in group.fsdp_params)
    ]


def parameter(param: Any, prefixes: Mapping[int, str]) -> Parameter:
    info, mesh = param._module_info, param.mesh_info
    places = [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]
    num_shards = None if mesh.shard_mesh_dim is None else mesh.shard_mesh_size
    dim = None if num_shards is None else param.fsdp_placement.dim

    def piece_of(whole: Tensor) -> Tensor:
        if dim is None or num_shards is None:
            return whole
        chunks, rank = whole.chunk(num_shards, dim), mesh.shard_mesh_rank
        return chunks[rank] if rank < len(chunks) else whole.narrow(dim, 0, 0)

    return Parameter(
        fqn=prefixes[id(info.module)] + info.param_name if id(info.module) in prefixes else param._param_fqn or info.param_name,
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


def is_group(owner: object) -> bool:
    return isinstance(owner, _GROUP)


def buffers(group: Any) -> Iterator[tuple[int, torch.UntypedStorage]]:
    """What it has allocated: (0, of unsharded parameters), (1, of all-gathers), (2, of reductions, which all groups share)."""
    shared = group.comm_ctx  # before the first forward it has none
    results = [group._all_gather_result, getattr(getattr(shared, "all_gather_state", None), "all_gather_result", None)]
    states = getattr(shared, "reduce_scatter_states", None) or [getattr(shared, "reduce_scatter_state", None)]  # torch 2.11
    reduced = [each.reduce_scatter_input for each in states if each is not None]
    yield from ((0, storage) for param in group.fsdp_params for each in param.all_gather_outputs for storage in storages_of(each))
    yield from ((1, storage) for each in results if each is not None for storage in storages_of(each.all_gather_output))
    yield from ((2, storage) for each in reduced if each is not None for storage in storages_of(each))


# --- events -------------------------------------------------------------------------------------------------------------------------


_undo = ExitStack()
_HOOKS = "_fsdp2_hooks"
"""The attribute of a state that ends what it tells; the state owns it, so that both die with the model."""


def hear() -> None:
    """Tell the log of every unit in this process, of those made later from their first forward on, until ``ignore``."""
    usual = _STATE._lazy_init
    if not getattr(usual, "_hears", False):

        @functools.wraps(usual)
        def lazy_init(state: Any) -> None:
            is_new = state._is_root is None and _HOOKS not in vars(state)
            usual(state)
            if is_new:
                _hear_living()
                _tell("enter", "forward", _event_name(state))  # torch has listed the hooks of this forward already

        lazy_init._hears = True  # type: ignore[attr-defined]
        _STATE._lazy_init = lazy_init
        _undo.callback(setattr, _STATE, "_lazy_init", usual)
    _hear_living()


def ignore() -> None:
    """End ``hear``."""
    _undo.close()
    for state in living_states():
        vars(state).pop(_HOOKS, lambda: None)()


def _hear_living() -> None:
    for state in living_states():
        if _HOOKS not in vars(state):
            setattr(state, _HOOKS, _hooks_on(state))


def _tell(method: str, *told: str) -> None:
    log = collective_log.current
    if log is not None and not torch.compiler.is_compiling():  # a graph has no place for what a listener does
        getattr(log, method)(*told)


def _hooks_on(state: Any) -> Callable[[], None]:
    with ExitStack() as undo:

        def begin(phase: str, *_: Any) -> None:
            _tell("enter", phase, _event_name(state))

        def resume(*_: Any) -> None:
            _tell("resume")

        def end(phase: str, *_: Any) -> None:
            _tell("exit", phase, _event_name(state))
            _tell("resume")
            if phase == "forward" and state._is_root:
                _tell("leave")

        for module in state._modules:
            undo.callback(module.register_forward_pre_hook(functools.partial(begin, "forward"), prepend=True).remove)
            undo.callback(module.register_forward_pre_hook(resume).remove)
            undo.callback(module.register_forward_hook(functools.partial(end, "forward")).remove)
        for group in _groups_of(state):
            events = _GroupEvents(group, state)
            for method, before, after in (
                ("unshard", events.gathers, None),
                ("wait_for_unshard", events.waits, events.gathered),
                ("pre_backward", functools.partial(begin, "backward"), resume),
                ("post_backward", events.reduces, functools.partial(end, "backward")),
                ("finalize_backward", None, events.reduced),
            ):
                undo.callback(_around(group, method, before, after))
        undo.callback(_around(state, "_root_post_backward_final_callback", after=functools.partial(_tell, "leave")))
        return undo.pop_all().close


class _GroupEvents:
    """Says when one of torch's groups gathers and reduces."""

    def __init__(self, group: Any, state: Any) -> None:
        self._group, self._policy, self._state = group, state._mp_policy, state

    def gathers(self) -> None:
        group = self._group
        skips = not group.unshard_in_backward and group._training_state.name == "PRE_BACKWARD"
        if group._all_gather_result is None and not group.is_unsharded and not skips and group.mesh_info.shard_mesh_dim is not None:
            self._begin("all-gather", self._policy.param_dtype, group._all_gather_process_group)

    def waits(self) -> None:
        if collective_log.current is not None:
            collective_log.current.waits(self._group, "all-gather")

    def gathered(self) -> None:
        self._done("all-gather")

    def reduces(self) -> None:
        group = self._group
        if group.reduce_grads and any(
            _leaf_grad(each) is not None or each.unsharded_accumulated_grad is not None for each in group.fsdp_params
        ):
            info, dtype = group.mesh_info, self._policy.reduce_dtype or self._policy.param_dtype
            if info.shard_mesh_dim is not None:
                self._begin("reduce-scatter", dtype, group._reduce_scatter_process_group)
            if info.replicate_mesh_dim is not None and group.all_reduce_grads:
                self._begin("all-reduce", dtype, group._all_reduce_process_group)

    def reduced(self) -> None:
        for kind in ("reduce-scatter", "all-reduce"):
            if collective_log.current is not None:
                collective_log.current.waits(self._group, kind)
            self._done(kind)

    def _begin(self, kind: str, dtype: torch.dtype | None, over: Any) -> None:
        log, params = collective_log.current, self._group.fsdp_params
        if log is None or over.size() == 1:
            return
        cuts = self._group.mesh_info.shard_mesh_size if self._group.mesh_info.shard_mesh_dim is not None else 1
        numel = sum(param.padded_sharded_param_size.numel() for param in params) * (1 if kind == "all-reduce" else cuts)
        log.issued(self._group, kind, _event_name(self._state), numel, dtype or params[0].sharded_param.dtype, over)

    def _done(self, kind: str) -> None:
        if collective_log.current is not None:
            streams = streams_of(self._group.device)
            collective_log.current.done(self._group, kind, streams, streams.compute)


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
