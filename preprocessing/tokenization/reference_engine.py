"""What an engine is, and the one that all others are held against: the `tokenizers` library itself."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from preprocessing.tokenization.tokenizer import Tokenizer, flat_ids

Ids = npt.NDArray[np.uint32]
Lengths = npt.NDArray[np.int64]

BATCH_CHARACTERS = 2**20  # bounds the library's per-token records (about 100 bytes a token)


class Engine(Protocol):
    """Turns texts into token ids, without BOS or EOD."""

    name: str

    def encode(self, texts: Sequence[str]) -> tuple[Ids, Lengths]:
        """Return the (total,) ids of all texts and the (texts,) number of tokens of each."""


class UnusableEngineError(Exception):
    """An engine cannot run this tokenizer; the text says why."""


class ReferenceEngine:
    """The `tokenizers` library on batches of whole documents."""

    name = "tokenizers"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, texts: Sequence[str]) -> tuple[Ids, Lengths]:
        parts: list[tuple[Ids, Lengths]] = []
        batch: list[str] = []
        characters = 0
        for text in texts:
            if batch and characters + len(text) > BATCH_CHARACTERS:
                parts.append(flat_ids(self._tokenizer.encode_batch(batch)))
                batch, characters = [], 0
            batch.append(text)
            characters += len(text)
        parts.append(flat_ids(self._tokenizer.encode_batch(batch)))
        return np.concatenate([ids for ids, _ in parts]), np.concatenate([lengths for _, lengths in parts])
