"""Key maps: what comes out has the values of the torch operation of the same name; what is saved through one is what was loaded."""

from __future__ import annotations

import re
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import fsdp2.checkpoint.safetensors_save as save
from fsdp2 import ArgumentError, fully_shard
from fsdp2.checkpoint import (
    CheckpointError,
    Concat,
    KeyRule,
    Rename,
    Split,
    Stack,
    Transpose,
    Unstack,
    load_safetensors,
    save_safetensors,
)
from harness import cpu_mesh, on_ranks
from harness.checkpoints import on_rank_0, whole
from harness.training import assert_same_tensors


class Holder(nn.Module):
    """Parameters of any names."""

    def __init__(self, **shapes):
        super().__init__()
        for name, shape in shapes.items():
            module = self
            *path, last = name.split("__")
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, nn.Module())
                module = getattr(module, part)
            module.register_parameter(last, nn.Parameter(torch.zeros(shape)))


def numbers(**shapes):
    total = 0
    tensors = {}
    for name, shape in shapes.items():
        count = torch.Size(shape).numel()
        tensors[name.replace("__", ".")] = torch.arange(total, total + count, dtype=torch.float32).view(shape)
        total += count
    return tensors


def load(tmp_path, tensors, model, key_map, **options):
    save_file(tensors, tmp_path / "model.safetensors")
    report = load_safetensors(model, tmp_path, key_map=key_map, **options)
    return dict(model.state_dict()), report


def test_renamed_by_a_function_or_by_patterns_in_order(tmp_path):
    tensors = numbers(transformer__a=(3,), transformer__b=(2,), rotary=(4,))
    for key_map in (
        lambda key: None if key == "rotary" else key.removeprefix("transformer."),
        [(r"^transformer\.", "x."), (r"^x\.", ""), (r"rotary", None)],
        [(re.compile(r"^transformer\.(.)"), r"\1"), lambda key: None if key == "rotary" else key],
    ):
        loaded, report = load(tmp_path, tensors, Holder(a=(3,), b=(2,)), key_map)
        assert torch.equal(loaded["a"], tensors["transformer.a"])
        assert torch.equal(loaded["b"], tensors["transformer.b"])
        assert report.loaded == ["a", "b"]


def test_a_rule_of_ones_own(tmp_path):
    class Negated(KeyRule):
        def apply(self, tensors, shapes):
            assert shapes == {"a": (3,)}
            return {"a": tensors["b"]}

    loaded, _ = load(tmp_path, numbers(b=(3,)), Holder(a=(3,)), [Negated()])
    assert torch.equal(loaded["a"], torch.arange(3.0))


BAD = {
    "two tensors of one name": ([lambda key: "x"], r"several tensors the name x\n  a\.k\n  a\.q"),
    "a part is missing": ([Concat(["*.q", "*.nothing"], "*.x")], r"joins 2 tensors.*lacks 1 of them\n  a\.nothing"),
    "parts that do not go together": ([Concat(["*.q", "*.k"], "*.x", dim=1)], r"do not match\n  a\.q \(4, 3\)\n  a\.k \(2, 3\)"),
    "a dim that is not there": ([Transpose("*.q", (0, 2))], r"a\.q \(4, 3\) does not have"),
    "sizes that do not add up": ([Split("*.q", ["*.x", "*.y"], 0, [1, 2])], r"a\.q \(4, 3\) cannot be split"),
    "sizes nobody knows": ([Split("*.q", ["*.x", "*.y"])], r"no size for 2 of its parts\n  a\.x\n  a\.y"),
}


@pytest.mark.parametrize("case", BAD)
def test_rules_that_do_not_fit_are_errors_that_name_the_keys(tmp_path, case):
    rules, text = BAD[case]
    model = Holder(x=(4, 3))
    with pytest.raises(CheckpointError, match=text):
        load(tmp_path, numbers(a__q=(4, 3), a__k=(2, 3)), model, rules)
    assert torch.equal(model.x, torch.zeros(4, 3))


@pytest.mark.parametrize("rules", [[3], ["ab"], [("a", 1)], [("a", "b", "c")], [Concat(["*.q", "*.k"], "*.*.x")]])
def test_what_is_no_rule_is_an_argument_error(tmp_path, rules):
    with pytest.raises(ArgumentError, match="key_map has"):
        load(tmp_path, numbers(a__q=(4, 3), a__k=(2, 3)), Holder(x=(4, 3)), rules)


# --- backwards --------------------------------------------------------------------------------------------------------------------


def experts(tensors):
    """Of a mixture: gate and up are transposed, joined for each expert and stacked."""
    both = [torch.cat([tensors[f"m.experts.{index}.{name}"].T for name in ("gate", "up")], 1) for index in range(2)]
    return {"both": torch.stack(both)}


def stacked(dim):
    """In the order of their numbers."""
    stored = {f"h__e__{index}__w": (5, 2) for index in (1, 10, 0, *range(2, 10))}
    return Stack("*.e.#.w", "*.w", dim), stored, lambda t: {"h.w": torch.stack([t[f"h.e.{index}.w"] for index in range(11)], dim)}


def parts(tensor, sizes, dim=0):
    return {f"h.{name}": part for name, part in zip("qkv", tensor.split(sizes, dim), strict=False)}


MAPS = {
    "renamed": (
        Rename((r"^t\.", ""), (r"^", "t.")), {"t__a": (5, 3), "t__b": (2,)}, lambda t: {"a": t["t.a"], "b": t["t.b"]},
    ),
    "concatenated": (
        Concat(["*.q", "*.k"], "*.qk", sizes=[5, 2]), {"h__q": (5, 3), "h__k": (2, 3), "l__q": (5, 4), "l__k": (2, 4), "b": (4,)},
        lambda t: {"h.qk": torch.cat([t["h.q"], t["h.k"]]), "l.qk": torch.cat([t["l.q"], t["l.k"]]), "b": t["b"]},
    ),
    "along another dim": (
        Concat(["*.q", "*.k"], "*.qk", -1, [2, 3]), {"h__q": (5, 2), "h__k": (5, 3)},
        lambda t: {"h.qk": torch.cat([t["h.q"], t["h.k"]], 1)},
    ),
    "split": (Split("*.qk", ["*.q", "*.k"]), {"h__qk": (7, 3)}, lambda t: parts(t["h.qk"], [5, 2])),
    "split by sizes along another dim": (
        Split("*.qkv", ["*.q", "*.k", "*.v"], 1, [4, 2, 2]), {"h__qkv": (8, 8)}, lambda t: parts(t["h.qkv"], [4, 2, 2], 1),
    ),
    **{f"stacked along dim {dim}": stacked(dim) for dim in range(3)},
    "unstacked": (
        Unstack("*.w", "*.e.#.w"), {"h__w": (3, 4, 2)}, lambda t: {f"h.e.{index}.w": t["h.w"][index] for index in range(3)},
    ),
    "transposed": (Transpose("*.w"), {"h__w": (5, 3)}, lambda t: {"h.w": t["h.w"].T}),
    "experts": (
        [
            Transpose("m.experts.*"),
            Concat(["*.experts.*.gate", "*.experts.*.up"], "*.experts.*.both", dim=1, sizes=[3, 3]),
            Stack("*.experts.#.both", "*.both"),
            Rename((r"^m\.", ""), lambda key: "m." + key),
        ],
        {f"m__experts__{index}__{name}": (3, 4) for index in range(2) for name in ("gate", "up")},
        experts,
    ),
}  # fmt: skip


@on_ranks(1, 3)
@pytest.mark.parametrize("case", MAPS)
def test_what_is_loaded_are_torchs_values_and_saving_through_the_same_map_gives_the_checkpoint_again(tmp_path, case):
    key_map, stored, loaded = MAPS[case]
    expected = numbers(**stored)
    values = loaded(expected)
    on_rank_0(lambda: save_file(expected, tmp_path / "model.safetensors"))
    model = fully_shard(Holder(**{name.replace(".", "__"): value.shape for name, value in values.items()}), mesh=cpu_mesh())
    load_safetensors(model, tmp_path, key_map=key_map)
    assert_same_tensors(whole(dict(model.state_dict())), values, "value")
    with patch.object(save, "BUFFER_NBYTES", 50):
        save_safetensors(model, tmp_path / "again", key_map=key_map, num_writers=None)
    assert_same_tensors(load_file(tmp_path / "again" / "model.safetensors"), expected, "value")


NOT_INVERTIBLE = {
    "a pattern": ([(r"gamma$", "weight")], ArgumentError, r"'gamma\$', 'weight'\).*saving cannot undo(.|\n)*Rename\(there, back\)"),
    "a function": (lambda key: key, ArgumentError, r"saving cannot undo(.|\n)*Rename"),
    "no sizes": (Concat(["*.q", "*.k"], "*.qk"), ArgumentError, r"saving cannot undo(.|\n)*sizes"),
    "a rule of one's own": (KeyRule, ArgumentError, r"saving cannot undo(.|\n)*inverse\(\)"),
    "another way back": (Rename((r"^t\.", ""), (r"^", "u.")), CheckpointError, r"back into 4(.|\n)*h.qk: \(7, 3\) in the model"),
    "sizes that do not add up": (Concat(["*.q", "*.k"], "*.qk", sizes=[5, 3]), CheckpointError, r"h.qk \(7, 3\) cannot be split"),
    "two of one name": (Rename(lambda key: key, lambda key: "x"), CheckpointError, "several tensors the name x"),
    "ignored": ([("qk", None)], CheckpointError, r"would not turn the .* back into 1(.|\n)*h.qk"),
}


@on_ranks(2)
@pytest.mark.parametrize("case", NOT_INVERTIBLE)
def test_maps_that_do_not_lead_back_are_refused_on_every_rank_before_anything_is_written(tmp_path, case):
    key_map, error, text = NOT_INVERTIBLE[case]
    if key_map is KeyRule:
        key_map = type("Own", (KeyRule,), {"apply": lambda self, tensors, shapes: dict(tensors)})()
    model = fully_shard(Holder(h__qk=(7, 3), b=(4,)), mesh=cpu_mesh())
    with pytest.raises(error, match=text):
        save_safetensors(model, tmp_path / "folder", key_map=key_map)
    assert not (tmp_path / "folder").exists()


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_several_tensors_become_one(tmp_path, dim):
    tensors = numbers(l0__q__weight=(4, 4), l0__k__weight=(4, 4), l1__q__weight=(4, 4), l1__k__weight=(4, 4))
    shape = (8, 4) if dim == 0 else (4, 8)
    rule = Concat(["*.q.*", "*.k.*"], "*.qk.*", dim=dim)
    loaded, _ = load(tmp_path, tensors, Holder(l0__qk__weight=shape, l1__qk__weight=shape), rule)
    for layer in ("l0", "l1"):
        assert torch.equal(loaded[f"{layer}.qk.weight"], torch.cat([tensors[f"{layer}.q.weight"], tensors[f"{layer}.k.weight"]], dim))


@pytest.mark.parametrize("sizes", [None, [4, 2, 2]])
@pytest.mark.parametrize("dim", [0, 1])
def test_one_tensor_becomes_several(tmp_path, dim, sizes):
    tensors = numbers(h__qkv__weight=(8, 8))
    shapes = [(4, 8), (2, 8), (2, 8)] if dim == 0 else [(8, 4), (8, 2), (8, 2)]
    model = Holder(h__q__weight=shapes[0], h__k__weight=shapes[1], h__v__weight=shapes[2])
    loaded, _ = load(tmp_path, tensors, model, [Split("*.qkv.weight", ["*.q.weight", "*.k.weight", "*.v.weight"], dim, sizes)])
    for name, part in zip("qkv", tensors["h.qkv.weight"].split([4, 2, 2], dim), strict=True):
        assert torch.equal(loaded[f"h.{name}.weight"], part)


def test_the_numbers_of_one_tensor_become_tensors_of_their_own(tmp_path):
    tensors = numbers(h__scales=(3,))
    model = Holder(**{f"h__{index}__scale": () for index in range(3)})
    loaded, _ = load(tmp_path, tensors, model, [Unstack("*.scales", "*.#.scale")])
    assert [loaded[f"h.{index}.scale"].item() for index in range(3)] == tensors["h.scales"].tolist()
