"""Documents cut into rows, so that every token of a document is predicted exactly once.

Windows are disjoint. The first begins with the prefix token, a later one with the last token of
the window before it: a token is predicted from at most `window` tokens to its left.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from evaluation.rows import Ints, Rows


def document_rows(documents: Iterable[npt.NDArray[np.integer]], *, prefix: int, window: int) -> tuple[Rows, Ints]:
    """Cut documents into rows.

    Args:
        documents: Token ids of each document, without an end-of-document token.
        prefix: Token that stands before each document.
        window: Tokens fed in one row.

    Returns:
        rows: All of them; every token but the first of a row is scored.
        document_of_row: (rows,) number of the document; an empty document has no row.
    """
    parts: list[Ints] = []
    owners: list[int] = []
    for number, document in enumerate(documents):
        padded = np.concatenate([[prefix], document]).astype(np.int64)
        for start in range(0, len(padded) - 1, window):
            parts.append(padded[start : start + window + 1])
            owners.append(number)
    lengths = np.fromiter((len(part) for part in parts), dtype=np.int64, count=len(parts))
    bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = np.concatenate(parts) if parts else np.empty(0, np.int64)
    return Rows(tokens, bounds, np.ones(len(parts), np.int64)), np.asarray(owners, dtype=np.int64)
