"""Arguments of a wrong kind: each call takes them, or raises an error of ours that names the argument; no raw TypeError from within."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp2
from fsdp2 import FSDPError


class Setting(NamedTuple):
    """What valid calls are made of: a model (sharded, where a call does not shard itself), its optimizer, an empty folder."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    folder: Path

    @property
    def params(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    @property
    def saved(self) -> Path:
        fsdp2.checkpoint.save_safetensors(self.model, self.folder / "saved")
        return self.folder / "saved"


adamw = torch.optim.AdamW

CALLS: dict[str, Callable[[Setting], dict[str, Any]]] = {
    "optim.flat": lambda a: {"optimizer_class": adamw, "params": a.params, "lr": 1e-3},
    "optim.offloaded": lambda a: {
        "optimizer_class": adamw,
        "params": a.params,
        "policy": fsdp2.CPUOffloadPolicy(),
        "fraction": 1.0,
        "step_in_backward": False,
        "lr": 1e-3,
    },
    "optim.Muon": lambda a: {
        "params": a.params,
        "lr": 1e-3,
        "weight_decay": 0.1,
        "momentum": 0.9,
        "nesterov": True,
        "ns_coefficients": (3.4, -4.7, 2.0),
        "eps": 1e-7,
        "ns_steps": 5,
        "adjust_lr_fn": None,
        "betas": (0.9, 0.95),
        "adamw_eps": 1e-8,
    },
    "optim.AnyPrecisionAdamW": lambda a: {
        "params": a.params,
        "lr": 1e-3,
        "betas": (0.9, 0.99),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "use_kahan_summation": False,
        "momentum_dtype": torch.float32,
        "variance_dtype": torch.float32,
        "compensation_dtype": torch.float32,
    },
    "clip_grad_norm_": lambda a: {
        "parameters": a.params,
        "max_norm": 1.0,
        "norm_type": 2.0,
        "error_if_nonfinite": False,
        "foreach": None,
    },
    "get_total_norm": lambda a: {"tensors": a.params, "norm_type": 2.0, "error_if_nonfinite": False, "foreach": None},
    "guarded_step": lambda a: {"optimizer": a.optimizer, "max_norm": 1.0, "failed": None, "scaler": None, "guard": None},
    "guarded": lambda a: {"model": a.model},
    "uneven": lambda a: {"model": a.model},
    "accumulate": lambda a: {"model": a.model, "last": True},
    "capture": lambda a: {"step": print, "warmup": 3, "max_graphs": 4},
    "parallelize": lambda a: {
        "model": a.model,
        "strategy": "zero3",
        "wrap": "auto",
        "mesh": None,
        "shard_size": None,
        "mp_policy": fsdp2.MixedPrecisionPolicy(),
        "offload_policy": None,
        "ignored_params": None,
        "shard_placement_fn": None,
        "sync_module_states": False,
    },
    "wrap.wrap": lambda a: {"module": a.model, "strategy": "zero3", "sync_module_states": False},
    "wrap.enable_wrap": lambda a: {"strategy": "zero3", "wrap": "auto", "mesh": None},
    "materialize": lambda a: {"model": a.model, "init_fn": None, "device": "cpu", "strict": True},
    "summary": lambda a: {"model": a.model, "optimizer": a.optimizer},
    "set_semantics": lambda a: {"semantics": "torch"},
    "set_collective_algorithms": lambda a: {"algorithms": "measured"},
    "park": lambda a: {"model": a.model, "optimizer": a.optimizer, "to": "cpu"},
    "unpark": lambda a: {"model": a.model, "optimizer": a.optimizer},
    "publish": lambda a: {"model": a.model, "dtype": None, "key_map": None, "adapters": "merged"},
    "publishing.to_file": lambda a: {"path": a.folder / "weights"},
    "publishing.read_file": lambda a: {"path": a.folder / "weights", "known": 3, "verify": True},
    "set_missing_rank_timeout": lambda a: {"timeout": None, "notice": 3.0},
    "adopt": lambda a: {"module": a.model, "mesh": None, "shard_placement_fn": None, "ignored_params": None},
    "register_fsdp_forward_method": lambda a: {"module": a.model, "method_name": "forward"},
    "share_comm_ctx": lambda a: {"modules": [a.model]},
    "fully_shard": lambda a: {
        "module": a.model,
        "mesh": None,
        "reshard_after_forward": True,
        "shard_placement_fn": None,
        "mp_policy": fsdp2.MixedPrecisionPolicy(),
        "offload_policy": fsdp2.OffloadPolicy(),
        "ignored_params": None,
    },
    "apply_activation_checkpointing": lambda a: {"model": a.model, "policy": [nn.Linear]},
    "apply_activation_offload": lambda a: {
        "model": a.model,
        "modules": [nn.Linear],
        "max_nbytes": None,
        "min_nbytes": 1,
        "pin_memory": False,
    },
    "compile": lambda a: {
        "model": a.model,
        "backend": "inductor",
        "bucket_bytes": 0,
        "reorder": False,
        "dynamic": None,
        "options": None,
    },
    "uncompile": lambda a: {"model": a.model},
    "install": lambda a: {"fsdp1": False},
    "plan": lambda a: {
        "model": nn.Linear(4, 4),
        "world_size": 2,
        "strategy": "zero3",
        "shard_size": None,
        "wrap": "auto",
        "dtype": torch.float32,
        "param_dtype": None,
        "reduce_dtype": None,
        "optimizer": "adamw",
        "batch": 1,
        "sequence": 8,
        "micro_batches": 1,
        "checkpointing": "none",
        "offload": False,
        "prefetch": 1,
        "backend": "gloo",
        "ranks_per_host": 8,
        "card": None,
        "inputs": lambda batch, sequence: (torch.zeros(batch, 4),),
        "loss": None,
    },
    "ledger": lambda a: {
        "folder": a.folder,
        "model": a.model,
        "optimizer": a.optimizer,
        "tokens": 8,
        "first_step": 1,
        "plan": None,
        "findings": (),
    },
    "record": lambda a: {"folder": a.folder, "model": a.model, "optimizer": a.optimizer, "every": 1, "first_step": 1},
    "trace": lambda a: {"folder": a.folder, "allocations": False},
    "doctor.check": lambda a: {"model": a.model, "optimizer": a.optimizer, "ties": (), "ignore": (), "strict": False},
    "doctor.watch": lambda a: {"model": a.model, "optimizer": a.optimizer, "strict": False, "ignore": (), "every": 10, "patience": 8},
    "doctor.gradient_scales": lambda a: {"model": a.model, "step": lambda probe: None, "declared": None, "tolerance": 0.1},
    "state_bytes.measured_state_bytes": lambda a: {"model": a.model, "optimizer": a.optimizer},
    "state_bytes.expected_state_bytes": lambda a: {
        "strategy": "zero3",
        "numel": 64,
        "world_size": 2,
        "shard_size": None,
        "dtype": torch.float32,
        "param_dtype": None,
        "reduce_dtype": None,
        "optimizer_nbytes": 8,
        "moment": "accumulating",
    },
    "checkpoint.Checkpointer": lambda a: {
        "folder": a.folder,
        "model": a.model,
        "optimizer": a.optimizer,
        "scheduler": None,
        "data": {},
        "keep_last": 2,
        "asynchronous": False,
        "if_busy": "wait",
        "process_group": None,
    },
    "checkpoint.save_safetensors": lambda a: {
        "model": a.model,
        "folder": a.folder,
        "max_shard_size": "1MB",
        "num_writers": 1,
        "dtype": None,
        "key_map": None,
        "config": False,
        "process_group": None,
        "progress": False,
    },
    "checkpoint.load_safetensors": lambda a: {
        "model": a.model,
        "path_or_index": a.saved,
        "key_map": None,
        "strict": True,
        "ignore_mismatched": False,
        "init_fn": None,
        "device": "cpu",
        "in_place": False,
        "verify": False,
        "progress": False,
    },
    "checkpoint.load_checkpoint": lambda a: {
        "model": a.model,
        "path": a.saved,
        "format": None,
        "shapes": None,
        "key_map": None,
        "strict": True,
        "ignore_mismatched": False,
        "init_fn": None,
        "device": "cpu",
        "in_place": False,
        "verify": False,
        "progress": False,
    },
    "checkpoint.full_state_dict": lambda a: {"model": a.model},
    "checkpoint.full_optimizer_state_dict": lambda a: {"model": a.model, "optimizer": a.optimizer, "by_name": False},
    "checkpoint.save_full_state": lambda a: {"path": a.folder / "full.pt", "model": a.model, "optimizer": a.optimizer},
    "checkpoint.verify": lambda a: {"path": a.saved, "format": None, "share": (0, 1)},
    "checkpoint.convert": lambda a: {
        "src": a.saved,
        "dst": a.folder / "converted",
        "to": "torch",
        "format": None,
        "optimizer": None,
        "shapes": None,
        "with_optimizer": True,
        "model_key": None,
        "optimizer_key": None,
        "dtype": None,
        "max_shard_size": "1MB",
        "force": False,
        "verify": False,
    },
    "checkpoint.open_source": lambda a: {"path": a.saved},
    "checkpoint.write_shapes": lambda a: {"model": a.model, "path": a.folder / "shapes.json"},
    "compat.FullyShardedDataParallel": lambda a: {
        "module": a.model,
        "process_group": None,
        "sharding_strategy": None,
        "cpu_offload": None,
        "auto_wrap_policy": None,
        "backward_prefetch": None,
        "mixed_precision": None,
        "ignored_modules": None,
        "param_init_fn": None,
        "device_id": None,
        "sync_module_states": False,
        "forward_prefetch": False,
        "limit_all_gathers": True,
        "use_orig_params": True,
        "ignored_states": None,
        "device_mesh": None,
    },
    "compat.MixedPrecision": lambda a: {"param_dtype": None, "keep_low_precision_grads": False},
    "compat.CPUOffload": lambda a: {"offload_params": False},
}
"""Valid arguments of each call."""

SHARDS_ITSELF = ("fully_shard", "parallelize", "wrap.wrap", "compat.FullyShardedDataParallel")
ONE_RANK = ("checkpoint.",)  # reads and writes files, and so needs a process group that communicates
AS_TORCH = ("clip_grad_norm_", "get_total_norm", "optim.Muon", "compat.")
"""Calls of torch's, whose programs pass other things than bools where they mean one."""


@pytest.fixture(autouse=True)
def a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # "x" is a path, too


@contextlib.contextmanager
def group_for(name: str) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if name.startswith(ONE_RANK):
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    else:
        dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def setting_of(name: str, folder: Path) -> Setting:
    with torch.device("meta" if name == "materialize" else "cpu"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if name not in SHARDS_ITSELF:
        fsdp2.fully_shard(model)
    return Setting(model, adamw(model.parameters()), folder)


def call(name: str, **wrong: Any) -> dict[str, Any]:
    """Make the valid call, but for what is ``wrong``. Returns: the valid arguments"""
    function: Any = fsdp2
    for part in name.split("."):
        function = getattr(function, part)
    with contextlib.ExitStack() as undo:
        arguments = CALLS[name](setting_of(name, Path(undo.enter_context(tempfile.TemporaryDirectory()))))
        if name == "wrap.wrap":  # elsewhere it does nothing, as torch's
            undo.enter_context(fsdp2.wrap.enable_wrap("zero3"))
        if name == "set_semantics":
            undo.callback(fsdp2.set_semantics, "torch")
        result = function(**(arguments | wrong))
        if hasattr(result, "__enter__"):
            undo.enter_context(result)
    return arguments


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of what is taken, and loses
@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_argument_is_taken_or_refused_with_an_error_of_ours(name: str) -> None:
    with group_for(name):
        arguments = call(name)
        faults = []
        for argument, valid in arguments.items():
            for wrong in (None, "x", -1, [3], object()):
                try:
                    call(name, **{argument: wrong})
                    if isinstance(valid, bool) and wrong == "x" and not name.startswith(AS_TORCH):
                        faults.append(f"{argument}='x' is taken for a bool")
                except FSDPError:
                    pass
                except Exception as error:
                    faults.append(f"{argument}={wrong!r}: {type(error).__name__}: {error}")
    assert faults == []


@pytest.mark.parametrize(
    ("name", "wrong", "text"),
    [
        ("optim.flat", {"optimizer_class": "AdamW"}, "flat got optimizer_class='AdamW' of type str"),
        ("optim.flat", {"lr": "x"}, "(?s)AdamW refuses these options.*lr='x'"),
        ("optim.flat", {"nope": 1}, "(?s)AdamW refuses these options.*nope=1"),
        ("optim.flat", {"params": [None]}, "flat got params=None of type NoneType"),
        ("optim.offloaded", {"params": None}, "offloaded got params=None of type NoneType"),
        ("optim.offloaded", {"params": nn.Identity()}, r"offloaded got params=Identity\(\)"),
        ("clip_grad_norm_", {"max_norm": "x"}, "clip_grad_norm_ got max_norm='x' of type str"),
        ("clip_grad_norm_", {"parameters": nn.Sequential(nn.Identity())}, "(?s)clip_grad_norm_ got parameters=.*which has a Identity"),
        ("install", {"fsdp1": "x"}, "(?s)install got fsdp1='x' of type str.*expected: True or False.*fix: .*fsdp1=True"),
        ("plan", {"batch": "x"}, "(?s)plan got batch='x' of type str.*expected: a whole number, 1 or more"),
        ("plan", {"dtype": "bfloat16"}, "(?s)plan got dtype='bfloat16' of type str.*expected: a torch.dtype"),
        ("plan", {"optimizer": None}, "plan got optimizer=None of type NoneType"),
        ("ledger", {"findings": "x"}, "ledger got findings='x' of type str"),
        ("ledger", {"plan": "x"}, "(?s)ledger got plan='x' of type str.*expected: what fsdp2.plan returns, or None"),
        ("state_bytes.measured_state_bytes", {"optimizer": "x"}, "measured_state_bytes got optimizer='x' of type str"),
        ("checkpoint.load_safetensors", {"strict": "x"}, "load_safetensors got strict='x' of type str"),
        ("checkpoint.save_safetensors", {"process_group": "x"}, "save_safetensors got process_group='x' of type str"),
        ("checkpoint.open_source", {"path": None}, "(?s)open_source got path=None of type NoneType.*expected: a path"),
        ("compat.FullyShardedDataParallel", {"ignored_modules": 3}, "FSDP got ignored_modules=3 of type int"),
        ("compat.FullyShardedDataParallel", {"device_id": "x"}, "FSDP got device_id='x' of type str"),
    ],
)
def test_the_error_names_the_argument(name: str, wrong: dict[str, Any], text: str) -> None:
    with group_for(name), pytest.raises(fsdp2.ArgumentError, match=text):
        call(name, **wrong)
