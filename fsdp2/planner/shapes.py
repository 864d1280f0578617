"""Built-in workloads by name, and models from files and functions.

llama3-8b, -70b, -405b   The Llama 3 Herd of Models, table 3 (arXiv 2407.21783)
deepseek-v3              DeepSeek-V3 technical report, section 4.2 (arXiv 2412.19437), without multi-token prediction
gpt-175b, gpt-1t         Introducing PyTorch FSDP API (2022): minGPT, a vocabulary of 50 000
t5-3b, t5-11b            Raffel et al. 2020, section 3.7 (arXiv 1910.10683)
"""

from __future__ import annotations

import difflib
import importlib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import ArgumentError
from .models import T5, Decoder, DecoderShape, Experts, LatentAttention, T5Shape
from .workload import Workload, next_token_loss, tokens, workload_of

SHAPES: dict[str, DecoderShape | T5Shape] = {
    "llama3-8b": DecoderShape("llama", 4096, 32, 32, 8, 14336, 128256),
    "llama3-70b": DecoderShape("llama", 8192, 80, 64, 8, 28672, 128256),
    "llama3-405b": DecoderShape("llama", 16384, 126, 128, 8, 53248, 128256),
    "deepseek-v3": DecoderShape(
        "llama",
        7168,
        61,
        128,
        128,
        18432,
        129280,
        experts=Experts(routed=256, shared=1, top=8, hidden=2048, dense_layers=3),
        latent=LatentAttention(query_rank=1536, key_rank=512, plain=128, rotary=64, value=128),
    ),
    "gpt-175b": DecoderShape("gpt", 12288, 96, 96, 96, 4 * 12288, 50000),
    "gpt-1t": DecoderShape("gpt", 25600, 128, 160, 160, 4 * 25600, 50000),
    "t5-3b": T5Shape(1024, 24, 32, 4096, 16384),
    "t5-11b": T5Shape(1024, 24, 128, 16384, 65536),
}


def named(model: str, inputs: str | None = None) -> Workload:
    """A shape by name; ``hf:CONFIG.json``: transformers' model of that configuration; ``package.module:function``: what it returns.

    The function returns a module, or a Workload, and is called without arguments on the meta device.
    inputs: ``package.module:function`` from batch and sequence to what the model is called with; None: token ids
    Raises: ArgumentError if there is no such thing
    """
    found = _named(model)
    return found if inputs is None else replace(found, inputs=_function(inputs))


def _named(model: str) -> Workload:
    if model in SHAPES:
        return of_shape(model, SHAPES[model])
    kind, colon, rest = model.partition(":")
    if kind == "hf" and rest:
        return _of_transformers(Path(rest))
    if colon and rest.isidentifier():
        return _of_function(model)
    close = difflib.get_close_matches(model, SHAPES, n=1, cutoff=0.8)  # another model's name is no slip of the pen
    raise ArgumentError(
        f"there is no model {model!r}",
        expected=f"one of {list(SHAPES)}, hf:CONFIG.json, or package.module:function",
        fix=f"{close[0]}" if close else "for a model of transformers download its config.json, and pass hf: and the file's path",
    )


def of_shape(name: str, shape: DecoderShape | T5Shape) -> Workload:
    if isinstance(shape, T5Shape):
        return Workload(name, lambda: T5(shape), lambda batch, sequence: tokens(batch, sequence) * 2, next_token_loss)
    return Workload(name, lambda: Decoder(shape), tokens, next_token_loss, repeated="blocks")


def _of_transformers(path: Path) -> Workload:
    try:
        import transformers
    except ImportError:
        raise ArgumentError(
            "hf:CONFIG.json needs transformers, which is not installed", expected="transformers 5", fix="pip install transformers"
        ) from None
    try:
        text = json.loads(path.read_text())
        config: Any = transformers.AutoConfig.for_model(**text)
    except (OSError, ValueError, TypeError) as error:
        raise ArgumentError(
            f"{path} was not read: {error}", expected="config.json of a model that transformers knows", fix="pass the path of one"
        ) from None
    config.use_cache = False

    def build() -> nn.Module:
        maker: Any = transformers.AutoModelForCausalLM
        model: nn.Module = maker.from_config(config, attn_implementation="sdpa")
        return model

    return Workload(str(text.get("_name_or_path") or path.stem), build, tokens, next_token_loss)


def _function(name: str) -> Any:
    module, _, function = name.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ArgumentError(
            f"{name} was not found: {error}",
            expected="a function of a module that can be imported from here",
            fix="pass package.module:function",
        ) from None
    finally:
        sys.path.pop(0)


def _of_function(name: str) -> Workload:
    made = _function(name)
    with torch.device("meta"):
        model = made()
    return model if isinstance(model, Workload) else workload_of(model)
