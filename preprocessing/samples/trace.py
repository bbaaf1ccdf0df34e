"""From samples back to the records they were made of."""

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from contracts.errors import InputError
from preprocessing.dataset.token_dataset import TokenDataset
from preprocessing.reading.blocks import Position
from preprocessing.reading.pieces import file_blocks
from preprocessing.reading.recorded import found_source
from preprocessing.reading.records import RecordFormat, parse_block
from preprocessing.reading.turns import TurnFormat
from preprocessing.samples.gpt import DocumentSamples, DocumentSpan, GPTSamples


@dataclass(frozen=True)
class TracedSpan:
    """A part of a source record that a sample holds.

    Args:
        sample: Number of the sample.
        dataset, document: Numbers of dataset and document.
        file: Source file, by its name in the dataset; `path` is where it lay at ingest.
        line: 1-based line (row) of the record.
        subset: Subset of the record, if it has one.
        first_token, num_tokens: The part, in tokens of the document.
        document_tokens: Tokens of the whole document.
        text: The part, decoded from its tokens; None where the dataset keeps no tokenizer.
    """

    sample: int
    dataset: int
    document: int
    file: str
    path: str
    line: int
    subset: str | None
    first_token: int
    num_tokens: int
    document_tokens: int
    text: str | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def trace_samples(
    index: str | Path | DocumentSamples,
    sample_numbers: Sequence[int],
    *,
    split: str = "train",
    datasets: Sequence[str | Path | TokenDataset] = (),
) -> list[TracedSpan]:
    """Say which parts of which source records the samples hold, in the order of the tokens.

    Args:
        index: An index artifact's folder, or opened samples.

    Raises:
        InputError: A dataset has no `documents.parquet`.
        IndexError: There is no such sample.
    """
    samples = GPTSamples(index, split, datasets) if isinstance(index, str | Path) else index
    spans = [(number, span) for number in sample_numbers for span in samples.documents_of(number)]
    rows = _rows(samples, [span for _, span in spans])
    return [
        _traced(number, span, samples.datasets[span.dataset], rows[span.dataset, span.document])
        for number, span in spans
    ]


def _rows(samples: DocumentSamples, spans: Sequence[DocumentSpan]) -> dict[tuple[int, int], dict[str, Any]]:
    wanted: dict[int, set[int]] = defaultdict(set)
    for span in spans:
        wanted[span.dataset].add(span.document)
    return {
        (number, row["document"]): row
        for number, documents in wanted.items()
        for row in samples.datasets[number].document_rows(np.array(sorted(documents), dtype=np.int64))
    }


def _traced(sample: int, span: DocumentSpan, dataset: TokenDataset, row: dict[str, Any]) -> TracedSpan:
    ids = dataset.document(span.document)[span.offset : span.offset + span.length]
    return TracedSpan(
        sample=sample,
        dataset=span.dataset,
        document=span.document,
        file=row["file"],
        path=str(dataset.source_paths.get(row["file"], row["file"])),
        line=row["line"],
        subset=row["subset"],
        first_token=span.offset,
        num_tokens=span.length,
        document_tokens=row["tokens"],
        text=dataset.tokenizer.decode(ids.tolist()) if dataset.has_tokenizer else None,
    )


def read_source_text(dataset: TokenDataset, document: int) -> str:
    """Read the text of a document from its source file, where that is still in its place.

    Raises:
        InputError: The file is gone or changed: the text's digest is not that of ingest.
    """
    (row,) = dataset.document_rows(np.array([document]))
    place = dataset.source_paths[row["file"]]
    source = found_source(row["file"], place)
    if not source.is_remote and not source.path.is_file():
        raise InputError(f"{place}: the source file of document {document} is not there any more.")
    config = dataset.artifact.manifest.config if dataset.artifact is not None else {}
    form = RecordFormat(
        config["text_key"],
        config["subset_key"],
        config["invalid_unicode"] == "replace",
        config.get("format", "auto"),
        config.get("text_unit", "document"),
        turns=TurnFormat(**config["turns"]) if config.get("turns") else None,
    )
    start = Position(0, row["line"], row["byte_offset"])
    for block in file_blocks(source, start, form=form):
        record = next((r for r in parse_block(block, form).records() if r.line == row["line"]), None)
        if record is not None and hashlib.blake2b(record.text.encode(), digest_size=16).digest() == row["digest"]:
            return record.text
        break
    raise InputError(f"{place}, line {row['line']}: is not the text that was ingested; the file has changed.")
