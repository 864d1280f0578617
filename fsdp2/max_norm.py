"""Embeddings with ``max_norm`` change their weight in forward: they shrink rows that were looked up and are too long.

Each rank shrinks the rows that it looked up, in the unsharded weight, which reshard drops. To give the sharded weight
the unsharded model's values, ranks agree on the rows that any rank shrank, and each shrinks those that it keeps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .core.comm.collective_log import during
from .core.group.param import ShardedParam
from .core.group.param_group import ParamGroup
from .core.plan.layout import rows_of


@dataclass(frozen=True)
class ShrunkRows:
    """The weight of one embedding with ``max_norm``, cut on its rows."""

    _group: ParamGroup
    _param: ShardedParam
    _module: nn.Embedding | nn.EmbeddingBag

    @torch.no_grad()
    def write_back(self) -> None:
        """Shrink in the shard all rows that a rank shrank; no-op unless unsharded. Collective: yes, over the mesh."""
        param, mesh = self._param, self._group.mesh
        max_norm = self._module.max_norm
        if not self._group.is_unsharded or param.unsharded is None or max_norm is None:
            return
        whole = param.unsharded.detach()
        norms = whole.float().norm(p=self._module.norm_type, dim=1)
        # Or short enough from the start.
        shrunk = (norms <= max_norm * (1 + torch.finfo(whole.dtype).eps)).to(torch.uint8)
        for process_group in (mesh.shard_group, mesh.replicate_group):
            if process_group is not None and process_group.size() > 1:
                with during("all-reduce of shrunk rows", process_group, shrunk):
                    dist.all_reduce(shrunk, op=dist.ReduceOp.MAX, group=process_group)
        rows = rows_of(len(shrunk), param.rank, mesh.shard_size)
        own = shrunk[rows.start : rows.stop]
        if param.local.device.type == "cpu":
            indices = own.nonzero().flatten().to(param.local.device)
            if indices.numel() > 0:
                torch.embedding_renorm_(param.local, indices, max_norm, self._module.norm_type)
        else:
            _shrink(param.local, own.bool(), max_norm, self._module.norm_type)
        param.version = -1  # what the graph has saved has the same values


def _shrink(weight: Tensor, chosen: Tensor, max_norm: float, norm_type: float) -> None:
    """Do as ``torch.embedding_renorm_`` to the ``chosen`` rows, a mask: indices would make the host wait."""
    norms = torch.linalg.vector_norm(weight, ord=norm_type, dim=1)
    scales = torch.where(chosen & (norms > max_norm), max_norm / (norms + 1e-7), 1)
    weight.mul_(scales.unsqueeze(1))


def shrinking_weights(groups: Iterable[ParamGroup]) -> list[ShrunkRows]:
    """The weights of ``groups`` that belong to an embedding with ``max_norm`` and are cut on their rows."""
    return [
        ShrunkRows(group, param, owner.module)
        for group in groups
        if not group.plan.has_own_memory
        for param in group.params
        for owner in param.owners[:1]
        if isinstance(owner.module, (nn.Embedding, nn.EmbeddingBag))
        and owner.module.max_norm is not None
        and param.spec.order is None
        and param.spec.unsharded is None
        and (param.spec.cut.dim == 0 or param.spec.cut.num_shards == 1)
    ]
