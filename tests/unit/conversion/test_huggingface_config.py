"""config.json against ModelConfig."""

import pytest
from conversion_cases import random_model

from contracts.errors import ConfigError, InputError
from conversion.huggingface_architecture import architecture_of
from conversion.huggingface_config import to_huggingface
from conversion.huggingface_reading import from_huggingface

GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 64, "vocab_size": 100}
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
    "vocab_size": 100,
}
QWEN = {**LLAMA, "model_type": "qwen2"}


@pytest.mark.parametrize(
    ("family", "changes", "architecture"),
    [
        ("gpt2", {}, "gpt2"),
        ("gpt2", {"tied_embeddings": False, "activation": "gelu"}, "gpt2"),
        ("llama", {"rotary_base": 500000.0, "head_dim": 16}, "llama"),
        ("llama", {"activation": "geglu_tanh"}, "llama"),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, "llama"),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2.0}}, "llama"),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.5}}, "llama"),
        ("mistral", {}, "mistral"),
        ("mistral", {"sliding_window": 16}, "mistral"),
        ("qwen2", {"tied_embeddings": True}, "qwen2"),
        ("qwen2", {"sliding_window": 16}, "qwen2"),
        ("qwen3", {"head_dim": 16}, "qwen3"),
        ("neox", {"rotary_percent": 0.5}, "gpt_neox"),
        ("neox", {"parallel_residual": False, "tied_embeddings": True, "activation": "relu"}, "gpt_neox"),
        ("mixtral", {"moe": {"num_experts": 4}}, "mixtral"),
        (
            "qwen2",
            {"moe": {"shared_ffn_hidden_size": 48, "ffn_hidden_size": 24, "normalize_top_k": False}},
            "qwen2_moe",
        ),
        ("qwen3_moe", {"moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 24, "layer_interval": 2}}, "qwen3_moe"),
        ("bert", {"activation": "gelu_tanh"}, "bert"),
        ("bert", {"norm_position": "pre", "tied_embeddings": False}, "megatron-bert"),
        ("roberta", {"norm_eps": 1e-6}, "roberta"),
        ("t5", {"head_dim": 16, "decoder_layers": 3}, "t5"),
        ("t5", {"activation": "geglu_tanh", "tied_embeddings": False, "relative_buckets": 8}, "t5"),
    ],
)
def test_a_model_survives_config_json_and_back(family, changes, architecture):
    model = random_model(family, **changes)
    config = to_huggingface(model, dtype="float32", token_ids={"eos_token_id": 3})

    back = from_huggingface(config, "config.json")

    ignored = {"vocab_multiple"}
    assert config["model_type"] == architecture == architecture_of(model)
    assert config["eos_token_id"] == 3
    assert back.model_dump(exclude=ignored) == model.model_dump(exclude=ignored)


def test_both_forms_of_rope_settings_are_written_and_either_is_read():
    written = to_huggingface(random_model("llama", rotary_base=5e5), dtype="float32", token_ids={})
    old = {key: value for key, value in written.items() if key != "rope_parameters"}
    new = {key: value for key, value in written.items() if key not in ("rope_theta", "rope_scaling")}

    assert from_huggingface(old, "old").rotary_base == 5e5
    assert from_huggingface(new, "new").rotary_base == 5e5


@pytest.mark.parametrize("name", ["gelu_new", "gelu_pytorch_tanh", "gelu_fast"])
def test_every_name_of_the_tanh_gelu_is_one_activation(name):
    assert from_huggingface({**GPT2, "activation_function": name}, "x").activation == "gelu_tanh"


@pytest.mark.parametrize(
    ("config", "setting", "value"),
    [
        ({"model_type": "bert", "is_decoder": True}, "is_decoder", "True"),
        ({"model_type": "bert", "position_embedding_type": "relative_key"}, "position_embedding_type", "relative_key"),
        ({"model_type": "t5", "feed_forward_proj": "gated-relu"}, "feed_forward_proj", "gated-relu"),
        ({"model_type": "gemma"}, "model_type", "gemma"),
        ({"model_type": "gpt_neox", "attention_bias": False}, "attention_bias", "False"),
        ({**GPT2, "activation_function": "quick_gelu"}, "activation_function", "quick_gelu"),
        ({**GPT2, "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx", "True"),
        ({**GPT2, "n_embd": "wide"}, "n_embd", "wide"),
        ({**GPT2, "n_head": 5}, "num_attention_heads", "5"),
        ({**LLAMA, "attention_bias": True}, "attention_bias", "True"),
        ({**LLAMA, "hidden_act": "relu"}, "hidden_act", "relu"),
        ({**LLAMA, "rope_scaling": {"rope_type": "dynamic", "factor": 8.0}}, "rope_type", "dynamic"),
        ({**LLAMA, "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "mscale": 0.7}}, "mscale", "0.7"),
        ({**LLAMA, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary", "1"),
        ({**QWEN, "use_sliding_window": True, "sliding_window": 16}, "sliding_window", "16"),
        ({**QWEN, "model_type": "qwen3_moe", "mlp_only_layers": [1]}, "mlp_only_layers", "[1]"),
        ({**LLAMA, "model_type": "mixtral", "router_jitter_noise": 0.1}, "router_jitter_noise", "0.1"),
        ({**LLAMA, "num_key_value_heads": 3}, "num_query_groups", "3"),
    ],
)
def test_a_config_of_another_function_is_refused_by_the_setting_and_its_value(config, setting, value):
    with pytest.raises(InputError) as error:
        from_huggingface(config, "folder/config.json")

    assert str(error.value).startswith("folder/config.json")
    assert setting in str(error.value) and value in str(error.value)
    assert "\n" not in str(error.value)


def test_a_model_without_a_hugging_face_architecture_is_refused_by_its_settings():
    model = random_model("gpt2", embedding_scale=2.0, num_query_groups=2)

    with pytest.raises(ConfigError, match=r"embedding_scale 2.0.*num_query_groups 2.*to: native"):
        architecture_of(model)
