"""Decides when nothing has moved for too long.

A *sign* of a rank tells at each look: how often the rank has looked, how many moves its collectives have made, where its main thread
is. A rank that keeps looking is alive. If its main thread has moved, it runs Python, an evaluation for instance, and other ranks may
have to wait for it; so they may for a rank that writes a checkpoint, whose signs count as moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Sign:
    """looks: how often the watchdog thread has looked; moves: of the rank's collectives; at: where its main thread is"""

    looks: int
    moves: int
    at: int


class Patience:
    """Since when the signs have stood still.

    timeout:  seconds in which something must move on some rank: a collective, or the main thread
    patience: seconds in which a collective must move on some rank, wherever main threads are, and in which each rank gives a first sign
    """

    def __init__(self, timeout: float, patience: float, num_ranks: int, now: float) -> None:
        self.timeout = timeout
        self.patience = patience
        self._num_ranks = num_ranks
        self._signs: dict[int, Sign] = {}
        self._heard_at: dict[int, float] = {}
        self._moved_at = self._communicated_at = now

    def hear(self, signs: Mapping[int, Sign], left: Iterable[int], now: float) -> None:
        """Take the last sign of each rank that has given one. left: ranks that have given signs and have stopped to watch"""
        for rank in left:
            self._heard_at.setdefault(rank, now)
        for rank, sign in signs.items():
            before = self._signs.get(rank)
            if before is None or before.looks != sign.looks:
                self._heard_at[rank] = now
            if before is None or before.moves != sign.moves:
                self._communicated_at = self._moved_at = now
            elif before.at != sign.at:
                self._moved_at = now
        self._signs = dict(signs)

    def is_over(self, now: float) -> str:
        """Why the wait is over, in words; "" if it is not."""
        if now - self._moved_at >= self.timeout and len(self._heard_at) == self._num_ranks:
            return f"nothing has moved on any rank for {now - self._moved_at:.0f} s"
        if now - self._communicated_at >= self.patience:
            why = "though Python runs on some" if len(self._heard_at) == self._num_ranks else "and some ranks have not begun"
            return f"no collective has moved on any rank for {now - self._communicated_at:.0f} s, {why}"
        return ""

    def still_for(self, now: float) -> float:
        """Seconds since anything moved on a rank that has given a sign."""
        return now - self._moved_at

    def silent_for(self, rank: int, now: float) -> float | None:
        """Seconds since the rank last looked; None if it never has."""
        return now - self._heard_at[rank] if rank in self._heard_at else None
