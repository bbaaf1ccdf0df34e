"""How a model is cut over ranks, and the arithmetic that must hold between the two.

Nothing here imports torch or starts a process.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from contracts.configuration import Settings, execution
from training.model_config import ModelConfig, choices


class LayoutConfig(Settings):
    """How the model and the batch are cut over ranks; the product of the degrees is their number."""

    habits: ClassVar[Mapping[str, str]] = {
        "tensor_model_parallel_size": "tensor_parallel",
        "pipeline_model_parallel_size": "pipeline_parallel",
        "tp": "tensor_parallel",
        "pp": "pipeline_parallel",
        "dp": "data_parallel",
        "virtual_pipeline_model_parallel_size": "virtual_pipeline",
        "vpp": "virtual_pipeline",
    }

    tensor_parallel: PositiveInt = Field(1, description="Ranks that share each layer's matrices.")
    pipeline_parallel: PositiveInt = Field(1, description="Ranks that the layers are dealt to, in stages.")
    data_parallel: PositiveInt = execution(1, description="Ranks that share the rows of a global batch.")
    context_parallel: PositiveInt = execution(1, description="Ranks that share a sequence; only 1 for now.")
    virtual_pipeline: PositiveInt = execution(
        1, description="Stages per rank, interleaved: a shorter pipeline bubble for more messages and activations."
    )
    pipeline_split: Literal["even", "balanced"] | tuple[NonNegativeInt, ...] = execution(
        "even",
        description="Layers of each pipeline stage: even; balanced, which counts the cost of each layer and of the "
        "output matrix; or a list such as [7, 8, 8, 5], in the order of the layers.",
    )
    sequence_parallel: bool = execution(
        True, description="Cut activations between the matrices along the sequence over the tensor-parallel ranks."
    )
    shard: Literal["none", "optimizer", "gradients", "parameters"] = execution(
        "optimizer", description="What the data-parallel ranks share instead of copying (ZeRO 0, 1, 2, 3)."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.context_parallel > 1:
            raise ValueError(f"context_parallel ({self.context_parallel}) above 1 is not supported yet. Use 1.")
        if self.virtual_pipeline > 1 and self.pipeline_parallel == 1:
            raise ValueError(
                f"virtual_pipeline ({self.virtual_pipeline}) interleaves the stages of several ranks, and "
                "pipeline_parallel is 1. Use virtual_pipeline: 1, or pipeline_parallel: 2 or more."
            )
        if self.pipeline_parallel > 1 and self.shard in ("gradients", "parameters"):
            raise ValueError(
                f"shard: {self.shard} would gather or reduce once per micro-batch under pipeline_parallel "
                f"({self.pipeline_parallel}). Use shard: optimizer, or pipeline_parallel: 1."
            )
        self._check_split()
        return self

    def _check_split(self) -> None:
        split = self.pipeline_split
        if isinstance(split, str):
            return
        name = f"pipeline_split {list(split)}"
        if len(split) != self.num_stages:
            raise ValueError(
                f"{name} has {len(split)} numbers, and {self.stages_text} makes {self.num_stages} stages. "
                f"Give {self.num_stages} numbers, or pipeline_split: balanced."
            )
        if 0 in split[1:-1]:
            raise ValueError(
                f"{name}: stage {split.index(0, 1) + 1} has no layer. Only the first and the last, which have the "
                "embedding and the output matrix, can do without."
            )

    @property
    def num_stages(self) -> int:
        """Pipeline stages over all ranks."""
        return self.pipeline_parallel * self.virtual_pipeline

    @property
    def stages_text(self) -> str:
        """The degrees that make `num_stages`, for a message."""
        virtual = f" x virtual_pipeline ({self.virtual_pipeline})" if self.virtual_pipeline > 1 else ""
        return f"pipeline_parallel ({self.pipeline_parallel}){virtual}"

    @property
    def world_size(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel * self.context_parallel


def check_layout(
    model: ModelConfig,
    layout: LayoutConfig,
    *,
    seq_length: int | None = None,
    decoder_seq_length: int | None = None,
) -> None:
    """Check that `layout` can cut `model`.

    Raises:
        ValueError: A size is not divisible by a degree; names both, the remainder and the nearest legal degrees.
    """
    tp, pp, dp = layout.tensor_parallel, layout.pipeline_parallel, layout.data_parallel
    sizes = {
        "model.num_attention_heads": model.num_attention_heads,
        "model.num_query_groups": model.num_query_groups,
        "model.ffn_hidden_size": model.ffn_hidden_size,
    }
    if model.moe is not None:
        sizes["model.moe.ffn_hidden_size"] = model.expert_ffn_hidden_size
        sizes["model.moe.shared_ffn_hidden_size"] = model.moe.shared_ffn_hidden_size or tp
    for name, size in sizes.items():
        if size % tp:
            raise ValueError(
                f"{name} ({size}) / layout.tensor_parallel ({tp}) leaves a remainder of {size % tp}. "
                f"{choices('tensor_parallel', size, tp)}."
            )
    if model.vocab_size is not None and model.padded_vocab_size % tp:
        raise ValueError(
            f"model.vocab_size ({model.vocab_size}) padded to a multiple of {model.vocab_multiple} is "
            f"{model.padded_vocab_size}, not divisible by layout.tensor_parallel ({tp}). "
            f"Set model.vocab_multiple: {model.vocab_multiple * tp}."
        )
    for name, length in (("seq_length", seq_length), ("decoder_seq_length", decoder_seq_length)):
        if length is not None and layout.sequence_parallel and length % tp:
            raise ValueError(
                f"{name} ({length}) / layout.tensor_parallel ({tp}) leaves a remainder of {length % tp}. "
                f"Nearest {name}: {multiples(length, tp)}; or set layout.sequence_parallel: false."
            )
    split, layers = layout.pipeline_split, model.total_layers
    name = "model.num_layers + model.decoder_layers" if model.is_encoder_decoder else "model.num_layers"
    if not isinstance(split, str):
        if sum(split) != layers:
            raise ValueError(
                f"layout.pipeline_split {list(split)} deals {sum(split)} layers, and {name} is "
                f"{layers}. Change its numbers so that their sum is {layers}, or use balanced."
            )
    elif layers < layout.num_stages:
        is_virtual = layout.virtual_pipeline > 1 and layers >= pp
        fewer = f"virtual_pipeline {layers // pp}" if is_virtual else f"pipeline_parallel {layers}"
        raise ValueError(
            f"{name} ({layers}) is below layout.{layout.stages_text}, and every stage "
            f"needs a layer. Use {fewer} or less."
        )
    if model.is_gated and layout.shard != "none" and model.hidden_size % dp:
        raise ValueError(
            f"model.hidden_size ({model.hidden_size}) / layout.data_parallel ({dp}) leaves a remainder of "
            f"{model.hidden_size % dp}; the gated MLP is shared by columns. "
            f"{choices('data_parallel', model.hidden_size, dp)}, or set layout.shard: none."
        )
    width = model.expert_ffn_hidden_size
    if model.moe is not None and layout.shard != "none" and (model.hidden_size % dp or width // tp % dp):
        raise ValueError(
            f"model.hidden_size ({model.hidden_size}) and model.moe.ffn_hidden_size ({width}) / "
            f"layout.tensor_parallel ({tp}) must be divisible by layout.data_parallel ({dp}): experts are shared by "
            "columns. Change a degree, or set layout.shard: none."
        )


def multiples(value: int, step: int) -> str:
    """Name the multiples of `step` next to `value`, for a message."""
    below = value // step * step
    return f"{below} or {below + step}" if below else str(step)
