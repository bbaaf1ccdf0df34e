"""Documents of a dataset to look at: their text, their tokens, and where they came from."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from contracts.errors import ConfigError
from preprocessing.dataset.token_dataset import TokenDataset
from preprocessing.ingestion.document_table import DOCUMENTS
from preprocessing.ingestion.encoding import NO_SUBSET


@dataclass(frozen=True)
class ShownDocument:
    """One document.

    Args:
        document: Its number in the dataset.
        tokens: How many it has, EOD and BOS included.
        file, line: The record it was made of; None where the dataset does not know.
        ids: The first of its tokens.
        text: They decoded; None where the dataset keeps no tokenizer.
    """

    document: int
    tokens: int
    file: str | None
    line: int | None
    subset: str | None
    ids: tuple[int, ...]
    text: str | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def choose_documents(dataset: TokenDataset, count: int, *, seed: int, subset: str | None = None) -> list[int]:
    """Choose documents at random, without repeating, in ascending order.

    Args:
        count: How many; all, if there are no more.
        subset: Of this subset only.

    Raises:
        ConfigError: There is no such subset, or the dataset does not know subsets.
    """
    candidates: Sequence[int] | np.ndarray[Any, Any] = range(dataset.num_documents)
    if subset is not None:
        names = dataset.column("subset")
        if names is None:
            raise ConfigError(f"{dataset.path} has no {DOCUMENTS} that names subsets.")
        candidates = np.array([n for n, name in enumerate(names) if (name or NO_SUBSET) == subset], dtype=np.int64)
        if not len(candidates):
            known = ", ".join(sorted({name or NO_SUBSET for name in names}))
            raise ConfigError(f"{dataset.path} has no subset {subset!r}; it has {known}.")
    chosen = np.random.default_rng(seed).choice(len(candidates), size=min(count, len(candidates)), replace=False)
    return [int(candidates[place]) for place in sorted(chosen.tolist())]


def show_documents(
    dataset: TokenDataset, numbers: Sequence[int], *, max_tokens: int | None = None
) -> Iterator[ShownDocument]:
    """Yield documents by number.

    Args:
        max_tokens: Take no more than this many tokens of each.

    Raises:
        ConfigError: There is no document of that number.
    """
    for number in numbers:
        if not 0 <= number < dataset.num_documents:
            raise ConfigError(f"{dataset.path} has no document {number}; it has {dataset.num_documents}, from 0.")
    has_table = (dataset.path / DOCUMENTS).is_file()
    found = dataset.document_rows(np.array(sorted(set(numbers)), dtype=np.int64)) if has_table and numbers else []
    rows = {row["document"]: row for row in found}
    for number in numbers:
        ids = dataset.document(number)
        shown = tuple(ids[:max_tokens].tolist())
        row = rows.get(number, {})
        yield ShownDocument(
            document=number,
            tokens=len(ids),
            file=row.get("file"),
            line=row.get("line"),
            subset=row.get("subset"),
            ids=shown,
            text=dataset.tokenizer.decode(list(shown)) if dataset.has_tokenizer else None,
        )
