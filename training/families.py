"""What each family of models is: defaults of the settings of one set of layers. No torch."""

from collections.abc import Mapping
from typing import Any, Literal

Family = Literal["gpt2", "llama", "mistral", "qwen2", "qwen3", "neox", "mixtral", "qwen3_moe", "bert", "roberta", "t5"]
Activation = Literal["gelu", "gelu_tanh", "relu", "silu", "swiglu", "geglu", "geglu_tanh"]
GATED = ("swiglu", "geglu", "geglu_tanh")

_LLAMA: dict[str, Any] = {
    "norm": "rmsnorm",
    "activation": "swiglu",
    "position": "rope",
    "tied_embeddings": False,
    "linear_bias": False,
    "qkv_bias": False,
}
_BERT: dict[str, Any] = {
    "norm": "layernorm",
    "norm_position": "post",
    "norm_eps": 1e-12,
    "activation": "gelu",
    "position": "learned",
    "tied_embeddings": True,
    "linear_bias": True,
    "qkv_bias": True,
    "causal": False,
    "head": "masked",
}
_QWEN3 = {**_LLAMA, "qk_norm": True, "norm_eps": 1e-6, "rotary_base": 1e6}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {
        "norm": "layernorm",
        "activation": "gelu_tanh",
        "position": "learned",
        "tied_embeddings": True,
        "linear_bias": True,
        "qkv_bias": True,
    },
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": {**_LLAMA, "qkv_bias": True, "norm_eps": 1e-6, "rotary_base": 1e6},
    "qwen3": _QWEN3,
    "neox": {
        "norm": "layernorm",
        "activation": "gelu",
        "position": "rope",
        "rotary_percent": 0.25,
        "parallel_residual": True,
        "tied_embeddings": False,
        "linear_bias": True,
        "qkv_bias": True,
    },
    "mixtral": {**_LLAMA, "rotary_base": 1e6, "moe": {"num_experts": 8, "top_k": 2, "aux_loss_coef": 0.02}},
    "qwen3_moe": {**_QWEN3, "moe": {"num_experts": 128, "top_k": 8, "aux_loss_coef": 0.001}},
    "bert": {**_BERT, "token_types": 2, "pair_head": True},
    "roberta": {**_BERT, "norm_eps": 1e-5, "token_types": 1, "position_offset": 2},
    "t5": {
        "norm": "rmsnorm",
        "norm_eps": 1e-6,
        "activation": "relu",
        "position": "relative",
        "tied_embeddings": True,
        "linear_bias": False,
        "qkv_bias": False,
        "causal": False,
        "scales_scores": False,
        "init": "fan_in",
    },
}


def with_family_defaults(data: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in what a family sets and what follows from sizes, where nothing is given.

    Args:
        data: Settings of a model as they were given, of a family in FAMILIES.
    """
    family = data.get("family", "gpt2")
    filled = {**FAMILIES[family], **data}
    if isinstance(data.get("moe"), dict):
        filled["moe"] = {**(FAMILIES[family].get("moe") or {}), **data["moe"]}
    hidden, heads = filled.get("hidden_size", 256), filled.get("num_attention_heads", 4)
    filled.setdefault("num_query_groups", heads)
    if isinstance(hidden, int) and isinstance(heads, int) and hidden > 0 and heads > 0:
        filled.setdefault("head_dim", max(1, hidden // heads))
        gated = filled["activation"] in GATED
        filled.setdefault("ffn_hidden_size", -(-8 * hidden // 192) * 64 if gated else 4 * hidden)
    if family in ("bert", "roberta"):
        filled.setdefault("embedding_norm", filled["norm_position"] == "post")
    if family == "t5":
        filled.setdefault("decoder_layers", filled.get("num_layers", 4))
        if filled["tied_embeddings"] is True and isinstance(hidden, int) and hidden > 0:
            filled.setdefault("output_scale", hidden**-0.5)
    return filled
