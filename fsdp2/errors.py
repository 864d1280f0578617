"""The FSDPError family: what the user did, what was expected, how to fix it.

Every error that a user can cause is one of these and is also a subclass of each built-in exception that PyTorch's own FSDP2 raises in
the cases it covers, so that old ``except`` clauses hold; a test asks FSDP2 case by case (hence the odd bases: there, an empty list is
an IndexError). Only what is no module, mesh or policy at all is an AttributeError: ``hasattr`` swallows those.

    MeshError: [rank 0] fully_shard got a 3-D mesh ('pp', 'dp', 'tp')
      expected: a 1-D mesh (shard) or a 2-D mesh (replicate, shard)
      fix:      pass mesh["dp"], or dp_mesh_dims=DataParallelMeshDims(shard="dp") for a full SPMD mesh
      see:      python -m fsdp2 explain MeshError

The last line is a note of the exception: tracebacks show it from Python 3.11 on, and ``str(error)`` leaves it out, so that programs
which read or pass on messages do not repeat it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from .printable import printable

MAX_ITEMS = 5
"""How many offenders an error lists: a model has hundreds of parameters, and the first few show what is wrong with all."""


class FSDPError(Exception):
    """Base of every error that a program causes by how it uses fsdp2: ``except fsdp2.FSDPError`` catches them all.

    Its text has this rank, what happened, the parameters or files in question, what fsdp2 expected, and a fix.
    """

    def __init__(self, headline: str, *, expected: str = "", fix: str = "", items: Iterable[str] = ()) -> None:
        # Without a fix the headline is the whole text: that of an error which another rank has sent.
        super().__init__(printable(message(headline, expected=expected, fix=fix, items=items) if fix else headline))
        self.__notes__ = [f"  see:      python -m fsdp2 explain {_explained(type(self))}"]


class ModuleError(FSDPError, ValueError, TypeError, IndexError, AssertionError, RuntimeError):
    """The module passed to a call cannot be sharded as asked."""


class NotAModuleError(ModuleError, AttributeError):
    """The object passed as a module is no module. Also an AttributeError: torch asks the object for attributes of a module."""


class MeshError(FSDPError, ValueError, IndexError, AssertionError):
    """The device mesh does not describe data parallelism."""


class ArgumentError(FSDPError, ValueError, TypeError, RuntimeError):
    """An argument has a wrong type or value."""


class ArgumentTypeError(ArgumentError, AttributeError):
    """A mesh or a policy is an object of another kind. Also an AttributeError: torch asks the object for attributes of a mesh."""


class ParameterError(FSDPError, ValueError, TypeError, AssertionError, RuntimeError):
    """A parameter cannot be sharded as asked; the message names it."""


class ExtensionError(ParameterError, NotImplementedError):
    """A tensor subclass, or its all-gather extension, lacks an operation that sharding needs, or does it wrongly."""


class DeviceError(FSDPError, ValueError, AssertionError):
    """A parameter or buffer lies on a device that is not the mesh's."""


class MaterializationError(FSDPError, RuntimeError):
    """Parameters are still on the meta device where their values are needed."""


class OrderError(FSDPError, RuntimeError, TypeError, AssertionError):
    """Calls came in an order that cannot work, for instance a child sharded after its parent."""


class ParkedError(OrderError):
    """A model, or a part of it, was used while it is parked: its parameters are on the host or on disk."""


class LosingOrderWarning(UserWarning):
    """A program nests compiler, checkpointing and sharding in an order that works, and that is slower than another order."""


class DoctorWarning(UserWarning):
    """The doctor found something while a model trains."""


class CheckpointError(FSDPError, RuntimeError):
    """A checkpoint cannot be read or written, or belongs to another model.

    file, key: the file, and the name in it, that caused the error; None where the error concerns no single one
    report:    the load's report, if keys were missing, unexpected or of another shape
    """

    file: str | None = None
    key: str | None = None
    report: Any = None


class LostRankError(CheckpointError):
    """A rank is gone or does not answer: a collective has failed. Start no other collective, and end the program.

    The message names the collective, the ranks whose processes have ended or are stopped, and the exceptions that ended them. It is a
    CheckpointError, because saves and loads raise it as well.
    """


class PublishError(FSDPError, RuntimeError):
    """A consumer of published weights has failed on some rank, or takes nothing. The model is as before."""


class CompileError(FSDPError, RuntimeError):
    """A model cannot be compiled as asked; the message names the line. The model goes on working eagerly."""


class DoctorError(FSDPError, RuntimeError):
    """The doctor found something, and was asked to raise."""


def _explained(error: type[BaseException]) -> str:
    """The nearest class that users know: a class of this file."""
    return next(each.__name__ for each in error.__mro__ if each.__module__ == __name__)


def got(caller: str, argument: str, value: Any) -> str:
    """A headline: ``caller`` got ``argument`` with ``value``, and its type."""
    return f"{caller} got {argument}={short(value)} of type {type(value).__name__}"


def got_object(caller: str, value: Any) -> str:
    """The same for a call with one argument."""
    return f"{caller} got an object of type {type(value).__name__}: {short(value)}"


def short(value: Any) -> str:
    """``repr(value)`` on one line, cut off: the repr of a module has a line for each layer."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else text[:77] + "..."


def meta_error(items: Iterable[str], device: str) -> MaterializationError:
    """The error to raise where a call needs values and ``items`` have none."""
    missing = list(items)
    kind = device.split(":")[0]
    return MaterializationError(
        f"{len(missing)} parameters should be materialized from meta device before the first forward",
        items=missing,
        expected=f"storage on {device}",
        fix=f'call fsdp2.materialize(model), or model.to_empty(device="{kind}") and initialize, or load a checkpoint',
    )


def unseen_writes_error(names: list[str]) -> OrderError:
    """The error to raise where parameters named ``names`` were written and their shards were not."""
    return OrderError(
        f"{len(names)} parameters were written while they were kept unsharded, in a way that moves no version counter of their shards",
        items=names,
        expected="writes to the sharded parameters under torch.no_grad(): param.mul_(...) "
        "for those of model.parameters() after an evaluation, or for the tensors of model.state_dict()",
        fix="call reshard() on the FSDP modules before the write; or write param itself, one at a time, "
        "instead of param.data, param.detach().to_local() or lists for torch._foreach_* "
        "(as AveragedModel's multi_avg_fn does)",
    )


def misplaced_error(items: Iterable[str], device: str) -> MaterializationError:
    """The error to raise where a call needs values on ``device`` and parameters are elsewhere."""
    missing = list(items)
    return MaterializationError(
        f"{len(missing)} parameters were moved, or loaded, to another device",
        items=missing,
        expected=f"storage on {device}, where their gradients will be",
        fix=f'call model.to("{device.split(":")[0]}") after load_state_dict(..., assign=True), or load without assign=True',
    )


def parked_error(items: Iterable[str]) -> ParkedError:
    """The error to raise where a call needs ``items`` on their device, and they are parked."""
    parked = list(items)
    return ParkedError(
        f"{len(parked)} parameters of a group are parked",
        items=parked,
        expected="parameters on their device, for forward, for an optimizer's step, and where a model is moved or cast",
        fix="call fsdp2.unpark(model, optimizer) first; state_dict() and load_state_dict() work while a model is parked",
    )


def message(headline: str, *, expected: str, fix: str, items: Iterable[str] = ()) -> str:
    """One error text: rank, headline, offenders (of many, the first ``MAX_ITEMS``), what was expected, how to fix it."""
    rank = f"[rank {dist.get_rank()}] " if dist.is_available() and dist.is_initialized() else ""
    listed = list(items)
    if len(listed) > MAX_ITEMS + 1:
        listed[MAX_ITEMS:] = [f"and {len(listed) - MAX_ITEMS} more"]
    lines = [f"{rank}{headline}", *(f"  {item}" for item in listed), f"  expected: {expected}", f"  fix:      {fix}"]
    return "\n".join(lines)
