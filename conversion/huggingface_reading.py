"""From the `config.json` of Hugging Face to `ModelConfig`; light: no torch.

A setting under which the foreign model computes another function than ours is refused by name;
nothing is guessed.
"""

from collections.abc import Mapping
from typing import Any, get_args

from pydantic import ValidationError

from contracts.errors import InputError
from conversion.huggingface_architecture import Architecture
from conversion.huggingface_encoders import ENCODERS, read_encoder
from training.model_config import ModelConfig, RopeScaling

READABLE: tuple[str, ...] = get_args(Architecture)

_GELU_TANH = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")


def from_huggingface(config: Mapping[str, Any], source: str) -> ModelConfig:
    """Read `config.json`.

    Args:
        source: The file, for messages.

    Raises:
        InputError: The architecture or one of its settings is not supported; names both.
    """
    kind = config.get("model_type")
    if kind not in READABLE:
        raise InputError(f"{source}: model_type {kind!r} is not supported. Readable are {', '.join(READABLE)}.")
    reader = _Reader(config, source)
    if kind in ENCODERS:
        fields = read_encoder(reader, str(kind))
    elif kind == "gpt2":
        fields = _read_gpt2(reader)
    else:
        fields = _read_neox(reader) if kind == "gpt_neox" else _read_llama(reader, str(kind))
    fields["vocab_size"] = reader.number("vocab_size")
    try:
        return ModelConfig.model_validate(fields)
    except ValidationError as error:
        reasons = "; ".join(str(item.get("ctx", {}).get("error", item["msg"])) for item in error.errors())
        raise InputError(f"{source}: {reasons}") from error


class _Reader:
    def __init__(self, config: Mapping[str, Any], source: str) -> None:
        self.config, self.source = config, source

    def get(self, name: str, default: Any) -> Any:
        value = self.config.get(name)
        return default if value is None else value

    def number(self, name: str, default: float | None = None) -> Any:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InputError(f"{self.source}: {name} is {value!r}, and a number is needed.")
        return value

    def require(self, name: str, expected: tuple[Any, ...], default: Any) -> Any:
        """Return a setting that must have one of the `expected` values.

        Raises:
            InputError: It has another one; the model would compute something else.
        """
        value = self.get(name, default)
        if value not in expected:
            wanted = " or ".join(str(item) for item in expected)
            raise InputError(f"{self.source}: {name} is {value!r}, and only {wanted} is supported.")
        return value


def _read_gpt2(reader: _Reader) -> dict[str, Any]:
    reader.require("scale_attn_weights", (True,), True)
    reader.require("scale_attn_by_inverse_layer_idx", (False,), False)
    reader.require("add_cross_attention", (False,), False)
    activation = reader.require("activation_function", ("gelu", "relu", "silu", *_GELU_TANH), "gelu_new")
    hidden, heads = reader.number("n_embd", 768), reader.number("n_head", 12)
    return {
        "family": "gpt2",
        "num_layers": reader.number("n_layer", 12),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "ffn_hidden_size": reader.number("n_inner", 4 * hidden),
        "max_position_embeddings": reader.number("n_positions", 1024),
        "norm_eps": reader.number("layer_norm_epsilon", 1e-5),
        "activation": "gelu_tanh" if activation in _GELU_TANH else activation,
        "tied_embeddings": reader.get("tie_word_embeddings", True),
        "dropout": reader.number("resid_pdrop", 0.1),
        "init_std": reader.number("initializer_range", 0.02),
    }


def _read_neox(reader: _Reader) -> dict[str, Any]:
    reader.require("attention_bias", (True,), True)
    activation = reader.require("hidden_act", ("gelu", "relu", "silu", *_GELU_TANH), "gelu")
    hidden = reader.number("hidden_size", 6144)
    rope = _rope(reader)
    return {
        "family": "neox",
        "num_layers": reader.number("num_hidden_layers", 44),
        "hidden_size": hidden,
        "num_attention_heads": reader.number("num_attention_heads", 64),
        "ffn_hidden_size": reader.number("intermediate_size", 24576),
        "max_position_embeddings": reader.number("max_position_embeddings", 2048),
        "norm_eps": reader.number("layer_norm_eps", 1e-5),
        "activation": "gelu_tanh" if activation in _GELU_TANH else activation,
        "parallel_residual": reader.get("use_parallel_residual", True),
        "tied_embeddings": reader.get("tie_word_embeddings", False),
        "rotary_base": _Reader(rope, reader.source).number("rope_theta", reader.number("rotary_emb_base", 10000.0)),
        "rotary_percent": rope.get("partial_rotary_factor", reader.number("rotary_pct", 0.25)),
        "rope_scaling": _rope_scaling(rope, reader),
        "dropout": reader.number("hidden_dropout", 0.0),
        "init_std": reader.number("initializer_range", 0.02),
    }


def _read_llama(reader: _Reader, kind: str) -> dict[str, Any]:
    activation = reader.require("hidden_act", ("silu", "swish", "gelu", *_GELU_TANH), "silu")
    if kind in ("llama", "qwen3", "qwen3_moe"):
        reader.require("attention_bias", (False,), False)
    if kind == "llama":
        reader.require("mlp_bias", (False,), False)
    if kind == "qwen2_moe":
        reader.require("qkv_bias", (True,), True)
    rope = _rope(reader)
    if rope.get("partial_rotary_factor", 1.0) != 1.0 or reader.get("partial_rotary_factor", 1.0) != 1.0:
        raise InputError(f"{reader.source}: partial_rotary_factor is not 1; {kind} models turn whole heads.")
    hidden, heads = reader.number("hidden_size"), reader.number("num_attention_heads")
    fields = {
        "family": {"qwen2_moe": "qwen2"}.get(kind, kind),
        "num_layers": reader.number("num_hidden_layers"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": reader.number("num_key_value_heads", heads),
        "head_dim": reader.number("head_dim", hidden // heads if heads else 0),
        "ffn_hidden_size": reader.number("intermediate_size"),
        "max_position_embeddings": reader.number("max_position_embeddings", 2048),
        "norm_eps": reader.number("rms_norm_eps", 1e-6),
        "activation": "swiglu"
        if activation in ("silu", "swish")
        else "geglu"
        if activation == "gelu"
        else "geglu_tanh",
        "rotary_base": float(_Reader(rope, reader.source).number("rope_theta", reader.number("rope_theta", 10000.0))),
        "rope_scaling": _rope_scaling(rope, reader),
        "tied_embeddings": reader.get("tie_word_embeddings", False),
        "qkv_bias": kind in ("qwen2", "qwen2_moe"),
        "sliding_window": _window(reader, kind),
        "init_std": reader.number("initializer_range", 0.02),
    }
    if kind.endswith("moe") or kind == "mixtral":
        fields["moe"] = _read_experts(reader, kind)
    return fields


def _window(reader: _Reader, kind: str) -> int | None:
    """Read the sliding window; one that no sequence reaches beyond is none."""
    is_sliding = reader.get("use_sliding_window", kind in ("mistral", "mixtral"))
    window = reader.get("sliding_window", None)
    length = reader.number("max_position_embeddings", 2048)
    if not is_sliding or window is None or window >= length:
        return None
    if kind.startswith("qwen") and reader.number("max_window_layers", 28) > 0:
        raise InputError(
            f"{reader.source}: sliding_window is {window}, below max_position_embeddings ({length}), and the first "
            f"max_window_layers ({reader.get('max_window_layers', 28)}) layers have none; one window for all layers is "
            "supported."
        )
    return int(window)


def _read_experts(reader: _Reader, kind: str) -> dict[str, Any]:
    common = {
        "top_k": reader.number("num_experts_per_tok", 2 if kind == "mixtral" else 8),
        "aux_loss_coef": reader.number("router_aux_loss_coef", 0.001),
    }
    if kind == "mixtral":
        reader.require("router_jitter_noise", (0, 0.0), 0.0)
        return {**common, "num_experts": reader.number("num_local_experts", 8)}
    if reader.get("mlp_only_layers", []):
        raise InputError(
            f"{reader.source}: mlp_only_layers is {reader.get('mlp_only_layers', [])}; only [] is supported."
        )
    shared = {"shared_ffn_hidden_size": reader.number("shared_expert_intermediate_size")} if kind == "qwen2_moe" else {}
    return {
        **common,
        **shared,
        "num_experts": reader.number("num_experts"),
        "ffn_hidden_size": reader.number("moe_intermediate_size"),
        "normalize_top_k": reader.get("norm_topk_prob", False),
        "layer_interval": reader.number("decoder_sparse_step", 1),
    }


def _rope(reader: _Reader) -> Mapping[str, Any]:
    """Return the table of rotary settings: rope_parameters (transformers 5) or rope_scaling (before it)."""
    rope = reader.get("rope_parameters", None) or reader.get("rope_scaling", None) or {}
    if not isinstance(rope, Mapping):
        raise InputError(f"{reader.source}: rope_parameters is {rope!r}, and a table is needed.")
    return rope


_ROPE_ASIDE = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}


def _rope_scaling(rope: Mapping[str, Any], reader: _Reader) -> dict[str, Any] | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    names = set(RopeScaling.model_fields) - {"rope_type"}
    unknown = sorted(name for name in rope if name not in names | _ROPE_ASIDE and rope[name] is not None)
    if kind not in ("linear", "llama3", "yarn") or unknown:
        what = f"rope_type is {kind!r}" if not unknown else f"{unknown[0]} is {rope[unknown[0]]!r}"
        raise InputError(f"{reader.source}: {what}, and only default, linear, llama3 and yarn are supported.")
    found = {name: rope[name] for name in names if rope.get(name) is not None}
    if kind == "yarn" and "original_max_position_embeddings" not in found:
        found["original_max_position_embeddings"] = reader.number("max_position_embeddings", 2048)
    return {"rope_type": kind, **found}
