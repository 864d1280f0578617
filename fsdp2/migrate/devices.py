"""The kind of device on which a script trains: by the backends that it starts, or at run time if the file does not name them."""

from __future__ import annotations

import libcst as cst

from .editor import Editor
from .names import Names
from .syntax_trees import arguments, dotted, string_of

_CPU_ONLY = ("gloo", "mpi", "cpu:gloo")
_STARTS = ("torch.distributed.init_process_group", "torch.distributed.distributed_c10d.init_process_group")


def mesh_of_group(editor: Editor, at: cst.CSTNode, group: cst.BaseExpression) -> str:
    """The text for ``process_group=group``: a mesh over the ranks of that group."""
    editor.note(at, "process_group is a mesh over the ranks of that group.")
    return editor.text("DeviceMesh.from_group({group}, {device})", group=group, device=_device_type(editor))


def _device_type(editor: Editor) -> str:
    """The text of an expression: ``"cpu"``, ``"cuda"``, or one that asks when it runs."""
    backends: set[str | None] = set()
    for call in editor.names.calls:
        if editor.names.origin_of(call.func) in _STARTS:
            backends |= _strings(editor.names, arguments(call.args, ("backend",)).value("backend"))
    on_cpu = {backend in _CPU_ONLY for backend in backends}
    if len(on_cpu) == 1 and None not in backends:
        return '"cpu"' if on_cpu == {True} else '"cuda"'
    return editor.text('"cuda" if torch.cuda.is_available() else "cpu"')


def _strings(names: Names, node: cst.BaseExpression | None, depth: int = 0) -> set[str | None]:
    """The values that an expression may have, as far as this file writes them; None for other values."""
    text = string_of(node)
    if text is not None:
        return {text.lower()}
    if isinstance(node, cst.IfExp):
        return _strings(names, node.body, depth) | _strings(names, node.orelse, depth)
    if isinstance(node, (cst.Name, cst.Attribute)) and depth < 5:
        values = names.values_of(dotted(node))
        return set().union(*(_strings(names, value, depth + 1) for value in values)) if values else {None}
    return {None}
