"""What one rank of one run writes down: inputs, losses, gradients, parameters, buffers and collectives, step by step.

The program runs under the doctor's ``Patient``, which ends it after its steps. One file gets an event at each moment, another a line
before each collective: both are there however the rank ends.

    {"kind": "gradients", "step": 1, "values": {"0.weight": Seen(...)}}
    all_reduce 12 float32 0,1 backward of layers.0
"""

from __future__ import annotations

import contextlib
import inspect
import pickle
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..doctor import hearing
from ..doctor.patient import Patient, _living
from ..doctor.replicas import digest
from ..doctor.step_checks import digest_of
from ..inspect import Listener, is_sharded, listen
from ..ranks import Rank
from ..reference import Axes, ReferenceModule
from ..run import run_script
from ..state_bytes import measured_state_bytes
from .certificate import Scales
from .checkpoint import load, save
from .parts import Seen, copy_into, eps_of, fingerprints, local_of, placed, plain_name
from .stand_ins import on_the_reference, settle

REFERENCES = {"reference": None, "reference64": torch.float64}
"""The runs on the reference, by name, and the dtype in which they compute."""


@dataclass(frozen=True)
class Program:
    """The user's script, or a function of ours in its place."""

    script: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    call: Callable[[], object] | None = None

    @property
    def is_file(self) -> bool:
        return self.call is None and not self.is_module

    def run(self) -> None:
        if self.call is not None:
            self.call()
        else:
            run_script(self.script, self.arguments, self.is_module)


class Teller(Patient):
    """A patient of whom each rank writes down events."""

    def __init__(self, folder: Path, max_steps: int) -> None:
        super().__init__(max_steps, str(folder))
        self._events = open(folder / f"events-{self.record.rank}", "wb", buffering=0)  # noqa: SIM115 (until the process ends)

    def run(self, script: Callable[[], object]) -> None:
        with contextlib.ExitStack() as undo:
            undo.callback(register_optimizer_step_post_hook(self._after_step).remove)
            undo.callback(hearing.backwards.listen(self._on_backward))
            super().run(script)

    def _tell(self, kind: str, step: int, **said: Any) -> None:
        self._events.write(pickle.dumps({"kind": kind, "step": step, **said}))

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None: ...

    def _on_backward(self, tensors: Any) -> None: ...


class Witness(Teller):
    """role: "real", or one of REFERENCES. start: the folder of the run whose initial values this one takes

    saved: the folder of the run whose checkpoint this one loads after its first step; then it forgets what it has told so far
    """

    def __init__(self, role: str, folder: Path, max_steps: int, start: Path | None, saved: Path | None = None) -> None:
        super().__init__(folder, max_steps)
        self.role, self._start, self._saved = role, start, saved
        self._looks = role == "real" and saved is None
        self._inputs: int | None = None
        self._calls = open(folder / f"calls-{self.record.rank}", "wb", buffering=0)  # noqa: SIM115 (until the process ends)
        self._named: dict[int, tuple[str, Tensor]] = {}
        self._eps = 0.0
        self._coarse: dict[str, float] = {}
        self._taken: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._first: nn.Module | None = None
        self._scales: Scales | None = None
        self._saving: int | None = None  # the thread, whose collectives are not the program's
        self.place = ""

    def _names(self) -> contextlib.AbstractContextManager[Any]:
        return on_the_reference(REFERENCES[self.role]) if self.role in REFERENCES else contextlib.nullcontext()

    def run(self, script: Callable[[], object]) -> None:
        with contextlib.ExitStack() as undo:
            undo.callback(collectives.listen(self._on_collective))
            undo.callback(listen(_Places(self)))
            super().run(script)

    @property
    def _step(self) -> int:
        return max(self._taken.values(), default=0) + 1

    # --- moments ---

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        settle()
        if self._first is None and not torch.compiler.is_compiling() and (isinstance(module, ReferenceModule) or is_sharded(module)):
            self._first = module
            self._begin(module, args)
        super()._before_forward(module, args)

    @torch.no_grad()
    def _begin(self, module: nn.Module, args: Any) -> None:
        """The first forward of a sharded model begins."""
        if torch.is_autocast_enabled("cpu"):
            self._eps = torch.finfo(torch.get_autocast_dtype("cpu")).eps
        for name, param in module.named_parameters():
            self._named[id(param)] = plain_name(name), param
        self._inputs = digest_of(args)
        self._tell("inputs", 1, digest=self._inputs)
        self._tell("start", 1, values=self._seen(self._named.values()))
        if self._start is not None:
            units = dict.fromkeys(each.reference for each in module.modules() if isinstance(each, ReferenceModule))
            axes = {self._named[id(param)][0]: axes for unit in units for param, axes in unit.params.items()}
            of_tensors = [
                group for _, param in self._named.values() if isinstance(param, DTensor) for group in param.device_mesh.get_all_groups()
            ]
            peers = {name: _peers(each) for name, each in axes.items()}
            for name, each_param in self._named.values():
                if name in peers:
                    peers[name] += [
                        dist.get_process_group_ranks(group) for group in _copied_over(each_param, dict.fromkeys(of_tensors))
                    ]
            widest = max(axes.values(), key=lambda each: each.size, default=None)
            alone = [name for name, each in self._named.values() if name not in axes and each.requires_grad]
            self._tell("peers", 1, peers=peers | ({} if widest is None else dict.fromkeys(alone, _peers(widest))), alone=alone)
            made = {param: getattr(axes, "initial", None) for unit in units for param, axes in unit.params.items()}
            self._tell("as made", 1, names=[self._named[id(each)][0] for each, was in made.items() if was == digest(local_of(each))])
            self._take_values_of(self._start)
        else:
            kind = "fsdp2" if type(module).__mro__[1].__module__.startswith("fsdp2") else "torch"
            self._tell("implementation", 1, name=kind)
            kept = {name: (local_of(tensor), *placed(tensor)) for name, tensor in self._named.values()}
            torch.save({"values": kept, "random": torch.get_rng_state()}, self._file("start"))

    def _take_values_of(self, run: Path) -> None:
        """Parameters that were made on shards have other values here: go on with those of the other run."""
        name_of = dict(self._named.values())
        own = torch.load(run / f"start-{self.record.rank}", weights_only=False, mmap=True)
        for path in sorted(run.glob("start-*")):
            kept = torch.load(path, weights_only=False, mmap=True)
            for name, (values, copy, pieces) in kept["values"].items():
                if name in name_of and copy == own["values"][name][1]:  # experts of other ranks have this name as well
                    copy_into(values, pieces, name_of[name])
        torch.set_rng_state(own["random"])

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._has_ended:
            return
        settle()
        if self._taken.get(optimizer, 0) == self._max_steps:
            self._stop_script()
        self._name(optimizer)
        held = [self._named[id(param)] for group in optimizer.param_groups for param in group["params"]]
        number = self._number(optimizer)
        grads = ((name, param.grad) for name, param in held if param.grad is not None)
        self._tell(
            "gradients", self._taken.get(optimizer, 0) + 1, optimizer=number, values=self._seen(grads), held=[name for name, _ in held]
        )
        if self._scales is not None and self._first is not None:
            self._certify(self._scales)
            self._tell("kept", self._step, state=measured_state_bytes(self._first, optimizer))
        super()._before_step(optimizer, args, kwargs)

    def _certify(self, scales: Scales) -> None:
        """Collective: yes."""
        self._scales = None
        if self._meeting is None or self._meeting.hold(scales.inspected.ranks):
            found = scales.certificate()
            self._add(*found.report)
            self._tell("divisors", self._step, divisors=dict(found.divisors), num_tokens=found.num_tokens, is_wrong=bool(found.report))

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._has_ended:
            return
        settle()
        step = self._taken[optimizer] = self._taken.get(optimizer, 0) + 1
        self.record.num_steps = max(self.record.num_steps, step)
        self._tell("parameters", step, optimizer=self._number(optimizer), values=self._seen(self._named.values()))
        if self._saved is not None and self._first is not None and step == 1:
            self._load(self._first, optimizer, self._saved / "checkpoint")
        if self._looks and self._first is not None and step == 1 and len(self._taken) == 1:
            self._scales = Scales(self._first)
        if self._first is not None:
            buffers = ((plain_name(name), each) for name, each in self._first.named_buffers() if not each.is_complex())
            self._tell("buffers", step, optimizer=self._number(optimizer), values=self._seen(buffers))
        is_last = self._looks and step == self._max_steps and len(self._taken) == 1
        if is_last and self._first is not None and (self._meeting is None or self._meeting.hold(range(dist.get_world_size()))):
            self._saving = threading.get_ident()
            self._tell("saved", step, **save(self._first, optimizer, Path(self._folder, "checkpoint")))
            self._saving = None

    def _load(self, model: nn.Module, optimizer: Optimizer, checkpoint: Path) -> None:
        loaded = load(model, optimizer, checkpoint)
        self._events.seek(0)
        self._events.truncate()
        self._tell("loaded", 1, **loaded)
        self._tell("inputs", 1, digest=self._inputs)
        self._tell("start", 1, values=self._seen(self._named.values()))
        if loaded["failure"]:
            self._stop_script()

    def _on_backward(self, tensors: Any) -> None:
        losses = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        values = [local_of(each).double().sum().item() for each in losses]
        self._tell("loss", self._step, values=values, eps=max([self._eps, *(eps_of(each.dtype) for each in losses)]))

    def _on_collective(self, name: str, group: Any, tensor: Any) -> None:
        if threading.get_ident() == self._saving:
            return
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        what = f"{tensor.numel()} {str(tensor.dtype).removeprefix('torch.')}" if isinstance(tensor, Tensor) else "- -"
        self._calls.write(f"{name} {what} {','.join(map(str, ranks))} {self.place}\n".encode())

    def _look(self, roots: list[nn.Module], optimizer: Optimizer) -> None:
        if self._saved is None:
            super()._look(roots, optimizer)

    # --- names and fingerprints ---

    def _number(self, optimizer: Optimizer) -> int:
        self._taken.setdefault(optimizer, 0)
        return list(self._taken).index(optimizer)

    def _name(self, optimizer: Optimizer) -> None:
        """Names for those parameters of an optimizer that have none yet: from the living module that has most of them."""
        missing = {id(param): param for group in optimizer.param_groups for param in group["params"] if id(param) not in self._named}
        while missing:
            modules = [(len(missing.keys() & {id(each) for each in module.parameters()}), module) for module in _living(nn.Module)]
            most, module = max(modules, key=lambda each: (each[0], -len(list(each[1].modules()))), default=(0, nn.Module()))
            kind = type(module).__name__.removeprefix("FSDP")
            names = [(f"{kind}: {plain_name(name)}", param) for name, param in module.named_parameters() if id(param) in missing]
            if not most:
                names = [(f"parameter {number} of the optimizer, in no module", param) for number, param in enumerate(missing.values())]
            for name, param in names:
                self._named[id(param)] = name, param
                del missing[id(param)]

    def _seen(self, tensors: Any) -> dict[str, Seen]:
        return {name: replace(seen, eps=max(self._eps, self._coarsest(name))) for name, seen in fingerprints(tensors).items()}

    def _coarsest(self, name: str) -> float:
        """Of the dtypes in which the reference computes and reduces a parameter of this name."""
        if not self._coarse and self.role in REFERENCES and self._first is not None:
            for unit in dict.fromkeys(each.reference for each in self._first.modules() if isinstance(each, ReferenceModule)):
                for param in unit.params:
                    if id(param) in self._named and param.is_floating_point():
                        dtypes = unit.dtype_of(param), unit.reduce_dtype(param), param.dtype
                        self._coarse[self._named[id(param)][0]] = max(map(eps_of, dtypes))
        return self._coarse.get(name, 0.0)

    def _file(self, kind: str) -> Path:
        return Path(self._folder, f"{kind}-{self.record.rank}")


def _peers(axes: Axes) -> list[list[int]]:
    """The ranks of each process group over which gradients are averaged."""
    return [dist.get_process_group_ranks(group) for group in axes.shard + axes.replicate]


def _copied_over(param: Tensor, groups: Iterable[Any]) -> Iterable[Any]:
    """Those process groups of tensor parallelism whose ranks all have ``param``, or the same piece of it."""
    if not isinstance(param, DTensor):
        return groups
    both = zip(param.device_mesh.get_all_groups(), param.placements, strict=True)
    return [group for group, placement in both if placement.is_replicate()]


class _Places(Listener):
    """Notes which unit runs."""

    def __init__(self, witness: Witness) -> None:
        self._witness = witness

    def begins(self, phase: str, unit: str) -> None:
        self._witness.place = f"{phase} of {unit}"

    def leaves(self) -> None:
        self._witness.place = ""


def witness_rank(role: str, program: Program, folder: Path, max_steps: int, real: Path, saved: Path | None, rank: Rank) -> NoReturn:
    """One rank of a run; ends with the script's status. real: the folder of the run whose initial values those on the reference take"""
    run_rank(Witness(role, folder, max_steps, real if role in REFERENCES else None, saved), program, rank)


def run_rank(patient: Patient, program: Program, rank: Rank) -> NoReturn:
    """Run the program with random numbers that are the same in all runs, and end this process with its status."""
    random.seed(rank.rank)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(rank.rank)
    patient.run(program.run)
    if not patient.record.has_failed and dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(patient.record.status or 0)


def read_events(folder: Path, rank: int) -> list[dict[str, Any]]:
    path = folder / f"events-{rank}"
    found = []
    with contextlib.suppress(EOFError, FileNotFoundError, pickle.UnpicklingError), open(path, "rb") as file:
        while True:
            found.append(pickle.load(file))
    return found


# --- collectives --------------------------------------------------------------------------------------------------------------------

_SAME_SIZE = (
    *("all_reduce", "broadcast", "reduce", "barrier"),
    *("all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single"),
)
_ANY_SIZE = ("all_gather", "all_to_all", "all_to_all_single", "gather", "scatter", "reduce_scatter")
_FUNCTIONAL = ("all_reduce", "all_gather_tensor", "reduce_scatter_tensor", "all_to_all_single", "broadcast")


def _told_of(name: str, usual: Callable[..., Any]) -> Callable[..., tuple[str, Any, Any] | None]:
    """From the arguments of ``usual``: its name, process group and tensor; None outside of a program's own process groups."""
    signature = inspect.signature(usual)

    def told(*args: Any, **kwargs: Any) -> tuple[str, Any, Any] | None:
        if not dist.is_initialized() or torch.compiler.is_compiling():
            return None
        group = signature.bind(*args, **kwargs).arguments.get("group")
        if group is not None and not isinstance(group, dist.ProcessGroup):
            return None
        return name, group, args[0] if args and name in _SAME_SIZE else None

    return told


def _places() -> Iterator[hearing.Place]:
    names = (*_SAME_SIZE, *_ANY_SIZE)
    for owner, known in ((dist, names), (dist.distributed_c10d, names), (functional, _FUNCTIONAL)):
        yield from ((owner, name, _told_of(name, getattr(owner, name))) for name in known if hasattr(owner, name))


collectives = hearing.Calls(_places)
"""The collectives of torch.distributed, before they are issued: name, process group, and tensor."""


__all__ = ["REFERENCES", "Program", "Teller", "Witness", "read_events", "run_rank", "witness_rank"]
