"""Causal rows that know where their documents begin: positions, attention bounds, labels."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpora import texts
from ingest_cases import ingest_files

from preprocessing.config import IndexConfig
from preprocessing.dataset.token_dataset import TokenDataset
from preprocessing.samples.gpt import GPTSamples
from preprocessing.samples.index import build_index
from training.config import IGNORE_INDEX
from training.rows import DocumentRows, positions_in_runs


def _samples(folder: Path, **settings: Any) -> GPTSamples:
    source = folder / "a.jsonl"
    source.write_text("".join(json.dumps({"text": text[:60]}) + "\n" for text in texts(90)), encoding="utf-8")
    dataset = TokenDataset(ingest_files([str(source)], folder / "data", **settings).path)
    build_index(IndexConfig(seq_length=64), [dataset], folder / "index", note=lambda _: None)
    return GPTSamples(folder / "index", "train", [dataset])


@pytest.mark.parametrize("append_eod", [True, False])
def test_bounds_are_those_of_the_dataset_with_and_without_end_tokens(tmp_path: Path, append_eod: bool) -> None:
    samples = _samples(tmp_path, append_eod=append_eod)
    source = DocumentRows(samples, resets_positions=True, resets_attention=True, masks_ends=True)
    ids = np.arange(len(samples))

    rows = source.rows(ids)

    assert rows["documents"].max() > 1
    for row, sample in enumerate(ids.tolist()):
        tokens = samples.tokens([sample])[0]
        first = 0
        for number, span in enumerate(samples.documents_of(sample)):
            stop = min(first + span.length, 64)
            assert (rows["documents"][row, first:stop] == number).all()
            assert rows["positions"][row, first:stop].tolist() == list(range(stop - first))
            if first:  # the token before a document's first has no label: it would be the next document's
                assert rows["labels"][row, first - 1] == IGNORE_INDEX
            kept = slice(first, first + span.length - 1)
            np.testing.assert_array_equal(rows["labels"][row, kept], tokens[1:][kept])
            first += span.length
        np.testing.assert_array_equal(rows["inputs"][row], tokens[:-1])


def test_only_what_is_asked_for_is_there(tmp_path: Path) -> None:
    samples = _samples(tmp_path)

    plain = DocumentRows(samples, resets_positions=False, resets_attention=False, masks_ends=True).rows([0, 1])

    assert plain.keys() == {"inputs", "labels"}


def test_positions_count_from_0_in_every_run() -> None:
    numbers = np.array([[0, 0, 1, 1, 1, 2], [4, 4, 4, 4, 4, 4]])

    assert positions_in_runs(numbers).tolist() == [[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5]]
