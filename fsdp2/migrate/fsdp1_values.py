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
from .syntax_trees import Arguments, arguments, code, expression, is_none, keyword, literal, with_args

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
    for call in editor.names.calls:
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
    kind, _, name = editor.names.origin_of(old).rpartition(".")
    if kind != "fsdp:ShardingStrategy" or name not in STRATEGIES:
        return new
    if name == "NO_SHARD":
        editor.note(old, "NO_SHARD is the ddp strategy: nothing is sharded.")
    elif STRATEGIES[name].startswith("hsdp"):
        editor.note(
            old,
            f'{name} is "{STRATEGIES[name]}": a 2-D mesh of nodes and the LOCAL_WORLD_SIZE ranks of each; '
            "shard_size= or a 2-D mesh= overrides it.",
        )
    return cst.SimpleString(f'"{STRATEGIES[name]}"')


_TYPES = {
    "fsdp:ShardingStrategy": "str",
    "fsdp:MixedPrecision": "fsdp2.MixedPrecisionPolicy",
    "fsdp:CPUOffload": "fsdp2.OffloadPolicy",
    "fsdp:ModuleWrapPolicy": "fsdp2.wrap.WrapPolicy",
    "fsdp:FullyShardedDataParallel": "fsdp2.FSDPModule",
    "ddp:DistributedDataParallel": "fsdp2.FSDPModule",
}


def annotation(editor: Editor, old: cst.Annotation, new: cst.Annotation) -> cst.Annotation:
    """Types of values that have another type now. ``Optional[X]`` and ``X | None`` keep the rest."""

    class Types(cst.CSTTransformer):
        def on_visit(self, node: cst.CSTNode) -> bool:
            return editor.names.origin_of(node) not in _TYPES

        def on_leave(self, original_node: cst.CSTNode, updated_node: cst.CSTNode) -> cst.CSTNode:  # type: ignore[override]
            found = _TYPES.get(editor.names.origin_of(original_node))
            return updated_node if found is None else editor.make(found)

    changed = old.annotation.visit(Types())
    return new.with_changes(annotation=changed) if code(changed) != code(old.annotation) else new  # type: ignore[arg-type]


_TABLE = "{" + ", ".join(f'"{old}": "{new}"' for old, new in STRATEGIES.items()) + "}"


def strategy_by_name(editor: Editor, old: cst.Subscript, new: cst.Subscript) -> cst.BaseExpression:
    """``ShardingStrategy[name]``."""
    if editor.names.origin_of(old.value) != "fsdp:ShardingStrategy":
        return new
    return new.with_changes(value=expression(_TABLE))


def strategy_by_getattr(editor: Editor, old: cst.Call, new: cst.Call) -> cst.BaseExpression | None:
    """``getattr(ShardingStrategy, name)``."""
    if code(old.func) != "getattr" or len(old.args) != 2 or editor.names.origin_of(old.args[0].value) != "fsdp:ShardingStrategy":
        return None
    return expression(f"{_TABLE}[{code(new.args[1].value)}]")


def mixed_precision(editor: Editor, old: cst.Call, new: cst.Call) -> cst.BaseExpression:
    given = arguments(new.args, PRECISION)
    if given.stars or given.extra:
        editor.refuse("fsdp1", old, "MixedPrecision(**...): its arguments are not written here")
        return new
    kept = [keyword(name, arg.value, arg) for name, arg in given.by_name.items() if name in ("param_dtype", "reduce_dtype")]
    computed = given.value("param_dtype")
    if "reduce_dtype" not in given.by_name and computed is not None and not is_none(computed):
        kept.append(keyword("reduce_dtype", computed))  # as FSDP1; what None means depends on the version of torch
    casts = {given.text("cast_forward_inputs", "False"), given.text("cast_root_forward_inputs", "True")}
    if casts == {"False"}:
        kept.append(keyword("cast_forward_inputs", cst.Name("False")))
    elif not casts <= {"True", "False"}:
        editor.refuse("fsdp1", old, "MixedPrecision: only the run shows whether inputs are cast")
    if given.text("keep_low_precision_grads", "False") != "False":
        editor.refuse("fsdp1", old, "keep_low_precision_grads: sharded gradients have the parameter's dtype in FSDP2")
    if "_module_classes_to_ignore" in given.by_name:
        editor.refuse("fsdp1", old, "_module_classes_to_ignore: a policy of FSDP2 holds for a whole group")
    buffers = given.value("buffer_dtype")
    if buffers is not None and not is_none(buffers):
        editor.note(
            old,
            f"buffer_dtype={code(buffers)} is a loop next to parallelize that casts the buffers; "
            "state dicts have them in that dtype, too.",
        )
    return with_args(new, kept).with_changes(func=editor.make("fsdp2.MixedPrecisionPolicy"))


def cpu_offload(editor: Editor, old: cst.Call, new: cst.Call) -> cst.BaseExpression:
    flag = arguments(new.args, ("offload_params",)).text("offload_params", "False")
    by_flag = {"True": "fsdp2.CPUOffloadPolicy()", "False": "fsdp2.OffloadPolicy()"}
    return editor.make(by_flag.get(flag, "fsdp2.CPUOffloadPolicy() if {flag} else fsdp2.OffloadPolicy()"), flag=flag)


def grad_scaler(editor: Editor, old: cst.Call, new: cst.Call) -> cst.BaseExpression:
    """Arguments by position have another order there."""
    order = ("device", "init_scale", "backoff_factor", "growth_factor", "growth_interval", "enabled", "process_group")
    given = arguments(new.args, order)
    kept = [arg if arg.keyword is None and name == "device" else keyword(name, arg.value, arg) for name, arg in given.by_name.items()]
    return with_args(new, [*kept, *given.stars]).with_changes(func=editor.make("fsdp2.optim.GradScaler"))


# --- wrap policies -------------------------------------------------------------------------------------------------------------


def module_wrap_policy(editor: Editor, old: cst.Call, new: cst.Call) -> cst.BaseExpression:
    return _by_class(editor, arguments(new.args, ("module_classes",)).value("module_classes"))


def custom_policy(editor: Editor, old: cst.Call, new: cst.Call) -> cst.BaseExpression:
    """``CustomPolicy(fn)``, where ``fn`` only says yes or no."""
    fn = arguments(old.args, ("lambda_fn",)).value("lambda_fn")
    if isinstance(fn, cst.Lambda) and _is_bool(fn.body):
        return editor.make("fsdp2.wrap.by_predicate({fn})", fn=new.args[0].value)
    editor.refuse("fsdp1", old, "CustomPolicy whose function may return arguments for one module: parallelize has one set for all")
    return new


def partial_policy(editor: Editor, old: cst.Call, new: cst.Call) -> cst.BaseExpression | None:
    """``functools.partial`` of one of FSDP1's policy functions."""
    of = editor.names.origin_of(old.args[0].value) if old.args else ""
    given = arguments(new.args[1:], ())
    if of == "fsdp:transformer_auto_wrap_policy":
        return _by_class(editor, given.value("transformer_layer_cls"))
    if of == "fsdp:lambda_auto_wrap_policy":
        return editor.make("fsdp2.wrap.by_predicate({fn})", fn=given.text("lambda_fn"))
    if of == "fsdp:size_based_auto_wrap_policy":
        return editor.make("fsdp2.wrap.by_size({sizes})", sizes=_sizes(given))
    return None


_BARE = {
    "fsdp:size_based_auto_wrap_policy": "fsdp2.wrap.by_size()",
    "fsdp:always_wrap_policy": "fsdp2.wrap.by_predicate(lambda module: True)",
}


def bare_policy(editor: Editor, old: cst.Name | cst.Attribute, new: cst.BaseExpression) -> cst.BaseExpression:
    """A policy function that is passed as it is: not called, and not the first argument of partial."""
    instead = _BARE.get(editor.names.origin_of(old))
    call = enclosing_call(editor.names, old)
    is_bound = call is not None and editor.names.origin_of(call.func) == "functools.partial"
    if instead is None or is_bound or isinstance(editor.names.parent_of(old), cst.Call):
        return new
    return editor.make(instead)


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
        inside = ", ".join(code(each.with_changes(comma=cst.MaybeSentinel.DEFAULT)) for each in classes.elements)
    else:
        inside = f"*{code(classes)}" if classes is not None else ""
    return editor.make("fsdp2.wrap.by_class({classes})", classes=inside)


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
