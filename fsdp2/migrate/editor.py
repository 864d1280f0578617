"""The walk over one file: rules rewrite expressions, the editor keeps their notes and puts them above the statement.

A rule gets a node as it was and as it has become (its inner parts are already rewritten) and returns another one. By calling the
editor it adds statements around, comments, imports and findings.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import libcst as cst

from .names import Names
from .report import Finding, Kind
from .syntax_trees import code, comments_in, expression, statement, without

State = TypeVar("State")

_WIDTH = 100
_MARK = "# fsdp2: "
_COMPOUND = (cst.If, cst.For, cst.While, cst.With, cst.Try, cst.FunctionDef, cst.ClassDef, cst.Match)

_STATE_DICT = "torch.distributed.checkpoint.state_dict"
_FROM = {
    "StateDictOptions": _STATE_DICT,
    "get_model_state_dict": _STATE_DICT,
    "get_optimizer_state_dict": _STATE_DICT,
    "set_model_state_dict": _STATE_DICT,
    "set_optimizer_state_dict": _STATE_DICT,
    "DeviceMesh": "torch.distributed.device_mesh",
    "DataLoader": "torch.utils.data",
    "DistributedSampler": "torch.utils.data.distributed",
    "nn": "torch",
}
_MODULES = ("fsdp2.compat", "fsdp2.checkpoint", "fsdp2", "torch.distributed", "torch", "functools", "os")
_NAME = re.compile(r"(?<![\w.\"'])[A-Za-z_][\w.]*")


def imports_of(template: str) -> set[str]:
    """The import lines for the names in a rule's own text: ``fsdp2.accumulate({model})`` needs ``import fsdp2``."""
    lines = set()
    for name in _NAME.findall(template):
        first = name.partition(".")[0]
        if first in _FROM:
            lines.add(f"from {_FROM[first]} import {first}")
        elif first == "dcp":
            lines.add("import torch.distributed.checkpoint as dcp")
        else:
            lines |= {f"import {each}" for each in [each for each in _MODULES if name.startswith(f"{each}.")][:1]}
    return lines


@dataclass(frozen=True)
class Method:
    """A call ``model.method(...)`` of an object whose tag is known.

    old, new: the call as it was, and as it has become
    on:       the object as it was; text: the same as it has become
    """

    old: cst.Call
    new: cst.Call
    on: cst.BaseExpression
    text: str
    tag: str


CallRule = Callable[["Editor", cst.Call, cst.Call], cst.BaseExpression | None]
"""(editor, the call as it was, as it has become) -> what to put there; None: not mine."""
MethodRule = Callable[["Editor", Method], cst.BaseExpression | None]
NodeRule = Callable[["Editor", Any, Any], Any]


@dataclass
class Rules:
    """The rules by the origin of a call, by the object's tag and the method's name, by the type of a node."""

    calls: dict[str, CallRule] = field(default_factory=dict)
    methods: dict[tuple[str, str], MethodRule] = field(default_factory=dict)
    nodes: dict[type[cst.CSTNode], list[NodeRule]] = field(default_factory=dict)

    def add(self, other: Rules) -> None:
        self.calls.update(other.calls)
        self.methods.update(other.methods)
        for kind, rules in other.nodes.items():
            self.nodes.setdefault(kind, []).extend(rules)


@dataclass
class _Around:
    """The statements and comments around one statement."""

    comments: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)  # the user's comments, out of arguments that are gone
    before: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    instead: list[str] | None = None


class Editor(cst.CSTTransformer):
    """Applies ``rules`` to a file. ``refused``: framework, id of the statement, why; if there are any, the result is not to be used."""

    def __init__(self, names: Names, rules: Rules) -> None:
        super().__init__()
        self.names = names
        self.findings: list[Finding] = []
        self.refused: list[tuple[str, int, Finding]] = []
        self.imports: set[str] = set()
        self._states: dict[type[Any], Any] = {}
        self._rules = rules
        self._open: list[cst.CSTNode] = []
        self._around: dict[int, _Around] = {}
        self._gone: dict[int, cst.CSTNode] = {}  # the node is kept, so that its id stays its own

    # --- what rules call ---

    def note(self, node: cst.CSTNode, text: str) -> None:
        """A comment above the statement: the new code does something else. Said once for a statement."""
        self._say(node, Kind.CHANGED, text)

    def compat(self, node: cst.CSTNode, text: str) -> None:
        """This one call stays under its FSDP1 name."""
        self._say(node, Kind.COMPAT, text)

    def left(self, node: cst.CSTNode, text: str) -> None:
        """This is not rewritten; the rest of the file is."""
        self._say(node, Kind.LEFT, f"not migrated: {text}")

    def refuse(self, framework: str, node: cst.CSTNode, text: str, *, on_compat: bool = True) -> None:
        """Nothing of ``framework`` can be rewritten in this file. FSDP1 then goes to fsdp2.compat, if that can do it."""
        finding = Finding(self.names.line_of(node), Kind.COMPAT if framework == "fsdp1" and on_compat else Kind.LEFT, text)
        above = self._statement_around(node)
        if (framework, above, finding) not in self.refused:
            self.refused.append((framework, above, finding))

    def say_refused(self, statement_id: int, finding: Finding) -> None:
        """A comment that says why, above the statement; before the walk."""
        why = "on fsdp2.compat" if finding.kind is Kind.COMPAT else "not migrated"
        self._around.setdefault(statement_id, _Around()).comments.append(f"{why}: {finding.text}")

    def of(self, kind: type[State]) -> State:
        """The facts that a file of rules has found in this text: an instance of the file's own class, made without arguments."""
        return cast(State, self._states.setdefault(kind, kind()))

    def text(self, template: str, **parts: str | cst.CSTNode) -> str:
        """``template`` with its ``{name}`` filled in. The new file imports the modules that the template names."""
        self.imports |= imports_of(template)
        return template.format(**{name: each if isinstance(each, str) else code(each) for name, each in parts.items()})

    def make(self, template: str, **parts: str | cst.CSTNode) -> cst.BaseExpression:
        """``text`` as an expression."""
        return expression(self.text(template, **parts))

    def before(self, text: str, at: cst.CSTNode | None = None) -> None:
        """Put a statement before the one that is open, or before ``at``, one of those around it."""
        self._of(at).before.append(text)

    def after(self, text: str) -> None:
        """Put a statement after the one that is open."""
        self._of(None).after.append(text)

    def instead(self, *texts: str) -> None:
        """Put these statements (or none) where the open one stood."""
        self._of(None).instead = list(texts)

    def keep_comments(self, comments: Sequence[str]) -> None:
        """Move the user's comments in dropped code above the statement."""
        self._of(None).kept.extend(comments)

    @property
    def statement(self) -> cst.CSTNode | None:
        """The innermost open statement."""
        return self._open[-1] if self._open else None

    def _statement_around(self, node: cst.CSTNode) -> int:
        """The id of the innermost statement around ``node``."""
        above = (each for each in (node, *self.names.ancestors(node)) if isinstance(each, (cst.SimpleStatementLine, *_COMPOUND)))
        return id(next(above, None))

    def _say(self, node: cst.CSTNode, kind: Kind, text: str) -> None:
        finding = Finding(self.names.line_of(node), kind, text)
        if finding not in self.findings:
            self.findings.append(finding)
            comments = self._around.setdefault(self._statement_around(node), _Around()).comments
            if text not in comments:
                comments.append(text)

    def _of(self, at: cst.CSTNode | None) -> _Around:
        return self._around.setdefault(id(at if at is not None else self.statement), _Around())

    # --- the walk ---

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, (cst.Import, cst.ImportFrom)):
            return False
        if isinstance(node, (cst.SimpleStatementLine, *_COMPOUND)):
            self._open.append(node)
        return True

    def on_leave(self, original_node: cst.CSTNode, updated_node: Any) -> Any:
        result = updated_node
        if isinstance(original_node, cst.Call):
            result = self._call(original_node, result)
        for rule in self._rules.nodes.get(type(original_node), ()):
            result = rule(self, original_node, result)
        if self._gone and isinstance(result, (cst.IndentedBlock, cst.Module)):
            result = without(result, lambda each: id(each) in self._gone, lambda line: True)
        if isinstance(original_node, (cst.SimpleStatementLine, *_COMPOUND)):
            result = self._surround(original_node, result)
            self._open.pop()
        return result

    def _call(self, old: cst.Call, new: cst.Call) -> cst.BaseExpression:
        made_by = self.names.origin_of(old.func)
        found: cst.BaseExpression | None = None
        if not made_by and isinstance(old.func, cst.Attribute) and isinstance(new.func, cst.Attribute):
            tag = self.names.tag_of(old.func.value)
            if (method := self._rules.methods.get((tag, old.func.attr.value))) is not None:
                found = method(self, Method(old, new, old.func.value, code(new.func.value), tag))
                return new if found is None else found
        if (rule := self._rules.calls.get(made_by)) is not None:
            found = rule(self, old, new)
        return new if found is None else found

    def _surround(self, old: cst.CSTNode, new: Any) -> Any:
        around = self._around.pop(id(old), None)
        if around is None:
            return new
        body = list(new) if isinstance(new, cst.FlattenSentinel) else [new]
        blank = body[0].leading_lines
        if around.instead is not None:
            body = [statement(text) for text in around.instead]
            blank = cast(cst.SimpleStatementLine, old).leading_lines
        gone = not body
        if gone:  # comments of dropped code wait for the next statement of the block
            body = [cst.SimpleStatementLine([cst.Pass()])]
        body = [*(statement(text) for text in around.before), *body, *(statement(text) for text in around.after)]
        if isinstance(old, cst.SimpleStatementLine):  # comments in dropped code
            written = "".join(code(each) for each in body)
            around.kept += [comment for comment in comments_in(old) if comment not in written and comment not in around.kept]
        present = {line.comment.value for line in blank if line.comment is not None}
        lines = [line for text in around.comments for line in _comment_lines(text)]
        fresh = [cst.EmptyLine(comment=cst.Comment(line)) for line in [*around.kept, *lines] if line not in present]
        body = [each.with_changes(leading_lines=()) if each.leading_lines is blank else each for each in body]
        body[0] = body[0].with_changes(leading_lines=[*blank, *fresh])
        if gone:
            self._gone[id(body[0])] = body[0]
        return cst.FlattenSentinel(body)


def _comment_lines(text: str) -> list[str]:
    return textwrap.wrap(_MARK + text, _WIDTH, subsequent_indent="#   ", break_long_words=False, break_on_hyphens=False)


def enclosing_call(names: Names, node: cst.CSTNode) -> cst.Call | None:
    """The call that has ``node`` as an argument's value."""
    parent = names.parent_of(node)
    above = names.parent_of(parent) if isinstance(parent, cst.Arg) else None
    return above if isinstance(above, cst.Call) else None
