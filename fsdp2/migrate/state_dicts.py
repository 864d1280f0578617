"""State dicts of wrapped models and their optimizers: calls that name their result, for FSDP1's contexts and DDP's ``.module``.

    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, rank0_cpu):    state = fsdp2.checkpoint.full_state_dict(model)
        state = model.state_dict()

FSDP1 keeps the kind of state dict on the model. Here it is read from the text: from the ``with`` around the call, from the one
``set_state_dict_type`` of the file, or FSDP1's default, whole tensors on every rank.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import libcst as cst
from libcst import matchers

from .editor import Editor, Method, Rules
from .model_use import is_use_before_wrap
from .names import SHARDED
from .origins import STATIC, STATIC_METHODS
from .rank_guards import on_every_rank
from .syntax_trees import arguments, code, dotted, expression, is_none, last_name

FULL = "StateDictOptions(full_state_dict=True)"


@dataclass(frozen=True)
class Wanted:
    """The kind of state dict in force. Rank 0 only, to the CPU: of the model, and of the optimizer."""

    kind: str = "FULL_STATE_DICT"
    rank0: bool = False
    cpu: bool = False
    optim_rank0: bool = False


@dataclass
class _InFile:
    """wanted: the kind outside of contexts. loads: for each optimizer that FSDP1's functions load, its model and the options."""

    wanted: Wanted = Wanted()
    loads: dict[str, tuple[str, str]] | None = None


def _wanted(editor: Editor, old: cst.Call) -> Wanted:
    """The arguments of ``state_dict_type`` or ``set_state_dict_type``."""
    _name, given = editor.names.static_call(old)
    kind = editor.names.origin_of(given.value("state_dict_type")).removeprefix("fsdp:StateDictType.")
    if kind not in ("FULL_STATE_DICT", "SHARDED_STATE_DICT"):
        flat = "flat parameters of one rank do not exist here; `fsdp2 convert OLD NEW --to dcp --shapes shapes.json` reads old files"
        why = flat if kind == "LOCAL_STATE_DICT" else "its kind is known only at run time"
        editor.refuse("fsdp1", old, f"{given.text('state_dict_type')}: {why}")
    model = _config(editor, given.value("state_dict_config"), old)
    optim = _config(editor, given.value("optim_state_dict_config"), old)
    return Wanted(kind, model.get("rank0_only", False), model.get("offload_to_cpu", False), optim.get("rank0_only", False))


def _config(editor: Editor, node: cst.BaseExpression | None, at: cst.CSTNode) -> dict[str, bool]:
    """The flags of a ``FullStateDictConfig(...)``, or of the only one that a name stands for."""
    if node is None or is_none(node):
        return {}
    value = editor.names.only_value(node)
    if isinstance(value, cst.Call) and editor.names.origin_of(value.func).startswith("fsdp:"):
        given = arguments(value.args, ("offload_to_cpu", "rank0_only"))
        flags = {name: given.text(name) for name in given.by_name}
        if set(flags.values()) <= {"True", "False"} and not given.stars:
            return {name: flag == "True" for name, flag in flags.items()}
    editor.refuse("fsdp1", at, f"{code(value or node)}: a state dict config whose flags are not written in this file")
    return {}


# --- which kind is in force ----------------------------------------------------------------------------------------------------


def _is_context(editor: Editor, item: cst.WithItem, name: str = "state_dict_type") -> bool:
    return isinstance(item.item, cst.Call) and editor.names.origin_of(item.item.func) == f"{STATIC}{name}"


def _in_force(editor: Editor, call: cst.Call) -> Wanted | None:
    """None inside of ``summon_full_params``, where parameters are whole."""
    for above in editor.names.ancestors(call):
        for item in reversed(above.items) if isinstance(above, cst.With) else ():
            if _is_context(editor, item, "summon_full_params"):
                return None
            if _is_context(editor, item):
                return _wanted(editor, cst.ensure_type(item.item, cst.Call))
    return editor.of(_InFile).wanted


def find_kinds(editor: Editor) -> None:
    """Before the rewrite: the file's ``set_state_dict_type``, and the contexts."""
    names = editor.names
    calls = [call for call in names.calls if names.origin_of(call.func) == f"{STATIC}set_state_dict_type"]
    found = {_wanted(editor, call) for call in calls}
    if len(found) > 1:
        editor.refuse("fsdp1", calls[-1], "set_state_dict_type with several kinds in one file")
    editor.of(_InFile).wanted = found.pop() if found else Wanted()
    for call in names.calls:
        item = names.parent_of(call)
        around = names.parent_of(item) if isinstance(item, cst.WithItem) and _is_context(editor, item) else None
        if isinstance(around, cst.With):
            _wanted(editor, call)
            inside = [last_name(cst.ensure_type(each, cst.Call).func) for each in matchers.findall(around.body, matchers.Call())]
            if not any(name in ("state_dict", "load_state_dict") or "optim_state_dict" in name for name in inside):
                editor.refuse("fsdp1", call, "state_dict_type around a call: the state dict is taken elsewhere")


def unwrap_with(editor: Editor, old: cst.With, new: cst.With) -> cst.BaseStatement | cst.FlattenSentinel[cst.BaseStatement]:
    """Remove ``state_dict_type``; the body alone stays if the ``with`` has nothing else."""
    kept = [after for before, after in zip(old.items, new.items, strict=True) if not _is_context(editor, before)]
    if len(kept) == len(new.items):
        return new
    if kept:
        return new.with_changes(items=[*kept[:-1], kept[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)])
    if not isinstance(new.body, cst.IndentedBlock):  # `with ...: statement` on one line
        return cst.FlattenSentinel([cst.SimpleStatementLine(new.body.body, leading_lines=new.leading_lines)])  # type: ignore[arg-type]
    body = list(new.body.body)
    comment = new.body.header.comment
    own = [*new.leading_lines, *([cst.EmptyLine(comment=comment)] if comment is not None else [])]
    body[0] = body[0].with_changes(leading_lines=[*own, *getattr(body[0], "leading_lines", ())])
    if new.body.footer:
        editor.keep_comments([line.comment.value for line in new.body.footer if line.comment is not None])
    return cst.FlattenSentinel(body)


def set_type(editor: Editor, old: cst.Call, new: cst.Call) -> cst.BaseExpression:
    """``FSDP.set_state_dict_type`` as a statement: it sets the kind of ``model.state_dict()`` for the whole file."""
    if isinstance(editor.names.parent_of(old), cst.Expr) and isinstance(editor.statement, cst.SimpleStatementLine):
        editor.note(old, "set_state_dict_type dropped: each call below names its kind.")
        editor.instead()
    else:
        editor.refuse("fsdp1", old, "set_state_dict_type whose result is used")
    return new


def config_value(editor: Editor, old: cst.Call, new: cst.Call) -> cst.BaseExpression | None:
    """``save_policy = FullStateDictConfig(...)`` goes, if only state dict contexts read it."""
    target = editor.names.assigned_to(old)
    readers = (f"{STATIC}state_dict_type", f"{STATIC}set_state_dict_type")
    if isinstance(target, cst.Name) and editor.names.is_only_read_by(target.value, readers):
        editor.instead()
    return None


# --- models --------------------------------------------------------------------------------------------------------------------


def model_state(editor: Editor, call: Method) -> cst.BaseExpression | None:
    """``model.state_dict()``."""
    if call.old.args or is_use_before_wrap(editor, call.old, call.on):
        return None
    if call.tag != "fsdp1":
        if not _is_inner(editor, call.on):
            editor.note(call.old, "keys no longer begin with module.")
        return on_every_rank(editor, call.old, lambda rank0: _full_state(editor, call.text, rank0), "model_state")
    wanted = _in_force(editor, call.old)
    if wanted is None or wanted.kind != "FULL_STATE_DICT":
        return None
    if wanted.cpu and not wanted.rank0:
        editor.note(call.old, "offload_to_cpu without rank0_only dropped: whole tensors are on the device of every rank.")
    return expression(_full_state(editor, call.text, wanted.rank0))


def _is_inner(editor: Editor, model: cst.BaseExpression) -> bool:
    """Whether it was the module inside of the wrapper, whose keys are the same as now."""
    values = [model, *editor.names.values_of(dotted(model))]
    return any(".module" in code(each) for each in values) or bool(editor.names.wrapped_in_place(model))


def _full_state(editor: Editor, model: str, rank0: bool) -> str:
    if rank0:
        return editor.text("fsdp2.checkpoint.full_state_dict({model})", model=model)
    return editor.text(f"get_model_state_dict({{model}}, options={FULL})", model=model)


def load_state(editor: Editor, call: Method) -> cst.BaseExpression | None:
    """``model.load_state_dict(state)``."""
    if is_use_before_wrap(editor, call.old, call.on):
        return None
    wanted = Wanted() if call.tag != "fsdp1" else _in_force(editor, call.old)
    if wanted is not None and wanted.kind != "FULL_STATE_DICT":
        text = "a DCP folder of the old script loads as it is; for files that each rank saved: `fsdp2 convert OLD NEW --to dcp`."
        editor.note(call.old, text)
        return None
    if wanted is None:
        return None
    if call.tag == "ddp" and not _is_inner(editor, call.on):
        editor.note(call.old, "keys must not begin with module. any more.")
    given = arguments(call.new.args, ("state_dict", "strict", "assign"))
    strict = f", strict={given.text('strict')}" if given.text("strict", "True") != "True" else ""
    load = f"set_model_state_dict({{model}}, {{state}}, options={FULL[:-1]}{{strict}}))"
    return editor.make(load, model=call.text, state=given.text("state_dict"), strict=strict)


# --- optimizers ----------------------------------------------------------------------------------------------------------------


def optimizer_state(editor: Editor, call: Method) -> cst.BaseExpression | None:
    """``optimizer.state_dict()``: of DDP's it is whole; of FSDP1's it was this rank's flat pieces, and is this rank's DTensors."""
    if call.old.args or editor.names.model(("fsdp1",)):
        return None
    model = _model_of(editor, call, "fsdp2.checkpoint.full_optimizer_state_dict(model, {optimizer}, by_name=True)")
    if not model:
        return None
    editor.note(call.old, f"{_BY_NAME}.")
    return on_every_rank(editor, call.old, lambda rank0: _full_optimizer(editor, model, call.text, rank0), "optimizer_state")


_BY_NAME = "state by parameter name, not by number; a file that the old script wrote has numbers"


def _full_optimizer(editor: Editor, model: str, optimizer: str, rank0: bool) -> str:
    if rank0:
        template = "fsdp2.checkpoint.full_optimizer_state_dict({model}, {optimizer}, by_name=True)"
    else:
        template = f"get_optimizer_state_dict({{model}}, {{optimizer}}, options={FULL})"
    return editor.text(template, model=model, optimizer=optimizer)


def load_optimizer(editor: Editor, call: Method) -> cst.BaseExpression | None:
    """``optimizer.load_state_dict(state)``."""
    if not call.new.args:
        return None
    state = code(call.new.args[0].value)
    here = editor.of(_InFile)
    if here.loads is None:
        here.loads = _find_loads(editor)
    if call.text in here.loads:
        model, options = here.loads[call.text]
        if not options and (wanted := _in_force(editor, call.old)) is not None and wanted.kind == "FULL_STATE_DICT":
            options = FULL
    elif editor.names.model(("fsdp1",)):
        return None
    else:
        options = FULL
        model = _model_of(editor, call, f"set_optimizer_state_dict(model, {{optimizer}}, {state}, options={FULL})")
        if not model:
            return None
        editor.note(call.old, f"{_BY_NAME}: `fsdp2 convert OLD NEW --to torch` gives it names.")
    load = "set_optimizer_state_dict({model}, {optimizer}, {state}" + (f", options={options})" if options else ")")
    return editor.make(load, model=model, optimizer=call.text, state=state)


def _model_of(editor: Editor, call: Method, instead: str) -> str:
    """The sharded model that the function around the call names, or the first one of the file, if it is visible there; otherwise
    the call is listed with the text ``instead``."""
    models, function = editor.names.model(), editor.names.function_of(call.old)
    if function is not None:
        named = [each for each in models if re.search(rf"\b{re.escape(each)}(?!\w)", code(function))]
        everywhere = [dotted(target) for target, _, inside in editor.names.assigned if inside is None]
        models = named or [each for each in models if each in everywhere or each.startswith("self.")]
    if not models and editor.names.rewritten:
        text = "this function does not show the model of this optimizer; if that is sharded: "
        editor.left(call.old, text + instead.replace("{optimizer}", call.text))
    return models[0] if models else ""


_LOADS = ("optim_state_dict_to_load", "shard_full_optim_state_dict", "scatter_full_optim_state_dict")
_LOAD_OPTIONS = {
    "scatter_full_optim_state_dict": "StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)",
    "shard_full_optim_state_dict": FULL,
}


def _load_arguments(editor: Editor, call: cst.Call) -> tuple[str, str, str, cst.BaseExpression | None]:
    """Name of the function, model, optimizer and state; of both orders that torch has had."""
    name, given = editor.names.static_call(call)
    optimizers = [text for text, tag in editor.names.tags.items() if tag == "optimizer" and not text.startswith("*.")]
    optim = given.text("optim") or (optimizers[0] if optimizers else "")
    if given.text("load_directly", "False") != "False":
        editor.refuse("fsdp1", call, "optim_state_dict_to_load(load_directly=...)")
    return name, given.text("model"), optim, given.value("optim_state_dict") or given.value("full_optim_state_dict")


def _find_loads(editor: Editor) -> dict[str, tuple[str, str]]:
    found = {}
    for call in editor.names.calls:
        if editor.names.origin_of(call.func).removeprefix(STATIC) in _LOADS:
            name, model, optim, _state = _load_arguments(editor, call)
            found[optim] = (model, _LOAD_OPTIONS.get(name, ""))
    return found


def state_to_load(editor: Editor, old: cst.Call, new: cst.Call) -> cst.BaseExpression:
    """``FSDP.optim_state_dict_to_load(model, optim, state)`` is ``state``: ``set_optimizer_state_dict`` shards it."""
    name, _model, _optim, state = _load_arguments(editor, old)
    if state is None:
        editor.refuse("fsdp1", old, "an optimizer's state dict whose arguments are not written here")
        return new
    value = next(after.value for before, after in zip(old.args, new.args, strict=True) if before.value is state)
    if name == "scatter_full_optim_state_dict":
        editor.note(old, "other ranks pass an empty dict: the rest is broadcast from rank 0.")
        return editor.make("({value}) or {{}}" if isinstance(value, cst.IfExp) else "{value} or {{}}", value=value)
    return value


def optim_state(editor: Editor, old: cst.Call, new: cst.Call) -> cst.BaseExpression:
    """``FSDP.optim_state_dict(model, optim)`` and the older functions."""
    name = editor.names.origin_of(old.func).removeprefix(STATIC)
    given = arguments(new.args, STATIC_METHODS[name])
    model, optim = given.text("model"), given.text("optim")
    wanted = _in_force(editor, old)
    if given.value("optim_state_dict") is not None or wanted is None:
        editor.refuse("fsdp1", old, f"FSDP.{name} of a state dict that was taken before")
    elif name == "full_optim_state_dict":
        wanted = Wanted(optim_rank0=given.text("rank0_only", "True") != "False")
    elif name == "sharded_optim_state_dict":
        wanted = Wanted("SHARDED_STATE_DICT")
    if wanted is None or wanted.kind != "FULL_STATE_DICT":
        return editor.make("get_optimizer_state_dict({model}, {optim})", model=model, optim=optim)
    return expression(_full_optimizer(editor, model, optim, wanted.optim_rank0))


_CONFIGS = ("FullStateDictConfig", "FullOptimStateDictConfig", "ShardedStateDictConfig", "ShardedOptimStateDictConfig")

SHARED = Rules(
    methods={
        **{(tag, name): rule for tag in SHARDED for name, rule in (("state_dict", model_state), ("load_state_dict", load_state))},
        ("optimizer", "state_dict"): optimizer_state,
        ("optimizer", "load_state_dict"): load_optimizer,
    }
)
FSDP1 = Rules(
    calls={
        f"{STATIC}set_state_dict_type": set_type,
        **{f"fsdp:{name}": config_value for name in _CONFIGS},
        **{f"{STATIC}{name}": state_to_load for name in _LOADS},
        **{f"{STATIC}{name}": optim_state for name in ("optim_state_dict", "full_optim_state_dict", "sharded_optim_state_dict")},
    },
    nodes={cst.With: [unwrap_with]},
)
