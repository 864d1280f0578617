"""FSDP1's values, each rewritten where it stands, so that variables, dicts, defaults and helper functions around it need no thought.

ShardingStrategy.HYBRID_SHARD                        "hsdp"
MixedPrecision(param_dtype=torch.bfloat16)           fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
partial(transformer_auto_wrap_policy,
        transformer_layer_cls={Block})               fsdp2.wrap.by_class(Block)
CPUOffload(offload_params=flag)                      fsdp2.CPUOffloadPolicy() if flag else fsdp2.OffloadPolicy()
"""

from __future__ import annotations

import sys

import libcst as cst

from .editor import Editor, Rules, enclosing_call
from .names import VALUES
from .syntax_trees import Arguments, arguments, code, is_none, keyword, literal, with_args

STRATEGIES = {
    "FULL_SHARD": "zero3",
    "SHARD_GRAD_OP": "zero2",
    "NO_SHARD": "ddp",
    "HYBRID_SHARD": "hsdp",
    "_HYBRID_SHARD_ZERO2": "hsdp_zero2",
}

PRECISION = (
    "param_dtype",
    "reduce_dtype",
    "buffer_dtype",
    "keep_low_precision_grads",
    "cast_forward_inputs",
    "cast_root_forward_inputs",
    "_module_classes_to_ignore",
)


_OWN_FSDP1 = ("lightning", "lightning_fabric", "pytorch_lightning", "accelerate", "transformers", "trl", "composer")
"""Packages that call torch's FSDP1 themselves, with its values."""


def find_borders(editor: Editor) -> None:
    """Before the rewrite: values that the file passes to functions of other files or packages, which know FSDP1's."""
    for call in editor.names.facts.calls:
        origin = editor.names.origin_of(call.func)
        top = origin.partition(".")[0]
        if ":" in origin or top in ("", "torch") or top in sys.stdlib_module_names:
            continue
        for arg in call.args:
            if editor.names.tag_of(arg.value) in VALUES:
                theirs = top in _OWN_FSDP1
                what = "takes torch's FSDP1" if theirs else "is of another file"
                editor.refuse("fsdp1", call, f"{code(call.func)}({code(arg.value)}): {code(call.func)} {what}", on_compat=not theirs)


def strategy_name(editor: Editor, old: cst.Attribute, new: cst.BaseExpression) -> cst.BaseExpression:
    """``ShardingStrategy.X`` is a string; in an annotation, ``ShardingStrategy`` is ``str``."""
    found = editor.names.origin_of(old)
    if not found.startswith("fsdp:ShardingStrategy."):
        return new
    name = found.rpartition(".")[2]
    if name not in STRATEGIES:
        return new
    if name == "NO_SHARD":
        editor.note(old, "NO_SHARD is the ddp strategy: nothing is sharded.")
    elif STRATEGIES[name].startswith("hsdp"):
        editor.note(
            old,
            f'{name} is "{STRATEGIES[name]}": a 2-D mesh of nodes and the LOCAL_WORLD_SIZE ranks of each; '
            "shard_size= or a 2-D mesh= says otherwise.",
        )
    return editor.make(f'"{STRATEGIES[name]}"')


def annotation(editor: Editor, old: cst.Annotation, new: cst.Annotation) -> cst.Annotation:
    """Types of values that have another type now. ``Optional[X]`` and ``X | None`` keep the rest."""
    types = {
        "fsdp:ShardingStrategy": ("str",),
        "fsdp:MixedPrecision": ("fsdp2.MixedPrecisionPolicy", "import fsdp2"),
        "fsdp:CPUOffload": ("fsdp2.OffloadPolicy", "import fsdp2"),
        "fsdp:ModuleWrapPolicy": ("fsdp2.wrap.WrapPolicy", "import fsdp2"),
        "fsdp:FullyShardedDataParallel": ("fsdp2.FSDPModule", "import fsdp2"),
        "ddp:DistributedDataParallel": ("fsdp2.FSDPModule", "import fsdp2"),
    }

    class Types(cst.CSTTransformer):
        def on_visit(self, node: cst.CSTNode) -> bool:
            return editor.names.origin_of(node) not in types

        def on_leave(self, original_node: cst.CSTNode, updated_node: cst.CSTNode) -> cst.CSTNode:  # type: ignore[override]
            found = types.get(editor.names.origin_of(original_node))
            return updated_node if found is None else editor.make(*found)

    changed = old.annotation.visit(Types())
    return new.with_changes(annotation=changed) if code(changed) != code(old.annotation) else new  # type: ignore[arg-type]


def strategy_by_name(editor: Editor, old: cst.Subscript, new: cst.Subscript) -> cst.BaseExpression:
    """``ShardingStrategy[name]``."""
    if editor.names.origin_of(old.value) != "fsdp:ShardingStrategy":
        return new
    return editor.make(f"{_table()}[{', '.join(code(each) for each in new.slice)}]")


def strategy_by_getattr(editor: Editor, old: cst.Call, new: cst.Call) -> cst.BaseExpression | None:
    """``getattr(ShardingStrategy, name)``."""
    if code(old.func) != "getattr" or len(old.args) != 2 or editor.names.origin_of(old.args[0].value) != "fsdp:ShardingStrategy":
        return None
    return editor.make(f"{_table()}[{code(new.args[1].value)}]")


def _table() -> str:
    return "{" + ", ".join(f'"{old}": "{new}"' for old, new in STRATEGIES.items()) + "}"


def mixed_precision(editor: Editor, old: cst.Call, new: cst.Call) -> cst.BaseExpression:
    given = arguments(new.args, PRECISION)
    if given.stars or given.extra:
        editor.refuse("fsdp1", old, "MixedPrecision(**...): what it is given is not written here")
        return new
    kept = [keyword(name, arg.value, arg) for name, arg in given.by_name.items() if name in ("param_dtype", "reduce_dtype")]
    computed = given.value("param_dtype")
    if "reduce_dtype" not in given.by_name and computed is not None and not is_none(computed):
        kept.append(keyword("reduce_dtype", computed))  # as FSDP1; what None means depends on the version of torch
    casts = {given.text("cast_forward_inputs", "False"), given.text("cast_root_forward_inputs", "True")}
    if casts == {"False"}:
        kept.append(keyword("cast_forward_inputs", cst.Name("False")))
    elif not casts <= {"True", "False"}:
        editor.refuse("fsdp1", old, "MixedPrecision: whether inputs are cast is known only when it runs")
    if literal(given.value("keep_low_precision_grads")) not in ("", "False") or (
        "keep_low_precision_grads" in given.by_name and literal(given.value("keep_low_precision_grads")) == ""
    ):
        editor.refuse("fsdp1", old, "keep_low_precision_grads: sharded gradients have the parameter's dtype in FSDP2")
    if "_module_classes_to_ignore" in given.by_name:
        editor.refuse("fsdp1", old, "_module_classes_to_ignore: a policy of FSDP2 holds for a whole group")
    buffers = given.value("buffer_dtype")
    if buffers is not None and not is_none(buffers):
        editor.note(
            old,
            f"buffer_dtype={code(buffers)} is a cast of the buffers next to parallelize; state dicts have them in that dtype, too.",
        )
    call = with_args(new, kept)
    return call.with_changes(func=editor.make("fsdp2.MixedPrecisionPolicy", "import fsdp2"))


def cpu_offload(editor: Editor, old: cst.Call, new: cst.Call) -> cst.BaseExpression:
    given = arguments(new.args, ("offload_params",))
    flag = given.text("offload_params", "False")
    if flag == "True":
        return editor.make("fsdp2.CPUOffloadPolicy()", "import fsdp2")
    if flag == "False":
        return editor.make("fsdp2.OffloadPolicy()", "import fsdp2")
    return editor.make(f"fsdp2.CPUOffloadPolicy() if {flag} else fsdp2.OffloadPolicy()", "import fsdp2")


def grad_scaler(editor: Editor, old: cst.Call, new: cst.Call) -> cst.BaseExpression:
    order = ("device", "init_scale", "backoff_factor", "growth_factor", "growth_interval", "enabled", "process_group")
    given = arguments(new.args, order)
    kept = [arg if arg.keyword is None and name == "device" else keyword(name, arg.value, arg) for name, arg in given.by_name.items()]
    if "process_group" in given.by_name:
        kept = [arg for arg in kept if arg.keyword is None or arg.keyword.value != "process_group"]
        editor.note(
            old,
            f"process_group={given.text('process_group')} dropped: gradients are DTensors, and torch's scaler "
            "finds infinities over their own mesh.",
        )
    return with_args(new, [*kept, *given.stars]).with_changes(func=editor.make("torch.amp.GradScaler", "import torch"))


# --- wrap policies -------------------------------------------------------------------------------------------------------------


def module_wrap_policy(editor: Editor, old: cst.Call, new: cst.Call) -> cst.BaseExpression:
    return _by_class(editor, arguments(new.args, ("module_classes",)).value("module_classes"))


def custom_policy(editor: Editor, old: cst.Call, new: cst.Call) -> cst.BaseExpression:
    """``CustomPolicy(fn)``, where ``fn`` only says yes or no."""
    fn = arguments(old.args, ("lambda_fn",)).value("lambda_fn")
    if isinstance(fn, cst.Lambda) and _is_bool(fn.body):
        return editor.make(f"fsdp2.wrap.by_predicate({code(new.args[0].value)})", "import fsdp2")
    editor.refuse("fsdp1", old, "CustomPolicy whose function may return arguments for one module: parallelize has one set for all")
    return new


def partial_policy(editor: Editor, old: cst.Call, new: cst.Call) -> cst.BaseExpression | None:
    """``functools.partial`` of one of FSDP1's policy functions."""
    of = editor.names.origin_of(old.args[0].value) if old.args else ""
    given = arguments(new.args[1:], ())
    if of == "fsdp:transformer_auto_wrap_policy":
        return _by_class(editor, given.value("transformer_layer_cls"))
    if of == "fsdp:lambda_auto_wrap_policy":
        return editor.make(f"fsdp2.wrap.by_predicate({given.text('lambda_fn')})", "import fsdp2")
    if of == "fsdp:size_based_auto_wrap_policy":
        return editor.make(f"fsdp2.wrap.by_size({_sizes(given)})", "import fsdp2")
    return None


def bare_policy(editor: Editor, old: cst.Name | cst.Attribute, new: cst.BaseExpression) -> cst.BaseExpression:
    """A policy function that is passed as it is."""
    of = editor.names.origin_of(old)
    if of not in ("fsdp:size_based_auto_wrap_policy", "fsdp:always_wrap_policy"):
        return new
    call, parent = enclosing_call(editor.names, old), editor.names.parent_of(old)
    if isinstance(parent, cst.Call) or (call is not None and editor.names.origin_of(call.func) == "functools.partial"):
        return new  # called, or the first argument of partial
    if of == "fsdp:always_wrap_policy":
        return editor.make("fsdp2.wrap.by_predicate(lambda module: True)", "import fsdp2")
    return editor.make("fsdp2.wrap.by_size()", "import fsdp2")


def _sizes(given: Arguments) -> str:
    parts = []
    for old, new in (("min_num_params", "min_params"), ("force_leaf_modules", "leaves"), ("exclude_wrap_modules", "excluded")):
        value = given.value(old)
        if value is not None:
            whole = isinstance(value, (cst.Integer, cst.Call, cst.Name, cst.Attribute)) or old != "min_num_params"
            parts.append(f"{new}={code(value)}" if whole else f"{new}=int({code(value)})")
    return ", ".join(parts).removeprefix("min_params=")


def _by_class(editor: Editor, classes: cst.BaseExpression | None) -> cst.BaseExpression:
    if isinstance(classes, (cst.Set, cst.List, cst.Tuple)):
        inside = ", ".join(code(each) for each in _without_commas(classes))
    else:
        inside = f"*{code(classes)}" if classes is not None else ""
    return editor.make(f"fsdp2.wrap.by_class({inside})", "import fsdp2")


def _without_commas(display: cst.Set | cst.List | cst.Tuple) -> list[cst.BaseElement]:
    return [each.with_changes(comma=cst.MaybeSentinel.DEFAULT) for each in display.elements]


def _is_bool(body: cst.BaseExpression) -> bool:
    if isinstance(body, cst.BooleanOperation):
        return _is_bool(body.left) and _is_bool(body.right)
    if isinstance(body, cst.UnaryOperation):
        return isinstance(body.operator, cst.Not)
    if isinstance(body, cst.Call):
        return code(body.func) in ("isinstance", "issubclass", "hasattr", "bool", "any", "all")
    return isinstance(body, cst.Comparison) or literal(body) in ("True", "False")


RULES = Rules(
    calls={
        "fsdp:MixedPrecision": mixed_precision,
        "fsdp:CPUOffload": cpu_offload,
        "fsdp:ShardedGradScaler": grad_scaler,
        "fsdp:ModuleWrapPolicy": module_wrap_policy,
        "fsdp:CustomPolicy": custom_policy,
    },
    nodes={
        cst.Attribute: [strategy_name, bare_policy],
        cst.Name: [bare_policy],
        cst.Subscript: [strategy_by_name],
        cst.Annotation: [annotation],
    },
)
