"""A thread on each rank notices a call that all ranks must make (``joint_calls.py``) and only some have made, and reports it.

    the program     if rank == 0:
                        state = full_state_dict(model)
    rank 0, 9 s     fsdp2: rank 0 has waited in full_state_dict for 9 s, which all ranks must call.
    later           Rank 1 has not come: it is in none such call, and has called full_state_dict 0 times; this is call 1 here.
                    Its main thread:
                      File "train.py", line 41, in <module> ...

The thread looks every few seconds. Only when a call has lasted from one look to the next, it asks the other ranks, over the store
and a connection of its own; the program's own communication stays as it is. If all ranks are in the call, it has much to do, and the
thread reports nothing. This file refuses to know the collectives in which ranks wait; ``fsdp2.watchdog`` explains these.

Worked example, two ranks, of which only rank 0 calls: its second look in the same call adds 1 to "asked"; rank 1's next look finds
that, and writes "call/1" and "stack/1"; rank 0's next look reads them and prints. Each rank that waits reports once a call.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...errors import ArgumentError
from .. import torch_compat as compat
from . import joint_calls
from .background import BackgroundThread
from .joint_calls import JointCall

EXIT_STATUS = 75
"""Exit status of a process that has waited too long for a missing rank: that of a watchdog; "try again later" in sysexits.h."""


class Limits:
    """What ``set_missing_rank_timeout`` has set, in seconds. ends None: the backend's time-out ends the call"""

    notice = 3.0
    ends: float | None = None


def set_missing_rank_timeout(timeout: float | None = None, *, notice: float = 3.0) -> None:
    """Set how long a call that all ranks must make waits for a rank that does not make it.

    timeout: seconds after which a rank that waits ends its process, with status 75 and the explanation: no exception reaches its main
             thread, which is in a collective. None: the backend's time-out raises, as it does without fsdp2
    notice:  seconds between two looks; the explanation comes at the second or third that finds the rank in the same call
    Raises:  ArgumentError if timeout or notice is not positive

    Example:
        fsdp2.set_missing_rank_timeout(120)
        fsdp2.checkpoint.full_state_dict(model)  # on all ranks
        fsdp2.set_missing_rank_timeout()
    """
    given: dict[str, Any] = {"timeout": timeout, "notice": notice}
    for name, value in given.items():
        if value is None and name == "timeout":
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise ArgumentError(
                f"set_missing_rank_timeout got {name}={value!r}",
                expected="seconds, more than 0",
                fix=f"leave {name} out, or pass a number",
            )
    Limits.ends, Limits.notice = timeout, float(notice)


class Lookout:
    """One rank's part, without the thread: a test calls ``look`` with a clock of its own.

    seen, looks: the call that the last look found, and how many looks have found it; asked: the store's number when this rank asked
    answered:    the store's number at the last answer of this rank
    """

    def __init__(self, store: Any, *, tell: Callable[[str], None] | None = None, end: Callable[[], None] | None = None) -> None:
        self._store = store
        self._tell, self._end = tell or _tell, end or _end
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._seen: JointCall | None = None
        self._looks = 0
        self._asked: int | None = None
        self._has_told = False
        self._answered = 0

    def look(self) -> None:
        """Look once. Collective: no; it reads and writes the store, and waits for no rank."""
        call = joint_calls.current
        if call is not self._seen:
            self._seen, self._looks, self._asked, self._has_told = call, 0, None, False
        self._looks += 1
        if call is not None and self._looks == 2:
            self._asked = self._store.add("asked", 1)
        number = self._store.add("asked", 0)
        if number != self._answered:
            self._answered = number
            self._store.set(f"stack/{self._rank}", _stack_of_main_thread())
            told = {"asked": number, "call": call and call.name, "counts": dict(joint_calls.counts)}
            self._store.set(f"call/{self._rank}", json.dumps(told))
        if call is not None and self._asked is not None and self._looks > 2:
            self._judge(call, self._looks - 1)

    def _judge(self, call: JointCall, looks: int) -> None:
        is_over = Limits.ends is not None and looks * Limits.notice >= Limits.ends
        if looks > 3 and not is_over:
            return
        told = {rank: self._answer_of(rank) for rank in sorted(_expected(call, self._world_size))}
        missing = {rank: answer for rank, answer in told.items() if answer is None or not _has_come(call, answer)}
        if not missing or (None in missing.values() and looks < 3 and not is_over):  # other ranks may not have looked yet
            return
        if not self._has_told:
            self._has_told = True
            first = min((rank for rank in told if rank not in missing), default=self._rank)
            stacks = {rank: self._read(f"stack/{rank}") for rank, answer in missing.items() if answer} if self._rank == first else {}
            self._tell(_sentence(self._rank, call, looks * Limits.notice, missing, stacks))
        if is_over:
            self._tell(f"fsdp2: rank {self._rank} ends: set_missing_rank_timeout({Limits.ends:g}) is over")
            self._end()

    def _read(self, key: str) -> str:
        return bytes(self._store.get(key)).decode()

    def _answer_of(self, rank: int) -> dict[str, Any] | None:
        """What a rank has answered since this rank asked; None if it has not answered."""
        if not self._store.check([f"call/{rank}"]):
            return None
        answer: dict[str, Any] = json.loads(self._read(f"call/{rank}"))
        return answer if answer["asked"] >= (self._asked or 0) else None


def _has_come(call: JointCall, answer: dict[str, Any]) -> bool:
    """A rank that has called it as often may have left it: not each rank has as much to do there."""
    calls: int = answer["counts"].get(call.name, 0)
    return calls >= call.number or bool(answer["call"] == call.name)


def _stack_of_main_thread() -> str:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "".join(traceback.format_stack(frame)[-8:])


def _sentence(rank: int, call: JointCall, seconds: float, missing: dict[int, dict[str, Any] | None], stacks: dict[int, str]) -> str:
    """The report. stacks: of the ranks that answered, on the first rank that waits; other ranks leave them out"""
    lines = [f"fsdp2: rank {rank} has waited in {call.name} for {seconds:g} s, which all ranks must call."]
    for other, answer in missing.items():
        if answer is None:
            lines.append(f"Rank {other} does not answer: its process is gone, or has not sharded anything yet.")
            continue
        instead = f"it is in {answer['call']}" if answer["call"] else "it is in none such call"
        times = answer["counts"].get(call.name, 0)
        lines.append(
            f"Rank {other} has not come: {instead}, and has called {call.name} {times} times; this is call {call.number} here."
        )
        if other in stacks:
            lines.append(f"Its main thread:\n{stacks[other].rstrip()}")
    lines.append(f"fix: call {call.name} on all ranks, outside of `if rank == 0:`")
    return "\n".join(lines)


def _expected(call: JointCall, world_size: int) -> set[int]:
    """The ranks that must make the call: those of its process group, or of its parameters' meshes; all, if it names neither."""
    args, kwargs = call.arguments
    group = kwargs.get("process_group") or getattr(args[0] if args else None, "process_group", None)
    if group is not None:
        return set(dist.get_process_group_ranks(group))
    found: set[int] = set()
    for param in _parameters(args[:2] or tuple(kwargs.values())):
        if isinstance(param, DTensor):
            found.update(param.device_mesh.mesh.flatten().tolist())
    return found or set(range(world_size))


def _parameters(arguments: tuple[Any, ...]) -> Iterator[Tensor]:
    for each in arguments:
        if isinstance(each, nn.Module):
            for module in each.modules():  # not each.parameters(), which may reshard, and this is another thread
                yield from (param for param in module._parameters.values() if param is not None)
        elif isinstance(each, Tensor):
            yield each
        elif isinstance(each, (list, tuple)):
            yield from (tensor for tensor in each if isinstance(tensor, Tensor))


# --- the thread ---------------------------------------------------------------------------------------------------------------------

_watching: Any = None  # the default process group for which the thread runs
_num_made = 0  # equal on all ranks: each process group that a process makes has keys of its own


def start() -> None:
    """Start the thread, once for each default process group of several ranks that meet over TCP (as under torchrun)."""
    global _watching, _num_made
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if world is None or world is _watching:
        return
    _watching = world
    if dist.get_world_size() > 1 and compat.ranks_meet_over_tcp():
        _num_made += 1
        look_out = Lookout(compat.own_connection_to_the_store(f"fsdp2_lookout_{_num_made}"))
        leaving = threading.Event()
        BackgroundThread(lambda: _run(look_out, world, leaving), stop=leaving.set, name="fsdp2_lookout")


def _run(look_out: Lookout, world: Any, leaving: threading.Event) -> None:
    """Until the program or the process group ends, or its store is gone."""
    while not leaving.wait(Limits.notice) and dist.is_initialized() and dist.group.WORLD is world:
        try:
            look_out.look()
        except RuntimeError:
            return


def _tell(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _end() -> None:
    sys.stdout.flush()
    os._exit(EXIT_STATUS)
