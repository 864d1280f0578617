"""``save_pretrained`` of transformers and PEFT on a sharded model, where by themselves they would write shards.

    model.save_pretrained(folder)        # on all ranks; rank 0 writes

A plain call of transformers' streams the weights, so that no rank holds the model; ``checkpoint/transformers_save.py``
decides which calls are plain. For others, rank 0 gets the full tensors on its host, and the library decides what to
write under which names.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ..errors import CheckpointError, FSDPError, ModuleError
from ..hangs.joint_calls import joint
from ..inspect import exchange
from .adapters import entries_of_adapters, showing_prompts

writers: Any = None
"""Imports and returns ``plain_call`` and ``entries_on_rank_0`` of ``fsdp2.checkpoint``; set by the package, which is above both."""


def saving_whole_tensors(inherited: Callable[..., Any]) -> Callable[..., Any]:
    """``inherited`` on all ranks, with rank 0's arguments; a call with its own tensors (``state_dict``) stays as it is.

    A plain call on a model of transformers streams its weights, as ``fsdp2.checkpoint.save_safetensors`` does. Rank 0 calls
    ``inherited`` with full tensors for all where transformers must see the whole model: it has adapters, is quantized, or its weights
    get other names or shapes in the files; ``push_to_hub``, ``variant`` and the like. PEFT's models are never plain.

    For a model with adapters (PEFT's ``peft_config``), only the entries that the files need are gathered: see
    ``adapters.py``.

    Memory:     2 * 64 MiB on any rank; for a call that is not plain, in addition the full tensors on rank 0's host
    Collective: yes, over all ranks
    Raises:     on all ranks: CheckpointError with rank 0's error, ModuleError for a model that is not on all ranks
    """

    @joint
    @functools.wraps(inherited)
    def save_pretrained(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(inherited).bind(self, *args, **kwargs)
        if _has_its_own_way(self, bound.arguments):
            return inherited(self, *args, **kwargs)
        meshes = [param.device_mesh for param in self.parameters() if isinstance(param, DTensor)]
        if any(mesh.size() != dist.get_world_size() for mesh in meshes):
            raise ModuleError(
                f"save_pretrained: not all ranks have shards of this {type(self).__name__}",
                expected="a model that is sharded over all ranks; rank 0 writes",
                fix="call fsdp2.checkpoint.save_safetensors(model, folder, process_group=...) on the ranks that have it",
            )
        plain_call, entries_on_rank_0 = writers()
        said = plain_call(self, inherited, bound), entries_of_adapters(self, bound) if dist.get_rank() == 0 else None
        call, entries = exchange(said)[0]
        if call is not None:
            return call.run(self)
        whole = entries_on_rank_0(self, entries)
        result = problem = None
        if dist.get_rank() == 0:
            try:
                with showing_prompts(self, whole):
                    result = inherited(self, *args, **kwargs, state_dict=whole)
            except FSDPError as error:
                problem = error
            except Exception as error:
                problem = CheckpointError(
                    f"save_pretrained on rank 0: {type(error).__name__}: {error}",
                    expected="arguments and a folder that it accepts",
                    fix="fix the cause; fsdp2.checkpoint.save_safetensors(model, folder) writes without gathering the model",
                )
                problem.__cause__ = error
        exchange(None, problem)
        return result

    return save_pretrained


def _has_its_own_way(model: nn.Module, arguments: dict[str, Any]) -> bool:
    """Whether the caller passes the tensors, or transformers itself sharded the model and gathers it."""
    state_dict = arguments.get("state_dict", arguments.get("kwargs", {}).get("state_dict"))
    return state_dict is not None or getattr(getattr(model, "config", None), "distributed_config", None) is not None
