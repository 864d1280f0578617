"""torch's FSDP2, and everything that stays on FSDP1's names: only the module changes. It refuses to know what the names do."""

from __future__ import annotations

import libcst as cst

from .editor import Editor, Rules
from .origins import new_home
from .syntax_trees import code


def by_module(editor: Editor, old: cst.Attribute, new: cst.BaseExpression) -> cst.BaseExpression:
    """``torch.distributed.fsdp.fully_shard`` is ``fsdp2.fully_shard``, under whatever name the module was imported."""
    found = editor.names.origin_of(old)
    if found == "fsdp:?":
        parent = editor.names.parent_of(old)
        if not isinstance(parent, cst.Attribute):
            editor.left(old, f"{code(old)} is not public")
        return new
    if not found.startswith("fsdp:") or code(old) != code(new):
        return new
    name = found.removeprefix("fsdp:")
    home = new_home(name)
    return new if home is None else editor.make(f"{home}.{name}", f"import {home}")


def private_name(editor: Editor, old: cst.Name, new: cst.BaseExpression) -> cst.BaseExpression:
    """A name that was imported out of FSDP's inside."""
    parent = editor.names.parent_of(old)
    if editor.names.origin_of(old) == "fsdp:?" and not isinstance(parent, cst.Attribute):
        editor.left(old, f"{old.value} is not public in torch.distributed.fsdp")
    return new


RULES = Rules(nodes={cst.Attribute: [by_module], cst.Name: [private_name]})
