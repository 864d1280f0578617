"""One rank of ``fsdp2 doctor``: it runs the script as it is, on ours or on torch's FSDP2, watches the models that train, and ends it.

A model is checked before the first step of an optimizer that has its parameters, when all that trains it is there. However the script
ends, its record (``rank_record.py``) says what was seen; the command prints it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, KeysView
from itertools import compress
from typing import Any, NoReturn, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..hangs import background, watcher
from ..inspect import is_sharded, parameters_of, roots_of
from .checking import check, check_alone
from .finding import Finding
from .initialization import canaries
from .inspected import inspect
from .learning import step_on_some_ranks
from .meeting import Meeting
from .rank_record import RankRecord, place_of
from .watching import watch

T = TypeVar("T")


class EnoughSteps(BaseException):
    """The script has made its steps. No Exception: scripts catch those and go on."""


class Patient:
    """A script that runs under the doctor; ``record`` is what this rank has seen so far, as in ``folder``."""

    def __init__(self, max_steps: int, folder: str, timeout: float | None = None) -> None:
        """timeout: seconds without a move of any rank, after which a watchdog ends the script; None: no watchdog"""
        self.record = RankRecord(int(os.environ.get("RANK", "0")))
        self._max_steps = max_steps
        self._folder = folder
        self._model: nn.Module | None = None
        self._num_steps: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # of those that have sharded parameters
        self._watched: set[nn.Module] = set()
        self._watches: list[watch] = []
        self._has_been_told = False  # that its steps are enough
        self._has_ended = False
        self._timeout = timeout
        self._meeting: Meeting | None = None
        self._watchdog = contextlib.ExitStack()

    def run(self, script: Callable[[], object]) -> None:
        """Run ``script`` to its last step, or to its end, or until it fails."""
        self.record.write(self._folder)
        handles = [register_module_forward_pre_hook(self._before_forward), register_optimizer_step_pre_hook(self._before_step)]
        try:
            with self._names(), canaries(), _before_os_exit(self._end):
                script()
        except EnoughSteps:
            self._end(0)
        except SystemExit as end:
            if isinstance(end.code, str):
                sys.stderr.write(f"{end.code}\n")
            self._end(end.code if isinstance(end.code, int) else int(end.code is not None))
        except BaseException as error:  # ctrl-C as well
            traceback.print_exc()
            self._end(1, error)
        else:
            self._end(0)
        finally:
            for handle in handles:
                handle.remove()

    def _names(self) -> contextlib.AbstractContextManager[Any]:
        """What ``fully_shard`` and torch's other names mean to the script: what they are."""
        return contextlib.nullcontext()

    def _end(self, status: int, error: BaseException | None = None) -> None:
        """The script ends with ``status``, or by ``error``. Collective: no, for the other ranks may have failed."""
        if self._has_ended:
            return
        self._has_ended = True
        record = self.record
        record.status, record.ended_s = status, time.time()
        if error is not None:
            record.failure = "".join(traceback.format_exception_only(error)).strip()
            record.place = place_of(
                [(frame.filename, frame.lineno or 0) for frame in reversed(traceback.extract_tb(error.__traceback__))]
            )
        if status == background.EXIT_STATUS and threading.current_thread() is not threading.main_thread():  # the watchdog's word
            main_thread = sys._current_frames()[threading.main_thread().ident or 0]
            record.place = place_of(_innermost_first(traceback.extract_stack(main_thread)))
        else:
            self._watchdog.close()
        record.write(self._folder)
        if record.has_failed:
            self._look_alone()
        for each in self._watches:
            if record.has_failed:
                each.give_up()
            else:
                each.stop()
        record.write(self._folder)

    def _look_alone(self) -> None:
        """The script failed before an optimizer has stepped: its fault may be one that this rank can see by itself."""
        if not self.record.has_looked and self._model is not None:
            with contextlib.suppress(Exception):  # of a model that is half made, after an error that has been printed
                self._add(*check_alone(self._model))

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return  # into this graph: the module around it, which runs as Python has it, is the sharded one
        if self._model is None and is_sharded(module):
            self._model = module
            self.record.has_forward = True
            self.record.write(self._folder)
            self._meeting = Meeting()
            if self._timeout is not None and dist.is_initialized() and dist.get_world_size() > 1:
                self._watchdog.enter_context(watcher.watchdog(self._timeout))
        if module is self._model and self._meeting is not None and torch.is_grad_enabled():
            self._meeting.begin_forward()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._has_ended:
            return
        if optimizer not in self._num_steps:
            roots = _roots_of(optimizer)
            if not roots:
                self.record.has_stepped_another = True
                self.record.write(self._folder)
                return
            self._num_steps[optimizer] = 0
            self._look([root for root in roots if root not in self._watched], optimizer)
        if self._num_steps[optimizer] == self._max_steps:
            self._stop_script()
        self._num_steps[optimizer] += 1
        self.record.num_steps = max(self.record.num_steps, self._num_steps[optimizer])
        self.record.write(self._folder)

    def _look(self, roots: list[nn.Module], optimizer: Optimizer) -> None:
        """Check these roots, with all optimizers that train them, and watch them from now on. Collective: yes."""
        if not roots:
            return
        others = [each for each in _living_optimizers() if each is not optimizer]
        model = _joined(roots, _plain_parameters([optimizer, *others]))
        self._watched.update(model.modules())
        known = {id(param) for param in model.parameters()}
        trains = [not (_roots_of(each).isdisjoint(roots) and known.isdisjoint(_held(each))) for each in others]
        optimizers = [optimizer, *compress(others, trains)]
        self.record.has_looked = True
        if self._meeting is not None and not self._meeting.hold(ranks := inspect(model, None, "check").ranks):
            self._add(*check_alone(model), step_on_some_ranks(ranks, self._meeting.absent))
            return
        # An optimizer that lives, and never steps, is no fault; the watch sees those that do.
        self._add(*check(model, optimizers, ignore=["two-optimizers"]))
        patience = self._max_steps + 1
        self._watches.append(watch(model, optimizers, every=1, patience=patience))
        self._watches[-1].tell = self._add

    def _stop_script(self) -> None:
        if self._has_been_told or threading.current_thread() is not threading.main_thread():
            # The script has caught the exception and trains on, or it would end a thread of the script's and not the script.
            sys.stdout.flush()
            os._exit(0)
        self._has_been_told = True
        raise EnoughSteps

    def _add(self, *findings: Finding) -> None:
        self.record.findings.update(dict.fromkeys(findings))
        self.record.write(self._folder)


def _roots_of(optimizer: Optimizer) -> KeysView[nn.Module]:
    """The roots of the sharded models whose parameters ``optimizer`` has, in its order."""
    return dict.fromkeys(roots_of(_held(optimizer).values())).keys()


def _held(optimizer: Optimizer) -> dict[int, Tensor]:
    """The parameters of ``optimizer``, by id."""
    return {id(param): param for group in optimizer.param_groups for param in group["params"]}


def _plain_parameters(optimizers: list[Optimizer]) -> set[int]:
    """Ids of the parameters of ``optimizers`` that were not sharded."""
    held = {key: param for each in optimizers for key, param in _held(each).items()}
    return held.keys() - parameters_of(held.values()).keys()


def _joined(roots: list[nn.Module], plain: set[int]) -> nn.Module:
    """The smallest living module that has all ``roots``, so that names are as the script has them; a list of them if there is none.

    plain: parameters that were not sharded; a module that has them goes first, for the script may have forgotten to shard that root
    """

    def order(module: nn.Module) -> tuple[int, int]:
        return -len(plain & {id(param) for param in module.parameters()}), len(list(module.modules()))

    around = [module for module in _living(nn.Module) if set(roots) <= set(module.modules())]
    return min(around, key=order, default=nn.ModuleList(roots))


def _living_optimizers() -> list[Optimizer]:
    """Those of this process, stepped or not: a model may have several, and the first that steps is not all that trains it."""
    return [each for each in _living(Optimizer) if hasattr(each, "param_groups")]


def _living(kind: type[T]) -> list[T]:
    gc.collect()  # what only cycles hold is the script's no more
    return [each for each in gc.get_objects() if issubclass(type(each), kind)]


def _innermost_first(calls: traceback.StackSummary) -> list[tuple[str, int]]:
    return [(each.filename, each.lineno or 0) for each in reversed(calls)]


@contextlib.contextmanager
def _before_os_exit(tell: Callable[[int], None]) -> Iterator[None]:
    """Inside, ``tell`` gets the status of an ``os._exit`` of this process before it ends; processes that it has forked end as ever."""
    usual, this = os._exit, os.getpid()

    def _exit(status: int) -> NoReturn:
        try:
            if os.getpid() == this:
                tell(status)
        finally:
            usual(status)

    os._exit = _exit
    try:
        yield
    finally:
        os._exit = usual


def examine(script: Callable[[], object], max_steps: int, folder: str, timeout: float) -> NoReturn:
    """Be one rank: run ``script``, and end this process without waiting for threads that the script has left."""
    patient = Patient(max_steps, folder, timeout)
    patient.run(script)
    sys.stdout.flush()
    os._exit(patient.record.status or 0)
