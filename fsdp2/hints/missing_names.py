"""Names that DDP and FSDP1 have and a sharded module lacks: where a program reads one, a warning names what to use instead.

    train.py:30: UserWarning: FSDPModel has no no_sync, which belongs to DDP and FSDP1; use fsdp2.accumulate(model, last=...)
    AttributeError: 'FSDPModel' object has no attribute 'no_sync'

The error is torch's. ``hasattr`` and ``getattr``, by which libraries ask, answer as ever and warn of nothing. A name that the module or
its class has is found there, and no other name costs anything.
"""

from __future__ import annotations

import dis
import sys
from typing import Any

from torch import nn

from ..user_warnings import warn

_LOADED = "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict(model, optimizer, state)"
_SAVED = "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(model, optimizer)"
_FORMAT = "model.state_dict() for shards, fsdp2.checkpoint.full_state_dict(model) for whole tensors"
INSTEAD = {
    "no_sync": "fsdp2.accumulate(model, last=...)",
    "require_backward_grad_sync": "model.set_requires_gradient_sync(...)",
    "clip_grad_norm_": "fsdp2.clip_grad_norm_(model.parameters(), max_norm)",
    "summon_full_params": "model.unshard() and model.reshard(), or fsdp2.checkpoint.full_state_dict(model)",
    "state_dict_type": _FORMAT,
    "set_state_dict_type": _FORMAT,
    "optim_state_dict": _SAVED,
    "full_optim_state_dict": _SAVED,
    "sharded_optim_state_dict": _SAVED,
    "optim_state_dict_to_load": _LOADED,
    "register_comm_hook": "model.set_custom_reduce_scatter(...) or set_all_reduce_hook(...)",
    "join": "fsdp2.uneven",
}
"""What a sharded module has for each. ``module`` is not here: programs call their own submodules so, and would pay for the look-up."""


def answer_for(cls: type) -> None:
    """Let instances of ``cls``, a sharded class, answer for names that it lacks."""
    for name in INSTEAD:
        if not hasattr(cls, name):
            setattr(cls, name, _Missing(name))


class _Missing:
    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, module: nn.Module | None, cls: type) -> Any:
        for base in cls.__mro__:  # what the user's class got later
            theirs = base.__dict__.get(self._name, self)
            if not isinstance(theirs, _Missing):
                return theirs.__get__(module, cls) if hasattr(theirs, "__get__") else theirs
        reader = sys._getframe(1)
        if module is not None and dis.opname[reader.f_code.co_code[reader.f_lasti]] in ("LOAD_ATTR", "LOAD_METHOD"):
            kept = (module._parameters, module._buffers, module._modules)
            if getattr(cls, "__getattr__", None) is nn.Module.__getattr__ and not any(self._name in each for each in kept):
                warn(f"{cls.__name__} has no {self._name}, which belongs to DDP and FSDP1; use {INSTEAD[self._name]}")
        raise AttributeError(self._name)
