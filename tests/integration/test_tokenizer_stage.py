"""The tokenizer stage: samples of a corpus, tokenizers taken over from other formats, and what they lead to."""

import json
from pathlib import Path

import pytest
import zstandard
from command_line import shardline
from ingest_cases import CASES
from tokenizer_texts import HARD_TEXTS, byte_level_definition, example_ranks, write_rank_file

from contracts.artifact import Artifact
from contracts.errors import ConfigError
from contracts.store import ArtifactStore
from preprocessing.config import TokenizerConfig
from preprocessing.dataset.token_dataset import TokenDataset
from preprocessing.stages import TOKENIZER
from preprocessing.tokenization.loading import load_tokenizer

WORDS = ("zebra", "quagga", "okapi", "gnu", "oryx", "kudu", "eland", "bongo")


def sorted_records() -> list[bytes]:
    """A corpus sorted by source: each part of it knows one word of its own."""
    texts = (f"{word} and {word} number {n}" for word in WORDS for n in range(2000))
    return [json.dumps({"text": text}).encode() + b"\n" for text in texts]


def write_sorted_corpus(folder: Path, form: str) -> Path:
    lines = sorted_records()
    folder.mkdir()
    if form == "zst":
        (folder / "a.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(b"".join(lines)))
    elif form == "files":
        for n in range(8):
            (folder / f"{n}.jsonl").write_bytes(b"".join(lines[n * 2000 : n * 2000 + 2000]))
    else:
        (folder / "a.jsonl").write_bytes(b"".join(lines))
    return folder


def trained(source: Path, output: Path, **settings: object) -> Artifact:
    config = TokenizerConfig.model_validate({"sources": (str(source),), "vocab_size": 400, **settings})
    return TOKENIZER.run(config, store=ArtifactStore(output.parent / f"{output.name}-store", output=output))


def words_learned(artifact: Artifact) -> set[str]:
    tokenizer = load_tokenizer(artifact.path)
    return {word for word in WORDS if len(tokenizer.encode(f" {word}")) == 1}


@pytest.mark.parametrize("form", ["pieces", "zst", "files"])
def test_a_sample_comes_from_all_over_a_sorted_corpus(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("preprocessing.tokenization.training_texts.PIECE_BYTES", 20_000)
    source = write_sorted_corpus(tmp_path / "corpus", form)

    made = [trained(source, tmp_path / name, max_bytes=40_000, sample="spread", min_frequency=5) for name in ("a", "b")]
    head = trained(source, tmp_path / "head", max_bytes=40_000, min_frequency=5)

    assert words_learned(head) == {"zebra"}
    assert words_learned(made[0]) == set(WORDS)
    assert made[0].manifest.content == made[1].manifest.content
    assert 30_000 < made[0].summary["trained_bytes"] <= 40_000


def test_a_spread_sample_of_a_small_corpus_is_all_of_it(tmp_path: Path):
    source = write_sorted_corpus(tmp_path / "corpus", "files")
    made = trained(source, tmp_path / "a", sample="spread")
    assert made.summary["trained_documents"] == 16_000
    assert made.manifest.content == trained(source, tmp_path / "b").manifest.content


def test_ing_18_a_bad_line_is_passed_over_told_and_what_follows_is_learned(tmp_path: Path):
    source = CASES / "ING-18" / "train.txt"
    made = trained(source, tmp_path / "a", vocab_size=300, on_error="quarantine")

    assert made.summary["rejected"] == 1
    assert len(load_tokenizer(made.path).encode("zebra")) < 5


@pytest.mark.parametrize("kind", ["bpe", "wordpiece", "unigram"])
def test_ing_46_a_trained_tokenizer_gives_the_same_ids_after_reload(tmp_path: Path, kind: str):
    texts = [f"one\r\ntwo\rthree\n\nfour {n}\u2028\x85" for n in range(200)] + list(HARD_TEXTS)
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    made = trained(source, tmp_path / "made", kind=kind, vocab_size=340)

    from tokenizers import Tokenizer

    inner = Tokenizer.from_file(str(made.path / "tokenizer.json"))
    inner.encode_special_tokens = True
    tokenizer = load_tokenizer(made.path)
    assert sorted(path.name for path in made.path.glob("*.json")) == [
        "manifest.json",
        "recipe.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    for text in texts:
        if kind != "unigram" or "<|endoftext|>" not in text:  # there the library takes it for the token
            assert tokenizer.encode(text) == inner.encode(text, add_special_tokens=False).ids
        assert kind != "bpe" or tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("form", ["json", "gpt2", "tiktoken", "bert", "sentencepiece"])
def test_a_tokenizer_of_any_format_is_inspected_taken_over_and_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
):
    path = write_tokenizer_of(form, tmp_path)
    seen = shardline(capsys, "inspect", path, "--json")
    assert (seen.code, seen.data["kind"]) == (0, "tokenizer")

    made = shardline(capsys, "tokenizer", "--load", path, "--output", tmp_path / "taken", "--json")
    assert made.code == 0, made.err
    assert load_tokenizer(tmp_path / "taken").data == load_tokenizer(path).data

    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "Hello, world: naïve 数据"}) + "\n")
    for number, tokenizer in enumerate((path, tmp_path / "taken")):
        done = shardline(
            capsys,
            *("ingest", "--source", tmp_path / "a.jsonl", "--tokenizer", tokenizer),
            *("--output", tmp_path / f"d{number}", "--engine", "auto"),
        )
        assert done.code == 0, done.err
    pairs = [(tmp_path / f"d{number}" / "data-00000.bin").read_bytes() for number in (0, 1)]
    assert pairs[0] == pairs[1]
    dataset = TokenDataset(tmp_path / "d0")
    assert dataset.tokenizer.encode("Hello, world: naïve 数据") == dataset.sequence(0).tolist()[:-1]


def write_tokenizer_of(form: str, folder: Path) -> Path:
    target = folder / "given"
    target.mkdir()
    definition = byte_level_definition()
    if form == "json":
        (target / "tokenizer.json").write_text(json.dumps(definition))
    elif form == "gpt2":
        (target / "vocab.json").write_text(json.dumps(definition["model"]["vocab"]))
        (target / "merges.txt").write_text("\n".join(" ".join(merge) for merge in definition["model"]["merges"]))
    elif form == "tiktoken":
        return write_rank_file(target / "cl100k_base.tiktoken", example_ranks())
    elif form == "bert":
        words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "Hello", "world", ",", ":", "na", "##ï", "##ve", "数"]
        (target / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    else:
        import sentencepiece

        (folder / "text.txt").write_text("\n".join(f"hello world number {n}" for n in range(300)))
        sentencepiece.SentencePieceTrainer.train(
            input=str(folder / "text.txt"),
            model_prefix=str(target / "spiece"),
            vocab_size=320,
            model_type="bpe",
            byte_fallback=True,
            minloglevel=2,
        )
    return target


def test_load_and_sources_exclude_each_other(tmp_path: Path):
    path = write_tokenizer_of("json", tmp_path)
    with pytest.raises(ConfigError, match=r"tokenizer\.load takes a tokenizer as it is"):
        trained(path, tmp_path / "out", load=str(path))
    assert not (tmp_path / "out").exists()


def test_a_rank_file_without_a_known_name_asks_for_its_encoding(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = write_rank_file(tmp_path / "tokenizer.model", example_ranks())
    refused = shardline(capsys, "tokenizer", "--load", path, "--output", tmp_path / "out")
    assert refused.code == 2
    assert "--encoding NAME" in refused.err

    made = shardline(capsys, "tokenizer", "--load", path, "--encoding", "llama3", "--output", tmp_path / "out")
    assert made.code == 0, made.err
    assert load_tokenizer(tmp_path / "out").bos_id is not None


def test_a_pipeline_takes_a_tokenizer_over_beside_its_corpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_tokenizer_of("gpt2", tmp_path)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"text number {n}"}) + "\n" for n in range(50)))
    lines = ["corpus: {sources: [a.jsonl], heldout_fraction: 0}", "tokenizer: {load: given}"]
    (tmp_path / "pipeline.yaml").write_text("\n".join(lines))

    done = shardline(capsys, "run", tmp_path / "pipeline.yaml")

    assert done.code == 0, done.err
    (dataset,) = (tmp_path / "store" / "dataset").glob("*/data-00000.bin")
    assert TokenDataset(dataset.parent).vocab_size == 400
