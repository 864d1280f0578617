"""The meaning of names in one file: the import of each, and which hold a sharded model, an optimizer, a policy.

Values are followed by the text of their names, through assignments, the arguments and results of functions of the same file, and
attributes; so that in ``def save(net): ...`` and ``save(self.model)`` the name ``net`` is known. Two things of the same name in one
file are taken for one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import libcst as cst
from libcst.metadata import (
    MetadataWrapper,
    ParentNodeProvider,
    PositionProvider,
    QualifiedNameProvider,
    QualifiedNameSource,
)

from .origins import FSDP1_NAMES, STATIC, STATIC_METHODS, is_framework_module, origin, star_names
from .syntax_trees import Arguments, arguments, code, dotted, last_name, parameters

SHARDED = ("fsdp1", "ddp", "deepspeed")
"""Tags of models."""

WRAPPED = ("module", "_fsdp_wrapped_module")
"""Attributes by which a wrapper has the module inside."""

VALUES = ("strategy", "precision", "policy", "offload")
"""Tags of arguments: of values, and of dicts of them."""

_MAKES = {
    "fsdp:FullyShardedDataParallel": "fsdp1",
    "fsdp:wrap": "fsdp1",
    "ddp:DistributedDataParallel": "ddp",
    "zero:ZeroRedundancyOptimizer": "optimizer",
    "fsdp:MixedPrecision": "precision",
    "fsdp:CPUOffload": "offload",
    "fsdp:ModuleWrapPolicy": "policy",
    "fsdp:CustomPolicy": "policy",
    "fsdp:size_based_auto_wrap_policy": "policy",
    "fsdp:transformer_auto_wrap_policy": "policy",
    "fsdp:lambda_auto_wrap_policy": "policy",
    "fsdp:always_wrap_policy": "policy",
}
_MAY_TAKE_OTHERS = ("fsdp_modules", "optim_state_dict_to_load")
"""Static methods of FSDP1 whose first argument may be something else than a sharded model: any module, or in torch 2.0 a state."""

_SAME_MODEL = frozenset({"to", "cuda", "cpu", "train", "eval", "compile"})

Function = cst.FunctionDef | cst.Lambda | None


class Reading(cst.CSTVisitor):
    """What stands in the file.

    assigned: target, value, and the function around each assignment
    returns:  the results of functions, by their names
    """

    METADATA_DEPENDENCIES = (QualifiedNameProvider, PositionProvider, ParentNodeProvider)

    def __init__(self, wrapper: MetadataWrapper) -> None:
        super().__init__()
        self.assigned: list[tuple[cst.BaseExpression, cst.BaseExpression, Function]] = []
        self.functions: dict[str, list[cst.FunctionDef]] = {}
        self.classes: dict[str, cst.ClassDef] = {}
        self.calls: list[cst.Call] = []
        self.attributes: list[cst.Attribute] = []
        self.returns: dict[str, list[cst.BaseExpression]] = {}
        self.star_lines: dict[str, int] = {}
        self.uses: dict[str, list[cst.Name]] = {}
        self.origins: dict[int, str] = {}
        self.imports_framework = False
        self._functions: list[cst.FunctionDef] = []  # around the node that is being read
        self._positions: Mapping[cst.CSTNode, Any] = wrapper.resolve(PositionProvider)
        wrapper.visit(self)

    def origin_of(self, node: cst.CSTNode | None) -> str:
        return self.origins.get(id(node), "")

    def line_of(self, node: cst.CSTNode) -> int:
        position = self._positions.get(node)
        return int(position.start.line) if position is not None else 1

    def visit_Name(self, node: cst.Name) -> None:  # noqa: N802 (libcst's names)
        self._remember(node)
        self.uses.setdefault(node.value, []).append(node)

    def visit_Attribute(self, node: cst.Attribute) -> None:  # noqa: N802
        self._remember(node)
        self.attributes.append(node)

    def visit_ImportFrom(self, node: cst.ImportFrom) -> None:  # noqa: N802
        self.imports_framework |= is_framework_module(dotted(node.module))
        if isinstance(node.names, cst.ImportStar) and node.module is not None:
            self.star_lines[dotted(node.module)] = self.line_of(node)

    def visit_Assign(self, node: cst.Assign) -> None:  # noqa: N802
        for target in node.targets:
            self._assign(target.target, node.value)

    def visit_AnnAssign(self, node: cst.AnnAssign) -> None:  # noqa: N802
        if node.value is not None:
            self._assign(node.target, node.value)

    def visit_NamedExpr(self, node: cst.NamedExpr) -> None:  # noqa: N802
        self._assign(node.target, node.value)

    def visit_Param(self, node: cst.Param) -> None:  # noqa: N802
        if node.default is not None:
            self._assign(node.name, node.default)

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:  # noqa: N802
        self._functions.append(node)
        self.functions.setdefault(node.name.value, []).append(node)

    def leave_FunctionDef(self, original_node: cst.FunctionDef) -> None:  # noqa: N802
        self._functions.pop()

    def visit_ClassDef(self, node: cst.ClassDef) -> None:  # noqa: N802
        self.classes[node.name.value] = node

    def visit_Return(self, node: cst.Return) -> None:  # noqa: N802
        if self._functions and node.value is not None:
            self.returns.setdefault(self._functions[-1].name.value, []).append(node.value)

    def visit_Call(self, node: cst.Call) -> None:  # noqa: N802
        self.calls.append(node)

    def _assign(self, target: cst.BaseExpression, value: cst.BaseExpression) -> None:
        if isinstance(target, (cst.Tuple, cst.List)) and isinstance(value, cst.Tuple):
            for left, right in zip(target.elements, value.elements, strict=False):
                self._assign(left.value, right.value)
            return
        self.assigned.append((target, value, self._functions[-1] if self._functions else None))

    def _remember(self, node: cst.Name | cst.Attribute) -> None:
        found = self.get_metadata(QualifiedNameProvider, node, set())
        imported = sorted(each.name for each in found if each.source is QualifiedNameSource.IMPORT)
        if imported:
            self.origins[id(node)] = origin(imported[0])
        elif not found:
            self.origins[id(node)] = self._from_star(node)

    def _from_star(self, node: cst.Name | cst.Attribute) -> str:
        text = dotted(node)
        for module in self.star_lines:
            if text.split(".")[0] in star_names(module):
                return origin(f"{module}.{text}")
        return ""


class Names(Reading):
    """What follows from it: ``origin_of``, ``tag_of``, ``line_of``, ``parent_of`` answer for the nodes of the file.

    off: frameworks that stay as they are: nothing has their tags
    """

    def __init__(self, wrapper: MetadataWrapper) -> None:
        super().__init__(wrapper)
        self.tags: dict[str, str] = {}
        self.off: set[str] = set()
        self._returned: dict[str, str] = {}  # tags of what functions return, as far as is known
        self._wraps: dict[str, list[cst.Call]] = {}  # by the text of what they wrap
        self._parents: Mapping[cst.CSTNode, cst.CSTNode] = wrapper.resolve(ParentNodeProvider)
        self._passed = [each for call in self.calls for each in self._bindings(call)]
        self._conclude()

    # --- answers ---

    def parent_of(self, node: cst.CSTNode) -> cst.CSTNode | None:
        return self._parents.get(node)

    def ancestors(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """The nodes around ``node``, from the inside out."""
        above = self.parent_of(node)
        while above is not None:
            yield above
            above = self.parent_of(above)

    def function_of(self, node: cst.CSTNode) -> Function:
        """The innermost function around ``node``."""
        return next((each for each in self.ancestors(node) if isinstance(each, (cst.FunctionDef, cst.Lambda))), None)

    def uses_frameworks(self) -> bool:
        return self.imports_framework or any(":" in each for each in self.origins.values())

    def frameworks(self) -> set[str]:
        """The frameworks among fsdp1, ddp, deepspeed whose names this file uses."""
        found = {each.partition(":")[::2] for each in self.origins.values()}
        known = {"ddp": "ddp", "zero": "ddp", "join": "ddp", "deepspeed": "deepspeed"}
        used = {known[kind] for kind, name in found if kind in known and name}
        return used | {"fsdp1" for kind, name in found if kind == "fsdp" and name.partition(".")[0] in FSDP1_NAMES}

    @property
    def rewritten(self) -> set[str]:
        """Those of ``frameworks`` that no rule has refused."""
        return self.frameworks() - self.off

    def tag_of(self, node: cst.CSTNode | None) -> str:
        """The kind of value of an expression: one of SHARDED, "optimizer", "strategy", "precision", ...; "" if unknown."""
        found = self._tag(node)
        return "" if found in self.off else found

    def _tag(self, node: cst.CSTNode | None) -> str:
        if isinstance(node, (cst.Name, cst.Attribute, cst.Subscript)):
            return self._tag_of_name(node)
        if isinstance(node, cst.Call):
            return self._tag_of_call(node)
        if isinstance(node, cst.IfExp):
            return self.tag_of(node.body) or self.tag_of(node.orelse)
        if isinstance(node, cst.BooleanOperation):
            return self.tag_of(node.left) or self.tag_of(node.right)
        if isinstance(node, cst.Dict):
            return next((tag for each in node.elements if (tag := self.tag_of(each.value)) in VALUES), "")
        if isinstance(node, cst.NamedExpr):
            return self.tag_of(node.value)
        return ""

    def model(self, tags: Sequence[str] = SHARDED) -> list[str]:
        """Names of sharded models, as they stand in the text."""
        return [text for text, tag in self.tags.items() if tag in tags and tag not in self.off and not text.startswith("*.")]

    def values_of(self, name: str) -> list[cst.BaseExpression]:
        """Every expression that is assigned to this name."""
        return [value for target, value, _ in self.assigned if dotted(target) == name]

    def method_of(self, call: cst.Call, tag: str) -> str:
        """``step`` of ``engine.step()``, if ``engine`` has this tag; "" for other calls."""
        return call.func.attr.value if isinstance(call.func, cst.Attribute) and self.tag_of(call.func.value) == tag else ""

    def only_value(self, node: cst.BaseExpression | None) -> cst.BaseExpression | None:
        """The value of a name that is assigned to once; ``node`` itself if it is no such name."""
        values = self.values_of(dotted(node)) if isinstance(node, (cst.Name, cst.Attribute)) else []
        return values[0] if len(values) == 1 else node

    def assigned_to(self, value: cst.CSTNode) -> cst.BaseExpression | None:
        """The target of the assignment whose value is ``value``, if it has one target."""
        parent = self.parent_of(value)
        return parent.targets[0].target if isinstance(parent, cst.Assign) and len(parent.targets) == 1 else None

    def passed_to(self, function: cst.FunctionDef, param: str) -> list[cst.BaseExpression]:
        """The arguments that the calls of this file pass for a parameter."""
        return [value for of, target, value in self._passed if of is function and target.value == param]

    def passed_or_assigned(self, node: cst.Name | cst.Attribute) -> list[cst.BaseExpression]:
        """The ``values_of`` of ``node``, and of arguments passed for it, if it is a parameter of the function around it."""
        values = [value for value in self.values_of(dotted(node)) if value is not node]
        function = self.function_of(node)
        if isinstance(node, cst.Name) and isinstance(function, cst.FunctionDef):
            values += self.passed_to(function, node.value)
        return values

    def may_be(self, node: cst.BaseExpression, depth: int = 0) -> Iterator[cst.BaseExpression]:
        """The expressions of this file that ``node`` may stand for: both sides of a condition, the values of a name."""
        values: list[cst.BaseExpression] = []
        if isinstance(node, cst.IfExp):
            values = [node.body, node.orelse]
        elif isinstance(node, (cst.Name, cst.Attribute)) and depth < 5:
            values = self.passed_or_assigned(node)
        for value in values:
            yield from self.may_be(value, depth + 1)
        if not values:
            yield node

    def is_only_read_by(self, name: str, callees: Sequence[str]) -> bool:
        """Whether every use of ``name``, but assignments to it, is as an argument of one of these."""
        for node in self.uses.get(name, ()):
            parent = self.parent_of(node)
            call = self.parent_of(parent) if isinstance(parent, cst.Arg) else None
            if isinstance(parent, (cst.AssignTarget, cst.AnnAssign)) and getattr(parent, "value", None) is not node:
                continue
            if not isinstance(call, cst.Call) or self.origin_of(call.func) not in callees:
                return False
        return True

    # --- concluding ---

    def _tag_of_name(self, node: cst.Name | cst.Attribute | cst.Subscript) -> str:
        found = self.origin_of(node)
        if found.startswith("fsdp:ShardingStrategy."):
            return "strategy"
        if isinstance(node, cst.Subscript) and self.origin_of(node.value) == "fsdp:ShardingStrategy":
            return "strategy"
        if isinstance(node, cst.Subscript) and (tag := self.tag_of(node.value)) in VALUES:
            return tag
        if found in _MAKES and _MAKES[found] == "policy":
            return "policy"  # a policy function, passed as it is
        text = dotted(node)
        if text in self.tags:
            return self.tags[text]
        if isinstance(node, cst.Attribute):
            if node.attr.value in WRAPPED:
                return self.tag_of(node.value)
            if f"*.{node.attr.value}" in self.tags:
                return self.tags[f"*.{node.attr.value}"]
        return self.wrapped_in_place(node)

    def wrapped_in_place(self, node: cst.CSTNode | None) -> str:
        """The tag of ``net`` after ``model = DDP(net)``: sharding changes a module in place, so from there on it is the model."""
        text = dotted(node)
        if node is None or not text or text in self.tags:
            return ""
        inside = self.function_of(node)
        local = inside is not None and text in {each.name.value for each in parameters(inside)}
        for call in self._wraps.get(text, ()):
            function = self.function_of(call)
            before = function is inside and self.line_of(call) < self.line_of(node)
            elsewhere = function is not inside and (isinstance(node, cst.Attribute) or not (function or local))
            if before or elsewhere:
                return _MAKES[self.origin_of(call.func)]
        return ""

    def is_wrapped_later(self, node: cst.CSTNode) -> bool:
        """Whether ``node`` becomes a model further down in the same function."""
        wraps = self._wraps.get(dotted(node), ())
        return any(self.function_of(each) is self.function_of(node) and self.line_of(each) >= self.line_of(node) for each in wraps)

    def _tag_of_call(self, node: cst.Call) -> str:
        made_by = self.origin_of(node.func)
        if made_by in _MAKES:
            return _MAKES[made_by]
        if made_by == "functools.partial" and node.args:
            return self.tag_of(node.args[0].value) or self._made_by(node.args[0].value)
        if code(node.func) == "getattr":
            return "strategy" if node.args and self.origin_of(node.args[0].value) == "fsdp:ShardingStrategy" else ""
        if made_by.startswith(("torch.optim.", "deepspeed:ops.")) and "lr_scheduler" not in made_by:
            return "optimizer"
        if made_by == "torch.compile" and node.args:
            return self.tag_of(node.args[0].value)
        if isinstance(node.func, cst.Attribute):
            on = self.tag_of(node.func.value)
            if on in SHARDED and node.func.attr.value in _SAME_MODEL:
                return on
            if on in VALUES and node.func.attr.value == "get":
                return on
        name = last_name(node.func)
        if name in self.functions:
            if name not in self._returned:
                self._returned[name] = ""  # for a function that returns its own result
                self._returned[name] = next((tag for value in self.returns.get(name, ()) if (tag := self._tag(value))), "")
            return self._returned[name]
        if any(isinstance(each, cst.Call) and self.origin_of(each.func) == "functools.partial" for each in self.values_of(name)):
            return self.tag_of(node.func)  # the partial has the tag of its results
        return ""

    def _conclude(self) -> None:
        """Follow values until nothing new is known."""
        for call in self.calls:
            if self._made_by(call.func) in SHARDED:
                self._wraps.setdefault(dotted(arguments(call.args, ("module",)).value("module")), []).append(call)
        for _ in range(20):
            before = len(self.tags)
            self._returned.clear()
            for target, value, _function in self.assigned:
                self._give(target, self.tag_of(value))
                self._unpack(target, value)
            for _function, param, value in self._passed:
                self._give(param, self.tag_of(value))
            for call in self.calls:
                self._follow(call)
            if len(self.tags) == before:
                return

    def _give(self, target: cst.BaseExpression | None, tag: str) -> None:
        text = dotted(target)
        if text and tag:
            self.tags.setdefault(text, tag)
            if isinstance(target, cst.Attribute) and target.attr.value != "module":
                self.tags.setdefault(f"*.{target.attr.value}", tag)

    def _unpack(self, target: cst.BaseExpression, value: cst.BaseExpression) -> None:
        """``model, optimizer = make()`` and ``engine, optimizer, loader, scheduler = deepspeed.initialize(...)``."""
        if not isinstance(value, cst.Call) or not isinstance(target, cst.Tuple):
            return
        if self.origin_of(value.func) == "deepspeed:initialize":
            for element, tag in zip(target.elements, ("deepspeed", "optimizer"), strict=False):
                self._give(element.value, tag)
        name = last_name(value.func)
        for returned in self.returns.get(name, ()):
            if isinstance(returned, cst.Tuple):
                for element, result in zip(target.elements, returned.elements, strict=False):
                    self._give(element.value, self.tag_of(result.value))

    def static_call(self, call: cst.Call) -> tuple[str, Arguments]:
        """The static method of FSDP1 that is called, and its arguments; "" and nothing for another function.

        In torch 2.0, ``optim_state_dict_to_load`` took the state before the model and the optimizer.
        """
        function = self.origin_of(call.func)
        name = function.removeprefix(STATIC) if function.startswith(STATIC) else ""
        if name not in STATIC_METHODS:
            return "", Arguments()
        signature = STATIC_METHODS[name]
        if name == "optim_state_dict_to_load" and not any(arg.keyword is not None for arg in call.args[:3]):
            tags = [self.tag_of(arg.value) for arg in call.args[:3]]
            if tags[1:2] in ([each] for each in SHARDED) or tags[2:3] == ["optimizer"]:
                signature = ("optim_state_dict", "model", "optim")
        return name, arguments(call.args, signature)

    def _follow(self, call: cst.Call) -> None:
        """Give names the tags that a call of FSDP1, ``isinstance``, or of a dataclass of this file shows."""
        method, given = self.static_call(call)
        if method:
            first = STATIC_METHODS[method][0]
            model = given.value(first) if first in ("module", "model") and method not in _MAY_TAKE_OTHERS else None
            if dotted(model) != "self":
                self._give(model, "fsdp1")
            self._give(given.value("optim"), "optimizer")
        if dotted(call.func) == "isinstance" and len(call.args) > 1:
            kinds = call.args[1].value
            each_kind = [each.value for each in kinds.elements] if isinstance(kinds, cst.Tuple) else [kinds]
            self._give(call.args[0].value, next((tag for each in each_kind if (tag := self._made_by(each)) in SHARDED), ""))
        made = self.classes.get(last_name(call.func))
        if made is not None and not _constructors(made):
            for arg in call.args:  # Config(strategy=...) is read as config.strategy
                if arg.keyword is not None and (tag := self.tag_of(arg.value)):
                    self.tags.setdefault(f"*.{arg.keyword.value}", tag)

    def _made_by(self, node: cst.CSTNode | None) -> str:
        return _MAKES.get(self.origin_of(node), "")

    def _bindings(self, call: cst.Call) -> Iterator[tuple[cst.FunctionDef, cst.Name, cst.BaseExpression]]:
        """The parameters of functions of this file that a call passes arguments for."""
        name = last_name(call.func)
        functions = _constructors(self.classes[name]) if name in self.classes else self.functions.get(name, ())
        for function in functions:
            positional = [*function.params.posonly_params, *function.params.params]
            if positional and positional[0].name.value in ("self", "cls"):
                positional = positional[1:]
            named = {param.name.value: param.name for param in parameters(function)}
            for index, arg in enumerate(call.args):
                if arg.keyword is not None:
                    target = named.get(arg.keyword.value)
                else:
                    target = positional[index].name if index < len(positional) else None
                if target is not None and not arg.star:
                    yield function, target, arg.value


def _constructors(made: cst.ClassDef) -> list[cst.FunctionDef]:
    return [each for each in made.body.body if isinstance(each, cst.FunctionDef) and each.name.value == "__init__"]
