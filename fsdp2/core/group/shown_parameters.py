"""Which parameters the user's modules show: the sharded ones, or the unsharded ones from unshard to reshard.

A group's parameters are entries in ``_parameters`` of the modules that own them. This file exchanges the entries,
notices parameters that the user has put there since, and adopts or refuses them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from ...errors import ParameterError, unseen_writes_error
from ...torch_names import torch_autograd, torch_tensors
from .own_memory import has_extension
from .param import Owner, ShardedParam, carry_grad_dtype, sharded_from, shards


class ModuleRegistry:
    """Shows a group's parameters to the modules that own them.

    The ``_parameters`` of a module with ``nn.Module``'s own ``__setattr__`` are updated from a prebuilt dict; others
    (LSTM keeps copies of its parameters) are set attribute by attribute.
    """

    def __init__(self, params: Sequence[ShardedParam]) -> None:
        self._owned = [
            (owner.module._parameters, owner.name, param, owner.module) for param in params for owner in param.owners
        ]
        self._is_prepared = False
        self.written: list[ShardedParam] = []  # shards that ``verify`` found written, for the group
        # The ``_parameters`` of each module that owns some, and their entries while sharded and while unsharded.
        self._entries: list[tuple[dict[str, Any], tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]]] = []
        self._slow: list[tuple[nn.Module, str, ShardedParam]] = []
        # Each entry, sharded and unsharded.
        self._places: list[tuple[dict[str, Any], str, tuple[nn.Parameter, nn.Parameter]]] = []
        show(params, [param.sharded for param in params])

    def add_owner(self, param: ShardedParam, owner: Owner) -> None:
        """Show ``param`` at one more place, which a later ``fully_shard`` call found tied to it."""
        param.owners.append(owner)
        self._owned.append((owner.module._parameters, owner.name, param, owner.module))
        self._is_prepared = False
        set_parameter(owner.module, owner.name, param.sharded)

    def remove(self, param: ShardedParam) -> None:
        """Forget ``param``, which leaves the group."""
        self._owned = [entry for entry in self._owned if entry[2] is not param]
        self._is_prepared = False

    def forget(self) -> None:
        """The group has, or will have, new unsharded parameters: look them up when they are shown."""
        self._is_prepared = False
        self._entries.clear()
        self._places.clear()

    def _prepare(self) -> None:
        self._is_prepared = True
        self._slow, self._places = [], []
        found: dict[int, tuple[dict[str, Any], tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]]] = {}
        for shown, name, param, module in self._owned:
            now: Any = shown.get(name)
            if not (now is param.sharded or now is param.unsharded or (isinstance(now, DTensor) and sharded_from(now))):
                self._is_prepared = False  # the user's own stays there, until the next forward takes it or refuses it
                continue
            assert param.unsharded is not None
            self._places.append((shown, name, (param.sharded, param.unsharded)))
            if type(module).__setattr__ is not nn.Module.__setattr__:
                self._slow.append((module, name, param))
                continue
            parameters = module._parameters
            _, (sharded, unsharded) = found.setdefault(id(parameters), (parameters, ({}, {})))
            sharded[name], unsharded[name] = param.sharded, param.unsharded
        self._entries = list(found.values())

    def show(self, unsharded: bool) -> None:
        """Let the modules show the unsharded parameters, or the sharded ones."""
        for parameters, name, places in self._places:
            if parameters.get(name) is not places[not unsharded]:
                self._is_prepared = False
        if not self._is_prepared:
            self._prepare()
        for parameters, entries in self._entries:
            parameters.update(entries[unsharded])
        for module, name, param in self._slow:
            setattr(module, name, param.unsharded if unsharded else param.sharded)

    def verify(self, has_own_memory: bool, freed_nbytes: int = 0) -> bool:
        """Whether every entry is as we left it; adopts parameters that the user put there, or refuses them by name.

        In a backward it leaves them where they are: the graph was made with ours, and the next forward looks again.

        has_own_memory: by the group's plan
        freed_nbytes:   size of the unsharded memory, if it is freed, or is the flat shard; addresses below are offsets
        Raises:         OrderError naming one with other memory: the user has assigned its ``data``
        """
        intact = True
        with torch_tensors.without_torch_function():
            for parameters, name, param, _ in self._owned:
                now = parameters.get(name)
                sharded, local, unsharded, trainable = param.sharded, param.local, param.unsharded, param.trainable
                if now is not sharded and torch_autograd.current_graph_task() != -1:
                    self._is_prepared = False
                elif now is not sharded:
                    self._refuse_untying(param)
                    _refuse_tying(param, now)
                    _adopt_replacement(param, now)
                    intact = False
                elif sharded._local_tensor is not local or (  # type: ignore[attr-defined]
                    not has_own_memory and local.__dict__ and has_extension(local)  # methods were put on a plain tensor
                ):
                    intact = False
                elif param.address is not None and local.data_ptr() != param.address:
                    param.return_to_flat()
                if (version := sharded._version + local._version) != param.version:
                    if param.version >= 0:
                        self.written.append(param)
                    param.version = version
                if sharded.requires_grad is not trainable or (
                    unsharded is not None and unsharded.requires_grad is not trainable
                ):
                    param.take_over_toggle()
                if (
                    freed_nbytes > 0
                    and unsharded is not None
                    and unsharded.data_ptr() >= freed_nbytes
                    and unsharded.data_ptr() != local.data_ptr()
                ):
                    raise unseen_writes_error([param.fqn])
        if not intact:
            self._is_prepared = False
        return intact

    def adopt_replaced(self, smaller: Sequence[nn.Parameter]) -> bool:
        """Whether the user registered others in place of those shown unsharded; they are adopted or refused by name.

        smaller: what the modules show instead while the group is sharded over its smaller mesh
        """
        found = False
        for parameters, name, param, _ in self._owned:
            now = parameters.get(name)
            if now is param.unsharded or now is param.sharded or any(now is each for each in smaller):
                continue
            if now is None or isinstance(now, nn.Parameter):  # else it is there for one call, as by ``functional_call``
                self._refuse_untying(param)
                _refuse_tying(param, now)
                _adopt_replacement(param, now)
                self._is_prepared, found = False, True
        return found

    def _refuse_untying(self, param: ShardedParam) -> None:
        """Raise if the user has replaced a tied parameter at only some of its places."""
        shown = [(owner.name, owner.module._parameters.get(owner.name)) for owner in param.owners]
        kept = [name for name, now in shown if now is not None and (now is param.sharded or now is param.unsharded)]
        if kept:
            raise ParameterError(
                f"{param.fqn} was replaced after fully_shard at some of the {len(param.owners)} places that share it",
                expected="one parameter at all of them, as when fully_shard was called",
                fix="register the new parameter in every module that shared the old one, "
                "or untie them before fully_shard",
            )


def show(params: Sequence[ShardedParam], shown: Sequence[nn.Parameter]) -> None:
    """Let the owners of each of ``params`` show the parameter at its place in ``shown``."""
    for param, parameter in zip(params, shown, strict=True):
        for owner in param.owners:
            set_parameter(owner.module, owner.name, parameter)


def set_parameter(module: nn.Module, name: str, param: nn.Parameter) -> None:
    if type(module).__setattr__ is nn.Module.__setattr__:
        module._parameters[name] = param
    else:
        setattr(module, name, param)


def _refuse_tying(param: ShardedParam, now: Any) -> None:
    """Raise if the user has put another sharded parameter there that still has its place: it lies in one flat shard."""
    other = shards().get(id(now), param)
    shown = [owner.module._parameters.get(owner.name) for owner in other.owners]
    if other is param or not any(
        each is other.sharded or (each is not None and each is other.unsharded) for each in shown
    ):
        return  # a new parameter, or two that have changed places
    raise ParameterError(
        f"{param.fqn} ({type(param.owners[0].module).__name__}.{param.owners[0].name}) and {other.fqn} "
        "were made one parameter after the first forward",
        expected="ties made before the first forward, so that the parameter is gathered and reduced once",
        fix="tie them earlier: model.tie_weights() before the first forward",
    )


def _adopt_replacement(param: ShardedParam, now: Any) -> None:
    """Adopt the parameter that the user registered in place of ours, if it is sharded as ours was."""
    wanted = param.spec.sharded
    if (
        isinstance(now, nn.Parameter)
        and isinstance(now, DTensor)
        and now.device_mesh == wanted.mesh
        and now.placements == wanted.placements
        and now.shape == param.sharded.shape
    ):
        carry_grad_dtype(param.sharded, now)
        param.sharded = now
        return
    got = "nothing" if now is None else f"{type(now).__name__} {tuple(getattr(now, 'shape', ()))}"
    placements = f" with placements {now.placements}" if isinstance(now, DTensor) else ""
    raise ParameterError(
        f"{param.fqn} was replaced after fully_shard by {got}{placements}",
        expected=f"a DTensor parameter {tuple(param.sharded.shape)} with placements {wanted.placements}",
        fix="replace parameters before fully_shard, or change the values of the one that is there",
    )
