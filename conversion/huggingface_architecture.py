"""Which Hugging Face architecture computes what a model of ours computes; light: no torch."""

from typing import Literal, cast

from contracts.errors import ConfigError
from conversion.huggingface_encoders import encoder_architecture, wrong_for_encoder
from training.model_config import ModelConfig, MoeConfig

Architecture = Literal[
    "gpt2",
    "gpt_neox",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "bert",
    "megatron-bert",
    "roberta",
    "t5",
]


def architecture_of(model: ModelConfig) -> Architecture:
    """Choose the Hugging Face architecture that computes what `model` computes.

    Raises:
        ConfigError: None does; names the settings that stand in the way.
    """
    is_llama = model.norm == "rmsnorm" and model.position == "rope" and model.is_gated
    is_neox = model.norm == "layernorm" and model.position == "rope" and not model.is_gated
    if not model.causal:
        architecture = cast(Architecture, encoder_architecture(model))
        wrong = wrong_for_encoder(model)
    elif is_llama:
        architecture = _with_experts(model, model.moe) if model.moe is not None else _llama_architecture(model)
        wrong = _wrong_for_llama(model)
    else:
        architecture = "gpt_neox" if is_neox else "gpt2"
        wrong = _wrong_for_neox(model) if is_neox else _wrong_for_gpt2(model)
    if wrong:
        raise ConfigError(
            f"no Hugging Face architecture computes this model: {'; '.join(wrong)}. GPT-2 (layernorm, learned, "
            "biases), GPT-NeoX (layernorm, rope, biases), Llama, Mistral, Qwen or Mixtral (rmsnorm, rope, gated, no "
            "linear_bias), and the families bert, roberta and t5 can be exported. Use to: native."
        )
    return architecture


def _llama_architecture(model: ModelConfig) -> Architecture:
    if model.qk_norm:
        return "qwen3"
    if model.qkv_bias:
        return "qwen2"
    return "mistral" if model.sliding_window is not None or model.family == "mistral" else "llama"


def _with_experts(model: ModelConfig, moe: MoeConfig) -> Architecture:
    if model.qk_norm:
        return "qwen3_moe"
    return "qwen2_moe" if moe.shared_ffn_hidden_size is not None or model.qkv_bias else "mixtral"


def _wrong_for_llama(model: ModelConfig) -> list[str]:
    wrong = _wrong_for_any(model)
    if model.parallel_residual:
        wrong.append("parallel_residual true")
    if model.rotary_percent != 1.0:
        wrong.append(f"rotary_percent {model.rotary_percent}")
    if model.qk_norm and model.qkv_bias:
        wrong.append("qk_norm with qkv_bias")
    if model.moe is None:
        return wrong
    moe = model.moe
    if moe.capacity_factor is not None:
        wrong.append(f"moe.capacity_factor {moe.capacity_factor}")
    if moe.z_loss_coef:
        wrong.append(f"moe.z_loss_coef {moe.z_loss_coef}")
    architecture = _with_experts(model, moe)
    if architecture == "qwen3_moe" and moe.shared_ffn_hidden_size is not None:
        wrong.append("qk_norm with moe.shared_ffn_hidden_size")
    if architecture == "qwen2_moe" and (moe.shared_ffn_hidden_size is None or not model.qkv_bias):
        wrong.append("experts with qkv_bias but without moe.shared_ffn_hidden_size, or the other way round")
    if architecture == "mixtral" and (not moe.normalize_top_k or moe.layer_interval > 1):
        wrong.append(f"moe.normalize_top_k {moe.normalize_top_k} with moe.layer_interval {moe.layer_interval}")
    return wrong


def _wrong_for_neox(model: ModelConfig) -> list[str]:
    wrong = _wrong_for_any(model) + _wrong_heads(model)
    if model.shared_norm:
        wrong.append("shared_norm true")
    return wrong + _wrong_additions(model, "GPT-NeoX")


def _wrong_for_gpt2(model: ModelConfig) -> list[str]:
    wrong = _wrong_for_any(model)
    if not (model.norm == "layernorm" and model.position == "learned" and not model.is_gated):
        wrong.append(f"norm {model.norm} with position {model.position} and activation {model.activation}")
    if model.parallel_residual:
        wrong.append("parallel_residual true with learned positions")
    return wrong + _wrong_heads(model) + _wrong_additions(model, "GPT-2")


def _wrong_for_any(model: ModelConfig) -> list[str]:
    wrong = []
    if model.norm_position != "pre":
        wrong.append(f"norm_position {model.norm_position}")
    if model.embedding_scale != 1.0:
        wrong.append(f"embedding_scale {model.embedding_scale}")
    if model.head != "linear":
        wrong.append(f"head {model.head}")
    if model.token_types or model.embedding_norm or model.position_offset:
        wrong.append("token_types, embedding_norm or position_offset")
    if not model.scales_scores or model.output_scale != 1.0:
        wrong.append(f"scales_scores {model.scales_scores} with output_scale {model.output_scale}")
    return wrong


def _wrong_heads(model: ModelConfig) -> list[str]:
    wrong = []
    if model.num_query_groups != model.num_attention_heads:
        wrong.append(f"num_query_groups {model.num_query_groups} below num_attention_heads {model.num_attention_heads}")
    if model.attention_size != model.hidden_size:
        wrong.append(
            f"head_dim {model.head_dim} x {model.num_attention_heads} heads is not hidden_size {model.hidden_size}"
        )
    return wrong


def _wrong_additions(model: ModelConfig, name: str) -> list[str]:
    wrong = []
    if not (model.linear_bias and model.qkv_bias):
        wrong.append(f"linear_bias {model.linear_bias} and qkv_bias {model.qkv_bias} ({name} has both)")
    if model.qk_norm:
        wrong.append("qk_norm true")
    if model.sliding_window is not None:
        wrong.append(f"sliding_window {model.sliding_window}")
    if model.moe is not None:
        wrong.append("moe")
    return wrong
