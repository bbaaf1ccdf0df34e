"""Names and rows of BERT, Megatron-BERT, RoBERTa and T5 in Hugging Face files, against the canonical ones.

All store matrices as (out, in) and q, k and v apart. Tied copies (output matrices, T5's `embed_tokens`) are not linked.
"""

from collections.abc import Iterator

from conversion.link_parts import matrices_of, norm_links, query_key_value_runs, same_rows, vocab_link
from conversion.linked_rows import Link, Run
from training.model_config import ModelConfig
from training.parameters import PAIR_CLASSES

_BERT_LAYER = {
    "attn.out": "attention.output.dense",
    "mlp.up": "intermediate.dense",
    "mlp.down": "output.dense",
}
_NORMS = {
    "post": {"attn.norm": "attention.output.LayerNorm", "mlp.norm": "output.LayerNorm"},
    "pre": {"attn.norm": "attention.ln", "mlp.norm": "ln"},
}


def encoder_links(model: ModelConfig, architecture: str) -> Iterator[Link]:
    """List what corresponds to what: architecture bert, megatron-bert, roberta or t5."""
    return _t5(model) if architecture == "t5" else _bert(model, architecture)


def _bert(model: ModelConfig, architecture: str) -> Iterator[Link]:
    body = "roberta" if architecture == "roberta" else "bert"
    hidden, table = model.hidden_size, f"{body}.embeddings"
    yield vocab_link(model, "embedding.word.weight", f"{table}.word_embeddings.weight")
    positions = model.max_position_embeddings + model.position_offset
    yield same_rows("embedding.position.weight", f"{table}.position_embeddings.weight", (positions, hidden))
    yield same_rows("embedding.token_type.weight", f"{table}.token_type_embeddings.weight", (model.token_types, hidden))
    if model.embedding_norm:
        yield from norm_links(model, "embedding.norm", f"{table}.LayerNorm")
    for layer in range(model.num_layers):
        ours, theirs = f"layers.{layer}", f"{body}.encoder.layer.{layer}"
        yield from _apart(model, f"{ours}.attn.qkv", f"{theirs}.attention.self", ("query", "key", "value"))
        for name, shape in matrices_of(model).items():
            yield from _linear(f"{ours}.{name}", f"{theirs}.{_BERT_LAYER[name]}", shape)
        for name, foreign in _NORMS[model.norm_position].items():
            yield from norm_links(model, f"{ours}.{name}", f"{theirs}.{foreign}")
    if model.norm_position == "pre":
        yield from norm_links(model, "final_norm", f"{body}.encoder.ln")
    if model.pair_head:
        yield from _linear("pair.pooler", f"{body}.pooler.dense", (hidden, hidden))
        yield from _linear("pair.output", "cls.seq_relationship", (PAIR_CLASSES, hidden))
    is_roberta = architecture == "roberta"
    head, dense = ("lm_head", "lm_head") if is_roberta else ("cls.predictions", "cls.predictions.transform")
    yield from _linear("head.dense", f"{dense}.dense", (hidden, hidden))
    yield from norm_links(model, "head.norm", f"{dense}.{'layer_norm' if is_roberta else 'LayerNorm'}")
    vocab = model.vocab_size or 0
    # transformers reads the output matrix's own bias where the tables are not tied.
    bias = f"{head}.bias" if model.tied_embeddings else f"{head}.decoder.bias"
    yield Link("output.bias", bias, (vocab,), (Run(0, 0, vocab),))
    if not model.tied_embeddings:
        yield vocab_link(model, "output.weight", f"{head}.decoder.weight")


def _t5(model: ModelConfig) -> Iterator[Link]:
    yield vocab_link(model, "embedding.word.weight", "shared.weight")
    for stack in ("encoder", "decoder"):
        foreign = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        shape = (model.relative_buckets, model.num_attention_heads)
        yield same_rows(f"{stack}.relative.weight", foreign, shape)
    for layer in range(model.total_layers):
        is_decoder = model.is_decoder_layer(layer)
        stack, number = ("decoder", layer - model.num_layers) if is_decoder else ("encoder", layer)
        ours, theirs = f"layers.{layer}", f"{stack}.block.{number}.layer"
        yield from _apart(model, f"{ours}.attn.qkv", f"{theirs}.0.SelfAttention", ("q", "k", "v"))
        out = (model.hidden_size, model.attention_size)
        yield same_rows(f"{ours}.attn.out.weight", f"{theirs}.0.SelfAttention.o.weight", out)
        yield from norm_links(model, f"{ours}.attn.norm", f"{theirs}.0.layer_norm")
        if is_decoder:
            yield from _cross(model, f"{ours}.cross", f"{theirs}.1")
        mlp = f"{theirs}.{2 if is_decoder else 1}"
        names = {"gate": "wi_0", "up": "wi_1", "down": "wo"} if model.is_gated else {"up": "wi", "down": "wo"}
        for name, foreign in names.items():
            shape = matrices_of(model)[f"mlp.{name}"]
            yield same_rows(f"{ours}.mlp.{name}.weight", f"{mlp}.DenseReluDense.{foreign}.weight", shape)
        yield from norm_links(model, f"{ours}.mlp.norm", f"{mlp}.layer_norm")
    yield from norm_links(model, "encoder.norm", "encoder.final_layer_norm")
    yield from norm_links(model, "final_norm", "decoder.final_layer_norm")
    if not model.tied_embeddings:
        yield vocab_link(model, "output.weight", "lm_head.weight")


def _cross(model: ModelConfig, ours: str, theirs: str) -> Iterator[Link]:
    attention, hidden, width = f"{theirs}.EncDecAttention", model.hidden_size, model.head_dim
    yield from norm_links(model, f"{ours}.norm", f"{theirs}.layer_norm")
    yield same_rows(f"{ours}.q.weight", f"{attention}.q.weight", (model.attention_size, hidden))
    yield same_rows(f"{ours}.out.weight", f"{attention}.o.weight", (hidden, model.attention_size))
    for place, part in enumerate(("k", "v")):
        runs = tuple(Run((2 * group + place) * width, group * width, width) for group in range(model.num_query_groups))
        shape = (model.num_query_groups * width, hidden)
        yield Link(f"{ours}.kv.weight", f"{attention}.{part}.weight", shape, runs)


def _apart(model: ModelConfig, ours: str, theirs: str, names: tuple[str, str, str]) -> Iterator[Link]:
    """Link the fused projection to three matrices, and its biases if it has them."""
    for name, runs in zip(names, query_key_value_runs(model), strict=True):
        # Rows of q, k and v are counted in the fused order [q; k; v]; here each starts at 0.
        first, rows = runs[0].foreign, sum(run.count for run in runs)
        own = tuple(Run(run.canonical, run.foreign - first, run.count) for run in runs)
        yield Link(f"{ours}.weight", f"{theirs}.{name}.weight", (rows, model.hidden_size), own)
        if model.qkv_bias:
            yield Link(f"{ours}.bias", f"{theirs}.{name}.bias", (rows,), own)


def _linear(ours: str, theirs: str, shape: tuple[int, int]) -> Iterator[Link]:
    yield same_rows(f"{ours}.weight", f"{theirs}.weight", shape)
    yield same_rows(f"{ours}.bias", f"{theirs}.bias", shape[:1])
