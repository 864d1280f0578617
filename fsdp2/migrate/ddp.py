"""``DistributedDataParallel(model, ...)`` becomes ``fsdp2.parallelize(model, "ddp")``; with ZeroRedundancyOptimizer, "zero1"."""

from __future__ import annotations

from dataclasses import dataclass, field

import libcst as cst
from libcst import matchers

from .devices import mesh_of_group
from .editor import Editor, Method, Rules
from .syntax_trees import arguments, code, expression, is_none, keyword, literal, with_args

_SIGNATURE = (
    "module",
    "device_ids",
    "output_device",
    "dim",
    "broadcast_buffers",
    "init_sync",
    "process_group",
    "bucket_cap_mb",
    "find_unused_parameters",
    "check_reduction",
    "gradient_as_bucket_view",
    "static_graph",
    "delay_all_reduce_named_params",
    "param_to_hook_all_reduce",
    "mixed_precision",
)

_DROPPED = {
    "device_ids": "parallelize moves the model to the device of its mesh.",
    "output_device": "outputs are where forward put them.",
    "dim": "inputs are not scattered.",
    "bucket_cap_mb": "fsdp2 reduces groups of parameters; wrap= chooses them.",
    "gradient_as_bucket_view": "gradients always are views of the reduced buffer.",
    "static_graph": "nothing has to be known about the graph.",
    "check_reduction": "nothing to check.",
    "broadcast_buffers": "buffers are broadcast once, at the start, and then are each rank's own; torch.nn.SyncBatchNorm keeps the "
    "statistics of batch norms equal.",
}
_HOOKS = {
    "bf16_compress_hook": "torch.bfloat16",
    "fp16_compress_hook": "torch.float16",
    "allreduce_hook": "",
}


@dataclass
class _Found:
    """comm_hook: the dtype in which gradients are reduced, "" if their own. zero_optimizer: there is a ZeroRedundancyOptimizer.

    joined: the model of each ``with`` that joins; loops: their loops over batches
    """

    comm_hook: str = ""
    zero_optimizer: bool = False
    joined: dict[cst.With, cst.BaseExpression] = field(default_factory=dict)
    loops: list[cst.For] = field(default_factory=list)


def ddp_call(editor: Editor, old: cst.Call, new: cst.Call) -> cst.BaseExpression:
    before, given = arguments(old.args, _SIGNATURE), arguments(new.args, _SIGNATURE)
    if given.stars or given.extra:
        editor.refuse("ddp", old, "arguments of DistributedDataParallel that are not written here")
    result: list[cst.Arg] = []
    for name, arg in given.by_name.items():
        if name == "module":
            result.insert(0, keyword("model", arg.value, arg) if arg.keyword is not None else arg)
        elif (mapped := _mapped(editor, old, name, before.by_name[name].value, arg)) is not None:
            result.append(mapped)
    here = editor.of(_Found)
    strategy = cst.SimpleString('"zero1"' if here.zero_optimizer else '"ddp"')
    in_order = bool(result) and result[0].keyword is None
    result.insert(1, cst.Arg(strategy) if in_order else keyword("strategy", strategy))
    if here.comm_hook:
        policy = editor.make(f"fsdp2.MixedPrecisionPolicy(reduce_dtype={here.comm_hook})")
        result.append(keyword("mp_policy", policy))
    return with_args(new, result).with_changes(func=editor.make("fsdp2.parallelize"))


def _mapped(editor: Editor, old: cst.Call, name: str, value: cst.BaseExpression, arg: cst.Arg) -> cst.Arg | None:
    if name in _DROPPED:
        editor.note(old, f"{name}={code(value)} dropped: {_DROPPED[name]}")
    elif is_none(value):
        pass
    elif name == "find_unused_parameters" and literal(value) == "False":
        editor.note(old, "find_unused_parameters=False dropped: it is not needed.")
    elif name == "find_unused_parameters":
        editor.note(
            old,
            f"find_unused_parameters={code(value)} is wrap=None, one group: a rank may leave out modules that others call. Where all "
            "ranks call the same modules, drop it: several groups are reduced while backward goes on.",
        )
        return keyword("wrap", cst.Name("None"), arg)
    elif name == "init_sync":
        return keyword("sync_module_states", arg.value, arg)
    elif name == "process_group":
        return keyword("mesh", expression(mesh_of_group(editor, old, arg.value)), arg)
    else:
        editor.refuse("ddp", old, f"{name}: fsdp2 has no equivalent of this argument")
    return None


def find_hooks(editor: Editor) -> None:
    """Before the rewrite: whether gradients are compressed, which becomes ``reduce_dtype``, and whether DDP is joined."""
    here = editor.of(_Found)
    for call in editor.names.calls:
        made_by = editor.names.origin_of(call.func)
        method = editor.names.method_of(call, "ddp")
        if method == "register_comm_hook":
            hook = code(arguments(call.args, ("state", "hook")).value("hook") or cst.Name("None")).rpartition(".")[2]
            if hook in _HOOKS:
                here.comm_hook = _HOOKS[hook]
            else:
                editor.refuse("ddp", call, f"register_comm_hook({hook}): fsdp2 reduces gradients itself; see set_all_reduce_hook")
        elif made_by == "join:Join" or method == "join":
            _find_join(editor, here, call)
        elif made_by == "zero:ZeroRedundancyOptimizer":
            here.zero_optimizer = True


def _find_join(editor: Editor, here: _Found, call: cst.Call) -> None:
    """``with Join([model]):`` or ``with model.join():`` around one loop that takes a step for each batch, or refuse it."""
    names = editor.names
    given = arguments(call.args, () if names.method_of(call, "ddp") else ("joinables",))
    models = [call.func.value] if names.method_of(call, "ddp") and isinstance(call.func, cst.Attribute) else []
    if isinstance(joinables := given.value("joinables"), (cst.List, cst.Tuple)):
        models = [each.value for each in joinables.elements if names.tag_of(each.value) == "ddp"]
    block = next((each for each in names.ancestors(call) if isinstance(each, cst.With)), None)
    plain = block is not None and len(block.items) == 1 and block.items[0].item is call and block.items[0].asname is None
    loops = [] if block is None else [each for each in matchers.findall(block, matchers.For()) if isinstance(each, cst.For)]
    calls_backward = matchers.Call(func=matchers.Attribute(attr=matchers.Name("backward")))
    loops = [each for each in loops if matchers.findall(each, calls_backward) and not matchers.findall(each.body, matchers.For())]
    leaves = matchers.OneOf(matchers.Break(), matchers.Return())
    divides_by_all = given.text("divide_by_initial_world_size", "True") == "True"
    others = [*given.stars, *given.extra, *(given.by_name.keys() - {"joinables", "divide_by_initial_world_size"})]
    is_known = divides_by_all and not others and plain and len(models) == len(loops) == 1
    if block is None or not is_known or matchers.findall(loops[0], leaves):
        text = "join: ranks with fewer inputs; use `with fsdp2.uneven(model) as work:` and `for batch in work(loader):`"
        editor.refuse("ddp", call, text)
        return
    here.joined[block] = models[0]
    here.loops.append(loops[0])


def join(editor: Editor, old: cst.With, new: cst.With) -> cst.With:
    model = editor.of(_Found).joined.get(old)
    if model is None:
        return new
    editor.note(
        old,
        "join is fsdp2.uneven: a rank without batches repeats one, and its gradients are dropped; metrics leave out work.stands_in. "
        "As before, gradients are divided by all ranks; work.backward(loss) divides by those that have batches.",
    )
    return new.with_changes(items=[cst.WithItem(editor.make("fsdp2.uneven({model})", model=model), cst.AsName(cst.Name("work")))])


def joined_loop(editor: Editor, old: cst.For, new: cst.For) -> cst.For:
    if old not in editor.of(_Found).loops:
        return new
    return new.with_changes(iter=expression(f"work({code(new.iter)})"))


def comm_hook(editor: Editor, call: Method) -> None:
    if isinstance(editor.names.parent_of(call.old), cst.Expr):
        kind = editor.of(_Found).comm_hook
        what = f"parallelize reduces gradients in {kind}, mp_policy's reduce_dtype." if kind else "parallelize does the same."
        editor.note(call.old, f"register_comm_hook dropped: {what}")
        editor.instead()


def zero_optimizer(editor: Editor, old: cst.Call, new: cst.Call) -> cst.BaseExpression:
    """``ZeroRedundancyOptimizer(params, optimizer_class=AdamW, ...)`` is ``AdamW(params, ...)`` under "zero1"."""
    own = ("params", "optimizer_class", "process_group", "parameters_as_bucket_view", "overlap_with_ddp")
    given = arguments(new.args, own)
    if "optimizer_class" not in given.by_name or literal(given.value("process_group")) not in ("", "None"):
        editor.refuse("ddp", old, "ZeroRedundancyOptimizer over a process group of its own")
        return new
    kept = [arg for name, arg in given.by_name.items() if name == "params" or name not in own]
    for name in own[2:]:
        if name in given.by_name:
            editor.note(old, f"{name}={given.text(name)} dropped: the optimizer sees sharded parameters; nothing to choose.")
    editor.note(old, 'ZeroRedundancyOptimizer is the strategy "zero1" with the plain optimizer.')
    return with_args(new, [*kept, *given.stars]).with_changes(func=given.by_name["optimizer_class"].value)


def consolidate(editor: Editor, call: Method) -> None:
    """``optimizer.consolidate_state_dict()``."""
    if isinstance(editor.names.parent_of(call.old), cst.Expr):
        editor.note(call.old, "consolidate_state_dict dropped: full_optimizer_state_dict gathers, on every rank.")
        editor.instead()


RULES = Rules(
    calls={"ddp:DistributedDataParallel": ddp_call, "zero:ZeroRedundancyOptimizer": zero_optimizer},
    methods={("ddp", "register_comm_hook"): comm_hook, ("optimizer", "consolidate_state_dict"): consolidate},
    nodes={cst.With: [join], cst.For: [joined_loop]},
)
