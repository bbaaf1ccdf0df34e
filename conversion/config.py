"""Settings of the reshape stage."""

from typing import Literal, Self

from pydantic import Field, PositiveInt, model_validator

from contracts.configuration import Settings, added, execution


class ReshapeConfig(Settings):
    """Move a checkpoint to another parallel layout or format."""

    checkpoint: str | None = execution(None, description="Checkpoint to read, where no artifact is given as input.")
    step: int | None = Field(None, ge=0, description="Step to take. Empty: the newest good one.")
    to: Literal["native", "huggingface", "megatron"] = Field(
        "native",
        description="native: Shardline's own sharded checkpoint; huggingface: safetensors with a config.json; "
        "megatron: mp_rank_* folders of Megatron-LM.",
    )
    tensor_parallel: PositiveInt = Field(1, description="Tensor-parallel degree of a native or Megatron target.")
    pipeline_parallel: PositiveInt = Field(1, description="Pipeline-parallel degree of a native or Megatron target.")
    data_parallel: PositiveInt = Field(
        1, description="Data-parallel degree of the native target: the files it is cut into."
    )
    dtype: Literal["keep", "float32", "bf16", "float16"] = Field(
        "keep", description="Type of the written weights; keep moves the bits as they are."
    )
    optimizer: bool = Field(
        True, description="Carry the optimizer state over; Hugging Face files have no place for it."
    )
    average: tuple[str, ...] = execution(
        (), description="More checkpoints of the same model: what is written is the mean of the weights of all."
    )
    vocab_size: PositiveInt | None = added(
        None,
        description="Tokens of the written model's vocabulary, where they are others: fewer leave rows out (such as "
        "Megatron's padding), more add rows of zeros for tokens to come. Default: as they are.",
    )
    shard_bytes: PositiveInt = Field(
        5 * 10**9, description="Largest safetensors file of a Hugging Face target, in bytes."
    )
    workers: PositiveInt = execution(2, description="Threads that copy and compare; each holds one slice in memory.")
    # The checks put numbers into the result, so asking for one makes another artifact: none is said to be
    # checked that was not.
    verify: bool = added(True, description="Read the result back and compare every tensor with the source.")
    logits: bool = added(
        False,
        description="Also run both models on one batch and compare the logits (needs transformers for huggingface).",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        degrees = self.tensor_parallel * self.pipeline_parallel * self.data_parallel
        if self.to == "huggingface" and degrees > 1:
            raise ValueError(
                f"to: huggingface writes whole tensors, so tensor_parallel ({self.tensor_parallel}), pipeline_parallel "
                f"({self.pipeline_parallel}) and data_parallel ({self.data_parallel}) must be 1."
            )
        if self.logits and (self.average or self.vocab_size is not None):
            raise ValueError(
                "logits compares a model with itself; average and vocab_size make another. Leave logits out."
            )
        if self.to == "megatron" and self.data_parallel > 1:
            raise ValueError(
                "to: megatron writes one file for all data-parallel ranks; "
                f"data_parallel ({self.data_parallel}) must be 1."
            )
        return self
