"""FSDP1's methods and attributes of an FSDP module. Most are one call into a file of their own.

The class is mixed into the module's own, in front of it (``fsdp2/sharded_class.py``).

``model.module`` is a second object over the same attributes, hooks and parameters (one ``__dict__``), of a class that is not FSDP and
has no ``module``. So both ``model.module.head`` and loops that unwrap, ``while isinstance(m, FSDP): m = m.module``, work as before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..clip import clip_grad_norm_
from ..core.iteration.module_state import unit_of, units_in
from ..errors import ModuleError, OrderError
from ..fsdp_module import FSDPModule
from ..sharded_class import original_class, swap_class
from . import model_state, optim_state
from .api import CPUOffload, FullOptimStateDictConfig, MixedPrecision, OptimStateKeyType, StateDictSettings, StateDictType
from .comm_hook import register
from .settings import Settings, settings_of
from .summon import summoned

State = dict[str, Any]


class _Lent:
    """An attribute of FSDP1's wrapper that a module has only as long as it has none of that name itself."""

    def __init__(self, get: Callable[[nn.Module, Settings], Any]) -> None:
        self._get = get

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, module: Any, owner: type | None = None) -> Any:
        if module is None:
            return self
        for own in (module._parameters, module._buffers, module._modules):
            if self._name in own:
                return own[self._name]
        settings = settings_of(module)
        for base in type(module).__mro__:
            theirs = base.__dict__.get(self._name, self)
            if theirs is not self:
                return theirs.__get__(module, type(module)) if hasattr(theirs, "__get__") else theirs
        if settings is None:
            raise AttributeError(f"{type(module).__name__!r} object has no attribute {self._name!r}")
        return self._get(module, settings)


class WrappedModule(FSDPModule):
    """The methods of ``model.module``, in addition to those of an FSDPModule; an FSDP module inherits them."""

    process_group = _Lent(lambda _, settings: settings.mesh.shard_group or settings.mesh.replicate_group)
    rank = _Lent(lambda _, settings: dist.get_rank(settings.mesh.shard_group or settings.mesh.replicate_group))
    world_size = _Lent(lambda _, settings: dist.get_world_size(settings.mesh.shard_group or settings.mesh.replicate_group))
    sharding_strategy = _Lent(lambda _, settings: settings.strategy)
    mixed_precision = _Lent(lambda _, settings: settings.options.mixed_precision or MixedPrecision())
    cpu_offload = _Lent(lambda _, settings: settings.options.cpu_offload or CPUOffload())
    backward_prefetch = _Lent(lambda _, settings: settings.options.backward_prefetch)
    forward_prefetch = _Lent(lambda _, settings: settings.options.forward_prefetch)
    limit_all_gathers = _Lent(lambda _, settings: settings.options.limit_all_gathers)
    compute_device = _Lent(lambda module, settings: getattr(unit_of(module), "device", settings.device))

    def check_is_root(self) -> bool:
        """Whether FSDP was applied to no module above this one."""
        return _settings(self).is_root

    def apply(self, fn: Callable[[nn.Module], None]) -> Any:
        """``nn.Module.apply`` while this module, and each FSDP module below in its turn, shows whole parameters; what ``fn`` writes
        into them is kept. Collective: yes, over the meshes of the parameters.
        """
        with summoned(cast(nn.Module, self), recurse=False):
            return super().apply(fn)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward reduces nothing: gradients accumulate unsharded, until the first backward outside.

        Strategies that keep parameters from forward to backward keep them until then.
        Raises: OrderError on a module that is not the root.
        """
        _require_root(self, "no_sync")
        units = units_in(cast(nn.Module, self).modules())
        before = [unit.micro_batch for unit in units]
        self.set_requires_gradient_sync(False)
        for unit in units:
            keeps = unit.options.reshard_after_forward is False
            unit.set_micro_batch(replace(unit.micro_batch, reshards=unit.micro_batch.reshards and not keeps))
        try:
            yield
        finally:
            for unit, usual in zip(units, before, strict=True):
                unit.set_micro_batch(usual)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their ``norm_type``-norm, as of one vector, is at most ``max_norm``.

        Returns:    the norm before, 0-d, equal on all ranks, in the largest dtype of the gradients
        Collective: yes, over the meshes of the parameters
        Raises:     OrderError on a module that is not the root
        """
        _require_root(self, "clip_grad_norm_")
        params = list(cast(nn.Module, self).parameters())
        total = clip_grad_norm_(params, max_norm, norm_type)
        dtypes = [param.grad.dtype for param in params if param.grad is not None]
        dtype = dtypes[0] if dtypes else torch.float32
        for each in dtypes:
            dtype = torch.promote_types(dtype, each)
        return total.to(dtype)

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let ``hook`` reduce gradients: ``hook(state, gradient, shard)`` under a strategy that shards, else ``hook(state, gradient)``.

        gradient:   1-D, of one unit, unsharded and not divided, in reduce dtype; of W ranks, rank r's shard is its r-th part. A hook
                    without ``shard`` leaves its result there.
        shard:      1-D, to be written
        Collective: no; the hook's collectives are issued in the same order on all ranks
        Raises:     OrderError on a module that is not the root, or that has a hook; ArgumentError if ``hook`` cannot be called, or
                    under a hybrid strategy, where FSDP1 has none either
        """
        _require_root(self, "register_comm_hook")
        register(cast(nn.Module, self), state, hook)

    def join_hook(self, **kwargs: Any) -> NoReturn:
        """What torch's ``Join`` asks for. Collective: no. Raises: ModuleError; FSDP1 has no such method"""
        raise ModuleError(
            f"Join got a {type(self).__name__} that is sharded",
            expected="a model that each rank holds whole: a rank that has joined cannot gather what others run",
            fix="with fsdp2.uneven(model) as work: and for batch in work(loader):, as docs/uneven.md shows",
        )

    # --- state dicts ---

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """A state dict of the type that is set: whole tensors by default, as in FSDP1. Collective: yes, if whole."""
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        make = super().state_dict
        return model_state.state_dict_of(cast(nn.Module, self), lambda: make(*args, **kwargs), prefix)

    def _load_from_state_dict(self, state_dict: State, prefix: str, *args: Any) -> None:
        model_state.place_for_loading(cast(nn.Module, self), state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: Any,
        state_dict_config: Any = None,
        optim_state_dict_config: Any = None,
    ) -> StateDictSettings:
        """Choose what ``state_dict()`` and ``optim_state_dict()`` give for all FSDP modules in the tree of ``module``.

        Returns: the earlier settings
        Raises:  ArgumentError if a config is not the type's; ModuleError if there is no FSDP module
        """
        settings = model_state.checked_settings(state_dict_type, state_dict_config, optim_state_dict_config)
        return model_state.set_type(module, settings)

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """The settings. Raises: ModuleError if there is no FSDP module in the tree of ``module``, or they differ."""
        return model_state.get_type(module)

    @staticmethod
    @contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: Any,
        state_dict_config: Any = None,
        optim_state_dict_config: Any = None,
    ) -> Iterator[None]:
        """Do as ``set_state_dict_type`` inside the context; at its end the earlier settings hold again, also after an exception."""
        before = WrappedModule.set_state_dict_type(module, state_dict_type, state_dict_config, optim_state_dict_config)
        try:
            yield
        finally:
            model_state.set_type(module, before)

    # --- optimizer state ---

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: State | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> State:
        """The optimizer's state by parameter name, in the form that the state dict type and its config say.

        optim_state_dict: what ``optim.state_dict()`` returned, if it was taken before
        Collective: yes for FULL_STATE_DICT, over the meshes of the parameters
        """
        return optim_state.by_name(model, optim, optim_state_dict, model_state.get_type(model))

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: State,
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> State:
        """What ``optim.load_state_dict`` takes, of what ``optim_state_dict`` gave, here or in torch's FSDP1; whole values are cut.

        is_named_optimizer: ``optim`` takes names of parameters instead of numbers
        load_directly:      load it as well
        Collective:         with ``rank0_only`` in the config, over ``group`` (None: all ranks): its first rank alone passes the state
        Raises:             CheckpointError naming what is missing, unexpected, or of another shape
        """
        config = model_state.get_type(model).optim_state_dict_config
        from_first = getattr(config, "rank0_only", False)
        state = optim_state.to_load(model, optim, optim_state_dict, from_first=from_first, group=group, named=is_named_optimizer)
        if load_directly:
            optim.load_state_dict(state)
        return state

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: Optimizer,
        optim_input: Any = None,
        rank0_only: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> State:
        """The older name for ``optim_state_dict`` with FULL_STATE_DICT, in host memory. Collective: yes."""
        config = FullOptimStateDictConfig(rank0_only=rank0_only)
        settings = model_state.checked_settings(StateDictType.FULL_STATE_DICT, None, config)
        return optim_state.by_name(model, optim, None, settings)

    @staticmethod
    def sharded_optim_state_dict(model: nn.Module, optim: Optimizer, group: dist.ProcessGroup | None = None) -> State:
        """The older name for ``optim_state_dict`` with SHARDED_STATE_DICT. Collective: no."""
        settings = model_state.checked_settings(StateDictType.SHARDED_STATE_DICT, None, None)
        return optim_state.by_name(model, optim, None, settings)

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: State, model: nn.Module, optim_input: Any = None, optim: Optimizer | None = None
    ) -> State:
        """``optim_state_dict_to_load`` of a whole state that every rank has. Collective: no."""
        return optim_state.to_load(model, optim, full_optim_state_dict, optim_input=optim_input)

    @staticmethod
    def flatten_sharded_optim_state_dict(sharded_optim_state_dict: State, model: nn.Module, optim: Optimizer) -> State:
        """``optim_state_dict_to_load`` of what ``sharded_optim_state_dict`` gave. Collective: no, if it has this model's placements."""
        return optim_state.to_load(model, optim, sharded_optim_state_dict)

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: State | None,
        model: nn.Module,
        optim_input: Any = None,
        optim: Optimizer | None = None,
        group: Any = None,
    ) -> State:
        """``optim_state_dict_to_load`` of a whole state that only the first rank of ``group`` has. Collective: yes, over ``group``."""
        return optim_state.to_load(model, optim, full_optim_state_dict or {}, optim_input=optim_input, from_first=True, group=group)

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: State,
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        optim_input: Any = None,
        optim: Optimizer | None = None,
    ) -> State:
        """The same state with names of parameters as keys, or with numbers; ``model`` need not be sharded. Collective: no."""
        return optim_state.rekeyed(optim_state_dict, optim_state_key_type, model, optim_input, optim)

    # --- whole parameters ---

    @staticmethod
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> AbstractContextManager[None]:
        """Inside, ``module`` shows whole parameters, plain tensors in their own dtype. Forward may run, without autograd.

        recurse:        those of FSDP modules below, too
        writeback:      keep values that the program wrote to them
        rank0_only:     only the first rank gets them, the others keep theirs; not with ``writeback``
        offload_to_cpu: in host memory
        with_grads:     with whole gradients, which are written back as well
        Collective:     yes, over the meshes of the parameters, at the beginning
        Memory:         all the parameters shown
        Raises:         ArgumentError for ``writeback`` with ``rank0_only``; OrderError inside of itself, forward or backward
        """
        return summoned(module, recurse, writeback, rank0_only, offload_to_cpu, with_grads)

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[Any]:
        """The FSDP modules in the tree of ``module``, parents first; ``root_only``: those that are roots."""
        found = [(below, settings) for below in module.modules() if (settings := settings_of(below)) is not None]
        return [below for below, settings in found if settings.is_root or not root_only]


def _wrapped(module: nn.Module, settings: Settings) -> nn.Module:
    if settings.wrapped is None:
        # A second object that shares the attributes of ``module``.
        settings.wrapped = object.__new__(original_class(type(module)))
        object.__setattr__(settings.wrapped, "__dict__", vars(module))
        swap_class(settings.wrapped, WrappedModule, prefix="")
    return settings.wrapped


class FSDP1Module(WrappedModule):
    """The methods of an FSDP module; ``isinstance(module, FSDP)`` asks for this class."""

    module = _Lent(_wrapped)
    _fsdp_wrapped_module = _Lent(_wrapped)


def _settings(module: Any) -> Settings:
    settings = settings_of(module)
    assert settings is not None, f"{type(module).__name__} has lost its FSDP settings"
    return settings


def _require_root(module: Any, caller: str) -> None:
    if not _settings(module).is_root:
        raise OrderError(
            f"{caller} was called on a {type(module).__name__} that is not the root",
            expected=f"{caller} on the outermost module that FSDP was applied to",
            fix=f"call model.{caller}",
        )
