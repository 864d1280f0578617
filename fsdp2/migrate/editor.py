"""The walk over one file: rules rewrite expressions, the editor keeps what they say about them and puts it above the statement.

A rule gets a node as it was and as it has become (its inner parts are already rewritten) and returns another one. By calling the
editor it adds statements around, comments, imports and findings.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import libcst as cst

from .names import WRAPPED, Names
from .report import Finding, Kind
from .syntax_trees import code, comments_in, dotted, expression, statement

CallRule = Callable[["Editor", cst.Call, cst.Call], cst.BaseExpression | None]
"""(editor, the call as it was, as it has become) -> what to put there; None: not mine."""
NodeRule = Callable[["Editor", Any, Any], Any]

State = TypeVar("State")

_WIDTH = 100
_MARK = "# fsdp2: "
_COMPOUND = (cst.If, cst.For, cst.While, cst.With, cst.Try, cst.FunctionDef, cst.ClassDef, cst.Match)


@dataclass
class Rules:
    """The rules by the origin of a call, by the name of a method, by the type of a node; ``on_with`` for context managers."""

    calls: dict[str, CallRule] = field(default_factory=dict)
    methods: dict[str, CallRule] = field(default_factory=dict)
    nodes: dict[type[cst.CSTNode], list[NodeRule]] = field(default_factory=dict)
    enter: dict[type[cst.CSTNode], list[Callable[[Editor, Any], None]]] = field(default_factory=dict)
    leave: dict[type[cst.CSTNode], list[Callable[[Editor, Any], None]]] = field(default_factory=dict)

    def add(self, other: Rules) -> None:
        self.calls.update(other.calls)
        for name, rule in other.methods.items():
            self.methods[name] = _either(self.methods[name], rule) if name in self.methods else rule
        for mine, theirs in ((self.nodes, other.nodes), (self.enter, other.enter), (self.leave, other.leave)):
            for kind, rules in theirs.items():
                cast(dict[Any, list[Any]], mine).setdefault(kind, []).extend(rules)


def _either(first: CallRule, second: CallRule) -> CallRule:
    def rule(editor: Editor, old: cst.Call, new: cst.Call) -> cst.BaseExpression | None:
        found = first(editor, old, new)
        return second(editor, old, new) if found is None else found

    return rule


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
        """A comment above the statement: something is otherwise than it was. Said once for a statement."""
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

    def _statement_around(self, node: cst.CSTNode) -> int:
        """The id of the innermost statement around ``node``."""
        above: cst.CSTNode | None = node
        while above is not None and not isinstance(above, (cst.SimpleStatementLine, *_COMPOUND)):
            above = self.names.parent_of(above)
        return id(above)

    def of(self, kind: type[State]) -> State:
        """What a file of rules has found out about this text: an instance of the file's own class, which it makes without arguments."""
        if kind not in self._states:
            self._states[kind] = kind()
        found: State = self._states[kind]
        return found

    def needs(self, import_line: str) -> None:
        """The new text uses what this line imports."""
        self.imports.add(import_line)

    def make(self, text: str, *import_lines: str) -> cst.BaseExpression:
        """An expression out of text."""
        for line in import_lines:
            self.needs(line)
        return expression(text)

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

    @property
    def statements(self) -> Sequence[cst.CSTNode]:
        """The open statements, outermost first."""
        return self._open

    def _say(self, node: cst.CSTNode, kind: Kind, text: str) -> None:
        finding = Finding(self.names.line_of(node), kind, text)
        if finding not in self.findings:
            self.findings.append(finding)
            comments = self._around.setdefault(self._statement_around(node), _Around()).comments
            if text not in comments:
                comments.append(text)

    def _of(self, at: cst.CSTNode | None) -> _Around:
        target = at if at is not None else self.statement
        return self._around.setdefault(id(target), _Around())

    # --- the walk ---

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, (cst.Import, cst.ImportFrom)):
            return False
        if isinstance(node, (cst.SimpleStatementLine, *_COMPOUND)):
            self._open.append(node)
        for hook in self._rules.enter.get(type(node), ()):
            hook(self, node)
        return super().on_visit(node)

    def on_leave(self, original_node: cst.CSTNode, updated_node: Any) -> Any:
        result = super().on_leave(original_node, updated_node)
        if isinstance(original_node, cst.Call) and isinstance(result, cst.Call):
            result = self._call(original_node, result)
        for rule in self._rules.nodes.get(type(original_node), ()):
            if isinstance(result, cst.CSTNode):
                result = rule(self, original_node, result)
        for hook in self._rules.leave.get(type(original_node), ()):
            hook(self, original_node)
        if self._gone and isinstance(result, (cst.IndentedBlock, cst.Module)):
            result = self._block(result)
        if isinstance(original_node, (cst.SimpleStatementLine, *_COMPOUND)):
            result = self._surround(original_node, result)
            self._open.pop()
        return result

    def _call(self, old: cst.Call, new: cst.Call) -> cst.BaseExpression:
        made_by = self.names.origin_of(old.func)
        if not made_by and isinstance(old.func, cst.Attribute):
            rule = self._rules.methods.get(old.func.attr.value)
        else:
            rule = self._rules.calls.get(made_by)
        found = rule(self, old, new) if rule is not None else None
        return new if found is None else found

    def _surround(self, old: cst.CSTNode, new: Any) -> Any:
        around = self._around.pop(id(old), None)
        if around is None:
            return new
        if isinstance(new, cst.FlattenSentinel):
            body = list(new)
        else:
            body = [new]
        gone = False
        blank = body[0].leading_lines if body else ()
        if around.instead is not None:
            leading = cast(cst.SimpleStatementLine, old).leading_lines
            body = [statement(text) for text in around.instead]
            blank = leading
        if not body:  # comments of dropped code wait for the next statement of the block
            body = [cst.SimpleStatementLine([cst.Pass()])]
            gone = True
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

    def _block(self, block: Any) -> Any:
        """The block without its dropped statements; notes on those go to the next statement, or to the end of the block."""
        body: list[Any] = []
        pending: list[cst.EmptyLine] = []
        for each in block.body:
            if id(each) in self._gone:
                pending += each.leading_lines
            elif pending:
                body.append(each.with_changes(leading_lines=[*pending, *each.leading_lines]))
                pending = []
            else:
                body.append(each)
        if isinstance(block, cst.IndentedBlock) and not body:
            body, pending = [cst.SimpleStatementLine([cst.Pass()], leading_lines=pending)], []
        return block.with_changes(body=body, footer=[*pending, *block.footer])


def _comment_lines(text: str) -> list[str]:
    return textwrap.wrap(_MARK + text, _WIDTH, subsequent_indent="#   ", break_long_words=False, break_on_hyphens=False)


def enclosing_call(names: Names, node: cst.CSTNode) -> cst.Call | None:
    """The call that has ``node`` as an argument's value."""
    parent = names.parent_of(node)
    above = names.parent_of(parent) if isinstance(parent, cst.Arg) else None
    return above if isinstance(above, cst.Call) else None


def receiver(call: cst.Call) -> str:
    """``self.model`` of ``self.model.no_sync()``; the wrapped module's ``.module`` is left out."""
    if not isinstance(call.func, cst.Attribute):
        return ""
    text = dotted(call.func.value)
    for name in WRAPPED:
        text = text.removesuffix(f".{name}")
    return text
