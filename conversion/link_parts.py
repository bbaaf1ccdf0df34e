"""Pieces that lists of links are made of: which rows of usual tensors correspond."""

from collections.abc import Iterator

from conversion.linked_rows import Link, Run
from training.model_config import ModelConfig


def matrices_of(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """Shapes (out, in) of a layer's matrices, all but the fused projection."""
    hidden, ffn = model.hidden_size, model.ffn_hidden_size
    inner = dict.fromkeys(("mlp.gate", "mlp.up") if model.is_gated else ("mlp.up",), (ffn, hidden))
    return {"attn.out": (hidden, model.attention_size), **inner, "mlp.down": (hidden, ffn)}


def query_key_value_runs(model: ModelConfig) -> tuple[tuple[Run, ...], ...]:
    """Rows of q, of k and of v: canonical against the order [all q; all k; all v]."""
    groups, width = model.num_query_groups, model.head_dim
    heads = model.num_attention_heads // groups
    q_rows, k_rows = groups * heads * width, groups * width
    q, k, v = [], [], []
    for group in range(groups):
        first = group * (heads + 2) * width
        q.append(Run(first, group * heads * width, heads * width))
        k.append(Run(first + heads * width, q_rows + group * width, width))
        v.append(Run(first + (heads + 1) * width, q_rows + k_rows + group * width, width))
    return tuple(q), tuple(k), tuple(v)


def vocab_link(model: ModelConfig, ours: str, theirs: str) -> Link:
    """Link the rows of real tokens of a table."""
    if model.vocab_size is None:
        raise ValueError("the model's vocab_size is not set")
    return Link(ours, theirs, (model.vocab_size, model.hidden_size), (Run(0, 0, model.vocab_size),))


def norm_links(model: ModelConfig, ours: str, theirs: str) -> Iterator[Link]:
    """Link the weight of a norm, and its bias if it has one."""
    for part in ("weight", "bias") if model.norm == "layernorm" else ("weight",):
        yield same_rows(f"{ours}.{part}", f"{theirs}.{part}", (model.hidden_size,))


def same_rows(ours: str, theirs: str, shape: tuple[int, ...]) -> Link:
    """Link two tensors that are the same."""
    return Link(ours, theirs, shape, (Run(0, 0, shape[0]),))


def turned(ours: str, theirs: str, rows: int, columns: int) -> Link:
    """Link a matrix (rows, columns) to one that is stored as (columns, rows)."""
    return Link(ours, theirs, (columns, rows), (Run(0, 0, rows),), is_transposed=True)
