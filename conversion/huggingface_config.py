"""From `ModelConfig` to the `config.json` of Hugging Face; `huggingface_reading` goes back. Light: no torch."""

from collections.abc import Mapping
from typing import Any

from conversion.huggingface_architecture import Architecture, architecture_of
from conversion.huggingface_encoders import ENCODERS, encoder_class, encoder_fields, implied_token_ids
from training.model_config import ModelConfig

_CLASS = {
    "gpt2": "GPT2LMHeadModel",
    "gpt_neox": "GPTNeoXForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}


def to_huggingface(model: ModelConfig, *, dtype: str, token_ids: Mapping[str, Any]) -> dict[str, Any]:
    """Derive `config.json`.

    Args:
        dtype: Of the weights, as torch names it.
        token_ids: bos_token_id, eos_token_id and pad_token_id, where known.
    """
    architecture = architecture_of(model)
    common = {
        "architectures": [_CLASS.get(architecture) or encoder_class(model, architecture)],
        "model_type": architecture,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tied_embeddings,
        "initializer_range": model.init_std,
        # transformers 5 reads dtype, older releases torch_dtype.
        "dtype": dtype,
        "torch_dtype": dtype,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": None,
        **token_ids,
        **implied_token_ids(model, token_ids),
    }
    if architecture in ENCODERS:
        return {**common, "use_cache": architecture == "t5", **encoder_fields(model, architecture)}
    if architecture == "gpt2":
        return {**common, **_gpt2_fields(model)}
    if architecture == "gpt_neox":
        return {**common, **_neox_fields(model)}
    return {**common, **_llama_fields(model, architecture)}


def _gpt2_fields(model: ModelConfig) -> dict[str, Any]:
    return {
        "n_layer": model.num_layers,
        "n_embd": model.hidden_size,
        "n_head": model.num_attention_heads,
        "n_inner": model.ffn_hidden_size,
        "n_positions": model.max_position_embeddings,
        "n_ctx": model.max_position_embeddings,
        "layer_norm_epsilon": model.norm_eps,
        "activation_function": _plain_activation(model),
        "attn_pdrop": 0.0,
        "embd_pdrop": model.dropout,
        "resid_pdrop": model.dropout,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
    }


def _plain_activation(model: ModelConfig) -> str:
    return "gelu_new" if model.activation == "gelu_tanh" else model.activation


def _neox_fields(model: ModelConfig) -> dict[str, Any]:
    return {
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "intermediate_size": model.ffn_hidden_size,
        "max_position_embeddings": model.max_position_embeddings,
        "layer_norm_eps": model.norm_eps,
        "hidden_act": _plain_activation(model),
        "use_parallel_residual": model.parallel_residual,
        "attention_bias": True,
        "attention_dropout": 0.0,
        "hidden_dropout": model.dropout,
        # transformers 5 reads rope_parameters, older releases rotary_pct and rotary_emb_base.
        "rope_parameters": {**_rope_fields(model), "partial_rotary_factor": model.rotary_percent},
        "rotary_pct": model.rotary_percent,
        "rotary_emb_base": model.rotary_base,
        "rope_scaling": None if model.rope_scaling is None else _rope_fields(model),
    }


def _llama_fields(model: ModelConfig, architecture: Architecture) -> dict[str, Any]:
    gates = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_pytorch_tanh"}
    fields = {
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups,
        "head_dim": model.head_dim,
        "intermediate_size": model.ffn_hidden_size,
        "max_position_embeddings": model.max_position_embeddings,
        "rms_norm_eps": model.norm_eps,
        "hidden_act": gates[model.activation],
        "attention_dropout": 0.0,
        # transformers 5 reads rope_parameters, older releases rope_theta and rope_scaling.
        "rope_parameters": _rope_fields(model),
        "rope_theta": model.rotary_base,
        "rope_scaling": None if model.rope_scaling is None else _rope_fields(model),
    }
    if architecture == "llama":
        return {**fields, "attention_bias": False, "mlp_bias": False}
    if architecture == "mistral":
        return {**fields, "sliding_window": model.sliding_window}
    if architecture == "mixtral":
        return {**fields, **_expert_fields(model, architecture), "sliding_window": model.sliding_window}
    window = {
        "use_sliding_window": model.sliding_window is not None,
        "sliding_window": model.sliding_window,
        "max_window_layers": model.num_layers if model.sliding_window is None else 0,
    }
    biases = {} if architecture == "qwen2" else {"attention_bias": False} if model.qk_norm else {"qkv_bias": True}
    return {**fields, **window, **biases, **_expert_fields(model, architecture)}


def _rope_fields(model: ModelConfig) -> dict[str, Any]:
    scaling = model.rope_scaling
    if scaling is None:
        return {"rope_theta": model.rotary_base, "rope_type": "default"}
    names = {
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate"),
    }[scaling.rope_type]
    fields = {name: getattr(scaling, name) for name in names}
    if scaling.rope_type == "yarn" and scaling.attention_factor is not None:
        fields["attention_factor"] = scaling.attention_factor
    return {"rope_theta": model.rotary_base, "rope_type": scaling.rope_type, **fields}


def _expert_fields(model: ModelConfig, architecture: Architecture) -> dict[str, Any]:
    if model.moe is None:
        return {}
    moe = model.moe
    common = {"num_experts_per_tok": moe.top_k, "router_aux_loss_coef": moe.aux_loss_coef}
    if architecture == "mixtral":
        return {**common, "num_local_experts": moe.num_experts, "intermediate_size": model.expert_ffn_hidden_size}
    shared = {"shared_expert_intermediate_size": moe.shared_ffn_hidden_size} if architecture == "qwen2_moe" else {}
    return {
        **common,
        **shared,
        "num_experts": moe.num_experts,
        "moe_intermediate_size": model.expert_ffn_hidden_size,
        "norm_topk_prob": moe.normalize_top_k,
        "decoder_sparse_step": moe.layer_interval,
        "mlp_only_layers": [],
    }
