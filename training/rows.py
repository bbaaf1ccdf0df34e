"""Rows of a training run from prepared samples: what the model reads, what it is to say, where documents end.

In: samples of `preprocessing`, settings. Out: a `Source`. Never imports torch. Letters: n rows, s tokens of a row.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from contracts.errors import ConfigError
from preprocessing.dataset.token_dataset import TokenDataset
from preprocessing.samples.bert import NO_LABEL, BertSamples
from preprocessing.samples.conversations import ConversationSamples
from preprocessing.samples.fim import FimSamples
from preprocessing.samples.gpt import DocumentSamples, DocumentSpan, GPTSamples
from preprocessing.samples.opening import open_causal_samples, open_samples
from preprocessing.samples.t5 import T5Samples
from training.config import IGNORE_INDEX, PretrainConfig
from training.curriculum import Curriculum

if TYPE_CHECKING:
    from training.data import Source

PADDING = -1  # number of the document of padding, which no token sees
Ids = Sequence[int] | npt.NDArray[Any]


def open_rows(config: PretrainConfig, index: Path, split: str) -> "tuple[Source, int]":
    """Open the rows of one split of an index, as the run's settings want them.

    Returns:
        The rows, and how many samples the index has.

    Raises:
        ConfigError: The index was built for another kind of model, or does not tell documents apart.
    """
    if config.sft is not None:
        conversations = open_samples(index, split)
        if not isinstance(conversations, ConversationSamples):
            raise ConfigError(f"{index} is no index of conversations. Build one with index.objective: sft.")
        return conversations, len(conversations)
    if not config.model.causal:
        return _open_encoder_rows(config, index, split)
    opened = open_causal_samples(index, split)
    samples = CurriculumSamples(opened, config.curriculum) if split == "train" and config.phases else opened
    if not config.sees_documents:
        source: Source = samples
        return source, len(opened)
    if not isinstance(opened, GPTSamples) or isinstance(samples, FimSamples):
        raise ConfigError(
            f"{index} has samples whose tokens do not stand in the order of their documents; "
            "reset_position_ids, reset_attention_mask and eod_mask_loss need plain causal samples."
        )
    documents = DocumentRows(
        samples,
        resets_positions=config.reset_position_ids,
        resets_attention=config.reset_attention_mask,
        masks_ends=config.eod_mask_loss,
    )
    return documents, len(opened)


class CurriculumSamples:
    """The rows of a run in phases: row numbers of the run to samples of the index and their parts.

    Rows that are read together must be of one length, as those of a global batch are.
    """

    def __init__(self, samples: GPTSamples | FimSamples, curriculum: Curriculum) -> None:
        self.samples, self.curriculum = samples, curriculum
        self.datasets: Sequence[TokenDataset] = samples.datasets if isinstance(samples, GPTSamples) else ()

    def tokens(self, sample_ids: Ids) -> npt.NDArray[Any]:
        """Return (n, s + 1), int64; s is the row length of the phase."""
        places = [self.curriculum.place(int(row)) for row in sample_ids]
        length = self.curriculum.phase_at(int(sample_ids[0])).seq_length
        whole = self.samples.tokens([sample for sample, _ in places])
        if whole.shape[1] == length + 1:
            return whole
        return np.stack([row[part * length :][: length + 1] for row, (_, part) in zip(whole, places, strict=True)])

    def documents_of(self, sample: int) -> list[DocumentSpan]:
        """Say which parts of which documents a row holds, in order; together s + 1 tokens."""
        if not isinstance(self.samples, GPTSamples):
            raise TypeError("these samples do not stand in the order of their documents")
        number, part = self.curriculum.place(sample)
        length = self.curriculum.phase_at(sample).seq_length
        return _cut(self.samples.documents_of(number), part * length, part * length + length + 1)


def _cut(spans: Sequence[DocumentSpan], first: int, stop: int) -> list[DocumentSpan]:
    """Return what stands in tokens [first, stop) of a sample."""
    found, begin = [], 0
    for span in spans:
        skipped, end = max(0, first - begin), min(span.length, stop - begin)
        if end > skipped:
            found.append(replace(span, offset=span.offset + skipped, length=end - skipped))
        begin += span.length
    return found


def _open_encoder_rows(config: PretrainConfig, index: Path, split: str) -> "tuple[Source, int]":
    samples = open_samples(index, split)
    if config.model.is_encoder_decoder and isinstance(samples, T5Samples):
        return SpanRows(samples, config.seq_length, config.decoder_length), len(samples)
    if not config.model.is_encoder_decoder and isinstance(samples, BertSamples):
        rows = MaskedRows(samples, has_types=config.model.token_types > 1, has_pairs=config.model.pair_head)
        return rows, len(samples)
    needed = "t5" if config.model.is_encoder_decoder else "bert"
    raise ConfigError(
        f"{index} is no index of {needed} samples, which model.family: {config.model.family} needs. "
        f"Build one with index.objective: {needed}."
    )


class MaskedRows:
    """Rows of an encoder: tokens of which some are hidden, and what they were.

    Args:
        samples: Rows of s tokens.
        has_types: The model tells the first segment from the second.
        has_pairs: It says whether they belong as they stand.
    """

    def __init__(self, samples: BertSamples, *, has_types: bool, has_pairs: bool) -> None:
        self.samples, self.has_types, self.has_pairs = samples, has_types, has_pairs

    def rows(self, sample_ids: Ids) -> dict[str, npt.NDArray[Any]]:
        """Return inputs, labels, documents where a row has padding, token_types (n, s) and pair_labels (n,), int64."""
        batch = self.samples.batch(sample_ids)
        found: dict[str, npt.NDArray[Any]] = {
            "inputs": batch.tokens,
            "labels": np.where(batch.labels == NO_LABEL, IGNORE_INDEX, batch.labels),
        }
        if not batch.is_token.all():
            found["documents"] = np.where(batch.is_token, 0, PADDING)
        if self.has_types:
            found["token_types"] = batch.token_types
        if self.has_pairs:
            found["pair_labels"] = batch.is_other.astype(np.int64)
        return found


class SpanRows:
    """Rows of an encoder and a decoder: text whose spans are taken out, and the spans.

    Args:
        samples: Rows of at most s tokens for the encoder and t for the decoder.
        seq_length: s.
        decoder_length: t.
    """

    def __init__(self, samples: T5Samples, seq_length: int, decoder_length: int) -> None:
        self.samples, self.seq_length, self.decoder_length = samples, seq_length, decoder_length

    def rows(self, sample_ids: Ids) -> dict[str, npt.NDArray[Any]]:
        """Return inputs (n, s), labels and decoder_inputs (n, t), and documents (n, s) if there is padding, int64."""
        batch = self.samples.batch(sample_ids)
        found = {
            "inputs": _padded(batch.encoder_tokens, self.seq_length, 0),
            "labels": _padded(batch.labels, self.decoder_length, IGNORE_INDEX),
            "decoder_inputs": _padded(batch.decoder_tokens, self.decoder_length, 0),
        }
        if batch.encoder_tokens.shape[1] < self.seq_length:
            found["documents"] = _padded(np.zeros_like(batch.encoder_tokens), self.seq_length, PADDING)
        return found


def _padded(rows: npt.NDArray[Any], length: int, value: int) -> npt.NDArray[Any]:
    return np.pad(rows, ((0, 0), (0, length - rows.shape[1])), constant_values=value)


class DocumentRows:
    """Causal rows that know where documents begin.

    The bounds are those of the dataset, not of a token: documents without an end-of-document token are
    told apart, and one that stands inside a document bounds nothing.

    Args:
        samples: Rows of s + 1 tokens.
        resets_positions: Positions count from 0 in every document; the first of a row is often a later part of one.
        resets_attention: Tokens see only their own document.
        masks_ends: No loss where a document's last token would predict the next document's first.
    """

    def __init__(
        self, samples: DocumentSamples, *, resets_positions: bool, resets_attention: bool, masks_ends: bool
    ) -> None:
        self.samples = samples
        self.resets_positions, self.resets_attention, self.masks_ends = resets_positions, resets_attention, masks_ends

    def rows(self, sample_ids: Ids) -> dict[str, npt.NDArray[Any]]:
        """Return inputs, labels and, as asked, positions and documents, each (n, s), int64."""
        tokens = self.samples.tokens(sample_ids)
        numbers = np.stack([self._documents(int(sample)) for sample in sample_ids])
        labels = tokens[:, 1:].copy()
        if self.masks_ends:
            labels[numbers[:, 1:] != numbers[:, :-1]] = IGNORE_INDEX
        found = {"inputs": tokens[:, :-1], "labels": labels}
        if self.resets_positions:
            found["positions"] = positions_in_runs(numbers[:, :-1])
        if self.resets_attention:
            found["documents"] = numbers[:, :-1]
        return found

    def _documents(self, sample: int) -> npt.NDArray[np.int64]:
        """Number, within the row, of the document of each token: (s + 1,)."""
        lengths = [span.length for span in self.samples.documents_of(sample)]
        return np.repeat(np.arange(len(lengths), dtype=np.int64), lengths)


def positions_in_runs(numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Count from 0 in every run of equal numbers: (n, s) -> the same."""
    places = np.arange(numbers.shape[1], dtype=np.int64)
    starts = np.zeros(numbers.shape, dtype=np.int64)
    starts[:, 1:] = np.where(numbers[:, 1:] != numbers[:, :-1], places[1:], 0)
    return places - np.maximum.accumulate(starts, axis=1)
