"""All checks: importing the files that hold them registers them."""

from __future__ import annotations

import os

from gpu import measurements, one_device, several_devices
from gpu.check import CHECKS

if os.environ.get("GPU_CHECK_PLANTED"):
    from gpu import planted

    __all__ = ["CHECKS", "measurements", "one_device", "planted", "several_devices"]
else:
    __all__ = ["CHECKS", "measurements", "one_device", "several_devices"]
