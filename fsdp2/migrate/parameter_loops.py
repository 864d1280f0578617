"""Loops over parameters next to plain tensors, as averages of weights have them: there the model shows whole parameters.

    ema = copy.deepcopy(net)                              with FullyShardedDataParallel.summon_full_params(model):
    model = DDP(net)                                          for average, param in zip(ema.parameters(), model.parameters()):
    for average, param in zip(ema.parameters(),                   average.lerp_(param, 0.1)
                              model.parameters()):
        average.lerp_(param, 0.1)

A parameter of a sharded model is a DTensor, which no operation takes next to a plain tensor. Only loops whose other tensors this file
shows to be plain are rewritten: those of an average that was made of the sharded model are DTensors themselves.
"""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst
from libcst import matchers as m

from .editor import Editor, Rules
from .names import SHARDED, WRAPPED, Names
from .syntax_trees import code, dotted, parameters

_LISTS = ("parameters", "named_parameters")
_SUMMON = "fsdp2.compat.FullyShardedDataParallel.summon_full_params"


def loop(editor: Editor, old: cst.For, new: cst.For) -> cst.BaseStatement:
    """``for ... in model.named_parameters():`` with plain tensors in it."""
    names = editor.names
    listed = list(_listed(old.iter))
    sharded = [each for each in listed if names.tag_of(each) in SHARDED]
    if not sharded or _is_whole(names, old):
        return new
    subscripted = [cst.ensure_type(each, cst.Subscript).value for each in m.findall(old.body, m.Subscript())]
    others = [each for each in listed if names.tag_of(each) == ""]
    if not any(_is_plain(names, each) for each in others) and not any(_is_plain_dict(names, each) for each in subscripted):
        return new
    model = sharded[0]
    while isinstance(model, cst.Attribute) and model.attr.value in WRAPPED:
        model = model.value
    grads = ", with_grads=True" if m.findall(old.body, m.Attribute(attr=m.Name("grad"))) else ""
    editor.note(old, "parameters are DTensors, the tensors next to them are not: inside, the model shows whole parameters.")
    shown = editor.make(f"{_SUMMON}({{model}}{grads})", model=model)
    inside = cst.IndentedBlock([new.with_changes(leading_lines=[])])
    return cst.With([cst.WithItem(shown)], inside, leading_lines=new.leading_lines)


def _listed(node: cst.BaseExpression) -> Iterator[cst.BaseExpression]:
    """``model`` of ``model.parameters()``, each of ``zip(...)`` and ``enumerate(...)``."""
    if not isinstance(node, cst.Call):
        return
    if isinstance(node.func, cst.Attribute) and node.func.attr.value in _LISTS:
        yield node.func.value
    elif dotted(node.func) in ("zip", "enumerate", "list"):
        for arg in node.args:
            yield from _listed(arg.value)


def _is_whole(names: Names, node: cst.CSTNode) -> bool:
    items = [item for above in names.ancestors(node) if isinstance(above, cst.With) for item in above.items]
    return any("summon_full_params" in code(item.item) for item in items)


def _is_plain(names: Names, module: cst.BaseExpression) -> bool:
    """Whether every value of ``module`` is made here, and not of a sharded model."""
    values = names.values_of(dotted(module))
    made = [each for each in values if isinstance(each, cst.Call)]
    of_sharded = any(_is_sharded(names, arg.value) for each in made for arg in each.args)
    return bool(values) and len(made) == len(values) and not of_sharded


def _is_plain_dict(names: Names, node: cst.BaseExpression) -> bool:
    """Whether ``node`` is a dict of the parameters of a module that was not sharded then:
    ``{name: p.clone() for name, p in net.named_parameters()}``, ``dict(net.named_parameters())``."""
    listed = m.Call(func=m.Attribute(m.SaveMatchedNode(m.DoNotCare(), "module"), m.Name("named_parameters")))
    found = [each["module"] for value in names.values_of(dotted(node)) for each in m.extractall(value, listed)]
    return bool(found) and not any(_is_sharded(names, each) for each in found)  # type: ignore[arg-type]


def _is_sharded(names: Names, node: cst.BaseExpression) -> bool:
    """Whether ``node`` is sharded. For a function's parameter its calls tell: elsewhere the name may be the model's."""
    function = names.function_of(node)
    params = [each.name.value for each in parameters(function)] if isinstance(function, cst.FunctionDef) else []
    if isinstance(node, cst.Name) and isinstance(function, cst.FunctionDef) and node.value in {*params} - {"self", "cls"}:
        passed = names.passed_to(function, node.value)
        return not passed or any(names.tag_of(each) != "" for each in passed)
    return names.tag_of(node) != ""


RULES = Rules(nodes={cst.For: [loop]})
