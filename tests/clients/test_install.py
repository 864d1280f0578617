"""fsdp2 in the place of torch's FSDP2, in processes of their own: what is rebound, what stays, and that all of it is undone."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CLIENT = """
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

def shard(model):
    for block in model:
        fully_shard(block, mp_policy=MixedPrecisionPolicy())
    return fully_shard(model)
"""

PROGRAM = """
import copy, sys, threading
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
from torch import nn
from torch.distributed._composable import fsdp as composable
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import fully_shard as kept
from torch.distributed.fsdp._fully_shard import _fsdp_api, _fsdp_state, _fully_shard

import client
homes = [fsdp, composable, _fsdp_api, _fsdp_state, _fully_shard, client, sys.modules[__name__]]
before = [dict(vars(home)) for home in homes[:-1]]

import fsdp2
assert "fsdp2.installation" not in sys.modules
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
whole = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
theirs = copy.deepcopy(whole)
assert not isinstance(client.shard(theirs), fsdp2.FSDPModule)
torchs_class = fsdp.FSDPModule

def train(model):
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(2, 4)).square().sum().backward()
    return [param.grad.full_tensor() if hasattr(param.grad, "full_tensor") else param.grad for param in model.parameters()]

with fsdp2.install() as outer:
    assert kept is fsdp2.fully_shard  # in a module that imported it before
    assert client.FSDPModule is fsdp.FSDPModule is composable.FSDPModule is fsdp2.FSDPModule
    assert _fsdp_api.MixedPrecisionPolicy is fsdp2.MixedPrecisionPolicy and client.CPUOffloadPolicy is fsdp2.CPUOffloadPolicy
    with fsdp2.install():  # changes nothing, and its end neither
        assert fsdp.fully_shard is fsdp2.fully_shard
    assert fsdp.fully_shard is fsdp2.fully_shard
    ours = client.shard(copy.deepcopy(whole))
    assert isinstance(ours, fsdp2.FSDPModule) and isinstance(ours, client.FSDPModule) and isinstance(ours, torchs_class)
    assert _fsdp_state._get_module_fsdp_state(ours[0]) is ours[0]._get_fsdp_state()
    assert _fsdp_state._get_module_fsdp_state(theirs[0]) is theirs[0]._get_fsdp_state()
    assert _fsdp_state._get_module_fsdp_state(nn.Linear(1, 1)) is None
    replicated = replicate(copy.deepcopy(whole))
    for model in (ours, theirs, replicated):  # what torch has sharded, or replicates now, goes on as before
        for got, expected in zip(train(model), train(whole), strict=True):
            torch.testing.assert_close(got, expected)
    theirs.set_requires_gradient_sync(False)
    assert not theirs[0]._get_fsdp_state()._fsdp_param_group.reduce_grads
    composable.FSDPModule = "patched by somebody"
assert composable.FSDPModule == "patched by somebody"
composable.FSDPModule = torchs_class
assert kept is before[0]["fully_shard"]
for home, names in zip(homes, before):
    assert vars(home).items() == names.items(), home

threads = [threading.Thread(target=fsdp2.install) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert fsdp.fully_shard is fsdp2.fully_shard
fsdp2.uninstall()
fsdp2.uninstall()
for home, names in zip(homes, before):
    assert vars(home).items() == names.items(), home

import fsdp2.compat as compat
from torch.distributed.fsdp import api, fully_sharded_data_parallel
with fsdp2.install(fsdp1=True):
    assert fsdp.FullyShardedDataParallel is fully_sharded_data_parallel.FullyShardedDataParallel is compat.FullyShardedDataParallel
    assert api.ShardingStrategy is compat.ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    wrapped = fsdp.FullyShardedDataParallel(copy.deepcopy(whole), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=True)
    with fsdp.FullyShardedDataParallel.summon_full_params(wrapped):
        assert all(torch.equal(a, b) for a, b in zip(wrapped.parameters(), whole.parameters(), strict=True))
assert fsdp.FullyShardedDataParallel is not compat.FullyShardedDataParallel
dist.destroy_process_group()
"""

SCRIPT = """
import sys
import helper  # stands beside the script
from torch.distributed.fsdp import fully_shard
assert __name__ == "__main__" and fully_shard is helper.fully_shard
print(fully_shard.__module__, sys.argv[1:])
"""


def run(arguments: list[str], folder) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path, str(folder)])}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done


def test_installed_names_are_ours_everywhere_and_uninstalling_leaves_torch_as_it_was(tmp_path):
    (tmp_path / "client.py").write_text(CLIENT)
    run(["-W", "ignore", "-c", PROGRAM], tmp_path)


def test_a_script_runs_on_ours_with_its_own_arguments(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "helper.py").write_text("from torch.distributed.fsdp import fully_shard")
    done = run(["-m", "fsdp2.run", str(tmp_path / "train.py"), "--lr", "-m", "1"], tmp_path.parent)
    assert done.stdout == "fsdp2.api ['--lr', '-m', '1']\n"
    assert done.stderr.count("fsdp2 in place of torch's FSDP") == 1


@pytest.mark.slow
def test_a_module_runs_on_ours(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "helper.py").write_text("from torch.distributed.fsdp import fully_shard")
    assert run(["-m", "fsdp2.run", "-m", "train", "2"], tmp_path).stdout == "fsdp2.api ['2']\n"
