"""One forward of a root: it unshards each unit as its turn comes, prefetches the next, and reshards after each.

``Forward`` records the order in which units run. The next forward that begins with the same unit prefetches from that
record, and backward from the reverse of this forward's order.
"""

from __future__ import annotations

import sys
from types import FrameType

import torch

from ...torch_names import torch_autograd
from ..comm import collective_log
from .forward_log import ForwardLog
from .unit import Unit, ahead
from .unit_tree import UnitTree, release


class Forward:
    """One forward under way. When it has ended, only the record of its order and the ``Iteration`` stay.

    root: the unit whose forward began it
    log:  its log, if there is one
    precedes_backward: it has a graph, at least outside of re-entrant checkpoints
    """

    def __init__(self, tree: UnitTree, root: Unit, log: ForwardLog | None) -> None:
        self.root = root
        self.log = log
        self._tree = tree
        # Order compute after this gather last: casts of the next one then follow compute, and run alongside this one.
        self._host_waits = tree.streams.host_waits
        self._caller = torch_autograd.caller_of_hooks()  # the frame of ``nn.Module.__call__`` or of a forward method
        self._recorded = tree.records.get(root, [])
        self._recording: list[Unit] = []
        self.precedes_backward = torch.is_grad_enabled()
        self._num_before = len(tree.iteration.order)
        self._prefetched: list[Unit] = []
        self._partial: list[Unit] = []  # lists of modules that have run in part

    def begin(self, unit: Unit) -> None:
        """``unit`` is about to run: unshard it, then prefetch the unit after it. Collective: yes."""
        log = collective_log.current
        if log is not None:
            log.enter("forward", unit.name)
        unit.issue()
        if self._host_waits:
            unit.wait()
        recording = self._recording
        # Neither units without parameters, which would hide what comes after them, nor later modules of a list.
        if unit.uses and len(unit.calls.to_run) in (0, len(unit.modules)):
            recording.append(unit)
        options = unit.options
        others = options.prefetch_forward
        position = len(recording)
        recorded = self._recorded
        if not others and position < len(recorded) and recorded[position - 1] is unit:
            depth = options.forward_depth
            others = recorded[position : position + depth.units]
            if depth.units > 1:  # by far the most common is 1
                others = ahead(others, depth)
        for other in others:
            self._prefetched.append(other)  # before its gathers: the second one may fail
            other.issue()
        if not self._host_waits:
            unit.wait()
        if log is not None:
            log.resume()

    def end(self, unit: Unit, stays: bool = False) -> None:
        """``unit`` has run: free what backward does not need (``stays``: nothing)."""
        log = collective_log.current
        if log is not None:
            log.exit("forward", unit.name)
        for weight in unit.max_norm_weights:
            weight.write_back()
        tree = self._tree
        tree.reshard_after_forward(unit, stays)
        # Ranks do not compare whether backward comes to a unit without parameters, so it may not start others' gathers.
        if self.precedes_backward and (unit.uses or unit is tree.root):
            iteration = tree.iteration
            iteration.positions[unit].append(len(iteration.order))
            iteration.order.append(unit)
        if log is not None:
            log.resume()

    def end_part(self, unit: Unit) -> bool:
        """One module of the list ``unit`` has run, and others have not; True if that ends the forward.

        The others may follow in this forward. But if the user called the module by itself, for instance a head on one
        chunk of tokens, its backward or its next chunk follows.
        """
        if unit is not self.root:
            self._partial.append(unit)
            return False
        unit.calls.end_pass()
        self.end(unit, stays=self.precedes_backward)
        return True

    def finish(self, failed: bool = False) -> None:
        """The root has run, or raised."""
        if collective_log.current is not None:
            collective_log.current.leave()
        for unit in self._partial:
            if unit.calls.to_run:
                unit.calls.end_pass()
                if not unit.calls.running:
                    self.end(unit)
        tree = self._tree
        if failed:  # no backward follows, and the next forward prefetches by the order of the last complete one
            tree.iteration.cut(self._num_before)
        else:
            tree.records[self.root] = self._recording
        release(self._prefetched)
        tree.await_host_reads()  # a backward may never come, and the user may write offloaded shards now
        if not tree.iteration.order:
            for unit in tree.iteration.left_by_forward:  # no backward can follow, and the user may write parameters
                unit.hide()
        elif self.precedes_backward and not failed:
            tree.note_forward_end()

    def was_interrupted(self) -> bool:
        """Whether something other than an ``Exception``, such as ctrl-C, has ended the forward.

        torch calls no hook then. The hooks of the next forward cannot tell it from a call that the root makes of itself
        inside its own forward; only the stack differs.
        """
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self._caller:
            frame = frame.f_back
        return frame is None
