"""BERT's samples: pairs of segments of sentences, with some tokens masked.

[CLS] A [SEP] B [SEP] (or [CLS] A [SEP]), after Devlin et al. 2019, arXiv 1810.04805, appendix A. What is
drawn for a sample depends on the seed and its number alone, so it is the same at every layout and
after every resume.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from contracts.errors import InputError
from preprocessing.dataset.token_dataset import TokenDataset
from preprocessing.samples.gpt import GPTSamples
from preprocessing.samples.index_files import open_index
from preprocessing.samples.objectives import BertConfig
from preprocessing.samples.special_tokens import BertTokens, bert_tokens

NO_LABEL = -1
KEPT, RANDOM = 0.1, 0.1  # of the tokens to predict, so many stay as they are or become another
SPAN_STOP, SPAN_WORDS = 0.2, 10  # SpanBERT, section 3.1: geometric with p = 0.2, at most 10 words
TRIES = 8  # for a second segment from another document

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class BertBatch:
    """Rows for BERT; all (rows, seq_length), int64, but `is_other`: (rows,).

    Args:
        tokens: Ids with [CLS], [SEP], masks, and [PAD] at the end.
        token_types: 0 in the first segment, 1 in the second; 0 in padding.
        is_token: False in padding.
        labels: The id to predict where one was masked, else NO_LABEL.
        is_other: True if the second segment does not follow the first (nsp), or the two are swapped (sop).
    """

    tokens: Ids
    token_types: Ids
    is_token: npt.NDArray[np.bool_]
    labels: Ids
    is_other: npt.NDArray[np.bool_]


class _Pair(NamedTuple):
    """Two segments of a sample, the generator of what is still to be drawn, and whether they do not belong so."""

    a: Ids
    b: Ids
    random: np.random.Generator
    is_other: bool


class BertSamples:
    """Samples of one split of a BERT index.

    Args:
        index_path: An index artifact, or a folder that `build_index` filled.
        split: "train", "valid" or "test".
        datasets: The datasets it was made for, in its order. Empty: where its manifest says.

    Raises:
        ConfigError: There is no such index or split, or the tokenizer lacks [CLS], [SEP], [MASK] or [PAD].
        InputError: The datasets are not those of the index.
    """

    def __init__(
        self, index_path: str | Path, split: str = "train", datasets: Sequence[str | Path | TokenDataset] = ()
    ) -> None:
        self._index = open_index(Path(index_path), split, datasets, kinds=("bert",))
        self.seq_length: int = self._index.description["seq_length"]
        self.num_samples = self._index.num_samples
        self._seed: int = self._index.description["seed"]
        self._objective = BertConfig.model_validate(self._index.objective["settings"])
        self._ids = bert_tokens(self._index.datasets[0].tokenizer)
        self._windows: GPTSamples | None = None
        self._rows: dict[int, npt.NDArray[Any]] = {}
        if self._objective.pairs == "none":
            self._windows = GPTSamples(index_path, split, self._index.datasets, kinds=("bert",))
        else:
            self._rows = {part: self._index.array(part, "sentence_index") for part in self._index.parts}

    def __len__(self) -> int:
        return self.num_samples

    def batch(self, sample_ids: Sequence[int] | npt.NDArray[Any]) -> BertBatch:
        """Return samples by number.

        Raises:
            IndexError: A number is not in [0, num_samples).
        """
        shape = (len(sample_ids), self.seq_length)
        tokens = np.full(shape, self._ids.pad, dtype=np.int64)
        types = np.zeros(shape, dtype=np.int64)
        labels = np.full(shape, NO_LABEL, dtype=np.int64)
        is_token = np.zeros(shape, dtype=bool)
        is_other = np.zeros(len(sample_ids), dtype=bool)
        for row, (a, b, random, is_swapped) in enumerate(self._pairs(sample_ids)):
            is_other[row] = is_swapped
            joined = self._joined(a, b)
            masked, wanted = mask_tokens(joined, self._objective, self._ids, random)
            size = len(joined)
            tokens[row, :size], labels[row, :size], is_token[row, :size] = masked, wanted, True
            types[row, len(a) + 2 : size] = 1
        return BertBatch(tokens, types, is_token, labels, is_other)

    def _pairs(self, sample_ids: Sequence[int] | npt.NDArray[Any]) -> Iterator[_Pair]:
        """Yield the segments of each sample."""
        ids = np.asarray(sample_ids, dtype=np.int64)
        parts, inner = self._index.locate(ids)
        windows = self._windows.tokens(ids) if self._windows is not None else None
        nothing = np.empty(0, np.int64)
        for row, number in enumerate(ids.tolist()):
            random = np.random.default_rng((self._seed, number))
            if windows is not None:
                yield _Pair(windows[row], nothing, random, False)
            else:
                yield self._pair(int(parts[row]), int(inner[row]), random)

    def _pair(self, part: int, number: int, random: np.random.Generator) -> _Pair:
        first, stop, target = (int(value) for value in self._rows[part][number])
        dataset = self._dataset(part)
        middle = first + int(random.integers(1, stop - first))
        a, b = _sentences(dataset, first, middle), _sentences(dataset, middle, stop)
        is_other = bool(random.random() < 0.5)
        if is_other and self._objective.pairs == "sop":
            a, b = b, a
        elif is_other:
            b = self._from_another_document(part, first, random)
        a, b = _cut(a, b, target, random)
        return _Pair(a, b, random, is_other)

    def _dataset(self, part: int) -> TokenDataset:
        return self._index.datasets[self._index.dataset_number(part)]

    def _from_another_document(self, part: int, first: int, random: np.random.Generator) -> Ids:
        """Return sentences of another document of the part."""
        rows, dataset = self._rows[part], self._dataset(part)
        home = dataset.place_in_document(first, 0)[0]
        for _ in range(TRIES):
            start, stop, _target = (int(value) for value in rows[int(random.integers(len(rows)))])
            if dataset.place_in_document(start, 0)[0] != home:
                return _sentences(dataset, int(random.integers(start, stop)), stop)
        raise InputError(
            f"{dataset.path}: {TRIES} sentences drawn at random were all of document {home}, so there is no second "
            "segment from elsewhere. Use more documents, or objective.pairs: sop."
        )

    def _joined(self, a: Ids, b: Ids) -> Ids:
        parts = [np.array([self._ids.cls]), a, np.array([self._ids.sep])]
        if self._objective.pairs != "none":
            parts += [b, np.array([self._ids.sep])]
        return np.concatenate(parts)


def mask_tokens(tokens: Ids, objective: BertConfig, ids: BertTokens, random: np.random.Generator) -> tuple[Ids, Ids]:
    """Choose tokens to predict and hide them: 80 % become [MASK], 10 % another token, 10 % stay.

    Args:
        tokens: (tokens,) of one sample, [CLS] and [SEP] in place; special tokens are never chosen.

    Returns:
        masked, labels: (tokens,) what the model sees; the id to predict, else NO_LABEL.
    """
    chosen = _chosen(tokens, objective, ids, random)
    masked, labels = tokens.copy(), np.full(len(tokens), NO_LABEL, dtype=np.int64)
    places = np.flatnonzero(chosen >= 0)
    labels[places] = tokens[places]
    # A span shares one fate; elsewhere every token has its own.
    fates = random.random(int(chosen.max(initial=-1)) + 1)[chosen[places]]
    masked[places[fates >= KEPT + RANDOM]] = ids.mask
    replaced = places[(fates >= KEPT) & (fates < KEPT + RANDOM)]
    masked[replaced] = ids.ordinary[random.integers(len(ids.ordinary), size=len(replaced))]
    return masked, labels


def _chosen(tokens: Ids, objective: BertConfig, ids: BertTokens, random: np.random.Generator) -> Ids:
    """Return for each token which fate it has, numbered from 0; -1 where it is not to be predicted."""
    is_maskable = ids.is_ordinary[tokens]
    wanted = max(1, round(len(tokens) * objective.mask_prob))
    fates = np.full(len(tokens), -1, dtype=np.int64)
    begins = is_maskable.copy()
    if objective.masking != "token":
        goes_on = ids.continues_word[tokens] & is_maskable
        goes_on[1:] &= is_maskable[:-1]
        begins &= ~goes_on
    starts = np.flatnonzero(begins)
    ends = np.array([_end(start, begins, is_maskable) for start in starts.tolist()], dtype=np.int64)
    taken = fate = 0
    for unit in random.permutation(len(starts)).tolist():
        if taken >= wanted:
            break
        words = min(SPAN_WORDS, int(random.geometric(SPAN_STOP))) if objective.masking == "span" else 1
        start, stop = _stretch(starts, ends, unit, words, room=wanted - taken)
        if (fates[start:stop] >= 0).any() or (taken and stop - start > wanted - taken):
            continue
        fates[start:stop] = fate if objective.masking == "span" else np.arange(fate, fate + stop - start)
        fate += 1 if objective.masking == "span" else stop - start
        taken += stop - start
    return fates


def _stretch(starts: Ids, ends: Ids, first: int, words: int, *, room: int) -> tuple[int, int]:
    """Return the bounds of up to so many words from the first on, in one piece and within `room` tokens."""
    last = first
    while (
        last + 1 < min(first + words, len(starts))
        and starts[last + 1] == ends[last]
        and ends[last + 1] - starts[first] <= room
    ):
        last += 1
    return int(starts[first]), int(ends[last])


def _end(start: int, begins: npt.NDArray[np.bool_], is_maskable: npt.NDArray[np.bool_]) -> int:
    stop = start + 1
    while stop < len(begins) and is_maskable[stop] and not begins[stop]:
        stop += 1
    return stop


def _sentences(dataset: TokenDataset, first: int, stop: int) -> Ids:
    parts = [np.empty(0, np.int64), *(dataset.sequence(number) for number in range(first, stop))]
    return np.concatenate(parts).astype(np.int64)


def _cut(a: Ids, b: Ids, room: int, random: np.random.Generator) -> tuple[Ids, Ids]:
    """Shorten the longer segment, at its front or end by chance, a token at a time, until both fit."""
    while len(a) + len(b) > room:
        surplus = len(a) + len(b) - room
        difference = abs(len(a) - len(b))
        count = min(surplus, difference) or 1
        front = int(random.binomial(count, 0.5))
        if len(a) > len(b):
            a = a[front : len(a) - (count - front)]
        else:
            b = b[front : len(b) - (count - front)]
    return a, b
