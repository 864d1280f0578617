"""What ``set_missing_rank_timeout`` starts: a thread on each rank that notices calls that only some ranks have made.

    the program     fsdp2.set_missing_rank_timeout(60)
                    if rank == 0:
                        state = full_state_dict(model)
    rank 0, 9 s     fsdp2: rank 0 has waited for 9 s in full_state_dict, which all ranks must call. It called it here:
                      File "train.py", line 41, in <module>
                        state = full_state_dict(model)
                    Rank 1 has not called it: it is in no such call ... Its main thread: ...
    rank 0, 60 s    ends its process

Threads talk over the store, by connections of their own. A rank whose call lasts from one look to the next asks the others, and
each rank answers with its calls so far and the lines of the program that its main thread is at. The watchdog explains any hang, but
needs all ranks to stand still; here the missing ranks may train on.

Worked example, two ranks, of which only rank 0 calls: its second look in the same call adds 1 to "asked", and writes "call/0"; at its
fourth look "call/1" is missing, or says that rank 1 is in no such call.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ..arguments import POSITIVE, require
from ..inspect import lost_ranks, number_of_world
from ..torch_names import torch_collectives
from . import background, joint_calls
from .background import BackgroundThread
from .joint_calls import JointCall
from .report import lines_of_the_user


class Limits:
    """What ``set_missing_rank_timeout`` has set, in seconds. ends None: the backend's time-out ends the call

    asked: whether the program has called it, so that ranks answer that are in no such call
    """

    notice = 3.0
    asked = False
    ends: float | None = None


def set_missing_rank_timeout(timeout: float | None = None, *, notice: float = 3.0) -> None:
    """Set how long a call that all ranks must make waits for a rank that does not make it, and start a thread that sees to it.

    timeout: seconds after which a rank that waits ends its process, with status 75 and the explanation: no exception reaches its main
             thread, which is in a collective. None: the backend's time-out raises, as it does without fsdp2
    notice:  seconds between two looks; the explanation comes at the fourth that finds the rank in the same call, or at the eighth if
             a missing rank has not answered by then

    Call it on all ranks: each then answers the others wherever it is, and the explanation says where the missing ranks are.
    Raises:  ArgumentError if timeout or notice is not positive

    Example:
        fsdp2.set_missing_rank_timeout(120)
        fsdp2.checkpoint.full_state_dict(model)  # on all ranks
        fsdp2.set_missing_rank_timeout()
    """
    require("set_missing_rank_timeout", POSITIVE.or_none, timeout=timeout)
    require("set_missing_rank_timeout", POSITIVE, notice=notice)
    Limits.ends, Limits.notice, Limits.asked = timeout, float(notice), True
    start()


class Lookout:
    """One rank's part, without the thread: a test calls ``look``. store: None: a connection of its own, made when it is needed"""

    def __init__(self, store: Any = None, *, tell: Callable[[str], None] | None = None, end: Callable[[], None] | None = None) -> None:
        self._store_if_made = store
        self._tell, self._end = tell or background.tell, end or background.end_process
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._seen: JointCall | None = None  # the call that the last look found,
        self._looks = 0  # and how many looks have found it
        self._is_first = self._has_told = False  # among the ranks that have told that they are in a call; whether it has reported
        self._asked: int | None = None  # the store's number when this rank asked
        self._told: dict[str, Any] = {"asked": 0}  # what this rank has last told, and the store's number then

    @property
    def _store(self) -> Any:
        if self._store_if_made is None:
            self._store_if_made = torch_collectives.own_connection_to_the_store(f"fsdp2_lookout_{number_of_world()}")
        return self._store_if_made

    def look(self) -> None:
        """Look once. Collective: no; it reads and writes the store, and waits for no rank."""
        call = joint_calls.current
        if call is not self._seen:
            self._seen, self._looks, self._asked, self._is_first, self._has_told = call, 0, None, False, False
        self._looks += 1
        if call is not None and self._looks == 2:
            self._is_first = self._store.add(f"in/{call.name}/{call.number}", 1) == 1
            self._asked = self._store.add("asked", 1)
        asked = self._store.add("asked", 0)
        told = {"asked": asked, "call": call and call.name, "counts": dict(joint_calls.counts)}
        if (self._asked is not None or asked != self._told["asked"]) and told != self._told:
            self._told = told
            self._store.set(f"stack/{self._rank}", lines_of_the_user())
            self._store.set(f"call/{self._rank}", json.dumps(told))
        if call is not None and self._asked is not None and self._looks > 3:
            self._judge(call, self._looks - 1)

    def _judge(self, call: JointCall, looks: int) -> None:
        is_over = Limits.ends is not None and looks * Limits.notice >= Limits.ends
        reports = self._is_first and not self._has_told
        if not (reports or is_over):
            return
        told = {rank: self._answer_of(rank) for rank in sorted(joint_calls.expected(call) or range(self._world_size))}
        missing = {rank: answer for rank, answer in told.items() if answer is None or not _has_come(call, answer)}
        if not missing:
            return
        if reports and (None not in missing.values() or looks >= 7 or is_over):  # a slow host takes longer to answer
            self._has_told = True
            stacks = {rank: bytes(self._store.get(f"stack/{rank}")).decode() for rank, answer in missing.items() if answer}
            self._tell(_sentence(self._rank, call, looks * Limits.notice, missing, stacks))
        if is_over:
            self._tell(f"fsdp2: rank {self._rank} ends: set_missing_rank_timeout({Limits.ends:g}) is over")
            self._end()

    def _answer_of(self, rank: int) -> dict[str, Any] | None:
        """What a rank has answered since this rank asked; None if it has not answered."""
        if not self._store.check([f"call/{rank}"]):
            return None
        answer: dict[str, Any] = json.loads(bytes(self._store.get(f"call/{rank}")))
        return answer if answer["asked"] >= (self._asked or 0) else None


def _has_come(call: JointCall, answer: dict[str, Any]) -> bool:
    """A rank that has called it as often may have left it: not each rank has as much to do there."""
    calls: int = answer["counts"].get(call.name, 0)
    return calls >= call.number or bool(answer["call"] == call.name)


def _sentence(rank: int, call: JointCall, seconds: float, missing: dict[int, dict[str, Any] | None], stacks: dict[int, str]) -> str:
    """The report. stacks: of the ranks that answered"""
    lines = [
        f"fsdp2: rank {rank} has waited for {seconds:g} s in {call.name}, which all ranks must call. It called it here:",
        lines_of_the_user().rstrip(),
    ]
    gone = lost_ranks() if None in missing.values() else {}
    for other, answer in missing.items():
        if answer is None:
            lines.append(f"Rank {other} has not called it, and does not answer" + (f": {gone[other]}." if other in gone else "."))
            continue
        instead = f"it is in {answer['call']}" if answer["call"] else "it is in no such call"
        times = answer["counts"].get(call.name, 0)
        lines.append(
            f"Rank {other} has not called it: {instead}, and has called {call.name} {times} times; this is call {call.number} of rank "
            f"{rank}. Its main thread:\n{stacks[other].rstrip()}"
        )
    lines.append(f"fix: call {call.name} on all ranks, outside of `if rank == 0:`")
    return "\n".join(lines)


# --- the thread ---------------------------------------------------------------------------------------------------------------------

_watching: Any = None  # the default process group for which the thread runs


def start() -> None:
    """Start the thread, once for each default process group of several ranks that meet over TCP (as under torchrun)."""
    global _watching
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if world is None or world is _watching:
        return
    _watching = world
    if dist.get_world_size() > 1 and _ranks_meet_over_tcp():
        look_out = Lookout()
        leaving = threading.Event()
        BackgroundThread(lambda: _run(look_out, world, leaving), stop=leaving.set, name="fsdp2_lookout")


def _run(look_out: Lookout, world: Any, leaving: threading.Event) -> None:
    """Until the program or the process group ends, or its store is gone."""
    while not leaving.wait(Limits.notice) and dist.is_initialized() and dist.group.WORLD is world:
        try:
            look_out.look()
        except RuntimeError:
            return


def _ranks_meet_over_tcp() -> bool:
    """Whether the default process group's store is a TCPStore, below its prefixes."""
    torch_dist: Any = dist
    store = torch_dist.distributed_c10d._get_default_store()
    while isinstance(store, torch_dist.PrefixStore):
        store = store.underlying_store
    return isinstance(store, torch_dist.TCPStore)
