"""LoRA layers as PEFT builds them, told by their attributes: merged into the weights that they adapt, or alone.

Each rank merges its own shard, in fp32 at least, before the weights are gathered. The factors are small, and whole on every rank.

Worked example, rank 1 of 2, a (6, 4) weight, ``r=2``: rows [3, 6) += scaling * B[3:6] @ A, for whole B (6, 2) and A (2, 4).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from ..checkpoint.model_tensors import WRAPPERS, ModelTensor, all_names
from ..checkpoint.shard_geometry import Piece
from ..errors import ArgumentError, ParameterError

Adapters = Literal["merged", "only", "separate"]
_PEFT = "base_model.model."


@dataclass(frozen=True, eq=False)
class Merge:
    """``scaling * B @ A``, to be added to a weight. is_transposed: the weight is (in, out)"""

    a: ModelTensor
    b: ModelTensor
    scaling: float
    is_transposed: bool

    def add(self, shard: Tensor, pieces: Iterable[Piece], whole: Mapping[ModelTensor, Tensor]) -> None:
        """Add what belongs to ``shard``, in place. pieces: those of the weight that it has"""
        a, b = (whole[each].to(shard.device, shard.dtype) for each in (self.a, self.b))
        for piece in pieces:
            first, second = piece.box.slices
            added = (b[second] @ a[:, first]).t() if self.is_transposed else b[first] @ a[:, second]
            shard[piece.local.slices] += self.scaling * added


Merges = dict[ModelTensor, list[Merge]]


def adapted(model: nn.Module, tensors: list[ModelTensor], how: Adapters) -> tuple[list[ModelTensor], Merges]:
    """The tensors to publish, with the names that they have then, and what is added to which of them. Collective: no

    Raises: ParameterError for layers whose merged weight is another than ``weight + scaling * B @ A``
    """
    layers = {".".join(part for part in name.split(".") if part not in WRAPPERS): module for name, module in all_names(model)}
    adapting = {path: layer for path, layer in layers.items() if _is_lora(layer) or _is_saved_whole(layer)}
    if how == "separate" or (not adapting and how == "merged"):
        return tensors, {}
    kept = []
    for each in tensors:
        name = _name(each.name, adapting, how == "only")
        if name is not None:
            each.names = [name if how == "only" else name.removeprefix(_PEFT), *each.names[1:]]
            kept.append(each)
    twice = [name for name in {each.name for each in kept} if sum(each.name == name for each in kept) > 1]
    if twice or not kept:
        raise ArgumentError(
            f'publish(adapters="{how}") finds {len(twice)} tensors in several active adapters' if twice else "publish finds no adapter",
            items=twice,
            expected="a model with one active adapter",
            fix='call model.set_adapter(name), or pass adapters="separate"',
        )
    if how == "only":
        return kept, {}
    known = {id(each.tensor): each for each in tensors}
    merges: Merges = {}
    for path, layer in adapting.items():
        for adapter in _active(layer) if _is_lora(layer) else ():
            weight, merge = _merge(path, layer, adapter, known)
            merges.setdefault(weight, []).append(merge)
    return kept, merges


def _is_lora(module: Any) -> bool:
    return all(hasattr(module, name) for name in ("base_layer", "lora_A", "lora_B", "scaling"))


def _is_saved_whole(module: Any) -> bool:
    """Of PEFT's ``modules_to_save``."""
    return hasattr(module, "original_module") and hasattr(module, "modules_to_save")


def _active(layer: Any) -> Iterator[str]:
    """The adapters that forward adds to the layer, and that its weight has not in it already."""
    if not getattr(layer, "disable_adapters", False):
        merged = getattr(layer, "merged_adapters", ())
        there = [*getattr(layer, "lora_A", ()), *getattr(layer, "lora_embedding_A", ()), *getattr(layer, "modules_to_save", ())]
        yield from (each for each in getattr(layer, "active_adapters", there) if each in there and each not in merged)


def _name(name: str, adapting: Mapping[str, Any], is_alone: bool) -> str | None:
    """The name of a published tensor; None: it is not published."""
    parts = name.split(".")
    for end in range(len(parts)):
        path, rest = ".".join(parts[:end]), parts[end:]
        if path in adapting:
            layer = adapting[path]
            if rest[0] in ("base_layer", "original_module"):
                is_replaced = rest[0] == "original_module" and any(True for _ in _active(layer))
                return None if is_alone or is_replaced else ".".join([*parts[:end], *rest[1:]])
            if len(rest) < 2 or rest[1] not in _active(layer) or not (is_alone or rest[0] == "modules_to_save"):
                return None
            return ".".join([*parts[:end], *(rest[:1] if _is_lora(layer) else []), *rest[2:]])
    return None if is_alone else name


def _merge(path: str, layer: Any, adapter: str, known: Mapping[int, ModelTensor]) -> tuple[ModelTensor, Merge]:
    is_embedding = adapter not in layer.lora_A
    tables = (layer.lora_embedding_A, layer.lora_embedding_B) if is_embedding else (layer.lora_A, layer.lora_B)
    a, b = (known[id(table[adapter] if is_embedding else table[adapter].weight)] for table in tables)
    weight = known.get(id(layer.base_layer.weight))
    problem = None
    if adapter in getattr(layer, "lora_magnitude_vector", ()):
        problem = "is DoRA, which scales the merged weight"
    elif not is_embedding and layer.lora_B[adapter].bias is not None:
        problem = "has a bias of its own"
    elif weight is None or weight.tensor.ndim != 2 or not weight.tensor.is_floating_point():
        problem = f"adapts a {type(layer.base_layer).__name__}"
    elif len(weight.names) > 1:
        problem = f"adapts a weight that is tied: {', '.join(weight.names)}"
    if problem is not None or weight is None:
        raise ParameterError(
            f"publish cannot merge the adapter {adapter} of {path}, which {problem}",
            expected="LoRA of linear layers and embeddings, whose weights are not tied",
            fix='pass adapters="only" or "separate", or merge with PEFT before sharding',
        )
    return weight, Merge(a, b, float(layer.scaling[adapter]), is_embedding or bool(getattr(layer, "fan_in_fan_out", False)))
