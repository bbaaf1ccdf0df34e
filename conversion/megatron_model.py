"""What the arguments of a Megatron run say of its model, in our settings; what cannot be said is refused."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from contracts.errors import InputError
from conversion.torch_files import Foreign
from training.model_config import ModelConfig


class MegatronArguments:
    """`args` of a checkpoint; names that changed are looked up under all of them."""

    def __init__(self, path: Path, args: Any) -> None:
        if not isinstance(args, Foreign):
            raise InputError(f"{path}: holds no args, so nothing says what model it is of.")
        self.path = path
        self.values: Mapping[str, Any] = args.attributes

    def get(self, *names: str, default: Any = None) -> Any:
        """Return the value of the first name that has one."""
        for name in names:
            value = self.values.get(name)
            if value is not None and not isinstance(value, Foreign):
                return value
        return default

    def size(self, *names: str, default: int | None = None) -> int:
        """Return a count.

        Raises:
            InputError: It is not there, or is no count.
        """
        value = self.get(*names, default=default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise InputError(f"{self.path}: args.{names[0]} is {value!r}, and a count is needed.")
        return value

    @property
    def tensor_parallel(self) -> int:
        return self.size("tensor_model_parallel_size", "model_parallel_size", default=1)

    @property
    def pipeline_parallel(self) -> int:
        return self.size("pipeline_model_parallel_size", default=1)

    @property
    def expert_parallel(self) -> int:
        return self.size("expert_model_parallel_size", default=1)

    @property
    def virtual_pipeline(self) -> int:
        return self.size("virtual_pipeline_model_parallel_size", default=1)


def model_settings(args: MegatronArguments, names: set[str], vocab_rows: int) -> ModelConfig:
    """Return the model that a checkpoint holds.

    Args:
        names: Canonical names of its tensors; they say what arguments leave open.
        vocab_rows: Of its embedding, padding included: in Megatron padding takes part in the softmax, so all of them
            are tokens here.

    Raises:
        InputError: It is a model that Shardline does not compute.
    """
    hidden, heads = args.size("hidden_size"), args.size("num_attention_heads")
    layers = args.size("num_layers", "encoder_num_layers")
    has_groups = args.get("group_query_attention")
    is_bert = "pair.output.weight" in names or "head.dense.weight" in names
    settings: dict[str, Any] = {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": args.size("num_query_groups", default=heads) if has_groups else heads,
        "head_dim": args.size("kv_channels", default=hidden // heads),
        "ffn_hidden_size": args.size("ffn_hidden_size", default=4 * hidden),
        "max_position_embeddings": args.size("max_position_embeddings", "seq_length"),
        "vocab_size": vocab_rows,
        "vocab_multiple": 1,
        "norm": "rmsnorm" if args.get("normalization") == "RMSNorm" else "layernorm",
        "norm_eps": args.get("norm_epsilon", "layernorm_epsilon", default=1e-5),
        "activation": _activation(args),
        "tied_embeddings": "output.weight" not in names,
        "linear_bias": "layers.0.attn.out.bias" in names,
        "qkv_bias": "layers.0.attn.qkv.bias" in names,
        "qk_norm": "layers.0.attn.q_norm.weight" in names,
        **_positions(args, names),
    }
    if is_bert:
        settings |= {"norm_position": "pre", "pair_head": "pair.output.weight" in names, "head": "masked"}
        settings |= {"token_types": 2 if "embedding.token_type.weight" in names else 0, "embedding_norm": False}
    if args.get("num_experts"):
        settings["moe"] = _experts(args, names)
    family = "bert" if is_bert else "llama" if settings["norm"] == "rmsnorm" else "gpt2"
    _refuse_what_is_not_here(args)
    try:
        return ModelConfig.model_validate({"family": family, **settings})
    except ValidationError as error:
        raise InputError(f"{args.path}: its model is not valid here ({error.errors()[0]['msg']}).") from error


def _activation(args: MegatronArguments) -> str:
    if args.get("swiglu"):
        return "swiglu"
    if args.get("squared_relu"):
        raise InputError(f"{args.path}: squared_relu is an activation that Shardline does not have.")
    if args.get("openai_gelu") or args.get("bias_gelu_fusion"):
        return "gelu_tanh"  # the fused kernel computes that form
    return "gelu"


def _positions(args: MegatronArguments, names: set[str]) -> dict[str, Any]:
    kind = args.get("position_embedding_type", default="learned_absolute")
    if kind == "learned_absolute" or "embedding.position.weight" in names:
        return {"position": "learned"}
    if kind != "rope":
        raise InputError(
            f"{args.path}: position_embedding_type {kind!r} is not supported; learned_absolute and rope are."
        )
    if args.get("rotary_interleaved"):
        raise InputError(
            f"{args.path}: rotary_interleaved is not supported; its pairs are neighbours, ours are halves."
        )
    found: dict[str, Any] = {
        "position": "rope",
        "rotary_base": float(args.get("rotary_base", default=10000)),
        "rotary_percent": float(args.get("rotary_percent", default=1.0)),
    }
    if args.get("use_rope_scaling"):
        factor = float(args.get("rope_scaling_factor", default=8.0))
        found["rope_scaling"] = {"rope_type": "llama3", "factor": factor}
    return found


def _experts(args: MegatronArguments, names: set[str]) -> dict[str, Any]:
    if args.get("moe_layer_freq", default=1) != 1:
        raise InputError(f"{args.path}: moe_layer_freq other than 1 is not supported.")
    if args.get("moe_router_score_function", default="softmax") != "softmax" or args.get(
        "moe_router_enable_expert_bias"
    ):
        raise InputError(f"{args.path}: its router is not a plain softmax, which is not supported.")
    found: dict[str, Any] = {
        "num_experts": args.size("num_experts"),
        "top_k": args.size("moe_router_topk", default=2),
        "ffn_hidden_size": args.size("moe_ffn_hidden_size", default=args.size("ffn_hidden_size")),
        "normalize_top_k": not args.get("moe_router_pre_softmax", default=False),
    }
    if args.get("moe_shared_expert_intermediate_size"):
        if "layers.0.mlp.shared.router.weight" not in names:
            raise InputError(f"{args.path}: a shared expert without a gate is not supported.")
        found["shared_ffn_hidden_size"] = args.size("moe_shared_expert_intermediate_size")
    return found


def _refuse_what_is_not_here(args: MegatronArguments) -> None:
    for name, why in (
        ("apply_layernorm_1p", "norms with weights around 0"),
        ("multi_latent_attention", "latent attention"),
        ("parallel_attn", "parallel attention"),
        ("apply_residual_connection_post_layernorm", "residuals behind the norm"),
    ):
        if args.get(name):
            raise InputError(f"{args.path}: args.{name} is set: {why} cannot be expressed here.")
