"""Evaluation sets, and which documents hold passages of them: by n-grams of words that both share.

GPT-3 removed what shares a 13-gram with a benchmark (Brown et al. 2020, arXiv 2005.14165, appendix C);
8-grams find more and err more (PaLM, Chowdhery et al. 2022, arXiv 2204.02311, section 8, asks for a share
of 8-grams). The index is two files that workers map, so that it is in memory once: 12 bytes an n-gram.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from preprocessing.cleaning.ngrams import Keys, WordHasher, ngram_keys
from preprocessing.reading.pieces import read_records
from preprocessing.reading.records import RecordFormat
from preprocessing.reading.source_file import SourceFile

RECORDS_AT_ONCE = 10_000
KEYS, OWNERS = "evaluation_keys.npy", "evaluation_sets.npy"


@dataclass(frozen=True)
class Overlap:
    """How much of a document is in the evaluation sets.

    Args:
        shared: Its n-grams that are there.
        total: All its n-grams.
        owner: Number of the set of the first that is; -1: none is.
    """

    shared: int
    total: int
    owner: int = -1


@dataclass(frozen=True)
class EvaluationIndex:
    """The n-grams of evaluation sets.

    Args:
        keys: (n-grams,) their hashes, ascending, each once.
        owners: (n-grams,) number of the first set that has it.
    """

    keys: Keys
    owners: npt.NDArray[np.int32]

    @classmethod
    def of(cls, sets: Iterable[Keys]) -> "EvaluationIndex":
        """Join the n-grams of all sets."""
        found = [np.unique(keys) for keys in sets]
        owners = np.repeat(np.arange(len(found), dtype=np.int32), [len(keys) for keys in found])
        keys, first = np.unique(np.concatenate([np.empty(0, np.uint64), *found]), return_index=True)
        return cls(keys, owners[first])

    def overlap(self, words: Keys, size: int) -> Overlap:
        """Compare one document, given the hashes of its words and the words in an n-gram."""
        keys = ngram_keys(words, size)
        if not len(keys) or not len(self.keys):
            return Overlap(0, len(keys))
        places = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        is_shared = self.keys[places] == keys
        if not is_shared.any():
            return Overlap(0, len(keys))
        return Overlap(int(is_shared.sum()), len(keys), int(self.owners[places[is_shared.argmax()]]))

    def save(self, folder: Path) -> None:
        """Write it; the last file appears in one step."""
        for name, values in ((OWNERS, self.owners), (KEYS, self.keys)):
            temporary = folder / f"{name}.tmp"
            with temporary.open("wb") as file:
                np.save(file, values)
            temporary.replace(folder / name)

    @classmethod
    def load(cls, folder: Path) -> "EvaluationIndex":
        """Map what `save` wrote."""
        return cls(np.load(folder / KEYS, mmap_mode="r"), np.load(folder / OWNERS, mmap_mode="r"))


def evaluation_keys(file: SourceFile, text_keys: Sequence[str], form: RecordFormat, size: int) -> Keys:
    """Hash the n-grams of an evaluation set, each once. Records that lack a key are passed over for that key.

    Args:
        text_keys: Keys of a record that hold text to look for, such as question and answer.
        form: How the file is read but for the key.

    Raises:
        DamagedStreamError: The file is damaged or ends early.
    """
    hasher = WordHasher()
    found = [np.empty(0, np.uint64)]
    for key in text_keys:
        one = RecordFormat(key, form.subset_key, True, form.content, form.text_unit)
        for record in read_records([file], one, on_reject=lambda reject: None):
            found.append(ngram_keys(hasher(record.text), size))
            if len(found) > RECORDS_AT_ONCE:
                found = [np.unique(np.concatenate(found))]
    return np.unique(np.concatenate(found))
