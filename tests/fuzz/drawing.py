"""A program for a seed.

A seed first draws which features its program may have at all, then the program: few features together, and each pair of
them often enough ("swarm testing"), instead of every feature in every program.
"""

from __future__ import annotations

import random
from dataclasses import replace

from fuzz.program import LEAVES, OPTIMIZERS, WITH_WEIGHT, Action, Failure, Micro, Node, Program, Step, Unit, nodes, tidy, units, walk

FEATURES = (
    "kinds", "frozen", "ignored", "extension", "float32", "tied", "borrows", "times", "checkpoint", "skip", "detach", "in_place",
    "container", "method", "hook", "stored", "lists", "reshard", "placement", "precision", "offload", "replicate", "micros", "forwards",
    "sync", "kept", "input_grad", "toggle", "evaluate", "look", "write", "unshard", "failure", "clip", "heads", "ignores", "in_hooks",
    "unused", "communication", "prefetch", "roots", "again", "penalty", "load", "some",
)  # fmt: skip


def draw(seed: int) -> Program:
    """The program of a seed, always the same."""
    return _Drawing(seed).program()


class _Drawing:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.has = set(self.random.sample(FEATURES, self.random.randint(2, 18)))
        self.names = (f"{a}{b}" for b in ("", "2", "3") for a in "abcdefghijklmnopqrstuvwxyz")

    def chance(self, feature: str, probability: float = 0.35) -> bool:
        return feature in self.has and self.random.random() < probability

    def program(self) -> Program:
        choice = self.random.choice
        world = choice((1, 2, 2, 2, 2, 2, 3, 4))
        mesh: tuple[int, ...] = ()
        if "replicate" in self.has:
            mesh = choice({1: [(1, 1)], 2: [(2, 1), (1, 2)], 3: [(3, 1)], 4: [(2, 2), (2, 2), (4, 1)]}[world])
        program = Program(seed=self.seed, world=world, mesh=mesh, dim=choice((3, 4, 5, 6)), root=self.tree())
        if "lists" in self.has:
            program = self.with_lists(program)
        program = self.with_references(program)
        program = replace(
            program,
            losses="separate" if self.chance("heads", 0.3) else "sum",
            ignores="ignores" in self.has,
            marks_last=self.random.random() < 0.5,
            in_hooks="in_hooks" in self.has,
            unused="unused" in self.has,
            separate_group=self.chance("communication", 0.3),
            max_buffers=choice((1, 2, 4)) if "communication" in self.has else 1,
            force_sum=self.chance("communication", 0.3),
            prefetch=choice(("forward", "backward", "")) if "prefetch" in self.has else "",
            gather=choice(("direct", "packed", "")) if "communication" in self.has else "",
        )
        return tidy(self.with_writes(replace(program, steps=self.steps(program))))

    def with_writes(self, program: Program) -> Program:
        """Optimizers, and writes and loads before steps: drawn last and apart, so that seeds keep the rest of their programs."""
        apart = random.Random(f"writes of {self.seed}")
        writes, reloads, in_hooks = apart.random() < 0.4, apart.random() < 0.4, apart.random() < 0.25
        steps = []
        for step in program.steps:
            added = []
            if writes:
                added += [apart.choice(("evaluate", "infer")), apart.choice(("write_local", "write_shown", "write_held"))]
            if reloads:
                added.append(apart.choice(("save", "reload", "reload", "")))
            if added:
                added.append(apart.choice(("evaluate", "")))
            first, *others = step.micros
            first = replace(first, actions=(*first.actions, *(Action(kind) for kind in added if kind)))
            if in_hooks:  # one backward a step
                steps.append(Step((replace(first, forwards=1, penalty=False, failure=None),)))
            else:
                steps.append(replace(step, micros=(first, *others)))
        if in_hooks:
            program = replace(program, losses="sum", in_hooks=True)
        return replace(program, steps=tuple(steps), optimizer=apart.choice(OPTIMIZERS))

    # --- modules ---

    def tree(self) -> Node:
        choice = self.random.choice
        heads = bool(self.has & {"heads", "ignores"})
        count = self.random.randint(2, 4)
        options = self.unit_options()
        children = tuple(self.node(1, options) for _ in range(count))
        root_unit: Unit | None = replace(options, reshard=self.reshard() if self.chance("reshard", 0.5) else None)
        if "roots" in self.has and not heads:
            root_unit = None
            children = tuple(each if each.unit else replace(each, unit=options) for each in children)
        return Node("root", "heads" if heads else choice(("chain", "chain", "sum")), children, unit=root_unit)

    def node(self, depth: int, options: Unit) -> Node:
        choice, chance = self.random.choice, self.chance
        is_leaf = depth >= 3 or self.random.random() < (0.5 if depth == 1 else 0.7)
        name = next(self.names)
        children: tuple[Node, ...] = ()
        if is_leaf:
            kind = choice(LEAVES[:-1]) if "kinds" in self.has else choice(("linear", "bare"))
        else:
            kind = choice(("chain", "residual", "sum"))
            children = tuple(self.node(depth + 1, options) for _ in range(self.random.randint(1, 3 if depth == 1 else 2)))
        unit = None
        if self.random.random() < (0.75 if depth == 1 else 0.3):
            unit = replace(options, reshard=self.reshard()) if "reshard" in self.has else options
            if chance("precision", 0.3):
                unit = self.with_precision(unit)
        return Node(
            name,
            kind,
            children,
            unit=unit,
            frozen=chance("frozen"),
            ignored=chance("ignored", 0.2),
            extension=chance("extension", 0.5),
            float32=chance("float32", 0.3),
            times=choice((2, 2, 3)) if chance("times") else 1,
            checkpoint=choice(("reentrant", "saved")) if chance("checkpoint", 0.4) else "",
            skip=choice(("step", "micro", "rank")) if chance("skip") else "",
            detach=choice(("input", "output", "no_grad", "cut")) if chance("detach", 0.25) else "",
            in_place=choice(("output", "view")) if chance("in_place", 0.4) else "",
            container=choice(("tuple", "list", "dict", "named", "record", "nested", "keyword")) if chance("container", 0.5) else "",
            method=chance("method", 0.4),
            hook=choice(("forward", "pre", "backward", "tensor")) if chance("hook") else "",
            stored=chance("stored", 0.3),
        )

    def reshard(self) -> bool | int | None:
        return self.random.choice((True, False, None, 2))

    def unit_options(self) -> Unit:
        unit = Unit(
            placement=self.random.choice(("last", "largest")) if "placement" in self.has else "",
            offload=self.chance("offload", 0.8),
        )
        return self.with_precision(unit) if "precision" in self.has else unit

    def with_precision(self, unit: Unit) -> Unit:
        choice = self.random.choice
        return replace(
            unit,
            param_dtype=choice(("", "float32", "float32")),
            reduce_dtype=choice(("", "float32", "float64")),
            output_dtype=choice(("", "", "float32", "float64")),
            cast_inputs=choice((True, True, False)),
        )

    def with_lists(self, program: Program) -> Program:
        """Some neighbors become lists of modules."""
        change = {}
        for node, _ in walk(program.root):
            if len(node.children) >= 2 and self.random.random() < 0.7:
                label = f"list{len(change)}"
                first = self.random.randrange(len(node.children) - 1)
                members = node.children[first : first + self.random.randint(2, 3)]
                options = self.unit_options()
                if "reshard" in self.has:
                    options = replace(options, reshard=self.reshard())
                for member in members:
                    change[member.name] = label, options
        done = {name: replace(nodes(program)[name], unit=replace(options, label=label)) for name, (label, options) in change.items()}
        root = program.root
        for name, node in done.items():  # one after another: a member may be within another
            root = _with_unit(root, name, node.unit)
        return replace(program, root=root)

    def with_references(self, program: Program) -> Program:
        """Ties and borrowed weights, once all names are known."""
        weighted = [node.name for node, _ in walk(program.root) if node.kind in WITH_WEIGHT]
        root = program.root
        for name in weighted[1:]:
            if self.chance("tied", 0.4):
                root = _changed(root, name, tied_to=self.random.choice(weighted[: weighted.index(name)]))
        for node, _ in walk(program.root):
            if node.kind in LEAVES and self.chance("again", 0.5):
                named = [each.name for each, _ in walk(program.root) if each.unit is not None and each.name != "root"]
                if named and node.unit is None:
                    root = _changed(root, node.name, kind="again", borrows=self.random.choice(named))
            elif node.kind in LEAVES and weighted and self.chance("borrows", 0.4):
                root = _changed(root, node.name, borrows=self.random.choice(weighted))
        return replace(program, root=root)

    # --- steps ---

    def steps(self, program: Program) -> tuple[Step, ...]:
        return tuple(
            Step(tuple(self.micro(program) for _ in range(self.num_micros())), clip=self.chance("clip", 0.5))
            for _ in range(self.random.randint(2, 4))
        )

    def num_micros(self) -> int:
        many = self.has & {"micros", "sync"}
        return self.random.randint(1, 3) if many else 1

    def micro(self, program: Program) -> Micro:
        choice, chance = self.random.choice, self.chance
        forwards = choice((2, 2, 3)) if chance("forwards", 0.5) else 1
        failure = None
        if chance("failure", 0.3):
            failure = Failure(
                choice(list(nodes(program))), choice(("forward", "backward")), choice(("reset", "reset", "model", "optimizer"))
            )
        return Micro(
            actions=self.actions(program),
            sync=not chance("sync", 0.5),
            all_reduce=not chance("sync", 0.5),
            last=not chance("sync", 0.4),
            reshard=not chance("kept", 0.5),
            forwards=forwards,
            order=choice(("each", "sum", "fifo", "lifo")),
            input_grad=chance("input_grad", 0.6),
            penalty=chance("penalty", 0.5),
            failure=failure,
        )

    def actions(self, program: Program) -> tuple[Action, ...]:
        choice, chance = self.random.choice, self.chance
        names = list(nodes(program))
        sharded = [node.name for _, members in units(program) for node in members]
        rank = choice((None, 0, 1))
        found = []
        if chance("evaluate"):
            found.append(Action(choice(("evaluate", "infer", "forward_only"))))
        if chance("toggle", 0.5):
            found.append(Action(choice(("freeze", "thaw")), choice(names)))
        if chance("look", 0.5):
            found.append(Action(choice(("look", "state_dict")), rank=rank))
        if chance("write"):
            found.append(Action("write"))
        if chance("unshard") and sharded:
            found.append(Action(choice(("unshard", "unshard_later", "reshard")), choice(sharded)))
        if chance("load", 0.4):
            found.append(Action(choice(("load", "apply"))))
        if chance("some", 0.5) and sharded:
            found.append(Action(choice(("unsync", "keep")), choice(sharded)))
        if chance("write", 0.1):
            found.append(Action("zero_grad"))
        return tuple(found)


def _changed(node: Node, name: str, **values: object) -> Node:
    if node.name == name:
        node = replace(node, **values)  # type: ignore[arg-type]
    return replace(node, children=tuple(_changed(child, name, **values) for child in node.children))


def _with_unit(node: Node, name: str, unit: Unit | None) -> Node:
    return _changed(node, name, unit=unit)
