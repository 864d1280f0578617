"""What a plan says is what ``parallelize`` does; wrapping by hand does the same while a model is built."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp2 import FSDPModule, MixedPrecisionPolicy, fully_shard, parallelize
from fsdp2.core.iteration.module_state import unit_of
from fsdp2.wrap import by_class, by_name, by_size, enable_wrap, plan, wrap
from harness import on_ranks
from harness.models import Block, batches, mlp, token_batches, transformer
from harness.training import assert_trains_as, own_chunk

transformers = pytest.importorskip("transformers")


def sharded_names(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]


@on_ranks(2)
@pytest.mark.parametrize("policy", ["auto", None, by_class("Linear"), by_size(60), by_name(r"blocks\.\d+", "head"), {nn.ModuleList}])
def test_parallelize_makes_the_groups_of_the_plan_and_trains(policy):
    model, reference = transformer(tied=True), transformer(tied=True)
    planned = plan(model, policy)
    parallelize(model, wrap=policy)
    assert sorted(sharded_names(model)) == sorted(name for group in planned.groups for name in group.names)
    for group in planned.groups:
        of_unit = [param for made in unit_of(group.modules[0]).groups for param in made.params]
        assert len(of_unit) == len(group.params)
    assert_trains_as(model, reference, token_batches())


def tiny(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """A model of transformers with random weights, without dropout, and a batch of four rows."""
    torch.manual_seed(0)
    llama_like = {
        "num_hidden_layers": 2,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 30,
        "max_position_embeddings": 16,
    }
    ids = torch.randint(30, (4, 6), generator=torch.Generator().manual_seed(1))
    if name == "gpt2":
        config = transformers.GPT2Config(
            n_layer=2, n_embd=16, n_head=2, vocab_size=30, n_positions=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        )
        return transformers.GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}
    if name == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**llama_like)), {"input_ids": ids, "labels": ids}
    if name == "mixtral":
        config = transformers.MixtralConfig(**llama_like, num_local_experts=4)
        return transformers.MixtralForCausalLM(config), {"input_ids": ids, "labels": ids}
    if name == "t5":
        config = transformers.T5Config(
            num_layers=2, d_model=16, d_ff=24, d_kv=8, num_heads=2, vocab_size=30, dropout_rate=0.0, decoder_start_token_id=0
        )
        return transformers.T5ForConditionalGeneration(config), {"input_ids": ids, "labels": ids}
    config = transformers.ViTConfig(
        num_hidden_layers=2, hidden_size=16, num_attention_heads=2, intermediate_size=24, image_size=8, patch_size=4, num_labels=3
    )
    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    return transformers.ViTForImageClassification(config), {"pixel_values": images, "labels": torch.tensor([0, 1, 2, 1])}


@on_ranks(2)
@pytest.mark.parametrize("strategy", [pytest.param("zero1", marks=pytest.mark.slow), "zero3"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "vit", "mixtral"])
def test_models_of_transformers_train_with_auto(name, strategy):
    reference, batch = tiny(name)
    model = parallelize(tiny(name)[0], strategy)
    assert len(sharded_names(model)) > 2
    half = {key: own_chunk(value) for key, value in batch.items()}
    for _ in range(2):
        loss = model(**half).loss
        loss.backward()
        for rank in range(2):
            (reference(**{key: value.chunk(2)[rank] for key, value in batch.items()}).loss / 2).backward()
        for (fqn, param), other in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert (param.grad is None) == (other.grad is None), fqn
            if other.grad is not None:
                torch.testing.assert_close(param.grad.full_tensor(), other.grad, atol=1e-6, rtol=1e-4)
        with torch.no_grad():
            for each in (model, reference):
                for param in each.parameters():
                    if param.grad is not None:
                        param -= 0.1 * param.grad
                        param.grad = None


# --- by hand -------------------------------------------------------------------------------------------------------------------


class ByHand(nn.Module):
    """``harness.models.MLP``, whose blocks wrap themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 10)
        self.blocks = nn.ModuleList(wrap(Block(10)) for _ in range(3))
        self.last = wrap(nn.Linear(10, 5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def by_hand() -> nn.Module:
    torch.manual_seed(0)
    return ByHand()


@on_ranks(2)
@pytest.mark.parametrize("strategy", ["zero3", "zero1", "hsdp"])
def test_modules_are_wrapped_while_they_are_built(strategy):
    with enable_wrap(strategy, mp_policy=MixedPrecisionPolicy(), **({"shard_size": 1} if strategy == "hsdp" else {})):
        model = wrap(by_hand())
    assert sharded_names(model) == ["", "blocks.0", "blocks.1", "blocks.2", "last"]
    meshes = {id(group.mesh.shard_group) for module in model.modules() if unit_of(module) for group in unit_of(module).groups}
    assert len(meshes) == 1
    assert_trains_as(model, mlp(), batches())


def test_outside_of_enable_wrap_nothing_is_wrapped():
    model = by_hand()
    assert sharded_names(model) == []
    assert wrap(model) is model


@on_ranks(2)
def test_options_of_a_call_go_before_those_of_the_context():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    with enable_wrap(mp_policy=policy):
        one = wrap(nn.Linear(2, 2))
        two = wrap(nn.Linear(2, 2), mp_policy=MixedPrecisionPolicy())
        with enable_wrap("ddp"):
            three = wrap(nn.Linear(2, 2))
        four = wrap(mlp(), wrap={Block})
    assert unit_of(one).mp_policy == policy
    assert unit_of(two).mp_policy == unit_of(three).mp_policy == MixedPrecisionPolicy()
    assert (one.weight.device_mesh.ndim, three.weight.device_mesh.ndim) == (1, 2)
    assert sharded_names(four) == ["", "blocks.0", "blocks.1", "blocks.2"]
    assert sharded_names(by_hand()) == []


@on_ranks(2)
def test_parallelize_leaves_what_was_wrapped_before_as_it_is():
    model = mlp()
    fully_shard(model.blocks[1])
    assert plan(model, {Block}).names == ["blocks.0", "blocks.2"]
    parallelize(model, wrap={Block}, strategy="zero2")
    assert unit_of(model.blocks[1]).options.reshard_after_forward is True
    assert unit_of(model.blocks[0]).options.reshard_after_forward is False
    assert_trains_as(model, mlp(), batches())
