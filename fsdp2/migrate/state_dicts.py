"""State dicts of wrapped models and their optimizers: calls that name their result, for FSDP1's contexts and DDP's ``.module``.

    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, rank0_cpu):    state = fsdp2.checkpoint.full_state_dict(model)
        state = model.state_dict()

FSDP1 keeps the kind of state dict on the model. Here it is read from the text: from the ``with`` around the call, from the one
``set_state_dict_type`` of the file, or FSDP1's default, whole tensors on every rank.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import libcst as cst

from .editor import Editor, Rules
from .model_use import is_use_before_wrap
from .names import SHARDED
from .rank_guards import on_every_rank
from .syntax_trees import arguments, code, dotted

_STATIC = "fsdp:FullyShardedDataParallel."
_DCP = "torch.distributed.checkpoint.state_dict"
FULL = "StateDictOptions(full_state_dict=True)"


@dataclass(frozen=True)
class Wanted:
    """The kind of state dict in force. Rank 0 only, to the CPU: of the model, and of the optimizer."""

    kind: str = "FULL_STATE_DICT"
    rank0: bool = False
    cpu: bool = False
    optim_rank0: bool = False


@dataclass
class _InForce:
    """contexts: open ``with`` statements and their kinds, None for ``summon_full_params``. in_file: outside of them. loads: see
    ``_find_loads``."""

    contexts: list[tuple[cst.With, Wanted | None]] = field(default_factory=list)
    in_file: Wanted = Wanted()
    loads: dict[str, tuple[str, str]] | None = None


def _wanted(editor: Editor, old: cst.Call) -> Wanted:
    """The arguments of ``state_dict_type`` or ``set_state_dict_type``."""
    given = arguments(old.args, ("module", "state_dict_type", "state_dict_config", "optim_state_dict_config"))
    kind = editor.names.origin_of(given.value("state_dict_type")).removeprefix("fsdp:StateDictType.")
    if kind not in ("FULL_STATE_DICT", "SHARDED_STATE_DICT"):
        what = given.text("state_dict_type")
        local = kind == "LOCAL_STATE_DICT"
        flat = "flat parameters of one rank do not exist here; `fsdp2 convert OLD NEW --to dcp --shapes shapes.json` reads old files"
        why = flat if local else "which kind it is, is known only when it runs"
        editor.refuse("fsdp1", old, f"{what}: {why}")
    model = _config(editor, given.value("state_dict_config"), old)
    optim = _config(editor, given.value("optim_state_dict_config"), old)
    return Wanted(kind, model.get("rank0_only", False), model.get("offload_to_cpu", False), optim.get("rank0_only", False))


def _config(editor: Editor, node: cst.BaseExpression | None, at: cst.CSTNode) -> dict[str, bool]:
    """The flags of a ``FullStateDictConfig(...)``, or of the only one that a name stands for."""
    if node is None or (isinstance(node, cst.Name) and node.value == "None"):
        return {}
    if isinstance(node, (cst.Name, cst.Attribute)):
        values = editor.names.values_of(dotted(node))
        node = values[0] if len(values) == 1 else node
    if isinstance(node, cst.Call) and editor.names.origin_of(node.func).startswith("fsdp:"):
        given = arguments(node.args, ("offload_to_cpu", "rank0_only"))
        flags = {name: given.text(name) for name in given.by_name}
        if set(flags.values()) <= {"True", "False"} and not given.stars:
            return {name: value == "True" for name, value in flags.items()}
    editor.refuse("fsdp1", at, f"{code(node)}: a state dict config whose flags are not written in this file")
    return {}


# --- which kind is in force ----------------------------------------------------------------------------------------------------


def enter_with(editor: Editor, node: cst.With) -> None:
    contexts = editor.of(_InForce).contexts
    for item in node.items:
        if isinstance(item.item, cst.Call):
            made_by = editor.names.origin_of(item.item.func)
            if made_by == f"{_STATIC}state_dict_type":
                contexts.append((node, _wanted(editor, item.item)))
                if not _asks_inside(node):
                    editor.refuse("fsdp1", item.item, "state_dict_type around a call: the state dict is taken elsewhere")
            elif made_by == f"{_STATIC}summon_full_params":
                contexts.append((node, None))


def _asks_inside(node: cst.With) -> bool:
    """Whether a state dict is taken or loaded in the text of the block."""
    found = False

    class Look(cst.CSTVisitor):
        def visit_Call(self, node: cst.Call) -> None:  # noqa: N802
            nonlocal found
            name = node.func.attr.value if isinstance(node.func, cst.Attribute) else ""
            found |= name in ("state_dict", "load_state_dict") or "optim_state_dict" in name

    node.body.visit(Look())
    return found


def leave_with(editor: Editor, node: cst.With) -> None:
    contexts = editor.of(_InForce).contexts
    while contexts and contexts[-1][0] is node:
        contexts.pop()


def unwrap_with(editor: Editor, old: cst.With, new: cst.With) -> cst.BaseStatement | cst.FlattenSentinel[cst.BaseStatement]:
    """Remove ``state_dict_type``; the body alone stays if the ``with`` has nothing else."""
    kept = [
        after
        for before, after in zip(old.items, new.items, strict=True)
        if not (isinstance(before.item, cst.Call) and editor.names.origin_of(before.item.func) == f"{_STATIC}state_dict_type")
    ]
    if len(kept) == len(new.items):
        return new
    if kept:
        return new.with_changes(items=[*kept[:-1], kept[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)])
    body: list[cst.BaseStatement] = list(new.body.body) if isinstance(new.body, cst.IndentedBlock) else []
    if not body:
        body = [cst.SimpleStatementLine(new.body.body)]  # type: ignore[arg-type]  # `with ...: statement` on one line
    comment = new.body.header.comment if isinstance(new.body, cst.IndentedBlock) else None
    own = [*new.leading_lines, *([cst.EmptyLine(comment=comment)] if comment is not None else [])]
    footer = list(new.body.footer) if isinstance(new.body, cst.IndentedBlock) else []
    first = body[0]
    body[0] = first.with_changes(leading_lines=[*own, *getattr(first, "leading_lines", ())])
    if footer:
        editor.keep_comments([line.comment.value for line in footer if line.comment is not None])
    return cst.FlattenSentinel(body)


def set_type(editor: Editor, old: cst.Call, new: cst.Call) -> cst.BaseExpression:
    """``FSDP.set_state_dict_type`` as a statement: it says for the whole file what ``model.state_dict()`` is."""
    if isinstance(editor.names.parent_of(old), cst.Expr) and isinstance(editor.statement, cst.SimpleStatementLine):
        editor.note(old, "set_state_dict_type dropped: the calls below say what they give.")
        editor.instead()
    else:
        editor.refuse("fsdp1", old, "set_state_dict_type whose result is used")
    return new


def config_value(editor: Editor, old: cst.Call, new: cst.Call) -> cst.BaseExpression | None:
    """``save_policy = FullStateDictConfig(...)`` goes, if only state dict contexts read it."""
    parent = editor.names.parent_of(old)
    target = parent.targets[0].target if isinstance(parent, cst.Assign) and len(parent.targets) == 1 else None
    readers = (f"{_STATIC}state_dict_type", f"{_STATIC}set_state_dict_type")
    if isinstance(target, cst.Name) and editor.names.is_only_read_by(target.value, readers):
        editor.instead()
    return None


_CONFIGS = (
    "FullStateDictConfig",
    "FullOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardedOptimStateDictConfig",
)


def file_wide(editor: Editor) -> None:
    """Find the file's ``set_state_dict_type``, before anything is rewritten."""
    calls = [call for call in editor.names.facts.calls if editor.names.origin_of(call.func) == f"{_STATIC}set_state_dict_type"]
    found = {_wanted(editor, call) for call in calls}
    if len(found) > 1:
        editor.refuse("fsdp1", calls[-1], "set_state_dict_type with several kinds in one file")
    editor.of(_InForce).in_file = found.pop() if found else Wanted()


def _in_force(editor: Editor) -> Wanted | None:
    """None inside of ``summon_full_params``, where parameters are whole."""
    contexts = editor.of(_InForce).contexts
    if not contexts:
        return editor.of(_InForce).in_file
    return contexts[-1][1]


# --- models --------------------------------------------------------------------------------------------------------------------


def model_state(editor: Editor, old: cst.Call, new: cst.Call) -> cst.BaseExpression | None:
    """``model.state_dict()``."""
    if not isinstance(old.func, cst.Attribute) or not isinstance(new.func, cst.Attribute) or old.args:
        return None
    tag, model = editor.names.tag_of(old.func.value), code(new.func.value)
    if tag == "optimizer":
        return _optimizer_state(editor, old, new)
    if tag not in SHARDED or is_use_before_wrap(editor, old):
        return None
    if tag != "fsdp1":
        if not _is_inner(editor, old.func.value):
            editor.note(old, "keys no longer begin with module.")
        return on_every_rank(editor, old, lambda rank0: _full_state(editor, model, rank0), "model_state")
    wanted = _in_force(editor)
    if wanted is None or wanted.kind != "FULL_STATE_DICT":
        return None
    if wanted.cpu and not wanted.rank0:
        editor.note(old, "offload_to_cpu without rank0_only dropped: whole tensors are on the device of every rank.")
    return editor.make(_full_state(editor, model, wanted.rank0))


def _is_inner(editor: Editor, model: cst.BaseExpression) -> bool:
    """Whether it was the module inside of the wrapper, whose keys are the same as now."""
    values = [model, *editor.names.values_of(dotted(model))]
    return any(".module" in code(each) for each in values) or bool(editor.names.wrapped_in_place(model))


def _full_state(editor: Editor, model: str, rank0: bool) -> str:
    if rank0:
        editor.needs("import fsdp2.checkpoint")
        return f"fsdp2.checkpoint.full_state_dict({model})"
    _needs_dcp(editor, "StateDictOptions", "get_model_state_dict")
    return f"get_model_state_dict({model}, options={FULL})"


def load_state(editor: Editor, old: cst.Call, new: cst.Call) -> cst.BaseExpression | None:
    """``model.load_state_dict(state)``."""
    if not isinstance(old.func, cst.Attribute) or not isinstance(new.func, cst.Attribute):
        return None
    tag, target = editor.names.tag_of(old.func.value), code(new.func.value)
    if tag == "optimizer":
        return _load_optimizer(editor, old, new)
    if tag not in SHARDED or is_use_before_wrap(editor, old):
        return None
    wanted = Wanted() if tag != "fsdp1" else _in_force(editor)
    if wanted is not None and wanted.kind != "FULL_STATE_DICT":
        editor.note(old, "a DCP folder of the old script loads as it is; files that each rank saved: `fsdp2 convert OLD NEW --to dcp`.")
        return None
    if wanted is None:
        return None
    if tag == "ddp" and not _is_inner(editor, old.func.value):
        editor.note(old, "keys must not begin with module. any more.")
    given = arguments(new.args, ("state_dict", "strict", "assign"))
    strict = f", strict={given.text('strict')}" if given.text("strict", "True") != "True" else ""
    _needs_dcp(editor, "StateDictOptions", "set_model_state_dict")
    return editor.make(f"set_model_state_dict({target}, {given.text('state_dict')}, options={FULL[:-1]}{strict}))")


# --- optimizers ----------------------------------------------------------------------------------------------------------------


def _optimizer_state(editor: Editor, old: cst.Call, new: cst.Call) -> cst.BaseExpression | None:
    """``optimizer.state_dict()``: of DDP's it is whole; of FSDP1's it was this rank's flat pieces, and is this rank's DTensors."""
    if editor.names.model(("fsdp1",)) or not isinstance(new.func, cst.Attribute):
        return None
    model, optimizer = _model_of(editor, old), code(new.func.value)
    if not model:
        if editor.names.rewritten:
            editor.left(old, _UNKNOWN.format(f"fsdp2.checkpoint.full_optimizer_state_dict(model, {optimizer}, by_name=True)"))
        return None
    editor.note(old, f"{_BY_NAME}.")
    return on_every_rank(editor, old, lambda rank0: _full_optimizer(editor, model, optimizer, rank0), "optimizer_state")


_BY_NAME = "state by parameter name, not by number; a file that the old script wrote has numbers"


def _full_optimizer(editor: Editor, model: str, optimizer: str, rank0: bool) -> str:
    if rank0:
        editor.needs("import fsdp2.checkpoint")
        return f"fsdp2.checkpoint.full_optimizer_state_dict({model}, {optimizer}, by_name=True)"
    _needs_dcp(editor, "StateDictOptions", "get_optimizer_state_dict")
    return f"get_optimizer_state_dict({model}, {optimizer}, options={FULL})"


def _load_optimizer(editor: Editor, old: cst.Call, new: cst.Call) -> cst.BaseExpression | None:
    if not isinstance(new.func, cst.Attribute) or not new.args:
        return None
    optimizer, state = code(new.func.value), code(new.args[0].value)
    here = editor.of(_InForce)
    if here.loads is None:
        here.loads = _find_loads(editor)
    if optimizer in here.loads:
        model, options = here.loads[optimizer]
        if not options and (wanted := _in_force(editor)) is not None and wanted.kind == "FULL_STATE_DICT":
            options = FULL
    elif editor.names.model(("fsdp1",)):
        return None
    else:
        model, options = _model_of(editor, old), FULL
        if not model:
            if editor.names.rewritten:
                editor.left(old, _UNKNOWN.format(f"set_optimizer_state_dict(model, {optimizer}, {state}, options={FULL})"))
            return None
        editor.note(old, f"{_BY_NAME}: `fsdp2 convert OLD NEW --to torch` gives it names.")
    _needs_dcp(editor, *(["StateDictOptions"] if options else []), "set_optimizer_state_dict")
    return editor.make(f"set_optimizer_state_dict({model}, {optimizer}, {state}" + (f", options={options})" if options else ")"))


def _model_of(editor: Editor, old: cst.Call) -> str:
    """The sharded model that the function around ``old`` names, or the first one of the file, if it can be seen from there."""
    models, function = editor.names.model(), editor.names.function_of(old)
    if function is None:
        return models[0] if models else ""
    named = [each for each in models if re.search(rf"\b{re.escape(each)}(?!\w)", code(function))]
    everywhere = [dotted(target) for target, _, inside in editor.names.facts.assigned if inside is None]
    return next(iter(named or [each for each in models if each in everywhere or each.startswith("self.")]), "")


_UNKNOWN = "which model this optimizer belongs to is not seen from here; if it is sharded: {0}"

_LOADS = {
    "optim_state_dict_to_load": ("model", "optim", "optim_state_dict", "is_named_optimizer", "load_directly", "group"),
    "shard_full_optim_state_dict": ("full_optim_state_dict", "model", "optim_input", "optim"),
    "scatter_full_optim_state_dict": ("full_optim_state_dict", "model", "optim_input", "optim", "group"),
}


def _load_arguments(editor: Editor, call: cst.Call) -> tuple[str, str, str, cst.BaseExpression | None]:
    """Name of the function, model, optimizer and state; of both orders that torch has had."""
    name = editor.names.origin_of(call.func).removeprefix(_STATIC)
    signature = _LOADS[name]
    if editor.names.puts_state_first(call):
        signature = ("optim_state_dict", "model", "optim")
    given = arguments(call.args, signature)
    state = given.value("optim_state_dict") or given.value("full_optim_state_dict")
    optimizers = [text for text, tag in editor.names.tags.items() if tag == "optimizer" and not text.startswith("*.")]
    optim = given.text("optim") or (optimizers[0] if optimizers else "")
    if given.text("load_directly", "False") != "False":
        editor.refuse("fsdp1", call, "optim_state_dict_to_load(load_directly=...)")
    return name, given.text("model"), optim, state


def _find_loads(editor: Editor) -> dict[str, tuple[str, str]]:
    """For each optimizer that FSDP1's functions load: its model, and the options if the function names them."""
    found = {}
    for call in editor.names.facts.calls:
        if editor.names.origin_of(call.func).removeprefix(_STATIC) in _LOADS:
            name, model, optim, _state = _load_arguments(editor, call)
            options = {
                "scatter_full_optim_state_dict": "StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)",
                "shard_full_optim_state_dict": FULL,
            }
            found[optim] = (model, options.get(name, ""))
    return found


def state_to_load(editor: Editor, old: cst.Call, new: cst.Call) -> cst.BaseExpression:
    """``FSDP.optim_state_dict_to_load(model, optim, state)`` is ``state``: ``set_optimizer_state_dict`` shards it."""
    _name, _model, _optim, state = _load_arguments(editor, old)
    if state is None:
        editor.refuse("fsdp1", old, "an optimizer's state dict whose arguments are not written here")
        return new
    index = next(i for i, arg in enumerate(old.args) if arg.value is state)
    if _name == "scatter_full_optim_state_dict":
        editor.note(old, "other ranks pass an empty dict: what they lack is broadcast from rank 0.")
        value = code(new.args[index].value)
        return editor.make(f"({value}) or {{}}" if isinstance(new.args[index].value, cst.IfExp) else f"{value} or {{}}")
    return new.args[index].value


def optim_state(editor: Editor, old: cst.Call, new: cst.Call) -> cst.BaseExpression:
    """``FSDP.optim_state_dict(model, optim)`` and the older functions."""
    name = editor.names.origin_of(old.func).removeprefix(_STATIC)
    given = arguments(new.args, ("model", "optim", "optim_state_dict" if name == "optim_state_dict" else "rank0_only", "rank0_only"))
    model, optim = given.text("model"), given.text("optim")
    wanted = _in_force(editor)
    if given.value("optim_state_dict") is not None or wanted is None:
        editor.refuse("fsdp1", old, f"FSDP.{name} of a state dict that was taken before")
    elif name == "full_optim_state_dict":
        wanted = Wanted(optim_rank0=given.text("rank0_only", "True") != "False")
    elif name == "sharded_optim_state_dict":
        wanted = Wanted("SHARDED_STATE_DICT")
    if wanted is None or wanted.kind != "FULL_STATE_DICT":
        _needs_dcp(editor, "get_optimizer_state_dict")
        return editor.make(f"get_optimizer_state_dict({model}, {optim})")
    return editor.make(_full_optimizer(editor, model, optim, wanted.optim_rank0))


def _needs_dcp(editor: Editor, *names: str) -> None:
    for name in names:
        editor.needs(f"from {_DCP} import {name}")


SHARED = Rules(methods={"state_dict": model_state, "load_state_dict": load_state})
FSDP1 = Rules(
    calls={
        f"{_STATIC}set_state_dict_type": set_type,
        **{f"fsdp:{name}": config_value for name in _CONFIGS},
        **{f"{_STATIC}{name}": state_to_load for name in _LOADS},
        **{f"{_STATIC}{name}": optim_state for name in ("optim_state_dict", "full_optim_state_dict", "sharded_optim_state_dict")},
    },
    nodes={cst.With: [unwrap_with]},
    enter={cst.With: [enter_with]},
    leave={cst.With: [leave_with]},
)
