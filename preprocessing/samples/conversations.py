"""Rows of conversations for fine-tuning: labels where something is said, bounds that keep conversations apart."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from preprocessing.dataset.token_dataset import TokenDataset
from preprocessing.samples.gpt import DocumentSpan
from preprocessing.samples.index_files import open_index

NO_LABEL = -100
PADDING = -1  # number of the document of padding
Ids = npt.NDArray[np.int64]


class ConversationSamples:
    """Rows of one split of an index of conversations.

    Args:
        index_path: An index artifact, or a folder that `build_index` filled.
        split: "train", "valid" or "test".
        datasets: The datasets it was made for, in its order. Empty: where its manifest says.

    Raises:
        ConfigError: There is no index, no such split, or the datasets are not found.
        InputError: The datasets are not those of the index.
    """

    def __init__(
        self, index_path: str | Path, split: str = "train", datasets: Sequence[str | Path | TokenDataset] = ()
    ) -> None:
        self.index = open_index(Path(index_path), split, datasets, kinds=("sft",))
        self.seq_length: int = self.index.description["seq_length"]
        self.datasets = self.index.datasets
        self._documents = {part: self.index.array(part, "document_index") for part in self.index.parts}
        self._rows = {part: self.index.array(part, "row_index") for part in self.index.parts}

    def __len__(self) -> int:
        return self.index.num_samples

    def rows(self, sample_ids: Sequence[int] | npt.NDArray[Any]) -> dict[str, Ids]:
        """Return inputs, labels, positions and documents, each (n, seq_length), int64.

        A label is the next token where that is said, else NO_LABEL. Conversations are numbered within a row, from 0,
        and padding is PADDING.

        Raises:
            IndexError: A number is not in [0, num_samples).
        """
        shape = (len(sample_ids), self.seq_length)
        found = {name: np.zeros(shape, dtype=np.int64) for name in ("inputs", "positions")}
        found |= {"labels": np.full(shape, NO_LABEL), "documents": np.full(shape, PADDING)}
        for row, sample in enumerate(sample_ids):
            begin = 0
            for number, (dataset, document) in enumerate(self._conversations(int(sample))):
                tokens, is_said = self._tokens(dataset, document)
                stop = begin + len(tokens) - 1
                found["inputs"][row, begin:stop] = tokens[:-1]
                found["labels"][row, begin:stop] = np.where(is_said[1:], tokens[1:], NO_LABEL)
                found["positions"][row, begin:stop] = np.arange(stop - begin)
                found["documents"][row, begin:stop] = number
                begin = stop
        return found

    def documents_of(self, sample: int) -> list[DocumentSpan]:
        """Say which conversations, up to which token, a row holds, in order."""
        return [
            DocumentSpan(dataset, document, 0, len(self._tokens(dataset, document)[0]))
            for dataset, document in self._conversations(sample)
        ]

    def _conversations(self, sample: int) -> list[tuple[int, int]]:
        chosen, inner = self.index.locate(np.array([sample], dtype=np.int64))
        part, row = int(chosen[0]), int(inner[0])
        first, stop = self._rows[part][row : row + 2].tolist()
        dataset = self.index.dataset_number(part)
        return [(dataset, int(document)) for document in self._documents[part][first:stop]]

    def _tokens(self, dataset: int, document: int) -> tuple[Ids, npt.NDArray[np.bool_]]:
        """Return the tokens that have a place in a row, one more than inputs, and which of them are said."""
        turns = self.datasets[dataset].sequences_of(document)
        tokens = np.concatenate(turns).astype(np.int64)[: self.seq_length + 1]
        is_said = np.repeat(np.arange(len(turns)) % 2 == 1, [len(turn) for turn in turns])
        return tokens, is_said[: self.seq_length + 1]
