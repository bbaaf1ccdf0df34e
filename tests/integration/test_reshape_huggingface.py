"""Hugging Face folders in and out, checked by transformers and by logits recorded from it."""

import json
import re
import shutil

import pytest
import safetensors.torch
import torch
from conversion_cases import convert, published, random_model, write_random
from ranks import run_on_ranks
from whole_checkpoint import whole_tensors

from contracts.errors import ConfigError, InputError
from contracts.json_text import parse_json
from conversion.catalogue import equal_bits
from conversion.inspection import compare_checkpoints
from conversion.logits import logits_of
from conversion.reading import open_checkpoint
from training.step_folders import read_info

transformers = pytest.importorskip("transformers")

FAMILIES = {
    "gpt2": random_model("gpt2"),
    "gpt2-untied-erf": random_model("gpt2", tied_embeddings=False, activation="gelu"),
    "llama": random_model("llama", rotary_base=5e5),
    "llama-wide-heads": random_model("llama", head_dim=16, tied_embeddings=True),
    "llama-3.1": random_model("llama", rope_scaling={"rope_type": "llama3", "factor": 4.0}),
    "mistral": random_model("mistral", sliding_window=7),
    "qwen2": random_model("qwen2"),
    "qwen3": random_model("qwen3", head_dim=16),
    "neox": random_model("neox"),
    "mixtral": random_model("mixtral", moe={"num_experts": 4}),
    "qwen3-experts": random_model("qwen3_moe", moe={"num_experts": 4, "top_k": 2, "ffn_hidden_size": 24}),
}
ENCODERS = {
    "bert": random_model("bert"),
    "bert without pairs": random_model("bert", pair_head=False),
    "megatron-bert": random_model("bert", norm_position="pre", activation="gelu_tanh"),
    "roberta": random_model("roberta"),
    "t5": random_model("t5", head_dim=16, decoder_layers=1),
    "t5 v1.1": random_model("t5", activation="geglu_tanh", tied_embeddings=False),
}


def our_logits(folder, tokens):
    """In a process of its own, so that no process group is left behind here."""
    return run_on_ranks(1, _logits, folder, tokens)[0]


def _logits(folder, tokens):
    return logits_of(open_checkpoint(folder), tokens)


@pytest.mark.parametrize("name", FAMILIES)
def test_an_export_loads_in_transformers_with_our_logits(tmp_path, name):
    source = write_random(tmp_path / "source", FAMILIES[name])
    exported = convert(source, tmp_path / "exported", to="huggingface")
    tokens = torch.randint(0, 100, (2, 32), generator=torch.Generator().manual_seed(1))

    model, report = transformers.AutoModelForCausalLM.from_pretrained(exported.path, output_loading_info=True)
    with torch.no_grad():
        theirs = model.eval()(tokens).logits

    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert theirs.shape[-1] == 100
    torch.testing.assert_close(our_logits(source, tokens), theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ENCODERS)
def test_an_exported_encoder_loads_in_transformers_with_our_logits(tmp_path, name):
    source = write_random(tmp_path / "source", ENCODERS[name])
    exported = convert(source, tmp_path / "exported", to="huggingface")
    config = parse_json((exported.path / "config.json").read_text())
    kind = getattr(transformers, config["architectures"][0])

    _, report = kind.from_pretrained(exported.path, output_loading_info=True)
    tokens = torch.randint(2, 100, (2, 32), generator=torch.Generator().manual_seed(1))

    assert not report["missing_keys"] and not report["unexpected_keys"]
    theirs = logits_of(open_checkpoint(exported.path), tokens)
    torch.testing.assert_close(our_logits(source, tokens), theirs, rtol=0, atol=1e-5)


def test_a_folder_of_bert_as_it_was_first_published_is_read(tmp_path):
    exported = convert(
        write_random(tmp_path / "source", ENCODERS["bert"]), tmp_path / "exported", to="huggingface"
    ).path
    path = exported / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    old = {
        re.sub("weight$", "gamma", re.sub("bias$", "beta", n)) if "LayerNorm" in n else n: t for n, t in tensors.items()
    }
    old |= {
        "bert.embeddings.position_ids": torch.arange(32),
        "cls.predictions.decoder.weight": tensors["bert.embeddings.word_embeddings.weight"].clone(),
        "cls.predictions.decoder.bias": tensors["cls.predictions.bias"].clone(),
    }
    published = tmp_path / "published"
    published.mkdir()
    (published / "config.json").write_text((exported / "config.json").read_text())
    safetensors.torch.save_file(old, published / "model.safetensors")

    again = convert(convert(published, tmp_path / "native"), tmp_path / "again", to="huggingface").path

    found = safetensors.torch.load_file(again / "model.safetensors")
    assert found.keys() == tensors.keys() and all(equal_bits(found[key], tensors[key]) for key in found)


def test_a_tied_bias_that_differs_from_its_original_is_refused(tmp_path):
    exported = convert(
        write_random(tmp_path / "source", ENCODERS["roberta"]), tmp_path / "exported", to="huggingface"
    ).path
    path = exported / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    safetensors.torch.save_file({**tensors, "lm_head.decoder.bias": tensors["lm_head.bias"] + 1}, path)

    with pytest.raises(InputError, match=r"lm_head.decoder.bias differs from lm_head.bias"):
        open_checkpoint(exported)


@pytest.mark.parametrize("name", [*FAMILIES, *ENCODERS])
def test_huggingface_to_native_to_huggingface_gives_the_same_bits(tmp_path, name):
    model = {**FAMILIES, **ENCODERS}[name]
    first = convert(write_random(tmp_path / "source", model), tmp_path / "first", to="huggingface")
    native = convert(first, tmp_path / "native", tensor_parallel=2, data_parallel=2)

    second = convert(native, tmp_path / "second", to="huggingface")

    a, b = (safetensors.torch.load_file(item.path / "model.safetensors") for item in (first, second))
    assert a.keys() == b.keys() and all(equal_bits(a[key], b[key]) for key in a)
    assert (first.path / "config.json").read_text() == (second.path / "config.json").read_text()
    assert native.summary["step"] == 7 and native.summary["consumed_samples"] == 56


def test_several_files_with_an_index_are_written_and_read(tmp_path):
    source = write_random(tmp_path / "source", FAMILIES["llama"])

    exported = convert(source, tmp_path / "exported", to="huggingface", shard_bytes=20_000)

    index = json.loads((exported.path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == len(list(exported.path.glob("*.safetensors"))) > 3
    assert index["metadata"]["total_size"] == exported.summary["bytes"]
    transformers.AutoModelForCausalLM.from_pretrained(exported.path)
    found = compare_checkpoints(source, exported.path)
    assert not found["different"] and not found["only_in_b"]


@pytest.mark.parametrize(
    "name", ["gpt2", "llama_gqa", "llama_gqa_sharded", "qwen2", "pythia", "neox_serial", "mixtral"]
)
def test_a_published_model_gives_its_recorded_logits_at_a_cut_layout(tmp_path, name):
    folder = published(name)
    expected = safetensors.torch.load_file(folder / "expected.safetensors")

    native = convert(folder, tmp_path / "native", tensor_parallel=2, pipeline_parallel=2)

    logits = our_logits(native.path, expected["input_ids"])
    torch.testing.assert_close(logits, expected["logits"], rtol=0, atol=1e-5)


def test_a_published_bf16_model_keeps_its_bits_and_its_logits_up_to_bf16(tmp_path):
    folder = published("llama_gqa_bf16")
    expected = safetensors.torch.load_file(folder / "expected.safetensors")

    native = convert(folder, tmp_path / "native", tensor_parallel=2)
    back = convert(native, tmp_path / "back", to="huggingface")

    a, b = (safetensors.torch.load_file(path / "model.safetensors") for path in (folder, back.path))
    assert a.keys() == b.keys() and all(equal_bits(a[key], b[key]) for key in a)
    assert native.summary["dtype"] == "bfloat16"
    logits = our_logits(native.path, expected["input_ids"])
    torch.testing.assert_close(logits, expected["logits"], rtol=0, atol=0.05)


@pytest.mark.parametrize("name", ["gpt2", "llama_gqa", "bert", "t5_v1_0"])
def test_a_published_model_survives_the_round_trip_bit_by_bit(tmp_path, name):
    folder = published(name)

    back = convert(convert(folder, tmp_path / "native", pipeline_parallel=2), tmp_path / "back", to="huggingface")

    a, b = (safetensors.torch.load_file(path / "model.safetensors") for path in (folder, back.path))
    assert a.keys() == b.keys() and all(equal_bits(a[key], b[key]) for key in a)
    config = json.loads((back.path / "config.json").read_text())
    if name in ("gpt2", "llama_gqa"):
        assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)


def test_a_model_of_another_architecture_is_refused_in_one_line(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(published("gpt2"), source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}))

    with pytest.raises(InputError, match=r"model_type 'mamba' is not supported") as error:
        convert(source, tmp_path / "target")

    assert "\n" not in str(error.value) and not (tmp_path / "target").exists()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("hf_missing_shard", r"model-00003-of-00005\.safetensors .* is missing"),
        ("hf_truncated_shard", r"model-00002-of-00005\.safetensors: is cut off"),
        ("hf_config_wrong_kv_heads", r"k_proj\.weight has the shape \[32, 64\], and config\.json calls for \[16, 64\]"),
        ("hf_index_path_traversal", r"lm_head\.weight in '\.\./\.\./.*', which is no plain file name"),
    ],
)
def test_a_damaged_folder_is_refused_and_leaves_nothing_behind(tmp_path, name, reason):
    with pytest.raises(InputError, match=reason):
        convert(published(name, "nasty"), tmp_path / "target")

    assert not (tmp_path / "target").exists()


def rewritten(tmp_path, change):
    """A copy of the published GPT-2 with other tensors."""
    tensors = safetensors.torch.load_file(published("gpt2") / "model.safetensors")
    change(tensors)
    folder = tmp_path / "changed"
    folder.mkdir()
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text((published("gpt2") / "config.json").read_text())
    return folder


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: t.pop("transformer.h.2.ln_1.bias"), r"has no tensor transformer\.h\.2\.ln_1\.bias"),
        (lambda t: t.update(extra=torch.zeros(2)), "tensor extra has no place"),
        (lambda t: t.update({"lm_head.weight": torch.zeros(125, 64)}), "lm_head.weight differs from"),
        (lambda t: t.update({"transformer.ln_f.bias": torch.zeros(64, dtype=torch.int32)}), "ln_f.bias is torch.int32"),
    ],
)
def test_missing_unexpected_and_contradicting_tensors_are_refused(tmp_path, change, reason):
    with pytest.raises(InputError, match=reason):
        convert(rewritten(tmp_path, change), tmp_path / "target")

    assert not (tmp_path / "target").exists()


def test_tied_copies_and_old_masks_are_accepted(tmp_path):
    def change(tensors):
        tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
        tensors["transformer.h.0.attn.bias"] = torch.ones(1, 1, 32, 32)

    artifact = convert(rewritten(tmp_path, change), tmp_path / "target")

    assert any("transformer.h.0.attn.bias" in note for note in artifact.summary["notes"])


def test_weights_in_pickles_are_not_opened(tmp_path):
    (tmp_path / "config.json").write_text((published("gpt2") / "config.json").read_text())
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02")

    with pytest.raises(InputError, match="safe_serialization=True"):
        convert(tmp_path, tmp_path / "target")


def test_the_tokenizer_travels_and_transformers_loads_it(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    source = write_random(tmp_path / "run", random_model("gpt2", vocab_size=4, vocab_multiple=4))
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"a": 0, "b": 1, "<unk>": 2, "<|endoftext|>": 3}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    (tmp_path / "run" / "tokenizer").mkdir()
    tokenizer.save(str(tmp_path / "run" / "tokenizer" / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (tmp_path / "run" / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(config))

    reshaped = convert(source, tmp_path / "reshaped", pipeline_parallel=2)
    exported = convert(reshaped, tmp_path / "exported", to="huggingface")
    back = convert(exported, tmp_path / "back")

    loaded = transformers.AutoTokenizer.from_pretrained(exported.path)
    assert loaded("b a")["input_ids"] == [1, 0] and loaded.eos_token == "<|endoftext|>"
    assert transformers.AutoConfig.from_pretrained(exported.path).eos_token_id == 3
    assert (back.path / "tokenizer" / "tokenizer.json").is_file()
    assert (reshaped.path / "tokenizer" / "tokenizer.json").is_file()


def _compared(source, root):
    return [
        convert(source, root / "hf", to="huggingface", logits=True).summary["logits_max_difference"],
        convert(source, root / "native", tensor_parallel=2, logits=True).summary["logits_max_difference"],
    ]


def test_logits_are_compared_when_asked(tmp_path):
    source = write_random(tmp_path / "source", random_model("llama"))

    foreign, own = run_on_ranks(1, _compared, source, tmp_path)[0]

    assert 0 <= foreign < 1e-5 and own == 0


def test_without_transformers_a_comparison_of_logits_is_refused_before_any_work(tmp_path, monkeypatch):
    source = write_random(tmp_path / "source", random_model("llama"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(ConfigError, match=r"Install shardline\[dev\], or leave logits out"):
        convert(source, tmp_path / "target", to="huggingface", logits=True)

    assert not (tmp_path / "target").exists()


def test_an_export_of_a_model_that_no_architecture_computes_is_refused(tmp_path):
    source = write_random(tmp_path / "source", random_model("gpt2", embedding_scale=2.0))

    with pytest.raises(ConfigError, match="no Hugging Face architecture computes this model"):
        convert(source, tmp_path / "target", to="huggingface")


def test_padding_rows_and_the_optimizer_are_named_as_dropped(tmp_path):
    source = write_random(tmp_path / "source", random_model("gpt2"))

    artifact = convert(source, tmp_path / "target", to="huggingface", dtype="bf16")

    assert [line.split(" (")[0] for line in artifact.summary["dropped"]] == [
        "optimizer state",
        "4 padding rows of the vocabulary",
    ]
    native = convert(artifact, tmp_path / "back").path / "step-00000007"
    before, after = whole_tensors(source), whole_tensors(native)
    assert all(equal_bits(after[n][:100], before[n][:100].bfloat16()) for n in read_info(native).parameters)
