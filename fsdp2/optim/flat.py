"""An element-wise optimizer that steps on the flat shards of groups: no DTensor is dispatched, and a few kernels serve many parameters.

The user's optimizer is an ordinary one: its groups hold the sharded parameters, its state has a DTensor for each. An inner optimizer
of the class that was asked for has the runs (``runs.py``) in their place, and its state is where the numbers are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..clip import clip_coefficient, scale, total_norm
from ..core.group.param_group import ParamGroup
from ..core.iteration.module_state import sharded_parameters
from ..errors import ArgumentError, meta_error
from ..joined_gradients import forget_padding
from ..torch_names import torch_dtensors, torch_tensors
from .arguments import checked_class, listed_params, result_of
from .block_states import is_quantized, quantized, values_of
from .elementwise import check_elementwise
from .runs import Piece, Run, is_elementwise, runs_of
from .torch_names import can_divide_gradients, have_equal_values, step_dividing_gradients, step_unheard

State = dict[str, Any]


def flat(
    optimizer_class: type[Optimizer], params: nn.Module | Iterable[Tensor] | Iterable[dict[str, Any]], **options: Any
) -> FlatOptimizer:
    """An optimizer of ``optimizer_class`` for sharded parameters that steps on flat shards; every value is the ordinary one's.

    One that quantizes its states in blocks has the flat shards laid out anew: no block has elements of two parameters.

    optimizer_class: element-wise: SGD, Adam, AdamW, Adagrad, RMSprop, NAdam, ..., or one of yours
    params:          a model, or what any optimizer takes: parameters, names with parameters, or groups of them with options
    options:         those of ``optimizer_class``
    Collective:      no, nor is its ``step``
    Raises:          ArgumentError if an update of ``optimizer_class`` mixes elements, or draws random numbers, or
                     if it refuses ``options``; for what is no class of optimizers, or no parameters

    Example:
        optimizer = fsdp2.optim.flat(torch.optim.AdamW, model, lr=1e-3)
        model(x).sum().backward()
        optimizer.step(max_norm=1.0)  # clips and steps
        optimizer.grad_norm
    """
    checked_class("flat", optimizer_class)
    return FlatOptimizer(optimizer_class, listed_params("flat", params), options)


class FlatOptimizer(Optimizer):
    """What ``flat`` returns. Schedulers, scalers, ``zero_grad``, closures and state dicts work as with an ``optimizer_class``."""

    _steps_at_once = True  # ``_step`` is a step of the inner optimizer, of all runs

    def __init__(self, optimizer_class: type[Optimizer], params: list[Any], options: Mapping[str, Any]) -> None:
        tried = check_elementwise(optimizer_class, options, _device_of(params))
        self._begin(optimizer_class, dict(options), tried.block)
        if self._block > 1 and not self._steps_at_once:
            raise ArgumentError(
                f"{optimizer_class.__name__} quantizes its states in blocks of {self._block} elements",
                expected="an optimizer whose states are ordinary tensors, which can lie in files",
                fix="fsdp2.optim.flat, whose states stay in memory",
            )
        super().__init__(params, tried.defaults)

    def _begin(self, optimizer_class: type[Optimizer], options: dict[str, Any], block: int) -> None:
        self._class = optimizer_class
        self._options = options
        self._block = block
        self._inner: Optimizer | None = None
        self._runs: list[list[Run]] = []
        self._flats: list[tuple[ParamGroup, Tensor | None]] = []
        self._listed: list[list[Tensor]] = []  # by group, the parameters that the runs were cut from
        self._shown: defaultdict[Tensor, State] | None = None
        self._loaded: defaultdict[Tensor, State] | None = None  # what runs take over when they are next asked for
        self.grad_norm: Tensor | None = None  # of the last step's gradients, if it clipped them
        self._values: dict[Run, State] = {}  # of each run whose state is shown: the user sees views of these
        self._removed: dict[Tensor, State] = {}  # of parameters that are in no group any more, for a user who puts them back

    @property
    def optimizer_class(self) -> type[Optimizer]:
        """What computes the steps."""
        return self._class

    @property
    def options(self) -> dict[str, Any]:
        """Those that ``optimizer_class`` was given."""
        return dict(self._options)

    def _made_of(self) -> tuple[Any, ...]:
        return self._class, self._options, self._block

    def __repr__(self) -> str:
        return f"Flat{self._class.__name__}" + super().__repr__().removeprefix(type(self).__name__)

    # --- a step ---

    def step(self, closure: Callable[[], Any] | None = None, *, max_norm: float | None = None, norm_type: float = 2.0) -> Any:
        """One step of the optimizer, after ``closure`` if there is one; returns its result.

        max_norm:   to which the gradients of all parameters of this optimizer are clipped before, as by ``clip_grad_norm_``, and
                    ``grad_norm`` is what their norm was. Fused kernels clip while they step; for others it is a product for each run.
        Collective: with ``max_norm``, as ``clip_grad_norm_``; no without
        """
        return self._take_step(closure, max_norm, norm_type)

    def _take_step(self, closure: Callable[[], Any] | None = None, max_norm: float | None = None, norm_type: float = 2.0) -> Any:
        """A step. No hook of optimizers hears it, as they hear ``step``: a subclass calls this, so that they hear its ``step`` once."""
        loss = result_of(closure)
        inner = self._current()
        for index, runs in enumerate(self._runs):
            have_some = [run for run in runs if not run.take_gradients()]
            if have_some:
                parts = {run: self._cut_by_gradients(inner, index, run) for run in have_some}
                self._runs[index] = [part for run in runs for part in parts.get(run, [run])]
                inner.param_groups[index]["params"] = [run.data for run in self._runs[index]]
        _pass_options(self.param_groups, inner.param_groups)
        self.grad_norm = None
        if max_norm is None:
            self._step(inner)
        else:
            self._step_clipped(inner, max_norm, norm_type)
        _pass_options(inner.param_groups, self.param_groups)
        for runs in self._runs:
            for run in runs:
                run.data.grad = None
        self._shown = None
        self._values.clear()
        return loss

    @torch.no_grad()
    def _step_clipped(self, inner: Optimizer, max_norm: float, norm_type: float) -> None:
        """Collective: yes."""
        params = self._params()
        self.grad_norm, _ = total_norm([param.grad for param in params], params, float(norm_type))
        coefficient = clip_coefficient(self.grad_norm, max_norm)
        grads = [run.data.grad for runs in self._runs for run in runs if run.data.grad is not None]
        if self._steps_at_once and can_divide_gradients(inner):
            step_dividing_gradients(inner, coefficient.reciprocal())
            forget_padding(grads)  # the kernels wrote what they divided back
        else:
            scale(grads, coefficient)
            self._step(inner)
        scale([grad for runs in self._runs for run in runs for grad in run.copied_gradients()], coefficient)

    def _step(self, inner: Optimizer) -> None:
        step_unheard(inner)

    def _cut_by_gradients(self, inner: Optimizer, index: int, run: Run) -> list[Run]:
        """Runs of group ``index`` whose parameters have gradients or have none, for good: some have made more steps from now on."""

        def differs(before: Piece, piece: Piece) -> bool:
            return (before.param.grad is None) is not (piece.param.grad is None)

        state = {key: values_of(value) for key, value in inner.state.pop(run.data, {}).items()}
        found = []
        for shorter, part in run.cut(differs):
            if state:
                values = {key: _part_of(key, value, run.data, part) for key, value in state.items()}
                inner.state[shorter.data] = self._as_kept(values, index, shorter)
            shorter.take_gradients()
            found.append(shorter)
        return found

    def _current(self) -> Optimizer:
        """The inner optimizer, on the flat shards and for the parameters as they are now.

        The user may have materialized, moved or cast the model, or have edited ``param_groups``.
        """
        self._take_over_writes()
        for group, _ in self._flats:
            for param in group.params:
                param.return_to_flat()
        has_moved = any(group.flat is not flat for group, flat in self._flats)
        if self._loaded is not None or self._inner is None or has_moved or self._lists_others():
            self._rebuild(self.state)  # has what the user wrote for parameters that no run has yet, too
        assert self._inner is not None
        return self._inner

    def _lists_others(self) -> bool:
        """Whether the user's groups have other parameters than the runs; by identity, since ``==`` would compare elements."""
        now = [group["params"] for group in self.param_groups]
        if [len(params) for params in now] != [len(params) for params in self._listed]:
            return True
        return not all(all(map(is_, params, before)) for params, before in zip(now, self._listed, strict=True))

    def _rebuild(self, state: Mapping[Tensor, State]) -> None:
        """Cut runs anew, with ``state`` of the parameters."""
        known = sharded_parameters()
        listed = set(self._params())
        state = {**self._removed, **state}
        self._removed = {param: values for param, values in state.items() if values and param not in listed}
        groups = {id(group): group for param in self._params() if id(param) in known for group in [known[id(param)][1]]}
        self._flats = [(group, group.flat) for group in groups.values()]
        missing = [f"parameter {tuple(param.shape)}" for param in self._params() if param.is_meta]
        if missing:
            raise meta_error(missing, "a device")
        self._runs = [runs_of(group["params"], known, self._block) for group in self.param_groups]
        self._runs = [[part for run in runs for part in _cut_by_states(run, state)] for runs in self._runs]
        data = [[run.data for run in runs] for runs in self._runs]
        inner_groups = [{"params": each, **_options_of(group)} for each, group in zip(data, self.param_groups, strict=True)]
        inner = self._class(inner_groups or [{"params": []}], **self._options)
        inner.param_groups = inner.param_groups[: len(inner_groups)]  # an optimizer cannot begin with none
        self._take_states(inner, state)
        _pass_options(inner.param_groups, self.param_groups)  # torchao's make tensors of learning rates
        self._listed = [list(group["params"]) for group in self.param_groups]
        self._inner, self._loaded, self._shown = inner, None, None

    def _take_states(self, inner: Optimizer, state: Mapping[Tensor, State]) -> None:
        """Let ``inner`` have the ``state`` of the parameters, by run."""
        for index, runs in enumerate(self._runs):
            for run in runs:
                values = state_of(run, state, run.data.device)
                if values:
                    inner.state[run.data] = self._as_kept(values, index, run)

    def _as_kept(self, values: State, index: int, run: Run) -> State:
        """The state with ``values`` of a run in group ``index``, as the optimizer keeps it."""
        if self._block == 1:
            return values
        group = _options_of(self.param_groups[index])
        return quantized(values, run.data, lambda param: self._class([{"params": [param], **group}], **self._options))

    def _params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    # --- what others see and set ---

    @property
    def state(self) -> defaultdict[Tensor, State]:
        """The state by parameter, as with the ordinary optimizer: DTensors over the flat state, made at the first use after a step.

        The next step takes over what was written into it. A step ends what was shown before it: ask again then. That of a parameter
        which was taken out of ``param_groups`` is kept and not shown; it goes on when the parameter is put back.
        """
        if self._shown is None:
            self._shown = self._state_now()
        return self._shown

    @state.setter
    def state(self, value: Mapping[Tensor, State]) -> None:
        # One object: the next step takes over what the user writes into ``state`` before it.
        self._shown = self._loaded = value if isinstance(value, defaultdict) else defaultdict(dict, value)

    def _take_over_writes(self) -> None:
        """Writes to what ``state`` showed: those to a value for each element are in the flat state already, others are found here.

        So are those to a copy of values that are quantized.
        """
        if self._shown is None or self._loaded is not None or self._inner is None:
            return
        for run in (run for runs in self._runs for run in runs):
            now: State = self._inner.state.get(run.data) or {}
            values = self._values[run]
            if any(is_quantized(each) and not have_equal_values(values_of(each), values[key]) for key, each in now.items()):
                self.state = self._shown
                return
            for piece in run.pieces:
                shown = self._shown.get(piece.param, {})
                if shown.keys() != values.keys() or not all(_is_as_shown(key, values[key], run, piece, shown[key]) for key in shown):
                    self.state = self._shown
                    return

    def _state_now(self) -> defaultdict[Tensor, State]:
        if self._loaded is not None:
            return self._loaded
        found: defaultdict[Tensor, State] = defaultdict(dict)
        if self._inner is None:
            return found
        for run in (run for runs in self._runs for run in runs):
            state: State = self._inner.state.get(run.data) or {}
            values = self._values[run] = {key: values_of(value) for key, value in state.items()}
            for piece in run.pieces if values else ():
                found[piece.param] = {key: _shown(key, value, run, piece) for key, value in values.items()}
        return found

    def __getstate__(self) -> dict[str, Any]:
        """The state for ``copy.deepcopy`` and pickle: without runs, because a copy has other parameters."""
        state = {**self._removed, **self.state}
        return {**super().__getstate__(), "state": state, _MADE_OF: self._made_of()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """How ``load_state_dict`` ends: ``state`` by parameter, and the groups with their options; and how a copy begins."""
        if _MADE_OF in state:
            self._begin(*state[_MADE_OF])
        others = {key: value for key, value in state.items() if key not in ("state", _MADE_OF)}
        super().__setstate__(others)
        if "state" in state:
            reader: Any = object.__new__(self._class)
            vars(reader).update({key: value for key, value in vars(self).items() if not key.startswith("_")})
            reader.__setstate__({"state": state["state"], "param_groups": self.param_groups})  # adds what older ones lack
            self.state = {param: values for param, values in reader.state.items() if values}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """The state dict, as any optimizer's."""
        self._take_over_writes()
        state = self._state_now()
        super().add_param_group(param_group)
        self.state = state
        if self._block > 1:
            known = sharded_parameters()
            for param in self.param_groups[-1]["params"]:
                if id(param) in known:
                    known[id(param)][1].align_to(self._block)

    def states_of(self, params: AbstractSet[Tensor]) -> list[State]:
        """The states of ``params`` as they are kept, by run where there are runs: for a caller who moves what is in them.

        Call this before the flat shards move, and ``follow_shards`` after.
        """
        known = sharded_parameters()
        if self._inner is not None and not any(known[id(param)][1].is_parked for param in params if id(param) in known):
            self._current()
        self._take_over_writes()
        kept = [self._removed[param] for param in params if param in self._removed]
        if self._loaded is not None or self._inner is None:
            return kept + [self._loaded[param] for param in params if self._loaded is not None and param in self._loaded]
        self._shown = None  # it would be compared with what has moved
        runs = [run for runs in self._runs for run in runs if run.pieces[0].param in params]
        return kept + [self._inner.state[run.data] for run in runs if run.data in self._inner.state]

    def follow_shards(self) -> None:
        """The flat shards lie elsewhere now, laid out as before: cut the runs from them, which keep their states."""
        if self._inner is None:
            return
        for group, runs in zip(self._inner.param_groups, self._runs, strict=True):
            for run in runs:
                state = self._inner.state.pop(run.data, None)
                run.data = run.data_now()
                if state is not None:
                    self._inner.state[run.data] = state
            group["params"] = [run.data for run in runs]
        self._flats = [(group, group.flat) for group, _ in self._flats]

    def state_tensors(self) -> list[Tensor]:
        """The memory of the state, as it is kept: a tensor for each run and kind of value."""
        if self._loaded is not None or self._inner is None:
            states = list((self._loaded or {}).values())
        else:
            states = [self._inner.state.get(run.data) or {} for runs in self._runs for run in runs]
        return [value for state in states for value in state.values() if isinstance(value, Tensor) and value.dim() > 0]


_NAMES = ("params", "param_names")
_MADE_OF = "fsdp2: made of"
"""Key of a copied optimizer's state: what ``_begin`` takes."""


def _device_of(params: list[Any]) -> torch.device:
    for each in params:
        listed = each["params"] if isinstance(each, dict) else [each]
        for param in [listed] if isinstance(listed, Tensor) else listed:
            tensor = param[1] if isinstance(param, tuple) else param
            if isinstance(tensor, DTensor):
                tensor = torch_dtensors.local_tensor(tensor)
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                return tensor.device
    return torch.device("cpu")


def _options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _NAMES}


def _pass_options(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
    """Schedulers write into the user's groups, and some optimizers into their own."""
    for given, taken in zip(source, target, strict=True):
        taken.update(_options_of(given))


def _shown(key: str, value: Any, run: Run, piece: Piece) -> Any:
    if is_elementwise(key, value, run.data):
        return piece.view_of(value)
    # A number of steps for each parameter: an ordinary optimizer that loads them adds to each.
    return value.clone() if isinstance(value, Tensor) else value


def _is_as_shown(key: str, value: Any, run: Run, piece: Piece, shown: Any) -> bool:
    """Whether ``shown`` still is what ``_shown`` made of ``value``."""
    if not is_elementwise(key, value, run.data):
        return _are_equal(value, shown)
    if not isinstance(shown, Tensor) or shown.dtype is not value.dtype:
        return False
    local: Tensor = _local(shown, piece.param)
    return torch_tensors.is_same_memory(local, piece.place_in(value))


def _are_equal(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) or isinstance(other, Tensor):
        if value is other or not isinstance(value, Tensor) or not isinstance(other, Tensor):
            return value is other
        are_alike = value.device == other.device and value.dtype is other.dtype
        return are_alike and not isinstance(value, DTensor) and not isinstance(other, DTensor) and have_equal_values(value, other)
    return value is other or bool(value == other)


def _part_of(key: str, value: Any, data: Tensor, part: slice) -> Any:
    if is_elementwise(key, value, data):
        return value[part]
    return value.clone() if isinstance(value, Tensor) else value


def _cut_by_states(run: Run, state: Mapping[Tensor, State]) -> list[Run]:
    """``run``, cut where the states of neighbors cannot be one."""
    states = {piece.param: state.get(piece.param, {}) for piece in run.pieces}
    if not any(states.values()) or len(run.pieces) == 1:
        return [run]
    parts = run.cut(lambda before, piece: not _go_together(states[before.param], states[piece.param], piece.param))
    return [part for part, _ in parts]


def _go_together(one: State, other: State, param: Tensor) -> bool:
    if one.keys() != other.keys():
        return False
    for key, value in one.items():
        if is_elementwise(key, value, param) and is_elementwise(key, other[key], param):
            if value.dtype is not other[key].dtype:
                return False
        elif not _are_equal(value, other[key]):
            return False
    return True


def state_of(run: Run, state: Mapping[Tensor, State], device: torch.device | None = None, to_dtype: bool = False) -> State:
    """That of the parameters of ``run`` as one, or nothing if they have none.

    device:   where to make the entries with a value for each element; None: where they are
    to_dtype: cast these to the run's dtype, as ``load_state_dict`` of an optimizer does
    """
    first = run.pieces[0].param
    found: State = {}
    for key, value in state.get(first, {}).items():
        if not is_elementwise(key, value, first):
            found[key] = value.clone() if isinstance(value, Tensor) else value
            continue
        local = _local(value, first)
        dtype = run.data.dtype if to_dtype and local.dtype.is_floating_point else local.dtype
        if run.pieces[0].slot is None:  # it lies in no flat shard
            found[key] = local.to(device or local.device, dtype)
            continue
        buffer = torch.zeros(run.data.shape, dtype=dtype, device=device or local.device)
        for piece in run.pieces:
            piece.place_in(buffer).copy_(_local(state[piece.param][key], piece.param))
        found[key] = buffer
    return found


def _local(value: Any, param: Tensor) -> Any:
    """The local tensor of an entry of the state of ``param``, which has to be placed as ``param`` is; dequantized."""
    if not isinstance(value, DTensor):
        return values_of(value)
    if isinstance(param, DTensor) and (value.placements != param.placements or value.shape != param.shape):
        raise ArgumentError(
            f"optimizer state {tuple(value.shape)} with placements {value.placements} is of a parameter {tuple(param.shape)}"
            f" with placements {param.placements}",
            expected="state that is placed as its parameter is",
            fix="load it with torch.distributed.checkpoint, or with fsdp2.checkpoint, which place it anew",
        )
    return values_of(torch_dtensors.local_tensor(value))
