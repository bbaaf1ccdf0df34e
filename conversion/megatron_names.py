"""Names of Megatron's parameters, those of Megatron-Core and the older nested ones, as places in canonical tensors.

A rank's part of a parameter goes to one or several `Place`s: gate and up are one matrix there and two here, and
before checkpoint version 2 the rows of queries, keys and values had another order.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from conversion.catalogue import Shape

Cut = Literal["rows", "columns", "copy"]

_LAYER = re.compile(r"^(?:decoder|encoder|transformer)\.layers\.(\d+)\.(.+)$")
_EXPERT = re.compile(r"^mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12]\.(?:weight|bias))$")
_GROUPED = re.compile(r"^mlp\.experts\.(linear_fc[12]\.(?:weight|bias))(\d+)$")
_TOP = {
    "embedding.word_embeddings.weight": ("embedding.word.weight", "rows"),
    "embedding.position_embeddings.weight": ("embedding.position.weight", "copy"),
    "embedding.tokentype_embeddings.weight": ("embedding.token_type.weight", "copy"),
    "output_layer.weight": ("output.weight", "rows"),
    "word_embeddings_for_head.weight": ("output.weight", "rows"),
    "word_embeddings.weight": ("output.weight", "rows"),
    "output_layer.bias": ("output.bias", "rows"),
    "lm_head.bias": ("output.bias", "rows"),
    "lm_head.dense.weight": ("head.dense.weight", "copy"),
    "lm_head.dense.bias": ("head.dense.bias", "copy"),
    "lm_head.layer_norm.weight": ("head.norm.weight", "copy"),
    "lm_head.layer_norm.bias": ("head.norm.bias", "copy"),
    "lm_head.layernorm.weight": ("head.norm.weight", "copy"),
    "lm_head.layernorm.bias": ("head.norm.bias", "copy"),
    "binary_head.weight": ("pair.output.weight", "copy"),
    "binary_head.bias": ("pair.output.bias", "copy"),
    "pooler.dense.weight": ("pair.pooler.weight", "copy"),
    "pooler.dense.bias": ("pair.pooler.bias", "copy"),
}
_NORMS = {
    "input_layernorm": "attn.norm",
    "input_norm": "attn.norm",
    "self_attention.linear_qkv.layer_norm": "attn.norm",
    "pre_mlp_layernorm": "mlp.norm",
    "post_attention_layernorm": "mlp.norm",
    "post_attention_norm": "mlp.norm",
    "mlp.linear_fc1.layer_norm": "mlp.norm",
    "self_attention.q_layernorm": "attn.q_norm",
    "self_attention.k_layernorm": "attn.k_norm",
}
_LINEARS = {
    "self_attention.linear_qkv": ("attn.qkv", "rows"),
    "self_attention.query_key_value": ("attn.qkv", "rows"),
    "attention.query_key_value": ("attn.qkv", "rows"),
    "self_attention.linear_proj": ("attn.out", "columns"),
    "self_attention.dense": ("attn.out", "columns"),
    "attention.dense": ("attn.out", "columns"),
    "mlp.linear_fc1": ("mlp.up", "rows"),
    "mlp.dense_h_to_4h": ("mlp.up", "rows"),
    "mlp.linear_fc2": ("mlp.down", "columns"),
    "mlp.dense_4h_to_h": ("mlp.down", "columns"),
    "mlp.shared_experts.linear_fc1": ("mlp.shared.up", "rows"),
    "mlp.shared_experts.linear_fc2": ("mlp.shared.down", "columns"),
}


@dataclass(frozen=True)
class Named:
    """A parameter of a rank by its canonical name.

    Args:
        canonical: Name; of gate and up together that of up.
        cut: How tensor-parallel ranks share it.
        is_expert: It belongs to one expert.
    """

    canonical: str
    cut: Cut
    is_expert: bool = False

    @property
    def is_first_matrix(self) -> bool:
        """It is the first matrix of an MLP, of gate and up where the model has both."""
        return self.canonical.endswith(("mlp.up.weight", "mlp.up.bias", ".shared.up.weight")) or (
            self.is_expert and ".up." in self.canonical
        )

    @property
    def is_qkv(self) -> bool:
        return ".attn.qkv." in self.canonical


def flat_name(name: str) -> str:
    """Take off the prefixes that wrappers and nesting add."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name.removeprefix("language_model.")


def named(name: str, first_layer: dict[int, int], first_expert: int) -> Named | None:
    """Return the canonical name of a rank's parameter; None of one that is no weight.

    Args:
        name: As `flat_name` gives it.
        first_layer: Number of each layer of the rank in the whole model.
        first_expert: Number of the rank's first expert.

    Raises:
        KeyError: It is of no known kind.
    """
    if name.endswith("_extra_state") or name.rpartition(".")[2] in ("inv_freq", "position_ids"):
        return None
    if name in _TOP:
        canonical, cut = _TOP[name]
        return Named(canonical, cut)  # type: ignore[arg-type]
    for part in ("final_layernorm", "final_norm"):
        if (found := re.match(rf"^(?:(?:decoder|encoder|transformer)\.)?{part}\.(weight|bias)$", name)) is not None:
            return Named(f"final_norm.{found[1]}", "copy")
    if (layer := _LAYER.match(name)) is None:
        raise KeyError(name)
    prefix, rest = f"layers.{first_layer[int(layer[1])]}", layer[2]
    for pattern, expert, matrix in ((_EXPERT, 1, 2), (_GROUPED, 2, 1)):
        if (found := pattern.match(rest)) is not None:
            number = first_expert + int(found[expert])
            kind, _, what = found[matrix].partition(".")
            inner, cut = ("up", "rows") if kind == "linear_fc1" else ("down", "columns")
            return Named(f"{prefix}.mlp.experts.{number}.{inner}.{what}", _cut(cut, what), is_expert=True)
    if rest == "mlp.router.weight":
        return Named(f"{prefix}.mlp.router.weight", "copy")
    if rest == "mlp.shared_experts.gate_weight":
        return Named(f"{prefix}.mlp.shared.router.weight", "copy")
    module, _, what = rest.rpartition(".")
    if what.startswith("layer_norm_"):  # fused with the matrix behind it
        module, what = f"{module}.layer_norm", what.removeprefix("layer_norm_")
    if module in _NORMS:
        return Named(f"{prefix}.{_NORMS[module]}.{what}", "copy")
    if module in _LINEARS:
        canonical, cut = _LINEARS[module]
        return Named(f"{prefix}.{canonical}.{what}", _cut(cut, what))
    raise KeyError(name)


def _cut(cut: str, what: str) -> Cut:
    if what == "bias":
        return "rows" if cut == "rows" else "copy"
    return "rows" if cut == "rows" else "columns"


@dataclass(frozen=True)
class Place:
    """Rows of a rank's part and where they belong.

    Args:
        canonical: Name.
        first_row: Of the part.
        rows: How many of its rows.
        at: First index in every dimension of the canonical tensor.
    """

    canonical: str
    first_row: int
    rows: int
    at: Shape


def places(item: Named, shape: Shape, rank: int, *, is_gated: bool, qkv: "QkvOrder") -> Iterator[Place]:
    """Say where the rows of a tensor-parallel rank's part belong.

    Args:
        shape: Of the part.
        rank: Tensor-parallel rank.
        is_gated: The first matrix of an MLP is gate and up, one above the other on each rank.
        qkv: Order of the fused projection's rows.
    """
    rest = (0,) * (len(shape) - 1)
    if item.cut == "copy":
        yield Place(item.canonical, 0, shape[0], (0, *rest))
    elif item.cut == "columns":
        yield Place(item.canonical, 0, shape[0], (0, rank * shape[1]))
    elif item.is_first_matrix and is_gated:
        half = shape[0] // 2
        for number, part in enumerate(("gate", "up")):
            name = _replace_last(item.canonical, ".up.", f".{part}.")
            yield Place(name, number * half, half, (rank * half, *rest))
    elif item.is_qkv and qkv.version < 2:
        yield from qkv.places(item.canonical, shape, rank)
    else:
        yield Place(item.canonical, 0, shape[0], (rank * shape[0], *rest))


def _replace_last(text: str, old: str, new: str) -> str:
    head, _, tail = text.rpartition(old)
    return f"{head}{new}{tail}"


@dataclass(frozen=True)
class QkvOrder:
    """Order of the rows of the fused projection on a rank.

    Args:
        version: Of the checkpoint. From 2 on as here: of each head (group) its queries, its key, its value. 1: of each
            head, of each channel, the three; 0: all queries, all keys, all values.
        head_dim: Rows of one head.
    """

    version: float
    head_dim: int

    def places(self, canonical: str, shape: Shape, rank: int) -> Iterator[Place]:
        """Place the rows of the old orders, which have as many keys as queries."""
        rest = (0,) * (len(shape) - 1)
        width = self.head_dim
        heads = shape[0] // (3 * width)
        start = rank * shape[0]
        for head in range(heads):
            for part in range(3):
                first = start + (head * 3 + part) * width
                if self.version < 1:
                    yield Place(canonical, (part * heads + head) * width, width, (first, *rest))
                    continue
                for channel in range(width):
                    yield Place(canonical, (head * width + channel) * 3 + part, 1, (first + channel, *rest))
