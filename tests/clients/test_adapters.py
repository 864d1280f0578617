"""Adapters of PEFT on a sharded model: ``save_pretrained`` writes them whole, and nothing of the base model."""

from __future__ import annotations

import copy
import importlib.util
import warnings

import pytest
import torch
import torch.distributed as dist

from fsdp2 import fully_shard
from harness import cpu_mesh, on_ranks


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft: pip install 'fsdp2[clients]'")
@on_ranks(2)
def test_an_adapter_of_a_sharded_model_is_saved_whole(tmp_path):
    import peft
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=61, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    base = transformers.LlamaForCausalLM(config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers, for PEFT
        model = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
        expected = {name: value.clone() for name, value in peft.get_peft_model_state_dict(model).items()}
        for layer in model.base_model.model.model.layers:
            fully_shard(layer, mesh=cpu_mesh())
        fully_shard(model, mesh=cpu_mesh())
        model.save_pretrained(tmp_path)
        opened = peft.get_peft_model_state_dict(peft.PeftModel.from_pretrained(base, tmp_path))
    assert opened.keys() == expected.keys()
    assert all(torch.equal(opened[name], expected[name]) for name in expected)
    assert sum(file.stat().st_size for file in tmp_path.glob("*.safetensors")) < 2 * sum(value.nbytes for value in expected.values())
    dist.barrier()
