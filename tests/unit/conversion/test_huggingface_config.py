"""config.json against ModelConfig."""

import pytest
from conversion_cases import random_model

from contracts.errors import ConfigError, InputError
from conversion.huggingface_config import architecture_of, from_huggingface, to_huggingface

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


@pytest.mark.parametrize(
    ("family", "changes", "architecture"),
    [
        ("gpt2", {}, "gpt2"),
        ("gpt2", {"tied_embeddings": False, "activation": "gelu"}, "gpt2"),
        ("llama", {"rotary_base": 500000.0, "head_dim": 16}, "llama"),
        ("llama", {"qkv_bias": True, "tied_embeddings": True}, "qwen2"),
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
        ({"model_type": "mixtral"}, "model_type", "experts"),
        ({"model_type": "bert"}, "model_type", "bert"),
        ({"model_type": "gpt_neox"}, "model_type", "parallel"),
        ({**GPT2, "activation_function": "relu"}, "activation_function", "relu"),
        ({**GPT2, "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx", "True"),
        ({**GPT2, "n_embd": "wide"}, "n_embd", "wide"),
        ({**GPT2, "n_head": 5}, "num_attention_heads", "5"),
        ({**LLAMA, "attention_bias": True}, "attention_bias", "True"),
        ({**LLAMA, "hidden_act": "gelu"}, "hidden_act", "gelu"),
        ({**LLAMA, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_type", "llama3"),
        ({**LLAMA, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary", "1"),
        ({**LLAMA, "model_type": "mistral", "sliding_window": 16}, "sliding_window", "16"),
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
    model = random_model("gpt2", position="rope", num_query_groups=2)

    with pytest.raises(ConfigError, match=r"position rope.*num_query_groups 2.*to: native"):
        architecture_of(model)
