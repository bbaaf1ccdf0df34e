"""`config.json` of Hugging Face against `ModelConfig`, in both directions; light: no torch.

A setting under which the foreign model computes another function than ours is refused by name;
nothing is guessed.
"""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import ValidationError

from contracts.errors import ConfigError, InputError
from training.config import ModelConfig

Architecture = Literal["gpt2", "llama", "qwen2"]
READABLE = ("gpt2", "llama", "mistral", "qwen2")

_GELU_TANH = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
_CLASS = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
_REASONS = {
    "bert": "it looks both ways and normalizes after each block",
    "t5": "it is an encoder with a decoder, with relative positions",
    "gpt_neox": "it turns only a part of each head, or runs attention and MLP in parallel",
    "mixtral": "it has experts",
}


def architecture_of(model: ModelConfig) -> Architecture:
    """Choose the Hugging Face architecture that computes what `model` computes.

    Raises:
        ConfigError: None does; names the settings that stand in the way.
    """
    is_gpt2 = model.norm == "layernorm" and model.position == "learned" and not model.is_gated
    is_llama = model.norm == "rmsnorm" and model.position == "rope" and model.is_gated
    if is_llama:
        return "qwen2" if model.qkv_bias else "llama"
    wrong = []
    if not is_gpt2:
        wrong.append(f"norm {model.norm} with position {model.position} and activation {model.activation}")
    if not (model.linear_bias and model.qkv_bias):
        wrong.append(f"linear_bias {model.linear_bias} and qkv_bias {model.qkv_bias} (GPT-2 has both)")
    if model.num_query_groups != model.num_attention_heads:
        wrong.append(f"num_query_groups {model.num_query_groups} below num_attention_heads {model.num_attention_heads}")
    if model.attention_size != model.hidden_size:
        wrong.append(
            f"head_dim {model.head_dim} x {model.num_attention_heads} heads is not hidden_size {model.hidden_size}"
        )
    if wrong:
        raise ConfigError(
            f"no Hugging Face architecture computes this model: {'; '.join(wrong)}. GPT-2 (layernorm, learned, gelu, "
            "biases) and Llama or Qwen2 (rmsnorm, rope, swiglu, no linear_bias) can be exported. Use to: native."
        )
    return "gpt2"


def to_huggingface(model: ModelConfig, *, dtype: str, token_ids: Mapping[str, Any]) -> dict[str, Any]:
    """Derive `config.json`.

    Args:
        dtype: Of the weights, as torch names it.
        token_ids: bos_token_id, eos_token_id and pad_token_id, where known.
    """
    architecture = architecture_of(model)
    common = {
        "architectures": [_CLASS[architecture]],
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
    }
    return {**common, **(_gpt2_fields(model) if architecture == "gpt2" else _llama_fields(model, architecture))}


def _gpt2_fields(model: ModelConfig) -> dict[str, Any]:
    return {
        "n_layer": model.num_layers,
        "n_embd": model.hidden_size,
        "n_head": model.num_attention_heads,
        "n_inner": model.ffn_hidden_size,
        "n_positions": model.max_position_embeddings,
        "n_ctx": model.max_position_embeddings,
        "layer_norm_epsilon": model.norm_eps,
        "activation_function": "gelu" if model.activation == "gelu" else "gelu_new",
        "attn_pdrop": 0.0,
        "embd_pdrop": model.dropout,
        "resid_pdrop": model.dropout,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
    }


def _llama_fields(model: ModelConfig, architecture: Architecture) -> dict[str, Any]:
    fields = {
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups,
        "head_dim": model.head_dim,
        "intermediate_size": model.ffn_hidden_size,
        "max_position_embeddings": model.max_position_embeddings,
        "rms_norm_eps": model.norm_eps,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        # transformers 5 reads rope_parameters, older releases rope_theta and rope_scaling.
        "rope_parameters": {"rope_theta": model.rotary_base, "rope_type": "default"},
        "rope_theta": model.rotary_base,
        "rope_scaling": None,
    }
    if architecture == "llama":
        return {**fields, "attention_bias": False, "mlp_bias": False}
    return {**fields, "use_sliding_window": False, "sliding_window": None}


def from_huggingface(config: Mapping[str, Any], source: str) -> ModelConfig:
    """Read `config.json`.

    Args:
        source: The file, for messages.

    Raises:
        InputError: The architecture or one of its settings is not supported; names both.
    """
    kind = config.get("model_type")
    if kind not in READABLE:
        reason = f" ({_REASONS[kind]})" if kind in _REASONS else ""
        raise InputError(f"{source}: model_type {kind!r} is not supported{reason}. Readable are {', '.join(READABLE)}.")
    reader = _Reader(config, source)
    fields = _read_gpt2(reader) if kind == "gpt2" else _read_llama(reader, str(kind))
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
    activation = reader.require("activation_function", ("gelu", *_GELU_TANH), "gelu_new")
    hidden, heads = reader.number("n_embd", 768), reader.number("n_head", 12)
    return {
        "family": "gpt2",
        "num_layers": reader.number("n_layer", 12),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "ffn_hidden_size": reader.number("n_inner", 4 * hidden),
        "max_position_embeddings": reader.number("n_positions", 1024),
        "norm_eps": reader.number("layer_norm_epsilon", 1e-5),
        "activation": "gelu" if activation == "gelu" else "gelu_tanh",
        "tied_embeddings": reader.get("tie_word_embeddings", True),
        "dropout": reader.number("resid_pdrop", 0.1),
        "init_std": reader.number("initializer_range", 0.02),
    }


def _read_llama(reader: _Reader, kind: str) -> dict[str, Any]:
    reader.require("hidden_act", ("silu", "swish"), "silu")
    if kind == "llama":
        reader.require("attention_bias", (False,), False)
        reader.require("mlp_bias", (False,), False)
    length = reader.number("max_position_embeddings", 2048)
    is_sliding = reader.get("use_sliding_window", kind == "mistral")
    window = reader.get("sliding_window", None)
    if is_sliding and window is not None and window < length:
        raise InputError(
            f"{reader.source}: sliding_window is {window}, below max_position_embeddings ({length}); attention over a "
            "window is not supported."
        )
    hidden, heads = reader.number("hidden_size"), reader.number("num_attention_heads")
    return {
        "family": "llama",
        "num_layers": reader.number("num_hidden_layers"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": reader.number("num_key_value_heads", heads),
        "head_dim": reader.number("head_dim", hidden // heads if heads else 0),
        "ffn_hidden_size": reader.number("intermediate_size"),
        "max_position_embeddings": length,
        "norm_eps": reader.number("rms_norm_eps", 1e-6),
        "rotary_base": _rotary_base(reader),
        "tied_embeddings": reader.get("tie_word_embeddings", False),
        "qkv_bias": kind == "qwen2",
        "init_std": reader.number("initializer_range", 0.02),
    }


def _rotary_base(reader: _Reader) -> float:
    """Read both forms: rope_parameters (transformers 5), and rope_theta with rope_scaling."""
    scaling = reader.get("rope_parameters", None) or reader.get("rope_scaling", None) or {}
    if not isinstance(scaling, Mapping):
        raise InputError(f"{reader.source}: rope_parameters is {scaling!r}, and a table is needed.")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind != "default":
        raise InputError(f"{reader.source}: rope_type is {kind!r}, and only default is supported.")
    if scaling.get("partial_rotary_factor", 1.0) != 1.0 or reader.get("partial_rotary_factor", 1.0) != 1.0:
        raise InputError(f"{reader.source}: partial_rotary_factor is not 1; only whole heads are turned.")
    base = scaling.get("rope_theta", reader.config.get("rope_theta"))
    return float(_Reader({"rope_theta": base}, reader.source).number("rope_theta", 10000.0))
