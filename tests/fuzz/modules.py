"""A program's tree as modules. Sharded and unsharded run the same classes; nothing here knows of sharding.

``State`` is what the modules of one model look at while they run: which step, whose data, who has to fail.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fuzz.program import LEAVES, Failure, Node, Program, walk
from harness.subclasses import Wrapper


class PlannedError(RuntimeError):
    """What a module raises that has to fail."""


@dataclass
class State:
    step: int = 0
    micro: int = 0
    rank: int = 0
    failure: Failure | None = None  # of the micro-batch under way, until it has happened
    parts: dict[str, Part] = field(default_factory=dict)


class Doubled(Wrapper):
    """A parameter that says itself how it is all-gathered: twice its values, which is exact."""

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: tuple[int, ...], module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        return (self._values * 2,), None

    def fsdp_post_all_gather(
        self, gathered: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        (values,) = gathered
        if out is not None:
            out.copy_(values / 2)
            return None
        halved = (values / 2).to(param_dtype)
        return halved, (values, halved)


class Raising(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise PlannedError


# --- containers ----------------------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    main: Tensor
    other: Any


@dataclass
class Record:
    main: Tensor
    other: Any


def packed(x: Tensor, container: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a call that carry ``x``."""
    match container:
        case "tuple":
            return ((x, 1),), {}
        case "list":
            return ([x, None],), {}
        case "dict":
            return ({"main": x, "other": "text"},), {}
        case "named":
            return (Pair(x, 2.5),), {}
        case "record":
            return (Record(x, None),), {}
        case "nested":
            return ({"deep": [(x,)]},), {}
        case "keyword":
            return (), {"given": x}
    return (x,), {}


def unpacked(given: Any) -> Tensor:
    """The tensor in a container; a second one is added, so that it is in the graph."""
    match given:
        case {"deep": [(x,)]}:
            return x
        case {"main": x, "other": other}:
            pass
        case Pair(x, other) | Record(x, other):
            pass
        case [x, other]:
            pass
        case _:
            return given
    return x + 0.5 * other if isinstance(other, Tensor) and other.is_floating_point() else x


def returned(y: Tensor, container: str) -> Any:
    """What a module with this container returns: most hold a second tensor, which depends on the first."""
    match container:
        case "tuple":
            return (y, y.sum(0))
        case "list":
            return [y, torch.arange(3)]
        case "dict":
            return {"main": y, "other": y[:1]}
        case "named":
            return Pair(y, None)
        case "record":
            return Record(y, y * 0.5)
        case "nested":
            return {"deep": [(y,)]}
    return y


# --- modules -------------------------------------------------------------------------------------------------------------------


class Part(nn.Module):
    """One node. ``x`` and what comes out are (batch, dim)."""

    def __init__(self, node: Node, dim: int, state: State) -> None:
        super().__init__()
        self.node = node
        self.state = state
        self.aux: Tensor | None = None
        state.parts[node.name] = self
        for child in node.children:
            self.add_module(child.name, Part(child, dim, state))
        dtype = torch.float32 if node.float32 else torch.float64
        for name, values in _initial(node, dim).items():
            values = values.to(dtype)
            if node.kind == "turned" and name == "weight":
                values = values.t()
            elif node.kind == "conv" and name == "weight":
                values = values.to(memory_format=torch.channels_last)
            self.register_parameter(name, nn.Parameter(values, requires_grad=not node.frozen))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)

    def other(self, *args: Any, **kwargs: Any) -> Any:
        """For ``register_fsdp_forward_method``."""
        return self.run(*args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        node, state = self.node, self.state
        x = unpacked(args[0] if args else kwargs["given"])
        failure = state.failure
        fails = failure is not None and failure.node == node.name
        if fails and failure is not None and failure.where == "forward":
            state.failure = None
            raise PlannedError
        if node.kind == "heads":
            return self._heads(x)
        y = self._leaf(x) if node.kind in LEAVES else self._composite(x)
        if node.borrows and node.kind != "again":
            y = y + _linear(x.tanh(), state.parts[node.borrows].weight, None)
        if fails:
            y = Raising.apply(y)
        if node.hook == "tensor" and y.requires_grad and torch.is_grad_enabled():
            y = y * 1  # its own: what another module returned, or x, may be a view or a cast of it in the sharded model
            y.register_hook(lambda grad: grad * 0.9)
        if node.stored:
            self.aux = y.square().mean() * 0.1
        return returned(y, node.container)

    def _heads(self, x: Tensor) -> tuple[Tensor, ...]:
        first, *heads = (self._modules[child.name] for child in self.node.children)
        x = called(first, x)
        return (x, *(called(head, x) for head in heads))

    def _composite(self, x: Tensor) -> Tensor:
        children = [self._modules[child.name] for child in self.node.children]
        if self.node.kind == "sum":
            outputs = [called(child, x) for child in children]
            return torch.stack(outputs).sum(0) if outputs else x
        y = x
        for child in children:
            y = called(child, y)
        return x + y if self.node.kind == "residual" else y

    def _leaf(self, x: Tensor) -> Tensor:
        kind = self.node.kind
        if kind == "idle":
            return x
        if kind == "again":
            return _plainly(self.state.parts[self.node.borrows], x)
        weight = self.weight
        given, x = x, x.to(weight.dtype)
        if kind in ("linear", "bare"):
            y = F.linear(x.tanh(), weight, self._parameters.get("bias"))
        elif kind == "mlp":
            y = F.linear(F.linear(x, weight, self.bias).tanh(), self.down)
        elif kind == "norm":
            y = F.layer_norm(x, x.shape[-1:], weight, self.bias)
        elif kind == "scalar":
            y = x.tanh() * weight
        elif kind == "table":
            y = x + F.embedding(torch.arange(len(x)) % len(weight), weight)
        elif kind == "turned":
            y = x.tanh() @ weight
        else:
            assert kind == "conv"
            y = F.conv2d(x.tanh()[:, :, None, None], weight, self.bias).flatten(1)
        return y.to(given.dtype)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x.to(weight.dtype), weight, bias).to(x.dtype)


def _initial(node: Node, dim: int) -> dict[str, Tensor]:
    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64) * 0.7

    match node.kind:
        case "linear":
            return {"weight": random(dim, dim), "bias": random(dim)}
        case "bare":
            return {"weight": random(dim, dim)}
        case "mlp":
            return {"weight": random(dim + 3, dim), "bias": random(dim + 3), "down": random(dim, dim + 3)}
        case "norm":
            return {"weight": 1 + random(dim), "bias": random(dim)}
        case "scalar":
            return {"weight": 1 + random()}
        case "table":
            return {"weight": random(3, dim)}
        case "turned":
            return {"weight": random(dim, dim)}
        case "conv":
            return {"weight": random(dim, dim, 1, 1), "bias": random(dim)}
        case "idle":
            return {"weight": random(dim)}
    return {}


def called(child: Part, x: Tensor) -> Tensor:
    """``child`` applied to ``x`` in the manner that its node asks for."""
    node, state = child.node, child.state
    odd = {"step": state.step, "micro": state.micro, "rank": state.rank}.get(node.skip, 0)
    if odd % 2:
        return x * 1
    for _ in range(node.times):
        x = _called_once(child, x)
    return x


def _called_once(child: Part, x: Tensor) -> Tensor:
    node = child.node
    given = x.detach() if node.detach in ("input", "cut") else x
    run = functools.partial(_plainly, child)
    if node.detach == "no_grad":
        with torch.no_grad():
            y = run(given)
        return y + x
    if node.checkpoint:
        if node.checkpoint == "reentrant" and torch.is_grad_enabled() and not given.requires_grad:
            given = given.detach().requires_grad_()  # without it, such a checkpoint has no backward
        y = checkpoint(run, given, use_reentrant=node.checkpoint == "reentrant")
    else:
        y = run(given)
    if node.in_place == "output":
        y.mul_(0.9)
    elif node.in_place == "view":
        y[:, :2].mul_(0.9)
    if node.detach == "input":
        y = y + x
    elif node.detach == "output":
        y = y.detach() + x
    return y


def _plainly(child: Part, x: Tensor) -> Tensor:
    """A call of the module alone, with its container around the tensor."""
    method: Callable[..., Any] = child.other if child.node.method else child
    args, kwargs = packed(x, child.node.container)
    return unpacked(method(*args, **kwargs))


def build(program: Program, state: State) -> Part:
    """The unsharded model, the same in every process."""
    torch.manual_seed(program.seed)
    model = Part(program.root, program.dim, state)
    for node, _ in walk(program.root):
        part = state.parts[node.name]
        if node.tied_to:
            part.weight = state.parts[node.tied_to].weight
        if node.hook == "forward":
            part.register_forward_hook(lambda m, args, output: _scaled(output))
        elif node.hook == "pre":
            part.register_forward_pre_hook(lambda m, args: _scaled(args) if args else None)
        elif node.hook == "backward":
            part.register_full_backward_hook(lambda m, grad_inputs, grads: _scaled(grad_inputs))
    return model


def _scaled(value: Any) -> Any:
    return torch.utils._pytree.tree_map_only(Tensor, lambda x: x * 0.9 if x.is_floating_point() else x, value)
