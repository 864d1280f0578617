"""Small helpers on libcst's trees: text of a node, a node of a text, arguments by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import libcst as cst
from libcst import matchers

_EMPTY = cst.Module([])


def code(node: cst.CSTNode) -> str:
    """The source of ``node``, as written."""
    return _EMPTY.code_for_node(node)


def expression(text: str) -> cst.BaseExpression:
    return cst.parse_expression(text)


def statement(text: str) -> cst.SimpleStatementLine | cst.BaseCompoundStatement:
    return cst.parse_statement(text)


def dotted(node: cst.CSTNode | None) -> str:
    """``self.model`` for that chain of names; "" for other expressions. The text of a subscript stays."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr.value}" if base else ""
    if isinstance(node, cst.Subscript):
        return code(node) if dotted(node.value) else ""
    return ""


def last_name(node: cst.CSTNode) -> str:
    """``no_sync`` of ``things["net"].no_sync``, ``save`` of ``save``."""
    return node.attr.value if isinstance(node, cst.Attribute) else dotted(node)


def string_of(node: cst.BaseExpression | None) -> str | None:
    """The value of a string literal."""
    value = node.evaluated_value if isinstance(node, (cst.SimpleString, cst.ConcatenatedString)) else None
    return value if isinstance(value, str) else None


def key_of(node: cst.Subscript) -> str | None:
    """``net`` of ``things["net"]``; None if the index is no string literal."""
    index = node.slice[0].slice
    return string_of(index.value) if isinstance(index, cst.Index) else None


def is_none(node: cst.CSTNode | None) -> bool:
    return isinstance(node, cst.Name) and node.value == "None"


def literal(node: cst.CSTNode | None) -> str:
    """The text of True, False, None, a number or a string; else ""."""
    if isinstance(node, cst.Name):
        return node.value if node.value in ("True", "False", "None") else ""
    return code(node) if isinstance(node, (cst.Integer, cst.Float, cst.SimpleString)) else ""


@dataclass
class Arguments:
    """The arguments of a call by the names of a signature; what cannot be named is in ``stars`` and ``extra``."""

    by_name: dict[str, cst.Arg] = field(default_factory=dict)
    stars: list[cst.Arg] = field(default_factory=list)  # **kwargs
    extra: list[cst.Arg] = field(default_factory=list)  # *args, too many positional ones

    def value(self, name: str) -> cst.BaseExpression | None:
        return self.by_name[name].value if name in self.by_name else None

    def text(self, name: str, default: str = "") -> str:
        found = self.value(name)
        return default if found is None else code(found)


def arguments(args: Sequence[cst.Arg], signature: Sequence[str]) -> Arguments:
    found = Arguments()
    for index, arg in enumerate(args):
        if arg.star == "**":
            found.stars.append(arg)
        elif arg.keyword is not None:
            found.by_name[arg.keyword.value] = arg
        elif arg.star or index >= len(signature):
            found.extra.append(arg)
        else:
            found.by_name[signature[index]] = arg
    return found


def parameters(function: cst.FunctionDef | cst.Lambda) -> list[cst.Param]:
    """The arguments with a name, positional or not."""
    given = function.params
    return [*given.posonly_params, *given.params, *given.kwonly_params]


def keyword(name: str, value: cst.BaseExpression, like: cst.Arg | None = None) -> cst.Arg:
    """``name=value``, laid out as the argument ``like``."""
    equal = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
    if like is None:
        return cst.Arg(value, keyword=cst.Name(name), equal=equal)
    if like.keyword is not None and isinstance(like.equal, cst.AssignEqual):
        equal = like.equal
    return like.with_changes(keyword=cst.Name(name), equal=equal, value=value)


def with_args(call: cst.Call, args: Sequence[cst.Arg]) -> cst.Call:
    """``call`` with other arguments; the last one ends as the last one did, so that the closing parenthesis stays where it is."""
    if not args:
        flat = cst.SimpleWhitespace("")
        return call.with_changes(args=[], whitespace_before_args=flat)
    listed = list(args)
    if call.args and call.args[-1] is not listed[-1]:
        last = call.args[-1]
        comma = last.comma
        if isinstance(comma, cst.Comma):
            comma = comma.with_changes(whitespace_after=without_comment(comma.whitespace_after))
        for index, arg in enumerate(listed[:-1]):
            if arg.comma is cst.MaybeSentinel.DEFAULT or arg is last:
                between = cst.Comma(whitespace_after=_between(call))
                listed[index] = arg.with_changes(comma=between, whitespace_after_arg=cst.SimpleWhitespace(""))
        listed[-1] = listed[-1].with_changes(comma=comma, whitespace_after_arg=without_comment(last.whitespace_after_arg))
    return call.with_changes(args=listed)


def _between(call: cst.Call) -> cst.BaseParenthesizableWhitespace:
    """The separator between two arguments: a new line if they have one already."""
    for arg in call.args[:-1]:
        if isinstance(arg.comma, cst.Comma) and isinstance(arg.comma.whitespace_after, cst.ParenthesizedWhitespace):
            return without_comment(arg.comma.whitespace_after)
    before = call.whitespace_before_args
    return without_comment(before) if isinstance(before, cst.ParenthesizedWhitespace) else cst.SimpleWhitespace(" ")


def without_comment(space: cst.BaseParenthesizableWhitespace) -> cst.BaseParenthesizableWhitespace:
    """A new line and its indent, without the comments before them."""
    if not isinstance(space, cst.ParenthesizedWhitespace):
        return space
    first = space.first_line.with_changes(comment=None, whitespace=cst.SimpleWhitespace(""))
    return space.with_changes(first_line=first, empty_lines=[])


def comments_in(node: cst.CSTNode) -> list[str]:
    return [cst.ensure_type(each, cst.Comment).value for each in matchers.findall(node, matchers.Comment())]


def without(block: Any, is_gone: Callable[[cst.CSTNode], bool], keeps: Callable[[cst.EmptyLine], bool]) -> Any:
    """A module or block without some of its statements. Lines above these for which ``keeps`` holds go to the next statement, or to
    the end of the block."""
    body: list[Any] = []
    pending: list[cst.EmptyLine] = []
    for each in block.body:
        if is_gone(each):
            pending += filter(keeps, each.leading_lines)
        elif pending:
            body.append(each.with_changes(leading_lines=[*pending, *each.leading_lines]))
            pending = []
        else:
            body.append(each)
    if not body and isinstance(block, cst.IndentedBlock):
        body, pending = [cst.SimpleStatementLine([cst.Pass()], leading_lines=pending)], []
    return block.with_changes(body=body, footer=[*pending, *block.footer])
