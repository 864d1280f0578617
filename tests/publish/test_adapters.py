"""Adapters of the form that PEFT gives them: merged into the weights that are published, alone, or as the model has them."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.distributed.tensor import Shard

import fsdp2
from fsdp2.errors import ArgumentError, ParameterError
from harness import cpu_mesh, on_ranks
from harness.sharding import with_reference


class Lora(nn.Module):
    """The attributes of PEFT's LoRA layers."""

    def __init__(self, base_layer: nn.Module, adapters: dict[str, float], rank: int = 2, fan_in_fan_out: bool = False) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A, self.lora_B = nn.ModuleDict(), nn.ModuleDict()
        self.lora_embedding_A, self.lora_embedding_B = nn.ParameterDict(), nn.ParameterDict()
        self.lora_magnitude_vector = nn.ModuleDict()
        self.scaling = dict(adapters)
        self.active_adapters, self.merged_adapters = list(adapters), []
        self.disable_adapters = False
        self.fan_in_fan_out = fan_in_fan_out
        rows, cols = base_layer.weight.shape[:: -1 if fan_in_fan_out else 1]
        for name in adapters:
            if isinstance(base_layer, nn.Embedding):
                self.lora_embedding_A[name] = nn.Parameter(torch.randn(rank, rows))
                self.lora_embedding_B[name] = nn.Parameter(torch.randn(cols, rank))
            else:
                self.lora_A[name] = nn.Linear(cols, rank, bias=False)
                self.lora_B[name] = nn.Linear(rank, rows, bias=False)

    def merged(self) -> Tensor:
        weight = self.base_layer.weight.detach().clone()
        for name in self.active_adapters:
            if isinstance(self.base_layer, nn.Embedding):
                weight += self.scaling[name] * (self.lora_embedding_B[name] @ self.lora_embedding_A[name]).t()
            else:
                added = self.scaling[name] * (self.lora_B[name].weight @ self.lora_A[name].weight)
                weight += added.t() if self.fan_in_fan_out else added
        return weight


class SavedWhole(nn.Module):
    """The attributes of PEFT's modules_to_save."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.original_module = module
        self.modules_to_save = nn.ModuleDict({"default": nn.Linear(module.in_features, module.out_features)})
        self.active_adapters = ["default"]
        self.disable_adapters = False


def with_lora(adapters: dict[str, float]) -> nn.Module:
    torch.manual_seed(0)
    k = Lora(nn.Linear(6, 9, bias=False), adapters, 3, True)
    block = nn.ModuleDict({"q": Lora(nn.Linear(7, 5), adapters), "k": k, "v": nn.Linear(3, 3)})
    embed, head = Lora(nn.Embedding(11, 6), adapters), SavedWhole(nn.Linear(4, 4))
    inner = nn.ModuleDict({"embed": embed, "blocks": nn.ModuleList([block]), "head": head})
    model = nn.Module()
    model.base_model = nn.Module()
    model.base_model.model = inner
    return model


def expected_of(model: Any) -> dict[str, Tensor]:
    inner = model.base_model.model
    block = inner["blocks"][0]
    return {
        "embed.weight": inner["embed"].merged(),
        "blocks.0.q.weight": block["q"].merged(),
        "blocks.0.q.bias": block["q"].base_layer.bias,
        "blocks.0.k.weight": block["k"].merged(),
        "blocks.0.v.weight": block["v"].weight,
        "blocks.0.v.bias": block["v"].bias,
        "head.weight": inner["head"].modules_to_save["default"].weight,
        "head.bias": inner["head"].modules_to_save["default"].bias,
    }


def shard_all(shard: Any, model: Any, **options: Any) -> Any:
    shard(list(model.base_model.model["blocks"][0].values()), **options)
    return shard(model, **options)


@on_ranks(2, 3)
def test_merged_weights_are_those_of_the_unsharded_model():
    for adapters in ({"default": 0.5}, {"default": 2.0, "other": -1.0}):
        reference = with_lora(adapters)
        expected = expected_of(reference)
        for who, shard, fn in (
            ("ours", fsdp2.fully_shard, None),
            ("dim 1", fsdp2.fully_shard, lambda param: Shard(param.ndim - 1)),
            ("torch's", torchs_fully_shard, None),
        ):
            model = shard_all(shard, copy.deepcopy(reference), mesh=cpu_mesh(), shard_placement_fn=fn)
            for dtype, tolerance in ((None, 1e-6), (torch.bfloat16, 1e-2)):
                weights = fsdp2.publish(model, dtype=dtype)
                sent: dict[str, Tensor] = {}
                weights.send(sent.update)
                for got in (dict(weights), sent):
                    assert sorted(got) == sorted(expected), who
                    assert [meta.name for meta in weights.metadata()] == list(got), who
                    for name, each in expected.items():
                        torch.testing.assert_close(got[name].float(), each.detach(), rtol=tolerance, atol=tolerance)
                        assert got[name].dtype == (dtype or torch.float32)


@on_ranks(2)
def test_adapters_that_are_off_or_in_the_weight_already_are_not_added():
    reference = with_lora({"default": 0.5})
    block = reference.base_model.model["blocks"][0]
    block["q"].merged_adapters = ["default"]
    block["k"].disable_adapters = True
    got = dict(fsdp2.publish(shard_all(fsdp2.fully_shard, copy.deepcopy(reference), mesh=cpu_mesh())))
    assert torch.equal(got["blocks.0.q.weight"], block["q"].base_layer.weight)
    assert torch.equal(got["blocks.0.k.weight"], block["k"].base_layer.weight)


@on_ranks(2)
def test_adapters_alone_and_all_tensors_as_they_are():
    reference = with_lora({"default": 0.5})
    state = reference.state_dict()
    model = shard_all(fsdp2.fully_shard, copy.deepcopy(reference), mesh=cpu_mesh())
    separate = dict(fsdp2.publish(model, adapters="separate"))
    assert sorted(separate) == sorted(state)
    assert all(torch.equal(each, state[name]) for name, each in separate.items())
    alone = dict(fsdp2.publish(model, adapters="only"))
    of_adapter = {name: each for name, each in state.items() if ".default" in name}
    named = {name.replace("modules_to_save.default.", "").replace(".default", ""): each for name, each in of_adapter.items()}
    assert sorted(alone) == sorted(named)
    assert all(torch.equal(each, named[name]) for name, each in alone.items())


@on_ranks(2)
def test_what_cannot_be_merged_is_refused():
    def publish(change: Any, **options: Any) -> None:
        model = with_lora({"default": 0.5, "other": 0.5})
        change(model.base_model.model["blocks"][0]["q"])
        fsdp2.publish(shard_all(fsdp2.fully_shard, model, mesh=cpu_mesh()), **options)

    with pytest.raises(ParameterError, match="is DoRA"):
        publish(lambda layer: layer.lora_magnitude_vector.update({"default": nn.Linear(2, 2)}))
    with pytest.raises(ParameterError, match="has a bias of its own"):
        publish(lambda layer: layer.lora_B.update({"default": nn.Linear(2, 5)}))
    with pytest.raises(ParameterError, match="adapts a Conv1d"):
        publish(lambda layer: setattr(layer, "base_layer", nn.Conv1d(5, 7, 1)))
    with pytest.raises(ArgumentError, match="several active adapters"):
        publish(lambda layer: None, adapters="only")
    with pytest.raises(ArgumentError, match="finds no adapter"):
        fsdp2.publish(fsdp2.fully_shard(nn.Linear(2, 2), mesh=cpu_mesh()), adapters="only")
    with pytest.raises(ArgumentError, match="adapters='all'"):
        fsdp2.publish(nn.Linear(2, 2), adapters="all" if dist.get_rank() >= 0 else "")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft: pip install 'fsdp2[clients]'")
@pytest.mark.filterwarnings("ignore")  # of transformers for PEFT
@on_ranks(2)
def test_peft_itself_merges_to_the_same_weights():
    import peft
    import transformers

    settings = transformers.LlamaConfig(vocab_size=61, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, modules_to_save=["lm_head"])
    model, reference = with_reference(peft.get_peft_model(transformers.LlamaForCausalLM(settings), config))
    expected = reference.merge_and_unload().state_dict()
    for layer in model.base_model.model.model.layers:
        fsdp2.fully_shard(layer, mesh=cpu_mesh())
    got = dict(fsdp2.publish(fsdp2.fully_shard(model, mesh=cpu_mesh())))
    assert sorted(got) == sorted(expected)
    for name, each in expected.items():
        torch.testing.assert_close(got[name], each, rtol=1e-5, atol=1e-5)
