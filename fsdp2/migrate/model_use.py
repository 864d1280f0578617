"""How a wrapped model is used, in FSDP1 and DDP: ``.module``, ``no_sync``, clipping; and FSDP1's static methods."""

from __future__ import annotations

import re
from typing import TypeVar

import libcst as cst
from libcst import matchers as m

from .editor import Editor, Method, Rules, enclosing_call
from .names import SHARDED, WRAPPED, Names
from .origins import STATIC, STATIC_METHODS
from .syntax_trees import arguments, code, dotted


def inner_module(editor: Editor, old: cst.Attribute, new: cst.BaseExpression) -> cst.BaseExpression:
    """``model.module`` is ``model``: nothing is wrapped."""
    if old.attr.value not in WRAPPED or not isinstance(new, cst.Attribute) or editor.names.tag_of(old.value) not in SHARDED:
        return new
    is_target = isinstance(editor.names.parent_of(old), (cst.AssignTarget, cst.AnnAssign))
    return new if is_target or is_asked_for(editor.names, old) else new.value


def is_asked_for(names: Names, node: cst.Attribute) -> bool:
    """Whether a ``hasattr`` around the use asks for it: a sharded model has none, and other models there still have it."""
    question = re.compile(rf"hasattr\({re.escape(code(node.value))}, ['\"]{node.attr.value}['\"]\)")
    tests = (each.test for each in names.ancestors(node) if isinstance(each, (cst.If, cst.IfExp, cst.While)))
    return any(question.search(code(test)) for test in tests)


def no_sync(editor: Editor, call: Method) -> cst.BaseExpression:
    return editor.make("fsdp2.accumulate({model})", model=call.text)


def no_sync_itself(editor: Editor, old: cst.Attribute, new: cst.BaseExpression) -> cst.BaseExpression:
    """``context = model.no_sync if more else nullcontext``, which is called later."""
    above = editor.names.parent_of(old)
    is_called = isinstance(above, cst.Call) and above.func is old
    if old.attr.value != "no_sync" or is_called or editor.names.tag_of(old.value) not in SHARDED or not isinstance(new, cst.Attribute):
        return new
    return editor.make("functools.partial(fsdp2.accumulate, {model})", model=new.value)


def sync_flag(editor: Editor, old: cst.Assign, new: cst.Assign) -> cst.Assign:
    """``model.require_backward_grad_sync = last``, the flag of DDP that ``no_sync`` sets."""
    target = old.targets[0].target
    if isinstance(target, cst.Attribute) and target.attr.value == "require_backward_grad_sync" and len(old.targets) == 1:
        value = code(new.value.with_changes(lpar=[], rpar=[]))
        if editor.names.tag_of(target.value) == "ddp":
            editor.instead(f"{code(target.value)}.set_requires_gradient_sync({value})")
    return new


def clip_method(editor: Editor, call: Method) -> cst.BaseExpression:
    """FSDP1's ``model.clip_grad_norm_(max_norm, norm_type)``."""
    params = editor.make("{model}.parameters()", model=call.text)
    first = cst.Arg(params, comma=cst.Comma(whitespace_after=cst.SimpleWhitespace(" ")))
    return call.new.with_changes(func=editor.make("fsdp2.clip_grad_norm_"), args=[first, *call.new.args])


def clip_function(editor: Editor, old: cst.Call, new: cst.Call) -> cst.BaseExpression | None:
    """``torch.nn.utils.clip_grad_norm_(model.parameters(), ...)``, whose result would be a DTensor; ours takes plain parameters too."""
    return new.with_changes(func=editor.make("fsdp2.clip_grad_norm_")) if editor.names.rewritten else None


def apply(editor: Editor, call: Method) -> None:
    """``model.apply(fn)`` on a wrapped model."""
    if not is_use_before_wrap(editor, call.old, call.on):
        editor.left(call.old, f"{code(call.new)} {_GETS_SHARDS}")


def loop_over_modules(editor: Editor, old: cst.For | cst.CompFor | cst.Call, new: _Loop) -> _Loop:
    """``for each in model.modules(): init(each)`` and ``map(init, model.modules())``: ``apply`` by hand."""
    names = editor.names
    target: cst.CSTNode | None
    if not isinstance(old, cst.Call):
        listed, target, does = old.iter, old.target, (names.parent_of(old) or old) if isinstance(old, cst.CompFor) else old.body
    elif dotted(old.func) == "map" and len(old.args) > 1:
        does, listed = old.args[0].value, old.args[1].value
        target = does.params if isinstance(does, cst.Lambda) else None
    else:
        return new
    if not m.matches(listed, m.Call(m.Attribute(attr=m.OneOf(*map(m.Name, _LISTS_OF_MODULES))))):
        return new
    model = cst.ensure_type(cst.ensure_type(listed, cst.Call).func, cst.Attribute).value
    if names.tag_of(model) in SHARDED and not is_use_before_wrap(editor, old, model):
        if target is None:
            functions = {code(does): dotted(does)}
        else:
            targets = {cst.ensure_type(each, cst.Name).value for each in m.findall(target, m.Name())}
            calls = [cst.ensure_type(each, cst.Call) for each in m.findall(does, m.Call())]
            functions = {code(each): dotted(each.func) for each in calls if any(dotted(arg.value) in targets for arg in each.args)}
        if given := [use for use, function in functions.items() if function not in _ASKS]:
            editor.left(old, f"{given[0]} for each of {code(listed)} {_GETS_SHARDS}")
    return new


_Loop = TypeVar("_Loop")
_GETS_SHARDS = "gives the function shards now: call it before the model is sharded, or write it for DTensors"
_LISTS_OF_MODULES = ("modules", "named_modules", "children", "named_children")
_ASKS = ("isinstance", "issubclass", "hasattr", "getattr", "type", "id", "print", "repr", "str")


_WRAPPERS = {"fsdp:FullyShardedDataParallel": ("fsdp1", "FSDP"), "ddp:DistributedDataParallel": ("ddp", "DDP")}


def class_reference(editor: Editor, old: cst.Name | cst.Attribute, new: cst.BaseExpression) -> cst.BaseExpression:
    """A wrapper's class where it is not called: in ``isinstance`` it is our FSDPModule; as a value, it has to stay that class."""
    names = editor.names
    framework, name = _WRAPPERS.get(names.origin_of(old), ("", ""))
    if not framework or framework in names.off:
        return new
    if _in_isinstance(names, old):
        return editor.make("fsdp2.FSDPModule")
    parent = names.parent_of(old)
    is_of_a_rule = isinstance(parent, cst.Call) or (framework == "fsdp1" and isinstance(parent, cst.Attribute))
    call = enclosing_call(names, old)
    if framework == "fsdp1" and call is not None and names.origin_of(call.func) in ("functools.partial", "fsdp:enable_wrap"):
        is_of_a_rule = True
    if not is_of_a_rule and not any(isinstance(each, cst.Annotation) for each in names.ancestors(old)):
        is_base = parent is not None and isinstance(names.parent_of(parent), cst.ClassDef)
        what = f"a subclass of {name}" if is_base else f"{name} as a value"
        editor.refuse(framework, old, f"{what}: parallelize changes a module in place, there is no class of wrappers")
    return new


def _in_isinstance(names: Names, node: cst.CSTNode) -> bool:
    """Whether ``node`` is what ``isinstance`` asks about, alone or in a tuple."""
    parent = names.parent_of(node)
    if isinstance(parent, cst.Element):
        node = names.parent_of(parent) or node
    call = enclosing_call(names, node)
    return call is not None and dotted(call.func) in ("isinstance", "issubclass") and len(call.args) > 1 and call.args[1].value is node


def comm_hook(editor: Editor, call: Method) -> None:
    editor.refuse("fsdp1", call.old, "register_comm_hook: fsdp2 reduces gradients itself; see set_custom_reduce_scatter")


def fsdp_modules(editor: Editor, old: cst.Call, new: cst.Call) -> cst.BaseExpression:
    given = arguments(new.args, STATIC_METHODS["fsdp_modules"])
    model = given.text("module")
    if given.text("root_only", "False") != "False":
        return editor.make("[{model}]", model=model)
    return editor.make("[module for module in {model}.modules() if isinstance(module, fsdp2.FSDPModule)]", model=model)


def summon(editor: Editor, old: cst.Call, new: cst.Call) -> cst.BaseExpression:
    editor.compat(
        old,
        "summon_full_params stays on fsdp2.compat. An operation on every parameter (a copy, an average) needs no whole parameters: "
        "do it on model.parameters(), the shards.",
    )
    return new.with_changes(func=editor.make("fsdp2.compat.FullyShardedDataParallel.summon_full_params"))


def static_rest(editor: Editor, old: cst.Attribute, new: cst.BaseExpression) -> cst.BaseExpression:
    """A static method of FSDP1 that no rule knows."""
    found = editor.names.origin_of(old)
    if found.startswith(STATIC) and found.removeprefix(STATIC) not in STATIC_METHODS:
        editor.refuse("fsdp1", old, f"FSDP.{found.removeprefix(STATIC)}: a sharded model has no such function")
    return new


SHARED = Rules(
    calls=dict.fromkeys(("torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad.clip_grad_norm_"), clip_function),
    methods={
        **{(tag, name): rule for tag in SHARDED for name, rule in (("apply", apply), ("no_sync", no_sync))},
        ("fsdp1", "clip_grad_norm_"): clip_method,
        ("deepspeed", "clip_grad_norm_"): clip_method,
        ("fsdp1", "register_comm_hook"): comm_hook,
    },
    nodes={
        cst.Name: [class_reference],
        cst.Attribute: [inner_module, no_sync_itself, class_reference],
        cst.Assign: [sync_flag],
        **{kind: [loop_over_modules] for kind in (cst.For, cst.CompFor, cst.Call)},
    },
)
"""The rules for every framework."""

FSDP1 = Rules(
    calls={f"{STATIC}fsdp_modules": fsdp_modules, f"{STATIC}summon_full_params": summon},
    nodes={cst.Attribute: [static_rest]},
)


def is_use_before_wrap(editor: Editor, use: cst.CSTNode, model: cst.CSTNode) -> bool:
    """Whether ``model`` in ``model.state_dict()`` is not sharded yet: it is wrapped further down in the same function."""
    names, text = editor.names, dotted(model)
    for wrapped in WRAPPED:
        text = text.removesuffix(f".{wrapped}")
    here = names.function_of(use)
    lines = [
        names.line_of(value)
        for target, value, function in names.assigned
        if function is here and dotted(target) == text and isinstance(value, cst.Call) and names.tag_of(value) in SHARDED
    ]
    return bool(lines) and names.line_of(use) < min(lines)
