"""Documents divided into sentences: nothing is lost, and BERT's pairs can be made of them."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ingest_cases import ingest_files

from contracts.errors import ConfigError
from flows.inspection import verify_path
from preprocessing.dataset.token_dataset import TokenDataset
from preprocessing.ingestion.sentences import split_sentences, without_empty

TEXTS = [
    "Dr. Smith went home on Jan. 5th. He slept!  Was it late?\n\nNobody knows.",
    "One sentence only",
    "你好。世界！ And 3.14 is pi. ",
    "   \n",
]


@given(st.text(alphabet=st.sampled_from("ab. !?\n\r\té。🙂\"')("), max_size=200))
def test_sentences_joined_are_the_text(text: str):
    parts = split_sentences(text, "en")
    assert "".join(parts) == text
    assert len(parts) == 1 or not any(part.isspace() for part in parts)


def test_a_long_text_loses_nothing_between_the_librarys_own_chunks():
    text = (TEXTS[0] + " ") * 3000
    parts = split_sentences(text, "en")
    assert "".join(parts) == text and len(parts) > 9000


def ingested(tmp_path: Path, **settings: object) -> TokenDataset:
    lines = [json.dumps({"text": text}) for text in [*TEXTS, ""]]
    (tmp_path / "a.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    made = ingest_files([str(tmp_path / "a.jsonl")], tmp_path / "data", sentences="en", **settings)
    assert verify_path(made.path, made)[0] == []
    return TokenDataset(made.path)


def test_each_document_is_a_row_of_sentences_with_eod_at_its_end(tmp_path: Path):
    dataset = ingested(tmp_path)
    assert dataset.num_documents == 4
    bounds = dataset.shards[0].document_bounds
    for number, text in enumerate(TEXTS):
        sentences = [dataset.sequence(n) for n in range(bounds[number], bounds[number + 1])]
        wanted = [*split_sentences(text, "en")]
        wanted[-1] += "<|endoftext|>"
        assert [dataset.tokenizer.decode(item.tolist()) for item in sentences] == wanted
    rows = dataset.document_rows(np.arange(4))
    assert [row["tokens"] for row in rows] == dataset.document_lengths.tolist()
    assert [row["line"] for row in rows] == [1, 2, 3, 4]


def test_tokens_are_those_of_the_sentences_alone(tmp_path: Path):
    dataset = ingested(tmp_path, add_bos=False, append_eod=False)
    ids = [dataset.tokenizer.encode(part) for text in TEXTS for part in split_sentences(text, "en")]
    assert [dataset.sequence(n).tolist() for n in range(dataset.num_sequences)] == ids


def test_an_empty_document_that_is_kept_is_one_sequence(tmp_path: Path):
    dataset = ingested(tmp_path, keep_empty=True)
    assert dataset.num_documents == 5 and dataset.document(4).tolist() == [256]
    bounds = dataset.shards[0].document_bounds
    assert bounds[5] - bounds[4] == 1


def test_bytes_do_not_depend_on_parts_and_shards(tmp_path: Path):
    text = [json.dumps({"text": TEXTS[n % 3]}) for n in range(60)]
    (tmp_path / "a.jsonl").write_text("".join(f"{line}\n" for line in text), encoding="utf-8")
    sets = [
        ingest_files([str(tmp_path / "a.jsonl")], tmp_path / f"d{n}", sentences="en", **settings)
        for n, settings in enumerate(({}, {"part_bytes": 700, "workers": 2}, {"shard_tokens": 300}))
    ]
    found = [TokenDataset(item.path) for item in sets]
    assert len(found[1].shards) > 1 and len(found[2].shards) > 1
    for dataset in found[1:]:
        np.testing.assert_array_equal(dataset.lengths, found[0].lengths)
        np.testing.assert_array_equal(dataset.document_lengths, found[0].document_lengths)


def test_sentences_without_tokens_are_left_out_but_one_stays():
    lengths, counts = without_empty(np.array([3, 0, 2, 0, 0, 5]), np.array([3, 2, 1, 0]))
    assert (lengths.tolist(), counts.tolist()) == ([3, 2, 0, 5], [2, 1, 1, 0])


def test_without_the_library_it_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "sentencex", None)
    with pytest.raises(ConfigError, match=r"shardline\[sentences\]"):
        split_sentences("a", "en")
