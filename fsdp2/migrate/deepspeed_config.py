"""A DeepSpeed configuration as the text of what replaces it: strategy, policies, optimizer, clipping, micro-batches.

It is read from a dict in the script or from a JSON file next to it. Values that are expressions of the script keep their text.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import libcst as cst

from .syntax_trees import code, string_of

STAGES = {0: "ddp", 1: "zero1", 2: "zero2", 3: "zero3"}
_OPTIMIZERS = {"adam": "AdamW", "adamw": "AdamW", "sgd": "SGD", "adagrad": "Adagrad"}
_NOT_FOR_TORCH = ("torch_adam", "adam_w_mode", "adamw_mode", "bias_correction", "freeze_step")
# What needs no counterpart, or is a matter of the launcher.
_SILENT = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "zero_optimization"),
    *("bf16", "bfloat16", "fp16", "optimizer", "scheduler", "gradient_clipping", "prescale_gradients"),
    *("steps_per_print", "wall_clock_breakdown", "dump_state", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
)


@dataclass(frozen=True)
class Text:
    """An expression of the script."""

    text: str


@dataclass
class Plan:
    """The replacement of ``deepspeed.initialize``. refused: why there is none; notes: what differs"""

    strategy: str = "ddp"
    policies: list[str] = field(default_factory=list)  # keyword arguments of parallelize
    optimizer: str | None = None  # a call with "{params}" in it
    clip: str | None = None
    micro_batches: str = "1"
    micro_batch_size: str | None = None
    notes: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


def from_dict(node: cst.Dict) -> Any:
    """A dict display as a dict, with ``Text`` for values that are not literals."""
    found: dict[str, Any] = {}
    for each in node.elements:
        key = string_of(each.key) if isinstance(each, cst.DictElement) else None
        if key is None:
            return None
        found[key] = _value(each.value)
    return found


def _value(node: cst.BaseExpression) -> Any:
    if isinstance(node, cst.Dict):
        return from_dict(node)
    if isinstance(node, (cst.Integer, cst.Float)):
        return node.evaluated_value
    if isinstance(node, cst.Name) and node.value in ("True", "False", "None"):
        return {"True": True, "False": False, "None": None}[node.value]
    text = string_of(node)
    if text is not None:
        return text
    if isinstance(node, (cst.List, cst.Tuple)):
        return [_value(each.value) for each in node.elements]
    return Text(code(node))


def from_file(path: Path) -> Any:
    """A JSON file as a dict; None if it cannot be read."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def plan_of(config: dict[str, Any]) -> Plan:
    plan = Plan()
    zero = config.get("zero_optimization") or {}
    _zero(plan, zero if isinstance(zero, dict) else {})
    _precision(plan, config)
    _optimizer(plan, config.get("optimizer"))
    if config.get("scheduler"):
        plan.refused.append("scheduler: write it with torch.optim.lr_scheduler and pass it as lr_scheduler")
    clip = config.get("gradient_clipping")
    if clip:
        plan.clip = _text(clip)
    plan.micro_batches = _text(config.get("gradient_accumulation_steps", 1))
    if "gradient_accumulation_steps" not in config and "train_batch_size" in config and "train_micro_batch_size_per_gpu" in config:
        plan.refused.append("gradient_accumulation_steps follows from the number of ranks: write it into the configuration")
    size = config.get("train_micro_batch_size_per_gpu")
    plan.micro_batch_size = None if size is None else _text(size)
    for key in config:
        if key not in _SILENT and config[key]:
            plan.notes.append(f"{key} of the DeepSpeed configuration dropped: fsdp2 has no such option; see docs/migrating.md.")
    return plan


def _zero(plan: Plan, zero: dict[str, Any]) -> None:
    stage = zero.get("stage", 0)
    if stage not in STAGES:
        plan.refused.append(f"stage {_text(stage)}: known only at run time; strategies are ddp, zero1, zero2, zero3")
        return
    plan.strategy = STAGES[stage]
    devices = {}
    for name in ("offload_optimizer", "offload_param"):
        offload = zero.get(name)
        devices[name] = offload.get("device", "none") if isinstance(offload, dict) else "none"
    if "nvme" in devices.values():
        plan.refused.append("offload to nvme: fsdp2 offloads to host memory")
    elif "cpu" in devices.values():
        plan.policies.append("offload_policy=fsdp2.CPUOffloadPolicy()")
        plan.notes.append("offload to the CPU moves parameters, gradients and optimizer state together.")
    for name in ("zero_quantized_weights", "zero_quantized_gradients", "mics_shard_size"):
        if zero.get(name):
            plan.refused.append(f"{name}: fsdp2 has no such option")
    hpz = zero.get("zero_hpz_partition_size", 1)
    if hpz != 1:
        plan.strategy = "hsdp_global"
        plan.policies.append(f"shard_size={_text(hpz)}")


def _precision(plan: Plan, config: dict[str, Any]) -> None:
    bf16 = config.get("bf16") or config.get("bfloat16") or {}
    fp16 = config.get("fp16") or {}
    if fp16.get("enabled"):
        plan.refused.append("fp16 with its loss scale: use bf16, or write torch.amp.GradScaler around the steps")
    enabled = bf16.get("enabled", False)
    if isinstance(enabled, Text):
        plan.refused.append(f"bf16 enabled by {enabled.text}: known only at run time")
    elif enabled:
        plan.policies.append("mp_policy=fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)")
        plan.notes.append("bf16: parameters stay fp32 and are used in bf16; gradients are reduced and accumulated in fp32.")


def _optimizer(plan: Plan, optimizer: Any) -> None:
    if not optimizer:
        return
    name = optimizer.get("type", "")
    torch_name = _OPTIMIZERS.get(str(name).lower())
    if torch_name is None:
        plan.refused.append(f"optimizer {_text(name)}: pass one of torch's as optimizer")
        return
    params = optimizer.get("params") or {}
    if str(name).lower() == "adam" and (params.get("adam_w_mode") is False or params.get("torch_adam")):
        torch_name = "Adam"
    elif str(name).lower() == "adam":
        plan.notes.append("the optimizer Adam of DeepSpeed decouples its weight decay by default: it is AdamW.")
    kept = {key: value for key, value in params.items() if key not in _NOT_FOR_TORCH}
    if torch_name == "AdamW":
        kept.setdefault("weight_decay", 0.0)  # torch's default is 0.01, DeepSpeed's 0
    words = [f"{key}={_text(value)}" for key, value in kept.items()]
    if any(value == "auto" for value in kept.values()):
        plan.refused.append('values "auto" are filled in by another library')
    plan.optimizer = f"torch.optim.{torch_name}({', '.join(['{params}', *words])})"


def _text(value: Any) -> str:
    if isinstance(value, Text):
        return value.text
    if isinstance(value, list):
        return "(" + ", ".join(map(_text, value)) + ")"
    return f'"{value}"' if isinstance(value, str) else repr(value)
