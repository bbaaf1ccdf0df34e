"""Sample indices of one dataset, bit-identical to Megatron-LM's GPTDataset for the same seed.

Units are the sequences of a dataset. For one split:

    document_index  (units x epochs,)   unit numbers in reading order
    sample_index    (samples + 1, 2)    where sample k begins: position in document_index, token offset
    shuffle_index   (samples,)          number of a sample as training counts -> row of sample_index

Sample k covers tokens k*seq_length up to and including (k+1)*seq_length of the units joined in
reading order: neighbours share one token, the label of one's last position being the next one's
first input. Rules after Megatron-LM d98e8a64, megatron/core/datasets/gpt_dataset.py.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from preprocessing.samples.kernels import legacy_shuffle, sample_starts

# A final epoch of which less than this share is used is shuffled apart, so that its documents do
# not displace those of the whole epochs (gpt_dataset.py, _build_document_sample_shuffle_indices).
SEPARATE_BELOW = 0.80


@dataclass(frozen=True)
class EpochPlan:
    """How often a split is read.

    Args:
        tokens_per_epoch: Tokens of its units.
        num_epochs: Times the units are read.
        num_samples: Full samples in all epochs; may be more than asked for.
        samples_per_epoch: Full samples of one epoch.
        samples_before_final: Full samples of all but the last epoch; None unless the last is apart.
    """

    tokens_per_epoch: int
    num_epochs: int
    num_samples: int
    samples_per_epoch: int
    samples_before_final: int | None

    @property
    def has_separate_final_epoch(self) -> bool:
        return self.samples_before_final is not None


@dataclass(frozen=True)
class SampleIndex:
    """The three indices of one split."""

    document_index: npt.NDArray[np.int32]
    sample_index: npt.NDArray[Any]
    shuffle_index: npt.NDArray[Any]
    plan: EpochPlan


def plan_epochs(
    tokens_per_epoch: int,
    seq_length: int,
    num_samples: int | None,
    *,
    extra_tokens: int = 1,
    keeps_partial: bool = False,
) -> EpochPlan:
    """Work out epochs and samples of a split.

    Args:
        num_samples: Samples asked for; None means one epoch.
        extra_tokens: 1 if a sample has the label of its last position too, else 0.
        keeps_partial: Keep the last, partial sample (Megatron-LM's option for validation).

    Raises:
        ValueError: There is no token, so no number of epochs gives a sample.
    """
    total = tokens_per_epoch
    num_epochs = 1
    if num_samples:
        if total == 0:
            raise ValueError("a split without tokens cannot give samples")
        num_epochs = max(1, -(-(num_samples * seq_length + extra_tokens) // total))
    per_epoch = (total - extra_tokens) // seq_length
    before: int | None = None
    if num_epochs > 1 and num_samples is not None:
        before = ((num_epochs - 1) * total - extra_tokens) // seq_length
        from_final = num_samples - before
        if not 0 <= from_final <= per_epoch + 1:
            raise RuntimeError(f"{from_final} samples of the final epoch, which has {per_epoch}; this is a defect")
        if from_final >= int(SEPARATE_BELOW * per_epoch):
            before = None
    quotient = num_epochs * total - extra_tokens
    built = quotient // seq_length
    if keeps_partial:  # in float32, as there
        built = int(np.ceil(np.float32(quotient) / np.float32(seq_length)))
    return EpochPlan(total, num_epochs, max(0, built), max(0, per_epoch), before)


def build_sample_index(
    lengths: npt.NDArray[np.int32],
    units: range,
    *,
    seq_length: int,
    num_samples: int | None,
    seed: int,
    extra_tokens: int = 1,
    keeps_partial: bool = False,
) -> SampleIndex:
    """Build the indices of the units `units` of a dataset.

    Args:
        lengths: (sequences,) tokens of every sequence of the dataset.
        num_samples: Samples asked for; None means one epoch.
    """
    tokens = int(lengths[units.start : units.stop].sum(dtype=np.int64))
    plan = plan_epochs(tokens, seq_length, num_samples, extra_tokens=extra_tokens, keeps_partial=keeps_partial)
    random = np.random.RandomState(seed)
    document_index = _document_index(units, plan, random)
    fits = max(len(document_index), int(lengths.max(initial=0))) <= np.iinfo(np.int32).max
    sample_index = sample_starts(
        lengths, document_index, seq_length, plan.num_samples, extra_tokens, np.int32 if fits else np.int64
    )
    if keeps_partial and plan.num_samples * seq_length + extra_tokens > plan.num_epochs * tokens:
        sample_index[-1] = len(document_index) - 1, int(lengths[document_index[-1]]) - extra_tokens
    return SampleIndex(document_index, sample_index, _shuffle_index(plan, random), plan)


def _document_index(units: range, plan: EpochPlan, random: np.random.RandomState) -> npt.NDArray[np.int32]:
    """Repeat the units for every epoch and shuffle them, a separate final epoch by itself."""
    unit_numbers = np.arange(units.start, units.stop, dtype=np.int32)
    if not plan.has_separate_final_epoch:
        result = np.tile(unit_numbers, plan.num_epochs)
        legacy_shuffle(result, random)
        return result
    whole = np.tile(unit_numbers, plan.num_epochs - 1)
    legacy_shuffle(whole, random)
    final = unit_numbers.copy()
    legacy_shuffle(final, random)
    return np.concatenate([whole, final])


def _shuffle_index(plan: EpochPlan, random: np.random.RandomState) -> npt.NDArray[Any]:
    dtype = np.int64 if plan.num_samples >= np.iinfo(np.uint32).max - 1 else np.uint32
    result = np.arange(plan.num_samples, dtype=dtype)
    head = plan.num_samples if plan.samples_before_final is None else plan.samples_before_final
    legacy_shuffle(result[:head], random)
    if head < plan.num_samples:
        legacy_shuffle(result[head:], random)
    return result
