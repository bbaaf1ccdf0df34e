"""Documents divided into sentences, each a sequence of its own in the dataset, as BERT's pairs need them.

Boundaries are those of the `sentencex` library (rules for some 300 languages). Only where it says that a
sentence begins is a text cut, so that sentences joined are the text, white space and all; a stretch of
nothing but white space goes with the sentence before it.
"""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from contracts.errors import ConfigError
from preprocessing.reading.records import ParsedBlock

Lengths = npt.NDArray[np.int64]


def split_sentences(text: str, language: str) -> list[str]:
    """Cut a text into sentences that joined are the text.

    Args:
        language: Its code, as in "en"; one that the library does not know is read by the rules of English.

    Raises:
        ConfigError: The library is not installed.
    """
    try:
        import sentencex
    except ImportError:
        raise ConfigError("ingest.sentences needs the package sentencex. Install shardline[sentences].") from None

    found = sentencex.get_sentence_boundaries(language, text)
    starts = [item["start_index"] for item in found if not item["text"].isspace()]
    return [text[start:stop] for start, stop in zip([0, *starts[1:]], [*starts[1:], len(text)], strict=True)]


def divided(parsed: ParsedBlock, language: str | None) -> tuple[ParsedBlock, Lengths]:
    """Divide the documents of a block; each sentence has the line of its document.

    Args:
        language: By whose rules; None where documents are conversations, whose turns are then the sentences.

    Returns:
        units: The same block with sentences in the place of documents.
        counts: (documents,) sentences of each.
    """
    sentences = parsed.turns if language is None else [split_sentences(text, language) for text in parsed.texts]
    counts = np.fromiter(map(len, sentences), dtype=np.int64, count=len(sentences))
    owners = np.repeat(np.arange(len(counts)), counts).tolist()
    units = replace(
        parsed,
        texts=[sentence for document in sentences for sentence in document],
        lines=[parsed.lines[n] for n in owners],
        offsets=[parsed.offsets[n] for n in owners],
        subsets=[parsed.subsets[n] for n in owners],
    )
    return units, counts


def without_empty(lengths: Lengths, counts: Lengths) -> tuple[Lengths, Lengths]:
    """Leave out sentences of no token, such as those of white space; a document without any keeps one.

    Args:
        lengths: (sentences,) tokens of each.
        counts: (documents,) sentences of each.

    Returns:
        lengths, counts: Of the sentences that are left.
    """
    ends = np.cumsum(counts)
    is_kept = lengths > 0
    kept = _sums(is_kept.astype(np.int64), ends)
    lone = np.flatnonzero((kept == 0) & (counts > 0))
    is_kept[ends[lone] - counts[lone]] = True
    return lengths[is_kept], _sums(is_kept.astype(np.int64), ends)


def document_lengths(lengths: Lengths, counts: Lengths) -> Lengths:
    """Add up the tokens of the sentences of each document: (documents,)."""
    return _sums(lengths, np.cumsum(counts))


def with_bounds(lengths: Lengths, counts: Lengths, *, has_bos: bool, has_eod: bool) -> Lengths:
    """Count BOS with the first sentence of each document, EOD with the last: (sentences,)."""
    result = lengths.copy()
    ends = np.cumsum(counts)
    result[(ends - counts)[counts > 0]] += has_bos
    result[ends[counts > 0] - 1] += has_eod
    return result


def _sums(values: Lengths, ends: Lengths) -> Lengths:
    totals = np.concatenate([np.zeros(1, np.int64), np.cumsum(values, dtype=np.int64)])
    return np.asarray(np.diff(totals[np.concatenate([np.zeros(1, np.int64), ends])]))
