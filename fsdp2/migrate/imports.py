"""Import lines, after everything else is rewritten: unused imports go, and the used names come from fsdp2.

    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, fully_shard    import fsdp2
                                                                                        from fsdp2 import fully_shard

It looks at the new text only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import libcst as cst

from .origins import is_framework_module, new_home, origin, star_names
from .report import Finding, Kind
from .syntax_trees import code, dotted, statement, without

_MAX_LINE = 100
_Import = TypeVar("_Import", cst.Import, cst.ImportFrom)


class _Used(cst.CSTVisitor):
    """Names and dotted names outside of import lines."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.dotted: set[str] = set()
        self.bound: set[str] = set()  # by imports
        module.visit(self)

    def visit_Import(self, node: cst.Import) -> bool:  # noqa: N802 (libcst's names)
        for alias in node.names:
            self.bound |= {_local(alias)} if alias.asname is not None else {_local(alias), dotted(alias.name)}
        return False

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:  # noqa: N802
        if not isinstance(node.names, cst.ImportStar):
            self.bound |= {_local(alias) for alias in node.names}
        return False

    def visit_Attribute(self, node: cst.Attribute) -> bool:  # noqa: N802
        self.dotted.add(dotted(node))
        node.value.visit(self)
        return False

    def visit_Arg(self, node: cst.Arg) -> bool:  # noqa: N802
        node.value.visit(self)
        return False

    def visit_Name(self, node: cst.Name) -> None:  # noqa: N802
        self.names.add(node.value)

    def visit_SimpleString(self, node: cst.SimpleString) -> None:  # noqa: N802
        value = node.evaluated_value
        if isinstance(value, str) and value.isidentifier():
            self.names.add(value)  # __all__, and annotations in quotes


def _is_ours(found: str) -> bool:
    """Whether an import of this origin may go when it is unused: names that rules know, modules of them."""
    return ":" in found or is_framework_module(found)


def _local(alias: cst.ImportAlias) -> str:
    if alias.asname is not None:
        return dotted(alias.asname.name)
    return dotted(alias.name).split(".")[0]


class _Imports(cst.CSTTransformer):
    """Rewrites the import lines of a module; ``moved`` are lines to add."""

    def __init__(self, used: _Used, old_names: set[str], keep_unused: bool) -> None:
        super().__init__()
        self.used, self.old_names, self.keep_unused = used, old_names, keep_unused
        self.moved: set[str] = set()
        self.findings: list[tuple[str, str]] = []  # module of a star import, and its replacement

    def leave_SimpleStatementLine(  # noqa: N802
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.BaseStatement | cst.FlattenSentinel[cst.BaseStatement] | cst.RemovalSentinel:
        if len(updated_node.body) != 1:
            return updated_node
        small = updated_node.body[0]
        found: cst.ImportFrom | cst.Import | None
        if isinstance(small, cst.ImportFrom) and small.module is not None:
            found = self._import_from(small)
        elif isinstance(small, cst.Import):
            found = self._import(small)
        else:
            return updated_node
        if found is not None:
            return updated_node if found is small else updated_node.with_changes(body=[found])
        return _marker(updated_node, "functools" if _from_functools(small) else "framework")

    def _import_from(self, node: cst.ImportFrom) -> cst.ImportFrom | None:
        module = dotted(node.module)
        if module == "functools" and not isinstance(node.names, cst.ImportStar):
            return self._kept(node, [each for each in node.names if not self._became_unused(_local(each))])
        if node.relative or not (is_framework_module(module) or _has_framework_module(node)):
            return node
        if isinstance(node.names, cst.ImportStar):
            return self._star(node, module)
        kept: list[cst.ImportAlias] = []
        moved: dict[str, list[cst.ImportAlias]] = {}
        for alias in node.names:
            name, found = dotted(alias.name), origin(f"{module}.{dotted(alias.name)}")
            home = new_home(name) if found == f"fsdp:{name}" else None
            if not self._is_used(_local(alias)) and home != "fsdp2" and found != "fsdp:?" and _is_ours(found):
                continue
            if home is None:
                kept.append(alias)
            else:
                moved.setdefault(home, []).append(alias)
        if len(moved) == 1 and not kept and len(next(iter(moved.values()))) == len(node.names):
            return node.with_changes(module=cst.parse_expression(next(iter(moved))))
        for home, aliases in moved.items():
            self.moved |= {f"from {home} import {code(each.with_changes(comma=cst.MaybeSentinel.DEFAULT))}" for each in aliases}
        return self._kept(node, kept)

    def _is_used(self, local: str) -> bool:
        return local in self.used.names or self.keep_unused

    def _became_unused(self, local: str) -> bool:
        return local in self.old_names and local not in self.used.names

    def _kept(self, node: _Import, kept: Sequence[cst.ImportAlias]) -> _Import | None:
        assert not isinstance(node.names, cst.ImportStar)
        if len(kept) == len(node.names):
            return node
        return node.with_changes(names=[*kept[:-1], kept[-1].with_changes(comma=node.names[-1].comma)]) if kept else None

    def _star(self, node: cst.ImportFrom, module: str) -> cst.ImportFrom | None:
        names = star_names(module)
        if not names or module == "torch.nn.parallel":
            return node
        used = sorted(name for name in names & self.used.names if name not in self.used.bound)
        became = "its names are imported one by one" if used else "none of its names is left"
        self.findings.append((module, f"from {module} import *: {became}"))
        for name in used:
            self.moved.add(f"from {new_home(name)} import {name}")
        return None

    def _import(self, node: cst.Import) -> cst.Import | None:
        kept = []
        for alias in node.names:
            module = dotted(alias.name)
            if module == "functools" and self._became_unused(_local(alias)):
                continue
            if not (is_framework_module(module) or module == "deepspeed"):
                kept.append(alias)
            elif alias.asname is not None or module == "deepspeed":
                if _local(alias) in self.used.names:
                    kept.append(alias)
            elif any(text.startswith(module) for text in self.used.dotted):
                kept.append(alias)
            else:
                self.moved.add(f"import {module.split('.')[0]}")
        return self._kept(node, kept)


def _has_framework_module(node: cst.ImportFrom) -> bool:
    """``from torch.distributed import fsdp``, ``from torch.distributed.fsdp import wrap``."""
    if isinstance(node.names, cst.ImportStar):
        return False
    return any(is_framework_module(f"{dotted(node.module)}.{dotted(alias.name)}") for alias in node.names)


_MARKER = "__import_that_is_gone__"


def _marker(node: cst.SimpleStatementLine, kind: str) -> cst.SimpleStatementLine:
    """A line that stands for imports that are gone; ``_place`` removes it."""
    return cst.SimpleStatementLine([cst.Expr(cst.Name(f"{_MARKER}{kind}"))], leading_lines=node.leading_lines)


def _is_marker(node: cst.CSTNode, kind: str = "") -> bool:
    return isinstance(node, cst.SimpleStatementLine) and any(code(each).startswith(f"{_MARKER}{kind}") for each in node.body)


def _from_functools(node: cst.CSTNode) -> bool:
    if isinstance(node, cst.ImportFrom):
        return dotted(node.module) == "functools"
    return isinstance(node, cst.Import) and dotted(node.names[0].name) == "functools"


def fix_imports(
    new: cst.Module, old: cst.Module, needed: Iterable[str], keep_unused: bool, star_lines: Mapping[str, int]
) -> tuple[cst.Module, list[Finding]]:
    """``new`` with the imports it needs and without those it no longer does. star_lines: of ``from module import *``."""
    rewriter = _Imports(_Used(new), _Used(old).names, keep_unused)
    marked = new.visit(rewriter)
    after = _Used(marked)
    lines = {line for line in {*needed, *rewriter.moved} if _is_wanted(line, after)}
    placed = _place(marked, _statements(lines))
    return placed, [Finding(star_lines.get(module, 1), Kind.CHANGED, text) for module, text in rewriter.findings]


def _is_wanted(line: str, after: _Used) -> bool:
    """Whether the new text uses what ``line`` imports, and no import that is left binds it."""
    if line.startswith("import ") and " as " not in line:
        module = line.removeprefix("import ")
        uses = any(text == module or text.startswith(f"{module}.") for text in after.dotted | after.names)
        bound = module.split(".")[0] in after.bound if not module.startswith("fsdp2") else module in after.bound
        return uses and not bound
    local = line.split()[-1]
    return local not in after.bound


def _statements(lines: set[str]) -> list[str]:
    """The lines, those from one module joined; fsdp2's first."""
    plain = {line for line in lines if line.startswith("import ")}
    if any(line.startswith("import fsdp2.") for line in plain):
        plain.discard("import fsdp2")
    by_module: dict[str, set[str]] = {}
    for line in (each for each in lines if each.startswith("from ")):
        module, _, name = line.removeprefix("from ").partition(" import ")
        by_module.setdefault(module, set()).add(name)
    joined = []
    for module, names in by_module.items():
        text = f"from {module} import {', '.join(sorted(names))}"
        if len(text) > _MAX_LINE:
            text = f"from {module} import (\n" + "".join(f"    {name},\n" for name in sorted(names)) + ")"
        joined.append(text)
    return sorted([*plain, *joined], key=lambda text: ("fsdp2" not in text.split()[1], not text.startswith("import "), text))


def _place(module: cst.Module, texts: list[str]) -> cst.Module:
    """Put the lines where the first line that is gone stood, else after the imports at the top."""
    body = list(module.body)
    at = next((index for index, each in enumerate(body) if _is_marker(each, "framework")), None)
    if at is None:
        at = max((index + 1 for index, each in enumerate(body) if _is_import(each)), default=_after_docstring(body))
    fresh: list[Any] = [statement(text) for text in texts]
    if fresh and at < len(body) and _is_marker(gone := body[at]):
        fresh[0] = fresh[0].with_changes(leading_lines=cst.ensure_type(gone, cst.SimpleStatementLine).leading_lines)
        body[at] = gone.with_changes(leading_lines=())
    changed: cst.CSTNode = module.with_changes(body=[*body[:at], *fresh, *body[at:]])
    return cst.ensure_type(changed.visit(_WithoutMarkers()), cst.Module)


class _WithoutMarkers(cst.CSTTransformer):
    """Removes markers; comments above the imports that are gone stay, above the next statement."""

    def on_leave(self, original_node: cst.CSTNode, updated_node: Any) -> Any:
        if isinstance(updated_node, (cst.Module, cst.IndentedBlock)) and any(map(_is_marker, updated_node.body)):
            return without(updated_node, _is_marker, lambda line: line.comment is not None)
        return updated_node


def _is_import(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.SimpleStatementLine) and isinstance(node.body[0], (cst.Import, cst.ImportFrom))


def _after_docstring(body: Sequence[cst.CSTNode]) -> int:
    first = body[0] if body else None
    is_doc = isinstance(first, cst.SimpleStatementLine) and isinstance(first.body[0], cst.Expr)
    return 1 if is_doc else 0
