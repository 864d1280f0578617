"""From the names and shapes of a checkpoint to those of a model, and back: renamed, fused, split, stacked and transposed weights.

A key map is a list of rules, applied in order; each turns tensors into others without reading them. In a rule's
templates ``*`` matches any text, and the n-th ``*`` of a target stands for the text that the n-th ``*`` of the source
matched.

Worked example, separate projections of a checkpoint into one fused parameter, both weights and biases:

    key_map=[
        (r"^transformer\\.", ""),                                                           # rename
        (r"\\.rotary_emb\\.inv_freq$", None),                                                # ignore
        Concat(["*.q_proj.*", "*.k_proj.*", "*.v_proj.*"], "*.qkv.*"),                     # several tensors, one parameter
        Split("*.gate_up.weight", ["*.gate.weight", "*.up.weight"]),                       # one tensor, several parameters
        Stack("*.experts.#.w1.weight", "*.experts.w1"),                                    # experts 0, 1, ... along a new dim
        Transpose("*.c_fc.weight"),                                                        # Conv1D to Linear
    ]

Saving goes through the same rules backwards, see ``inverted``.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ..errors import ArgumentError
from .failures import failure
from .lazy_tensors import LazyTensor, Narrowed, Reordered, joined

Tensors: TypeAlias = dict[str, LazyTensor]
Shapes: TypeAlias = Mapping[str, tuple[int, ...]]


class KeyRule(ABC):
    """A rule of a key map. Subclass it if ``Concat``, ``Split``, ``Stack`` and ``Transpose`` are not enough.

    Example:
        class Student(fsdp2.checkpoint.KeyRule):
            def apply(self, tensors, shapes):  # only the tensors whose names begin with "student."
                return {name.removeprefix("student."): each for name, each in tensors.items() if name.startswith("student.")}
    """

    @abstractmethod
    def apply(self, tensors: Tensors, shapes: Shapes) -> Tensors:
        """The tensors by their new names. ``shapes`` are the model's, by its own names. Raises: CheckpointError"""

    def inverse(self) -> KeyRule:
        """The rule that undoes this one when saving. Raises: ArgumentError if there is none"""
        raise _no_inverse(self, "implement its method inverse()")


Renaming: TypeAlias = Callable[[str], str | None]
KeyMap: TypeAlias = Renaming | KeyRule | Sequence[tuple[str, str | None] | Renaming | KeyRule]
"""A function from a checkpoint's key to the model's (None: ignore it), a ``KeyRule``, or several rules; a rule may also be a pair of a
regular expression and what to replace it by wherever it is found (None: ignore the keys in which it is)."""


def apply_key_map(tensors: Mapping[str, LazyTensor], shapes: Shapes, key_map: KeyMap | None) -> Tensors:
    """``tensors`` under the model's names. Collective: no.

    Raises: ArgumentError for an invalid rule; CheckpointError if two tensors get one name, or parts do not match
    """
    mapped = dict(tensors)
    if key_map is None:
        return mapped
    for rule in _rules(key_map):
        mapped = rule.apply(mapped, shapes) if isinstance(rule, KeyRule) else _renamed(mapped, _renaming(rule))
    return mapped


def inverted(key_map: KeyMap | None) -> list[KeyRule]:
    """The rules from a model's names to a checkpoint's, in order: each rule undone, the last one first.

    Keys that ``key_map`` ignores are not written. Raises: ArgumentError naming a rule that cannot be undone
    """
    inverse: list[KeyRule] = []
    for rule in reversed(_rules(key_map)):
        if isinstance(rule, KeyRule):
            inverse.append(rule.inverse())
        elif callable(rule) or rule[1] is not None:
            # The inverse of r"gamma$" to "weight" would rename all weights: a pattern does not tell the earlier names.
            raise _no_inverse(rule, "give both directions: Rename(there, back)")
    return inverse


def _rules(key_map: KeyMap | None) -> Sequence[Any]:
    if key_map is None:
        return ()
    return (key_map,) if callable(key_map) or isinstance(key_map, KeyRule) else key_map


def _no_inverse(rule: Any, fix: str) -> ArgumentError:
    return ArgumentError(f"key_map has {rule!r}, which saving cannot undo", expected="rules with an inverse", fix=fix)


def _renaming(rule: Any) -> Renaming:
    if callable(rule):
        return rule  # type: ignore[no-any-return]
    match rule:
        case (str() | re.Pattern() as pattern, None):
            drop = re.compile(pattern)
            return lambda key: None if drop.search(key) else key
        case (str() | re.Pattern() as pattern, str(replacement)):
            compiled = re.compile(pattern)
            return lambda key: compiled.sub(replacement, key)
    raise ArgumentError(
        f"key_map has {rule!r} of type {type(rule).__name__}",
        expected="a pair (regular expression, replacement or None), a function of a key, or a KeyRule",
        fix='for instance key_map=[(r"^model\\.", "")]',
    )


def _renamed(tensors: Tensors, rename: Renaming) -> Tensors:
    renamed: Tensors = {}
    for key, tensor in tensors.items():
        new = rename(key)
        if new is not None:
            _put(renamed, new, tensor)
    return renamed


def _put(tensors: Tensors, key: str, tensor: LazyTensor) -> None:
    if key in tensors:
        sources = [stored.key for each in (tensors[key], tensor) for stored in each.stored()]
        raise failure(
            f"key_map gives several tensors the name {key}",
            items=sources,
            expected="one tensor for each name",
            fix="let it ignore one (None), or join them with Concat; nothing was changed",
            key=key,
        )
    tensors[key] = tensor


@dataclass(frozen=True)
class Rename(KeyRule):
    """A renaming in both directions: each is a function of a key, or a pair of a regular expression and its replacement.

    there: from the checkpoint's names to the model's
    back:  from the model's names to the checkpoint's

    Example:
        rule = fsdp2.checkpoint.Rename((r"^model\\.", ""), (r"^", "model."))
        fsdp2.checkpoint.save_safetensors(model, folder, key_map=[rule])  # names begin with "model."
        fsdp2.checkpoint.load_safetensors(model, folder, key_map=[rule])
    """

    there: tuple[str, str | None] | Renaming
    back: tuple[str, str | None] | Renaming

    def apply(self, tensors: Tensors, shapes: Shapes) -> Tensors:
        return _renamed(tensors, _renaming(self.there))

    def inverse(self) -> KeyRule:
        return Rename(self.back, self.there)


@dataclass(frozen=True)
class Concat(KeyRule):
    """Concatenates several tensors along ``dim``; the checkpoint must have all of them, or none.

    sources, target: names, in which ``*`` stands for any text, the same in all of them
    sizes:           of the sources along ``dim``; only saving needs them

    Example:
        rule = fsdp2.checkpoint.Concat(["*.q.weight", "*.k.weight"], "*.qk.weight", sizes=[64, 64])
    """

    sources: Sequence[str]
    target: str
    dim: int = 0
    sizes: Sequence[int] | None = None

    def apply(self, tensors: Tensors, shapes: Shapes) -> Tensors:
        rest = dict(tensors)
        for texts in _texts_of_any(self.sources, tensors):
            parts = _take(rest, [_filled(source, texts) for source in self.sources], self)
            _put(rest, _filled(self.target, texts), _checked_joined(parts, self.dim, self))
        return rest

    def inverse(self) -> KeyRule:
        if self.sizes is None:
            raise _no_inverse(self, "give it the sizes of its sources along dim: Concat(..., sizes=[...])")
        return Split(self.target, self.sources, self.dim, self.sizes)


@dataclass(frozen=True)
class Split(KeyRule):
    """Splits one tensor into several along ``dim``.

    source, targets: names, in which ``*`` stands for any text, the same in all of them
    sizes:           of the parts along ``dim``; None: those of the model's parameters with these names

    Example:
        rule = fsdp2.checkpoint.Split("*.qk.weight", ["*.q.weight", "*.k.weight"])
    """

    source: str
    targets: Sequence[str]
    dim: int = 0
    sizes: Sequence[int] | None = None

    def apply(self, tensors: Tensors, shapes: Shapes) -> Tensors:
        rest = dict(tensors)
        for texts in _texts_of_any([self.source], tensors):
            key = _filled(self.source, texts)
            whole = rest.pop(key)
            names = [_filled(target, texts) for target in self.targets]
            dim = _checked_dim(whole, self.dim, key, self)
            sizes = self.sizes if self.sizes is not None else self._sizes_in_model(names, shapes, key)
            if sum(sizes) != whole.shape[dim] or len(sizes) != len(names):
                raise failure(
                    f"{key} {whole.shape} cannot be split along dim {dim} into {dict(zip(names, sizes, strict=False))}",
                    expected=f"{len(names)} sizes that add up to {whole.shape[dim]}",
                    fix=f"fix the rule {self}; nothing was changed",
                    key=key,
                )
            start = 0
            for name, size in zip(names, sizes, strict=True):
                _put(rest, name, Narrowed(whole, dim, start, size))
                start += size
        return rest

    def inverse(self) -> KeyRule:
        return Concat(self.targets, self.source, self.dim, self.sizes)

    def _sizes_in_model(self, names: Sequence[str], shapes: Shapes, key: str) -> list[int]:
        unknown = [name for name in names if name not in shapes or self.dim >= len(shapes[name])]
        if unknown:
            raise failure(
                f"{key} is to be split, but the model has no size for {len(unknown)} of its parts",
                items=unknown,
                expected="names of parameters of the model, or sizes",
                fix=f"give {self} sizes, or apply it after the rules that rename; nothing was changed",
                key=key,
            )
        return [shapes[name][self.dim] for name in names]


@dataclass(frozen=True)
class Stack(KeyRule):
    """Stacks tensors numbered 0, 1, ... at ``#`` along a new dim ``dim``, as ``torch.stack`` does.

    source, target: names, in which ``*`` stands for any text, the same in both

    Example:
        rule = fsdp2.checkpoint.Stack("*.experts.#.weight", "*.experts.weight")
    """

    source: str
    target: str
    dim: int = 0

    def apply(self, tensors: Tensors, shapes: Shapes) -> Tensors:
        before = self.source.partition("#")[0].count("*")  # where the number is among the texts
        counts: dict[tuple[str, ...], set[int]] = {}
        for texts in _texts_of_any([self.source], tensors):
            counts.setdefault(texts[:before] + texts[before + 1 :], set()).add(int(texts[before]))
        rest = dict(tensors)
        for texts, numbers in counts.items():
            keys = [_filled(self.source, (*texts[:before], str(number), *texts[before:])) for number in range(max(numbers) + 1)]
            parts = _take(rest, keys, self)
            if not 0 <= self.dim <= len(parts[0].shape):
                raise _bad_dim(keys[0], parts[0], self)
            layers: list[LazyTensor] = []
            for part in parts:
                order: list[int | None] = [*range(len(part.shape))]
                order.insert(self.dim, None)
                layers.append(Reordered(part, tuple(order)))
            _put(rest, _filled(self.target, texts), _checked_joined(layers, self.dim, self))
        return rest

    def inverse(self) -> KeyRule:
        return Unstack(self.target, self.source, self.dim)


@dataclass(frozen=True)
class Unstack(KeyRule):
    """Cuts one tensor along its dim ``dim`` into tensors without that dim, numbered 0, 1, ... at ``#``, as ``torch.unbind`` does.

    source, target: names, in which ``*`` stands for any text, the same in both

    Example:
        rule = fsdp2.checkpoint.Unstack("*.experts.weight", "*.experts.#.weight")
    """

    source: str
    target: str
    dim: int = 0

    def apply(self, tensors: Tensors, shapes: Shapes) -> Tensors:
        before = self.target.partition("#")[0].count("*")
        rest = dict(tensors)
        for texts in _texts_of_any([self.source], tensors):
            key = _filled(self.source, texts)
            whole = rest.pop(key)
            dim = _checked_dim(whole, self.dim, key, self)
            others = tuple(other for other in range(len(whole.shape)) if other != dim)
            for number in range(whole.shape[dim]):
                name = _filled(self.target, (*texts[:before], str(number), *texts[before:]))
                _put(rest, name, Reordered(Narrowed(whole, dim, number, 1), others))
        return rest

    def inverse(self) -> KeyRule:
        return Stack(self.target, self.source, self.dim)


@dataclass(frozen=True)
class Transpose(KeyRule):
    """Exchanges two dims of the tensors of these names, as ``torch.transpose`` does.

    source: a name, in which ``*`` stands for any text

    Example:
        rule = fsdp2.checkpoint.Transpose("*.weight")
    """

    source: str
    dims: tuple[int, int] = (0, 1)

    def apply(self, tensors: Tensors, shapes: Shapes) -> Tensors:
        matched = {_filled(self.source, texts) for texts in _texts_of_any([self.source], tensors)}
        return {key: self._transposed(key, tensor) if key in matched else tensor for key, tensor in tensors.items()}

    def inverse(self) -> KeyRule:
        return self

    def _transposed(self, key: str, tensor: LazyTensor) -> LazyTensor:
        first, second = (_checked_dim(tensor, dim, key, self) for dim in self.dims)
        order = list(range(len(tensor.shape)))
        order[first], order[second] = order[second], order[first]
        return Reordered(tensor, tuple(order))


# --- templates --------------------------------------------------------------------------------------------------------------------


def _texts_of_any(sources: Iterable[str], keys: Iterable[str]) -> list[tuple[str, ...]]:
    """The texts that wildcards match, once per match of a key with one of ``sources``, in the order of the keys."""
    keys = list(keys)
    patterns = [
        re.compile("".join({"*": "(.+)", "#": "([0-9]+)"}.get(part, re.escape(part)) for part in re.split(r"([*#])", source)))
        for source in sources
    ]
    matches = (pattern.fullmatch(key) for key in keys for pattern in patterns)
    return list(dict.fromkeys(match.groups() for match in matches if match))


def _filled(template: str, texts: Sequence[str]) -> str:
    """``_filled("*.qkv.*", ("layers.0", "bias")) == "layers.0.qkv.bias"``"""
    parts = re.split(r"[*#]", template)
    if len(parts) - 1 != len(texts):
        raise ArgumentError(
            f"key_map has the template {template!r} with {len(parts) - 1} wildcards where {len(texts)} are needed",
            expected="the same number of * in each source and target of a rule",
            fix="fix the rule",
        )
    return "".join(part + text for part, text in zip(parts, (*texts, ""), strict=True))


def _take(tensors: Tensors, keys: Sequence[str], rule: KeyRule) -> list[LazyTensor]:
    missing = [key for key in keys if key not in tensors]
    if missing:
        raise failure(
            f"{rule} joins {len(keys)} tensors, and the checkpoint lacks {len(missing)} of them",
            items=missing,
            expected="all of them, or none",
            fix="fix the rule, or complete the checkpoint; nothing was changed",
            key=missing[0],
        )
    return [tensors.pop(key) for key in keys]


def _checked_joined(parts: Sequence[LazyTensor], dim: int, rule: KeyRule) -> LazyTensor:
    key = next(parts[0].stored()).key
    dim = _checked_dim(parts[0], dim, key, rule)
    rests = {(*part.shape[:dim], *part.shape[dim + 1 :]) for part in parts}
    if len(rests) > 1 or len({len(part.shape) for part in parts}) > 1:
        raise failure(
            f"tensors that {rule} joins have shapes that do not match",
            items=[f"{next(part.stored()).key} {part.shape}" for part in parts],
            expected=f"equal shapes except along dim {dim}",
            fix="fix the rule; nothing was changed",
            key=key,
        )
    return joined(parts, dim)


def _checked_dim(tensor: LazyTensor, dim: int, key: str, rule: KeyRule) -> int:
    if not -len(tensor.shape) <= dim < len(tensor.shape):
        raise _bad_dim(key, tensor, rule)
    return dim % len(tensor.shape)


def _bad_dim(key: str, tensor: LazyTensor, rule: KeyRule) -> Exception:
    return failure(
        f"{rule} names a dim that {key} {tensor.shape} does not have",
        expected=f"a dim of {len(tensor.shape)}",
        fix="fix the rule; nothing was changed",
        key=key,
    )
