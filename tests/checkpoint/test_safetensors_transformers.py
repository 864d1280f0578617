"""Models of transformers: ``from_pretrained`` opens what we save, and we load what ``save_pretrained`` saves."""

from __future__ import annotations

import contextlib
import json
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from fsdp2 import ArgumentError, fully_shard
from fsdp2.checkpoint import CheckpointError, load_safetensors, safetensors_save, save_safetensors
from harness import cpu_mesh, on_ranks
from harness.checkpoints import on_rank_0
from harness.memory import PeakBytes

transformers = pytest.importorskip("transformers", reason="needs transformers")


def config_of(family, tied):
    if family == "llama":
        return transformers.LlamaConfig(
            vocab_size=37, hidden_size=12, intermediate_size=20, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1,
            max_position_embeddings=16, tie_word_embeddings=tied, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
    if family == "gpt2":
        return transformers.GPT2Config(
            vocab_size=37, n_embd=12, n_layer=2, n_head=3, n_positions=16, tie_word_embeddings=tied, bos_token_id=1, eos_token_id=2
        )
    return transformers.T5Config(
        vocab_size=37, d_model=12, d_kv=4, d_ff=20, num_layers=2, num_heads=3, tie_word_embeddings=tied, pad_token_id=0,
        decoder_start_token_id=0, eos_token_id=2,
    )  # fmt: skip


def build(family, tied, seed):
    torch.manual_seed(seed)
    kind = {"llama": "LlamaForCausalLM", "gpt2": "GPT2LMHeadModel", "t5": "T5ForConditionalGeneration"}[family]
    return getattr(transformers, kind)(config_of(family, tied)).eval()


def opened_by_transformers(family, folder):
    auto = transformers.AutoModelForSeq2SeqLM if family == "t5" else transformers.AutoModelForCausalLM
    opened, info = auto.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return opened


def layers_of(family, model):
    if family == "llama":
        return list(model.model.layers)
    if family == "gpt2":
        return list(model.transformer.h)
    return [*model.encoder.block, *model.decoder.block]


def sharded(family, model):
    for layer in layers_of(family, model):
        fully_shard(layer, mesh=cpu_mesh())
    return fully_shard(model, mesh=cpu_mesh())


def logits(family, model):
    ids = torch.arange(3, 11).view(2, 4)
    more = {"decoder_input_ids": ids} if family == "t5" else {}
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False, **more).logits


@on_ranks(2)
@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["tied", "untied"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "t5"])
def test_transformers_opens_what_we_save(tmp_path, family, tied):
    reference = build(family, tied, seed=1)
    model = sharded(family, build(family, tied, seed=1))
    for max_shard_size in ("5GB", "2KB"):
        folder = tmp_path / max_shard_size
        save_safetensors(model, folder, max_shard_size)
        opened = opened_by_transformers(family, folder)
        theirs, ours = dict(opened.named_parameters()), dict(reference.named_parameters())
        assert theirs.keys() == ours.keys()
        assert all(torch.equal(theirs[name], ours[name]) for name in ours)
        assert torch.equal(logits(family, opened), logits(family, reference))
        are_tied = [model.get_input_embeddings().weight is model.get_output_embeddings().weight for model in (opened, reference)]
        assert are_tied[0] == are_tied[1]
        base = transformers.AutoModel.from_pretrained(folder)
        assert torch.equal(base.get_input_embeddings().weight, reference.get_input_embeddings().weight)


@on_ranks(2)
@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["tied", "untied"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "t5"])
def test_what_transformers_saves_loads_from_the_meta_device(tmp_path, family, tied):
    """Non-persistent buffers (Llama's rotary frequencies) come from the model's own initialization."""
    reference = build(family, tied, seed=1)
    on_rank_0(lambda: reference.save_pretrained(tmp_path, max_shard_size="3KB"))
    with torch.device("meta"):
        model = build(family, tied, seed=2)
    sharded(family, model)
    report = load_safetensors(model, tmp_path, init_fn=model._init_weights)
    assert report.missing == report.unexpected == report.uninitialized == []
    for name, param in model.named_parameters():
        assert torch.equal(param.full_tensor(), reference.get_parameter(name)), name
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, reference.get_buffer(name)), name
    torch.testing.assert_close(logits(family, model), logits(family, reference))


@on_ranks(2)
def test_an_index_of_ours_is_what_transformers_writes(tmp_path):
    reference = build("llama", True, seed=1)
    if dist.get_rank() == 0:
        reference.save_pretrained(tmp_path / "theirs", max_shard_size="3KB")
    save_safetensors(sharded("llama", build("llama", True, seed=1)), tmp_path / "ours", "3KB")
    dist.barrier()
    ours, theirs = (json.loads((tmp_path / kind / "model.safetensors.index.json").read_text()) for kind in ("ours", "theirs"))
    assert ours["weight_map"].keys() == theirs["weight_map"].keys()
    digest = ours["metadata"].pop("fsdp2_crc32")  # of the rest, which transformers passes over
    assert digest
    assert ours["metadata"] == theirs["metadata"]


@on_ranks(2)
def test_configs_are_those_of_save_pretrained_and_are_replaced_or_left_alone(tmp_path):
    reference = build("llama", True, seed=1)
    reference.generation_config.max_new_tokens = 5
    if dist.get_rank() == 0:
        reference.save_pretrained(tmp_path / "theirs")
    model = build("llama", True, seed=1)
    model.generation_config.max_new_tokens = 5
    sharded("llama", model)
    (tmp_path / "ours").mkdir(exist_ok=True)
    (tmp_path / "ours" / "config.json").write_text("{}")
    dist.barrier()
    save_safetensors(model, tmp_path / "ours", config=False)
    assert (tmp_path / "ours" / "config.json").read_text() == "{}"
    save_safetensors(model, tmp_path / "ours")
    dist.barrier()
    assert {path.name for path in (tmp_path / "ours").iterdir()} == {path.name for path in (tmp_path / "theirs").iterdir()}
    for name in ("config.json", "generation_config.json"):
        ours, theirs = (json.loads((tmp_path / kind / name).read_text()) for kind in ("ours", "theirs"))
        assert ours == theirs
    assert type(model).__name__ != "LlamaForCausalLM", "the sharded class has another name than what is written"
    save_safetensors(model, tmp_path / "half", dtype=torch.bfloat16)
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    with pytest.raises(ArgumentError, match="no config with save_pretrained"):
        save_safetensors(fully_shard(torch.nn.Linear(2, 2), mesh=cpu_mesh()), tmp_path / "none", config=True)


@on_ranks(2)
def test_a_config_that_refuses_to_be_saved_is_an_error_on_every_rank(tmp_path):
    model = sharded("llama", build("llama", True, seed=1))
    refusing = patch.object(type(model.generation_config), "save_pretrained", side_effect=ValueError("no temperature"))
    with refusing if dist.get_rank() == 1 else contextlib.nullcontext(), pytest.raises(CheckpointError, match="no temperature"):
        save_safetensors(model, tmp_path / "folder")
    dist.barrier()
    assert not list((tmp_path / "folder").glob("*"))


@on_ranks(2)
@pytest.mark.parametrize("family", ["llama", pytest.param("gpt2", marks=pytest.mark.slow), pytest.param("t5", marks=pytest.mark.slow)])
def test_save_pretrained_writes_whole_tensors_or_raises_on_all_ranks(tmp_path, family):
    """It raised AttributeError on rank 0, or wrote files that from_pretrained could not read."""
    reference = build(family, True, seed=1)
    model = sharded(family, build(family, True, seed=1))
    ids = torch.arange(3, 11).view(2, 4)
    model(input_ids=ids, **({"decoder_input_ids": ids} if family == "t5" else {}))  # the root's parameters are unsharded now
    model.save_pretrained(tmp_path / "whole", max_shard_size="3KB")
    opened = opened_by_transformers(family, tmp_path / "whole")
    assert type(opened) is type(reference)
    for name, param in reference.named_parameters():
        assert torch.equal(opened.get_parameter(name), param), name
    with pytest.raises(CheckpointError, match=r"(?s)save_pretrained on rank 0.*save_safetensors"):
        model.save_pretrained(tmp_path / "whole", max_shard_size="no size")
    with pytest.raises(CheckpointError, match="save_pretrained on rank 0"):
        model.save_pretrained(None)


def written(folder):
    """Each file's tensors, and the other files' content; without what only we add: digests."""
    tensors = {path.name: load_file(path) for path in folder.glob("*.safetensors")}
    texts = {path.name: json.loads(path.read_text()) for path in folder.glob("*.json")}
    texts.get("model.safetensors.index.json", {"metadata": {}})["metadata"].pop("fsdp2_crc32", None)
    assert {path.name for path in folder.iterdir()} == tensors.keys() | texts.keys()
    return tensors, texts


def assert_same_files(ours, theirs):
    (our_tensors, our_texts), (their_tensors, their_texts) = written(ours), written(theirs)
    assert our_texts == their_texts
    assert our_tensors.keys() == their_tensors.keys()
    for name, expected in their_tensors.items():
        assert our_tensors[name].keys() == expected.keys(), name
        assert all(torch.equal(our_tensors[name][key], expected[key]) for key in expected), name


@on_ranks(2)
@pytest.mark.parametrize("family", ["llama", pytest.param("gpt2", marks=pytest.mark.slow), pytest.param("t5", marks=pytest.mark.slow)])
def test_save_pretrained_streams_into_the_files_of_the_unsharded_model(tmp_path, family):
    """Rank 0 held the whole model. The weights are of two dtypes, and some are larger than a file is to be."""
    reference, model = build(family, True, seed=1), build(family, True, seed=1)
    for each in (reference, model):
        layers_of(family, each)[0].bfloat16()
    for size in ("1KB", "3KB", "1GB"):
        if dist.get_rank() == 0:
            reference.save_pretrained(tmp_path / "theirs" / size, max_shard_size=size)
    sharded(family, model)
    buffer_nbytes = 400
    bound = 2 * buffer_nbytes + 4096  # and what the ranks agree on
    assert sum(param.nbytes for param in reference.parameters()) > bound
    with patch.object(safetensors_save, "BUFFER_NBYTES", buffer_nbytes), PeakBytes() as memory:
        memory.touch([*model.parameters(), *model.buffers()])
        before = memory.peak
        for size in ("1KB", "3KB", "1GB"):
            model.save_pretrained(tmp_path / "ours" / size, is_main_process=dist.get_rank() == 0, max_shard_size=size)
    dist.barrier()
    assert memory.peak - before <= bound
    for size in ("1KB", "3KB", "1GB"):
        assert_same_files(tmp_path / "ours" / size, tmp_path / "theirs" / size)


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize("save_original_format", [True, False])
def test_weights_that_transformers_converts_get_its_names(tmp_path, save_original_format):
    """A mixture of experts is one tensor in the model, and one for each expert in the files."""
    config = transformers.MixtralConfig(
        vocab_size=37, hidden_size=12, intermediate_size=20, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1,
        num_local_experts=2, max_position_embeddings=16,
    )  # fmt: skip
    models = []
    for _ in range(2):
        torch.manual_seed(1)
        models.append(transformers.MixtralForCausalLM(config))
    reference, model = models
    sharded("llama", model)
    if dist.get_rank() == 0:
        reference.save_pretrained(tmp_path / "theirs", save_original_format=save_original_format)
    model.save_pretrained(tmp_path / "ours", save_original_format=save_original_format)
    dist.barrier()
    assert_same_files(tmp_path / "ours", tmp_path / "theirs")


@pytest.mark.slow
@on_ranks(2)
def test_a_model_from_a_folder_is_saved_as_the_unsharded_one_also_as_a_variant(tmp_path):
    """A variant is gathered; its tied weights were written twice."""
    on_rank_0(lambda: build("llama", True, seed=1).save_pretrained(tmp_path / "first"))
    reference, model = (transformers.LlamaForCausalLM.from_pretrained(tmp_path / "first") for _ in range(2))
    sharded("llama", model)
    for name, arguments in {"plain": {}, "variant": {"variant": "fp32"}}.items():
        if dist.get_rank() == 0:
            reference.save_pretrained(tmp_path / "theirs" / name, **arguments)
        model.save_pretrained(tmp_path / "ours" / name, **arguments)
        dist.barrier()
        assert_same_files(tmp_path / "ours" / name, tmp_path / "theirs" / name)
