"""A program: one model, how it is sharded, and what is done with it, as a value that prints as the Python that makes it.

It is drawn from a seed (``drawing.py``), run sharded and unsharded (``running.py``), and made smaller while it still fails
(``shrinking.py``). Every field has a default that means "nothing special", and ``repr`` leaves defaults out, so that a shrunk
program shows what it takes to fail:

    Program(world=2, root=Node("root", unit=Unit(), children=(Node("a", "linear", unit=Unit()),)), steps=(Step((Micro(),)),))
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field, fields, replace


class _Short:
    """``repr`` without the fields that have their default; those without one are positional."""

    def __repr__(self) -> str:
        shown = []
        for each in fields(self):  # type: ignore[arg-type]
            value = getattr(self, each.name)
            if each.default is MISSING and each.default_factory is MISSING:
                shown.append(repr(value))
            elif value != default_of(each):
                shown.append(f"{each.name}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"


def default_of(each: object) -> object:
    """The default of a dataclass field."""
    return each.default_factory() if each.default_factory is not MISSING else each.default  # type: ignore[attr-defined]


@dataclass(frozen=True, repr=False)
class Unit(_Short):
    """One call of ``fully_shard``. Siblings with the same ``label`` are one list, by the options of the first of them."""

    label: str = ""
    reshard: bool | int | None = None
    placement: str = ""  # "last", "largest": what shard_placement_fn cuts
    param_dtype: str = ""
    reduce_dtype: str = ""
    output_dtype: str = ""
    cast_inputs: bool = True
    offload: bool = False


@dataclass(frozen=True, repr=False)
class Node(_Short):
    """One module, and how its parent calls it. Leaves hold parameters; "chain", "residual", "sum" and "heads" hold children.

    "again" holds nothing: it calls a module that is elsewhere in the tree.
    """

    name: str
    kind: str = "chain"
    children: tuple[Node, ...] = ()
    unit: Unit | None = None
    # its parameters
    frozen: bool = False
    ignored: bool = False
    extension: bool = False
    float32: bool = False
    tied_to: str = ""  # its weight is that module's
    borrows: str = ""  # its forward uses that module's weight, too; "again": the module that it calls
    # how it is called
    times: int = 1
    checkpoint: str = ""  # "reentrant", "saved"
    skip: str = ""  # left out in odd steps ("step"), micro-batches ("micro"), on odd ranks ("rank")
    detach: str = ""  # "input", "output", "no_grad": beside a path that is not detached; "cut": without one
    in_place: str = ""  # what is changed: its "output", a "view" of it
    container: str = ""  # of its input and output
    method: bool = False  # another method than forward is called
    # what it does besides
    hook: str = ""
    stored: bool = False  # leaves a tensor on itself that the loss uses


@dataclass(frozen=True, repr=False)
class Action(_Short):
    """What is done before a micro-batch: ``kind`` is a method of ``running.Runner``, ``node`` and ``rank`` its arguments."""

    kind: str
    node: str = ""
    rank: int | None = None  # None: on all ranks


@dataclass(frozen=True, repr=False)
class Failure(_Short):
    """The module ``node`` raises in ``where``, forward or backward; it is caught, ``recovery`` follows, and the step begins anew."""

    node: str
    where: str = "forward"
    recovery: str = "reset"  # "reset": reset_iter_state; "model", "optimizer": whose zero_grad


@dataclass(frozen=True, repr=False)
class Micro(_Short):
    """One micro-batch: what is set before it, how many forwards it has, and in which order backwards follow."""

    actions: tuple[Action, ...] = ()
    sync: bool = True
    all_reduce: bool = True
    last: bool = True  # False: is_last_backward is set to False
    reshard: bool = True  # after backward
    forwards: int = 1
    order: str = "each"  # "each": forward, backward, forward, ...; "sum": one backward; "fifo", "lifo": forwards first
    input_grad: bool = False
    penalty: bool = False  # the loss holds the gradient of the input, too
    failure: Failure | None = None


@dataclass(frozen=True, repr=False)
class Step(_Short):
    """Micro-batches and an optimizer step."""

    micros: tuple[Micro, ...] = field(default_factory=lambda: (Micro(),))
    clip: bool = False


@dataclass(frozen=True, repr=False)
class Program(_Short):
    seed: int = 0
    world: int = 2
    mesh: tuple[int, ...] = ()  # (): all ranks shard; (2, 1): replicate, shard
    dim: int = 5
    root: Node = Node("root", children=(Node("a", "linear"),))
    steps: tuple[Step, ...] = field(default_factory=lambda: (Step(),))
    losses: str = "sum"  # "separate": a backward for each output of the root
    ignores: bool = False  # each rank's loss leaves out another output
    marks_last: bool = False  # is_last_backward is False for all backwards of a micro-batch but the last
    optimizer: str = ""  # one of OPTIMIZERS
    in_hooks: bool = False  # an optimizer for each parameter steps in its post-accumulate-grad hook; an offloaded one in backward
    unused: bool = False  # set_reduce_scatter_unused_params
    separate_group: bool = False
    max_buffers: int = 1
    force_sum: bool = False
    prefetch: str = ""  # "forward", "backward": set by hand, to the unit before the one that comes next
    gather: str = ""  # a plan that is forced: "direct", "packed"


# --- looking at programs -------------------------------------------------------------------------------------------------------

OFFLOADED = ("host", "half", "disk")  # fsdp2.optim.offloaded: where the states are, or those of half of the elements
OPTIMIZERS = ("", "foreach", "flat", *OFFLOADED)  # "foreach": torch's kernels for lists, which move no version counters
LEAVES = ("linear", "bare", "mlp", "norm", "scalar", "table", "turned", "conv", "idle", "again")
WITH_WEIGHT = ("linear", "bare")  # a (dim, dim) ``weight``, which others may be tied to or borrow


def walk(node: Node, above: tuple[Node, ...] = ()) -> Iterator[tuple[Node, tuple[Node, ...]]]:
    """Every node below and with ``node``, with those above it, outermost first; children before their parent."""
    for child in node.children:
        yield from walk(child, (*above, node))
    yield node, above


def nodes(program: Program) -> dict[str, Node]:
    return {node.name: node for node, _ in walk(program.root)}


def path_to(program: Program, name: str) -> tuple[Node, ...]:
    """The nodes from the root to this one."""
    return next((*above, node) for node, above in walk(program.root) if node.name == name)


def mapped(node: Node, change: dict[str, Node]) -> Node:
    """The tree with nodes replaced by name."""
    node = change.get(node.name, node)
    return replace(node, children=tuple(mapped(child, change) for child in node.children))


def units(program: Program) -> list[tuple[Unit, tuple[Node, ...]]]:
    """What is passed to ``fully_shard``, in the order of the calls: children first; a list when its last member is complete."""
    found: list[tuple[Unit, tuple[Node, ...]]] = []
    lists: dict[str, list[Node]] = {}
    for node, _ in walk(program.root):
        if node.unit is not None and node.unit.label:
            lists.setdefault(node.unit.label, []).append(node)
    for node, _ in walk(program.root):
        if node.unit is None:
            continue
        if not node.unit.label:
            found.append((node.unit, (node,)))
        elif (members := lists[node.unit.label])[-1] is node:
            assert members[0].unit is not None
            found.append((members[0].unit, tuple(members)))
    return found


def unit_above(node: Node, above: tuple[Node, ...]) -> Node | None:
    """The innermost node with a unit that holds ``node``'s parameters."""
    return next((each for each in (node, *reversed(above)) if each.unit is not None), None)


def has_unit(node: Node) -> bool:
    return any(each.unit is not None for each, _ in walk(node))


def is_exact(program: Program) -> bool:
    """Whether all is computed in fp64."""
    low = any(unit.param_dtype or unit.reduce_dtype or unit.output_dtype for unit, _ in units(program))
    return not low and not any(node.float32 for node, _ in walk(program.root))


# --- making them legal ---------------------------------------------------------------------------------------------------------


def tidy(program: Program) -> Program:
    """The nearest program that asks for nothing that is documented not to work, and refers to nothing that is not there."""
    known = nodes(program)
    seen: list[str] = []
    change = {}
    for node, above in walk(program.root):
        change[node.name] = _tidy_node(node, above, program, known, seen)
        seen.append(node.name)
    program = replace(program, root=mapped(program.root, change))
    shape = program.mesh
    if shape and math.prod(shape) != program.world:
        program = replace(program, mesh=())
    shards = (program.mesh or (program.world,))[-1]
    change = {}
    for node, _ in walk(program.root):
        unit = node.unit
        if unit is not None and type(unit.reshard) is int and (shards % unit.reshard or unit.reshard in (1, shards)):
            change[node.name] = replace(node, unit=replace(unit, reshard=True))
    program = replace(program, root=mapped(program.root, change))
    if program.root.kind != "heads" or len(program.root.children) < 2:
        program = replace(program, losses="sum", ignores=False)
    if program.ignores:
        program = replace(program, unused=True)
    steps = tuple(_tidy_step(step, program) for step in program.steps)
    if program.in_hooks and any(node.times > 1 or node.kind == "again" for node in nodes(program).values()):
        # Each re-entrant segment is a backward of its own, after which the hooks of a plain model's parameters run, too.
        saved = {name: replace(node, checkpoint=node.checkpoint.replace("reentrant", "saved")) for name, node in nodes(program).items()}
        program = replace(program, root=mapped(program.root, saved))
    single = all(len(s.micros) == 1 and s.micros[0].forwards == 1 and s.micros[0].failure is None for s in steps)
    plain = program.losses == "sum" and not any(s.clip or s.micros[0].penalty for s in steps)
    local = any(node.ignored or unit_above(node, above) is None for node, above in walk(program.root))
    if program.in_hooks and (local or not (single and plain)):
        program = replace(program, in_hooks=False)
    return replace(program, steps=steps)


def _tidy_node(node: Node, above: tuple[Node, ...], program: Program, known: dict[str, Node], seen: list[str]) -> Node:
    is_leaf = node.kind in LEAVES
    if not is_leaf or node.kind in ("idle", "again"):
        node = replace(node, in_place="")
    if not is_leaf or node.kind == "idle":
        node = replace(node, borrows="")
    # It may return its input itself; without grad mode, a sum of that means something else.
    if node.detach == "no_grad" and any(each.kind in ("idle", "again") for each, _ in walk(node)):
        node = replace(node, detach="")
    if not is_leaf or node.kind == "again":
        node = replace(node, frozen=False, ignored=False, extension=False, float32=False, tied_to="")
    if not above:
        node = replace(node, times=1, checkpoint="", skip="", detach="", container="", method=False, stored=False, hook="")
    tied = known.get(node.tied_to)
    if (
        tied is None
        or node.kind not in WITH_WEIGHT
        or tied.kind not in WITH_WEIGHT
        or node.tied_to not in seen
        or tied.tied_to
        or any(each.extension or each.ignored or each.float32 or each.frozen for each in (node, tied))
    ):
        node = replace(node, tied_to="")
    if node.kind == "again" and not _may_be_called(node, above, known.get(node.borrows), program):
        node = replace(node, kind="bare", borrows="")
    if node.kind == "again" and node.skip == "rank":
        node = replace(node, skip="")
    lent = known.get(node.borrows)
    lends = lent is not None and lent.name != node.name and lent.kind in WITH_WEIGHT
    if node.kind == "again":
        pass
    elif lent is None or not lends or lent.tied_to or lent.extension or lent.ignored or not _holds(node, above, lent, program):
        node = replace(node, borrows="")
    if node.kind not in ("linear", "bare", "mlp"):
        node = replace(node, extension=False)
    if program.ignores:  # no rank knows which segments the others recompute
        node = replace(node, checkpoint=node.checkpoint.replace("reentrant", "saved"))
    if node.ignored or node.float32:
        node = replace(node, extension=False)
    if node.skip == "micro" and program.root.unit is None:
        node = replace(node, skip="")  # a root whose last micro-batch has no backward hands nothing out
    if node.skip == "rank" and has_unit(node):
        node = replace(node, skip="")
    if node.kind == "conv" and node.checkpoint == "reentrant":  # what it returns is a view, which then no one may change
        node = replace(node, in_place="")
    if node.in_place or node.checkpoint or any(each.checkpoint for each in above):
        node = replace(node, stored=False)
    if node.hook == "backward":  # torch's own backward hooks forbid changing outputs in place
        node = replace(node, in_place="", container="")
    if node.method and (node.unit is None or node.hook):
        node = replace(node, method=False)
    if node.unit is not None and node.unit.label:
        siblings = above[-1].children if above else ()
        if sum(each.unit is not None and each.unit.label == node.unit.label for each in siblings) < 2:
            node = replace(node, unit=replace(node.unit, label=""))
        else:
            node = replace(node, method=False)
    return node


def _holds(node: Node, above: tuple[Node, ...], lent: Node, program: Program) -> bool:
    """Whether ``lent``'s weight is unsharded wherever ``node`` runs: its unit is one module, around ``node``."""
    for each, its_above in walk(program.root):
        if each.name == lent.name:
            owner = unit_above(each, its_above)
            return owner is not None and not owner.unit.label and any(owner.name == one.name for one in (node, *above))  # type: ignore[union-attr]
    return False


def _may_be_called(node: Node, above: tuple[Node, ...], other: Node | None, program: Program) -> bool:
    """Whether ``other`` is a unit of its own, below the same root, that doesn't come back to ``node``."""
    if other is None or other.unit is None or other.unit.label or node.unit is not None or program.ignores:
        return False
    if any(each.name == other.name for each in above) or any(each.kind == "again" for each, _ in walk(other)):
        return False
    inside = {each.name for each, _ in walk(other)}
    if any(each.borrows not in ("", *inside) for each, _ in walk(other)):  # what is lent is unsharded where the other is, not here
        return False
    path = path_to(program, other.name)
    if any(each.skip == "rank" for each in (*above, *path)):
        return False
    roots = [next((each.name for each in nodes if each.unit is not None), "") for nodes in (above, path)]
    return roots[0] == roots[1] != ""


def _tidy_step(step: Step, program: Program) -> Step:
    micros = step.micros or (Micro(),)
    names = nodes(program)
    sharded = {node.name for _, members in units(program) for node in members}
    plain = all(micro.sync and micro.all_reduce for micro in micros)
    plain = plain and not any(action.kind == "unsync" for micro in micros for action in micro.actions)
    tidied = []
    for index, micro in enumerate(micros):
        is_last = index == len(micros) - 1
        if is_last:
            micro = replace(micro, sync=True, all_reduce=True, last=True)
        if len(program.mesh) < 2 or not micro.sync:
            micro = replace(micro, all_reduce=True)
        if micro.forwards == 1:
            micro = replace(micro, order="each")
        actions = []
        for action in micro.actions:
            if action.kind in ("freeze", "thaw") and program.in_hooks:
                continue
            if action.kind in ("freeze", "thaw") and action.node not in names:
                continue
            if action.kind in ("unsync", "keep") and (is_last or not micro.sync):
                continue
            if action.kind in ("unshard", "unshard_later", "reshard", "unsync", "keep") and action.node not in sharded:
                continue
            if action.kind in ("write", "save", "reload") and index:
                continue
            if action.rank is not None and action.rank >= program.world:
                action = replace(action, rank=0)
            actions.append(action)
        if micro.penalty and (program.ignores or any(node.checkpoint or node.hook == "backward" for node in names.values())):
            micro = replace(micro, penalty=False)
        micro = replace(micro, input_grad=micro.input_grad or micro.penalty)
        failure = micro.failure
        if failure is not None and (failure.node not in names or any(other.failure for other in micros[:index])):
            failure = None
        if failure is not None and any(each.skip == "rank" for each in path_to(program, failure.node)):
            failure = None  # what only some ranks meet, the others cannot know of
        if failure is not None and program.ignores:
            failure = replace(failure, where="forward")
        if failure is not None and failure.recovery == "optimizer" and not plain:
            failure = replace(failure, recovery="model")
        tidied.append(replace(micro, actions=tuple(actions), failure=failure))
    local = any(node.ignored or unit_above(node, above) is None for node, above in walk(program.root))
    return replace(step, micros=tuple(tidied), clip=step.clip and not local)
