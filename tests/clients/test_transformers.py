"""Models that transformers shards while it loads them: ``from_pretrained(distributed_config=)`` under ``fsdp2.install()``."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.testing import assert_close

import fsdp2
from harness import on_ranks

transformers = pytest.importorskip("transformers", minversion="5.23", reason="needs transformers with DistributedConfig")

pytest.importorskip("accelerate", reason="needs accelerate: from_pretrained shards with it; make test-clients")


@on_ranks(2)
@pytest.mark.slow
def test_a_model_with_tied_embeddings_that_from_pretrained_shards_trains_as_the_unsharded_one(tmp_path):
    from transformers import DistributedConfig

    for tied in (True, False):
        folder = tmp_path / f"tied-{tied}"
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, tie_word_embeddings=tied
        )
        whole = transformers.LlamaForCausalLM(config)
        if torch.distributed.get_rank() == 0:
            whole.save_pretrained(folder)
        torch.distributed.barrier()
        with fsdp2.install():
            model = transformers.LlamaForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(fsdp_size=2))
            assert isinstance(model, fsdp2.FSDPModule)
            assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
            ids = torch.arange(16).view(2, 8)
            reference = copy.deepcopy(whole)
            optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference)]
            for _ in range(3):
                for each, optimizer in zip((model, reference), optimizers, strict=True):
                    each(input_ids=ids, labels=ids).loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
            expected = dict(reference.named_parameters())
            for name, param in model.named_parameters():
                assert_close(param.full_tensor(), expected[name], msg=lambda text, name=name: f"{name}: {text}")
