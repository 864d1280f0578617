"""One Python file: find the frameworks that it uses, apply their rules, and apply them again without those that cannot be rewritten.

migrate_source("from torch.distributed.fsdp import fully_shard\\nfully_shard(net)\\n").new
"from fsdp2 import fully_shard\\nfully_shard(net)\\n"
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import libcst as cst
from libcst.metadata import MetadataWrapper

from . import buffers, ddp, deepspeed, fsdp1_values, fsdp1_wrap, model_use, parameter_loops, state_dicts, torch_fsdp2, unresolved
from .editor import Editor, Rules
from .imports import fix_imports
from .names import Names
from .report import Finding, Kind, Migrated

FRAMEWORKS = ("fsdp1", "ddp", "deepspeed")


def migrate_source(text: str, path: Path | None = None, *, off: Collection[str] = ()) -> Migrated:
    """Rewrite one file.

    path:    where it is: a DeepSpeed configuration is looked for next to it, and an ``__init__.py`` keeps imports it does not use
    off:     frameworks that stay as they are, even if this file uses them; "fsdp1" then goes to fsdp2.compat
    Raises:  libcst.ParserSyntaxError if it is not Python
    """
    wrapper = MetadataWrapper(cst.parse_module(text), unsafe_skip_copy=False)
    names = Names(wrapper)
    if not names.uses_frameworks():
        return Migrated(text, text)
    refused: list[tuple[str, int, Finding]] = []
    strangers = list(unresolved.find(names))
    names.off = set(off)
    while True:
        editor = _editor(names, path, upstream_too=not _stays_on_torch(refused))
        for _, statement, finding in refused:
            editor.say_refused(statement, finding)
        if names.rewritten:
            for node, what in strangers:
                editor.left(node, what)
        _prepare(editor)
        new = wrapper.module.visit(editor)
        fresh = [each for each in editor.refused if each[0] not in names.off]
        if not fresh:
            break
        refused += fresh
        names.off |= set(FRAMEWORKS) if _stays_on_torch(fresh) else {framework for framework, _, _ in fresh}
    assert isinstance(new, cst.Module)
    of_imports: list[Finding] = []
    if not _stays_on_torch(refused):
        keep_unused = path is not None and path.name == "__init__.py"
        new, of_imports = fix_imports(new, wrapper.module, editor.imports, keep_unused, names.star_lines)
    findings = {*editor.findings, *of_imports, *(finding for _, _, finding in refused)}
    if new.code == text:
        findings = {each for each in findings if each.kind is Kind.LEFT}
    on_compat = new.code != text and any(finding.kind is Kind.COMPAT for _, _, finding in refused)
    return Migrated(text, new.code, tuple(sorted(findings)), on_compat)


def _stays_on_torch(refused: list[tuple[str, int, Finding]]) -> bool:
    """Whether FSDP1 is used in a way that fsdp2.compat refuses too: then only comments are added."""
    return any(framework == "fsdp1" and finding.kind is Kind.LEFT for framework, _, finding in refused)


def _editor(names: Names, path: Path | None, upstream_too: bool) -> Editor:
    rules = Rules()
    active = [framework for framework in FRAMEWORKS if framework not in names.off]
    if active:
        rules.add(model_use.SHARED)
        rules.add(state_dicts.SHARED)
        rules.add(parameter_loops.RULES)
    if "fsdp1" in active:
        for each in (fsdp1_values.RULES, fsdp1_wrap.RULES, model_use.FSDP1, state_dicts.FSDP1):
            rules.add(each)
    if "ddp" in active:
        rules.add(ddp.RULES)
    if "deepspeed" in active:
        rules.add(deepspeed.RULES)
    if upstream_too:
        rules.add(torch_fsdp2.RULES)
    editor = Editor(names, rules)
    editor.of(deepspeed.Engine).script = path
    return editor


def _prepare(editor: Editor) -> None:
    off = editor.names.off
    if "fsdp1" not in off:
        fsdp1_values.find_borders(editor)
        editor.of(fsdp1_wrap.Found).casts = buffers.find_casts(editor, fsdp1_wrap.SIGNATURE, fsdp1_values.PRECISION)
        editor.of(fsdp1_wrap.Found).kwargs = fsdp1_wrap.find_kwargs(editor)
        state_dicts.find_kinds(editor)
    if "ddp" not in off:
        ddp.find_hooks(editor)
    if "deepspeed" not in off:
        deepspeed.find_engine(editor)
