"""How a model is cut over ranks, and the arithmetic that must hold between the two.

Nothing here imports torch or starts a process.
"""

import math
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
        "pipeline_schedule": "schedule",
        "cp": "context_parallel",
        "context_parallel_size": "context_parallel",
        "ep": "expert_parallel",
        "expert_model_parallel_size": "expert_parallel",
    }

    tensor_parallel: PositiveInt = Field(1, description="Ranks that share each layer's matrices.")
    pipeline_parallel: PositiveInt = Field(1, description="Ranks that the layers are dealt to, in stages.")
    data_parallel: PositiveInt = execution(1, description="Ranks that share the rows of a global batch.")
    context_parallel: PositiveInt = execution(
        1, description="Ranks that share each sequence, for long ones: each holds two chunks, and keys go round a ring."
    )
    expert_parallel: PositiveInt = execution(
        1,
        description="Ranks, of data_parallel x context_parallel, that a layer's experts are dealt to; tokens travel.",
    )
    virtual_pipeline: PositiveInt = execution(
        1, description="Stages per rank, interleaved: a shorter pipeline bubble for more messages and activations."
    )
    schedule: Literal["1f1b", "zero_bubble", "zbv"] = execution(
        "1f1b",
        description="Order of the passes through a pipeline. 1f1b is interleaved where virtual_pipeline is above 1. "
        "zero_bubble and zbv split backward in two and fill the bubble with the half that nobody waits for; "
        "zbv gives each rank two stages, in the shape of a V.",
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
        "optimizer",
        description="What the ranks of data_parallel x context_parallel share instead of copying (ZeRO 0, 1, 2, 3).",
    )
    shard_ranks: PositiveInt | None = execution(
        None,
        description="Ranks that share one copy of what shard names, such as those of a node; the copies sum their "
        "gradients. Empty: all ranks of data_parallel x context_parallel.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.virtual_pipeline > 1 and self.pipeline_parallel == 1:
            raise ValueError(
                f"virtual_pipeline ({self.virtual_pipeline}) interleaves the stages of several ranks, and "
                "pipeline_parallel is 1. Use virtual_pipeline: 1, or pipeline_parallel: 2 or more."
            )
        self._check_schedule()
        if self.schedule != "1f1b" and self.shard in ("gradients", "parameters"):
            raise ValueError(
                f"shard: {self.shard} sums gradients after a backward pass, and schedule: {self.schedule} makes it in "
                "two halves. Use shard: optimizer, or schedule: 1f1b."
            )
        self._check_split()
        self._check_data_ranks()
        return self

    def _check_schedule(self) -> None:
        if self.schedule != "1f1b" and self.pipeline_parallel == 1:
            raise ValueError(
                f"schedule: {self.schedule} is an order of passes through a pipeline, and pipeline_parallel is 1. "
                "Use pipeline_parallel: 2 or more, or leave schedule out."
            )
        if self.schedule == "zbv" and self.virtual_pipeline not in (1, 2):
            raise ValueError(
                f"schedule: zbv has two stages on each rank, not virtual_pipeline ({self.virtual_pipeline}). "
                "Leave virtual_pipeline out, or use schedule: zero_bubble."
            )

    def _check_data_ranks(self) -> None:
        ranks, shared, dealt = self.data_ranks, self.shard_ranks, self.expert_parallel
        if shared is not None and self.shard == "none" and shared > 1:
            raise ValueError(
                f"shard_ranks ({shared}) share nothing with shard: none. Use shard: optimizer, or leave it."
            )
        for name, value in (("shard_ranks", shared or 1), ("expert_parallel", dealt)):
            if ranks % value:
                raise ValueError(
                    f"{self.data_text} = {ranks} / {name} ({value}) leaves a remainder of {ranks % value}. "
                    f"{choices(name, ranks, value)}. Or make data_parallel a multiple of {value}."
                )
        if shared is not None and shared % dealt and dealt % shared:
            raise ValueError(
                f"shard_ranks ({shared}) and expert_parallel ({dealt}): one must be a multiple of the other. "
                f"{choices('expert_parallel', shared, dealt)}."
            )

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
        return self.pipeline_parallel * self.stages_per_rank

    @property
    def stages_per_rank(self) -> int:
        return 2 if self.schedule == "zbv" else self.virtual_pipeline

    @property
    def goes_in_rounds(self) -> bool:
        """The schedule takes micro-batches in equal rounds of as many as there are ranks, or a few more."""
        return self.schedule == "zero_bubble" or (self.schedule == "1f1b" and self.virtual_pipeline > 1)

    @property
    def axes_text(self) -> str:
        """Every degree that is used, for a reader."""
        degrees = {"tensor": self.tensor_parallel, "pipeline": self.pipeline_parallel, "data": self.data_parallel}
        if self.context_parallel > 1:
            degrees["context"] = self.context_parallel
        text = " x ".join(f"{axis} {degree}" for axis, degree in degrees.items())
        if self.expert_parallel > 1:
            text += f"; experts over {self.expert_parallel}"
        if self.virtual_pipeline > 1:
            text += f"; {self.virtual_pipeline} stages a rank"
        return text

    @property
    def stages_text(self) -> str:
        """The degrees that make `num_stages`, for a message."""
        virtual = f" x virtual_pipeline ({self.virtual_pipeline})" if self.virtual_pipeline > 1 else ""
        virtual = " x 2 (schedule: zbv)" if self.schedule == "zbv" else virtual
        return f"pipeline_parallel ({self.pipeline_parallel}){virtual}"

    @property
    def world_size(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel * self.data_ranks

    @property
    def degrees_text(self) -> str:
        """The degrees that make `world_size`, for a message."""
        names = ["pipeline_parallel", "data_parallel", "tensor_parallel"]
        names += ["context_parallel"] if self.context_parallel > 1 else []
        return " x ".join(f"layout.{name} ({getattr(self, name)})" for name in names)

    @property
    def data_ranks(self) -> int:
        """Ranks that see different tokens with the same parameters."""
        return self.data_parallel * self.context_parallel

    @property
    def data_text(self) -> str:
        """The degrees that make `data_ranks`, for a message."""
        context = f" x layout.context_parallel ({self.context_parallel})" if self.context_parallel > 1 else ""
        return f"layout.data_parallel ({self.data_parallel}){context}"

    @property
    def shard_parts(self) -> int:
        """Data ranks that share one copy of a parameter's state."""
        return 1 if self.shard == "none" else self.shard_ranks or self.data_ranks

    @property
    def shard_copies(self) -> int:
        return self.data_ranks // self.shard_parts

    @property
    def expert_parts(self) -> int:
        """Data ranks that share one copy of the state of an expert's parameters."""
        return max(1, self.shard_parts // self.expert_parallel)

    @property
    def expert_copies(self) -> int:
        return self.data_ranks // (self.expert_parallel * self.expert_parts)

    @property
    def sequence_unit(self) -> int:
        """What the length of a row must be a multiple of."""
        parts = self.tensor_parallel if self.sequence_parallel else 1
        return self.context_parallel * math.lcm(2, parts) if self.context_parallel > 1 else parts


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
    tp, pp = layout.tensor_parallel, layout.pipeline_parallel
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
        if length is not None:
            _check_length(name, length, layout)
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
        if layout.schedule == "zbv":
            fewer = "schedule: zero_bubble" if layers >= pp else f"pipeline_parallel {layers // 2}"
        raise ValueError(
            f"{name} ({layers}) is below layout.{layout.stages_text}, and every stage "
            f"needs a layer. Use {fewer} or less."
        )
    _check_parts(model, layout)
    _check_experts(model, layout)


def _check_length(name: str, length: int, layout: LayoutConfig) -> None:
    unit, tp, cp = layout.sequence_unit, layout.tensor_parallel, layout.context_parallel
    if length % unit == 0:
        return
    if cp == 1:
        raise ValueError(
            f"{name} ({length}) / layout.tensor_parallel ({tp}) leaves a remainder of {length % tp}. "
            f"Nearest {name}: {multiples(length, tp)}; or set layout.sequence_parallel: false."
        )
    shared = f", and each rank's part is cut over layout.tensor_parallel ({tp})" if unit > 2 * cp else ""
    raise ValueError(
        f"{name} ({length}) is no multiple of {unit}: layout.context_parallel ({cp}) gives each rank two of "
        f"{2 * cp} equal chunks{shared}. Nearest {name}: {multiples(length, unit)}."
    )


def _check_parts(model: ModelConfig, layout: LayoutConfig) -> None:
    """Matrices with fused blocks of rows are shared by columns, and these must be as many for every rank."""
    tp, parts, ep = layout.tensor_parallel, layout.shard_parts, layout.expert_parallel
    name, cure = f"layout.shard_ranks ({parts})", choices("shard_ranks", model.hidden_size, parts)
    if layout.shard_ranks is None:
        name = layout.data_text
        cure = choices("data_parallel", model.hidden_size, parts) if layout.context_parallel == 1 else "Change a degree"
    if model.is_gated and model.hidden_size % parts:
        raise ValueError(
            f"model.hidden_size ({model.hidden_size}) / {name} leaves a remainder of "
            f"{model.hidden_size % parts}; the gated MLP is shared by columns. {cure}, or set layout.shard: none."
        )
    width = model.expert_ffn_hidden_size
    shared = layout.expert_parts if ep > 1 else parts
    if model.moe is not None and (model.hidden_size % shared or width // tp % shared):
        raise ValueError(
            f"model.hidden_size ({model.hidden_size}) and model.moe.ffn_hidden_size ({width}) / "
            f"layout.tensor_parallel ({tp}) must be divisible by {name if ep == 1 else shared}: experts are shared by "
            "columns. Change a degree, or set layout.shard: none."
        )


def _check_experts(model: ModelConfig, layout: LayoutConfig) -> None:
    ep = layout.expert_parallel
    if ep == 1:
        return
    if model.moe is None:
        raise ValueError(
            f"layout.expert_parallel ({ep}) deals experts, and the model has none. Use 1, or set model.moe."
        )
    experts = model.moe.num_experts
    if experts % ep:
        raise ValueError(
            f"model.moe.num_experts ({experts}) / layout.expert_parallel ({ep}) leaves a remainder of {experts % ep}. "
            f"{choices('expert_parallel', experts, ep)}."
        )


def multiples(value: int, step: int) -> str:
    """Name the multiples of `step` next to `value`, for a message."""
    below = value // step * step
    return f"{below} or {below + step}" if below else str(step)
