"""Masks and positions equal those of Megatron-LM's GPTDataset, bit for bit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron_cases import case_ids, cases

from preprocessing.config import IndexConfig
from preprocessing.dataset.token_dataset import TokenDataset
from preprocessing.samples.gpt import GPTSamples
from preprocessing.samples.index import build_index
from preprocessing.samples.masks import (
    PADDING,
    attention_mask,
    causal_batch,
    cumulative_lengths,
    document_numbers,
)

WITH_LABELS = [
    pytest.param(root, case, id=name)
    for name, (root, case) in zip(case_ids("gpt"), cases("gpt"), strict=True)
    if case["add_extra_token_to_sequence"] and case["drop_last_partial_validation_sequence"]
]


@pytest.mark.parametrize(("root", "case"), WITH_LABELS)
def test_masks_and_positions_are_megatrons(tmp_path: Path, root: Path, case: dict[str, Any]):
    dataset = TokenDataset(root / "datasets" / case["dataset"])
    train, valid, test = case["sizes"]
    settings = IndexConfig(
        seq_length=case["sequence_length"],
        samples=train,
        valid_samples=valid,
        test_samples=test,
        seed=case["random_seed"],
        split=case["split"],
    )
    build_index(settings, [dataset], tmp_path, note=lambda _: None)
    for split in case["splits"]:
        path = root / "gpt" / case["name"] / f"{split}_items.npz"
        if not path.is_file():
            continue
        wanted = np.load(path)
        rows = GPTSamples(tmp_path, split, [dataset]).tokens(wanted["sample_ids"])
        found = causal_batch(
            rows,
            eod_id=case["eod"],
            resets_positions=case["reset_position_ids"],
            resets_attention=case["reset_attention_mask"],
            masks_eod=case["eod_mask_loss"],
        )
        for name in ("tokens", "labels", "loss_mask", "position_ids"):
            np.testing.assert_array_equal(getattr(found, name), wanted[name], err_msg=name)
            assert getattr(found, name).dtype == wanted[name].dtype
        if "attention_mask" in wanted and found.documents is not None:
            np.testing.assert_array_equal(~attention_mask(found.documents), wanted["attention_mask"][:, 0])


def test_padding_has_no_loss_and_no_id():
    found = causal_batch(np.array([[5, 6, PADDING, PADDING]]), eod_id=9)
    assert found.tokens.tolist() == [[5, 6, 0]]
    assert found.labels.tolist() == [[6, 0, 0]]
    assert found.loss_mask.tolist() == [[1, 0, 0]]
    assert found.documents is None


def test_bounds_of_documents_restart_in_every_row():
    is_eod = np.array([[0, 1, 0, 0], [0, 0, 0, 1], [1, 1, 0, 0]], dtype=bool)
    documents = document_numbers(is_eod)
    assert documents.tolist() == [[0, 0, 1, 1], [0, 0, 0, 0], [0, 1, 2, 2]]
    assert cumulative_lengths(documents).tolist() == [0, 2, 4, 8, 9, 10, 12]
