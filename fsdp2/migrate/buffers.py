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
from .syntax_trees import arguments, code, dotted, is_none, string_of

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
        values = [given.value("mixed_precision"), *(_of_key(names, arg.value) for arg in given.stars)]
        value = next((each for each in values if each is not None), None)
        found = list(_precisions(names, value)) if value is not None else []
        dtypes = {wanted[id(each)][1] if id(each) in wanted else "" for each in found if each is not None}
        if value is None or dtypes <= {""}:
            continue
        served |= {id(each) for each in found}
        text = max(dtypes)
        sometimes = None in found
        leaves_some = "ignored_modules" in given.by_name or "ignored_states" in given.by_name
        has_name = not sometimes or isinstance(value, (cst.Name, cst.Attribute))
        if made_by != _FSDP or len(dtypes) > 1 or leaves_some or not text.startswith("torch.") or not has_name:
            editor.refuse("fsdp1", call, _UNSEEN.format(text))
            continue
        loop = f"for buffer in {{model}}.buffers():\n    if buffer.is_floating_point():\n        buffer.data = buffer.data.to({text})\n"
        casts[id(call)] = f"if {code(value)} is not None:\n{textwrap.indent(loop, '    ')}" if sometimes else loop
    for key, (call, text) in wanted.items():
        if key not in served:
            editor.refuse("fsdp1", call, _UNSEEN.format(text))
    return casts


def cast(editor: Editor, old: cst.Call, module: cst.BaseExpression | None, statement: str | None) -> None:
    """Put ``statement`` before the call ``old`` of FSDP on ``module``, if that has a name, or after the assignment."""
    if statement is None:
        return
    name, at = dotted(module), editor.statement
    above = editor.names.parent_of(old)
    assigned = above.targets[0].target if isinstance(above, cst.Assign) and len(above.targets) == 1 else None
    around = itertools.takewhile(lambda each: not isinstance(each, cst.BaseStatement), editor.names.ancestors(old))
    is_repeated = any(isinstance(each, (cst.BaseComp, cst.Lambda)) for each in around)  # whose variables no statement before it has
    in_one_place = isinstance(at, cst.SimpleStatementLine) and not is_repeated
    if in_one_place and name:
        editor.before(statement.format(model=name))
    elif in_one_place and assigned is not None and dotted(assigned):
        editor.after(statement.format(model=dotted(assigned)))
    else:
        editor.refuse("fsdp1", old, "buffer_dtype: the module has no name by which its buffers could be cast")


def _of_key(names: Names, kwargs: cst.BaseExpression) -> cst.BaseExpression | None:
    """``kwargs["mixed_precision"]`` of ``**kwargs``, where it is written once."""
    found: list[cst.BaseExpression] = []
    for value in names.values_of(dotted(kwargs)):
        if isinstance(value, cst.Dict):
            items = [each for each in value.elements if isinstance(each, cst.DictElement)]
            found += [each.value for each in items if string_of(each.key) == "mixed_precision"]
        if isinstance(value, cst.Call):
            found += [arg.value for arg in value.args if arg.keyword is not None and arg.keyword.value == "mixed_precision"]
    found += names.values_of(f'{dotted(kwargs)}["mixed_precision"]')
    return found[0] if len(found) == 1 else None


def _precisions(names: Names, node: cst.BaseExpression, depth: int = 0) -> Iterator[cst.CSTNode | None]:
    """The calls of MixedPrecision, or None, that ``node`` may be; ``node`` itself if the file does not show them."""
    if is_none(node):
        yield None
    elif isinstance(node, cst.IfExp) and depth < 5:
        yield from _precisions(names, node.body, depth + 1)
        yield from _precisions(names, node.orelse, depth + 1)
    elif isinstance(node, (cst.Name, cst.Attribute)) and depth < 5 and (values := names.passed_or_assigned(node)):
        for value in values:
            yield from _precisions(names, value, depth + 1)
    else:
        yield node
