"""A sharded model lives as long as somebody holds it, and no longer."""

import gc
import weakref

import torch
from torch import nn

from fsdp2 import fully_shard
from harness import cpu_mesh, on_ranks
from harness.models import batches, mlp
from harness.sharding import shard_blocks


@on_ranks(2)
def test_a_sharded_model_is_collected_with_its_memory_when_nobody_holds_it():
    """Symptom: flat shards outlived their models. Cause: a weak-keyed table whose values held its keys."""
    model = mlp()
    shard_blocks(model)
    model(batches()[0]).sum().backward()
    watched = [weakref.ref(group.flat) for group in model._get_fsdp_state().groups]
    watched += [weakref.ref(model), weakref.ref(model.blocks[0]), weakref.ref(model.first.weight)]
    del model
    gc.collect()
    assert [reference() for reference in watched] == [None] * len(watched)


@on_ranks(2)
def test_the_hooks_of_a_unit_can_be_removed():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    before = [_hooks(module) for module in model.modules()]
    fully_shard(model[0], mesh=cpu_mesh())
    fully_shard(model, mesh=cpu_mesh())
    model(torch.ones(2, 4)).sum().backward()
    assert [_hooks(module) for module in model.modules()] != before
    for module in (model, model[0]):
        module._get_fsdp_state().hooks.remove()
    assert [_hooks(module) for module in model.modules()] == before


def _hooks(module):
    names = ("_forward_pre_hooks", "_forward_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks")
    return [len(getattr(module, name)) for name in names]
