"""The pages of docs/reference/ name each public name once."""

from __future__ import annotations

import importlib
import inspect
import re
from collections import Counter
from pathlib import Path
from typing import Any

from fsdp2 import errors
from harness.public_names import MODULES, public_names

PAGES = sorted((Path(__file__).parents[2] / "docs" / "reference").glob("*.md"))
ENTRY = re.compile(r"^\.\. (?:auto(?:function|class|method|exception)|py:data):: (\S+)$", re.MULTILINE)


def found_by(name: str) -> Any:
    """What ``name``, with dots, stands for."""
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError:
        return getattr(found_by(module), attribute)


def test_each_public_name_stands_once_in_the_reference():
    listed = [name for page in PAGES for name in ENTRY.findall(page.read_text())]
    assert [name for name, times in Counter(id(found_by(each)) for each in listed).items() if times > 1] == []
    there = [found_by(each) for each in listed]
    public = [
        *public_names().values(),
        *(each for each in vars(errors).values() if inspect.isclass(each) and issubclass(each, Exception)),
    ]
    for module in map(importlib.import_module, MODULES):
        public += [getattr(module, name) for name in getattr(module, "__all__", ()) if not inspect.ismodule(getattr(module, name))]
    assert [each for each in public if not any(each is other for other in there)] == []
