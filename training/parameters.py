"""What every parameter is called and how it is cut, whatever the layout or the backend.

In: the settings of a model. Out: one `ParamSpec` per parameter. Checkpoints, gradient reduction,
clipping, weight decay and export all read these and never the attribute names of a module.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from training.model_config import ModelConfig

Shape = tuple[int, ...]

# A checkpoint holds the optimizer's state of each parameter as `optim.<name>.<moment>`.
OPTIMIZER_PREFIX = "optim."
MOMENTS = ("exp_avg", "exp_avg_sq")
PAIR_CLASSES = 2  # two segments belong as they stand, or not


@dataclass(frozen=True)
class ParamSpec:
    """One parameter as the whole model knows it.

    Args:
        canonical_name: Global name, such as `layers.3.attn.qkv.weight`; unique, the same at every layout.
        tp_dim: Dimension cut over the tensor-parallel ranks; None where each holds a copy.
        global_shape: Shape of the uncut parameter.
        sp_partial: The gradient of each tensor-parallel rank covers a part only, so they must be summed:
            its part of the sequence (norms and row-parallel biases under sequence parallelism), or its
            heads or its columns of the experts (norms of heads, routers).
        blocks: Canonical names of the equal blocks of rows that are fused into this parameter, in order
            (gate and up). Each block is cut and stored on its own. Empty: the parameter itself.
    """

    canonical_name: str
    tp_dim: int | None
    global_shape: Shape
    sp_partial: bool = False
    blocks: tuple[str, ...] = ()

    def stored(self) -> tuple[tuple[str, Shape], ...]:
        """Name and global shape of each tensor that a checkpoint holds for this parameter."""
        if not self.blocks:
            return ((self.canonical_name, self.global_shape),)
        rows, *rest = self.global_shape
        return tuple((name, (rows // len(self.blocks), *rest)) for name in self.blocks)

    @property
    def has_decay(self) -> bool:
        """Weight decay is for matrices; norms and biases have one dimension and none."""
        return len(self.global_shape) > 1


@dataclass(frozen=True)
class StoredGroup:
    """Stored tensors of one shape that a rank holds fused by rows in one parameter; most stand alone.

    Args:
        names: Canonical names, in the order of the rows.
        shape: Of each, uncut.
        tp_dim: Dimension cut over the tensor-parallel ranks; None where each holds a copy.
    """

    names: tuple[str, ...]
    shape: Shape
    tp_dim: int | None

    @property
    def is_fused(self) -> bool:
        return len(self.names) > 1


def stored_parameters(model: ModelConfig) -> dict[str, tuple[Shape, int | None]]:
    """List every tensor of a model in a checkpoint: canonical name to (global shape, tp_dim).

    Embedding rows are padded (`ModelConfig.padded_vocab_size`). A tied output matrix is not listed.
    """
    return {name: (group.shape, group.tp_dim) for group in stored_groups(model) for name in group.names}


def stored_groups(model: ModelConfig) -> Iterator[StoredGroup]:
    """List the parameters of a model in the order in which its modules do."""
    hidden, vocab = model.hidden_size, model.padded_vocab_size
    yield StoredGroup(("embedding.word.weight",), (vocab, hidden), 0)
    if model.position == "learned":
        positions = model.max_position_embeddings + model.position_offset
        yield StoredGroup(("embedding.position.weight",), (positions, hidden), None)
    if model.token_types:
        yield StoredGroup(("embedding.token_type.weight",), (model.token_types, hidden), None)
    if model.embedding_norm:
        yield from _norm(model, "embedding.norm")
    for part in ("encoder", "decoder") if model.position == "relative" else ():
        yield StoredGroup((f"{part}.relative.weight",), (model.relative_buckets, model.num_attention_heads), 1)
    for layer in range(model.total_layers):
        yield from _layer(model, layer)
    if model.is_encoder_decoder:
        yield from _norm(model, "encoder.norm")
    if model.norm_position == "pre":
        yield from _norm(model, "final_norm")
    yield from _heads(model)
    if not model.tied_embeddings:
        yield StoredGroup(("output.weight",), (vocab, hidden), 0)


def _heads(model: ModelConfig) -> Iterator[StoredGroup]:
    hidden = model.hidden_size
    if model.pair_head:
        yield from _linear(("pair.pooler",), (hidden, hidden), None, True)
        yield from _linear(("pair.output",), (PAIR_CLASSES, hidden), None, True)
    if model.head == "masked":
        yield from _linear(("head.dense",), (hidden, hidden), None, True)
        yield from _norm(model, "head.norm")
        yield StoredGroup(("output.bias",), (model.padded_vocab_size,), 0)


def _layer(model: ModelConfig, layer: int) -> Iterator[StoredGroup]:
    prefix, hidden, is_post = f"layers.{layer}", model.hidden_size, model.norm_position == "post"
    if not is_post:
        yield from _norm(model, f"{prefix}.attn.norm")
    yield from _linear((f"{prefix}.attn.qkv",), (model.qkv_size, hidden), 0, model.qkv_bias)
    for name in ("q_norm", "k_norm") if model.qk_norm else ():
        yield StoredGroup((f"{prefix}.attn.{name}.weight",), (model.head_dim,), None)
    yield from _linear((f"{prefix}.attn.out",), (hidden, model.attention_size), 1, model.linear_bias)
    if model.is_decoder_layer(layer):
        yield from _norm(model, f"{prefix}.cross.norm")
        yield from _linear((f"{prefix}.cross.q",), (model.attention_size, hidden), 0, model.qkv_bias)
        yield from _linear((f"{prefix}.cross.kv",), (model.cross_kv_size, hidden), 0, model.qkv_bias)
        yield from _linear((f"{prefix}.cross.out",), (hidden, model.attention_size), 1, model.linear_bias)
    if is_post:
        yield from _norm(model, f"{prefix}.attn.norm")
    elif not model.shared_norm:
        yield from _norm(model, f"{prefix}.mlp.norm")
    if model.has_experts(layer):
        yield from _experts(model, f"{prefix}.mlp")
    else:
        yield from _mlp(model, (f"{prefix}.mlp",), model.ffn_hidden_size)
    if is_post:
        yield from _norm(model, f"{prefix}.mlp.norm")


def _experts(model: ModelConfig, prefix: str) -> Iterator[StoredGroup]:
    if model.moe is None:
        return
    yield StoredGroup((f"{prefix}.router.weight",), (model.moe.num_experts, model.hidden_size), None)
    names = tuple(f"{prefix}.experts.{n}" for n in range(model.moe.num_experts))
    yield from _mlp(model, names, model.expert_ffn_hidden_size)
    if model.moe.shared_ffn_hidden_size:
        yield from _mlp(model, (f"{prefix}.shared",), model.moe.shared_ffn_hidden_size)
        yield StoredGroup((f"{prefix}.shared.router.weight",), (1, model.hidden_size), None)


def _mlp(model: ModelConfig, prefixes: tuple[str, ...], width: int) -> Iterator[StoredGroup]:
    parts = ("gate", "up") if model.is_gated else ("up",)
    into = tuple(f"{prefix}.{part}" for prefix in prefixes for part in parts)
    yield from _linear(into, (width, model.hidden_size), 0, model.linear_bias)
    yield from _linear(tuple(f"{p}.down" for p in prefixes), (model.hidden_size, width), 1, model.linear_bias)


def _norm(model: ModelConfig, name: str) -> Iterator[StoredGroup]:
    yield StoredGroup((f"{name}.weight",), (model.hidden_size,), None)
    if model.norm == "layernorm":
        yield StoredGroup((f"{name}.bias",), (model.hidden_size,), None)


def _linear(
    names: tuple[str, ...], shape: tuple[int, int], tp_dim: int | None, has_bias: bool
) -> Iterator[StoredGroup]:
    yield StoredGroup(tuple(f"{name}.weight" for name in names), shape, tp_dim)
    if has_bias:
        yield StoredGroup(tuple(f"{name}.bias" for name in names), (shape[0],), 0 if tp_dim == 0 else None)
