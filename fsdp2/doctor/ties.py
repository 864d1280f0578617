"""Are parameters that should be one still one? Loading with ``assign=True`` and re-assignment cut ties without a word.

Who says that two are tied: ``fully_shard``, which saw them; the model, by what transformers' models declare; the user, by ``ties``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ArgumentError
from ..inspect import parameters_of
from .finding import Finding
from .inspected import Inspected

Ties = Iterable[Sequence[str]]


def tie_findings(inspected: Inspected, ties: Ties) -> Iterator[Finding]:
    """ties: names of parameters that should be one, in sets of two or more. Raises: ArgumentError for a name that the model lacks"""
    model = inspected.model
    shown = dict(model.named_parameters(remove_duplicate=False))
    cut: list[tuple[str, ...]] = []
    for names in ties:
        unknown = [name for name in names if name not in shown]
        if unknown:
            raise ArgumentError(
                f"check got ties with {unknown}, which the model does not have",
                expected="names of parameters, as model.named_parameters(remove_duplicate=False) has them",
                fix="for instance ties=[('embedding.weight', 'head.weight')]",
            )
        if not _are_one([shown[name] for name in names]):
            cut.append(tuple(names))
    cut += _declared(model, shown)
    places = {(id(module), name): f"{prefix}.{name}" if prefix else name
              for prefix, module in model.named_modules() for name in module._parameters}  # fmt: skip
    for param in inspected.params:
        now = [owner.module._parameters.get(owner.name) for owner in param.owners]
        if len(now) > 1 and not _are_one(each for each in now if each is not None):
            cut.append(tuple(places.get((id(owner.module), owner.name), owner.name) for owner in param.owners))
    cut += _copies(inspected) if not cut else []
    for names in dict.fromkeys(tuple(sorted(names)) for names in cut):
        yield Finding(
            "cut-tie",
            "error",
            f"{' and '.join(names)} should be one parameter, but are separate",
            "each trains by itself from now on, and a checkpoint with only one of them loads a model that never existed",
            "tie them again (model.tie_weights(), or head.weight = embedding.weight) before fully_shard; load into the model with "
            "assign=False, or with fsdp2.checkpoint",
            names,
        )


def _declared(model: nn.Module, shown: dict[str, nn.Parameter]) -> Iterator[tuple[str, ...]]:
    """The ties that transformers' models declare: ``config.tie_word_embeddings``, and the two modules that have these weights."""
    config: Any = getattr(model, "config", None)
    if not getattr(config, "tie_word_embeddings", False) or not hasattr(model, "get_output_embeddings"):
        return
    given: Any = model
    pair = [getattr(module, "weight", None) for module in (given.get_input_embeddings(), given.get_output_embeddings())]
    if any(each is None for each in pair) or _are_one(pair):
        return
    names = [next((name for name, param in shown.items() if param is each), "") for each in pair]
    if all(names):
        yield tuple(names)


def _copies(inspected: Inspected) -> Iterator[tuple[str, ...]]:
    """An embedding, and another module's parameter of the same values: a copy, or loading with ``assign=True``, has cut their tie.

    Two embeddings are not compared: a model may have a copy of another.
    """
    alone = [param for param in inspected.params if param.sharded.requires_grad and len(param.owners) == 1]
    embeddings = [param for param in alone if isinstance(param.owners[0].module, nn.Embedding)]
    others = [param for param in alone if not isinstance(param.owners[0].module, nn.Embedding)]
    for embedding in embeddings:
        for param in others:
            if param.sharded.shape == embedding.sharded.shape and _has_same_values(param.local, embedding.local):
                yield embedding.fqn, param.fqn


def _has_same_values(first: Tensor, second: Tensor) -> bool:
    """Whether both have them, and not by a constant that initializes both."""
    if first.shape != second.shape or first.dtype != second.dtype or first.numel() == 0 or first.is_meta or second.is_meta:
        return False
    return torch.equal(first, second) and bool((first != first.flatten()[0]).any())


def _are_one(params: Iterable[Any]) -> bool:
    """Whether all are views of one parameter, sharded or not."""
    given = list(params)
    known = parameters_of(given)
    return len({id(known[id(each)].sharded if id(each) in known else each) for each in given}) < 2
