"""Settings of the stages that make datasets of datasets: merge, split, import."""

from typing import Literal

from pydantic import Field, model_validator

from contracts.configuration import Settings, execution
from preprocessing.config import Split


class MergeConfig(Settings):
    """Join datasets into one pair of `.bin` and `.idx`."""

    datasets: tuple[str, ...] = execution(
        (), description="Dataset artifacts or .bin/.idx prefixes in the order to join them, where no inputs are given."
    )


class SplitConfig(Settings):
    """Take one part of a dataset, whole documents each."""

    dataset: str | None = execution(None, description="Dataset artifact or .bin/.idx prefix, where no input is given.")
    by: Literal["hash", "position", "subset"] = Field(
        "hash",
        description="What decides: the hash of a document (it stays in its part when data are appended), its position "
        "in the dataset, or its subset.",
    )
    weights: Split = Field("98,1,1", description="Shares of train, valid and test (by hash and position).")
    part: str = Field("train", min_length=1, description="Part to take: train, valid, test; or the name of a subset.")
    seed: int = Field(1234, ge=0, lt=2**63, description="Another seed gives another division by hash.")

    @model_validator(mode="after")
    def _part_is_known(self) -> "SplitConfig":
        if self.by != "subset" and self.part not in ("train", "valid", "test"):
            raise ValueError(f"part is {self.part!r}; by {self.by} there are train, valid and test.")
        return self


class ImportConfig(Settings):
    """Take over datasets that another program wrote."""

    sources: tuple[str, ...] = execution(
        (),
        description="Prefixes of .bin/.idx (Megatron-LM, GPT-NeoX, datatrove), .ds files (datatrove), or folders of "
        "them.",
    )
    tokenizer: str | None = execution(
        None, description="The tokenizer that made them: a copy is kept, and every id is checked against it."
    )
    eod_token: str | None = Field(None, description="End-of-document token by name, where the tokenizer's is another.")
