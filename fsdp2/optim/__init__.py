"""Optimizers for sharded parameters. ``flat`` lets any element-wise optimizer of torch's kind step on the flat shards of groups.

``elementwise`` finds out whether an optimizer is fit for that; ``runs`` says which parameters become one tensor; ``flat`` is the
optimizer that the user holds.
"""

from .flat import FlatOptimizer, flat

__all__ = ["FlatOptimizer", "flat"]
