"""``MixedPrecision(buffer_dtype=...)``: FSDP1 casts buffers, ``parallelize`` leaves them alone, so statements next to it cast them.

    model = FSDP(net, mixed_precision=bf16)          for buffer in net.buffers():
                                                         if buffer.is_floating_point():
                                                             buffer.data = buffer.data.to(torch.bfloat16)
                                                     model = fsdp2.parallelize(net, wrap=None, mp_policy=bf16)

Left as they are, buffers in fp32 meet activations in bf16, and the next layer raises. The file shows
which precision a call gets; otherwise it stays on ``fsdp2.compat``, which casts.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator

import libcst as cst

from .editor import Editor
from .names import Names
from .syntax_trees import arguments, code, dotted, is_none, key_of, string_of

_UNSEEN = (
    "buffer_dtype={}: this file does not show which buffers it casts; "
    "if the model has no floating-point buffers, remove buffer_dtype and migrate again"
)
_FSDP = "fsdp:FullyShardedDataParallel"


def wrapping_calls(names: Names) -> Iterator[tuple[cst.Call, str]]:
    """The calls of FSDP, ``enable_wrap`` and ``wrap``, with the origin of their function; "" for ``partial`` of one of them."""
    for call in names.calls:
        made_by = names.origin_of(call.func)
        is_partial = made_by == "functools.partial" and bool(call.args)
        if (names.origin_of(call.args[0].value) if is_partial else made_by) in (_FSDP, "fsdp:enable_wrap", "fsdp:wrap"):
            yield call, "" if is_partial else made_by


def find_casts(editor: Editor, signature: tuple[str, ...], precision: tuple[str, ...]) -> dict[int, str]:
    """Before the rewrite: the statement that casts, by ``id`` of a call of FSDP, with {model} for the name of the model.

    signature, precision: the arguments of FSDP and of MixedPrecision
    """
    names = editor.names
    wanted: dict[int, tuple[cst.Call, str]] = {}
    for call in names.calls:
        if names.origin_of(call.func) == "fsdp:MixedPrecision":
            dtype = arguments(call.args, precision).value("buffer_dtype")
            if dtype is not None and not is_none(dtype):
                wanted[id(call)] = call, code(dtype)
    casts: dict[int, str] = {}
    served: set[int] = set()  # the precision of a call that has been named is not a second finding
    for call, made_by in wrapping_calls(names) if wanted else ():
        given = arguments(call.args, signature)
        dicts = {each: entries(names, each) for each in (dotted(arg.value) for arg in given.stars)}
        of_kwargs = [(each, value) for each, known in dicts.items() for key, value in known or () if key == "mixed_precision"]
        kwargs, value = of_kwargs[0] if len(of_kwargs) == 1 else ("", None)
        if "mixed_precision" in given.by_name:
            kwargs, value = "", given.value("mixed_precision")
        found = [None if is_none(each) else each for each in names.may_be(value)] if value is not None else []
        dtypes = {wanted[id(each)][1] if id(each) in wanted else "" for each in found if each is not None}
        if value is None or dtypes <= {""}:
            continue
        served |= {id(each) for each in found}
        text = max(dtypes)
        sometimes = None in found
        keys = {*given.by_name, *(key for known in dicts.values() for key, _ in known or ())}
        leaves_some = not keys.isdisjoint(("ignored_modules", "ignored_states")) or None in dicts.values()
        has_name = not sometimes or isinstance(value, (cst.Name, cst.Attribute))
        if made_by != _FSDP or len(dtypes) > 1 or leaves_some or not text.startswith("torch.") or not has_name:
            editor.refuse("fsdp1", call, _UNSEEN.format(text))
            continue
        loop = f"for buffer in {{model}}.buffers():\n    if buffer.is_floating_point():\n        buffer.data = buffer.data.to({text})\n"
        conditions = [f'"mp_policy" in {kwargs}'] if kwargs else []  # which a branch may not give it, or a later line
        conditions += [f"{code(value)} is not None"] if sometimes else []
        casts[id(call)] = f"if {' and '.join(conditions)}:\n{textwrap.indent(loop, '    ')}" if conditions else loop
    for key, (call, text) in wanted.items():
        if key not in served:
            editor.refuse("fsdp1", call, _UNSEEN.format(text))
    return casts


def cast(editor: Editor, old: cst.Call, module: cst.BaseExpression | None, statement: str | None) -> None:
    """Put ``statement`` before the call ``old`` of FSDP on ``module``, if that has a name, or after the assignment."""
    if statement is None:
        return
    name, at = dotted(module), editor.statement
    assigned = dotted(editor.names.assigned_to(old))
    around = itertools.takewhile(lambda each: not isinstance(each, cst.BaseStatement), editor.names.ancestors(old))
    is_repeated = any(isinstance(each, (cst.BaseComp, cst.Lambda)) for each in around)  # whose variables no statement before it has
    in_one_place = isinstance(at, cst.SimpleStatementLine) and not is_repeated
    if in_one_place and name:
        editor.before(statement.format(model=name))
    elif in_one_place and assigned:
        editor.after(statement.format(model=assigned))
    else:
        editor.refuse("fsdp1", old, "buffer_dtype: the module has no name by which its buffers could be cast")


def entries(names: Names, kwargs: str) -> list[tuple[str, cst.BaseExpression]] | None:
    """The keys and values that this file gives the dict of this name; None if the file does not show all of its displays."""
    found: list[tuple[str | None, cst.BaseExpression]] = []
    values = names.values_of(kwargs) if kwargs else []
    for value in values:
        if isinstance(value, cst.Dict):
            found += [(string_of(each.key) if isinstance(each, cst.DictElement) else None, each.value) for each in value.elements]
        elif isinstance(value, cst.Call) and dotted(value.func) in ("dict", "Dict", "typing.Dict"):
            found += _keywords(value)
        else:
            return None
    known = [(key, value) for key, value in found if key is not None]
    if not values or len(known) < len(found):
        return None
    for target, value, _function in names.assigned:
        if isinstance(target, cst.Subscript) and dotted(target.value) == kwargs and (key := key_of(target)):
            known.append((key, value))
    for call in names.calls:
        if isinstance(call.func, cst.Attribute) and call.func.attr.value == "update" and dotted(call.func.value) == kwargs:
            known += _keywords(call)
    return known


def _keywords(call: cst.Call) -> list[tuple[str, cst.BaseExpression]]:
    return [(arg.keyword.value, arg.value) for arg in call.args if arg.keyword is not None]
