"""The kind of device on which a script trains: by the backends that it starts, or at run time if the file does not name them."""

from __future__ import annotations

import libcst as cst

from .editor import Editor
from .syntax_trees import arguments, string_of

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
            given = arguments(call.args, ("backend",)).value("backend")
            backends |= {None} if given is None else {string_of(each) for each in editor.names.may_be(given)}
    on_cpu = {backend.lower() in _CPU_ONLY for backend in backends if backend is not None}
    if len(on_cpu) == 1 and None not in backends:
        return '"cpu"' if on_cpu == {True} else '"cuda"'
    return editor.text('"cuda" if torch.cuda.is_available() else "cpu"')
