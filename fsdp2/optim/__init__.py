"""Optimizers for sharded parameters, and the scaler of fp16 losses.

``flat`` lets any element-wise optimizer of torch's kind step on the flat shards of groups: ``elementwise`` finds out whether one is fit
for that, ``runs`` says which parameters become one tensor. ``AnyPrecisionAdamW`` keeps its states in chosen dtypes. ``GradScaler`` lets
all ranks skip the same steps. ``Muon`` makes matrices orthogonal on one rank each, by ``whole_matrices``.
``offloaded`` steps on the host (``host_runs``) and has its states there, in memory or in files (``mapped_file``) that it reads ahead,
after backward or alongside it (``in_backward``).
"""

from ..policy import DiskOffloadPolicy
from .any_precision import AnyPrecisionAdamW
from .flat import FlatOptimizer, flat
from .grad_scaler import GradScaler
from .muon import Muon
from .offloaded import OffloadedOptimizer, offloaded

__all__ = [
    "AnyPrecisionAdamW",
    "DiskOffloadPolicy",
    "FlatOptimizer",
    "GradScaler",
    "Muon",
    "OffloadedOptimizer",
    "flat",
    "offloaded",
]
