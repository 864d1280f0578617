"""Compile a device once: into a folder whose name is a hash of its sources, of torch, and of Python."""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from . import torch_names

NAME = "fsdp2_pretend_device"
SOURCES = Path(__file__).parent / "csrc"


def missing_tools() -> list[str]:
    """What a user must install first: a C++ compiler, ninja, and a torch with the C++ names that the sources use."""
    missing = [" or ".join(names) for names in (("g++", "c++", "clang++"), ("ninja",)) if not any(map(shutil.which, names))]
    return missing if torch.__version__ >= "2.13" else [*missing, "torch 2.13 or later"]


def build_folder(prefix: str, files: Iterable[Path]) -> Path:
    """FSDP2_BUILD_DIR; else ``build/`` of the checkout (which git ignores); else, of an installed package, a cache of the user's."""
    above = Path(__file__).parents[3]
    own = above / "build" if (above / "pyproject.toml").is_file() else Path.home() / ".cache" / "fsdp2" / "build"
    root = os.environ.get("FSDP2_BUILD_DIR") or own
    digest = hashlib.sha256(f"{torch.__version__} {sys.version}".encode())
    for path in sorted(files):
        digest.update(path.name.encode() + path.read_bytes())
    return Path(root) / f"{prefix}-{digest.hexdigest()[:16]}"


def compiled(name: str, folder: Path, sources: Iterable[Path]) -> Path:
    """``folder/name.so``, compiled now if it is missing, in about a minute. Several processes may ask at the same time."""
    target = folder / f"{name}.so"
    if not target.exists():
        work = folder / f"by-{os.getpid()}"
        work.mkdir(parents=True, exist_ok=True)
        torch_names.compile_extension(name, [str(path) for path in sorted(sources)], str(work))
        (work / f"{name}.so").replace(target)  # a process that comes second finds all of it or nothing
        shutil.rmtree(work, ignore_errors=True)
    return target


def library() -> Path:
    """The compiled device."""
    return compiled(NAME, build_folder("pretend", SOURCES.iterdir()), SOURCES.glob("*.cpp"))


@cache
def extension() -> Any:
    """The module of the compiled device."""
    return load(NAME, library())


def load(name: str, path: Path) -> Any:
    """The module ``name`` from ``path``."""
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, loader.path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
