"""Other libraries put functions of their own in the place of torch's, before or after fsdp2 is imported.

Symptom: AttributeError for ``__wrapped__`` in every call. Smallest shape: ``torch.distributed.fsdp.fully_shard = lambda ...``.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import copy, functools, sys
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
import torch.distributed.fsdp._fully_shard as package
from torch import nn

original = fsdp.fully_shard
call_impl = nn.Module._call_impl
order, how = sys.argv[1:]

if how == "where it is defined, naming it":
    @functools.wraps(original)
    def patched(*args, **kwargs):
        return original(*args, **kwargs)
else:
    def patched(*args, **kwargs):
        return original(*args, **kwargs)

class Caller:  # no function: it has no code
    def __get__(self, module, owner=None):
        return functools.partial(call_impl, module)

def patch():
    fsdp.fully_shard = package.fully_shard = patched
    if how != "where it is exported":
        package._fully_shard.fully_shard = patched
    nn.Module.__call__ = nn.Module._call_impl = Caller()

if order == "before":
    patch()
import fsdp2
if order == "after":
    patch()

dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
whole = copy.deepcopy(model)
for module in (model[0], model):
    fsdp2.fully_shard(module)
twin = copy.deepcopy(model)
x = torch.ones(2, 4)
torch.compile(model, backend="eager")(x).sum().backward()
twin(x).sum().backward()
whole(x).sum().backward()
for param, again, expected in zip(model.parameters(), twin.parameters(), whole.parameters()):
    torch.testing.assert_close(param.grad.full_tensor(), expected.grad)
    torch.testing.assert_close(again.grad.full_tensor(), expected.grad)
assert fsdp2.fully_shard.state(model) is not None
if how != "where it is defined":
    assert original.state(model) is fsdp2.fully_shard.state(model)
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("order", "how"),
    [
        ("before", "where it is defined"),
        *(
            pytest.param(order, how, marks=pytest.mark.slow)
            for order, how in [
                ("before", "where it is exported"),
                ("before", "where it is defined, naming it"),
                ("after", "where it is defined"),
            ]
        ),
    ],
)
def test_a_patched_fully_shard_of_torch_does_not_matter_to_ours(order, how):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, order, how]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
