"""Every move that a group's state makes in a test is one of the table's."""

from __future__ import annotations

from typing import Any

from fsdp2.core.group.param_group import MOVES, GroupState, ParamGroup


class _CheckedState:
    """Stands for the attribute ``state`` of every group."""

    def __get__(self, group: ParamGroup | None, owner: Any = None) -> Any:
        return self if group is None else group.__dict__["state"]

    def __set__(self, group: ParamGroup, new: GroupState) -> None:
        before = group.__dict__.get("state")
        assert before is None or new in MOVES[before], f"{group.fqn or 'the root'}: {before} -> {new} is not in the table of moves"
        group.__dict__["state"] = new


def check_moves() -> None:
    """From now on, in this process."""
    ParamGroup.state = _CheckedState()  # type: ignore[assignment]
