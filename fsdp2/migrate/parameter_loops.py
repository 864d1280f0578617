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
from libcst import matchers

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
    others = [each for each in listed if names.tag_of(each) == ""]
    if not any(_is_plain(names, each) for each in others) and not any(_is_plain_dict(names, each) for each in _subscripted(old.body)):
        return new
    model = sharded[0]
    while isinstance(model, cst.Attribute) and model.attr.value in WRAPPED:
        model = model.value
    grads = ", with_grads=True" if matchers.findall(old.body, matchers.Attribute(attr=matchers.Name("grad"))) else ""
    editor.note(old, "parameters are DTensors, the tensors next to them are not: inside, the model shows whole parameters.")
    shown = editor.make(f"{_SUMMON}({code(model)}{grads})", "import fsdp2.compat")
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
    above = names.parent_of(node)
    while above is not None:
        if isinstance(above, cst.With) and any("summon_full_params" in code(item.item) for item in above.items):
            return True
        above = names.parent_of(above)
    return False


def _is_plain(names: Names, module: cst.BaseExpression) -> bool:
    """Whether every value of ``module`` is made here, and not of a sharded model."""
    values = names.values_of(dotted(module))
    made = [each for each in values if isinstance(each, cst.Call)]
    of_sharded = any(_is_sharded(names, arg.value) for each in made for arg in each.args)
    return bool(values) and len(made) == len(values) and not of_sharded


def _subscripted(body: cst.BaseSuite) -> Iterator[cst.BaseExpression]:
    for each in matchers.findall(body, matchers.Subscript()):
        if isinstance(each, cst.Subscript):
            yield each.value


def _is_plain_dict(names: Names, node: cst.BaseExpression) -> bool:
    """Whether ``node`` is a dict of the parameters of a module that was not sharded then."""
    values = names.values_of(dotted(node))
    found = [module for value in values for module in _sources(value)]
    return bool(found) and not any(_is_sharded(names, each) for each in found)


def _sources(value: cst.BaseExpression) -> Iterator[cst.BaseExpression]:
    """``net`` of ``{name: p.clone() for name, p in net.named_parameters()}`` and ``dict(net.named_parameters())``."""
    calls = matchers.findall(value, matchers.Call(func=matchers.Attribute(attr=matchers.Name("named_parameters"))))
    for call in calls:
        if isinstance(call, cst.Call) and isinstance(call.func, cst.Attribute):
            yield call.func.value


def _is_sharded(names: Names, node: cst.BaseExpression) -> bool:
    """Whether ``node`` is sharded. For a function's parameter its calls tell: elsewhere the name may be the model's."""
    function = names.function_of(node)
    if isinstance(node, cst.Name) and isinstance(function, cst.FunctionDef):
        params = [each.name.value for each in parameters(function) if each.name.value not in ("self", "cls")]
        if node.value in params:
            passed = list(_passed(names, function, params.index(node.value), node.value))
            return not passed or any(names.tag_of(each) != "" for each in passed)
    return names.tag_of(node) != ""


def _passed(names: Names, function: cst.FunctionDef, index: int, name: str) -> Iterator[cst.BaseExpression]:
    called = function.name.value
    above = names.parent_of(function)
    while called == "__init__" and above is not None:
        if isinstance(above, cst.ClassDef):
            called = above.name.value
        above = names.parent_of(above)
    for call in names.facts.calls:
        if dotted(call.func).rpartition(".")[2] == called:
            for at, arg in enumerate(call.args):
                if arg.keyword.value == name if arg.keyword is not None else at == index:
                    yield arg.value


RULES = Rules(nodes={cst.For: [loop]})
