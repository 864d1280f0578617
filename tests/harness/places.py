"""Places where the runtime orders streams, marks events or lets the host wait, found in its source: tests take each out in turn.

A place is named by its function, its method and its number there: ``Gather.start order 2``. Functions outside of classes have the
file in front: ``reduction.legs_of mark 1``.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import fsdp2.core

CORE = Path(fsdp2.core.__file__).parent
Place = tuple[str, int, str]
"""The file, the line and the method that is called there."""


def places_of(methods: Sequence[str]) -> dict[Place, str]:
    """The names of all places in the core where one of ``methods`` of the streams is called."""
    found: dict[Place, str] = {}
    for path in sorted(CORE.rglob("*.py")):
        if path.stem != "streams":
            for name, function in _functions(path):
                numbers: Counter[str] = Counter()
                for line, method in sorted(_calls(function, methods)):
                    numbers[method] += 1
                    found[str(path), line, method] = f"{name} {method} {numbers[method]}"
    assert len(set(found.values())) == len(found), "two places share a name"
    return found


def place_of_caller(method: str) -> Place:
    """For a method of streams: where it is called."""
    frame = sys._getframe(2)
    return frame.f_code.co_filename, frame.f_lineno, method


def _functions(path: Path) -> Iterator[tuple[str, ast.FunctionDef]]:
    module = ast.parse(path.read_text())
    scopes: list[tuple[str, ast.Module | ast.ClassDef]] = [(path.stem, module)]
    scopes += [(node.name, node) for node in module.body if isinstance(node, ast.ClassDef)]
    for name, scope in scopes:
        for node in scope.body:
            if isinstance(node, ast.FunctionDef):
                yield f"{name}.{node.name}", node


def _calls(function: ast.FunctionDef, methods: Sequence[str]) -> Iterator[tuple[int, str]]:
    for node in ast.walk(function):
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(called, ast.Attribute) and called.attr in methods and ast.unparse(called.value).endswith("streams"):
            yield called.lineno, called.attr
