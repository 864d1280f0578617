"""The public names of fsdp2, and the examples in their docstrings."""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
from typing import Any

MODULES = [
    "fsdp2",
    "fsdp2.policy",
    "fsdp2.checkpoint",
    "fsdp2.optim",
    "fsdp2.activations",
    "fsdp2.wrap",
    "fsdp2.doctor",
    "fsdp2.publishing",
    "fsdp2.state_bytes",
]
_WORD = re.compile(r"\w+")


def public_names() -> dict[str, Any]:
    """Functions and classes of ours by their first public name, and methods of FSDPModule. Without errors: the troubleshooting
    page describes these."""
    found: dict[str, Any] = {}
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for name in getattr(module, "__all__", None) or [each for each in vars(module) if not each.startswith("_")]:
            thing = getattr(module, name)
            if not (inspect.isfunction(thing) or inspect.isclass(thing)):
                continue
            if not thing.__module__.startswith("fsdp2" if hasattr(module, "__all__") else module_name):
                continue
            if inspect.isclass(thing) and issubclass(thing, BaseException):
                continue
            if thing not in found.values():
                found[f"{module_name}.{name}"] = thing
    methods = vars(found.pop("fsdp2.FSDPModule"))
    found |= {
        f"fsdp2.FSDPModule.{name}": each for name, each in methods.items() if inspect.isfunction(each) and not name.startswith("_")
    }
    return found


def example_of(thing: Any) -> str:
    """The code behind ``Example:`` in the docstring of ``thing``; "" if there is none."""
    doc = textwrap.dedent(inspect.getdoc(thing) or "") if "__doc__" in vars(thing) or inspect.isfunction(thing) else ""
    return textwrap.dedent(doc.partition("\nExample:\n")[2])


def results_of(things: dict[str, Any]) -> set[str]:
    """Names of the classes that functions and methods among ``things`` return, and of what such a class has as fields."""
    signatures = [each for thing in things.values() for each in ([thing] if inspect.isfunction(thing) else vars(thing).values())]
    words = {
        word for each in signatures if inspect.isfunction(each) for word in _WORD.findall(str(each.__annotations__.get("return", "")))
    }
    fields = {
        name.rpartition(".")[2]: vars(thing).get("__annotations__", {}) for name, thing in things.items() if inspect.isclass(thing)
    }
    while True:
        more = {word for name in words & fields.keys() for hint in fields[name].values() for word in _WORD.findall(str(hint))} - words
        if not more:
            return words
        words |= more
