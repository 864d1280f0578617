"""Bad input gets an FSDPError at ``fully_shard``, of the class that FSDP2 raises, and leaves the module as it was.

Every case is tried with torch's own ``fully_shard`` as well: what that raises (then or in the first step), ours is an instance
of; where it takes nonsense without a word, ``torch_takes_it`` says what becomes of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from expecttest import assert_expected_inline
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import fsdp2
from fsdp2 import (
    ArgumentError,
    ArgumentTypeError,
    CPUOffloadPolicy,
    DeviceError,
    FSDPError,
    FSDPModule,
    MaterializationError,
    MeshError,
    MixedPrecisionPolicy,
    ModuleError,
    NotAModuleError,
    OrderError,
    ParameterError,
    fully_shard,
)
from fsdp2.torch_names import torch_tensors
from harness import cpu_mesh, on_ranks


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))


@dataclass(frozen=True)
class Case:
    """One wrong call: ``fully_shard(argument(module), mesh=..., **options(module))``.

    torch_takes_it: what torch's FSDP2 makes of it, where it raises nothing
    checked_since:  the version of torch that first has a check for it; earlier ones stumble over it in one way or another
    """

    name: str
    error: type[FSDPError]
    argument: Callable[[Any], Any] = field(default=lambda module: module)
    options: Callable[[Any], dict[str, Any]] = field(default=lambda module: {})
    make: Callable[[], nn.Module] = net
    torch_takes_it: str = ""
    checked_since: str = "2.11"


def options(**given: Any) -> Callable[[Any], dict[str, Any]]:
    return lambda module: given


def policy(**given: Any) -> Callable[[Any], dict[str, Any]]:
    return lambda module: {"mp_policy": MixedPrecisionPolicy(**given)}


def placement(returned: Any) -> Callable[[Any], dict[str, Any]]:
    return lambda module: {"shard_placement_fn": lambda param: returned}


class Sealed(nn.Linear):
    def __init_subclass__(cls) -> None:
        raise TypeError("Sealed takes no subclasses")


def with_sparse() -> nn.Module:
    module = net()
    module.register_parameter("sparse", nn.Parameter(torch.eye(4).to_sparse()))
    return module


CASES = [
    # what is to be sharded
    Case("a tensor", NotAModuleError, lambda module: torch.ones(2)),
    Case("None", NotAModuleError, lambda module: None),
    Case("a class", NotAModuleError, lambda module: nn.Linear),
    Case("a string", NotAModuleError, lambda module: "model"),
    Case("a function", NotAModuleError, lambda module: module.forward),
    Case("a dict", NotAModuleError, lambda module: dict(module.named_children())),
    Case("a generator", NotAModuleError, lambda module: module.children()),
    Case("a set", NotAModuleError, lambda module: set(module), torch_takes_it="shards it, in an order that differs between ranks"),
    Case("an empty list", ModuleError, lambda module: []),
    Case("an empty tuple", ModuleError, lambda module: ()),
    Case("a list with a number", NotAModuleError, lambda module: [module[0], 3]),
    Case("a list with None", NotAModuleError, lambda module: [None, module[0]]),
    Case("a list in a list", NotAModuleError, lambda module: [[module[0]]]),
    Case("the same module twice in a list", ModuleError, lambda module: [module[0], module[0]]),
    Case("a ModuleList", ModuleError, lambda module: module, make=lambda: nn.ModuleList(net())),
    Case("a ModuleDict", ModuleError, lambda module: module, make=lambda: nn.ModuleDict({"a": net()})),
    Case(
        "a ModuleList in a list",
        ModuleError,
        lambda module: [module],
        make=lambda: nn.ModuleList(net()),
        torch_takes_it="shards it, and never gathers it: its forward does not run",
    ),
    Case("a scripted module", ModuleError, make=lambda: torch.jit.script(net())),
    # the mesh
    Case("a mesh that is a string", ArgumentTypeError, options=options(mesh="dp")),
    Case("a mesh that is a number", ArgumentTypeError, options=options(mesh=4)),
    Case("a mesh that is a process group", ArgumentTypeError, options=lambda module: {"mesh": dist.group.WORLD}),
    Case("a mesh that is False", ArgumentTypeError, options=options(mesh=False), torch_takes_it="takes all ranks"),
    # reshard_after_forward
    *(
        Case(f"reshard_after_forward={bad!r}", ArgumentError, options=options(reshard_after_forward=bad))
        for bad in (0, -1, 3, 8, 1.5, 2.0, "yes", (2,))
    ),
    # shard_placement_fn
    Case("Shard(2) of a 2-D parameter", ParameterError, options=placement(Shard(2))),
    Case("Shard(1) of a 1-D parameter", ParameterError, options=placement(Shard(1))),
    Case("Shard(-3) of a 2-D parameter", ParameterError, options=placement(Shard(-3))),
    Case("a placement that is a string", ParameterError, options=placement("rows"), checked_since="2.12"),
    Case("a placement that is a number", ParameterError, options=placement(0), checked_since="2.12"),
    Case("a placement that is a class", ParameterError, options=placement(Shard)),
    Case("a placement that replicates", ParameterError, options=placement(Replicate()), checked_since="2.12"),
    Case(  # an int makes process groups, for which ranks wait for each other: only when all else is right
        "a wrong placement with an int for reshard_after_forward",
        ParameterError,
        options=lambda module: {"reshard_after_forward": 2, "shard_placement_fn": lambda param: Shard(2)},
    ),
    Case("shard_placement_fn that is a placement", ArgumentError, options=options(shard_placement_fn=Shard(1))),
    Case("shard_placement_fn that is a dict", ArgumentError, options=options(shard_placement_fn={"weight": Shard(1)})),
    # policies
    Case("mp_policy None", ArgumentTypeError, options=options(mp_policy=None)),
    Case("mp_policy that is a dtype", ArgumentTypeError, options=options(mp_policy=torch.bfloat16)),
    Case(
        "mp_policy that is a class",
        ArgumentTypeError,
        options=options(mp_policy=torch_fsdp.MixedPrecisionPolicy),
        torch_takes_it="reads the class's defaults" if torch.__version__ < "2.15" else "",
    ),
    Case("param_dtype of integers", ArgumentError, options=policy(param_dtype=torch.int32)),
    Case("param_dtype that is a string", ArgumentTypeError, options=policy(param_dtype="bfloat16")),
    Case("param_dtype of complex numbers", ArgumentError, options=policy(param_dtype=torch.complex64)),
    Case("reduce_dtype that is a string", ArgumentTypeError, options=policy(reduce_dtype="float32")),
    Case("reduce_dtype of integers", ArgumentError, options=policy(reduce_dtype=torch.int64)),
    Case("output_dtype that is a string", ArgumentTypeError, options=policy(output_dtype="float32")),
    Case("output_dtype of integers", ArgumentError, options=policy(output_dtype=torch.int32)),
    Case(
        "cast_forward_inputs that is a string",
        ArgumentError,
        options=policy(cast_forward_inputs="no"),
        torch_takes_it='casts them: "no" is true',
    ),
    *(
        Case(f"offload_policy={bad!r}", ArgumentError, options=options(offload_policy=bad), torch_takes_it="does not offload")
        for bad in (True, "cpu", CPUOffloadPolicy)
    ),
    # ignored_params
    Case("ignored_params that is a list", ArgumentError, options=lambda module: {"ignored_params": [module[0].weight]}),
    Case(
        "ignored_params that is a list of one-element tensors",
        ArgumentError,
        make=lambda: nn.Sequential(nn.Linear(8, 1), nn.Linear(1, 1)),
        argument=lambda module: module[1],
        options=lambda module: {"ignored_params": [module[1].weight]},
        torch_takes_it="compares by value: what happens to be equal is ignored as well",
    ),
    Case(
        "ignored_params that is a generator",
        ArgumentError,
        options=lambda module: {"ignored_params": module[0].parameters()},
        torch_takes_it="runs through it once, so that what is ignored depends on the order",
    ),
    Case(
        "ignored_params of names",
        ArgumentError,
        options=options(ignored_params={"0.weight"}),
        torch_takes_it="ignores nothing",
    ),
    Case(
        "ignored_params that is a dict",
        ArgumentError,
        options=lambda module: {"ignored_params": dict(module.named_parameters())},
        torch_takes_it="ignores nothing",
    ),
    # parameters
    Case("a lazy parameter", ParameterError, make=lambda: nn.LazyLinear(3)),
    Case("a sparse parameter", ParameterError, make=with_sparse),
    Case("a scripted child", ModuleError, make=lambda: nn.Sequential(nn.Linear(8, 8), torch.jit.script(nn.Linear(8, 8)))),
]
BY_NAME = {case.name: case for case in CASES}


def call(package: ModuleType, case: Case, module: Any, mesh: DeviceMesh) -> None:
    """The wrong call; with torch's package also the step in which it refuses what it has let pass."""
    given = case.options(module)
    if package is torch_fsdp and isinstance(given.get("mp_policy"), MixedPrecisionPolicy):
        given = given | {"mp_policy": torch_fsdp.MixedPrecisionPolicy(**torchs_fields(given["mp_policy"]))}
    argument = case.argument(module)
    package.fully_shard(argument, **({"mesh": mesh} | given))
    if package is torch_fsdp and isinstance(argument, nn.Sequential):
        argument(torch.ones(4, 8)).sum().backward()


def torchs_fields(policy: MixedPrecisionPolicy) -> dict[str, Any]:
    """What a policy of ours says, as far as the installed torch knows it."""
    return {each.name: getattr(policy, each.name) for each in dataclasses.fields(torch_fsdp.MixedPrecisionPolicy)}


def raised(package: ModuleType, case: Case, module: Any, mesh: DeviceMesh) -> Exception | None:
    try:
        call(package, case, module, mesh)
    except Exception as error:
        return error
    return None


def snapshot(module: nn.Module) -> list[Any]:
    """All that ``fully_shard`` could change, in a form that compares."""
    modules = [
        (name, id(each), type(each), {key for key, value in vars(each).items() if not isinstance(value, dict) or value})
        for name, each in module.named_modules()
    ]
    hooks = [
        (len(value) if isinstance(value, dict) else value)
        for each in module.modules()
        for name, value in vars(each).items()
        if name.endswith("_hooks")
    ]
    tensors = [
        (name, id(tensor), type(tensor), vars(tensor).keys() if isinstance(tensor, nn.Parameter) else None)
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
    ]
    values = [
        tensor.detach().flatten().tolist()
        for tensor in (*module.parameters(), *module.buffers())
        if type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided and tensor.device.type == "cpu"
    ]
    return [modules, hooks, tensors, values]


def shard_correctly_and_train(module: nn.Module, mesh: DeviceMesh) -> None:
    fully_shard(module, mesh=mesh)
    assert isinstance(module, FSDPModule)
    module(torch.ones(4, 8)).sum().backward()
    assert all(param.grad is not None for param in module.parameters())


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Four ranks, of which this process is rank 0 and the others do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield init_device_mesh("cpu", (4,))
    dist.destroy_process_group()


# --- the class, and the module afterwards -----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:Lazy modules:UserWarning")
@pytest.mark.parametrize("name", BY_NAME)
def test_is_refused_with_the_class_that_torch_raises_and_changes_nothing(name, mesh):
    case = BY_NAME[name]
    theirs = raised(torch_fsdp, case, case.make(), mesh)
    module = case.make()
    before = snapshot(module)
    ours = raised(fsdp2, case, module, mesh)
    assert type(ours) is case.error
    assert (theirs is None) == bool(case.torch_takes_it), f"torch: {theirs!r}"
    if theirs is not None and torch.__version__ >= case.checked_since:
        builtin = next(base for base in type(theirs).__mro__ if base.__module__ == "builtins")
        builtin = RuntimeError if builtin is NotImplementedError else builtin
        assert isinstance(ours, builtin), f"torch raises {theirs!r}"
    assert snapshot(module) == before
    if type(module) is nn.Sequential and name not in ("a sparse parameter", "a scripted child"):
        shard_correctly_and_train(module, mesh)


@on_ranks(4)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:Lazy modules:UserWarning")
def test_all_ranks_refuse_alike_and_one_rank_alone_does_not_wait_for_the_others():
    rank = dist.get_rank()
    mine = [type(raised(fsdp2, case, case.make(), cpu_mesh())).__name__ for case in CASES]
    everywhere: list[Any] = [None] * 4
    dist.all_gather_object(everywhere, mine)
    assert all(each == mine for each in everywhere)
    if rank == 1:  # a collective before the check would wait for ever
        for case in CASES:
            error = raised(fsdp2, case, case.make(), cpu_mesh())
            assert isinstance(error, FSDPError)
            assert str(error).startswith("[rank 1] ")
            assert "\n  expected: " in str(error)
            assert "\n  fix:      " in str(error)
    dist.barrier()
    shard_correctly_and_train(net(), cpu_mesh())


def test_what_raises_in_the_users_function_is_not_hidden_and_changes_nothing(mesh):
    module = net()
    before = snapshot(module)
    with pytest.raises(ZeroDivisionError):
        fully_shard(module, mesh=mesh, shard_placement_fn=lambda param: 1 / 0)
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        fully_shard(module, mesh=mesh, shard_placement_fn=lambda name, param: None)
    sealed = nn.Sequential(nn.Linear(8, 8), Sealed(8, 8))
    sealed_before = snapshot(sealed)
    with pytest.raises(TypeError, match="Sealed takes no subclasses"):
        fully_shard([sealed[0], sealed[1]], mesh=mesh)
    assert snapshot(module) == before
    assert snapshot(sealed) == sealed_before
    shard_correctly_and_train(module, mesh)


# --- meshes -----------------------------------------------------------------------------------------------------------------------


@on_ranks(1)
def test_a_mesh_of_devices_without_streams_is_refused_in_a_sentence():
    """Symptom: an AttributeError, because torch.mps has neither streams nor a current device."""
    mesh = cpu_mesh()
    refused = pytest.raises(MeshError, match=r"mps devices, and torch\.mps lacks streams of a device")
    with mock.patch.object(type(mesh), "device_type", "mps"), refused:
        fully_shard(nn.Linear(2, 2), mesh=mesh)
    with mock.patch.object(torch._C, "_get_accelerator", return_value=torch.device("mps")):
        assert torch_tensors.default_device_type() == "cpu"


def test_meshes_of_the_wrong_shape_are_refused(mesh):
    three = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    unnamed = init_device_mesh("cpu", (2, 2))
    elsewhere = DeviceMesh("cpu", [1, 2])
    module = net()
    before = snapshot(module)
    for wrong, text in ((three, "a 3-D mesh"), (unnamed, "without axis names"), (elsewhere, "that this rank is not part of")):
        with pytest.raises(MeshError, match=text) as ours:
            fully_shard(module, mesh=wrong)
        with pytest.raises(Exception) as theirs:
            torch_fsdp.fully_shard(net(), mesh=wrong)
        assert isinstance(ours.value, type(theirs.value)), theirs.value
        assert snapshot(module) == before
    shard_correctly_and_train(module, mesh)


@on_ranks(3)
def test_only_the_ranks_outside_of_a_mesh_are_refused():
    mesh = DeviceMesh("cpu", [0, 2])
    module = net()
    if dist.get_rank() == 1:
        with pytest.raises(MeshError, match=r"\[rank 1\] fully_shard got a mesh that this rank is not part of"):
            fully_shard(module, mesh=mesh)
    else:
        shard_correctly_and_train(module, mesh)


# --- order ------------------------------------------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("whose", ["ours", "torch's"])
def test_a_module_sharded_twice_or_shared_by_two_lists_is_refused(whose):
    package: Any = fsdp2 if whose == "ours" else torch_fsdp
    expected = ModuleError if package is fsdp2 else AssertionError
    assert issubclass(ModuleError, AssertionError)
    module = net()
    package.fully_shard(module, mesh=cpu_mesh())
    before = snapshot(module)
    with pytest.raises(expected, match="already"):
        package.fully_shard(module, mesh=cpu_mesh())
    assert snapshot(module) == before
    a, b, c = (nn.Linear(8, 8) for _ in range(3))
    root = nn.Sequential(a, b, c)
    package.fully_shard([a, b], mesh=cpu_mesh())
    with pytest.raises(expected, match="already"):
        package.fully_shard([b, c], mesh=cpu_mesh())
    if package is fsdp2:  # upstream has put a state on ``c`` by now
        assert type(c) is nn.Linear
        package.fully_shard(c, mesh=cpu_mesh())
        shard_correctly_and_train(root, cpu_mesh())


@on_ranks(2)
def test_a_child_wrapped_after_its_parent_is_refused_and_the_parent_still_works():
    theirs = net()
    torch_fsdp.fully_shard(theirs, mesh=cpu_mesh())
    with pytest.raises((TypeError, RuntimeError)):  # it wonders about DTensor parameters, in a way that depends on the mesh
        torch_fsdp.fully_shard(theirs[0], mesh=cpu_mesh())
    module = net()
    fully_shard(module, mesh=cpu_mesh())
    before = snapshot(module)
    with pytest.raises(OrderError, match="applied to a parent of this Linear before") as error:
        fully_shard(module[0], mesh=cpu_mesh())
    with pytest.raises(OrderError, match="applied to a parent of this Linear before"):
        fully_shard([nn.Linear(2, 2), module[2]], mesh=cpu_mesh())
    assert isinstance(error.value, TypeError)
    assert isinstance(error.value, RuntimeError)
    assert snapshot(module) == before
    module(torch.ones(4, 8)).sum().backward()


# --- devices ----------------------------------------------------------------------------------------------------------------------


def test_parameters_and_buffers_on_another_device_are_all_named(mesh):
    """Fake tensors stand for an accelerator. torch moves what is plain, from any device, without a word."""
    module = net()
    with FakeTensorMode():
        module[0].weight = nn.Parameter(torch.empty(8, 8, device="cuda"))
        module[1].running_var = torch.empty(8, device="cuda")
        module[2].bias = nn.Parameter(torch.empty(8, device="cuda"))
    before = snapshot(module)
    with pytest.raises(DeviceError) as error:
        fully_shard(module, mesh=mesh)
    assert_expected_inline(
        str(error.value),
        """\
[rank 0] 3 tensors are on a device that is not the mesh's
  0.weight (8, 8) on cuda:0
  2.bias (8,) on cuda:0
  1.running_var (8,) on cuda:0 (a buffer)
  expected: the CPU or the meta device, from which they are moved
  fix:      move the module first, or pass a mesh of that device's type""",
    )
    assert snapshot(module) == before
    for index in range(3):
        module[index] = net()[index]
    shard_correctly_and_train(module, mesh)


# --- the meta device ----------------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_meta_parameters_at_the_first_forward_are_refused_on_all_ranks_until_they_are_materialized():
    with torch.device("meta"):
        module, theirs = (nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2))
    torch_fsdp.fully_shard(theirs, mesh=cpu_mesh())
    with pytest.raises(RuntimeError):
        theirs(torch.ones(4, 8))
    fully_shard(module[0], mesh=cpu_mesh())
    fully_shard([module[1]], mesh=cpu_mesh())
    fully_shard(module, mesh=cpu_mesh())
    for attempt in (lambda: module(torch.ones(4, 8)), lambda: module[0](torch.ones(4, 8)), module[0].unshard):
        with pytest.raises(MaterializationError, match=rf"\[rank {dist.get_rank()}\] [24] parameters should be materialized"):
            attempt()
    assert issubclass(MaterializationError, RuntimeError)
    torch.manual_seed(0)
    fsdp2.materialize(module)
    for _ in range(2):
        module(torch.ones(4, 8)).sum().backward()
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    torch.testing.assert_close(module(torch.ones(4, 8)), reference(torch.ones(4, 8)))
    module.to_empty(device="meta")  # and away again
    with pytest.raises(MaterializationError, match=r"0\.weight \(8, 8\)"):
        module(torch.ones(4, 8))
    module.reset_iter_state()
    torch.manual_seed(0)
    fsdp2.materialize(module)
    torch.testing.assert_close(module(torch.ones(4, 8)), reference(torch.ones(4, 8)))


# --- methods ------------------------------------------------------------------------------------------------------------------------


def test_wrong_arguments_of_methods_are_refused_as_torch_does(mesh):
    def run(package: ModuleType) -> dict[str, type[BaseException] | None]:
        module = net()
        package.fully_shard(module[0], mesh=mesh)
        package.fully_shard(module, mesh=mesh)
        module(torch.ones(4, 8))
        attempts = {
            "reset of a child": lambda: module[0].reset_iter_state(),
            "prefetch of a plain module": lambda: module.set_modules_to_forward_prefetch([nn.Linear(2, 2)]),
            "prefetch of None": lambda: module.set_modules_to_backward_prefetch(None),
            "prefetch of a module, not a list": lambda: module.set_modules_to_backward_prefetch(module[0]),
            "an int for reshard_after_forward": lambda: module.set_reshard_after_forward(2),
            "a method that is not there": lambda: package.register_fsdp_forward_method(module, "generate"),
            "communication shared with a plain module": lambda: package.share_comm_ctx([nn.Linear(2, 2)]),
        }
        errors = {}
        for name, attempt in attempts.items():
            with pytest.raises(Exception) as error:
                attempt()
            errors[name] = type(error.value)
        return errors

    ours, theirs = run(fsdp2), run(torch_fsdp)
    for name, error in ours.items():
        assert issubclass(error, FSDPError), name
        if name != "reset of a child" or torch.__version__ >= "2.13":  # which brought reset_iter_state
            assert issubclass(error, theirs[name]), name


def test_a_divide_factor_must_be_a_positive_number(mesh):
    module = fully_shard(net(), mesh=mesh)
    for wrong in (0, -1.0, "two", True, float("nan")):
        with pytest.raises(ArgumentError, match="expected: a positive number"):
            module.set_gradient_divide_factor(wrong)
    module.set_gradient_divide_factor(3)


SWITCHES = {
    "set_is_last_backward": "is_last_backward",
    "set_manual_backward_finalization": "enabled",
    "set_requires_gradient_sync": "requires_gradient_sync",
    "set_requires_all_reduce": "requires_all_reduce",
    "set_reshard_after_backward": "reshard_after_backward",
    "set_keep_unsharded_storage": "keep",
    "set_unshard_in_backward": "unshard_in_backward",
    "set_force_sum_reduction_for_comms": "enable",
    "set_reduce_scatter_unused_params": "reduce_scatter_unused_params",
    "set_separate_reduce_scatter_group": "enable",
    "set_allocate_memory_from_process_group_for_comm": "enable",
}


@pytest.mark.filterwarnings("ignore:.*has no effect")
@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_takes_0_and_1_as_torchs_does_and_refuses_what_is_no_bool(name, mesh):
    for package in (fsdp2, torch_fsdp):
        module = net()
        package.fully_shard(module, mesh=mesh)
        for value in (1, 0):
            if hasattr(module, name):  # an older torch has fewer
                getattr(module, name)(value)
    module = fully_shard(net(), mesh=mesh)
    for wrong in ("no", None, 2, 1.0):
        with pytest.raises(ArgumentError, match=rf"(?s){name} got {SWITCHES[name]}=.*should be a bool"):
            getattr(module, name)(wrong)


# --- texts --------------------------------------------------------------------------------------------------------------------------


TEXTS = {
    "a ModuleList": """\
[rank 0] fully_shard does not support containers that do not implement forward: ModuleList
  expected: a module whose forward runs, because that is when its parameters are gathered
  fix:      call fully_shard on each of its items, or pass list(container) to make them one group""",
    "None": """\
[rank 0] fully_shard got an object of type NoneType: None
  expected: an nn.Module or a list of them (in an order that is the same on all ranks)
  fix:      pass the module itself, or list(modules)""",
    "an empty list": """\
[rank 0] fully_shard got an empty list
  expected: at least one module
  fix:      pass the modules of one group""",
    "a list with a number": """\
[rank 0] fully_shard got module[1]=3 of type int
  expected: a list of nn.Module
  fix:      pass modules only""",
    "the same module twice in a list": """\
[rank 0] fully_shard got a list that has the same Linear more than once
  expected: each module at most once
  fix:      leave the others out: a shared module belongs to one group""",
    "a mesh that is a string": """\
[rank 0] fully_shard got mesh='dp' of type str
  expected: a torch.distributed.device_mesh.DeviceMesh or None
  fix:      build one with init_device_mesh(device_type, (world_size,))""",
    "reshard_after_forward=3": """\
[rank 0] fully_shard got reshard_after_forward=3
  expected: a bool, None, or an int that is a factor of 4, the size of the shard axis: [1, 2, 4]
  fix:      for instance the number of ranks on a node""",
    "Shard(1) of a 1-D parameter": """\
[rank 0] 4 parameters cannot be sharded as asked
  0.bias (8,): Shard(1) names a dim that it does not have
  1.weight (8,): Shard(1) names a dim that it does not have
  1.bias (8,): Shard(1) names a dim that it does not have
  2.bias (8,): Shard(1) names a dim that it does not have
  expected: dense tensors, and None or Shard(dim) with -ndim <= dim < ndim from shard_placement_fn
  fix:      change what shard_placement_fn returns for them, or pass them in ignored_params""",
    "a lazy parameter": """\
[rank 0] 2 parameters cannot be sharded as asked
  weight: has no shape yet; run a forward pass with an input of the right shape before
  bias: has no shape yet; run a forward pass with an input of the right shape before
  expected: dense tensors, and None or Shard(dim) with -ndim <= dim < ndim from shard_placement_fn
  fix:      change what shard_placement_fn returns for them, or pass them in ignored_params""",
    "param_dtype that is a string": """\
[rank 0] MixedPrecisionPolicy got param_dtype='bfloat16'
  expected: a floating-point torch.dtype or None
  fix:      for instance param_dtype=torch.bfloat16""",
    "offload_policy=True": """\
[rank 0] fully_shard got offload_policy=True of type bool
  expected: an OffloadPolicy (of fsdp2 or torch.distributed.fsdp), or None
  fix:      pass CPUOffloadPolicy() to offload, or leave it out""",
    "ignored_params that is a list": """\
[rank 0] fully_shard got ignored_params of type list
  expected: a set of nn.Parameter
  fix:      pass set(params): parameters compare by identity in a set, by value in a list""",
}


@pytest.mark.parametrize("name", TEXTS)
def test_text(name, mesh):
    case = BY_NAME[name]
    assert str(raised(fsdp2, case, case.make(), mesh)) == TEXTS[name]


def test_text_for_the_same_module_twice(mesh):
    module = fully_shard(net(), mesh=mesh)
    with pytest.raises(ModuleError) as error:
        fully_shard(module, mesh=mesh)
    assert_expected_inline(
        str(error.value),
        """\
[rank 0] fully_shard was already applied to this FSDPSequential
  expected: each module at most once
  fix:      remove the second call""",
    )


def test_text_for_meshes(mesh):
    three = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    with pytest.raises(MeshError) as error:
        fully_shard(net(), mesh=three)
    assert_expected_inline(
        str(error.value).replace(str(three), "<mesh>"),
        """\
[rank 0] fully_shard got a 3-D mesh: <mesh>
  expected: a 1-D mesh (shard) or a 2-D mesh (replicate, shard)
  fix:      slice the data-parallel axes out of it by name, for instance mesh['dp'], or pass dp_mesh_dims""",
    )


def test_text_for_a_child_after_its_parent(mesh):
    module = fully_shard(net(), mesh=mesh)
    with pytest.raises(OrderError) as error:
        fully_shard(module[0], mesh=mesh)
    assert_expected_inline(
        str(error.value),
        """\
[rank 0] fully_shard was applied to a parent of this Linear before
  expected: children before their parents: a call takes all parameters that no earlier call took
  fix:      call fully_shard on this module first, then on its parent""",
    )


def test_text_for_meta_parameters(mesh):
    with torch.device("meta"):
        module = net()
    fully_shard(module[0], mesh=mesh)
    fully_shard(module, mesh=mesh)
    with pytest.raises(MaterializationError) as error:
        module(torch.ones(4, 8))
    assert_expected_inline(
        str(error.value),
        """\
[rank 0] 6 parameters should be materialized from meta device before the first forward
  2.weight (8, 8)
  1.weight (8,)
  1.bias (8,)
  2.bias (8,)
  0.weight (8, 8)
  0.bias (8,)
  expected: storage on cpu
  fix:      call fsdp2.materialize(model), or model.to_empty(device="cpu") and initialize, or load a checkpoint""",
    )


def test_hasattr_swallows_no_error_but_that_of_a_thing_of_another_kind():
    """``hasattr`` takes an AttributeError for a no; a mistake that a property finds must come through it."""
    swallowed = {each.__name__ for each in vars(fsdp2.errors).values() if isinstance(each, type) and issubclass(each, AttributeError)}
    assert swallowed == {"NotAModuleError", "ArgumentTypeError"}


def test_each_error_and_warning_that_a_program_may_catch_can_still_be_imported_from_the_package():
    classes = {name for name, each in vars(fsdp2.errors).items() if isinstance(each, type) and issubclass(each, Exception)}
    assert len(classes) > 10
    assert all(getattr(fsdp2, name) is getattr(fsdp2.errors, name) for name in classes)


def test_without_torchrun_the_error_says_how_to_start(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(MeshError, match="torchrun --nproc-per-node") as caught:
        fully_shard(nn.Linear(2, 2))
    assert isinstance(caught.value, ValueError)  # which torch raises
