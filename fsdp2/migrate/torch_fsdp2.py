"""torch's FSDP2, and everything that stays on FSDP1's names: only the module changes."""

from __future__ import annotations

import libcst as cst

from .editor import Editor, Rules
from .origins import new_home
from .syntax_trees import arguments, code, is_none


def by_module(editor: Editor, old: cst.Attribute, new: cst.BaseExpression) -> cst.BaseExpression:
    """``torch.distributed.fsdp.fully_shard`` becomes ``fsdp2.fully_shard``, under any name that the module was imported by."""
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
    return new if home is None else editor.make(f"{home}.{name}")


def private_name(editor: Editor, old: cst.Name, new: cst.BaseExpression) -> cst.BaseExpression:
    """A name that was imported out of FSDP's inside."""
    parent = editor.names.parent_of(old)
    if editor.names.origin_of(old) == "fsdp:?" and not isinstance(parent, cst.Attribute):
        editor.left(old, f"{old.value} is not public in torch.distributed.fsdp")
    return new


def mixed_precision(editor: Editor, old: cst.Call, new: cst.Call) -> cst.BaseExpression | None:
    """``reduce_dtype=None`` has the meaning of the installed torch's own FSDP2."""
    given = arguments(new.args, ("param_dtype", "reduce_dtype"))
    computed, reduced = given.value("param_dtype"), given.value("reduce_dtype")
    if computed is not None and not is_none(computed) and (reduced is None or is_none(reduced)):
        editor.note(
            old,
            "without reduce_dtype, gradients of fp32 parameters travel in fp32 from torch 2.15 on, twice the bytes of bf16; "
            f"reduce_dtype={code(computed)} keeps the traffic of torch 2.14.",
        )
    return None


RULES = Rules(calls={"fsdp:MixedPrecisionPolicy": mixed_precision}, nodes={cst.Attribute: [by_module], cst.Name: [private_name]})
