"""From the meta device to values that do not depend on the number of ranks.

Every rank runs the same initialization functions on whole parameters, with generators in the same state, and keeps its slices; so
for one seed a model has bitwise the values of the unsharded model, on any mesh. Parameters are made whole one module at a time.

Worked example, 2 ranks, ``Sequential(Linear(4, 6), Linear(6, 2))``, each Linear a group:

    visit 0          (6, 4) and (6,) are allocated whole, Linear.reset_parameters fills them, rank 1 keeps rows [3, 6)
    visit 1          the same with (2, 6) and (2,), of which rank 1 keeps row 1
    visit Sequential has nothing of its own and no reset_parameters: no call
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..arguments import SWITCH, require
from ..errors import ArgumentError, MaterializationError, got, got_object
from ..hangs.joint_calls import joint
from ..torch_names import torch_tensors
from .meta_tensors import MetaTensors, find_meta_tensors
from .whole_parameters import Initializing

RESET_NAMES = ("reset_parameters", "_reset_parameters")
"""Methods by which torch's modules initialize themselves; the second is what MultiheadAttention and Transformer have."""


@joint
def materialize(
    model: nn.Module,
    init_fn: Callable[[nn.Module], object] | None = None,
    *,
    device: torch.device | str | None = None,
    strict: bool = True,
) -> list[str]:
    """Give every parameter and buffer of ``model`` that is on the meta device storage and its initial value.

    The values, and the generators afterwards, are bitwise those of ``model.apply(init_fn)`` on the unsharded model on the same
    kind of device with the same seed. Use one seed on all ranks: fsdp2 does not compare their generators. Tensors that are not on the
    meta device keep their values, and ``init_fn`` does not visit modules that own only such tensors. Parameters keep their identity.

    init_fn:    called under ``no_grad`` on every module, children first (as ``nn.Module.apply`` does), with the module's own
                parameters whole; None calls ``reset_parameters()``, or ``_reset_parameters()``, of each module that has one
    device:     for parameters that ``fully_shard`` does not manage; None: the mesh's device, or the default one if there is no mesh
    strict:     raise if ``init_fn`` writes a parameter or buffer nowhere; False fills it with NaN (integers with 0), for values that a
                checkpoint brings
    Memory:     in addition to the sharded parameters, those that one call of ``init_fn`` has in use, then one group's shard
    Collective: only where a function reaches into parameters that an earlier one wrote (another module's, or tied ones):
                each is all-gathered over the shard axis
    Returns:    names of the parameters and buffers that no function wrote, in the model's order
    Raises:     MaterializationError naming modules that own parameters and cannot initialize them, before it changes anything; or
                naming tensors that no function wrote, which then still are on the meta device, so that another call can complete them
    Source:     deferred initialization as in torchdistX and FSDP1's ``param_init_fn``

    Example:
        with torch.device("meta"):
            net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
        fsdp2.fully_shard(net)
        torch.manual_seed(0)
        fsdp2.materialize(net)
    """
    _check_arguments(model, init_fn, strict)
    found = find_meta_tensors(model)
    if not found.sharded and not found.plain:
        return []
    if init_fn is None:
        _refuse_without_reset(model, found)
    for unit in found.units:
        unit.reshard_for_all()
    work = Initializing(found, _device(found, device))
    try:
        with torch.no_grad():
            for module in _in_apply_order(model):
                if not found.has_only_values(module):
                    work.visit(module, init_fn or _reset)
            unwritten = work.finish(strict)
    finally:
        work.leave_unwritten_on_meta()
        for unit in found.units:
            unit.notice_changes()
    if unwritten and strict:
        raise MaterializationError(
            f"{len(unwritten)} parameters or buffers were written by no initialization",
            items=unwritten,
            expected=(
                "reset_parameters() of the module that owns it" if init_fn is None else "init_fn(module) of the module that owns it"
            )
            + " to write each; these stay on the meta device",
            fix="write it there, and call materialize again; or pass strict=False and load it from a checkpoint",
        )
    return unwritten


def _check_arguments(model: Any, init_fn: Any, strict: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ArgumentError(got_object("materialize", model), expected="an nn.Module", fix="pass the model itself")
    if init_fn is not None and not callable(init_fn):
        raise ArgumentError(
            got("materialize", "init_fn", init_fn),
            expected="a function of one nn.Module, or None",
            fix="for instance init_fn=lambda module: ...",
        )
    require("materialize", SWITCH, strict=strict)


def _device(found: MetaTensors, device: torch.device | str | None) -> torch.device:
    if device is not None:
        try:
            return torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise ArgumentError(
                got("materialize", "device", device), expected="a torch.device, or its name", fix='for instance device="cpu"'
            ) from error
    if found.units:
        return found.units[0].device
    return torch.device(torch_tensors.default_device_type())


def _in_apply_order(module: nn.Module, above: tuple[nn.Module, ...] = ()) -> Iterator[nn.Module]:
    """Children first, and a shared module once for each parent, exactly as ``nn.Module.apply`` calls. No module inside of itself."""
    if not any(module is each for each in above):
        for child in module.children():
            yield from _in_apply_order(child, (*above, module))
        yield module


def _reset_method(module: nn.Module) -> Callable[[], object] | None:
    for name in RESET_NAMES:
        method = getattr(module, name, None)
        if callable(method):
            return method  # type: ignore[no-any-return]
    return None


def _reset(module: nn.Module) -> None:
    method = _reset_method(module)
    if method is not None:
        method()


def _refuse_without_reset(model: nn.Module, found: MetaTensors) -> None:
    """Modules with parameters that neither they nor a module above can initialize."""
    stuck: list[str] = []
    seen: set[nn.Module] = set()

    def look(module: nn.Module, name: str) -> None:
        if module in seen or _reset_method(module) is not None:
            return  # its method may well reach into the modules below
        seen.add(module)
        own = [
            f"{key} {tuple(param.shape)}" for key, param in module._parameters.items() if param is not None and found.is_missing(param)
        ]
        if own:
            stuck.append(f"{name or 'the model itself'} ({type(module).__name__}): {', '.join(own)}")
        for key, child in module.named_children():
            look(child, f"{name}.{key}" if name else key)

    look(model, "")
    if stuck:
        raise MaterializationError(
            f"{len(stuck)} modules own parameters on the meta device and have no reset_parameters()",
            items=stuck,
            expected="a method reset_parameters() that writes the module's own parameters and buffers",
            fix="write one, or pass init_fn=<a function that initializes one module>; nothing was changed",
        )
