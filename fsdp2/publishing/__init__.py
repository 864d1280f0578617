"""A model's weights for somebody else, such as an inference engine: ``fsdp2.publish``, and places to publish to.

docs/publish.md is the guide.
"""

from .consumer import Stream, TensorMeta
from .tcp import Receiver, to_socket
from .weights import Weights, publish
from .weights_file import Snapshot, read_file, to_file

__all__ = ["Receiver", "Snapshot", "Stream", "TensorMeta", "Weights", "publish", "read_file", "to_file", "to_socket"]
