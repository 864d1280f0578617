"""Run a program's steps, sharded on this rank or unsharded for all ranks in turn, and keep what there is to compare.

Both go through the same ``Runner``: what differs is who averages gradients. Unsharded, each rank's part of a step is run with that
rank's data, from the same values; then the gradients are averaged as data parallelism does.
"""

from __future__ import annotations

import contextlib
import copy
import tempfile
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fuzz.modules import PlannedError, State, build
from fuzz.program import OFFLOADED, Failure, Micro, Program, Step, walk
from fuzz.sharding import shard

LATE = ("unsync", "keep")  # actions that change one unit, after what is set for all of them
Grads = dict[str, Tensor | None]


class NoGraphError(Exception):
    """A loss of the program has no graph."""


@dataclass
class Seen:
    """What one rank saw in one step: its own losses, outputs and gradients of inputs; and gradients and values of parameters."""

    own: list[tuple[str, Tensor | None]] = field(default_factory=list)
    grads: Grads = field(default_factory=dict)
    values: dict[str, Tensor] = field(default_factory=dict)


class Runner:
    """One model and its optimizers. ``roots`` are its sharded roots; unsharded there are none."""

    def __init__(self, program: Program, rank: int, lib: Any = None, dtype: torch.dtype | None = None) -> None:
        self.program = program
        self.state = State(rank=rank)
        self.lib = lib
        self.dtype = dtype or torch.float64
        self.model = build(program, self.state).to(dtype)
        self.roots = shard(program, self.model, self.state, lib) if lib is not None else []
        self.local = _local(program)
        # As they are between steps: what is registered may be unsharded, whenever a program asks for that.
        self.params = dict(self.model.named_parameters())
        self.fired: list[str] = []
        params = {name: param for name, param in self.params.items() if name not in self.local}
        if program.in_hooks and lib is not None and program.optimizer not in OFFLOADED:
            hooked = {name: self._new_optimizer([param]) for name, param in params.items() if param.requires_grad}
            for name, optimizer in hooked.items():
                params[name].register_post_accumulate_grad_hook(lambda _, given=(name, optimizer): self._update(*given))
            self.optimizers = list(hooked.values())
        else:
            self.optimizers = [self._new_optimizer(list(params.values()))] if params else []
        self.saved: Any = None

    def _new_optimizer(self, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        which, optim = self.program.optimizer, getattr(self.lib, "optim", None)
        # With ``unused`` a gradient of zeros may stand for none, by which momentum would move the parameter.
        options = {"lr": 0.1, "momentum": 0.0 if self.program.unused else 0.5}
        if optim is not None and which == "flat":
            return optim.flat(torch.optim.SGD, params, **options)
        if optim is not None and which in OFFLOADED:
            policy = optim.DiskOffloadPolicy(tempfile.gettempdir()) if which == "disk" else self.lib.CPUOffloadPolicy(pin_memory=False)
            options |= {"fraction": 0.5 if which == "half" else 1.0, "step_in_backward": self.program.in_hooks}
            return optim.offloaded(torch.optim.SGD, params, policy, **options)
        return torch.optim.SGD(params, foreach=which != "", **options)

    def _update(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        self.fired.append(name)
        optimizer.step()
        optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for param in self.params.values():
            param.grad = None

    # --- a step ---

    def forwards_and_backwards(self, index: int, step: Step, own: list[tuple[str, Tensor | None]]) -> None:
        """The micro-batches of a step, and once more if a module of it failed."""
        self.state.step = index
        failure = next((micro.failure for micro in step.micros if micro.failure is not None), None)
        for attempt in range(2 if failure else 1):
            own.clear()
            failed = False
            try:
                for number, micro in enumerate(step.micros):
                    self.state.micro = number
                    self.state.failure = micro.failure if attempt == 0 else None
                    self.micro(micro, own)
            except PlannedError:
                failed = True
            if not failed:
                return
            assert failure is not None
            self.recover(failure)

    def micro(self, micro: Micro, own: list[tuple[str, Tensor | None]]) -> None:
        for action in micro.actions:
            if action.kind not in LATE and (action.rank is None or action.rank == self.state.rank):
                getattr(self, action.kind)(action.node, own)
        for root in self.roots:
            root.set_requires_gradient_sync(micro.sync)
            if not micro.all_reduce:
                root.set_requires_all_reduce(False)
            root.set_reshard_after_backward(micro.reshard)
        for action in micro.actions:
            if action.kind in LATE:
                getattr(self, action.kind)(action.node, own)
        losses: list[Tensor] = []
        inputs: list[Tensor] = []
        for number in range(micro.forwards):
            x = self.data(number)
            if micro.input_grad:
                x.requires_grad_()
            inputs.append(x)
            losses.append(self.loss(x, own, number, micro.penalty))
            if micro.order == "each":
                self.backward(losses.pop(), micro, is_last=number == micro.forwards - 1)
        if micro.order == "sum":
            self.backward(torch.stack(losses).sum(), micro, is_last=True)
        elif micro.order != "each":
            for number, loss in enumerate(losses if micro.order == "fifo" else reversed(losses)):
                self.backward(loss, micro, is_last=number == len(losses) - 1)
        own += [("gradient of the input", x.grad) for x in inputs]

    def data(self, number: int) -> Tensor:
        state = self.state
        seed = (((self.program.seed * 31 + state.step) * 31 + state.micro) * 31 + number) * 31 + state.rank
        return torch.randn(3, self.program.dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(self.dtype)

    def loss(self, x: Tensor, own: list[tuple[str, Tensor | None]], number: int, penalty: bool = False) -> Tensor:
        """Forward, and what backward is called on; more than one loss is put into one tensor."""
        for part in self.state.parts.values():
            part.aux = None
        outputs = self.model(x)
        if not isinstance(outputs, tuple):
            outputs = (outputs,)
        own += [(f"output {index} of forward {number}", output.detach().clone()) for index, output in enumerate(outputs)]
        losses = [output.double().square().mean() for output in outputs]
        if self.program.ignores:
            # The output that this rank ignores: another one on each rank, and in each step; never that of the trunk.
            left_out = 1 + (self.state.rank + self.state.step) % (len(outputs) - 1)
            losses[left_out] = losses[left_out].detach()
        losses[0] = losses[0] + sum(part.aux for part in self.state.parts.values() if part.aux is not None)
        if penalty and sum(losses).requires_grad:
            (grad,) = torch.autograd.grad(sum(losses), x, create_graph=True, allow_unused=True)
            losses[0] = losses[0] + (0.0 if grad is None else grad.square().sum())
        return torch.stack(losses)

    def backward(self, losses: Tensor, micro: Micro, is_last: bool) -> None:
        if not losses.requires_grad:
            raise NoGraphError  # nothing that was left out would be handed to the parameters, nor on the same ranks
        if self.program.losses == "separate" and losses.ndim == 1:
            parts = [loss for loss in losses.unbind() if loss.requires_grad]
        else:
            parts = [losses.sum()]
        for index, loss in enumerate(parts):
            last_of_all = is_last and index == len(parts) - 1
            for root in self.roots:
                root.set_is_last_backward(micro.last and (last_of_all or not self.program.marks_last))
            loss.backward(retain_graph=index < len(parts) - 1)

    def recover(self, failure: Failure) -> None:
        if failure.recovery == "reset":
            for root in self.roots:
                root.reset_iter_state()
        if failure.recovery == "optimizer" and self.optimizers and self.roots:
            self.optimizers[0].zero_grad()
            for name, param in self.params.items():
                if name in self.local:
                    param.grad = None
        else:
            self._zero_grad()

    def _zero_grad(self) -> None:
        """Of the sharded roots, too: that of a plain module above them reaches no gradients that wait for a reduction."""
        for module in [*self.roots, self.model]:
            module.zero_grad()

    # --- actions ---

    def freeze(self, node: str, own: Any) -> None:
        for param in self.state.parts[node].parameters(recurse=False):
            param.requires_grad_(False)

    def thaw(self, node: str, own: Any) -> None:
        for param in self.state.parts[node].parameters(recurse=False):
            param.requires_grad_(True)

    def evaluate(self, node: str, own: list[tuple[str, Tensor | None]]) -> None:
        with torch.no_grad():
            self.loss(self.data(7), own, 7)

    def infer(self, node: str, own: list[tuple[str, Tensor | None]]) -> None:
        with torch.inference_mode():
            self.loss(self.data(8), own, 8)

    def forward_only(self, node: str, own: list[tuple[str, Tensor | None]]) -> None:
        self.loss(self.data(9), own, 9)

    def look(self, node: str, own: Any) -> None:
        list(self.model.parameters())

    def state_dict(self, node: str, own: Any) -> None:
        self.model.state_dict()

    def write(self, node: str, own: Any) -> None:
        """Weights are changed through the tensors of the state dict."""
        with torch.no_grad():
            for value in self.model.state_dict().values():
                value.mul_(0.95)

    def write_local(self, node: str, own: Any) -> None:
        """The same through their local tensors, as an average of weights is put in."""
        with torch.no_grad():
            for value in self.model.state_dict().values():
                (value.to_local() if isinstance(value, DTensor) else value).mul_(0.95)

    def write_shown(self, node: str, own: Any) -> None:
        """The same through the parameters that the model shows."""
        with torch.no_grad():
            for param in self.model.parameters():
                param.mul_(0.95)

    def write_held(self, node: str, own: Any) -> None:
        with torch.no_grad():
            for param in self.params.values():
                param.mul_(0.95)

    def unshard(self, node: str, own: Any) -> None:
        if self.roots:
            self.state.parts[node].unshard()

    def unshard_later(self, node: str, own: Any) -> None:
        if self.roots:
            self.state.parts[node].unshard(async_op=True)

    def reshard(self, node: str, own: Any) -> None:
        if self.roots:
            self.state.parts[node].reshard()

    def load(self, node: str, own: Any) -> None:
        self.model.load_state_dict({name: value.detach().clone() for name, value in self.model.state_dict().items()})

    def save(self, node: str, own: Any) -> None:
        """What the next ``reload`` loads: of this step, of an earlier one, or of now."""
        self.saved = copy.deepcopy([each.state_dict() for each in (self.model, *self.optimizers)])

    def reload(self, node: str, own: Any) -> None:
        if self.saved is None:
            self.save(node, own)
        for each, state in zip((self.model, *self.optimizers), copy.deepcopy(self.saved), strict=True):
            each.load_state_dict(state)

    def apply(self, node: str, own: Any) -> None:
        """What moves and casts modules, though nothing is moved or cast."""
        self.model._apply(lambda tensor: tensor)

    def unsync(self, node: str, own: Any) -> None:
        if self.roots:
            self.state.parts[node].set_requires_gradient_sync(False, recurse=False)

    def keep(self, node: str, own: Any) -> None:
        if self.roots:
            self.state.parts[node].set_reshard_after_backward(False, recurse=False)

    def zero_grad(self, node: str, own: Any) -> None:
        if self.state.micro == 0:
            self._zero_grad()


def _local(program: Program) -> set[str]:
    """Names of the parameters that nobody reduces: ignored ones, and those outside of all units."""
    found = set()
    for node, above in walk(program.root):
        path = ".".join(each.name for each in (*above, node)[1:])
        if node.ignored or not any(each.unit for each in (*above, node)):
            found |= {f"{path}.{name}" for name in ("weight", "bias", "down")}
    return found


@contextlib.contextmanager
def _quiet() -> Any:
    """Without the warnings that torch has about what programs do on purpose."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*[Ff]ull backward hook is firing")
        warnings.filterwarnings("ignore", message=".*None of the inputs have requires_grad")
        warnings.filterwarnings(
            "ignore", message=".*set_modules_to_backward_prefetch has no effect"
        )  # ours, of a unit without parameters
        yield


def run_sharded(program: Program, rank: int, lib: Any) -> Any:
    """A generator of what each step was like on this rank; a step runs when it is asked for."""
    with _quiet():
        runner = Runner(program, rank, lib)
        for index, step in enumerate(program.steps):
            seen = Seen()
            runner.fired.clear()
            runner.forwards_and_backwards(index, step, seen.own)
            if step.clip:
                norm = _clip(lib)(list(runner.params.values()), 0.05)
                seen.own.append(("norm", norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
            seen.grads = {name: None if param.grad is None else param.grad.detach().clone() for name, param in runner.params.items()}
            if program.in_hooks and program.optimizer not in OFFLOADED:
                seen.own += [(f"updates of {name}", torch.tensor(float(runner.fired.count(name)))) for name in runner.params]
            runner.step()
            seen.values = {name: param.detach().clone() for name, param in runner.params.items()}
            yield seen


def _clip(lib: Any) -> Any:
    return lib.clip_grad_norm_ if hasattr(lib, "clip_grad_norm_") else torch.nn.utils.clip_grad_norm_


def run_unsharded(program: Program, rank: int, dtype: torch.dtype | None = None) -> Any:
    """The same for the unsharded model, as rank ``rank`` should see it. dtype: of its parameters and data, instead of the program's"""
    with _quiet():
        runner = Runner(program, rank, dtype=dtype)
        for index, step in enumerate(program.steps):
            before = {name: (param.detach().clone(), param.requires_grad) for name, param in runner.params.items()}
            grads: list[Grads] = []
            seen = Seen()
            for each in range(program.world):
                _restore(runner.params, before)
                runner.state.rank = each
                own: list[tuple[str, Tensor | None]] = []
                runner.forwards_and_backwards(index, step, own)
                grads.append({name: param.grad for name, param in runner.params.items()})
                if each == rank:
                    seen.own = own
            seen.grads = {name: grads[rank][name] if name in runner.local else _mean([each[name] for each in grads]) for name in before}
            for name, param in runner.params.items():
                param.grad = seen.grads[name]
            if step.clip:
                seen.own.append(("norm", torch.nn.utils.clip_grad_norm_(runner.params.values(), 0.05)))
            if program.in_hooks and program.optimizer not in OFFLOADED:
                seen.own += [(f"updates of {name}", torch.tensor(float(seen.grads[name] is not None))) for name in before]
            runner.step()
            if program.in_hooks:  # when a step in backward has taken a gradient is not said
                seen.grads = {} if program.optimizer in OFFLOADED else dict.fromkeys(before)
            seen.values = {name: param.detach().clone() for name, param in runner.params.items()}
            yield seen


def _restore(params: dict[str, nn.Parameter], before: dict[str, tuple[Tensor, bool]]) -> None:
    for name, param in params.items():
        values, requires_grad = before[name]
        param.data.copy_(values)
        param.requires_grad_(requires_grad)
        param.grad = None


def _mean(grads: list[Tensor | None]) -> Tensor | None:
    there = [grad for grad in grads if grad is not None]
    return torch.stack(there).sum(0) / len(grads) if there else None
