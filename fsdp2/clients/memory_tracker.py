"""What torch's ``FSDPMemTracker`` finds on a sharded module: hooks and functions that it replaces by its own, which run them.

    with FSDPMemTracker(model, optimizer) as tracker:  # its hooks take the places of ours in all modules
        model(x).sum().backward()                      # it looks at the memory before and after each moment of a unit
    tracker.display_snapshot("peak")                   # here it has put everything back

A gather here writes into the unsharded parameters, which torch's tracker takes for buffers of the gather. Gradients reach the sharded
parameters after the moment in which their reduction starts. So both are counted once more when they are complete.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..core.iteration.backward import Backward
from ..core.iteration.call import Call
from ..core.iteration.module_state import ModuleState
from ..core.iteration.unit import Unit
from ..core.iteration.unit_tree import UnitTree
from . import torch_names

_Moment = Callable[[], None]


class TrackedState(ModuleState):
    """A unit that a tracker may follow. _around: what it has put around moments of backward, by name; None: nobody tracks"""

    _around: dict[str, Callable[[_Moment], None]] | None = None
    _tracker: Any = None
    _ran = False  # forward, since the tracker is here: it knows no other modules

    def around(self, moment: str) -> Callable[[_Moment], None]:
        return (self._around or {}).get(moment, _run)

    def put_around(self, moment: str, function: Callable[[_Moment], None]) -> None:
        if self._around is not None:  # else the tracker puts back what it found, in lists of modules maybe its own function
            self._around[moment] = function

    @property
    def _pre_forward_hook_handle(self) -> Any:
        return _STAYS

    @_pre_forward_hook_handle.setter
    def _pre_forward_hook_handle(self, handle: Any) -> None:
        hooks = handle.hooks_dict_ref()
        hook = hooks[handle.id]
        handle.remove()
        if hook not in (self._pre_forward, self._post_forward):
            self._around = self._around or {}
            self._tracker = torch_names.tracker_behind(hook)
            self.hooks.give_place(hooks, hook)
            self._count_parameters()
            return
        self.hooks.run_eagerly()
        self._around, self._ran, self._tracker = None, False, None
        if self.schedule is not None:
            self.schedule.tree.followers.clear()
            root = self.schedule.tree.root
            root.watchers = tuple(each for each in root.watchers if getattr(each, "func", None) is not _count_gradients)

    _post_forward_hook_handle = _pre_forward_hook_handle

    def _pre_forward(self, module: Any, args: Any, kwargs: Any) -> Any:
        returned = self.hooks.pre_forward(module, args, kwargs)
        assert self.schedule is not None
        self._ran = True
        tree = self.schedule.tree
        if _follow not in tree.followers:
            tree.followers.append(_follow)
            tree.root.watchers = (*tree.root.watchers, functools.partial(_count_gradients, tree))
        return returned

    def _post_forward(self, module: Any, args: Any, output: Any) -> Any:
        return self.hooks.post_forward(module, args, output)

    def _count_parameters(self) -> None:
        for group in self.groups:
            for param in group.params:
                if param.unsharded is not None:
                    torch_names.count_as(self._tracker, param.unsharded, "UNSHARDED_PARAM")


class _Stays:
    def remove(self) -> None:
        """Nothing: the hook that is registered next takes the place of ours."""


_STAYS = _Stays()


def _run(moment: _Moment) -> None:
    moment()


def _follow(backward: Backward) -> None:
    """Let the trackers of units look at the moments of ``backward``, which has just begun."""
    begin, reduce = backward.begin, backward.reduce

    def begin_tracked(unit: Unit, call: Call) -> None:
        if isinstance(unit, TrackedState) and unit._ran:
            unit.around("begin")(functools.partial(begin, unit, call))
            unit._count_parameters()
        else:
            begin(unit, call)

    def reduce_tracked(unit: Unit, at_end: bool = False) -> None:
        around = unit.around("reduce") if isinstance(unit, TrackedState) and unit._ran else _run
        around(functools.partial(reduce, unit, at_end))

    backward.begin, backward.reduce = begin_tracked, reduce_tracked  # type: ignore[method-assign]


def _count_gradients(tree: UnitTree) -> None:
    for unit in tree.units:
        for param in (param for group in unit.groups for param in group.params if param.sharded.grad is not None):
            if isinstance(unit, TrackedState) and unit._tracker is not None:
                torch_names.count_as(unit._tracker, param.sharded.grad, "SHARDED_GRAD")
