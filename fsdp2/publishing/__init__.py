"""A model's weights for somebody else, such as an inference engine: ``fsdp2.publish``, and places to publish to.

docs/publish.md is the guide.
"""

from .weights import TensorMeta, Weights, publish

__all__ = ["TensorMeta", "Weights", "publish"]
