"""Full-graph mode of one model: capture at the first forward, run the captured graph in later ones, and leave.

Between forwards the model is as in eager mode. During a forward its modules show stand-ins, and hooks that the compiler can
trace replace fsdp2's; the compiled graph then runs over the flat shards.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..core.comm.agreement import agree
from ..core.group.param_group import GroupState
from ..core.iteration.first_forward import adopt
from ..core.iteration.module_state import ModuleState, units_below
from ..core.iteration.schedule import Schedule
from ..core.modules.hooks import UnitHooks
from ..core.modules.tensors import find_tensors, map_tensors
from ..errors import CompileError, FSDPError, OrderError
from ..hints.unmanaged_parameters import warn_of_plain_parameters
from ..torch_names import torch_compiler, torch_tensors
from . import torch_names as compiler
from .backend import CompileOptions, compiled_graph
from .graph_summary import GraphSummary
from .refusals import causes_of, not_captured, refuse_what_graphs_lack
from .stand_ins import Face


class FullGraph:
    """The function that ``model(...)`` runs in full-graph mode (it is the model's ``_compiled_call_impl``).

    summaries: of the graphs so far, in the order in which they were compiled
    """

    def __init__(self, model: nn.Module, root: ModuleState, options: CompileOptions) -> None:
        self._model = model
        self._root = root
        self._options = options
        self._num_registrations = 0  # on managed modules, when we last looked for parameters that no unit has
        self._schedule: Schedule | None = None  # that the units were taken from
        self._units: list[ModuleState] = []
        self._faces: list[Face] = []
        self._unit_of: dict[int, ModuleState] = {}
        self._settings: Any = None
        self._agreed = False
        self._runs: dict[Any, Callable[..., Any]] = {}  # for each choice of settings and of trainable parameters
        self.summaries: list[GraphSummary] = []

    @torch_compiler.dynamo_disabled  # a compiler around the model leaves to us what we have compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Forward. Collective: yes; the first one also compares what the ranks have captured."""
        run = self._prepare()
        schedule = self._schedule
        assert schedule is not None
        schedule.await_optimizer(on_compute=True)
        if self._root.device.type != "cpu":
            args, kwargs = map_tensors(functools.partial(self._root.hooks.to_device, schedule), (args, kwargs))
        problem: CompileError | None = None
        try:
            with self._shown_to_compiler():
                output = run(*args, **kwargs)
            self._refuse_stand_ins(output)
            return output
        except compiler.compiler_errors() as error:
            own = next((each for each in causes_of(error) if isinstance(each, CompileError)), None)
            problem = own if own is not None else not_captured(self._model, error)
            problem.__cause__ = error
        except CompileError as error:
            problem = error
        finally:
            schedule.await_host_input()
        self.leave()
        self._agree(problem)
        raise problem

    def leave(self) -> None:
        """The model runs eagerly from now on."""
        self._model.__dict__.pop("_compiled_call_impl", None)

    # --- before a forward ---

    def _prepare(self) -> Callable[..., Any]:
        """The function to run, given how the model is set now."""
        schedule = self._root.schedule
        if schedule is None or not schedule.settled:
            schedule = adopt(self._root)
            warn_of_plain_parameters(self._model, schedule.tree.units)
            self._num_registrations = ModuleState.num_registrations
        elif self._num_registrations != ModuleState.num_registrations:
            warn_of_plain_parameters(self._model, [below for _, below in units_below(self._model)])
            self._num_registrations = ModuleState.num_registrations
        if self._schedule is not schedule:
            self._schedule = schedule
            self._units, self._faces = [unit for _, unit in units_below(self._model)], []
        self._refuse_units_around(schedule)
        settings = self._settings_now()
        if settings != self._settings:
            try:
                refuse_what_graphs_lack(self._units)
            except CompileError:
                self.leave()
                raise
            self._settings = settings
        for unit in self._units:
            if any(group.state is not GroupState.SHARDED for group in unit.uses):
                unit.reshard_for_all()
            unit.notice_changes()
        if not self._faces or not all(face.is_current() for face in self._faces):
            self._faces = [Face(group) for unit in self._units for group in unit.groups]
            self._unit_of = {id(group): unit for unit in self._units for group in unit.groups}
            self._runs.clear()
        for face in self._faces:
            face.follow_trainable()
        built_in = settings, tuple(face.trainable for face in self._faces)
        run = self._runs.get(built_in)
        if run is None:
            run = self._runs[built_in] = self._new_run()
        return run

    def _refuse_units_around(self, schedule: Schedule) -> None:
        if schedule.tree.root is not self._root:
            raise OrderError(
                f"{self._root.fqn} ({type(self._model).__name__}) is in full-graph mode, and a part of a larger model: "
                f"fully_shard was applied to {type(schedule.tree.root.modules[0]).__name__} around it",
                expected="full-graph mode on the root, the module whose forward runs first",
                fix="call fsdp2.uncompile on the part, and fsdp2.compile on the root",
            )

    def _settings_now(self) -> Any:
        """The settings that a graph is built for, in addition to the parameters themselves, and those that no graph supports."""
        return tuple(
            (
                unit.options.reshard_after_forward,
                unit.options.reshard_is_default,
                tuple(
                    (
                        group.gradients.options.divide_factor,
                        group.gradients.options.sum_only,
                        id(group.gradients.options.process_group),
                        (group.all_gather_comm or group.gradients.options.comm) is None,
                        (group.gradients.options.all_reduce_hook or group.gradients.options.all_reduce_instead) is None,
                        group.gradients.options.grad_dtype,
                    )
                    for group in unit.groups
                ),
            )
            for unit in self._units
        )

    def _new_run(self) -> Callable[..., Any]:
        """The model for a compiler that has compiled nothing of it."""
        call: Callable[..., Any] = self._model._call_impl

        def forward(*args: Any, **kwargs: Any) -> Any:
            output = call(*args, **kwargs)
            if any(isinstance(each, nn.Parameter) for each in torch_tensors.pytree.tree_leaves(output)):
                output = torch_tensors.pytree.tree_map_only(nn.Parameter, Tensor.clone, output)  # else the stand-in would be returned
            return output

        return compiler.uninterrupted(forward, self._backend, self._options.dynamic)

    def _refuse_stand_ins(self, output: Any) -> None:
        found: list[Tensor] = []
        find_tensors(output, found)
        if not any(isinstance(tensor, nn.Parameter) for tensor in found):
            return
        ids = {id(tensor) for tensor in found}
        names = [
            param.fqn
            for face in self._faces
            for param, stand_in in zip(face.group.params, face.stand_ins, strict=True)
            if id(stand_in) in ids
        ]
        if names:
            raise CompileError(
                f"forward of {type(self._model).__name__} returns {len(names)} parameters inside of a {type(output).__name__}",
                items=names,
                expected="parameters in outputs only inside of containers that torch.utils._pytree knows: tuples, lists, dicts, ...",
                fix="return a copy, parameter.clone(), or run this model eagerly",
            )

    @contextlib.contextmanager
    def _shown_to_compiler(self) -> Iterator[None]:
        try:
            for face in self._faces:
                face.show()
            for unit in self._units:
                unit.hooks.use(*_traced_hooks(unit.hooks))
            yield
        finally:
            for unit in self._units:
                unit.hooks.run_eagerly()
            for face in self._faces:
                face.show_sharded()

    # --- the compiler's side ---

    def _backend(self, captured: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        new, run = compiled_graph(
            captured, inputs, faces=self._faces, keeps=self._keeps, options=self._options, note=self.summaries.append
        )
        order_of_gathers = [[member.face.group.fqn or "the root" for member in bucket.members] for bucket in new.buckets]

        def call(*captured_inputs: Tensor) -> Any:
            if not self._agreed:
                self._agree(None, order_of_gathers)
            return run(*new.arguments(captured_inputs))

        return call

    def _keeps(self, face: Face) -> bool:
        unit = self._unit_of[id(face.group)]
        options = unit.options
        return options.reshard_after_forward is False or (options.reshard_is_default and unit is self._root)

    def _agree(self, problem: FSDPError | None, order_of_gathers: Any = None) -> None:
        """At the first forward: every rank has captured the same, or every rank raises.

        Collective: yes, over the data-parallel ranks, the first time.
        """
        if self._agreed:
            return
        self._agreed = True
        said = [order_of_gathers]
        meshes = {group.mesh.groups: group.mesh for unit in self._units for group in unit.groups}
        try:
            for mesh in meshes.values():
                for process_group in (mesh.shard_group, mesh.replicate_group):
                    if process_group is not None:
                        said += agree(process_group, problem, order_of_gathers)
        except FSDPError:
            self.leave()
            raise
        if any(other != order_of_gathers for other in said):
            self.leave()
            raise CompileError(
                f"{type(self._model).__name__} was captured differently on other ranks",
                items=[f"rank {rank} of a group gathers {other}" for rank, other in enumerate(said[1:])],
                expected="the same modules in the same order on every rank",
                fix="let control flow of forward not depend on the rank, or run this model eagerly",
            )


def _traced_hooks(ours: UnitHooks) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Hooks that a compiler can trace in the places of ``ours``, before and after forward: they only cast."""
    map_only = torch_tensors.pytree.tree_map_only

    def before_forward(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():  # no compiler runs: stand-ins have no memory
            raise CompileError(
                "the compiler did not compile forward",
                expected="torch.compile to be on: no TORCH_COMPILE_DISABLE, no torch.compiler.set_stance that skips it",
                fix="switch it on, or call fsdp2.uncompile(model)",
            )
        return None if ours.input_dtype is None else map_only(Tensor, ours.cast_input, (args, kwargs))

    def after_forward(module: nn.Module, args: Any, output: Any) -> Any:
        return None if ours.output_dtype is None else map_only(Tensor, ours.cast_output, output)

    return before_forward, after_forward
