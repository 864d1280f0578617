"""How a wrapped model is used, in FSDP1 and DDP alike: ``.module``, ``no_sync``, clipping; and FSDP1's static methods."""

from __future__ import annotations

import re

import libcst as cst

from .editor import Editor, Rules, receiver
from .names import SHARDED, WRAPPED, Names
from .syntax_trees import arguments, code, dotted, with_args

_STATIC = "fsdp:FullyShardedDataParallel."
_CLIP = ("torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad.clip_grad_norm_")


def inner_module(editor: Editor, old: cst.Attribute, new: cst.BaseExpression) -> cst.BaseExpression:
    """``model.module`` is ``model``: nothing is wrapped."""
    if old.attr.value not in WRAPPED or not isinstance(new, cst.Attribute):
        return new
    if editor.names.tag_of(old.value) not in SHARDED or _is_target(editor, old) or is_asked_for(editor.names, old):
        return new
    return new.value


def is_asked_for(names: Names, node: cst.Attribute) -> bool:
    """Whether a ``hasattr`` around the use asks for it: a sharded model has none, and other models there still have it."""
    question = re.compile(rf"hasattr\({re.escape(code(node.value))}, ['\"]{node.attr.value}['\"]\)")
    above = names.parent_of(node)
    while above is not None:
        if isinstance(above, (cst.If, cst.IfExp, cst.While)) and question.search(code(above.test)):
            return True
        above = names.parent_of(above)
    return False


def _is_target(editor: Editor, node: cst.CSTNode) -> bool:
    return isinstance(editor.names.parent_of(node), (cst.AssignTarget, cst.AnnAssign))


def no_sync(editor: Editor, old: cst.Call, new: cst.Call) -> cst.BaseExpression | None:
    if editor.names.tag_of(_receiver_node(old)) not in SHARDED or not isinstance(new.func, cst.Attribute):
        return None
    return editor.make(f"fsdp2.accumulate({code(new.func.value)})", "import fsdp2")


def no_sync_itself(editor: Editor, old: cst.Attribute, new: cst.BaseExpression) -> cst.BaseExpression:
    """``context = model.no_sync if more else nullcontext``, which is called later."""
    above = editor.names.parent_of(old)
    is_called = isinstance(above, cst.Call) and above.func is old
    if old.attr.value != "no_sync" or is_called or editor.names.tag_of(old.value) not in SHARDED or not isinstance(new, cst.Attribute):
        return new
    return editor.make(f"functools.partial(fsdp2.accumulate, {code(new.value)})", "import functools", "import fsdp2")


def sync_flag(editor: Editor, old: cst.Assign, new: cst.Assign) -> cst.Assign:
    """``model.require_backward_grad_sync = last``, the flag of DDP that ``no_sync`` sets."""
    target = old.targets[0].target
    if isinstance(target, cst.Attribute) and target.attr.value == "require_backward_grad_sync" and len(old.targets) == 1:
        value = code(new.value.with_changes(lpar=[], rpar=[]))
        if editor.names.tag_of(target.value) == "ddp":
            editor.instead(f"{code(target.value)}.set_requires_gradient_sync({value})")
    return new


def clip_method(editor: Editor, old: cst.Call, new: cst.Call) -> cst.BaseExpression | None:
    """FSDP1's ``model.clip_grad_norm_(max_norm, norm_type)``."""
    if editor.names.tag_of(_receiver_node(old)) not in ("fsdp1", "deepspeed") or not isinstance(new.func, cst.Attribute):
        return None
    params = editor.make(f"{code(new.func.value)}.parameters()")
    first = cst.Arg(params, comma=cst.Comma(whitespace_after=cst.SimpleWhitespace(" ")))
    return new.with_changes(func=editor.make("fsdp2.clip_grad_norm_", "import fsdp2"), args=[first, *new.args])


def clip_function(editor: Editor, old: cst.Call, new: cst.Call) -> cst.BaseExpression | None:
    """``torch.nn.utils.clip_grad_norm_(model.parameters(), ...)``, whose result would be a DTensor; ours takes plain parameters too."""
    if not editor.names.rewritten:
        return None
    return new.with_changes(func=editor.make("fsdp2.clip_grad_norm_", "import fsdp2"))


def apply(editor: Editor, old: cst.Call, new: cst.Call) -> cst.BaseExpression | None:
    """``model.apply(fn)`` on a wrapped model."""
    if editor.names.tag_of(_receiver_node(old)) in SHARDED and not is_use_before_wrap(editor, old):
        editor.left(old, f"{code(new)} gives the function shards now: call it before the model is sharded, or write it for DTensors")
    return None


def comm_hook(editor: Editor, old: cst.Call, new: cst.Call) -> cst.BaseExpression | None:
    """FSDP1's ``model.register_comm_hook``."""
    if editor.names.tag_of(_receiver_node(old)) == "fsdp1":
        editor.refuse("fsdp1", old, "register_comm_hook: fsdp2 reduces gradients itself; see set_custom_reduce_scatter")
    return None


def _receiver_node(call: cst.Call) -> cst.BaseExpression | None:
    return call.func.value if isinstance(call.func, cst.Attribute) else None


def fsdp_modules(editor: Editor, old: cst.Call, new: cst.Call) -> cst.BaseExpression:
    given = arguments(new.args, ("module", "root_only"))
    model = given.text("module")
    if given.text("root_only", "False") != "False":
        return editor.make(f"[{model}]")
    return editor.make(f"[module for module in {model}.modules() if isinstance(module, fsdp2.FSDPModule)]", "import fsdp2")


def summon(editor: Editor, old: cst.Call, new: cst.Call) -> cst.BaseExpression:
    editor.compat(
        old,
        "summon_full_params stays on fsdp2.compat. What is done to every parameter alike (a copy, an average) needs no whole "
        "parameters: do it on model.parameters(), the shards.",
    )
    return with_args(
        new.with_changes(func=editor.make("fsdp2.compat.FullyShardedDataParallel.summon_full_params", "import fsdp2.compat")), new.args
    )


def static_rest(editor: Editor, old: cst.Attribute, new: cst.BaseExpression) -> cst.BaseExpression:
    """A static method of FSDP1 that no rule knows."""
    found = editor.names.origin_of(old)
    if found.startswith(_STATIC) and found.removeprefix(_STATIC) not in _KNOWN:
        editor.refuse("fsdp1", old, f"FSDP.{found.removeprefix(_STATIC)}: there is nothing of that name on a sharded model")
    return new


_KNOWN = (
    "state_dict_type",
    "set_state_dict_type",
    "summon_full_params",
    "fsdp_modules",
    "optim_state_dict",
    "optim_state_dict_to_load",
    "full_optim_state_dict",
    "sharded_optim_state_dict",
    "scatter_full_optim_state_dict",
    "shard_full_optim_state_dict",
)

SHARED = Rules(
    calls=dict.fromkeys(_CLIP, clip_function),
    methods={"apply": apply, "no_sync": no_sync, "clip_grad_norm_": clip_method},
    nodes={cst.Attribute: [inner_module, no_sync_itself], cst.Assign: [sync_flag]},
)
"""The rules for every framework."""

FSDP1 = Rules(
    calls={f"{_STATIC}fsdp_modules": fsdp_modules, f"{_STATIC}summon_full_params": summon},
    methods={"register_comm_hook": comm_hook},
    nodes={cst.Attribute: [static_rest]},
)


def is_use_before_wrap(editor: Editor, call: cst.Call) -> bool:
    """Whether ``model`` in ``model.state_dict()`` is not sharded yet: it is so further down in the same function."""
    text = receiver(call)
    sites = [
        (function, editor.names.line_of(value))
        for target, value, function in editor.names.facts.assigned
        if dotted(target) == text and isinstance(value, cst.Call) and editor.names.tag_of(value) in SHARDED
    ]
    here, line = editor.names.function_of(call), editor.names.line_of(call)
    same = [site for function, site in sites if function is here]
    return bool(same) and all(line < site for site in same)
