"""The states of this rank's random number generators: Python's, NumPy's if it is imported, torch's on the CPU and on its device.

Values are plain: ``torch.load(weights_only=True)`` takes them.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from ..core import torch_compat as compat


def random_state(device_type: str) -> dict[str, Any]:
    """device_type: "cuda" and so on for the generator of the current device as well, "cpu" for none."""
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {"python": [version, list(numbers), gauss], "torch": torch.get_rng_state()}
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        kind, key, *rest = numpy.random.get_state()
        state["numpy"] = [str(kind), key.tolist(), *(float(each) if isinstance(each, float) else int(each) for each in rest)]
    if device_type != "cpu":
        state[device_type] = compat.device_module(device_type).get_rng_state()
    return state


def set_random_state(state: dict[str, Any], device_type: str) -> None:
    """Continue where ``random_state`` was called; generators that it has nothing of stay as they are."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy as np

        kind, key, *rest = state["numpy"]
        np.random.set_state((kind, np.array(key, dtype=np.uint32), *rest))
    if device_type in state:
        compat.device_module(device_type).set_rng_state(state[device_type])
