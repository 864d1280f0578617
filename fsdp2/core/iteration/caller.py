"""Whether the code that began a forward still runs it, or something has ended that forward without a word, such as ctrl-C.

torch calls no hook then. To hooks the next forward looks like one that the root makes of itself inside its own; only the stack differs.
"""

from __future__ import annotations

import sys
from types import FrameType

_OURS = ("fsdp2/core/", "torch/_dynamo/")  # the files of hooks and of what calls them under a compiler, whose frames end before forward


class Caller:
    """The frame that called our pre-forward hook: of ``nn.Module.__call__``, or of a method registered as a forward."""

    __slots__ = ("_frame",)

    def __init__(self) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and any(part in frame.f_code.co_filename for part in _OURS):
            frame = frame.f_back
        self._frame = frame

    def is_running(self) -> bool:
        """Whether it is below us on the stack."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self._frame:
            frame = frame.f_back
        return frame is not None
