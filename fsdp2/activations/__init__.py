"""What autograd keeps from forward to backward: computed again (``checkpointing``), or kept on the host (``offload``).

    fsdp2.apply_activation_checkpointing(model)                           # each of the repeated blocks
    fsdp2.apply_activation_offload(model, max_nbytes=16 << 30)            # what they still save goes to the host

Both may come before or after ``fully_shard`` and ``compile``, and in either order: what runs around a module's forward runs inside of
its hooks, so that one gather serves its recomputation and its backward, and names of parameters stay.
"""

from .checkpointing import apply_activation_checkpointing
from .offload import apply_activation_offload
from .policy import HEAVY_OPS, ActivationCheckpointPolicy

__all__ = ["HEAVY_OPS", "ActivationCheckpointPolicy", "apply_activation_checkpointing", "apply_activation_offload"]
