"""BERT, Megatron-BERT, RoBERTa and T5 in `config.json`: which of them a model is, and its fields; no torch."""

from collections.abc import Mapping
from typing import Any

from training.model_config import ModelConfig

ENCODERS = ("bert", "megatron-bert", "roberta", "t5")
_GATES = {"geglu_tanh": "gated-gelu", "swiglu": "gated-silu"}


def encoder_architecture(model: ModelConfig) -> str:
    """The architecture that comes nearest to a model that is not causal."""
    if model.is_encoder_decoder:
        return "t5"
    if model.norm_position == "pre":
        return "megatron-bert"
    return "roberta" if model.position_offset else "bert"


def encoder_class(model: ModelConfig, architecture: str) -> str:
    """Name of the class in transformers."""
    if architecture in ("roberta", "t5"):
        return {"roberta": "RobertaForMaskedLM", "t5": "T5ForConditionalGeneration"}[architecture]
    prefix = "MegatronBert" if architecture == "megatron-bert" else "Bert"
    return f"{prefix}For{'PreTraining' if model.pair_head else 'MaskedLM'}"


def wrong_for_encoder(model: ModelConfig) -> list[str]:
    """Settings under which the nearest architecture computes something else."""
    architecture = encoder_architecture(model)
    return _wrong_for_t5(model) if architecture == "t5" else _wrong_for_bert(model, architecture)


def _wrong_for_bert(model: ModelConfig, architecture: str) -> list[str]:
    expected: dict[str, Any] = {
        "norm": "layernorm",
        "position": "learned",
        "linear_bias": True,
        "qkv_bias": True,
        "qk_norm": False,
        "parallel_residual": False,
        "num_query_groups": model.num_attention_heads,
        "attention_size": model.hidden_size,
        "scales_scores": True,
        "embedding_scale": 1.0,
        "output_scale": 1.0,
        "head": "masked",
        "pair_head": model.pair_head and architecture != "roberta",
        "embedding_norm": architecture != "megatron-bert",
        "position_offset": 2 if architecture == "roberta" else 0,
        "moe": None,
    }
    wrong = _unlike(model, expected)
    if not model.token_types:
        wrong.append("token_types 0")
    return [*wrong, f"activation {model.activation}"] if model.is_gated else wrong


def _wrong_for_t5(model: ModelConfig) -> list[str]:
    expected: dict[str, Any] = {
        "norm": "rmsnorm",
        "linear_bias": False,
        "qkv_bias": False,
        "qk_norm": False,
        "num_query_groups": model.num_attention_heads,
        "scales_scores": False,
        "embedding_scale": 1.0,
        "output_scale": model.hidden_size**-0.5 if model.tied_embeddings else 1.0,
    }
    wrong = _unlike(model, expected)
    allowed = (*_GATES, "relu", "gelu", "gelu_tanh", "silu")
    return wrong if model.activation in allowed else [*wrong, f"activation {model.activation}"]


def _unlike(model: ModelConfig, expected: dict[str, Any]) -> list[str]:
    return [f"{name} {getattr(model, name)}" for name, value in expected.items() if getattr(model, name) != value]


def encoder_fields(model: ModelConfig, architecture: str) -> dict[str, Any]:
    """Fields of `config.json`."""
    return _t5_fields(model) if architecture == "t5" else _bert_fields(model)


def implied_token_ids(model: ModelConfig, token_ids: Mapping[str, Any]) -> dict[str, Any]:
    """Ids of tokens that follow from the model: RoBERTa's padding, which sets its first position, and T5's start."""
    if model.is_encoder_decoder:
        return {"decoder_start_token_id": token_ids.get("eos_token_id") or 0}
    return {"pad_token_id": model.position_offset - 1} if model.position_offset else {}


def _plain(activation: str) -> str:
    return "gelu_new" if activation == "gelu_tanh" else activation


def _bert_fields(model: ModelConfig) -> dict[str, Any]:
    return {
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "intermediate_size": model.ffn_hidden_size,
        "max_position_embeddings": model.max_position_embeddings + model.position_offset,
        "type_vocab_size": model.token_types,
        "layer_norm_eps": model.norm_eps,
        "hidden_act": _plain(model.activation),
        "hidden_dropout_prob": model.dropout,
        "attention_probs_dropout_prob": 0.0,
        "position_embedding_type": "absolute",
        "is_decoder": False,
    }


def _t5_fields(model: ModelConfig) -> dict[str, Any]:
    return {
        "num_layers": model.num_layers,
        "num_decoder_layers": model.decoder_layers,
        "d_model": model.hidden_size,
        "d_kv": model.head_dim,
        "d_ff": model.ffn_hidden_size,
        "num_heads": model.num_attention_heads,
        "n_positions": model.max_position_embeddings,
        "relative_attention_num_buckets": model.relative_buckets,
        "relative_attention_max_distance": model.relative_distance,
        "layer_norm_epsilon": model.norm_eps,
        "feed_forward_proj": _GATES.get(model.activation, _plain(model.activation)),
        "dropout_rate": model.dropout,
        "is_encoder_decoder": True,
    }


def read_encoder(reader: Any, kind: str) -> dict[str, Any]:
    """Read fields of a model from a `config.json`.

    Args:
        reader: Of `huggingface_reading`.
    """
    return _read_t5(reader) if kind == "t5" else _read_bert(reader, kind)


def _read_bert(reader: Any, kind: str) -> dict[str, Any]:
    reader.require("position_embedding_type", ("absolute",), "absolute")
    reader.require("is_decoder", (False,), False)
    activation = reader.require("hidden_act", ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu"), "gelu")
    offset = reader.number("pad_token_id", 1) + 1 if kind == "roberta" else 0
    return {
        "family": "roberta" if kind == "roberta" else "bert",
        "num_layers": reader.number("num_hidden_layers", 12),
        "hidden_size": reader.number("hidden_size", 768),
        "num_attention_heads": reader.number("num_attention_heads", 12),
        "ffn_hidden_size": reader.number("intermediate_size", 3072),
        "max_position_embeddings": reader.number("max_position_embeddings", 512) - offset,
        "position_offset": offset,
        "token_types": reader.number("type_vocab_size", 2),
        "norm_eps": reader.number("layer_norm_eps", 1e-12),
        "norm_position": "pre" if kind == "megatron-bert" else "post",
        "activation": "gelu_tanh" if activation in ("gelu_new", "gelu_pytorch_tanh") else activation,
        "tied_embeddings": reader.get("tie_word_embeddings", True),
        "dropout": reader.number("hidden_dropout_prob", 0.1),
        "init_std": reader.number("initializer_range", 0.02),
    }


def _read_t5(reader: Any) -> dict[str, Any]:
    names = {"relu": "relu", "gelu": "gelu", "gelu_new": "gelu_tanh", "silu": "silu"}
    names |= {foreign: ours for ours, foreign in _GATES.items()}
    activation = reader.require("feed_forward_proj", tuple(names), "relu")
    layers = reader.number("num_layers", 6)
    return {
        "family": "t5",
        "num_layers": layers,
        "decoder_layers": reader.number("num_decoder_layers", layers),
        "hidden_size": reader.number("d_model", 512),
        "head_dim": reader.number("d_kv", 64),
        "ffn_hidden_size": reader.number("d_ff", 2048),
        "num_attention_heads": reader.number("num_heads", 8),
        "max_position_embeddings": reader.number("n_positions", 512),
        "relative_buckets": reader.number("relative_attention_num_buckets", 32),
        "relative_distance": reader.number("relative_attention_max_distance", 128),
        "norm_eps": reader.number("layer_norm_epsilon", 1e-6),
        "activation": names[activation],
        "tied_embeddings": reader.get("tie_word_embeddings", True),
        "dropout": reader.number("dropout_rate", 0.1),
    }
