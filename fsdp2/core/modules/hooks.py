"""The hooks that ``fully_shard`` registers on the user's modules and in autograd's graph.

In each forward call of a unit, a pre-hook unshards and passes each input through a node of its own, which runs in
backward when the gradient of that input is done. A post-hook reshards and puts a hook before the node of every output,
which runs when the output's gradient has arrived (``graph_hooks.py``). Each reports a moment; the schedule decides.

Note: why nodes and not tensor hooks. A view of an input costs 3 us and no Python in backward but our hook (a custom
Function: 10 us). It exists under every transform, and autograd handles in-place changes of it. An in-place change of an
output drops a hook on the tensor, but not a hook on its *node*. If the output is a view, the change also moves it to a
new node, so the base's node gets a hook as well.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import OrderError
from ...spmd_annotations import exempt_from_typechecking
from ...torch_names import torch_autograd, torch_compiler
from ..group.param_group import ParamGroup
from ..iteration.call import GraphPart, next_moment
from ..iteration.first_forward import adopt
from ..iteration.module_state import ModuleState
from ..iteration.schedule import Schedule
from ..iteration.unit import Unit
from ..plan.model_axes import varying_axes
from .graph_hooks import (
    apart_from,
    apart_from_bottom,
    begin_backward,
    below,
    end_backward,
    find_bottoms,
    labelled,
    made_input,
    outlive_parameters,
    pass_input,
)
from .state_dicts import Loaded, Loading, Saved, Saving
from .tensors import StoredTensors, find_tensors, map_tensors, stored_tensors

_NOT_LOOKED_FOR: Any = object()

# --- hooks ------------------------------------------------------------------------------------------------------------


class UnitHooks:
    """The hooks of one unit. ``install`` registers them, ``remove`` undoes it."""

    def __init__(self, unit: ModuleState) -> None:
        self._unit = unit
        policy = unit.mp_policy
        self.input_dtype: torch.dtype | None = policy.param_dtype if policy.cast_forward_inputs else None
        self.output_dtype: torch.dtype | None = policy.output_dtype
        self.casts_back = False
        self._num_registrations = 0  # when we last looked for parameters that no unit has
        # Tensors that each module's forward leaves; found in its first with autograd, in evaluation and in training.
        self._stored: tuple[dict[int, StoredTensors | None], dict[int, StoredTensors | None]] = ({}, {})
        several = len(unit.modules) > 1
        self.pre_forward = torch_compiler.dynamo_disabled(
            self._pre_forward_of_several if several else self._pre_forward
        )
        self.post_forward = torch_compiler.dynamo_disabled(
            self._post_forward_of_several if several else self._post_forward
        )
        self.handles: list[Any] = []

    def install(self) -> None:
        exempt_from_typechecking(_OUR_OWN)
        unit = self._unit
        for module in unit.modules:  # ahead of the user's hooks
            torch_compiler.keep_hooks_outside(module)
            self.handles.append(module.register_forward_pre_hook(self.pre_forward, prepend=True, with_kwargs=True))
            self.handles.append(module.register_forward_hook(self.post_forward, always_call=True))
        if any(group.mesh.spmd is not None for group in unit.groups):
            watch_axes = torch_compiler.dynamo_disabled(self._watch_axes)
            self.handles += [module.register_forward_hook(watch_axes, with_kwargs=True) for module in unit.modules]
        for group in unit.uses:
            self.watch_state_dicts(group)

    def watch_state_dicts(self, group: ParamGroup) -> None:
        """Show the sharded parameters while the modules that own ``group``'s are saved or loaded."""
        for module in {id(owner.module): owner.module for param in group.params for owner in param.owners}.values():
            self.handles.append(module.register_state_dict_pre_hook(Saving(self._unit)))  # type: ignore[no-untyped-call]
            self.handles.append(module.register_state_dict_post_hook(Saved(self._unit)))  # type: ignore[no-untyped-call]
            self.handles.append(module.register_load_state_dict_pre_hook(Loading(self._unit)))  # type: ignore[no-untyped-call]
            self.handles.append(module.register_load_state_dict_post_hook(Loaded(self._unit)))  # type: ignore[no-untyped-call]

    def _watch_axes(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """See Note: gradients on a full SPMD mesh."""
        if torch.is_grad_enabled():
            found: list[Tensor] = []
            find_tensors((args, kwargs, output), found)
            for group in self._unit.groups:
                for tensor in found:
                    group.gradients.varying.update(varying_axes(tensor))

    def cast_inputs_to(self, dtype: torch.dtype | None, and_back: bool = False) -> None:
        """Cast floating-point inputs to ``dtype`` instead of the policy's.

        and_back: cast floating-point outputs to the dtype that the inputs had
        """
        self.input_dtype = dtype
        self.casts_back = and_back

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    @property
    def are_called_by_others(self) -> bool:
        return "end_failed_forward" in vars(self)

    @contextlib.contextmanager
    def called_by(
        self, before: Callable[..., Any], after: Callable[..., Any], failed: Callable[..., Any]
    ) -> Iterator[None]:
        """Inside, these run instead of pre-hook, post-hook and ``end_failed_forward``, their first argument."""
        own = self.pre_forward, self.post_forward
        self.pre_forward = torch_compiler.dynamo_disabled(functools.partial(before, own[0]))
        self.post_forward = torch_compiler.dynamo_disabled(functools.partial(after, own[1]))
        self.end_failed_forward = functools.partial(failed, self.end_failed_forward)  # type: ignore[method-assign]
        self.run_eagerly()
        try:
            yield
        finally:
            self.pre_forward, self.post_forward = own
            del self.end_failed_forward
            self.run_eagerly()

    # --- others' hooks in the places of ours ---

    def run_eagerly(self) -> None:
        self.use(self.pre_forward, self.post_forward)

    def use(self, *hooks: Callable[..., Any]) -> None:
        """Until ``run_eagerly``, run these in the places of ours: one before forward, one after."""
        for handle, hook in zip(self.handles, hooks * len(self._unit.modules), strict=False):  # forward's come first
            handle.hooks_dict_ref()[handle.id] = hook

    def give_place(self, hooks: Any, hook: Callable[..., Any]) -> None:
        """Let ``hook`` run in our place in ``hooks``, a module's dict of forward hooks, until ``run_eagerly``."""
        hooks[next(ours.id for ours in self.handles if ours.hooks_dict_ref() is hooks)] = hook

    # --- forward ---

    def _pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        unit = self._unit
        if unit.summoned:
            _refuse_autograd(unit)
            return args, kwargs
        schedule = unit.schedule
        if schedule is None or not schedule.settled:
            schedule = adopt(unit)
            unit.give_hints(torch_compiler.has_met_compiler(self.pre_forward))
            self._num_registrations = ModuleState.num_registrations
        elif self._num_registrations != ModuleState.num_registrations and unit is schedule.tree.root:
            unit.look_at_registered()
            self._num_registrations = ModuleState.num_registrations
        calls = unit.calls
        if calls.running:
            schedule.end_interrupted_forward()
        if schedule.forward is None and unit.device.type != "cpu":
            args, kwargs = map_tensors(functools.partial(self.to_device, schedule), (args, kwargs))
        if self.input_dtype is not None:
            if len(args) == 1 and not kwargs and type(args[0]) is Tensor:  # by far the most common
                args = (self.cast_input(args[0]),)
            else:
                args, kwargs = map_tensors(self.cast_input, (args, kwargs))
        if torch_autograd.profiler_is_on() or torch_autograd.functorch_is_active():
            with labelled("pre_forward", unit):
                schedule.begin_forward(unit)
        else:
            schedule.begin_forward(unit)
        if not torch.is_grad_enabled():
            if schedule.forward is not None and schedule.forward.log is not None:
                schedule.forward.log.enter_without_graph(unit)
            calls.running.append(None)
            return args, kwargs
        part = calls.shared
        # The engine runs nodes in reverse order of their creation: the first module's backward is the last.
        is_first = part is None or part.call.begun != -1
        if part is None or is_first:
            part = calls.begin()
        calls.running.append(part)
        if schedule.forward is not None and schedule.forward.log is not None:
            schedule.forward.log.enter(unit, part)
        levels = torch_autograd.functorch_is_active() or torch_autograd.forward_ad._current_level >= 0
        if len(args) == 1 and not kwargs and type(args[0]) is Tensor and not levels:  # by far the most common
            return (self._watched(part, args[0], is_first=is_first),) if args[0].requires_grad else args, kwargs
        return self._watch_inputs(part, args, kwargs, levels, is_first)

    def _post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        unit = self._unit
        if unit.summoned:
            return output
        others_follow = unit.calls.to_run  # modules of a list that have not run yet
        if output is None and not others_follow and torch_autograd.a_module_has_failed():
            self.end_failed_forward()
            return None
        part = unit.calls.running.pop()
        if part is not None:
            output = self._watch_outputs(part, output)
            if self._stored[module.training].get(id(module), _NOT_LOOKED_FOR) is not None:
                self._watch_stored(part, module)
        elif type(output) is not Tensor or output._base is not None:
            output = map_tensors(outlive_parameters, output)
        assert unit.schedule is not None
        end = unit.schedule.end_part if others_follow else unit.schedule.end_forward
        if torch_autograd.functorch_is_active():
            with torch_autograd.functorch_disabled():
                end(unit)
        else:
            end(unit)
        return output if self.output_dtype is None else map_tensors(self.cast_output, output)

    def end_failed_forward(self) -> None:
        """A forward of the unit's modules raised; maybe before our pre-hook had finished."""
        unit = self._unit
        unit.explain(sys.exc_info()[1])
        if unit.calls.running:
            unit.calls.running.pop()
        unit.calls.end_pass()
        if unit.schedule is not None:
            with torch_autograd.functorch_disabled():
                unit.schedule.end_failed_forward(unit)

    def _pre_forward_of_several(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        unit = self._unit
        if unit.summoned:
            return self._pre_forward(module, args, kwargs)
        calls = unit.calls
        if not calls.to_run:
            calls.to_run.update(unit.modules)
            calls.shared = None
        args, kwargs = self._pre_forward(module, args, kwargs)
        part = calls.running[-1]
        if part is not None:
            calls.shared = part
        if part is None or calls.to_rerun:
            in_backward = torch_autograd.current_graph_task() != -1
            assert unit.schedule is not None
            if in_backward or unit.schedule.precedes_backward:
                calls.note_run(module, part is not None, in_backward)
        return args, kwargs

    def _post_forward_of_several(self, module: nn.Module, args: Any, output: Any) -> Any:
        unit = self._unit
        if output is None and torch_autograd.a_module_has_failed() and torch_autograd.current_graph_task() == -1:
            self.end_failed_forward()
            return None
        calls = unit.calls
        if not calls.running:  # a recomputation raised before our pre-hook had finished
            return output
        calls.to_run.discard(module)
        if not calls.to_run:
            calls.shared = None
        return self._post_forward(module, args, output)

    def to_device(self, schedule: Schedule, tensor: Tensor) -> Tensor:
        """Move an input of the root to its parameters' device; ``schedule`` waits until the user may refill it."""
        moved = tensor.to(self._unit.device, non_blocking=True)
        if moved is not tensor and tensor.is_pinned():
            schedule.note_host_input()
        return moved

    def cast_input(self, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        if self.casts_back:
            self.output_dtype = tensor.dtype
        return tensor.to(self.input_dtype)

    def cast_output(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.output_dtype) if tensor.is_floating_point() else tensor

    # --- backward ---

    def _watch_inputs(
        self, part: GraphPart, args: tuple[Any, ...], kwargs: dict[str, Any], levels: bool, is_first: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Pass each input that needs a gradient through a node that runs in backward when that gradient is done.

        levels:   whether transforms or tangents may have wrapped the inputs: each level has its own graph
        is_first: whether the module is the first of its unit in this call; only the inputs of the first one end it
        """
        watched: dict[int, Tensor] = {}

        def watch(tensor: Tensor) -> Tensor:
            if not (tensor.requires_grad or levels):
                return tensor
            found = watched.get(id(tensor))
            if found is None:
                found = watched[id(tensor)] = self._watched(part, tensor, levels, is_first)
            return found

        return map_tensors(watch, (args, kwargs))  # type: ignore[no-any-return]

    def _watched(self, part: GraphPart, tensor: Tensor, levels: bool = False, is_first: bool = True) -> Tensor:
        view = tensor.view_as(tensor)
        for each in torch_autograd.levels_of(view) if levels else (view,):
            node = each.grad_fn
            if node is not None and not is_first:
                node.register_prehook(functools.partial(pass_input, self._unit, part.call))
            elif node is not None:
                node.register_prehook(functools.partial(end_backward, self._unit, part.call))
                part.append(node)
        return view

    def _watch_stored(self, part: GraphPart, module: nn.Module) -> None:
        """Watch the tensors that the forward of ``module`` has left on it and below it."""
        found = self._stored[module.training]
        if id(module) not in found:
            found[id(module)] = stored_tensors(module, self._stored[not module.training].get(id(module)))
        stored = found[id(module)]
        if stored is not None:
            for attributes, name, tensor in stored.new():
                attributes[name] = self._watch_outputs(part, tensor)

    def _watch_outputs(self, part: GraphPart, output: Any) -> Any:
        if type(output) is Tensor:
            found: list[Tensor] = [output]
        else:
            found = []
            find_tensors(output, found)
        levels = torch_autograd.functorch_is_active() or torch_autograd.forward_ad._current_level >= 0
        if levels:
            found = [each for tensor in found for each in torch_autograd.levels_of(tensor)]
        schedule = self._unit.schedule
        assert schedule is not None
        forward = schedule.forward
        log = None if forward is None else forward.log
        begins = forward is not None and forward.root is self._unit
        finds_bottoms = log is not None and (begins or not part) and not self._unit.calls.running and not levels
        hook = functools.partial(begin_backward, self._unit, part)
        seen: list[Any] = []
        for tensor in found:
            if not tensor.requires_grad:
                continue
            base = tensor._base
            node = tensor.grad_fn
            if (node if base is None else base.grad_fn) is None and isinstance(
                tensor if base is None else base, nn.Parameter
            ):
                return self._watch_outputs(part, map_tensors(outlive_parameters, output))
            if node in part:  # an input, passed through: its node ends the backward, so another node has to begin it
                return self._watch_outputs(part, map_tensors(functools.partial(apart_from, part), output))
            watched = [] if node is None else [node]
            if base is not None and base.grad_fn is not None and not made_input(part, base.grad_fn):
                watched.append(base.grad_fn)
            # Otherwise the call and that node would keep each other alive.
            if finds_bottoms and any(below(each) is None for each in watched):
                return self._watch_outputs(part, map_tensors(apart_from_bottom, output))
            for each in watched:
                if each not in seen:
                    seen.append(each)
                    each.register_prehook(hook)
        if seen:
            part.call.is_watched = True
            part.call.has_inputs = bool(part)
            part.call.left = next_moment()
        if finds_bottoms:
            find_bottoms(part, seen)
        return output


_OUR_OWN: list[Callable[..., Any]] = [
    adopt,
    *(each for owner in (Unit, ModuleState, Schedule) for each in vars(owner).values() if inspect.isfunction(each)),
]
"""Functions for flat buffers and shards, which no user annotates; not the hooks: their casts and nodes keep types."""


def _refuse_autograd(unit: ModuleState) -> None:
    if torch.is_grad_enabled():
        raise OrderError(
            f"forward of {unit.name} was called inside of summon_full_params, with autograd",
            expected="torch.no_grad() around it: gradients of the whole parameters would be lost",
            fix="run training steps outside of summon_full_params",
        )
