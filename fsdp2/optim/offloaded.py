"""A flat optimizer that steps on the host, run by run, and has its states there, in memory or in files.

The parameters may be on a device, or on the host as well.

Source: ZeRO-Offload (Ren et al. 2021), section 4; ZeRO-Infinity (Rajbhandari et al. 2021), section 5.1.1; the fraction is
ZeRO-Offload++'s twin flow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..core.comm.agreement import agree_on_meshes, tell_later
from ..core.comm.streams import streams_of
from ..core.group.param import as_sharded
from ..core.iteration.module_state import group_with, sharded_parameters
from ..errors import ArgumentError, FSDPError
from ..mapped_file import check_disk_policy
from ..policy import CPUOffloadPolicy, DiskOffloadPolicy, TorchCPUOffloadPolicy
from ..sharding_arguments import checked_bool
from .arguments import checked_class, listed_params, result_of
from .flat import FlatOptimizer, State, state_of
from .host_runs import HostRun, HostStates
from .in_backward import BackwardSteps, in_turn
from .runs import Run
from .torch_names import step_unheard

_ALL_FIRST = "no clipping and no loss scaling: they need all gradients before the first step"
_FIX = "leave step_in_backward out of offloaded(...), or the clipping and scaling"


def offloaded(
    optimizer_class: type[Optimizer],
    params: nn.Module | Iterable[Tensor] | Iterable[dict[str, Any]],
    policy: CPUOffloadPolicy | DiskOffloadPolicy,
    *,
    fraction: float = 1.0,
    step_in_backward: bool = False,
    **options: Any,
) -> OffloadedOptimizer:
    """As ``flat``, with the states of parameters at the place that ``policy`` names; every value is the ordinary optimizer's.

    policy:     CPUOffloadPolicy: in host memory; DiskOffloadPolicy: in files. The optimizer steps on the host, the parameters stay
                where ``fully_shard`` has put them
    fraction:   of the elements, those whose states are there; the others' stay next to their parameters. The units are chosen whose
                gradients backward has first: the last ones of the model
    step_in_backward: step each of these runs while backward computes others, and let its gradients leave the device. Nobody sees all
                gradients then: clipping, loss scaling, and several backwards before a step are refused; and each backward is a step, by
                the options that groups had when it began. The first step is taken after its backward
    Memory:     on the host, in addition to the states, the gradients and parameters of two runs that are on their way; with files, of
                the states those of 1 + 2 ``read_ahead`` runs. A run is a group's parameters of one kind at most
    Collective: yes, over the meshes of the parameters: all ranks go on or raise. Its ``step`` is not
    Raises:     as ``flat``; ArgumentError for a folder that takes no files; FSDPError if the disk has no room or does not write, where
                ranks next agree: in the backward after the step. The step was not taken as a whole then

    Example:
        optimizer = fsdp2.optim.offloaded(torch.optim.AdamW, model, fsdp2.DiskOffloadPolicy(folder))
        model(x).sum().backward()
        optimizer.step()
    """
    checked_class("offloaded", optimizer_class)
    listed = listed_params("offloaded", params)
    step_in_backward = checked_bool("offloaded", "step_in_backward", step_in_backward)
    problem: FSDPError | None = None
    try:
        check_policy(policy)
        _check_fraction(fraction)
    except FSDPError as error:
        problem = error
    agree_on_meshes(_meshes_of(listed), problem)
    return OffloadedOptimizer(optimizer_class, listed, policy, fraction, step_in_backward, options)


def check_policy(policy: Any) -> None:
    """Raises: ArgumentError if it is no such policy, or has values that cannot work."""
    if not isinstance(policy, (TorchCPUOffloadPolicy, DiskOffloadPolicy)):
        raise ArgumentError(
            f"offloaded got policy={policy!r}",
            expected="a CPUOffloadPolicy or a DiskOffloadPolicy",
            fix='offloaded(AdamW, model, DiskOffloadPolicy("/scratch"))',
        )
    if isinstance(policy, DiskOffloadPolicy):
        check_disk_policy(policy)


def _check_fraction(fraction: Any) -> None:
    if not isinstance(fraction, (int, float)) or not 0 <= fraction <= 1:
        raise ArgumentError(f"offloaded got fraction={fraction!r}", expected="a number from 0 to 1", fix="pass another fraction")


def _meshes_of(listed: list[Any]) -> list[Any]:
    """The meshes of the sharded parameters among an optimizer's arguments."""
    groups = [each["params"] if isinstance(each, dict) else [each] for each in listed]
    tensors = [tensor for group in groups for tensor in ([group] if isinstance(group, Tensor) else group)]
    params = as_sharded([tensor[1] if isinstance(tensor, tuple) else tensor for tensor in tensors])
    known = sharded_parameters()  # their meshes have process groups; one of a DTensor may be an equal one of an earlier world
    return list(dict.fromkeys(known[id(param)][1].mesh.mesh for param in params if id(param) in known))


class OffloadedOptimizer(FlatOptimizer):
    """What ``offloaded`` returns: a ``FlatOptimizer`` that steps on the host for the parameters whose states are there."""

    _steps_at_once = False

    def __init__(
        self,
        optimizer_class: type[Optimizer],
        params: list[Any],
        policy: CPUOffloadPolicy | DiskOffloadPolicy,
        fraction: float,
        step_in_backward: bool,
        options: Mapping[str, Any],
    ) -> None:
        self._keep_by(policy, fraction, step_in_backward)
        super().__init__(optimizer_class, params, options)
        self._watch()

    def _keep_by(self, policy: CPUOffloadPolicy | DiskOffloadPolicy, fraction: float, step_in_backward: bool) -> None:
        self._in_backward = BackwardSteps(self._begin_backward, self._step_one) if step_in_backward else None
        self.policy = policy
        self.fraction = fraction
        self.states = HostStates(policy)
        self._host_runs: dict[Tensor, HostRun] = {}  # by the data of a run, in the order of their turns
        self._stepper: Optimizer | None = None  # of the class, which is given one run after another
        self._options_of: dict[Tensor, dict[str, Any]] = {}  # by the data of a run, when this step began
        self._is_given = False  # what is loaded was not cast to the dtypes of parameters
        self._after: dict[int, dict[str, Any]] = {}  # options of groups, by index, as the steps of their runs in backward left them

    @property
    def steps_in_backward(self) -> bool:
        return self._in_backward is not None

    @property
    def host_runs(self) -> list[HostRun]:
        """The runs whose states are on the host or in files, since the first step."""
        return list(self._host_runs.values())

    def _made_of(self) -> tuple[Any, ...]:
        return *super()._made_of(), (self.policy, self.fraction, self._in_backward is not None)

    def _begin(self, optimizer_class: type[Optimizer], options: dict[str, Any], block: int, kept_by: Any = None) -> None:
        super()._begin(optimizer_class, options, block)
        if kept_by is not None:  # those of the optimizer that this one is a copy of
            self._keep_by(*kept_by)

    def __repr__(self) -> str:
        return f"Offloaded{self._class.__name__}" + super().__repr__().removeprefix(f"Flat{self._class.__name__}")

    def step(self, closure: Callable[[], Any] | None = None, *, max_norm: float | None = None, norm_type: float = 2.0) -> Any:
        """As ``FlatOptimizer.step``. Raises: ArgumentError for ``max_norm`` if it steps in backward"""
        steps = self._in_backward
        if steps is None:
            return self._take_step(closure, max_norm, norm_type)
        if max_norm is not None:
            raise ArgumentError(f"step got max_norm={max_norm}, of an optimizer that steps in backward", expected=_ALL_FIRST, fix=_FIX)
        loss = result_of(closure)
        try:
            self._take_over_steps()
        except FSDPError as error:
            self._tell(error)
        else:
            steps.refuse_changed()
            self._take_step()
        steps.end()
        steps.is_armed = bool(steps.order)
        return loss

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """GradScaler reads this before it lets an optimizer step."""
        if self._in_backward is None:
            return False
        raise ArgumentError("a GradScaler scales the loss of an optimizer that steps in backward", expected=_ALL_FIRST, fix=_FIX)

    def _step(self, inner: Optimizer) -> None:
        """The runs whose states stayed in one step of the inner optimizer, the others one by one; but for what backward has stepped."""
        self._choose(inner)
        self._note_options()
        group_of = {run.data: index for index, runs in enumerate(self._runs) for run in runs}
        turns = [run for run in self._host_runs.values() if run.data.grad is not None]
        self._look_ahead(turns, 0)  # alongside the step of the others
        self._step_others(inner)
        try:
            for position, run in enumerate(turns):
                self._look_ahead(turns, position)
                self._after[group_of[run.data]] = self._step_one(run)
                inner.state[run.data] = run.state
            self.states.files.wait()
        except FSDPError as error:
            self._tell(error)
        for index, options in self._after.items():
            inner.param_groups[index].update(options)
        self._after = {}
        _order_behind(turns)

    def _tell(self, problem: FSDPError) -> None:
        """The disk of this rank has failed: raise if it is alone, else at the next agreement, for the others know nothing of it."""
        if not any(len(group.mesh.ranks) > 1 for group, _ in self._flats):
            raise problem
        tell_later(problem)

    def _look_ahead(self, turns: list[HostRun], position: int) -> None:
        for run in turns[position : position + 1 + self.states.ahead]:
            self.states.ask_for(run)
        for run in turns[position : position + 2]:
            run.send()

    def _step_others(self, inner: Optimizer) -> None:
        """Step the runs whose states stayed next to their parameters."""
        groups = inner.param_groups
        inner.param_groups = [
            {**group, "params": [data for data in group["params"] if data not in self._host_runs]} for group in groups
        ]
        try:
            step_unheard(inner)
        finally:
            for group, stepped in zip(groups, inner.param_groups, strict=True):
                group.update({key: value for key, value in stepped.items() if key != "params"})
            inner.param_groups = groups

    def _step_one(self, run: HostRun) -> dict[str, Any]:
        """Step a run that was sent. Returns: the options of its group as the optimizer left them"""
        if self._stepper is None:
            self._stepper = self._class([torch.zeros(1, device="cpu")], **self._options)
        after = run.step(self._stepper, self._options_of[run.data])
        self.states.put_back(run)
        return after

    def _note_options(self) -> None:
        """Note the options of this step: a step of one run must not change them for the next."""
        names = ("params", "param_names")
        before = [{key: value for key, value in group.items() if key not in names} for group in self.param_groups]
        self._options_of = {run.data: options for options, runs in zip(before, self._runs, strict=True) for run in runs}

    # --- in backward ---

    @FlatOptimizer.state.getter  # type: ignore[attr-defined, untyped-decorator]
    def state(self) -> defaultdict[Tensor, State]:
        """As ``FlatOptimizer.state``, after the steps that backward has begun."""
        self._take_over_steps()
        return super().state

    def _take_over_steps(self) -> None:
        """Wait for what backward has stepped."""
        done = [] if self._in_backward is None else self._in_backward.wait()
        if not done:
            return
        assert self._inner is not None
        group_of = {run.data: index for index, runs in enumerate(self._runs) for run in runs}
        for run, options in done:
            self._inner.state[run.data] = run.state
            self._after[group_of[run.data]] = options
        _order_behind([run for run, _ in done])
        self.states.files.wait()
        self._shown = None  # it was of a step before

    def _watch(self) -> None:
        if self._in_backward is not None:
            self._in_backward.watch(as_sharded(self._params()))

    def _begin_backward(self) -> list[tuple[Run, HostRun]]:
        """The first gradient since the last step has arrived: the runs that are stepped on the host."""
        self._current()
        self._shown = None  # a step begins
        self._note_options()
        runs = {run.data: run for runs in self._runs for run in runs}
        return [(runs[data], run) for data, run in self._host_runs.items()]

    # --- which runs ---

    def _choose(self, inner: Optimizer) -> None:
        """The runs whose states are offloaded; those that were cut since get files of their own."""
        known, self._host_runs = self._host_runs, {}
        runs = in_turn([run for runs in self._runs for run in runs], {} if self._in_backward is None else self._in_backward.order)
        left = self.fraction * sum(run.data.numel() for run in runs)
        pin_memory = getattr(self.policy, "pin_memory", True)
        for run in runs:
            if left <= 0:
                break
            left -= run.data.numel()
            found = known.get(run.data)
            if found is None:
                sharded = run.pieces[0].sharded
                found = HostRun(run, inner.state.get(run.data, {}), pin_memory)
                found.param_file = None if sharded is None else group_with(sharded).file
                found.move_state()  # which may be that of a run that was cut
            self._host_runs[run.data] = found
        for run in runs:
            if run.data in known and run.data not in self._host_runs:  # it was chosen before the order of gradients was known
                inner.state[run.data] = known[run.data].state_at(run.data.device)

    def _rebuild(self, state: Mapping[Tensor, dict[str, Any]]) -> None:
        super()._rebuild(state)
        self._is_given = False
        self._watch()

    @torch.no_grad()
    def _take_states(self, inner: Optimizer, state: Mapping[Tensor, State]) -> None:
        """Of one run after another: each is where it is kept before the next one is made."""
        self._host_runs.clear()
        self._choose(inner)
        try:
            for run in (run for runs in self._runs for run in runs):
                host = self._host_runs.get(run.data)
                device = run.data.device if host is None else torch.device("cpu")
                values = state_of(run, state, device, self._is_given)
                if values:
                    inner.state[run.data] = values
                if values and host is not None:
                    host.state = values
                    self.states.put_back(host)
            self.states.files.wait()
        except FSDPError as error:
            self._tell(error)

    # --- what is loaded ---

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As any optimizer's; the states go straight to where they are kept, run by run.

        Memory: in addition to ``state_dict``, the states of one run where its parameters are or on the host, and those in files that
                are not written yet. Parameters on the meta device have no place: then the first step does it.
        """
        handle = self.register_load_state_dict_pre_hook(_as_given)  # after the user's
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        if not any(param.is_meta for param in self._params()):
            self._current()

    def __setstate__(self, state: dict[str, Any]) -> None:
        states = state.get("state", {})
        given = {
            param: {key: each.value for key, each in values.items() if isinstance(each, _Given)} for param, values in states.items()
        }
        self._is_given = any(given.values())
        if "state" in state:
            state = {**state, "state": {param: {**values, **given[param]} for param, values in states.items()}}
        super().__setstate__(state)


@dataclass(frozen=True)
class _Given:
    """A tensor that ``load_state_dict`` of torch does not copy to the device of the parameter, as it does with all that it sees."""

    value: Tensor


def _as_given(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    states = {
        number: {key: _Given(value) if isinstance(value, Tensor) and value.dim() > 0 else value for key, value in values.items()}
        for number, values in state_dict["state"].items()
    }
    return {**state_dict, "state": states}


def _order_behind(runs: Sequence[HostRun]) -> None:
    """Let devices go on after the copies back of ``runs``, which were stepped."""
    for device in {run.data.device for run in runs}:
        streams = streams_of(device)
        streams.order(streams.compute, streams.mark(streams.offload))
    for run in runs:
        run.let_go()
