"""Every way to write a parameter outside of forward and backward, in every state that these leave it in.

The oracle is the unsharded model: the next forward computes with what was written, and so does the step after it. Where fsdp2 cannot
see a write, every rank raises an error of ours.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

import fsdp2
from fsdp2 import CPUOffloadPolicy, FSDPError, MixedPrecisionPolicy, fully_shard
from fsdp2.checkpoint import load_safetensors, save_safetensors
from fsdp2.core.comm import collectives
from harness import cpu_mesh, on_ranks
from harness.sharding import shard_blocks

DIM = 7  # uneven, and no rank of four is without rows: such a rank would not see what others have written where no counter shows it


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))
        self.head = nn.Linear(DIM, DIM)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.head(self.blocks(x).tanh())
        if self.fails:
            raise RuntimeError("on purpose")
        return x


class Run:
    """A model on its way through a state, a write, and what follows; sharded or not."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.params = list(model.parameters())
        self.state = model.state_dict()
        self.optimizer = torch.optim.SGD(self.params, lr=0.1, foreach=True)
        self.x = torch.linspace(-1, 1, 4 * DIM).reshape(4, DIM)

    def loss(self) -> Tensor:
        return self.model(self.x).float().square().sum()

    def evaluate(self) -> Tensor:
        with torch.no_grad():
            return self.model(self.x).float()

    def step(self) -> None:
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


# --- states -------------------------------------------------------------------------------------------------------------------


def evaluated(run: Run) -> None:
    run.evaluate()


def trained_and_evaluated(run: Run) -> None:
    run.step()
    run.evaluate()


def ran_without_backward(run: Run) -> None:
    run.loss()


def raised(run: Run) -> None:
    run.model.fails = True
    with pytest.raises(RuntimeError, match="on purpose"):
        run.loss()
    run.model.fails = False


def raised_in_evaluation(run: Run) -> None:
    run.model.fails = True
    with pytest.raises(RuntimeError, match="on purpose"):
        run.evaluate()
    run.model.fails = False


def kept_after_backward(run: Run) -> None:
    if hasattr(run.model, "set_reshard_after_backward"):
        run.model.set_reshard_after_backward(False)
    run.step()
    if hasattr(run.model, "set_reshard_after_backward"):
        run.model.set_reshard_after_backward(True)


def between_steps(run: Run) -> None:
    run.step()


STATES = (evaluated, trained_and_evaluated, ran_without_backward, raised, raised_in_evaluation, kept_after_backward, between_steps)

# --- ways to write ------------------------------------------------------------------------------------------------------------


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def halve(tensors: Any) -> None:
    with torch.no_grad():
        for tensor in tensors:
            tensor.mul_(0.5)


def by_optimizer(run: Run) -> None:
    for param in run.params:
        param.grad = torch.ones_like(param)
    run.optimizer.step()
    run.optimizer.zero_grad()


def by_copying_from_a_state_dict(run: Run) -> None:
    halved = {name: value.detach().clone().mul_(0.5) for name, value in run.model.state_dict().items()}
    for name, value in run.model.state_dict().items():
        local(value).copy_(local(halved[name]))


def by_loading(run: Run) -> None:
    run.model.load_state_dict({name: value.detach().clone().mul_(0.5) for name, value in run.model.state_dict().items()})


def by_dcp(run: Run) -> None:
    set_model_state_dict(run.model, {name: value.clone().mul_(0.5) for name, value in get_model_state_dict(run.model).items()})


def by_assigning_local_data(run: Run) -> None:
    for param in run.params:
        getattr(param, "_local_tensor", param).data = local(param.data) * 0.5


WAYS: dict[str, Callable[[Run], None]] = {
    "state_dict": lambda run: halve(run.model.state_dict().values()),
    "state_dict, local": lambda run: halve(local(value) for value in run.model.state_dict().values()),
    "state_dict, _local_tensor": lambda run: halve(getattr(v, "_local_tensor", v) for v in run.model.state_dict().values()),
    "state_dict, copy_": by_copying_from_a_state_dict,
    "state_dict with keep_vars": lambda run: halve(local(value) for value in run.model.state_dict(keep_vars=True).values()),
    "get_model_state_dict": lambda run: halve(local(value) for value in get_model_state_dict(run.model).values()),
    "earlier state_dict": lambda run: halve(run.state.values()),
    "earlier state_dict, local": lambda run: halve(local(value) for value in run.state.values()),
    "parameters": lambda run: halve(run.model.parameters()),
    "parameters, local": lambda run: halve(local(param) for param in run.model.parameters()),
    "parameters, detached": lambda run: halve(param.detach() for param in run.model.parameters()),
    "parameters, detached local": lambda run: halve(local(param.detach()) for param in run.model.parameters()),
    "parameters, data": lambda run: halve(param.data for param in run.model.parameters()),
    "parameters, local data": lambda run: halve(local(param.data) for param in run.model.parameters()),
    "parameters of modules": lambda run: halve(p for module in run.model.modules() for p in module.parameters(recurse=False)),
    "attributes": lambda run: halve(p for m in (*run.model.blocks, run.model.head) for p in (m.weight, m.bias)),
    "attributes, data": lambda run: halve(p.data for m in (*run.model.blocks, run.model.head) for p in (m.weight, m.bias)),
    "held": lambda run: halve(run.params),
    "held, local": lambda run: halve(local(param) for param in run.params),
    "held, data": lambda run: halve(param.data for param in run.params),
    "held, foreach": lambda run: torch._foreach_mul_([local(param.detach()) for param in run.params], 0.5),
    "held, data of local assigned": by_assigning_local_data,
    "optimizer": by_optimizer,
    "load_state_dict": by_loading,
    "set_model_state_dict": by_dcp,
}

# --- policies and strategies --------------------------------------------------------------------------------------------------


def sharded(reshard: Any = None, **options: Any) -> Any:
    model = Model()
    shard_blocks(model, reshard, **options)
    return model


def kept_frozen() -> Any:
    model = sharded(reshard=True)
    model.blocks.requires_grad_(False)
    model.set_frozen_budget(1 << 20)
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "default": sharded,
    "kept": lambda: sharded(reshard=False),
    "resharded": lambda: sharded(reshard=True),
    "kept in bf16": lambda: sharded(reshard=False, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
    "smaller": lambda: sharded(reshard=2),
    "kept frozen": kept_frozen,
    "kept, offloaded": lambda: sharded(reshard=False, offload_policy=CPUOffloadPolicy(pin_memory=False)),
    **{strategy: lambda strategy=strategy: fsdp2.parallelize(Model(), strategy) for strategy in ("ddp", "zero1", "zero2", "zero3")},
    "zero1 in bf16": lambda: fsdp2.parallelize(Model(), "zero1", mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
    "ddp in bf16": lambda: fsdp2.parallelize(Model(), "ddp", mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
}


def outcome(name: str, state: Callable[[Run], None], way: Callable[[Run], None]) -> str:
    """ "" if all is right, an error's name if it was refused, else what is wrong."""
    ours, theirs = Run(MODELS[name]()), Run(Model())
    theirs.model.blocks.requires_grad_("frozen" not in name)
    tolerance = 0.02 if "bf16" in name else 1e-5
    for run in (theirs, ours):
        try:
            state(run)
            way(run)
            run.seen = [run.evaluate()]
            run.step()
            run.seen.append(run.evaluate())
        except FSDPError as error:
            return type(error).__name__
    values = [value.full_tensor() for value in ours.model.state_dict().values()]
    ours.seen += values
    theirs.seen += list(theirs.model.state_dict().values())
    for index, (a, b) in enumerate(zip(ours.seen, theirs.seen, strict=True)):
        if (a - b).abs().max() > tolerance * max(1.0, b.abs().max().item()):
            return ["not used by the next forward", "lost a step later"][min(index, 1)] if index < 2 else "state dict"
    return ""


UNSEEN = {way for way in WAYS if "data" in way or "detached local" in way or "foreach" in way}
"""Those that move no version counter of a shard: they may be refused, as may writes to the unsharded parameters of a graph."""


def faults(models: Iterable[str], states: Iterable[Callable[[Run], None]], ways: Iterable[str]) -> list[str]:
    found = []
    for name, state, way in itertools.product(models, states, ways):
        what = outcome(name, state, WAYS[way])
        may_be_refused = way in UNSEEN or (state is ran_without_backward and ("parameters" in way or "attributes" in way))
        if what and not (what == "OrderError" and may_be_refused):
            found.append(f"{name} | {state.__name__} | {way}: {what}")
    return found


@on_ranks(2)
def test_writes_through_state_dicts_and_parameters_are_used_by_the_next_forward():
    """Symptom: a forward that keeps parameters unsharded ignored EMA writes to ``state_dict()``; of others it forgot a step later."""
    ways = ("state_dict, local", "earlier state_dict, local", "parameters", "parameters, data", "attributes")
    assert faults(["kept"], (evaluated, ran_without_backward, kept_after_backward), ways) == []
    assert faults(["zero1"], (trained_and_evaluated,), ("state_dict, local", "parameters")) == []
    assert faults(["kept frozen"], (between_steps, raised), ("state_dict, local", "parameters, local data", "optimizer")) == []


@on_ranks(2)
@pytest.mark.slow
def test_every_way_to_write_in_every_state_of_parameters_that_are_kept():
    assert faults(["kept"], STATES, WAYS) == []


def stepped_in_hooks(run: Run) -> None:
    optimizers = {param: torch.optim.SGD([param], lr=0.1) for param in run.params}

    def step(param: Tensor) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    hooks = [param.register_post_accumulate_grad_hook(step) for param in run.params]
    for _ in range(2):
        run.loss().backward()
    run.evaluate()
    for hook in hooks:
        hook.remove()


def evaluated_beside_a_graph(run: Run) -> None:
    run.step()
    run.waits = run.loss()
    run.evaluate()


@on_ranks(2)
@pytest.mark.slow
def test_writes_after_optimizers_in_hooks_and_beside_a_graph_that_waits():
    ways = ("state_dict, local", "parameters", "held", "load_state_dict", "optimizer")
    assert faults(["kept", "zero1", "ddp"], (stepped_in_hooks,), ways) == []
    assert faults(["kept", "zero1", "ddp"], (evaluated_beside_a_graph,), [way for way in ways if way != "parameters"]) == []


@on_ranks(2)
@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("kept", "smaller")])
def test_every_way_to_write_in_every_state_under_every_policy(name):
    assert faults([name], STATES, WAYS) == []


@on_ranks(4)
def test_writes_while_parameters_are_sharded_over_a_smaller_mesh_are_used_or_refused():
    """Symptom: the next forward gathered what the smaller mesh had; or it used a write that was lost a step later."""
    ways = ("parameters", "parameters, local", "held, data", "state_dict, local")
    assert faults(["smaller"], (evaluated, ran_without_backward, raised), ways) == []


@on_ranks(4)
@pytest.mark.full
def test_every_way_to_write_in_every_state_of_parameters_that_are_sharded_over_a_smaller_mesh():
    assert faults(["smaller"], STATES, WAYS) == []


@on_ranks(2)
def test_a_step_of_an_optimizer_of_another_model_on_one_rank_makes_no_difference():
    """Symptom: that rank alone gathered parameters that were kept unsharded, and gloo aborted."""
    run, reference = Run(MODELS["kept"]()), Run(Model())
    run.evaluate()
    if dist.get_rank() == 0:
        probe = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(probe.parameters(), lr=0.1)
        probe(torch.ones(2)).sum().backward()
        optimizer.step()
    with mock.patch.object(collectives, "all_gather", side_effect=AssertionError("gathers again")):
        assert_close(run.evaluate(), reference.evaluate())


@on_ranks(2)
def test_what_an_evaluation_within_a_closure_has_left_unsharded_is_out_of_date_after_the_step():
    """Symptom: the next forward raised, or on a device computed with the old values: the step was noted before its closure ran."""
    for name, foreach in itertools.product(("kept", "zero1"), (True, False)):
        runs = Run(MODELS[name]()), Run(Model())
        for run in runs:
            optimizer = torch.optim.SGD(run.params, lr=0.1, foreach=foreach)

            def closure(run: Run = run, optimizer: torch.optim.Optimizer = optimizer) -> None:
                optimizer.zero_grad()
                run.loss().backward()
                run.evaluate()

            for _ in range(2):
                optimizer.step(closure)
        assert_close(runs[0].evaluate(), runs[1].evaluate())


@on_ranks(2)
def test_an_optimizer_whose_parameters_are_exchanged_is_still_known():
    run, reference = Run(MODELS["kept"]()), Run(Model())
    for each in (run, reference):
        params = list(each.params)
        each.optimizer.param_groups[0]["params"][:] = params[:1]
        each.step()
        each.optimizer.param_groups[0]["params"][:] = params[-1:]
        each.evaluate()
        by_optimizer(each)
    assert_close(run.evaluate(), reference.evaluate())


# --- between forward and backward ---------------------------------------------------------------------------------------------


def by_closure(run: Run) -> None:
    def closure() -> None:
        for param in run.params:
            param.grad = torch.ones_like(param)

    run.optimizer.step(closure)
    run.optimizer.zero_grad()


def by_safetensors(run: Run, in_place: bool = False) -> None:
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    if not isinstance(run.params[0], DTensor):
        run.model.load_state_dict({name: value.clone() for name, value in run.model.state_dict().items()})
        return
    save_safetensors(run.model, folder[0])
    load_safetensors(run.model, folder[0], in_place=in_place)


BETWEEN: dict[str, Callable[[Run], None]] = {
    "optimizer": by_optimizer,
    "load_state_dict": by_loading,
    "closure": by_closure,
    "load_safetensors": by_safetensors,
    "load_safetensors, in place": lambda run: by_safetensors(run, in_place=True),
    **{way: WAYS[way] for way in ("held", "held, local", "state_dict", "state_dict, local", "earlier state_dict, local")},
}


@on_ranks(2)
@pytest.mark.parametrize("name", ["default", "kept", "resharded", "zero1", "ddp"])
@pytest.mark.parametrize("way", BETWEEN)
def test_parameters_that_are_written_between_forward_and_backward_are_refused(name, way):
    """The unsharded model refuses too: a variable needed for gradient computation has been modified by an inplace operation."""
    ours, theirs = Run(MODELS[name]()), Run(Model())
    for run in (theirs, ours):
        run.step()
        loss = run.loss()
        BETWEEN[way](run)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    ours.model.reset_iter_state()
    for run in (theirs, ours):
        run.optimizer.zero_grad()
        run.step()
    assert_close(ours.evaluate(), theirs.evaluate())


@on_ranks(2)
@pytest.mark.parametrize("name", ["default", "kept", "resharded", "zero1", "zero2", "ddp"])
def test_a_write_between_forward_and_backward_to_what_no_graph_has_saved_is_kept_or_refused(name):
    """Symptom: in groups that forward had left unsharded, ``module.bias.add_()`` was gone after backward, without an error."""
    for get in (lambda run: run.params[1], lambda run: local(run.params[1]), lambda run: run.model.blocks[0].bias):
        for state in (between_steps, evaluated):
            ours, theirs = Run(MODELS[name]()), Run(Model())
            for run in (theirs, ours):
                state(run)
                loss = run.loss()
                written = get(run)
                with torch.no_grad():
                    written.mul_(0.5)
                if run is ours and written is run.model.blocks[0].bias and not isinstance(written, DTensor):  # unsharded
                    with pytest.raises(fsdp2.OrderError, match=r"blocks\.0\.bias"):
                        loss.backward()
                    break
                loss.backward()
                run.optimizer.step()
                run.optimizer.zero_grad()
            else:
                assert_close(ours.evaluate(), theirs.evaluate())


@on_ranks(2)
def test_a_write_between_two_forwards_is_told_to_the_graph_of_the_first():
    for name in ("kept", "resharded"):
        ours, theirs = Run(MODELS[name]()), Run(Model())
        for run in (theirs, ours):
            first = run.loss()
            halve(run.params)
            second = run.loss()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                first.backward()
            if run is ours:
                run.model.reset_iter_state()
                second = run.loss()
            run.optimizer.zero_grad()
            second.backward()
            run.optimizer.step()
        assert_close(ours.evaluate(), theirs.evaluate())


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.actor, self.critic = nn.Linear(DIM, DIM), nn.Linear(DIM, 1)

    def forward(self, x):
        return self.actor(x), self.critic(x)


@on_ranks(2)
def test_an_optimizer_may_step_on_other_parameters_of_the_unit_between_forward_and_backward():
    """An actor and a critic in one module, of one forward and two losses; and a probe whose optimizer has nothing to step yet."""
    x = torch.linspace(-1, 1, 2 * DIM).reshape(2, DIM)
    for after in (None, False, True):
        ours, theirs = TwoHeads(), TwoHeads()
        fully_shard(ours, mesh=cpu_mesh(2), reshard_after_forward=after)
        for model in (ours, theirs):
            first, second = (torch.optim.AdamW(head.parameters(), lr=0.1) for head in (model.actor, model.critic))
            for _ in range(3):
                policy, value = model(x)
                first.step() if first.state == {} else None
                (policy.softmax(1) * value.detach()).sum().backward()
                first.step()
                first.zero_grad()
                value.square().sum().backward()
                second.step()
                second.zero_grad()
        for param, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert_close(param.full_tensor(), expected)


@on_ranks(2)
def test_an_optimizer_may_step_on_other_units_between_forward_and_backward():
    """As a discriminator's does, while the graph of the generator waits."""
    ours, theirs = MODELS["resharded"](), Model()
    x = torch.linspace(-1, 1, 2 * DIM).reshape(2, DIM)
    seen = []
    for model in (ours, theirs):
        first = torch.optim.SGD(model.blocks[0].parameters(), lr=0.1)
        second = torch.optim.SGD(model.blocks[1].parameters(), lr=0.1)
        made = model.blocks[0](x)
        model.blocks[1](made.detach()).square().sum().backward()
        second.step()
        second.zero_grad()
        model.blocks[1](made).square().sum().backward()
        first.step()
        seen.append(model(x).detach())
    assert_close(*seen)


@on_ranks(2)
def test_torch_drops_a_tensor_that_is_assigned_to_the_data_of_a_shard_and_leaves_no_trace_of_it():
    """docs/notes.md, Note: writes to kept parameters. If this fails, such a write can be seen, or works."""
    for shard in (torch.distributed.fsdp.fully_shard, fully_shard):
        param = shard(nn.Linear(DIM, DIM), mesh=cpu_mesh()).weight
        local = param.to_local()
        before = id(param._local_tensor), local.data_ptr(), local._version, param._version, local.clone()
        param.data = param.detach() * 0
        assert (id(param._local_tensor), local.data_ptr(), local._version, param._version) == before[:4]
        assert torch.equal(param.to_local(), before[4])


@on_ranks(2)
def test_a_write_to_parameters_that_a_plain_parent_shows_unsharded_is_not_lost_by_saving_and_loading():
    """Symptom: after a forward without backward, ``param.mul_()`` over its parameters was gone once the state dict was reloaded."""
    for after, read in itertools.product((True, False), (nn.Module.state_dict, get_model_state_dict)):
        model: Any = nn.Sequential(Model())
        fully_shard(model[0], mesh=cpu_mesh(), reshard_after_forward=after)
        model(torch.ones(2, DIM))
        before = [param.detach().clone() for param in model.parameters()]
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.5)
        if isinstance(before[0], DTensor):
            model.load_state_dict(read(model))
            for param, old in zip(model.parameters(), before, strict=True):
                assert_close(param.full_tensor(), old.full_tensor() * 0.5)
        else:
            with pytest.raises(fsdp2.OrderError, match="were written while they were kept unsharded"):
                read(model)
