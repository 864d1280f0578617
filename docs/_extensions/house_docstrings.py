"""Turns docstrings as fsdp2 writes them into reStructuredText for the reference.

    param_dtype:   dtype of the unsharded parameters;      ->   ``param_dtype``
                   continued here                                   dtype of the unsharded parameters; continued here
    Collective:    no                                      ->   :Collective: no
    ``name``                                               stays: double backquotes are code in both
    an indented block behind a blank line                  ->   a literal block
    Example:, and an indented block                        ->   a heading, and a block of Python
    ``fully_shard``, MeshError                             ->   links, where a page of the reference has an entry of that name

A line of ``words: text`` begins a field where its neighbors do as well, or where the word is Returns, Raises, Collective or Source.
Signatures are shown as a user calls: see ``_signature``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from sphinx.pycode import ModuleAnalyzer

from fsdp2.errors import FSDPError

_FIELD = re.compile(r"^(\*{0,2}[A-Za-z_][\w.\[\]]*(?:, \*{0,2}[\w.]+)*):\s+(\S.*)$")
_ALWAYS = {"Returns", "Raises", "Collective", "Source", "Memory", "Yields"}
_ENTRY = re.compile(r"^\.\. auto(?:function|class|method|exception):: (\S+)$", re.MULTILINE)
_ENTRIES = [name for page in (Path(__file__).parents[1] / "reference").glob("*.md") for name in _ENTRY.findall(page.read_text())]
_PLAIN = ("accumulate", "materialize", "parallelize")
"""Names of entries that are links although they are words; others, such as ``wrap``, are names of arguments as well."""


def _targets() -> dict[str, str]:
    """Entries by each name that a docstring may call them by, if only one entry has it."""
    by_name: dict[str, list[str]] = {}
    for entry in _ENTRIES:
        short = entry.rpartition(".")[2]
        for name in {entry, *([short] if "_" in short or short[0].isupper() or short in _PLAIN else [])}:
            by_name.setdefault(name, []).append(entry)
    return {name: entries[0] for name, entries in by_name.items() if len(entries) == 1}


_TARGETS = _targets()


def to_rst(lines: list[str], names: set[str]) -> list[str]:
    """``lines`` of a docstring; ``names`` of parameters and fields, which begin a field wherever they stand before a colon."""
    result: list[str] = []
    in_field, in_literal, in_example = "", False, False
    previous_blank = True
    for line in lines:
        text = line.strip()
        if text == "Example:":
            result += ["", "**Example**", "", ".. code-block:: python", ""]
            in_example = True
            continue
        if in_example:
            result.append(line)
            continue
        indent = len(line) - len(line.lstrip())
        field = _FIELD.match(line)
        is_field = field is not None and all(word.strip(" *") in names | _ALWAYS for word in field[1].split(","))
        if not text:
            result.append("")
            previous_blank = True
            continue
        if is_field and field is not None:
            kind = "field" if field[1] in _ALWAYS else "term"
            if in_field != kind:
                result.append("")
            # Sphinx would write the names of fields with a capital; of terms it does not.
            begin = f":{field[1]}:" if kind == "field" else ", ".join(f"``{name.strip()}``" for name in field[1].split(","))
            described = _linked(field[2], names)
            result += [f"{begin} {described}"] if kind == "field" else [begin, f"    {described}"]
            in_field, in_literal = kind, False
        elif in_field and indent > 0 and not previous_blank:
            result.append(f"    {_linked(text, names)}")
        elif indent >= 4 and (previous_blank or in_literal):
            if not in_literal:
                result += ["::", ""]
            result.append(f"    {line[4:]}" if indent > 4 else f"    {text}")
            in_literal, in_field = True, ""
        else:
            if in_field or in_literal:
                result.append("")
            result.append(_linked(text, names))
            in_field, in_literal = "", False
        previous_blank = False
    return result


def _linked(text: str, names: set[str]) -> str:
    """``text`` with links to entries, but for ``names`` of this one, and with the characters escaped that mean something to
    reStructuredText outside of code and emphasis."""
    parts = re.split(r"(``.*?``|(?<!\w)\*[^*\s][^*]*\*(?!\w)|\b[A-Z]\w+Error\b)", text)
    return "".join(
        _link(part, names) if index % 2 else re.sub(r"([*|`\\]|(?<=\w)_(?=\W|$))", r"\\\1", part) for index, part in enumerate(parts)
    )


def _link(code: str, names: set[str]) -> str:
    name = code.strip("`")
    return f":py:obj:`{name} <{_TARGETS[name]}>`" if name in _TARGETS and name not in names else code


def _process(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    lines[:] = to_rst(lines, _names_of(obj) | {name, name.rpartition(".")[2]})
    if what == "exception":
        section = "by-error-class" if obj is FSDPError else obj.__name__.lower()
        lines += ["", f"`Cause, fix and an example <../troubleshooting.html#{section}>`__", ""]


def _signature(app: Any, what: str, name: str, obj: Any, options: Any, arguments: str | None, returned: str | None) -> Any:
    """A function with overloads has one signature, that of its implementation, which returns what any of them returns. Classes that
    programs do not make are shown without arguments: errors, and results, whose docstrings have no example."""
    if what == "function":
        analyzer = ModuleAnalyzer.for_module(obj.__module__)  # autodoc asks the same one, behind this event
        analyzer.analyze()
        overloads = analyzer.overloads.pop(obj.__qualname__, None)
        if overloads:
            return arguments, " | ".join(each.return_annotation for each in overloads)
    if what == "exception" or (what == "class" and "Example:" not in (obj.__doc__ or "")):
        return ("", "") if arguments else None
    if arguments and "_Module" in arguments:  # a type variable: a model, and the same one again
        return arguments.replace("_Module", "Module"), (returned or "").replace("_Module", "Module")
    return None


def _names_of(obj: Any) -> set[str]:
    names = set(getattr(obj, "__annotations__", {}))
    for function in (obj, getattr(obj, "__init__", None)):
        code = getattr(getattr(function, "__wrapped__", function), "__code__", None)
        if code is not None:
            names |= set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + 2])
    if isinstance(obj, type):
        for base in obj.__mro__:
            names |= set(vars(base)) | set(getattr(base, "__annotations__", {}))
    return names


def setup(app: Any) -> dict[str, Any]:
    app.connect("autodoc-process-docstring", _process)
    app.connect("autodoc-process-signature", _signature)
    return {"version": "1", "parallel_read_safe": True}
