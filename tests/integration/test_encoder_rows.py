"""Rows of encoders from prepared samples: what a model is told of what the samples say."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentence_corpora import sentence_dataset

from contracts.errors import ConfigError
from preprocessing.config import IndexConfig
from preprocessing.dataset.token_dataset import TokenDataset
from preprocessing.samples.bert import NO_LABEL, BertSamples
from preprocessing.samples.index import build_index
from preprocessing.samples.t5 import T5Samples
from training.config import IGNORE_INDEX, PretrainConfig
from training.rows import PADDING, MaskedRows, SpanRows, open_rows


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> TokenDataset:
    return sentence_dataset(tmp_path_factory.mktemp("sentences") / "data", documents=60)


def _index(folder: Path, dataset: TokenDataset, **settings: Any) -> Path:
    build_index(IndexConfig(**settings), [dataset], folder, note=lambda _: None)
    return folder


def test_masked_rows_say_what_was_hidden_and_padding_is_a_document_of_its_own(
    tmp_path: Path, dataset: TokenDataset
) -> None:
    samples = BertSamples(_index(tmp_path, dataset, objective="bert", seq_length=64), "train", [dataset])
    batch = samples.batch(range(8))

    rows = MaskedRows(samples, has_types=True, has_pairs=True).rows(range(8))

    assert rows.keys() == {"inputs", "labels", "documents", "token_types", "pair_labels"}
    assert np.array_equal(rows["labels"] == IGNORE_INDEX, batch.labels == NO_LABEL)
    assert np.array_equal(rows["documents"] == PADDING, ~batch.is_token)
    assert rows["pair_labels"].dtype == np.int64 and np.array_equal(rows["pair_labels"] == 1, batch.is_other)


def test_span_rows_are_padded_to_the_lengths_of_the_run_and_padding_gives_no_loss(
    tmp_path: Path, dataset: TokenDataset
) -> None:
    samples = T5Samples(_index(tmp_path, dataset, objective="t5", seq_length=40), "train", [dataset])
    lengths = samples.lengths

    rows = SpanRows(samples, lengths.encoder + 3, lengths.decoder + 2).rows([0, 1])

    assert rows["inputs"].shape == (2, lengths.encoder + 3) and rows["labels"].shape == (2, lengths.decoder + 2)
    assert (rows["documents"][:, -3:] == PADDING).all() and not rows["documents"][:, :-3].any()
    assert (rows["labels"][:, -2:] == IGNORE_INDEX).all() and (rows["labels"][:, :-2] >= 0).all()
    assert "documents" not in SpanRows(samples, lengths.encoder, lengths.decoder).rows([0])


@pytest.mark.parametrize(("family", "needed"), [("bert", "bert"), ("t5", "t5")])
def test_an_index_of_other_samples_is_refused(
    tmp_path: Path, dataset: TokenDataset, family: str, needed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = BertSamples(_index(tmp_path, dataset, objective="bert", seq_length=64), "train", [dataset])
    monkeypatch.setattr("training.rows.open_samples", lambda *_: samples if family == "t5" else object())
    config = PretrainConfig.model_validate({"model": {"family": family, "vocab_size": 109}, "seq_length": 64})

    with pytest.raises(ConfigError, match=f"is no index of {needed} samples"):
        open_rows(config, tmp_path, "train")
