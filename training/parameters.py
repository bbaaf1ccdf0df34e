"""What every parameter is called and how it is cut, whatever the layout or the backend.

In: the settings of a model. Out: one `ParamSpec` per parameter. Checkpoints, gradient reduction,
clipping, weight decay and export all read these and never the attribute names of a module.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from training.config import ModelConfig

Shape = tuple[int, ...]

# A checkpoint holds the optimizer's state of each parameter as `optim.<name>.<moment>`.
OPTIMIZER_PREFIX = "optim."
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class ParamSpec:
    """One parameter as the whole model knows it.

    Args:
        canonical_name: Global name, such as `layers.3.attn.qkv.weight`; unique, the same at every layout.
        tp_dim: Dimension cut over the tensor-parallel ranks; None where each holds a copy.
        global_shape: Shape of the uncut parameter.
        sp_partial: The gradient of each tensor-parallel rank covers its part of the sequence only,
            so they must be summed (norms and row-parallel biases under sequence parallelism).
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


def stored_parameters(model: ModelConfig) -> dict[str, tuple[Shape, int | None]]:
    """List every tensor of a model in a checkpoint: canonical name to (global shape, tp_dim).

    Embedding rows are padded (`ModelConfig.padded_vocab_size`). A tied output matrix is not listed.
    """
    return dict(_stored(model))


def _stored(model: ModelConfig) -> Iterator[tuple[str, tuple[Shape, int | None]]]:
    hidden, vocab = model.hidden_size, model.padded_vocab_size
    yield "embedding.word.weight", ((vocab, hidden), 0)
    if model.position == "learned":
        yield "embedding.position.weight", ((model.max_position_embeddings, hidden), None)
    for layer in range(model.num_layers):
        prefix = f"layers.{layer}"
        yield from _norm(model, f"{prefix}.attn.norm")
        yield from _linear(f"{prefix}.attn.qkv", (model.qkv_size, hidden), 0, model.qkv_bias)
        yield from _linear(f"{prefix}.attn.out", (hidden, model.attention_size), 1, model.linear_bias)
        yield from _norm(model, f"{prefix}.mlp.norm")
        for name in ("gate", "up") if model.is_gated else ("up",):
            yield from _linear(f"{prefix}.mlp.{name}", (model.ffn_hidden_size, hidden), 0, model.linear_bias)
        yield from _linear(f"{prefix}.mlp.down", (hidden, model.ffn_hidden_size), 1, model.linear_bias)
    yield from _norm(model, "final_norm")
    if not model.tied_embeddings:
        yield "output.weight", ((vocab, hidden), 0)


def _norm(model: ModelConfig, name: str) -> Iterator[tuple[str, tuple[Shape, int | None]]]:
    yield f"{name}.weight", ((model.hidden_size,), None)
    if model.norm == "layernorm":
        yield f"{name}.bias", ((model.hidden_size,), None)


def _linear(
    name: str, shape: tuple[int, int], tp_dim: int, has_bias: bool
) -> Iterator[tuple[str, tuple[Shape, int | None]]]:
    yield f"{name}.weight", (shape, tp_dim)
    if has_bias:
        yield f"{name}.bias", ((shape[0],), 0 if tp_dim == 0 else None)


def stage_layers(num_layers: int, num_stages: int, stage: int) -> range:
    """Layers of one pipeline stage: contiguous, as even as possible, earlier stages take the remainder."""
    base, extra = divmod(num_layers, num_stages)
    first = stage * base + min(stage, extra)
    return range(first, first + base + (stage < extra))
