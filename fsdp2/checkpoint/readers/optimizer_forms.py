"""An optimizer's state by parameter name, from each form in which it may have been saved.

Names come from the state itself (DCP, FSDP1's ``optim_state_dict`` and its older forms), from ``param_names`` of its groups (of
``save_full_state``, beside these), or, where parameters are numbers, from the model's order.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..failure import failure
from ..lazy import LazyTensor
from ..named_state import State, clean_name
from .source import place_of, tensors_of


def looks_like_optimizer(value: Any) -> bool:
    return isinstance(value, dict) and {"state", "param_groups"} <= value.keys() and isinstance(value["state"], dict)


def nested(flat: State) -> State:
    """Undo ``flatten_optimizer_state_dict``: keys ``state.<name>.<key>`` and ``param_groups.<name>.<key>``."""
    state: dict[str, State] = {}
    options: dict[str, State] = {}
    for path, value in flat.items():
        kind, _, rest = path.partition(".")
        name, _, key = rest.rpartition(".")
        ({"state": state, "param_groups": options}[kind]).setdefault(name, {})[key] = value
    groups: list[State] = []
    for name, values in options.items():  # parameters of equal options were in one group, or might as well have been
        group = next((each for each in groups if {k: v for k, v in each.items() if k != "params"} == values), None)
        if group is None:
            groups.append(group := {**values, "params": []})
        group["params"].append(name)
    return {"state": state, "param_groups": groups}


def refuse_one_name(names: Iterable[str]) -> None:
    """Raises: CheckpointError if two differ only in prefixes of wrappers, so that one would take the place of the other"""
    first: dict[str, str] = {}
    for name in names:
        if first.setdefault(clean_name(name), name) != name:
            raise failure(
                f"{first[clean_name(name)]} and {name} are one name without the prefixes of wrappers",
                expected="a value for each parameter: this file has two",
                fix="remove the one that is not meant, and save the file again",
                key=name,
            )


def is_flattened(value: Any) -> bool:
    return isinstance(value, dict) and bool(value) and all(str(key).startswith(("state.", "param_groups.")) for key in value)


def by_name(optimizer: State, model: State) -> State:
    """``optimizer`` with names for parameters; those of each group in the order of ``model``, as ``model.parameters()`` has them.

    Raises: CheckpointError if parameters are numbers and it cannot be told which they are
    """
    groups = [dict(group) for group in optimizer["param_groups"]]
    keys = [*optimizer["state"], *(param for group in groups for param in group["params"])]
    if any(isinstance(key, int) for key in keys):
        names = _names_of_numbers(optimizer, model)
    else:
        names = {key: clean_name(key) for key in keys if isinstance(key, str)}
        refuse_one_name(names)
    foreign = [key for key in keys if key not in names]
    if foreign:
        raise failure(
            f"the optimizer has state of {str(foreign[0])[:100]}",
            expected="names or numbers of parameters",
            fix="save it with FSDP.optim_state_dict, or torch.distributed.checkpoint.state_dict.get_optimizer_state_dict",
        )
    order = {name: index for index, name in enumerate(model)}
    for group in groups:
        group["params"] = sorted((names[param] for param in group["params"]), key=lambda name: order.get(name, len(order)))
        group.pop("param_names", None)
    state = {names[key]: value for key, value in optimizer["state"].items()}
    _check_shapes(state, model)
    return {"state": state, "param_groups": groups}


def _names_of_numbers(optimizer: State, model: State) -> dict[Any, str]:
    numbers = [number for group in optimizer["param_groups"] for number in group["params"]]
    named = optimizer.get("param_names") or [name for group in optimizer["param_groups"] for name in group.get("param_names", ())]
    if len(named) == len(numbers):
        return {number: clean_name(name) for number, name in zip(numbers, named, strict=True)}
    first_at: dict[Any, str] = {}
    for name, value in model.items():
        if isinstance(value, LazyTensor):
            first_at.setdefault(place_of(value), name)
    names = list(first_at.values())
    if len(names) == len(numbers) and sorted(numbers) == list(range(len(numbers))) and numbers == sorted(numbers):
        return dict(zip(numbers, names, strict=True))
    raise failure(
        f"the optimizer numbers its {len(numbers)} parameters, and the model's state has {len(names)} tensors",
        expected="one parameter for each tensor, in one order; buffers, frozen parameters and groups hide which is which",
        fix="save it by name: get_optimizer_state_dict, or an optimizer made with model.named_parameters(); or convert without it",
    )


def _check_shapes(state: State, model: State) -> None:
    """Raise if a moment is larger than its parameter: it belongs to another parameter."""
    wrong: dict[str, str] = {}
    for name, values in state.items():
        param = model.get(name)
        for key, value in tensors_of(values):
            if key in ("exp_avg", "momentum_buffer") and isinstance(param, LazyTensor) and value.shape != param.shape:
                wrong[name] = f"{param.shape} in the model, {key} {value.shape}"
    if wrong:
        raise failure(
            f"the optimizer's state is not of this model: {len(wrong)} tensors do not fit",
            problems=wrong,
            expected="moments of the shapes of the parameters",
            fix="name the files of one save",
        )
