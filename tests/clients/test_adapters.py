"""Adapters of PEFT on a sharded model: ``save_pretrained`` writes the unsharded model's files, and rank 0 gathers no base model."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fsdp2 import ModuleError, fully_shard
from harness import cpu_mesh, on_ranks
from harness.memory import PeakBytes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft: pip install 'fsdp2[clients]'"),
    pytest.mark.filterwarnings("ignore"),  # of transformers for PEFT, and of PEFT about embeddings
]


def base_model():
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=61, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    return transformers.LlamaForCausalLM(config)


def with_lora(*more_adapters, **settings):
    import peft

    def config(**more):
        return peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, **more)

    model = peft.get_peft_model(base_model(), config(**settings))
    for name in more_adapters:
        model.add_adapter(name, config())
    return model


def with_another(kind, **settings):
    import peft

    torch.manual_seed(0)
    return peft.get_peft_model(base_model(), getattr(peft, kind)(**settings))


def added_to_transformers():
    import peft

    model = base_model()
    model.add_adapter(peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    return model


def frozen():
    model = with_lora()
    return model.requires_grad_(False)


MODELS = {
    "lora": with_lora,
    "two adapters, of which one trains": lambda: with_lora("second"),
    "for inference": frozen,
    "dora": lambda: with_lora(use_dora=True),
    "saved modules": lambda: with_lora(modules_to_save=["lm_head"]),
    "tokens": lambda: with_lora(trainable_token_indices=[0, 3]),
    "bias": lambda: with_lora(bias="lora_only"),
    "vera": lambda: with_another("VeraConfig", r=4, target_modules=["q_proj"]),
    "adalora": lambda: with_another("AdaLoraConfig", init_r=4, target_r=2, total_step=10, target_modules=["q_proj"]),
    "prompts": lambda: with_another("PromptTuningConfig", num_virtual_tokens=3, task_type="CAUSAL_LM"),
    "prefixes": lambda: with_another("PrefixTuningConfig", num_virtual_tokens=3, task_type="CAUSAL_LM"),
    "added to transformers": added_to_transformers,
}


def sharded(model):
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    for layer in inner.model.layers:
        fully_shard(layer, mesh=cpu_mesh())
    return fully_shard(model, mesh=cpu_mesh())


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@on_ranks(2)
@pytest.mark.parametrize("kind", MODELS)
def test_an_adapter_of_a_sharded_model_is_saved_as_the_unsharded_model_saves_it(tmp_path, kind):
    """Adapters that did not train were left out of the files, or the call failed."""
    if dist.get_rank() == 0:
        MODELS[kind]().save_pretrained(tmp_path / "theirs")
    model = sharded(MODELS[kind]())
    model.save_pretrained(tmp_path / "ours")
    dist.barrier()
    ours, theirs = files_in(tmp_path / "ours"), files_in(tmp_path / "theirs")
    assert any(name.endswith(".safetensors") for name in theirs)
    assert ours.keys() == theirs.keys()
    assert [name for name in theirs if ours[name] != theirs[name]] == []
    dist.barrier()


@on_ranks(2)
def test_rank_0_gathers_the_adapter_alone_and_embeddings_only_when_they_are_asked_for(tmp_path):
    reference = with_lora()
    adapter_nbytes = sum(param.nbytes for param in reference.parameters() if param.requires_grad)
    base_nbytes = sum(param.nbytes for param in reference.parameters()) - adapter_nbytes
    bound = 4 * adapter_nbytes + 8192  # what is gathered, the bands on their way, and what the ranks agree on
    assert base_nbytes > 4 * bound
    if dist.get_rank() == 0:
        reference.save_pretrained(tmp_path / "theirs", save_embedding_layers=True)
    model = sharded(with_lora())
    with PeakBytes() as memory:
        memory.touch([*model.parameters(), *model.buffers()])
        before = memory.peak
        model.save_pretrained(tmp_path / "adapter")
        assert memory.peak - before <= bound
    model.save_pretrained(tmp_path / "ours", save_embedding_layers=True)
    dist.barrier()
    assert files_in(tmp_path / "ours") == files_in(tmp_path / "theirs")
    dist.barrier()


@on_ranks(2)
def test_a_prompt_encoder_that_is_a_unit_of_its_own_is_an_error_on_all_ranks(tmp_path):
    model = MODELS["prompts"]()
    fully_shard(model.prompt_encoder["default"], mesh=cpu_mesh())
    sharded(model)
    with pytest.raises(ModuleError, match="fully_shard was called on prompt_encoder itself"):
        model.save_pretrained(tmp_path)
    dist.barrier()
