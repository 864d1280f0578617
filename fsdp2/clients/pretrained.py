"""``save_pretrained`` of transformers and PEFT on a sharded model: they write what they find, and would find shards.

    model.save_pretrained(folder)        # on all ranks; rank 0 gets the full tensors on its host, and writes

This file refuses to know files: what is written, and under which names, stays theirs. ``fsdp2.checkpoint.save_safetensors`` writes a
model that no host has room for.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor

from ..core.comm.agreement import agree, default_group
from ..core.comm.joint_calls import joint
from ..errors import CheckpointError, ModuleError


def saving_whole_tensors(inherited: Callable[..., Any]) -> Callable[..., Any]:
    """``inherited``, which rank 0 calls with full tensors for all; a call that has tensors of its own stays as it is.

    Of a model with adapters (PEFT's ``peft_config``), only what trains is gathered: the files hold nothing else of the base model.

    Collective: yes, over all ranks
    Raises:     on all ranks: CheckpointError with what went wrong on rank 0, ModuleError for a model that not all ranks have
    """

    @joint
    @functools.wraps(inherited)
    def save_pretrained(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _has_its_own_way(self, inspect.signature(inherited).bind(self, *args, **kwargs).arguments):
            return inherited(self, *args, **kwargs)
        meshes = [param.device_mesh for param in self.parameters() if isinstance(param, DTensor)]
        if any(mesh.size() != dist.get_world_size() for mesh in meshes):
            raise ModuleError(
                f"save_pretrained: not all ranks have parts of this {type(self).__name__}",
                expected="a model that is sharded over all ranks, of which rank 0 writes",
                fix="call fsdp2.checkpoint.save_safetensors(model, folder, process_group=...) on the ranks that have it",
            )
        trained_alone = hasattr(self, "peft_config")
        options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=trained_alone)
        whole = get_model_state_dict(self, options=options)
        result = problem = None
        if dist.get_rank() == 0:
            try:
                result = inherited(self, *args, **kwargs, state_dict=whole)
            except Exception as error:
                problem = CheckpointError(
                    f"save_pretrained on rank 0: {type(error).__name__}: {error}",
                    expected="arguments and a folder that it accepts",
                    fix="mend the cause; fsdp2.checkpoint.save_safetensors(model, folder) writes without gathering the model",
                )
                problem.__cause__ = error
        agree(default_group(), problem, None)
        return result

    return save_pretrained


def _has_its_own_way(model: nn.Module, arguments: dict[str, Any]) -> bool:
    """Whether the caller brings the tensors, or transformers itself has sharded the model, and gathers it."""
    state_dict = arguments.get("state_dict", arguments.get("kwargs", {}).get("state_dict"))
    return state_dict is not None or getattr(getattr(model, "config", None), "distributed_config", None) is not None
