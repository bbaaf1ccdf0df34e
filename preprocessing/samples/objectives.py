"""What samples are for: settings of fill-in-the-middle, BERT and T5 samples.

They are part of an index, so that training reads what the index was built for.
"""

from typing import Literal

from pydantic import Field

from contracts.configuration import Settings

Objective = Literal["causal", "fim", "bert", "t5", "sft"]


class FimConfig(Settings):
    """Predict the next token, the middle of documents moved to the end (Bavarian et al. 2022, arXiv 2207.14255)."""

    rate: float = Field(0.5, ge=0, le=1, description="Share of documents that are rearranged.")
    spm_rate: float = Field(
        0.5, ge=0, le=1, description="Of those, the share in suffix-prefix-middle order; else prefix-suffix-middle."
    )


class BertConfig(Settings):
    """Predict masked tokens and the order of two segments (Devlin et al. 2019, arXiv 1810.04805)."""

    pairs: Literal["nsp", "sop", "none"] = Field(
        "nsp",
        description="nsp: half of the second segments come from another document; sop: half of the pairs are swapped "
        "(Lan et al. 2020, arXiv 1909.11942); none: one segment, as RoBERTa.",
    )
    masking: Literal["token", "whole_word", "span"] = Field(
        "whole_word",
        description="Unit of masking. span: runs of words of a geometric length (Joshi et al. 2020, arXiv 1907.10529).",
    )
    mask_prob: float = Field(0.15, gt=0, lt=1, description="Share of tokens to predict.")
    short_seq_prob: float = Field(0.1, ge=0, le=1, description="Share of samples shorter than seq_length.")


class SftConfig(Settings):
    """Predict what is said in conversations, not what is read."""

    packs: bool = Field(
        True,
        description="Put several conversations into a row, none of which sees another; false: one in each row.",
    )


class T5Config(Settings):
    """Predict spans that were taken out (Raffel et al. 2020, arXiv 1910.10683)."""

    noise_density: float = Field(0.15, gt=0, lt=1, description="Share of tokens that are taken out.")
    mean_span_length: float = Field(3.0, ge=1, description="Mean length of a span, in tokens.")
