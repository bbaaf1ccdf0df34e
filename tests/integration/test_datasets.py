"""Datasets on disk: damage is named, and foreign pairs are read or refused with the reason."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from corpora import texts, write_corpus
from ingest_cases import ingest_files
from megatron_cases import SMALL

from contracts.errors import ConfigError, InputError
from preprocessing.dataset.indexed_dataset import IndexedDataset
from preprocessing.dataset.inspection import inspect_dataset, inspect_tokenizer, verify_dataset
from preprocessing.dataset.token_dataset import TokenDataset


@pytest.fixture
def _dataset(tmp_path: Path) -> Path:
    source = write_corpus(tmp_path / "a.jsonl", texts(120))
    return ingest_files([str(source)], tmp_path / "data", shard_tokens=6000).path


def change(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def test_a_whole_dataset_has_no_problems(_dataset: Path):
    assert verify_dataset(_dataset) == []


def test_an_id_outside_the_vocabulary_is_found(_dataset: Path):
    change(_dataset / "data-00001.bin", 20, b"\xff\xff")
    (problem,) = verify_dataset(_dataset)
    assert "data-00001.bin: token 10 (sequence 0) is 65535, outside the vocabulary of 257" in problem


def test_a_wrong_pointer_is_found(_dataset: Path):
    sequences = len(IndexedDataset(_dataset / "data-00000"))
    change(_dataset / "data-00000.idx", 34 + 4 * sequences + 8, b"\x07")
    assert any("sequence pointers are wrong, first of sequence 1" in problem for problem in verify_dataset(_dataset))


def test_a_truncated_bin_is_refused_with_both_sizes(_dataset: Path):
    path = _dataset / "data-00000.bin"
    path.write_bytes(path.read_bytes()[:-2])
    (problem,) = verify_dataset(_dataset)
    assert "it is truncated" in problem
    with pytest.raises(InputError, match=r"holds \d+ bytes, but data-00000\.idx lists"):
        TokenDataset(_dataset)


def test_a_truncated_or_foreign_index_is_refused(_dataset: Path):
    path = _dataset / "data-00000.idx"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(InputError, match="its header needs"):
        TokenDataset(_dataset)
    path.write_bytes(b"TNTIDX\0\0" + whole[8:])
    with pytest.raises(InputError, match=r"GPT-NeoX lazy or cached index"):
        TokenDataset(_dataset)


def test_a_neox_merge_without_document_index_is_refused_with_the_reason(tmp_path: Path):
    for suffix in (".bin", ".idx"):
        shutil.copyfile(SMALL / "datasets" / f"a{suffix}", tmp_path / f"a{suffix}")
    data = bytearray((tmp_path / "a.idx").read_bytes())
    data[26:34] = (1).to_bytes(8, "little")
    (tmp_path / "a.idx").write_bytes(data[: 34 + 12 * 520 + 8])
    with pytest.raises(InputError, match=r"ends at sequence 0 of 520\. GPT-NeoX's merge"):
        IndexedDataset(tmp_path / "a")


def test_an_unfinished_dataset_is_refused(_dataset: Path):
    (_dataset / "manifest.json").unlink()
    with pytest.raises(InputError, match="is unfinished"):
        TokenDataset(_dataset)


def test_a_missing_pair_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"nope\.idx: there is no such file"):
        TokenDataset(tmp_path / "nope")


def test_documents_of_several_sequences_are_joined():
    dataset = TokenDataset(SMALL / "datasets" / "merged")
    assert (dataset.num_documents, dataset.num_sequences) == (244, 570)
    bounds = np.load(SMALL / "datasets" / "merged_read.npz")["document_indices"]
    for document in range(244):
        expected = [dataset.sequence(n) for n in range(bounds[document], bounds[document + 1])]
        np.testing.assert_array_equal(dataset.document(document), np.concatenate([dataset.sequence(0)[:0], *expected]))
    sequence = int(bounds[10]) + 1
    earlier = int(dataset.lengths[bounds[10]])
    assert dataset.place_in_document(sequence, 2) == (10, earlier + 2)


def test_inspect_gives_plain_data(_dataset: Path):
    found = json.loads(json.dumps(inspect_dataset(_dataset)))
    assert (found["documents"], found["token_type"], found["vocab_size"]) == (120, "uint16 (code 8)", 257)
    shown = found["samples"][0]
    assert texts(120)[shown["document"]].startswith(shown["text"]) and len(shown["ids"]) == 32
    assert sum(row["tokens"] for row in found["sequence_lengths"]) == found["tokens"]
    assert json.loads(json.dumps(inspect_tokenizer(_dataset)))["eod"] == "<|endoftext|> = 256"
    assert json.loads(json.dumps(inspect_dataset(SMALL / "datasets" / "b.idx")))["documents"] == 64
