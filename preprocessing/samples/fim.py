"""Fill-in-the-middle: documents of causal samples whose middle is moved to the end.

After Bavarian et al. 2022, arXiv 2207.14255: a document is cut at two places, evenly drawn, into prefix,
middle and suffix, and written as <PRE> prefix <SUF> suffix <MID> middle (PSM) or
<PRE> <SUF> suffix <MID> prefix middle (SPM). It is done on tokens, inside each sample: the part of a
document that a sample holds is rearranged as if it were the whole. The three marks make a row longer;
what exceeds it is cut off at its end. What is drawn depends on the seed and the sample's number alone.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from preprocessing.dataset.token_dataset import TokenDataset
from preprocessing.samples.gpt import DocumentSpan, GPTSamples
from preprocessing.samples.objectives import FimConfig
from preprocessing.samples.special_tokens import FimTokens, fim_tokens

Ids = npt.NDArray[np.int64]


class FimSamples:
    """Samples of one split of a fill-in-the-middle index: rows of `seq_length + 1` tokens.

    Args:
        index_path: An index artifact, or a folder that `build_index` filled.
        split: "train", "valid" or "test".
        datasets: The datasets it was made for, in its order. Empty: where its manifest says.

    Raises:
        ConfigError: There is no such index or split, or the tokenizer lacks the marks or an EOD.
        InputError: The datasets are not those of the index.
    """

    def __init__(
        self, index_path: str | Path, split: str = "train", datasets: Sequence[str | Path | TokenDataset] = ()
    ) -> None:
        self._plain = GPTSamples(index_path, split, datasets, kinds=("fim",))
        self._objective = FimConfig.model_validate(self._plain.index.objective["settings"])
        tokenizer = self._plain.datasets[0].tokenizer
        self._eod = tokenizer.require_eod()
        self._marks = fim_tokens(tokenizer)
        self._seed: int = self._plain.index.description["seed"]
        self.seq_length = self._plain.seq_length
        self.num_samples = self._plain.num_samples
        self.datasets = self._plain.datasets

    def __len__(self) -> int:
        return self.num_samples

    def tokens(self, sample_ids: Sequence[int] | npt.NDArray[Any]) -> Ids:
        """Return the tokens of samples: (n, seq_length + 1), int64; inputs are [:, :-1], labels [:, 1:]."""
        rows = self._plain.tokens(sample_ids)
        for row, number in zip(rows, sample_ids, strict=True):
            random = np.random.default_rng((self._seed, int(number)))
            row[:] = rearrange(row, self._eod, self._objective, self._marks, random)
        return rows

    __getitems__ = tokens

    def documents_of(self, sample: int) -> list[DocumentSpan]:
        """Say which parts of which documents a sample is made of, in the order before they were rearranged."""
        return self._plain.documents_of(sample)


def rearrange(row: Ids, eod: int, objective: FimConfig, marks: FimTokens, random: np.random.Generator) -> Ids:
    """Rearrange the documents of one row: (tokens,), as long as before."""
    parts: list[Ids] = []
    for document in np.split(row, np.flatnonzero(row == eod) + 1):
        has_end = len(document) > 0 and document[-1] == eod
        text, end = (document[:-1], document[-1:]) if has_end else (document, document[:0])
        if len(text) and random.random() < objective.rate:
            text = _moved(text, objective, marks, random)
        parts += [text, end]
    return np.concatenate(parts)[: len(row)]


def _moved(text: Ids, objective: FimConfig, marks: FimTokens, random: np.random.Generator) -> Ids:
    first, second = np.sort(random.integers(0, len(text) + 1, size=2)).tolist()
    prefix, middle, suffix = text[:first], text[first:second], text[second:]
    pre, mid, suf = (np.array([mark], dtype=np.int64) for mark in (marks.prefix, marks.middle, marks.suffix))
    if random.random() < objective.spm_rate:
        return np.concatenate([pre, suf, suffix, mid, prefix, middle])
    return np.concatenate([pre, prefix, suf, suffix, mid, middle])
