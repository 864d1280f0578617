"""Values for the tensors of a model that are on the meta device."""

from .api import RESET_NAMES, materialize

__all__ = ["RESET_NAMES", "materialize"]
