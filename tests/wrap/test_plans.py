"""Which groups each policy makes: of torch's and transformers' models, on the meta device or tiny, without any process."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.wrap import _recursive_wrap, size_based_auto_wrap_policy

from fsdp2.errors import ArgumentError, ModuleError, ParameterError
from fsdp2.wrap import auto, by_class, by_name, by_predicate, by_size, plan, root_only
from harness.models import Block, mlp, transformer

transformers = pytest.importorskip("transformers")


def on_meta(make: Any) -> nn.Module:
    with torch.device("meta"):
        return make()


def gpt2(**options: Any) -> nn.Module:
    return on_meta(lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=3, **options)))


def group_names(model: nn.Module, policy: Any = "auto") -> list[str | tuple[str, ...]]:
    names = [group.names for group in plan(model, policy).groups]
    assert names[-1] == ("",)
    return [each[0] if len(each) == 1 else each for each in names[:-1]]


def assert_complete(model: nn.Module, policy: Any) -> None:
    """Every parameter is in one group, tied ones once."""
    params = [id(param) for group in plan(model, policy).groups for param in group.params]
    assert sorted(params) == sorted(id(param) for param in model.parameters())


# --- auto ------------------------------------------------------------------------------------------------------------------------


def llama(**options: Any) -> nn.Module:
    config = transformers.LlamaConfig(
        num_hidden_layers=3, hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, **options
    )
    return on_meta(lambda: transformers.LlamaForCausalLM(config))


def t5(num_layers: int) -> nn.Module:
    return on_meta(lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(num_layers=num_layers)))


def vit() -> nn.Module:
    return on_meta(lambda: transformers.ViTForImageClassification(transformers.ViTConfig(num_hidden_layers=3)))


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(
        num_hidden_layers=3, hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, vocab_size=100
    )
    return on_meta(lambda: transformers.MixtralForCausalLM(config))


def swin() -> nn.Module:
    return on_meta(lambda: transformers.SwinModel(transformers.SwinConfig(depths=[2, 2, 6, 2])))


def block_names(model: nn.Module, cls: str) -> list[str]:
    return [name for name, module in model.named_modules() if type(module).__name__ == cls]


@pytest.mark.parametrize(
    ("make", "block", "others"),
    [
        (gpt2, "GPT2Block", []),  # the embedding is tied to the head
        (llama, "LlamaDecoderLayer", ["model.embed_tokens", "lm_head"]),
        (lambda: llama(tie_word_embeddings=True), "LlamaDecoderLayer", []),
        (lambda: t5(3), "T5Block", []),  # the embedding is shared by encoder, decoder and head
        (lambda: t5(2), "T5Block", []),  # no two blocks are the same: the first has a relative bias
        (vit, "ViTLayer", []),  # patches and classifier are small
        (mixtral, "MixtralDecoderLayer", []),  # the experts inside a layer stay with it
        (swin, "SwinLayer", ["encoder.layers.2.downsample.reduction"]),  # layers, not the stages around them
    ],
)
def test_auto_finds_the_blocks_of_models_that_are_in_use(make, block, others):
    model = make()
    expected = block_names(model, block)
    assert len(expected) > 1
    assert sorted(group_names(model)) == sorted([*expected, *others])
    assert_complete(model, "auto")


def test_auto_finds_blocks_of_torchs_own_models():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3)
    assert group_names(encoder) == ["layers.0", "layers.1", "layers.2"]
    assert group_names(transformer()) == ["blocks.0", "blocks.1"]
    assert group_names(nn.Sequential(Block(4), Block(4), nn.Linear(4, 1))) == ["0", "1"]


class Rows(nn.Module):
    """Blocks that are lists of two modules without a forward of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ModuleList(nn.ModuleList([Block(4), nn.Linear(4, 4)]) for _ in range(3))


def test_auto_makes_one_group_of_a_block_without_a_forward():
    assert group_names(Rows()) == [(f"rows.{index}.0", f"rows.{index}.1") for index in range(3)]
    assert_complete(Rows(), "auto")


class Net(nn.Module):
    """Down, a lone middle block of the same class, up; and a stack of two kinds of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(Block(4), Block(4))
        self.middle = Block(4)
        self.mixed = nn.ModuleList([Block(40), Rows(), Block(40)])


def test_auto_takes_lone_blocks_of_a_class_found_elsewhere_and_layers_of_other_kinds():
    assert sorted(group_names(Net())) == sorted(["down.0", "down.1", "middle", "mixed.0", "mixed.1", "mixed.2"])


class Staged(nn.Module):
    """Blocks in stages, beside blocks made of two parts that are alike."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.ModuleList(Block(4) for _ in range(2)) for _ in range(2))
        self.towers = nn.ModuleDict({name: nn.Sequential(Block(4), Block(4)) for name in "ab"})
        self.layers = nn.ModuleList(nn.ModuleList([Block(4), Block(4), nn.LayerNorm(4)]) for _ in range(2))
        self.parts = nn.ModuleList(nn.Sequential(Block(4), Block(8)) for _ in range(2))


def test_auto_looks_into_lists_of_nothing_but_equal_blocks():
    """Symptom: one group of each stage of a Funnel Transformer, four layers. Cause: the outermost things that are alike were taken."""
    assert group_names(Staged()) == [
        *(f"stages.{stage}.{layer}" for stage in range(2) for layer in range(2)),
        *(f"towers.{tower}.{layer}" for tower in "ab" for layer in range(2)),
        *(tuple(f"layers.{layer}.{part}" for part in range(3)) for layer in range(2)),
        "parts.0",
        "parts.1",
    ]


def test_auto_leaves_a_model_without_repetition_to_the_root():
    assert group_names(nn.Linear(3, 3)) == []
    assert group_names(nn.Sequential(nn.Linear(3, 300), nn.ReLU(), nn.Linear(300, 4))) == ["0", "2"]
    assert group_names(nn.Sequential(nn.Conv2d(3, 4, 1), nn.Linear(300, 4))) == []


# --- the others ------------------------------------------------------------------------------------------------------------------


def torchs_groups(model: nn.Module, min_params: int, ignored: Any = frozenset()) -> set[str]:
    """The modules that FSDP1's policy wraps."""
    names = {id(module): name for name, module in model.named_modules()}
    wrapped: list[str] = []

    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            wrapped.append(names[id(module)])
            self.module = module

    def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        return size_based_auto_wrap_policy(module, recurse, nonwrapped_numel, min_num_params=min_params)

    _recursive_wrap(model, policy, Wrapper, ignored_modules=set(), ignored_params=set(ignored), only_wrap_children=True)
    return set(wrapped)


@pytest.mark.parametrize("min_params", [1, 30, 200, 1000, 3000, 10_000, 100_000, 1_000_000, 10_000_000])
@pytest.mark.parametrize("make", [mlp, transformer, vit, llama, mixtral, swin, lambda: nn.Transformer(8, 2, 2, 2, batch_first=True)])
def test_by_size_makes_the_groups_of_fsdp1(make, min_params):
    ours = plan(make(), by_size(min_params))
    assert set(ours.names) == torchs_groups(make(), min_params)


def test_by_size_has_fsdp1s_default_and_its_classes():
    assert by_size() == by_size(100_000_000)
    model = nn.Sequential(nn.MultiheadAttention(8, 2), nn.ModuleList([nn.Linear(8, 8)]))
    assert group_names(model, by_size(10)) == ["1.0"]
    assert group_names(model, by_size(10, leaves=())) == ["0", "1.0"]
    assert group_names(model, by_size(10, leaves=(nn.MultiheadAttention, nn.Linear))) == []
    for wrong in ({"leaves": nn.Linear}, {"excluded": ["Linear"]}):
        with pytest.raises(ArgumentError, match="classes of modules"):
            by_size(10, **wrong)


def test_by_class_takes_classes_and_their_names_and_sets_are_a_shorthand():
    model = transformer()
    for policy in (by_class(nn.LayerNorm), by_class("LayerNorm"), {nn.LayerNorm}, [nn.LayerNorm], nn.LayerNorm):
        assert sorted(group_names(model, policy)) == sorted(block_names(model, "LayerNorm"))
    nested = plan(model, by_class("TransformerBlock", nn.Linear))
    assert {group.depth for group in nested.groups if group.names == ("blocks.0.attention.query",)} == {1}
    order = [group.names[0] for group in nested.groups]
    assert order.index("blocks.0.attention.query") < order.index("blocks.0")
    assert_complete(model, by_class(nn.Linear))
    with pytest.raises(ArgumentError, match=r"Conv2d.* matches no module"):
        plan(model, by_class(nn.Conv2d))
    for wrong in ((), (3,), (int,)):
        with pytest.raises(ArgumentError, match="by_class got"):
            by_class(*wrong)


def test_a_container_without_a_forward_becomes_a_group_of_its_items():
    assert group_names(transformer(), by_class(nn.ModuleList)) == [("blocks.0", "blocks.1")]


def test_by_name_takes_names_and_regular_expressions():
    model = transformer()
    assert group_names(model, by_name("embedding", r"blocks\.\d+")) == ["embedding", "blocks.0", "blocks.1"]
    assert group_names(model, by_name(re.compile(r".*\.mlp"))) == ["blocks.0.mlp", "blocks.1.mlp"]
    with pytest.raises(ArgumentError, match="'embeding', did you mean 'embedding'"):
        plan(model, by_name("embeding", "head"))
    with pytest.raises(ArgumentError, match="by_name got"):
        by_name("(")
    with pytest.raises(ArgumentError, match="by_name got"):
        by_name(3)
    with pytest.raises(ArgumentError, match="by_name got no name"):
        by_name()


def test_by_predicate_and_the_root_alone():
    model = transformer()
    assert group_names(model, by_predicate(lambda module: isinstance(module, nn.Embedding))) == ["embedding"]
    assert group_names(model, None) == group_names(model, root_only) == []
    assert group_names(model, auto) == group_names(model, "auto")
    with pytest.raises(ArgumentError, match="by_predicate got"):
        by_predicate("Block")
    for wrong in ("automatic", 3, set(), lambda module: True):
        with pytest.raises(ArgumentError, match="no wrap policy"):
            plan(model, wrong)
    with pytest.raises(ModuleError, match="plan got"):
        plan(list(model.parameters()))
    with pytest.raises(ParameterError, match=r"(?s)2 parameters have no shape yet.*1\.weight"):
        plan(nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(4)))


def test_children_whose_parameters_are_read_without_a_call_are_no_groups():
    model = nn.Sequential(nn.MultiheadAttention(8, 2), nn.Linear(8, 8))
    assert group_names(model, by_class(nn.Linear)) == ["1"]


def test_ignored_parameters_belong_to_no_group():
    model = mlp()
    ignored = set(model.blocks[0].parameters())
    planned = plan(model, by_class(Block), ignored_params=ignored)
    assert planned.names == ["blocks.1", "blocks.2"]
    assert planned.numel == sum(param.numel() for param in set(model.parameters()) - ignored)


def test_a_plan_prints_the_tree_with_sizes():
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config())
    assert str(plan(model)).splitlines() == [
        "GPT2LMHeadModel: 13 groups, 148 parameters, 124,439,808 elements, 497.8 MB",
        "  transformer.h.0 ... transformer.h.11  GPT2Block  12 groups of 12 parameters, 7,087,872 elements, 28.4 MB each",
        "  (root)  GPT2LMHeadModel  4 parameters, 39,385,344 elements, 157.5 MB",
    ]
    assert str(plan(transformer().bfloat16(), by_class("Block", "TransformerBlock"))).splitlines() == [
        "Transformer: 5 groups, 37 parameters, 794 elements, 1.59 kB",
        "  blocks.0  TransformerBlock  10 parameters, 180 elements, 360 B",
        "    blocks.0.mlp  Block  6 parameters, 130 elements, 260 B",
        "  blocks.1  TransformerBlock  10 parameters, 180 elements, 360 B",
        "    blocks.1.mlp  Block  6 parameters, 130 elements, 260 B",
        "  (root)  Transformer  5 parameters, 174 elements, 348 B",
    ]
