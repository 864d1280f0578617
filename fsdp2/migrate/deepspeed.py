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
from .editor import Editor, Method, Rules
from .syntax_trees import arguments, code, dotted, expression, keyword, string_of, with_args

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
_WHY = {
    "args": "the configuration is in the call.",
    "model_parameters": "the optimizer takes the sharded parameters.",
    "dist_init_required": "torch.distributed.init_process_group() starts the processes.",
    "distributed_port": "torchrun chooses the port.",
}


@dataclass
class Engine:
    """The one ``initialize`` of the file.

    script:          where the file is, next to which a configuration may lie
    plan:            None if it is not rewritten
    steps_elsewhere: ``engine.step()`` is called in another function, which sees the engine alone
    """

    script: Path | None = None
    plan: Plan | None = None
    engine: str = ""
    optimizer: str = ""
    loader: str = ""
    scheduler: str = ""
    has_scheduler: bool = False
    steps_elsewhere: bool = False

    def of(self, engine: str, name: str) -> str:
        """The text for the optimizer or the scheduler, where the code calls the engine ``engine``."""
        return f"{engine}.{name}" if self.steps_elsewhere else {"optimizer": self.optimizer, "lr_scheduler": self.scheduler}[name]


def find_engine(editor: Editor) -> None:
    """Before the rewrite: what becomes of this file's ``initialize``."""
    names = editor.names
    calls = [call for call in names.calls if names.origin_of(call.func) == "deepspeed:initialize"]
    if len(calls) > 1:
        editor.refuse("deepspeed", calls[1], "several calls of deepspeed.initialize in one file")
    if len(calls) != 1:
        return
    call = calls[0]
    given = arguments(call.args, _SIGNATURE)
    target = names.assigned_to(call)
    if given.stars or given.extra or not isinstance(target, cst.Tuple) or len(target.elements) != 4:
        editor.refuse("deepspeed", call, "deepspeed.initialize whose four results are not assigned to names, or with **arguments")
        return
    config = _config(editor, call)
    if config is None:
        editor.refuse("deepspeed", call, "the configuration is not written in the script nor in a JSON file that it names")
        return
    here, plan = editor.of(Engine), plan_of(config)
    refused = {
        **dict.fromkeys(plan.refused, True),
        "no optimizer, in the configuration or as an argument": plan.optimizer is None and given.value("optimizer") is None,
        "mpu: pass a mesh": given.value("mpu") is not None,
        "training_data without train_micro_batch_size_per_gpu": (
            given.value("training_data") is not None and plan.micro_batch_size is None
        ),
    }
    for reason in [reason for reason, holds in refused.items() if holds]:
        editor.refuse("deepspeed", call, reason)
    here.plan = plan
    here.engine, optimizer, loader, scheduler = (dotted(element.value) for element in target.elements)
    here.optimizer = "optimizer" if optimizer == "_" else optimizer or "optimizer"
    here.loader = "" if loader == "_" else loader
    here.has_scheduler = given.value("lr_scheduler") is not None
    here.scheduler = "lr_scheduler" if scheduler == "_" else scheduler or "lr_scheduler"
    steps = [each for each in names.calls if names.method_of(each, "deepspeed") == "step"]
    function = names.function_of(call)
    here.steps_elsewhere = function is not None and any(names.function_of(each) is not function for each in steps)


def _config(editor: Editor, call: cst.Call) -> Any:
    given = arguments(call.args, _SIGNATURE)
    node = editor.names.only_value(given.value("config") or given.value("config_params"))
    if isinstance(node, cst.Dict):
        return from_dict(node)
    text, script = string_of(node), editor.of(Engine).script
    return from_file(script.parent / text) if text is not None and script is not None else None


# --- initialize ----------------------------------------------------------------------------------------------------------------


def initialize(editor: Editor, old: cst.Call, new: cst.Call) -> cst.BaseExpression | None:
    here = editor.of(Engine)
    plan, engine, optimizer = here.plan, here.engine, here.optimizer
    if plan is None:
        return None
    given = arguments(new.args, _SIGNATURE)
    for text in plan.notes:
        editor.note(old, text)
    for name in _WHY:
        if name in given.by_name:
            editor.note(old, f"{name}={given.text(name)} dropped: {_WHY[name]}")
    policies = [editor.text(each) for each in plan.policies]
    words = ", ".join([given.text("model"), f'"{plan.strategy}"', *policies])
    lines = [f"{engine} = " + editor.text("fsdp2.parallelize({words})", words=words)]
    if given.value("optimizer") is not None:
        if optimizer != given.text("optimizer"):
            lines.append(f"{optimizer} = {given.text('optimizer')}")
    elif plan.optimizer is not None:
        lines.append(f"{optimizer} = " + editor.text(plan.optimizer, params=f"{engine}.parameters()"))
    if given.value("training_data") is not None and here.loader:
        collate = f", collate_fn={given.text('collate_fn')}" if given.value("collate_fn") is not None else ""
        template = "{loader} = DataLoader({data}, batch_size={size}, sampler=DistributedSampler({data}){collate})"
        size = plan.micro_batch_size or ""
        lines.append(editor.text(template, loader=here.loader, data=given.text("training_data"), size=size, collate=collate))
    if here.has_scheduler and here.scheduler != given.text("lr_scheduler"):
        lines.append(f"{here.scheduler} = {given.text('lr_scheduler')}")
    if here.steps_elsewhere:
        lines.append(f"{engine}.optimizer = {optimizer}")
        if here.has_scheduler:
            lines.append(f"{engine}.lr_scheduler = {here.scheduler}")
    if plan.micro_batches != "1":
        lines.append(f"{engine}.micro_step = 0")
    editor.instead(*lines)
    return new


# --- the engine ----------------------------------------------------------------------------------------------------------------


def backward(editor: Editor, call: Method) -> cst.BaseExpression | None:
    """``engine.backward(loss)``."""
    plan = editor.of(Engine).plan
    if plan is None or not call.new.args:
        return None
    loss = code(call.new.args[0].value)
    if plan.micro_batches != "1":
        return expression(f"({loss} / {plan.micro_batches}).backward()")
    if not isinstance(call.new.args[0].value, (cst.Name, cst.Attribute, cst.Call, cst.Subscript)):
        loss = f"({loss})"
    return expression(f"{loss}.backward()")


def step(editor: Editor, call: Method) -> None:
    """``engine.step()``: clip, step, zero_grad, the scheduler; after the last micro-batch only."""
    here, engine = editor.of(Engine), call.text
    plan = here.plan
    if plan is None:
        return
    if not isinstance(editor.names.parent_of(call.old), cst.Expr):
        editor.refuse("deepspeed", call.old, "the result of engine.step() is used")
        return
    optimizer = here.of(engine, "optimizer")
    lines = [editor.text("fsdp2.clip_grad_norm_({engine}.parameters(), {clip})", engine=engine, clip=plan.clip)] if plan.clip else []
    lines += [f"{optimizer}.step()", f"{optimizer}.zero_grad()"]
    if here.has_scheduler:
        lines.append(f"{here.of(engine, 'lr_scheduler')}.step()")
    number = plan.micro_batches
    if number == "1":
        editor.instead(*lines)
        return
    inside = "".join(f"    {line}\n" for line in lines)
    operand = number if number.isidentifier() or number.isdigit() or "." in number else f"({number})"
    editor.note(call.old, "every micro-batch is reduced; fsdp2.accumulate around it saves communication.")
    editor.instead(f"{engine}.micro_step += 1", f"if {engine}.micro_step % {operand} == 0:\n{inside}")


def save_checkpoint(editor: Editor, call: Method) -> cst.BaseExpression | None:
    """``engine.save_checkpoint(folder, tag)`` is a DCP checkpoint, which any number of ranks can load."""
    if editor.of(Engine).plan is None:
        return None
    given = arguments(call.new.args, ("save_dir", "tag", "client_state"))
    if "tag" not in given.by_name or "client_state" in given.by_name:
        text = "save_checkpoint without a tag or with client_state: use fsdp2.checkpoint.Checkpointer"
        editor.refuse("deepspeed", call.old, text)
        return None
    editor.note(call.old, "a checkpoint of torch.distributed.checkpoint, not one that DeepSpeed reads.")
    return editor.make(
        'dcp.save({{"model": get_model_state_dict({engine}), "optimizer": get_optimizer_state_dict({engine}, {optimizer})}}, '
        "checkpoint_id=os.path.join({folder}, {tag}))",
        engine=call.text,
        optimizer=editor.of(Engine).of(call.text, "optimizer"),
        folder=given.text("save_dir"),
        tag=given.text("tag") if string_of(given.value("tag")) is not None else f"str({given.text('tag')})",
    )


def load_checkpoint(editor: Editor, call: Method) -> None:
    if editor.of(Engine).plan is not None:
        text = "load_checkpoint: use fsdp2.checkpoint.Checkpointer; for DeepSpeed's files, `fsdp2 convert OLD NEW --to dcp`"
        editor.refuse("deepspeed", call.old, text)


_ENGINE_ONLY = (
    *("local_rank", "global_rank", "world_size", "device", "global_steps", "micro_steps", "get_lr", "get_global_grad_norm"),
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "is_gradient_accumulation_boundary"),
)


def engine_attribute(editor: Editor, old: cst.Attribute, new: cst.Attribute) -> cst.BaseExpression:
    """Names that only DeepSpeed's engine has."""
    if old.attr.value in _ENGINE_ONLY and editor.names.tag_of(old.value) == "deepspeed":
        editor.refuse("deepspeed", old, f"engine.{old.attr.value}: the model has no such attribute")
    return new


# --- the module's functions -----------------------------------------------------------------------------------------------------


def init_distributed(editor: Editor, old: cst.Call, new: cst.Call) -> cst.BaseExpression:
    given = arguments(new.args, ("dist_backend",))
    backend = [given.by_name["dist_backend"].with_changes(keyword=None, equal=cst.MaybeSentinel.DEFAULT)] if given.by_name else []
    return with_args(new, backend).with_changes(func=editor.make("torch.distributed.init_process_group"))


def config_arguments(editor: Editor, old: cst.Call, new: cst.Call) -> cst.BaseExpression | None:
    """``parser = deepspeed.add_config_arguments(parser)``."""
    editor.note(old, "add_config_arguments dropped: --deepspeed and --deepspeed_config have no effect here.")
    target = editor.names.assigned_to(old)
    if target is not None and new.args and code(target) == code(new.args[0].value):
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
    return with_args(new, words).with_changes(func=editor.make(f"torch.optim.{'Adam' if adam else 'AdamW'}"))


def rest(editor: Editor, old: cst.Attribute | cst.Name, new: cst.BaseExpression) -> cst.BaseExpression:
    """Anything else of DeepSpeed."""
    found = editor.names.origin_of(old)
    known = ("initialize", "init_distributed", "add_config_arguments", *_OPTIMIZERS)
    if found.startswith("deepspeed:") and found.rpartition(".")[2].removeprefix("deepspeed:") not in known:
        parent = editor.names.parent_of(old)
        if not (isinstance(parent, cst.Attribute) and editor.names.origin_of(parent).startswith("deepspeed:")):
            editor.refuse("deepspeed", old, f"{found.replace(':', '.')}: fsdp2 has no replacement")
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
    methods={
        ("deepspeed", "backward"): backward,
        ("deepspeed", "step"): step,
        ("deepspeed", "save_checkpoint"): save_checkpoint,
        ("deepspeed", "load_checkpoint"): load_checkpoint,
    },
    nodes={cst.Attribute: [engine_attribute, rest], cst.Name: [rest]},
)
