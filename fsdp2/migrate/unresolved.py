"""Uses that only a wrapped model has, of a value that is unknown: ``state.model.no_sync()``, ``things["net"].state_dict()``.

Values are followed by the text of their names (``names.py``), so a model that comes out of a container, an object or another file is
not found. Each such use is listed: it may need to be rewritten. Uses of an optimizer, a sampler, or a module that is
never wrapped are not.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

import libcst as cst
from libcst import matchers

from .model_use import is_asked_for
from .names import SHARDED, WRAPPED, Names
from .syntax_trees import code, dotted, key_of

_INSTEAD = {
    "no_sync": "fsdp2.accumulate({0})",
    "clip_grad_norm_": "fsdp2.clip_grad_norm_({0}.parameters(), ...)",
    "state_dict": "fsdp2.checkpoint.full_state_dict({0}), on every rank, for whole tensors",
    "load_state_dict": "set_model_state_dict({0}, ..., options=StateDictOptions(full_state_dict=True)) for whole tensors",
    "require_backward_grad_sync": "{0}.set_requires_gradient_sync(...)",
    "module": "{0} itself",
    "_fsdp_wrapped_module": "{0} itself",
}
_OTHER_THINGS = re.compile(
    r"optim|^opts?$|sched|scaler|sampler|loader|dataset|generator|metric|tokenizer|criterion|loss|warmup|counter|meter"
    r"|^(args|cfg|config|hparams|options|spec|record|frame)$",
    re.IGNORECASE,
)
"""Names of objects that have a state dict, or an attribute ``module``, and are not models."""


def find(names: Names) -> Iterator[tuple[cst.CSTNode, str]]:
    """Each use of an unknown value as a wrapped model, and its replacement if the value is one; in the order of the text."""
    for node in names.attributes:
        name = node.attr.value
        if name in _INSTEAD and (_is_taken(names, node) or (_is_such_a_use(names, node) and not _is_known(names, node))):
            value = node.value
            if isinstance(value, cst.Attribute) and value.attr.value in WRAPPED:
                value = value.value
            receiver = code(value)
            use = f"{code(node.value)}.{name}" + ("()" if _is_called(names, node) else "")
            yield node, f"{use}: check whether {receiver} is sharded; if so: {_INSTEAD[name].format(receiver)}"


def _is_called(names: Names, node: cst.Attribute) -> bool:
    above = names.parent_of(node)
    return isinstance(above, cst.Call) and above.func is node


def _is_taken(names: Names, node: cst.Attribute) -> bool:
    """A method that is not called here but kept, ``save = model.state_dict``: no rule rewrites that."""
    is_method = node.attr.value in ("clip_grad_norm_", "state_dict", "load_state_dict")
    return is_method and not _is_called(names, node) and names.tag_of(node.value) in SHARDED


def _is_such_a_use(names: Names, node: cst.Attribute) -> bool:
    above = names.parent_of(node)
    if node.attr.value in WRAPPED:
        said = isinstance(above, cst.Attribute) and above.attr.value in _INSTEAD  # of ``net.module.state_dict()``
        return not said and not isinstance(above, (cst.ImportFrom, cst.ImportAlias))
    if node.attr.value == "require_backward_grad_sync":
        return True
    if not isinstance(above, cst.Call) or above.func is not node:
        return node.attr.value == "no_sync"
    if node.attr.value == "no_sync":
        return not above.args  # accelerate's takes the model
    return node.attr.value != "clip_grad_norm_" or not above.args or "param" not in code(above.args[0])  # a function of some module


def _is_known(names: Names, node: cst.Attribute) -> bool:
    value = node.value
    if names.tag_of(value) or names.is_wrapped_later(value) or _is_of_a_library(names.origin_of(value)):
        return True
    if isinstance(value, cst.Call) and _makes_no_wrapped(names, value, node.attr.value):
        return True
    if isinstance(value, cst.Name) and value.value in ("self", "cls"):
        return node.attr.value in WRAPPED or not _may_be_a_model(names, node)
    if isinstance(value, cst.Call) and dotted(value.func) == "super":
        return True
    if node.attr.value in WRAPPED and (_is_target(names, node) or is_asked_for(names, node)):
        return True
    return _OTHER_THINGS.search(_last_word(value)) is not None or _is_never_wrapped(names, value, node.attr.value)


def _is_of_a_library(origin: str) -> bool:
    top = origin.partition(".")[0].partition(":")[0]
    return top in ("torch", "fsdp", "ddp", "zero", "deepspeed") or top in sys.stdlib_module_names


def _last_word(node: cst.BaseExpression) -> str:
    """``optimizer`` of ``self.optimizer``, ``optimizers[0]``, ``state["optimizer"]``."""
    while isinstance(node, cst.Subscript):
        if (text := key_of(node)) is not None:
            return text
        node = node.value
    if isinstance(node, cst.Call):
        return _last_word(node.func)
    return node.attr.value if isinstance(node, cst.Attribute) else dotted(node)


def _may_be_a_model(names: Names, node: cst.Attribute) -> bool:
    """Whether ``self`` may inherit the name from a class of another file."""
    inside = next((each for each in names.ancestors(node) if isinstance(each, cst.ClassDef)), None)
    return inside is not None and bool(inside.bases) and not _defines(inside, node.attr.value)


def _is_target(names: Names, node: cst.CSTNode) -> bool:
    return isinstance(names.parent_of(node), (cst.AssignTarget, cst.AnnAssign, cst.Del))


def _is_never_wrapped(names: Names, node: cst.BaseExpression, method: str) -> bool:
    """Whether every value of a name is made here, by a library or a class of this file that wraps nothing or has its own ``method``."""
    name = dotted(node)
    values = names.values_of(name)
    if not values or any(text.startswith(f"{name}.") for text in names.tags):
        return False
    return all(isinstance(value, cst.Call) and _makes_no_wrapped(names, value, method) for value in values)


def _makes_no_wrapped(names: Names, call: cst.Call, method: str) -> bool:
    made = names.classes.get(dotted(call.func))
    if made is None:
        return _is_of_a_library(names.origin_of(call.func))
    inside = matchers.findall(made, matchers.Name() | matchers.Attribute())
    return _defines(made, method) or not any(":" in names.origin_of(each) for each in inside)


def _defines(made: cst.ClassDef, method: str) -> bool:
    return any(isinstance(each, cst.FunctionDef) and each.name.value == method for each in made.body.body)
