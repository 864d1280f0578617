"""From a captured graph of the unsharded model to one over shards.

The compiler captured the model with a stand-in as the input for each parameter. Here those inputs are replaced: each bucket's flat
shards and landings become inputs, and a node that unshards the bucket is put before the first node that uses one of its parameters.
Groups whose parameters are first used one after another go into one bucket up to a size.

Worked example: x, w1, b1, w2 -> linear(x, w1, b1), linear(_, w2), where w1 and b1 are one group and w2 another, becomes

    x, flat1, landing1, flat2, landing2 -> (w1, b1) = unsharded(flat1, landing1); linear; (w2,) = unsharded(flat2, landing2); linear
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from ..errors import CompileError
from . import torch_names as compiler
from .bucket import Bucket, Member
from .stand_ins import Face


@dataclass(frozen=True)
class Rewritten:
    """module: the new graph; inputs: fake tensors, and numbers, that it is compiled for
    kept: which of the captured graph's inputs (by position) are its first inputs; for each bucket the rest follows
    """

    module: fx.GraphModule
    inputs: list[Any]
    kept: list[int]
    buckets: list[Bucket]

    def arguments(self, captured: Sequence[Any]) -> list[Any]:
        """The arguments of the new graph, given those of the captured one."""
        arguments = [captured[position] for position in self.kept]
        for bucket in self.buckets:
            arguments += _tensors_of(bucket)
            for landing, used in zip(bucket.landings, bucket.used, strict=True):
                landing.used |= used
        return arguments


def rewritten(
    captured: fx.GraphModule,
    inputs: Sequence[Any],
    faces: Sequence[Face],
    keeps: Callable[[Face], bool],
    bucket_nbytes: int,
) -> Rewritten:
    """Replace the stand-ins of ``faces`` among ``inputs``. Does not change ``captured``.

    keeps:         whether backward is to find a group's unsharded parameters saved
    bucket_nbytes: unsharded size up to which groups are merged; a larger group is a bucket of its own
    Raises:        CompileError if the graph writes to a parameter
    """
    placeholders = [node for node in captured.graph.nodes if node.op == "placeholder"]
    places = {id(stand_in): (face, index) for face in faces for index, stand_in in enumerate(face.stand_ins)}
    of_param = {node: places[id(value)] for node, value in zip(placeholders, inputs, strict=True) if id(value) in places}
    _refuse_writes(of_param)
    first_uses = _first_uses(captured.graph, of_param)
    buckets = _buckets([(face, keeps(face)) for face in first_uses], bucket_nbytes)
    before: dict[fx.Node, list[Bucket]] = {}
    for bucket in buckets:
        before.setdefault(first_uses[bucket.members[0].face], []).append(bucket)

    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    names: dict[tuple[int, int], list[fx.Node]] = {}
    for node, (face, index) in of_param.items():
        names.setdefault((id(face), index), []).append(node)
    kept = [position for position, node in enumerate(placeholders) if node not in of_param]
    for position in kept:
        copies[placeholders[position]] = graph.node_copy(placeholders[position])
    fakes = [inputs[position] for position in kept]  # as they came: of numbers the compiler knows them again by identity
    tensors: dict[int, list[fx.Node]] = {}
    for number, bucket in enumerate(buckets):
        tensors[id(bucket)] = []
        for index, tensor in enumerate(_tensors_of(bucket)):
            node = graph.placeholder(f"fsdp2_bucket{number}_{index}")
            node.meta["example_value"] = compiler.fake_like(tensor, placeholders)
            fakes.append(node.meta["example_value"])
            compiler.name_input(node)
            tensors[id(bucket)].append(node)
    for node in captured.graph.nodes:
        if node.op == "placeholder":
            continue
        for bucket in before.get(node, ()):
            _unshard(graph, bucket, tensors[id(bucket)], names, copies)
        copies[node] = graph.node_copy(node, copies.__getitem__)
    module = compiler.copy_capture(captured, graph, copies)
    return Rewritten(module, fakes, kept, buckets)


def _tensors_of(bucket: Bucket) -> list[Tensor]:
    """The arguments of ``bucket.unsharded`` as they are now."""
    flats = []
    for member in bucket.members:
        flat = member.face.group.flat
        assert flat is not None
        flats.append(flat)
    return [*flats, *(landing.leaf for landing in bucket.landings)]


def _first_uses(graph: fx.Graph, of_param: dict[fx.Node, tuple[Face, int]]) -> dict[Face, fx.Node]:
    """For each group in the order of its first use, the node that uses it first."""
    first: dict[Face, fx.Node] = {}
    for node in graph.nodes:
        for used in node.all_input_nodes:
            if used in of_param:
                first.setdefault(of_param[used][0], node)
    return first


def _buckets(faces: Sequence[tuple[Face, bool]], nbytes: int) -> list[Bucket]:
    """Merge neighbors that agree in process groups, dtypes and reduction while their sum stays within ``nbytes``."""
    buckets: list[Bucket] = []
    for face, keep in faces:
        own = Bucket([Member(face, face.landing)], keep)
        last = buckets[-1] if buckets else None
        if last is not None and last.kind == own.kind and last.unsharded_nbytes + own.unsharded_nbytes <= nbytes:
            buckets[-1] = Bucket([*last.members, *own.members], keep)
        else:
            buckets.append(own)
    return buckets


def _unshard(
    graph: fx.Graph,
    bucket: Bucket,
    tensors: Sequence[fx.Node],
    names: dict[tuple[int, int], list[fx.Node]],
    copies: dict[fx.Node, fx.Node],
) -> None:
    """Append the node that unshards ``bucket``, and let its results be the copies of the parameters' inputs."""

    def unsharded(*arguments: Tensor) -> tuple[Tensor, ...]:
        return bucket.unsharded(*arguments)

    unsharded.__module__ = __name__  # of a node's function the graph prints module and name
    whole = graph.call_function(unsharded, tuple(tensors))
    compiler.mark_recomputed(whole, not bucket.keep)
    position = 0
    for member in bucket.members:
        for index in range(len(member.face.stand_ins)):
            for node in names.get((id(member.face), index), ()):
                copies[node] = graph.call_function(operator.getitem, (whole, position))
            position += 1


def _refuse_writes(of_param: dict[fx.Node, tuple[Face, int]]) -> None:
    writes = []
    for node, (face, index) in of_param.items():
        for user in node.users:
            name = user.target if isinstance(user.target, str) else getattr(user.target, "__name__", "")
            in_place = (name.endswith("_") and not name.endswith("__")) or user.target in _IN_PLACE
            if in_place and user.args and user.args[0] is node:
                lines = str(user.meta.get("stack_trace") or "").strip().splitlines()
                where = " ".join(line.strip() for line in lines[-2:])
                writes.append(f"{face.group.params[index].fqn}: {name} {where}")
    if writes:
        raise CompileError(
            f"forward writes to {len(writes)} parameters",
            items=writes,
            expected="parameters that forward only reads: in a captured graph they are computed from the shards and thrown away",
            fix="write to the sharded parameter under torch.no_grad() between steps, or run this model eagerly",
        )


_IN_PLACE = (operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.setitem)
