"""The corpus and tokenizer stages."""

import json
from pathlib import Path

import pytest
from corpora import texts, write_corpus
from ingest_cases import CASES

from contracts.errors import InputError, RecordError
from contracts.store import ArtifactStore
from preprocessing.config import CorpusConfig, TokenizerConfig
from preprocessing.corpus.gather import CORPUS
from preprocessing.reading.pieces import read_records
from preprocessing.reading.records import RecordFormat
from preprocessing.reading.sources import corpus_files
from preprocessing.samples.special_tokens import bert_tokens, fim_tokens, sentinel_tokens
from preprocessing.tokenization.loading import load_tokenizer
from preprocessing.tokenization.training import TOKENIZER


def records(corpus, part: str):
    return list(read_records(corpus_files(corpus, part), RecordFormat()))


def test_every_document_of_ones_own_is_trained_on_or_held_out_once(tmp_path: Path):
    documents = texts(400)
    source = write_corpus(tmp_path / "a.jsonl", documents + documents[:30])
    config = CorpusConfig(sources=(str(source),), heldout_fraction=0.2, documents_per_file=100)
    corpus = CORPUS.run(config, store=ArtifactStore(tmp_path / "store"))

    train, heldout = records(corpus, "train"), records(corpus, "heldout")
    assert sorted(record.text for record in train + heldout) == sorted(documents)
    assert 40 < len(heldout) < 120
    assert len(corpus_files(corpus, "train")) == -(-len(train) // 100)
    assert {record.subset for record in train} == {"Set0", "Set1"}
    assert (corpus.summary["duplicates"], corpus.summary["documents"]) == (30, 400)


def test_held_out_documents_stay_held_out_when_the_corpus_grows(tmp_path: Path):
    heldout = []
    for count in (200, 400):
        source = write_corpus(tmp_path / f"{count}.jsonl", texts(400)[:count])
        corpus = CORPUS.run(
            CorpusConfig(sources=(str(source),), heldout_fraction=0.2), store=ArtifactStore(tmp_path / "s")
        )
        heldout.append({record.text for record in records(corpus, "heldout")})
    assert heldout[0] == heldout[1] & set(texts(400)[:200])


def test_a_bad_record_stops_the_corpus_or_is_set_aside(tmp_path: Path):
    source = write_corpus(tmp_path / "a.jsonl", texts(10))
    with source.open("a", encoding="utf-8") as file:
        file.write('{"text": null}\n')
    with pytest.raises(RecordError, match=r"a\.jsonl, line 12: 'text' is null"):
        CORPUS.run(CorpusConfig(sources=(str(source),)), store=ArtifactStore(tmp_path / "s", output=tmp_path / "out"))
    assert not (tmp_path / "out").exists()

    config = CorpusConfig(sources=(str(source),), on_error="quarantine")
    corpus = CORPUS.run(config, store=ArtifactStore(tmp_path / "store"))
    assert (corpus.summary["rejected"], corpus.summary["documents"]) == (1, 10)
    assert json.loads((corpus.path / "rejects.jsonl").read_text())["line"] == 12


def test_this_machine_gives_the_same_corpus_twice(tmp_path: Path):
    config = CorpusConfig(max_bytes=3_000_000, heldout_fraction=0.05)
    corpora = [CORPUS.run(config, store=ArtifactStore(tmp_path / name)) for name in ("one", "two")]

    assert corpora[0].manifest.content == corpora[1].manifest.content
    assert corpora[0].summary["bytes"] <= 3_000_000
    assert len(corpora[0].summary["subsets"]["train"]) >= 3


@pytest.mark.parametrize("kind", ["bpe", "wordpiece"])
def test_training_gives_the_same_bytes_twice(tmp_path: Path, kind: str):
    source = write_corpus(tmp_path / "a.jsonl", texts(200))
    config = TokenizerConfig(sources=(str(source),), kind=kind, vocab_size=400)
    made = [TOKENIZER.run(config, store=ArtifactStore(tmp_path / name)) for name in ("one", "two", "three")]

    assert len({artifact.manifest.content for artifact in made}) == 1
    tokenizer = load_tokenizer(made[0].path)
    assert tokenizer.eod_id == tokenizer.token_id("<|endoftext|>") is not None
    assert tokenizer.vocab_size <= 400


def test_byte_level_bpe_loses_nothing(tmp_path: Path):
    source = write_corpus(tmp_path / "a.jsonl", texts(50))
    artifact = TOKENIZER.run(
        TokenizerConfig(sources=(str(source),), vocab_size=300), store=ArtifactStore(tmp_path / "s")
    )
    tokenizer = load_tokenizer(artifact.path)

    for text in ("", " \t\r\n", "naïve 数据 🙂", "\x00\x1f", "<|endoftext|>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert artifact.summary["sample_survives"]


def test_unigram_trains_and_encodes(tmp_path: Path):
    source = write_corpus(tmp_path / "a.jsonl", texts(100))
    config = TokenizerConfig(sources=(str(source),), kind="unigram", vocab_size=60)
    artifact = TOKENIZER.run(config, store=ArtifactStore(tmp_path / "s"))
    assert load_tokenizer(artifact.path).decode(load_tokenizer(artifact.path).encode("the model")) == "the model"


def test_ing_18_an_invalid_byte_in_training_text_is_an_error_with_file_and_line(tmp_path: Path):
    config = TokenizerConfig(sources=(str(CASES / "ING-18" / "train.txt"),), vocab_size=300)
    with pytest.raises(InputError, match=r"train\.txt, line 2: byte 0xff"):
        TOKENIZER.run(config, store=ArtifactStore(tmp_path / "s", output=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_plain_text_is_trained_on_line_by_line(tmp_path: Path):
    (tmp_path / "train.txt").write_text("zebra zebra zebra zebra\n" * 3)
    config = TokenizerConfig(sources=(str(tmp_path / "train.txt"),), vocab_size=300)
    artifact = TOKENIZER.run(config, store=ArtifactStore(tmp_path / "s"))
    assert len(load_tokenizer(artifact.path).encode("zebra")) < 5


def test_a_vocabulary_too_small_for_bytes_is_refused():
    with pytest.raises(ValueError, match="byte-level BPE needs 257 or more"):
        TokenizerConfig(vocab_size=200)


@pytest.mark.parametrize("kind", ["bpe", "wordpiece", "unigram"])
def test_further_special_tokens_serve_every_objective(tmp_path: Path, kind: str):
    source = write_corpus(tmp_path / "a.jsonl", texts(200))
    config = TokenizerConfig(
        sources=(str(source),), kind=kind, vocab_size=500, special_tokens=("bert", "fim", "t5", "<|user|>")
    )
    found = load_tokenizer(TOKENIZER.run(config, store=ArtifactStore(tmp_path / "store")).path)
    assert len(sentinel_tokens(found)) == 100
    assert len({fim_tokens(found).prefix, fim_tokens(found).middle, bert_tokens(found).mask}) == 3
    assert "<|user|>" in found.special_tokens
    special = {found.vocab[name] for name in found.special_tokens if name not in ("[UNK]", "<unk>")}
    assert not special & set(found.encode("a <|user|> [MASK] b"))


def test_special_tokens_need_room():
    with pytest.raises(ValueError, match="needs 357 or more"):
        TokenizerConfig(vocab_size=300, special_tokens=("t5",))
