"""MinHash signatures of documents, by rensa (Rust): how similar two documents are, in a few bytes.

Two signatures agree in a share of their numbers that estimates the Jaccard similarity of the
documents' sets of n-grams (Broder 1997), with a standard error of at most 0.5 / sqrt(permutations): 0.046
for 120. Numbers are cut to 16 bits, which adds 1 in 65536.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from contracts.errors import ConfigError
from preprocessing.cleaning.config import MinHashConfig
from preprocessing.cleaning.ngrams import Keys, ngram_keys

ALGORITHM = 2  # of rensa; another gives other signatures, and the fingerprint would not tell
NO_WORDS = 0xFFFF  # every number of a document without words

Signatures = npt.NDArray[np.uint16]


class Signer:
    """Signs documents.

    Raises:
        ConfigError: rensa is missing, or has another algorithm.
    """

    def __init__(self, config: MinHashConfig) -> None:
        self._config = config
        self._minhash = _minhash()

    def __call__(self, documents: Sequence[Keys]) -> Signatures:
        """Return the signatures (documents, permutations) of documents, given the hashes of their words."""
        size = self._config.permutations
        if not documents:
            return np.empty((0, size), np.uint16)
        ngrams = [ngram_keys(words, self._config.ngram) for words in documents]
        bounds = np.cumsum([0, *map(len, ngrams)]).astype(np.uint64)
        matrix = self._minhash.digest_matrix_from_flat_token_hashes(
            np.concatenate(ngrams), bounds, size, self._config.seed
        )
        signatures = np.array(matrix.to_rows(), dtype=np.uint32).astype(np.uint16)
        signatures[bounds[1:] == bounds[:-1]] = NO_WORDS
        return signatures


def band_keys(signatures: Signatures, band: int, bands: int) -> Keys:
    """Hash one band of signatures: (documents,)."""
    rows = signatures.shape[1] // bands
    keys = np.full(len(signatures), np.uint64(band), dtype=np.uint64)
    with np.errstate(over="ignore"):
        for column in range(band * rows, (band + 1) * rows):
            keys = (keys ^ signatures[:, column].astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
            keys ^= keys >> np.uint64(29)
    return keys


def _minhash() -> Any:
    try:
        from rensa import RMinHash
    except ImportError:
        raise ConfigError("clean.minhash needs the package rensa. Install shardline[clean].") from None
    if RMinHash.ALGORITHM_VERSION != ALGORITHM:
        raise ConfigError(
            f"clean.minhash: the installed rensa has algorithm {RMinHash.ALGORITHM_VERSION}, but these results are "
            f"known by algorithm {ALGORITHM}. Install shardline[clean], which names the right version."
        )
    return RMinHash
