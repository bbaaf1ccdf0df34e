"""Mappings of sentences to samples equal those of Megatron-LM's compiled helpers, bit for bit."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron_cases import roots

from preprocessing.dataset.indexed_dataset import IndexedDataset
from preprocessing.samples.sentences import block_mapping, sentence_mapping

CASES = [
    pytest.param(root, case, id=f"{Path(case['file']).stem}-{number}")
    for number, root in enumerate(roots())
    for case in json.loads((root / "cases.json").read_text(encoding="utf-8"))["bert"]
]


@pytest.mark.parametrize(("root", "case"), CASES)
def test_mappings_are_megatrons(root: Path, case: dict[str, Any]):
    names = ("num_epochs", "max_num_samples", "max_seq_length", "seed")
    settings = {name: case[name] for name in names}
    if case["input"].endswith(".npz"):
        given = np.load(root / case["input"])
        bounds, sizes = given["docs"], given["sizes"]
    else:
        dataset = IndexedDataset(root / case["input"].partition(" ")[0])
        bounds, sizes = np.array(dataset.document_bounds), np.array(dataset.lengths)

    if case["function"] == "build_mapping":
        more = {name: case[name] for name in ("short_seq_prob", "min_num_sent")}
        found = sentence_mapping(bounds[:-1], bounds[1:], sizes, **settings, **more)
    else:
        found = block_mapping(
            *(bounds[:-1], bounds[1:], sizes, given["titles_sizes"]),
            **settings,
            use_one_sent_blocks=case["use_one_sent_blocks"],
        )

    wanted = np.load(root / case["file"])
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(found, wanted)


def test_documents_without_enough_sentences_give_nothing():
    bounds = np.array([0, 1, 1, 2])
    found = sentence_mapping(
        *(bounds[:-1], bounds[1:], np.array([5, 5], dtype=np.int32)),
        num_epochs=1,
        max_num_samples=10,
        max_seq_length=8,
        short_seq_prob=0.1,
        seed=1,
        min_num_sent=2,
    )
    assert found.shape == (0, 3)
