"""``FSDP(model, ...)`` becomes ``fsdp2.parallelize(model, ...)``, argument by argument; so do kwargs dicts, ``partial(FSDP, ...)``,
``enable_wrap`` and ``wrap``.

An argument is kept under its new name, or dropped with a comment that says why and what to do instead. If neither is right, the file
stays on ``fsdp2.compat``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import libcst as cst

from .buffers import cast, entries, wrapping_calls
from .devices import mesh_of_group
from .editor import Editor, Rules
from .fsdp1_values import partial_policy, strategy_by_getattr
from .syntax_trees import (
    arguments,
    code,
    dotted,
    expression,
    is_none,
    key_of,
    keyword,
    last_name,
    string_of,
    with_args,
    without_comment,
)

SIGNATURE = (
    "module",
    "process_group",
    "sharding_strategy",
    "cpu_offload",
    "auto_wrap_policy",
    "backward_prefetch",
    "mixed_precision",
    "ignored_modules",
    "param_init_fn",
    "device_id",
    "sync_module_states",
    "forward_prefetch",
    "limit_all_gathers",
    "use_orig_params",
    "ignored_states",
    "device_mesh",
)

DROPPED = {
    "device_id": "parallelize moves the model to the device of its mesh.",
    "sync_module_states": "parallelize broadcasts the first rank's values by default.",
    "forward_prefetch": "the next group is always prefetched, in the order of the first iteration.",
    "limit_all_gathers": "prefetch is bounded to the next group, without stopping the CPU.",
    "use_orig_params": "parameters always are the original ones, sharded.",
    "backward_prefetch": "the next group is always prefetched in backward, as by BACKWARD_PRE.",
}

RENAMED = {
    "sharding_strategy": ("strategy", '"zero3"', "strategy"),
    "auto_wrap_policy": ("wrap", "", "policy"),
    "mixed_precision": ("mp_policy", "fsdp2.MixedPrecisionPolicy()", "precision"),
    "cpu_offload": ("offload_policy", "fsdp2.OffloadPolicy()", "offload"),
    "device_mesh": ("mesh", "", ""),
}
"""Old name -> new name, what None means, the tag of values that are known to be rewritten."""


@dataclass
class Found:
    """casts: of ``find_casts``. kwargs: of ``find_kwargs``."""

    casts: dict[int, str] = field(default_factory=dict)
    kwargs: dict[str, set[str]] = field(default_factory=dict)


def map_argument(
    editor: Editor, at: cst.CSTNode, name: str, old: cst.BaseExpression, new: cst.BaseExpression
) -> tuple[str, str] | None:
    """The new name and text of one argument of ``FSDP``; None if it is dropped."""
    if name in RENAMED:
        return _renamed(editor, at, name, old, new)
    if name in DROPPED:
        editor.note(at, f"{name}={code(old)} dropped: {DROPPED[name]}")
        return None
    if is_none(old):
        return None
    if name == "ignored_modules":
        editor.note(at, "ignored_modules is ignored_params: the parameters of these modules.")
        return "ignored_params", f"{{param for module in {code(new)} for param in module.parameters()}}"
    if name == "ignored_states":
        editor.note(at, "ignored_states is ignored_params: a set of parameters.")
        return "ignored_params", _ignored_states(editor, new)
    if name == "process_group":
        if isinstance(old, cst.Tuple):
            editor.refuse("fsdp1", at, "process_group=(shard, replicate): make a 2-D mesh of the same ranks and pass it as mesh")
            return None
        return "mesh", mesh_of_group(editor, at, new)
    if name == "param_init_fn":
        _param_init_fn(editor, at, old)
        return None
    editor.refuse("fsdp1", at, f"{name}: not an argument that FSDP1 documents")
    return None


def _renamed(editor: Editor, at: cst.CSTNode, name: str, old: cst.BaseExpression, new: cst.BaseExpression) -> tuple[str, str] | None:
    new_name, none_means, tag = RENAMED[name]
    if is_none(old):
        return ("wrap", "None") if name == "auto_wrap_policy" else None
    if tag == "policy" and dotted(old) in editor.names.functions:
        why = "a policy function decides while FSDP1 walks the tree; see fsdp2.wrap.by_predicate"
        editor.refuse("fsdp1", at, f"{name}={code(old)}: {why}")
        return None
    if tag and editor.names.tag_of(old) != tag:
        editor.refuse("fsdp1", at, f"{name}={code(old)}: its value is not made in this file in a way that can be followed")
        return None
    text = code(new)
    if none_means and _may_be_none(editor, old):
        operand = text if isinstance(new, (cst.Name, cst.Attribute, cst.Call, cst.Subscript)) else f"({text})"
        text = editor.text(f"{{value}} or {none_means}", value=operand)
    return new_name, text


def _may_be_none(editor: Editor, value: cst.BaseExpression, depth: int = 0) -> bool:
    """Whether a value could be FSDP1's "None: the default"; only a plain value cannot, and a name that only plain values are given."""
    names = editor.names
    values = [value.body, value.orelse] if isinstance(value, cst.IfExp) else []
    if isinstance(value, cst.Name) and names.values_of(value.value):  # not of a parameter whose callers are all that is known
        values = names.passed_or_assigned(value)
    if values:
        return depth > 5 or any(_may_be_none(editor, each, depth + 1) for each in values)
    if isinstance(value, cst.Call):
        made_by = names.origin_of(value.func)
        return not made_by.startswith("fsdp:") and made_by != "functools.partial" and code(value.func) != "getattr"
    if isinstance(value, cst.Subscript):
        return names.tag_of(value) != "strategy"
    return not names.origin_of(value).startswith("fsdp:ShardingStrategy.")


def _ignored_states(editor: Editor, new: cst.BaseExpression) -> str:
    text = code(new)
    is_list = isinstance(new, cst.Call) and code(new.func) in ("list", "set", "tuple") and len(new.args) == 1
    if isinstance(new, (cst.List, cst.Tuple, cst.ListComp, cst.GeneratorExp, cst.Call)) and (
        ".parameters()" in text or ".weight" in text or ".bias" in text
    ):
        return f"set({code(new.args[0].value) if isinstance(new, cst.Call) and is_list else text})"
    template = "{{param for each in {states} for param in (each.parameters() if isinstance(each, nn.Module) else [each])}}"
    return editor.text(template, states=text)


def _param_init_fn(editor: Editor, at: cst.CSTNode, old: cst.BaseExpression) -> None:
    """Whether it is the usual function: ``to_empty``, then ``reset_parameters``, as ``fsdp2.materialize`` does."""
    functions = editor.names.functions.get(dotted(old), [])
    lines = {line.strip() for each in functions for line in code(each.body).splitlines() if line.strip()}
    param = functions[0].params.params[0].name.value if functions and functions[0].params.params else ""
    resets = any(line.startswith(f"{param}.reset_parameters()") for line in lines)
    plain = all(
        line.startswith((f"{param}.to_empty(", f"{param}.reset_parameters()", f"if hasattr({param}, ", '"""', "#")) for line in lines
    )
    if not (functions and resets and plain) or not isinstance(editor.statement, cst.SimpleStatementLine):
        editor.refuse("fsdp1", at, f"param_init_fn={code(old)}: initialize after sharding, with fsdp2.materialize(model, init_fn)")
        return
    assign = editor.statement.body[0]
    if not isinstance(assign, cst.Assign) or len(assign.targets) != 1:
        editor.refuse("fsdp1", at, "param_init_fn of a module without a name: call fsdp2.materialize on it")
        return
    editor.note(
        at,
        f"param_init_fn={code(old)} dropped: materialize calls reset_parameters() after sharding; "
        "the values are those of the unsharded model for the same seed.",
    )
    editor.after(editor.text("fsdp2.materialize({model})", model=assign.targets[0].target))


# --- the call ------------------------------------------------------------------------------------------------------------------


def fsdp_call(editor: Editor, old: cst.Call, new: cst.Call) -> cst.BaseExpression:
    """``FSDP(module, ...)``."""
    args = _mapped(editor, old, new, SIGNATURE, wrap_default=True)
    cast(editor, old, arguments(new.args, SIGNATURE).value("module"), editor.of(Found).casts.get(id(old)))
    return with_args(new, args).with_changes(func=editor.make("fsdp2.parallelize"))


def fsdp_partial(editor: Editor, old: cst.Call, new: cst.Call) -> cst.BaseExpression | None:
    """``partial(FSDP, ...)``, or of a policy."""
    if not old.args or editor.names.origin_of(old.args[0].value) != "fsdp:FullyShardedDataParallel":
        return partial_policy(editor, old, new)
    first = new.args[0].with_changes(value=editor.make("fsdp2.parallelize"))
    rest = _mapped(editor, old.with_changes(args=old.args[1:]), new.with_changes(args=new.args[1:]), SIGNATURE, True, old)
    return with_args(new, [first, *rest])


def enable_wrap(editor: Editor, old: cst.Call, new: cst.Call) -> cst.BaseExpression:
    """``enable_wrap(wrapper_cls=FSDP, ...)``."""
    args = _mapped(editor, old, new, ("wrapper_cls",), wrap_default=False)
    return with_args(new, args).with_changes(func=editor.make("fsdp2.wrap.enable_wrap"))


def wrap(editor: Editor, old: cst.Call, new: cst.Call) -> cst.BaseExpression:
    args = _mapped(editor, old, new, ("module",), wrap_default=False)
    return with_args(new, args).with_changes(func=editor.make("fsdp2.wrap.wrap"))


def _mapped(
    editor: Editor,
    old: cst.Call,
    new: cst.Call,
    signature: Sequence[str],
    wrap_default: bool,
    at: cst.CSTNode | None = None,
) -> list[cst.Arg]:
    before, after = arguments(old.args, signature), arguments(new.args, signature)
    at = at or old
    if before.extra:
        editor.refuse("fsdp1", at, f"{code(before.extra[0])}: arguments that are not written here")
    result: list[cst.Arg] = []
    has_wrap = False
    for name, arg in after.by_name.items():
        if name == "wrapper_cls":
            continue
        if name == "module":
            result.append(arg)
            continue
        mapped = map_argument(editor, at, name, before.by_name[name].value, arg.value)
        if mapped is None:
            continue
        has_wrap |= mapped[0] == "wrap"
        result.append(keyword(mapped[0], expression(mapped[1]), arg))
    for arg in before.stars:
        keys = editor.of(Found).kwargs.get(dotted(arg.value))
        if keys is None:
            editor.refuse("fsdp1", at, f"{code(arg)}: its keys are not written in this file")
        else:
            has_wrap |= "auto_wrap_policy" in keys
    result += after.stars
    if wrap_default and not has_wrap:
        position = 1 if result and "module" in after.by_name else 0
        result.insert(position, keyword("wrap", cst.Name("None")))
    return result


# --- kwargs dicts --------------------------------------------------------------------------------------------------------------


def find_kwargs(editor: Editor) -> dict[str, set[str]]:
    """For each name that is passed as ``**name`` to FSDP: the keys that this file gives it. Unknown names are left out."""
    found: dict[str, set[str]] = {}
    for call, _made_by in wrapping_calls(editor.names):
        for text in [dotted(arg.value) for arg in call.args if arg.star == "**"]:
            if (known := entries(editor.names, text)) is not None:
                found[text] = {key for key, _value in known}
    return found


def _kwargs_name(editor: Editor, node: cst.CSTNode) -> str:
    """The kwargs name that ``node``, a dict or call of dict, is assigned to."""
    parent = editor.names.parent_of(node)
    targets = [each.target for each in parent.targets] if isinstance(parent, cst.Assign) else []
    if isinstance(parent, cst.AnnAssign):
        targets = [parent.target]
    return next((text for each in targets if (text := dotted(each)) in editor.of(Found).kwargs), "")


def kwargs_dict(editor: Editor, old: cst.Dict, new: cst.Dict) -> cst.Dict:
    """``{"sharding_strategy": ..., ...}`` that is passed on as ``**kwargs``."""
    if not _kwargs_name(editor, old):
        return new
    elements: list[cst.BaseDictElement] = []
    for before, after in zip(old.elements, new.elements, strict=True):
        if not isinstance(before, cst.DictElement) or not isinstance(after, cst.DictElement):
            continue
        mapped = map_argument(editor, before, string_of(before.key) or "", before.value, after.value)
        if mapped is None:
            continue
        quote = code(before.key)[0]
        elements.append(after.with_changes(key=cst.SimpleString(f"{quote}{mapped[0]}{quote}"), value=expression(mapped[1])))
    closing = new.rbrace
    if elements and new.elements and elements[-1].comma is not new.elements[-1].comma:
        elements[-1] = elements[-1].with_changes(comma=new.elements[-1].comma)
        closing = closing.with_changes(whitespace_before=without_comment(closing.whitespace_before))
    return new.with_changes(elements=elements, rbrace=closing)


def kwargs_call(editor: Editor, old: cst.Call, new: cst.Call) -> cst.BaseExpression | None:
    """``dict(sharding_strategy=...)``, or ``kwargs.update(...)``."""
    is_update = last_name(old.func) == "update" and isinstance(old.func, cst.Attribute)
    if is_update and dotted(cst.ensure_type(old.func, cst.Attribute).value) not in editor.of(Found).kwargs:
        return None
    if not is_update and not _kwargs_name(editor, old):
        return strategy_by_getattr(editor, old, new)
    args = []
    for before, after in zip(old.args, new.args, strict=True):
        if before.keyword is None:
            args.append(after)
            continue
        mapped = map_argument(editor, old, before.keyword.value, before.value, after.value)
        if mapped is not None:
            args.append(keyword(mapped[0], expression(mapped[1]), after))
    return with_args(new, args)


def kwargs_item(editor: Editor, old: cst.Assign, new: cst.Assign) -> cst.Assign:
    """``kwargs["sharding_strategy"] = ...``."""
    target = old.targets[0].target
    if not isinstance(target, cst.Subscript) or dotted(target.value) not in editor.of(Found).kwargs:
        return new
    mapped = map_argument(editor, old, key_of(target) or "", old.value, new.value)
    if mapped is None:
        editor.instead()
        return new
    index = cst.SubscriptElement(cst.Index(cst.SimpleString(f'"{mapped[0]}"')))
    changed = new.targets[0].with_changes(target=target.with_changes(slice=[index]))
    return new.with_changes(targets=[changed, *new.targets[1:]], value=expression(mapped[1]))


RULES = Rules(
    calls={
        "fsdp:FullyShardedDataParallel": fsdp_call,
        "fsdp:enable_wrap": enable_wrap,
        "fsdp:wrap": wrap,
        "functools.partial": fsdp_partial,
        "": kwargs_call,
    },
    nodes={
        cst.Dict: [kwargs_dict],
        cst.Assign: [kwargs_item],
    },
)
