"""A captured step: ``fsdp2.capture(step)`` records the work of a training step once, and replays it without Python.

    captured = fsdp2.capture(step)      # step(*batch): forward, backward, clipping, the optimizer's step, zero_grad
    for batch in loader:
        loss = captured(*batch)         # 3 eager steps, a capture, and replays from then on

A graph keeps addresses, sizes and Python's numbers as they were. So the last two eager steps are watched, operator by operator: both
must run the same operators, on the same sizes, numbers and addresses, and none may make the host wait. Then the step is captured;
the device itself refuses what it cannot record, for instance a stream that is not joined. All ranks decide together, and where one
refuses all go on eagerly: ``captured.reason`` says why.

Each form of a step has a graph of its own, up to ``max_graphs``: sizes, dtypes and numbers of the arguments, the optimizers' numbers,
and switches of the model (train or eval, what is frozen, what the next backward reduces). Their memory is one pool.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from . import inspect
from .arguments import COUNT, FUNCTION, Kind, require
from .core.comm.streams import streams_of
from .core.iteration.module_state import sharded_parameters
from .optimizer_steps import note_replayed_step
from .torch_names.torch_tensors import pytree
from .user_warnings import warn
from .watched_operators import Watch

_STEPS = Kind(
    lambda value: COUNT.holds(value) and value > 2, "a whole number, 3 or more: two steps are compared, after a first one", "3"
)


def capture(step: Callable[..., Any], *, warmup: int = 3, max_graphs: int = 4) -> CapturedStep:
    """``step``, which runs as a graph of the device once it has run ``warmup`` times, or eagerly where it cannot.

    step:       a whole training step of its arguments: forward and backward of all micro-batches, clipping, the optimizer, zeroing
                gradients. Tensors among its arguments are copied to the device, each to one address. What it returns are copies
                without autograd. While it is captured, and only then, its Python code runs again.
    warmup:     eager steps before a capture
    max_graphs: forms of a step that get a graph; more run eagerly
    Collective: no; each call is, and ranks must pass arguments of the same form. Before and after a capture they compare.
    Raises:     ArgumentError; a call what ``step`` raises

    Example:
        def step(x):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        captured = fsdp2.capture(step)
        for _ in range(5):
            captured(x)
        captured.reason  # why steps run eagerly; None: they don't
    """
    require("fsdp2.capture", FUNCTION, step=step)
    require("fsdp2.capture", _STEPS, warmup=warmup)
    require("fsdp2.capture", COUNT, max_graphs=max_graphs)
    return CapturedStep(step, warmup, max_graphs)


_STALE = 100
"""A form without a graph that so many calls have not had makes room for another: a learning rate of the first steps, for instance."""


class _Form:
    """One form of a step. buffers: where the graph reads its tensors; calls: eager ones so far; seen: the last call that had it"""

    def __init__(self, leaves: list[Any], device: torch.device, calls: int) -> None:
        self.buffers = [torch.empty_like(each, device=device) if isinstance(each, Tensor) else each for each in leaves]
        self.versions: list[int] = []
        self.calls = calls
        self.seen = 0
        self.watch: Watch | None = None
        self.graph: Any = None
        self.output: Any = None
        self.grads: list[tuple[Tensor, Tensor | None]] = []

    def take(self, leaves: list[Any]) -> None:
        for buffer, leaf in zip(self.buffers, leaves, strict=True):
            if isinstance(leaf, Tensor):
                buffer.copy_(leaf.detach(), non_blocking=True)
        self.versions = [buffer._version if isinstance(buffer, Tensor) else 0 for buffer in self.buffers]

    def give_back(self, leaves: list[Any]) -> bool:
        """Whether the step wrote into an argument, which then has what the step wrote, as after an eager one."""
        written = [
            (buffer, leaf)
            for buffer, leaf, version in zip(self.buffers, leaves, self.versions, strict=True)
            if isinstance(buffer, Tensor) and buffer._version != version and leaf.device == buffer.device
        ]
        for buffer, leaf in written:
            leaf.copy_(buffer)
        return bool(written)


class CapturedStep:
    """A step that ``fsdp2.capture`` made: call it as the step itself.

    reason: why steps run eagerly, in words; None: they don't, or have not yet been captured
    """

    def __init__(self, step: Callable[..., Any], warmup: int, max_graphs: int) -> None:
        self.reason: str | None = None
        self._is_refused = False
        self._alone: str | None = None  # why this rank does not replay; the others may, until they compare
        self._step = step
        self._warmup = warmup
        self._max_graphs = max_graphs
        self._optimizers: list[Optimizer] = []
        self._forms: dict[Any, _Form] = {}
        self._num_calls = 0
        self._switched: _Switched | None = None
        self._device: torch.device | None = None
        self._module: Any = None
        self._stream: Any = None
        self._last: Any = None  # the form of the last call

    @property
    def num_graphs(self) -> int:
        """How many graphs there are, one for each form of a step."""
        return sum(form.graph is not None for form in self._forms.values())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._device is None:
            return self._first(args, kwargs)
        leaves, tree = pytree.tree_flatten((args, kwargs))
        if not self._is_refused and (problem := _problem_of(leaves)) is not None:
            self._refuse_together(problem)
        form = None if self._is_refused or self._is_midway() else self._form_of(leaves, tree, 0)
        if form is None:
            return self._called([_on_device(each, self._device) for each in leaves], tree)
        form.take(leaves)
        if form.graph is None and form.calls >= self._warmup:
            self._capture(form, tree)
        elif (
            form.graph is not None
            and self._alone is None
            and (replaced := next((param for param, grad in form.grads if param.grad is not grad), None)) is not None
        ):
            self._alone = (
                f"a gradient of shape {tuple(replaced.shape)} is not the tensor that the graph writes: zero gradients within the step, "
                "or with set_to_none=False"
            )
            self._say(self._alone)
        if self._is_refused or (form.graph is not None and self._alone is not None):
            return self._called([_on_device(each, self._device) for each in leaves], tree)
        if form.graph is None:
            return self._watched(form, leaves, tree)
        for optimizer in self._optimizers:
            note_replayed_step(optimizer)
        form.graph.replay()
        return pytree.tree_map_only(Tensor, Tensor.clone, form.output)

    def _first(self, args: Any, kwargs: Any) -> Any:
        """The first step shows what it trains: models make their groups in it, and optimizers their state."""
        device, problem = self._where()
        self._module = torch.get_device_module(device.type)
        leaves, tree = pytree.tree_flatten((args, kwargs))
        result = self._called([_on_device(each, device) for each in leaves], tree)
        self._device = device  # known from a step that did not raise: then its optimizers are, too
        problem = problem or self._host_count()
        stepped = {id(param) for optimizer in self._optimizers for group in optimizer.param_groups for param in group["params"]}
        for group in inspect.groups_of_process():
            if problem is None and group.is_offloaded and any(id(param.sharded) in stepped for param in group.params):
                problem = "parameters are offloaded: the host waits for their gradients"
        self._refuse_together(problem or _problem_of(leaves))
        if not self._is_refused:
            self._switched = _Switched()
            self._form_of(leaves, tree, 1)
        return result

    def _where(self) -> tuple[torch.device, str | None]:
        """The device, and why nothing can be captured on it."""
        groups = inspect.groups_of_process()
        devices = {group.device for group in groups}
        device = next(iter(devices), torch.device("cpu"))
        if len(devices) != 1:
            return device, f"the process has sharded parameters on {len(devices)} devices: {sorted(map(str, devices))}"
        if not hasattr(torch.get_device_module(device.type), "CUDAGraph"):
            return device, f"the model is on a {device.type} device, which has no graphs"
        return device, None

    def _host_count(self) -> str | None:
        for optimizer in self._optimizers:
            if any(group.get("capturable", True) is False for group in optimizer.param_groups):
                return f"{type(optimizer).__name__} counts its steps on the host: make it with capturable=True"
        return None

    def _called(self, leaves: list[Any], tree: Any) -> Any:
        with self._on_own_stream() if hasattr(self._module, "CUDAGraph") else contextlib.nullcontext():
            return self._run(leaves, tree)

    def _run(self, leaves: list[Any], tree: Any) -> Any:
        args, kwargs = pytree.tree_unflatten(leaves, tree)
        if self._is_refused:
            return self._step(*args, **kwargs)
        hook = register_optimizer_step_pre_hook(self._note)
        try:
            return self._step(*args, **kwargs)
        finally:
            hook.remove()

    def _note(self, optimizer: Optimizer, *_: Any) -> None:
        """An optimizer that steps for the first time has numbers that a graph keeps, and state that it may load again."""
        if all(optimizer is not each for each in self._optimizers):
            self._optimizers.append(optimizer)
            reference = weakref.ref(self)

            def forget(_: Optimizer) -> None:
                step = reference()
                if step is not None:
                    step._forget()

            optimizer.register_load_state_dict_post_hook(forget)
            self._forget()

    def _forget(self) -> None:
        """Graphs keep an optimizer's numbers and state of before; each form is watched and captured anew."""
        self._forms.clear()
        if self._stream is not None:
            self._pool = self._module.graph_pool_handle()  # the old one ends with its graphs

    def _is_midway(self) -> bool:
        """Whether gradients wait for this step's reduction, which a graph would leave out."""
        assert self._switched is not None
        waiting = next((group for group in self._switched.groups if group.has_unreduced()), None)
        if waiting is not None and self.reason is None:
            name = waiting.name or "the root"
            self._say(f"gradients of {name} wait for a reduction from before: put all micro-batches into the step")
        return waiting is not None

    def _form_of(self, leaves: list[Any], tree: Any, calls: int) -> _Form | None:
        """The form of this step; None: there are too many already."""
        assert self._device is not None
        assert self._switched is not None
        arguments = tuple((tuple(each.shape), each.dtype) if isinstance(each, Tensor) else (type(each), each) for each in leaves)
        key = (str(tree), arguments, self._numbers(), self._switched.values())
        last, self._last = self._last, key
        self._num_calls += 1
        form = self._forms.get(key)
        if form is None:
            if len(self._forms) >= self._max_graphs:
                if self.reason is None:
                    self._say(f"there are {self._max_graphs} forms of steps already (max_graphs); {self._change(last, key)}")
                stale = (old for old, each in self._forms.items() if each.graph is None and self._num_calls - each.seen > _STALE)
                if (old := next(stale, None)) is None:
                    return None
                del self._forms[old]
            form = self._forms[key] = _Form(leaves, self._device, calls)
        form.seen = self._num_calls
        return form

    def _change(self, last: Any, key: Any) -> str:
        for (name, old), (_, new) in zip(last[2], key[2], strict=False):
            if old != new:
                return f"{name} changed from {old} to {new}: make it a tensor on the device"
        assert self._switched is not None
        for name, old, new in zip(self._switched.names(), last[3], key[3], strict=True):
            if old != new:
                return f"{name} changed from {old} to {new}"
        return f"the last arguments were {last[1]}, and now are {key[1]}"

    def _numbers(self) -> tuple[Any, ...]:
        """Numbers of the optimizers that a graph keeps, and that schedulers change."""
        return tuple(
            (f"{type(optimizer).__name__}.param_groups[{index}][{name!r}]", value)
            for optimizer in self._optimizers
            for index, group in enumerate(optimizer.param_groups)
            for name, value in group.items()
            if isinstance(value, (int, float, tuple))
        )

    def _watched(self, form: _Form, leaves: list[Any], tree: Any) -> Any:
        """An eager step; the last two before a capture must be the same."""
        assert self._device is not None
        if form.calls + 1 < self._warmup - 1:
            result = self._called([_on_device(each, self._device) for each in leaves], tree)
            form.calls += 1
            return result
        streams: Any = streams_of(self._device)
        self._module.synchronize()
        with streams.as_in_capture(), Watch() as watch:
            result = self._called(form.buffers, tree)
            self._module.synchronize()
        form.calls += 1  # a step that raised does not count
        if form.give_back(leaves):
            watch.problem = watch.problem or "the step writes into an argument, and a graph would write into its own copy: return it"
        before, form.watch = form.watch, watch
        if form.calls == self._warmup:
            problem = self._host_count() or watch.problem or (None if before is None else watch.changed_since(before))
            self._refuse_together(problem)
        return result

    @contextlib.contextmanager
    def _on_own_stream(self) -> Iterator[Any]:
        """CUDA captures no work of the default stream, and autograd remembers the streams of a warm-up."""
        if self._stream is None:
            self._stream, self._pool = self._module.Stream(device=self._device), self._module.graph_pool_handle()
        outer = self._module.current_stream(self._device)
        self._stream.wait_stream(outer)
        with self._module.stream(self._stream):
            yield
        outer.wait_stream(self._stream)

    def _capture(self, form: _Form, tree: Any) -> None:
        """Leaves ``form.graph`` None if some rank could not."""
        if self._alone is not None:
            self._refuse_together(self._alone)
            return
        for group in {id(group): group for _, group in sharded_parameters().values()}.values():
            group.reshard_for_all()  # an evaluation may have left it unsharded, in memory that is freed later
        params: list[Tensor] = [param.sharded for group in inspect.groups_of_process() for param in group.params]
        params += [param for optimizer in self._optimizers for group in optimizer.param_groups for param in group["params"]]
        before = [(param, param.grad) for param in params]
        problem, collects = None, gc.isenabled()
        graph = self._module.CUDAGraph()
        with self._on_own_stream():
            self._module.synchronize()
            gc.collect()
            gc.disable()  # what it frees may be an event, or another graph
            self._module.empty_cache()
            graph.capture_begin(pool=self._pool)
            try:
                output = pytree.tree_map_only(Tensor, Tensor.detach, self._run(form.buffers, tree))
            except Exception as error:
                problem = f"{type(error).__name__} in the capture: {str(error).splitlines()[0] if str(error) else error!r}"
            try:
                graph.capture_end()
            except RuntimeError as error:
                problem = problem or f"the capture did not end: {str(error).splitlines()[0]}"
            if collects:
                gc.enable()
        after = [(param, param.grad) for param in params]
        if problem is None and any((old is None) is not (new is None) for (_, old), (_, new) in zip(before, after, strict=True)):
            problem = "gradients begin as None and are left as tensors, or the reverse: zero them within the step"
        self._refuse_together(problem)
        if not self._is_refused:
            form.graph, form.output, form.grads = graph, output, after
            self.reason = self._alone
            return
        for param, grad in before:
            param.grad = grad  # what the capture made was never computed

    def _refuse_together(self, problem: str | None) -> None:
        """Collective: yes, over all ranks."""
        problems = inspect.exchange(problem or self._alone)
        found = next((rank for rank, each in enumerate(problems) if each is not None), None)
        if found is not None:
            problem = str(problems[found])
            self._refuse(problem if all(each == problem for each in problems) else f"{problem} [rank {found}]")

    def _refuse(self, reason: str) -> None:
        self._is_refused = True
        self._forms.clear()
        self._say(reason)

    def _say(self, reason: str) -> None:
        self.reason = reason
        if hasattr(self._module, "CUDAGraph"):  # elsewhere nobody expects a graph
            warn(f"steps run eagerly instead of as a captured graph: {reason}")


def _on_device(leaf: Any, device: torch.device | None) -> Any:
    return leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf


def _problem_of(leaves: list[Any]) -> str | None:
    """Why no graph can be found by these arguments: something else may change in them, or they have no hash."""
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            return "an argument requires a gradient, and a graph reads a copy of it: make such tensors within the step"
        if leaf is not None and not isinstance(leaf, (Tensor, bool, int, float, str, torch.dtype, torch.device)):
            return f"an argument is a {type(leaf).__name__}, which capture cannot look into: pass its tensors"
    return None


class _Switched:
    """Switches of the sharded models, which decide what their steps do. ``names`` and ``values`` have one order.

    groups: of all these models
    """

    def __init__(self) -> None:
        sharded = [param.sharded for group in inspect.groups_of_process() for param in group.params]
        self._roots = list(dict.fromkeys(inspect.roots_of(sharded)))
        self._modules = list(dict.fromkeys(module for root in self._roots for module in root.modules()))
        self._units = [unit for root in self._roots for unit in inspect.units(root)]
        self.groups = [group for unit in self._units for group in unit.groups]
        self._params = [param for group in self.groups for param in group.params]

    def values(self) -> tuple[Any, ...]:
        modes = [module.training for module in self._modules]
        trained = [param.sharded.requires_grad for param in self._params]
        reduced = [(unit.reduces(), unit.all_reduces(), unit.contributes()) for unit in self._units]
        divided = [group.divide_factor() for group in self.groups]
        return (*modes, *trained, *reduced, *divided)

    def names(self) -> list[str]:
        modules = {module: name or type(module).__name__ for root in self._roots for name, module in root.named_modules()}
        return [
            *(f"training of {modules[module]}" for module in self._modules),
            *(f"requires_grad of {param.fqn}" for param in self._params),
            *(f"the gradient sync of {unit.name or 'the root'}" for unit in self._units),
            *(f"the gradient divide factor of {group.name or 'the root'}" for group in self.groups),
        ]


__all__ = ["CapturedStep", "capture"]
