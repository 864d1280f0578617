"""Programs whose parts don't go together: each is an error of ours, on every rank, that names the parameter and the fix."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import subprocess
import sys
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

import fsdp2
from fsdp2 import OrderError, fully_shard, user_warnings
from fsdp2.hints import same_models
from fsdp2.hints.missing_names import INSTEAD
from harness import cpu_mesh, on_ranks
from harness.models import batches, mlp
from harness.user_warnings import warned_on_rank_0

X = batches(1)[0]


class WithAdapter(nn.Module):
    """A layer and a low-rank one next to it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(base.in_features, 2), nn.Linear(2, base.out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


@on_ranks(2)
def test_a_wrapper_that_came_after_fully_shard_cannot_take_what_is_sharded():
    model = fully_shard(mlp(), mesh=cpu_mesh())
    model.last = WithAdapter(model.last)
    with pytest.raises(OrderError, match=r"(?s)2 parameters were sharded by an earlier.*base.weight.*base.bias.*fix:"):
        fully_shard(model.last, mesh=cpu_mesh())
    for added in (model.last.down, model.last.up):  # as the error says
        fully_shard(added, mesh=cpu_mesh())
    model(X).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


@on_ranks(4)
def test_a_wrapper_that_came_after_a_forward_cannot_take_what_that_has_left_unsharded_or_on_a_smaller_mesh():
    """Symptom: it was taken for a tie, and the next forward raised a riddle about "a module outside of the root"."""
    for after in (None, True, False, 2):
        model = fully_shard(mlp(), mesh=cpu_mesh(), reshard_after_forward=after)
        model(X)
        model.last = WithAdapter(model.last)
        with pytest.raises(OrderError, match=r"(?s)2 parameters were sharded by an earlier.*base.weight.*base.bias.*fix:"):
            fully_shard(model.last, mesh=cpu_mesh())
        for added in (model.last.down, model.last.up):
            fully_shard(added, mesh=cpu_mesh())
        model(X).sum().backward()
        assert all(param.grad is not None for param in model.parameters())


@on_ranks(2)
def test_a_late_tie_cannot_be_sharded_again():
    model = fully_shard(mlp(), mesh=cpu_mesh())
    other = nn.Linear(10, 5)
    other.weight = model.last.weight
    with pytest.raises(OrderError, match=r"1 parameters were sharded by an earlier"):
        fully_shard(other, mesh=cpu_mesh())
    dist.barrier()


@on_ranks(2)
def test_ddp_does_not_wrap_what_is_sharded_unless_it_is_told_to_ignore_it():
    model = fully_shard(mlp(), mesh=cpu_mesh())
    with pytest.raises(OrderError, match=r"(?s)DistributedDataParallel got a MLP.*fix:"):
        DistributedDataParallel(model)
    assert not hasattr(model, "_ddp_params_and_buffers_to_ignore")
    assert "_ddp_params_and_buffers_to_ignore" not in dict(inspect.getmembers(model))
    model.plain = nn.Linear(2, 2)
    model._ddp_params_and_buffers_to_ignore = [name for name, _ in model.named_parameters() if not name.startswith("plain")]
    DistributedDataParallel(model)


@on_ranks(2)
def test_a_mesh_with_the_name_of_a_model_axis_is_warned_of_once():
    mesh = cpu_mesh(1, 2, names=("dp", "tp"))
    with mock.patch.object(user_warnings, "_told", set()):
        with warned_on_rank_0(UserWarning, r"(?s)takes the mesh \('dp', 'tp'\) as \(replicate, shard\).*fix:") as shown:
            model = mlp()
            for module in (*model.blocks, model):
                fully_shard(module, mesh=mesh)
        assert len(shown) == (dist.get_rank() == 0)
        fully_shard(mlp(), mesh=mesh["dp"])
        fully_shard(mlp(), mesh=cpu_mesh(1, 2, names=("replicate", "shard")))


@on_ranks(2)
@pytest.mark.parametrize("name", ["tp", "pp", "TP", "cp", "ep", "dp", None])
def test_a_mesh_of_one_axis_is_warned_of_where_its_name_is_of_an_axis_that_never_carries_data_parallelism(name):
    """Ranks of context parallelism have the same parameters; experts are sharded over an axis that may be called ep."""
    mesh = cpu_mesh(1, 2, names=("dp", name))[name] if name not in (None, "dp") else cpu_mesh(2, names=name and ("dp",))
    with mock.patch.object(user_warnings, "_told", set()):
        if name is None or name.lower() not in ("tp", "pp"):
            fully_shard(mlp(), mesh=mesh)  # a warning would be an error
            return
        with warned_on_rank_0(UserWarning, rf"(?s)takes the mesh \('{name}',\) as \(shard,\).*called {name}.*fix:") as shown:
            model = mlp()
            for module in (*model.blocks, model):
                fully_shard(module, mesh=mesh)
        assert [each.filename for each in shown] == ([__file__] if dist.get_rank() == 0 else [])


class Meeting:
    """Keys of the store at which both ranks have written when one reads."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.requests = 0

    def __getattr__(self, name: str) -> Any:
        self.requests += 1
        if name == "check":
            dist.barrier()
        return getattr(self._store, name)


def two_layers(difference: str = "none", mesh: Any = None) -> nn.Module:
    """On rank 1 the second one has ``difference``."""
    differs = dist.get_rank() == 1
    last = nn.Linear(
        7,
        5 + (differs and difference == "shape"),
        bias=not (differs and difference == "missing"),
        dtype=torch.float64 if differs and difference == "dtype" else None,
    )
    if differs and difference == "frozen":
        last.bias.requires_grad_(False)
    model = nn.Sequential(nn.Linear(7, 7), last)
    for module in (*model, model):
        policy = fsdp2.MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if differs and difference == "policy" else None,
            reduce_dtype=torch.bfloat16 if differs and difference == "reduction" else None,
        )
        last_dim = (lambda param: Shard(param.ndim - 1)) if differs and difference == "placement" else None
        fully_shard(module, mesh=mesh or cpu_mesh(), mp_policy=policy, shard_placement_fn=last_dim)
    return model


@on_ranks(2)
def test_models_that_differ_between_ranks_are_refused_before_the_first_gather_by_the_parameters_name():
    """Symptom: gloo aborted a process ("Received data size doesn't match expected size"), and no text named a parameter."""
    stores: list[Meeting] = []
    real = same_models.torch_collectives.keys_of_the_store

    def keys_of_the_store(prefix: str) -> Any:
        stores.append(Meeting(real(prefix)))
        return stores[-1]

    found = {"shape": "1.weight", "missing": "1.bias", "dtype": "1.weight", "policy": "0.weight", "frozen": "1.bias"}
    found |= {"reduction": "0.weight", "placement": "0.weight"}
    with mock.patch.object(same_models.torch_collectives, "keys_of_the_store", keys_of_the_store):
        for difference, name in found.items():
            with pytest.raises(fsdp2.ModuleError) as caught:
                two_layers(difference)(X)
            text = str(caught.value)
            assert f"models differ between ranks: {name}" in text, difference
            assert "rank 0: " in text
            assert "rank 1: " in text
            assert ("rank 1: nothing: no more parameters" in text) == (difference == "missing")
        stores.clear()
        model = two_layers()
        for _ in range(2):
            model(X).sum().backward()
        assert [store.requests for store in stores] == [3]  # write, look, read


@on_ranks(2)
def test_a_parameter_that_one_rank_freezes_between_steps_is_refused_by_name_on_all():
    """Symptom: gloo aborted a process, or rank 1 hung: their reductions had other sizes."""
    model = two_layers()
    for freezes in (False, True, False):
        if dist.get_rank() == 1:
            model[1].bias.requires_grad_(not freezes)
        loss = model(X).sum()
        if freezes:
            with pytest.raises(OrderError, match=r"(?s)1 parameters have requires_grad.*\n  1.bias: frozen on ranks \[1\]"):
                loss.backward()
            model.reset_iter_state()
        else:
            loss.backward()


@on_ranks(1)
def test_one_rank_compares_its_model_with_nobody():
    with mock.patch.object(same_models.torch_collectives, "keys_of_the_store", side_effect=AssertionError("a request")):
        fully_shard(mlp(), mesh=cpu_mesh())(X).sum().backward()


PROGRAM = """
import sys
import torch, torch.distributed as dist
from torch import nn
import fsdp2

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
model = fsdp2.fully_shard(nn.Linear(4, 4 + rank))
model(torch.ones(2, 4)).sum().backward()
"""


@pytest.mark.slow
def test_a_rank_that_came_first_hears_from_the_other_why_it_has_ended(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(program), str(rank), str(tmp_path / "store")], env=environment, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=300)[1] for process in processes]
    assert any("fsdp2.errors.ModuleError" in each for each in said)
    for each in said:
        assert "models differ between ranks: weight" in each
        assert "rank 0: weight: (4, 4), torch.float32" in each
        assert "rank 1: weight: (5, 4), torch.float32" in each


def test_a_name_that_fsdp2_lacks_points_to_the_right_one():
    for name, meant in (("no_sync", "accumulate"), ("fully_sharded", "fully_shard"), ("clip_grad_norm", "clip_grad_norm_")):
        with pytest.raises(AttributeError, match=f"did you mean {meant!r}"):
            getattr(fsdp2, name)
    with pytest.raises(AttributeError, match=r"has no attribute 'xyzzy'$"):
        fsdp2.xyzzy  # noqa: B018


@on_ranks(1)
def test_a_name_of_ddp_or_fsdp1_on_a_sharded_module_is_answered_where_it_is_read():
    for name, instead in INSTEAD.items():
        model = fully_shard(nn.Linear(4, 4), mesh=cpu_mesh(1))
        assert not hasattr(model, name)
        assert getattr(model, name, None) is None
        with pytest.raises(AttributeError, match=f"no attribute '{name}'"), pytest.warns(UserWarning, match=re.escape(instead)):
            eval(f"model.{name}")
        model.register_module(name, nn.Identity())
        assert isinstance(eval(f"model.{name}"), nn.Identity)
        with mock.patch.object(nn.Linear, name, mock.Mock(return_value=3), create=True):
            assert eval(f"model.{name}()") == 3


class _Lends(nn.Module):
    no_sync = contextlib.nullcontext

    def __getattr__(self, name: str) -> Any:
        return "lent" if name == "join" else super().__getattr__(name)


@on_ranks(1)
def test_a_name_of_ddp_or_fsdp1_that_a_class_has_stays_its_own():
    model = fully_shard(_Lends(), mesh=cpu_mesh(1))
    assert model.no_sync is contextlib.nullcontext
    assert model.join == "lent"


@on_ranks(2)
def test_models_whose_forward_communicates_nothing_may_run_first_on_one_rank_alone():
    """First forwards are counted: without a gather in them, ranks need not run them in one order."""
    mesh = cpu_mesh(2, 1)  # replicated: only gradients are sent
    with mock.patch.object(same_models.torch_collectives, "keys_of_the_store", side_effect=AssertionError):
        fully_shard(nn.Linear(4, 2 + dist.get_rank()), mesh=mesh)(torch.ones(1, 4))


@on_ranks(4)
def test_under_hsdp_ranks_that_gather_together_are_compared():
    """Symptom: ranks compared under the names of both of their process groups, which no two ranks have in common."""
    real = same_models.torch_collectives.keys_of_the_store
    with mock.patch.object(same_models.torch_collectives, "keys_of_the_store", lambda prefix: Meeting(real(prefix))):
        model = two_layers("shape", cpu_mesh(2, 2))
        if dist.get_rank() < 2:
            with pytest.raises(fsdp2.ModuleError, match=r"models differ between ranks: 1\.weight"):
                model(torch.ones(1, 7))
        else:
            model(torch.ones(1, 7))
