"""Perplexity and bits per byte of held-out documents, in total and per subset.

Definitions, over the documents of a group: nats = -sum of log-probabilities of all their tokens,
each document behind one prefix token, the end-of-document token not scored.
perplexity = exp(nats / tokens); bits_per_byte = nats / (bytes x ln 2);
byte_perplexity = exp(nats / bytes); word_perplexity is left to tasks that define words.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from evaluation.intervals import bootstrap_ratio
from evaluation.rows import Ints, RowScores

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class DocumentScores:
    """One entry per document, in the order of the dataset.

    Args:
        subsets: Name of the subset of each; "" where the corpus names none.
        num_bytes: UTF-8 bytes of the text.
        num_tokens: Scored tokens.
        nats: Negative log-likelihood.
        num_greedy: Scored tokens that the model would have chosen.
    """

    subsets: Sequence[str]
    num_bytes: Ints
    num_tokens: Ints
    nats: Floats
    num_greedy: Ints


def by_document(scores: RowScores, document_of_row: Ints, subsets: Sequence[str], num_bytes: Ints) -> DocumentScores:
    """Add up the rows of each document."""
    count = len(subsets)

    def total(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.bincount(document_of_row, weights=values, minlength=count)

    return DocumentScores(
        subsets=subsets,
        num_bytes=num_bytes,
        num_tokens=total(scores.num_scored).astype(np.int64),
        nats=-total(scores.log_prob).astype(np.float64),
        num_greedy=total(scores.num_greedy).astype(np.int64),
    )


def metrics_of(scores: DocumentScores) -> dict[str, Any]:
    """Return the metrics of all documents, and of each subset under `subsets`."""
    names = np.asarray(scores.subsets)
    result = _group(scores, np.ones(len(names), dtype=bool))
    result["subsets"] = {
        name or "(none)": _group(scores, names == name) for name in sorted(set(scores.subsets)) if len(names)
    }
    return result


def _group(scores: DocumentScores, chosen: npt.NDArray[np.bool_]) -> dict[str, Any]:
    is_scored = chosen & (scores.num_tokens > 0)
    nats, tokens, size = scores.nats[is_scored], scores.num_tokens[is_scored], scores.num_bytes[is_scored]
    result: dict[str, Any] = {
        "documents": int(is_scored.sum()),
        "empty_documents": int((chosen & ~is_scored).sum()),
        "tokens": int(tokens.sum()),
        "bytes": int(size.sum()),
        "nats": float(nats.sum()),
    }
    if result["tokens"] == 0:
        return result
    per_token = result["nats"] / result["tokens"]
    result |= {
        "loss_nats": per_token,
        "perplexity": math.exp(min(per_token, 700.0)),
        "token_accuracy": float(scores.num_greedy[is_scored].sum()) / result["tokens"],
    }
    if size.min() <= 0:  # the text is not known, so nothing per byte is
        return result
    per_byte = result["nats"] / result["bytes"]
    low, high = bootstrap_ratio(nats, size.astype(np.float64))
    return result | {
        "bits_per_byte": per_byte / math.log(2.0),
        "bits_per_byte_low": low / math.log(2.0),
        "bits_per_byte_high": high / math.log(2.0),
        "byte_perplexity": math.exp(per_byte),
    }


def headline(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The numbers to compare models by."""
    return {key: metrics[key] for key in ("loss_nats", "perplexity", "bits_per_byte") if key in metrics}
