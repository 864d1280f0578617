"""``deepspeed.initialize`` and the engine that it returns, where the configuration is written in the script or in a file next to it.

engine, optimizer, _, _ = deepspeed.initialize(...)    engine = fsdp2.parallelize(model, "zero2")
                                                       optimizer = torch.optim.AdamW(engine.parameters(), ...)
engine.backward(loss)                                  loss.backward()
engine.step()                                          optimizer.step()
                                                       optimizer.zero_grad()
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import libcst as cst

from .deepspeed_config import Plan, from_dict, from_file, plan_of
from .editor import Editor, Rules
from .syntax_trees import arguments, code, dotted, keyword, literal, string_of, with_args

_SIGNATURE = (
    "args",
    "model",
    "optimizer",
    "model_parameters",
    "training_data",
    "lr_scheduler",
    "distributed_port",
    "mpu",
    "dist_init_required",
    "collate_fn",
    "config",
    "mesh_param",
    "config_params",
)
_OPTIMIZERS = ("FusedAdam", "DeepSpeedCPUAdam", "CPUAdam")


@dataclass
class Engine:
    """The one ``initialize`` of the file.

    script:          where the file is, next to which a configuration may lie
    plan:            None if it is not rewritten
    names:           of the engine, optimizer, loader and scheduler
    steps_elsewhere: ``engine.step()`` is called in another function, which sees the engine alone
    """

    script: Path | None = None
    plan: Plan | None = None
    names: tuple[str, str, str, str] = ("", "", "", "")
    has_scheduler: bool = False
    steps_elsewhere: bool = False


def find_engine(editor: Editor) -> None:
    """Before the rewrite: what becomes of this file's ``initialize``."""
    names = editor.names
    calls = [call for call in names.facts.calls if names.origin_of(call.func) == "deepspeed:initialize"]
    if len(calls) > 1:
        editor.refuse("deepspeed", calls[1], "several calls of deepspeed.initialize in one file")
    if len(calls) != 1:
        return
    call = calls[0]
    given = arguments(call.args, _SIGNATURE)
    assign = names.parent_of(call)
    target = assign.targets[0].target if isinstance(assign, cst.Assign) and len(assign.targets) == 1 else None
    if given.stars or given.extra or not isinstance(target, cst.Tuple) or len(target.elements) != 4:
        editor.refuse("deepspeed", call, "deepspeed.initialize whose four results are not assigned to names, or with **arguments")
        return
    config = _config(editor, call)
    if config is None:
        editor.refuse("deepspeed", call, "the configuration is not written in the script nor in a JSON file that it names")
        return
    plan = plan_of(config)
    for reason in plan.refused:
        editor.refuse("deepspeed", call, reason)
    if plan.optimizer is None and given.value("optimizer") is None:
        editor.refuse("deepspeed", call, "no optimizer, in the configuration or as an argument")
    if given.value("mpu") is not None:
        editor.refuse("deepspeed", call, "mpu: pass a mesh")
    engine, optimizer, loader, scheduler = (dotted(element.value) for element in target.elements)
    if given.value("training_data") is not None and plan.micro_batch_size is None:
        editor.refuse("deepspeed", call, "training_data without train_micro_batch_size_per_gpu")
    here = editor.of(Engine)
    here.plan = plan
    here.names = (engine, "optimizer" if optimizer in ("_", "") else optimizer, loader, scheduler)
    here.has_scheduler = given.value("lr_scheduler") is not None
    steps = [each for each in names.facts.calls if isinstance(each.func, cst.Attribute) and each.func.attr.value == "step"]
    far = [each for each in steps if _is_engine(editor, each) and names.function_of(each) is not names.function_of(call)]
    here.steps_elsewhere = bool(far) and names.function_of(call) is not None


def _config(editor: Editor, call: cst.Call) -> Any:
    given = arguments(call.args, _SIGNATURE)
    node = given.value("config") or given.value("config_params")
    if isinstance(node, (cst.Name, cst.Attribute)):
        values = editor.names.values_of(dotted(node))
        node = values[0] if len(values) == 1 else None
    if isinstance(node, cst.Dict):
        return from_dict(node)
    text = string_of(node)
    if text is None:
        return None
    path = editor.of(Engine).script
    folders = [path.parent] if path is not None else []
    return next((found for folder in folders if (found := from_file(folder / text)) is not None), None)


def _is_engine(editor: Editor, call: cst.Call) -> bool:
    return isinstance(call.func, cst.Attribute) and editor.names.tag_of(call.func.value) == "deepspeed"


# --- initialize ----------------------------------------------------------------------------------------------------------------


def initialize(editor: Editor, old: cst.Call, new: cst.Call) -> cst.BaseExpression | None:
    plan = editor.of(Engine).plan
    if plan is None:
        return None
    given = arguments(new.args, _SIGNATURE)
    engine, optimizer, loader, scheduler = editor.of(Engine).names
    for text in plan.notes:
        editor.note(old, text)
    for name in ("args", "model_parameters", "dist_init_required", "distributed_port"):
        if name in given.by_name:
            editor.note(old, f"{name}={given.text(name)} dropped: {_WHY[name]}")
    editor.needs("import fsdp2")
    words = [given.text("model"), f'"{plan.strategy}"', *plan.policies]
    lines = [f"{engine} = fsdp2.parallelize({', '.join(words)})"]
    if any("torch." in each for each in plan.policies):
        editor.needs("import torch")
    if given.value("optimizer") is not None:
        if optimizer != given.text("optimizer"):
            lines.append(f"{optimizer} = {given.text('optimizer')}")
    elif plan.optimizer is not None:
        editor.needs("import torch")
        lines.append(f"{optimizer} = {plan.optimizer.format(params=f'{engine}.parameters()')}")
    if given.value("training_data") is not None and loader not in ("_", ""):
        editor.needs("from torch.utils.data import DataLoader")
        editor.needs("from torch.utils.data.distributed import DistributedSampler")
        data = given.text("training_data")
        collate = f", collate_fn={given.text('collate_fn')}" if given.value("collate_fn") is not None else ""
        lines.append(f"{loader} = DataLoader({data}, batch_size={plan.micro_batch_size}, sampler=DistributedSampler({data}){collate})")
    if editor.of(Engine).has_scheduler:
        if scheduler in ("_", ""):
            scheduler = "lr_scheduler"
        if scheduler != given.text("lr_scheduler"):
            lines.append(f"{scheduler} = {given.text('lr_scheduler')}")
    if editor.of(Engine).steps_elsewhere:
        lines.append(f"{engine}.optimizer = {optimizer}")
        if editor.of(Engine).has_scheduler:
            lines.append(f"{engine}.lr_scheduler = {scheduler}")
    if plan.micro_batches != "1":
        lines.append(f"{engine}.micro_step = 0")
    editor.of(Engine).names = (engine, optimizer, loader, scheduler)
    editor.instead(*lines)
    return new


_WHY = {
    "args": "the configuration is in the call.",
    "model_parameters": "the optimizer takes the sharded parameters.",
    "dist_init_required": "torch.distributed.init_process_group() starts the processes.",
    "distributed_port": "torchrun chooses the port.",
}


# --- the engine ----------------------------------------------------------------------------------------------------------------


def backward(editor: Editor, old: cst.Call, new: cst.Call) -> cst.BaseExpression | None:
    """``engine.backward(loss)``."""
    plan = editor.of(Engine).plan
    if plan is None or not _is_engine(editor, old) or not new.args:
        return None
    loss = code(new.args[0].value)
    if plan.micro_batches != "1":
        return editor.make(f"({loss} / {plan.micro_batches}).backward()")
    if not isinstance(new.args[0].value, (cst.Name, cst.Attribute, cst.Call, cst.Subscript)):
        loss = f"({loss})"
    return editor.make(f"{loss}.backward()")


def step(editor: Editor, old: cst.Call, new: cst.Call) -> cst.BaseExpression | None:
    """``engine.step()``: clip, step, zero_grad, the scheduler; after the last micro-batch only."""
    plan = editor.of(Engine).plan
    if plan is None or not _is_engine(editor, old) or not isinstance(new.func, cst.Attribute):
        return None
    if not isinstance(editor.names.parent_of(old), cst.Expr):
        editor.refuse("deepspeed", old, "the result of engine.step() is used")
        return None
    engine = code(new.func.value)
    _engine, optimizer, _loader, scheduler = editor.of(Engine).names
    if editor.of(Engine).steps_elsewhere:
        optimizer, scheduler = f"{engine}.optimizer", f"{engine}.lr_scheduler"
    lines = [f"fsdp2.clip_grad_norm_({engine}.parameters(), {plan.clip})"] if plan.clip else []
    lines += [f"{optimizer}.step()", f"{optimizer}.zero_grad()"]
    if editor.of(Engine).has_scheduler:
        lines.append(f"{scheduler}.step()")
    if plan.micro_batches == "1":
        editor.instead(*lines)
    else:
        inside = "".join(f"    {line}\n" for line in lines)
        editor.note(old, "every micro-batch is reduced; fsdp2.accumulate around it saves communication.")
        editor.instead(f"{engine}.micro_step += 1", f"if {engine}.micro_step % {_operand(plan.micro_batches)} == 0:\n{inside}")
    return new


def _operand(text: str) -> str:
    return text if text.isidentifier() or text.isdigit() or "." in text else f"({text})"


def save_checkpoint(editor: Editor, old: cst.Call, new: cst.Call) -> cst.BaseExpression | None:
    """``engine.save_checkpoint(folder, tag)`` is a DCP checkpoint, which any number of ranks can load."""
    if not _is_engine(editor, old) or not isinstance(new.func, cst.Attribute) or editor.of(Engine).plan is None:
        return None
    given = arguments(new.args, ("save_dir", "tag", "client_state"))
    if "tag" not in given.by_name or literal(given.value("client_state")) not in ("", "None") or "client_state" in given.by_name:
        editor.refuse("deepspeed", old, "save_checkpoint without a tag or with client_state: use fsdp2.checkpoint.Checkpointer")
        return None
    engine = code(new.func.value)
    tag = given.text("tag") if string_of(given.value("tag")) is not None else f"str({given.text('tag')})"
    optimizer = f"{engine}.optimizer" if editor.of(Engine).steps_elsewhere else editor.of(Engine).names[1]
    for line in (
        "import os",
        "import torch.distributed.checkpoint as dcp",
        "from torch.distributed.checkpoint.state_dict import get_model_state_dict",
        "from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict",
    ):
        editor.needs(line)
    editor.note(old, "a checkpoint of torch.distributed.checkpoint, not one that DeepSpeed reads.")
    return editor.make(
        f'dcp.save({{"model": get_model_state_dict({engine}), "optimizer": get_optimizer_state_dict({engine}, {optimizer})}}, '
        f"checkpoint_id=os.path.join({given.text('save_dir')}, {tag}))"
    )


def load_checkpoint(editor: Editor, old: cst.Call, new: cst.Call) -> cst.BaseExpression | None:
    if _is_engine(editor, old) and editor.of(Engine).plan is not None:
        editor.refuse(
            "deepspeed",
            old,
            "load_checkpoint: use fsdp2.checkpoint.Checkpointer; for DeepSpeed's files, `fsdp2 convert OLD NEW --to dcp`",
        )
    return None


_ENGINE_ONLY = (
    *("local_rank", "global_rank", "world_size", "device", "global_steps", "micro_steps", "get_lr", "get_global_grad_norm"),
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "is_gradient_accumulation_boundary"),
)


def engine_attribute(editor: Editor, old: cst.Attribute, new: cst.Attribute) -> cst.BaseExpression:
    """Names that only DeepSpeed's engine has."""
    if old.attr.value in _ENGINE_ONLY and editor.names.tag_of(old.value) == "deepspeed":
        editor.refuse("deepspeed", old, f"engine.{old.attr.value}: the model has nothing of that name")
    return new


# --- the module's functions -----------------------------------------------------------------------------------------------------


def init_distributed(editor: Editor, old: cst.Call, new: cst.Call) -> cst.BaseExpression:
    given = arguments(new.args, ("dist_backend",))
    backend = [given.by_name["dist_backend"].with_changes(keyword=None, equal=cst.MaybeSentinel.DEFAULT)] if given.by_name else []
    func = editor.make("torch.distributed.init_process_group", "import torch.distributed")
    return with_args(new, backend).with_changes(func=func)


def config_arguments(editor: Editor, old: cst.Call, new: cst.Call) -> cst.BaseExpression | None:
    """``parser = deepspeed.add_config_arguments(parser)``."""
    editor.note(old, "add_config_arguments dropped: --deepspeed and --deepspeed_config say nothing here.")
    parent = editor.names.parent_of(old)
    if isinstance(parent, cst.Assign) and new.args and code(parent.targets[0].target) == code(new.args[0].value):
        editor.instead()
        return None
    return new.args[0].value if new.args else None


def own_optimizer(editor: Editor, old: cst.Call, new: cst.Call) -> cst.BaseExpression:
    given = arguments(new.args, ("model_params",))
    name = editor.names.origin_of(old.func).rpartition(".")[2]
    own = ("adamw_mode", "adam_w_mode", "bias_correction", "fp32_optimizer_states")
    words = [arg for key, arg in given.by_name.items() if key not in own]
    adam = any(given.text(key, "True") == "False" for key in ("adamw_mode", "adam_w_mode"))
    if not adam and "weight_decay" not in given.by_name:
        words.append(keyword("weight_decay", cst.Float("0.0")))
    editor.note(old, f"{name} is torch's, whose foreach implementation handles all shards at once.")
    return with_args(new, words).with_changes(func=editor.make(f"torch.optim.{'Adam' if adam else 'AdamW'}", "import torch"))


def rest(editor: Editor, old: cst.Attribute | cst.Name, new: cst.BaseExpression) -> cst.BaseExpression:
    """Anything else of DeepSpeed."""
    found = editor.names.origin_of(old)
    known = ("initialize", "init_distributed", "add_config_arguments", *_OPTIMIZERS)
    if found.startswith("deepspeed:") and found.rpartition(".")[2].removeprefix("deepspeed:") not in known:
        parent = editor.names.parent_of(old)
        if not (isinstance(parent, cst.Attribute) and editor.names.origin_of(parent).startswith("deepspeed:")):
            editor.refuse("deepspeed", old, f"{found.replace(':', '.')}: not something that fsdp2 replaces")
    return new


RULES = Rules(
    calls={
        "deepspeed:initialize": initialize,
        "deepspeed:init_distributed": init_distributed,
        "deepspeed:add_config_arguments": config_arguments,
        "deepspeed:ops.adam.FusedAdam": own_optimizer,
        "deepspeed:ops.adam.DeepSpeedCPUAdam": own_optimizer,
        "deepspeed:ops.adam.cpu_adam.DeepSpeedCPUAdam": own_optimizer,
    },
    methods={"backward": backward, "step": step, "save_checkpoint": save_checkpoint, "load_checkpoint": load_checkpoint},
    nodes={cst.Attribute: [engine_attribute, rest], cst.Name: [rest]},
)
