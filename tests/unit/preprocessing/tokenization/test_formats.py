"""Each format gives the ids of an independent reading: the tiktoken and sentencepiece packages, transformers."""

import json
from pathlib import Path

import pytest
from tokenizer_texts import HARD_TEXTS, TRAINING_TEXTS, byte_level_definition, example_ranks, write_rank_file

from contracts.errors import ConfigError
from preprocessing.tokenization.loading import has_tokenizer, load_tokenizer, tokenizer_files, tokenizer_format

TEXTS = (*TRAINING_TEXTS, "".join(HARD_TEXTS))
OWN_PATTERNS = {
    "gpt2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s",
    "cl100k_base": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|"
    r"\s++$|\s*[\r\n]|\s+(?!\S)|\s",
}
"""As tiktoken's `openai_public.py` writes them."""


def write_gpt2_files(folder: Path, *, names: tuple[str, str] = ("vocab.json", "merges.txt"), end: str = "\n") -> Path:
    model = byte_level_definition()["model"]
    folder.mkdir(exist_ok=True)
    (folder / names[0]).write_text(json.dumps(model["vocab"]))
    lines = ["#version: 0.2", *(" ".join(merge) for merge in model["merges"]), ""]
    (folder / names[1]).write_bytes(end.join(lines).encode())
    return folder


@pytest.mark.parametrize("names", [("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_gpt2_files_give_the_ids_of_tokenizer_json(tmp_path: Path, names: tuple[str, str], end: str):
    (tmp_path / "json").mkdir()
    (tmp_path / "json" / "tokenizer.json").write_text(json.dumps(byte_level_definition()))
    tokenizer = load_tokenizer(write_gpt2_files(tmp_path / "pair", names=names, end=end))

    assert tokenizer.encode_batch(TEXTS) == load_tokenizer(tmp_path / "json").encode_batch(TEXTS)
    assert tokenizer.special_tokens == ("<|endoftext|>",)
    assert tokenizer.eod_id == 0
    assert set(tokenizer_files(tmp_path / "pair")) == set(names)


def test_gpt2_files_give_the_ids_of_transformers(tmp_path: Path):
    from transformers import GPT2Tokenizer

    other = GPT2Tokenizer.from_pretrained(write_gpt2_files(tmp_path))
    expected = [other.encode(text, add_special_tokens=False, split_special_tokens=True) for text in TEXTS]

    assert load_tokenizer(tmp_path / "merges.txt").encode_batch(TEXTS) == expected


def test_a_damaged_merge_is_named_by_file_and_line(tmp_path: Path):
    write_gpt2_files(tmp_path)
    lines = (tmp_path / "merges.txt").read_text().split("\n")
    (tmp_path / "merges.txt").write_text("\n".join([*lines[:3], "onlyone", *lines[3:]]))
    with pytest.raises(ConfigError, match=r"merges\.txt, line 4: 'onlyone' is no merge"):
        load_tokenizer(tmp_path)
    (tmp_path / "merges.txt").write_text("zzzz qqqq\n")
    with pytest.raises(ConfigError, match=r"merges\.txt, line 1: the token 'zzzz' is not in the vocabulary"):
        load_tokenizer(tmp_path)
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    with pytest.raises(ConfigError, match=r"vocab\.json: not a byte-level vocabulary"):
        load_tokenizer(tmp_path)


def test_one_of_two_files_is_not_enough(tmp_path: Path):
    write_gpt2_files(tmp_path)
    (tmp_path / "merges.txt").unlink()
    with pytest.raises(ConfigError, match=r"merges\.txt is missing"):
        load_tokenizer(tmp_path / "vocab.json")


@pytest.mark.parametrize("encoding", list(OWN_PATTERNS))
def test_tiktoken_files_give_the_ids_of_tiktoken(tmp_path: Path, encoding: str):
    import tiktoken

    ranks = example_ranks()
    special = {"<|endoftext|>": 50256} if encoding == "gpt2" else {"<|endoftext|>": 100257}
    own = tiktoken.Encoding(encoding, pat_str=OWN_PATTERNS[encoding], mergeable_ranks=ranks, special_tokens=special)
    tokenizer = load_tokenizer(write_rank_file(tmp_path / f"{encoding}.tiktoken", ranks))

    assert tokenizer.encode_batch(TEXTS) == [own.encode_ordinary(text) for text in TEXTS]
    assert tokenizer.eod_id == special["<|endoftext|>"]
    assert all(tokenizer.decode(tokenizer.encode(text)) == text for text in TEXTS)


@pytest.mark.parametrize("encoding", ["o200k_base", "llama3", "qwen2"])
def test_an_encoding_is_known_by_name_or_named(tmp_path: Path, encoding: str):
    import tiktoken

    from preprocessing.tokenization.rank_files import ENCODINGS

    ranks = example_ranks()
    path = write_rank_file(tmp_path / "tokenizer.model", ranks)
    tokenizer = load_tokenizer(path, encoding=encoding)
    own = tiktoken.Encoding("x", pat_str=ENCODINGS[encoding].pattern, mergeable_ranks=ranks, special_tokens={})

    assert tokenizer.encode_batch(TEXTS) == [own.encode_ordinary(text) for text in TEXTS]
    assert tokenizer.eod_id is not None
    with pytest.raises(ConfigError, match=r"says neither pattern nor special tokens.*--encoding NAME"):
        load_tokenizer(path)


def test_a_damaged_rank_file_is_named_by_line(tmp_path: Path):
    path = write_rank_file(tmp_path / "gpt2.tiktoken", example_ranks())
    path.write_bytes(path.read_bytes() + b"!!! 9\n")
    with pytest.raises(ConfigError, match=r"gpt2\.tiktoken, line \d+: not a token in base64"):
        load_tokenizer(path)
    write_rank_file(path, {token: rank for token, rank in example_ranks().items() if token != b"\x07"})
    with pytest.raises(ConfigError, match="the byte 0x07 has no token"):
        load_tokenizer(path)


@pytest.mark.parametrize("lowercase", [True, False])
def test_bert_files_give_the_ids_of_transformers(tmp_path: Path, lowercase: bool):
    from tokenizers import BertWordPieceTokenizer
    from transformers import BertTokenizer

    trained = BertWordPieceTokenizer(lowercase=lowercase)
    trained.train_from_iterator(TRAINING_TEXTS, vocab_size=600, show_progress=False)
    trained.save_model(str(tmp_path))
    other = BertTokenizer.from_pretrained(tmp_path, do_lower_case=lowercase)

    tokenizer = load_tokenizer(tmp_path)
    expected = [other.encode(text, add_special_tokens=False, split_special_tokens=True) for text in TEXTS]
    assert tokenizer.encode_batch(TEXTS) == expected
    assert tokenizer.token(tokenizer.eod_id or 0) == "[SEP]"
    assert tokenizer_format(tmp_path) == "bert"


def sentencepiece_model(folder: Path, **options: object) -> Path:
    import sentencepiece

    lines = [line for text in TRAINING_TEXTS for line in text.replace("\0", "").splitlines() if line.strip()]
    (folder / "text.txt").write_text("\n".join(lines * 2), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"),
        model_prefix=str(folder / "m"),
        vocab_size=700,
        num_threads=1,
        minloglevel=2,
        **options,
    )
    return folder / "m.model"


_LLAMA = {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity", "split_digits": True}
_LLAMA |= {"remove_extra_whitespaces": False, "allow_whitespace_only_pieces": True}
SENTENCEPIECE = {
    "llama": _LLAMA,
    "gemma": {**_LLAMA, "add_dummy_prefix": False, "user_defined_symbols": ["\n", "\n\n", "▁▁", "<table>"]},
    "unigram": {"model_type": "unigram", "normalization_rule_name": "identity"},
    "unigram with bytes": {"model_type": "unigram", "normalization_rule_name": "identity", "byte_fallback": True},
    "whole lines": {"model_type": "unigram", "split_by_whitespace": False, "normalization_rule_name": "identity"},
}


@pytest.mark.parametrize("kind", list(SENTENCEPIECE))
def test_sentencepiece_models_give_the_ids_of_sentencepiece(tmp_path: Path, kind: str):
    import sentencepiece

    path = sentencepiece_model(tmp_path, **SENTENCEPIECE[kind])
    own = sentencepiece.SentencePieceProcessor(model_file=str(path))
    tokenizer = load_tokenizer(path)

    for text, ids in zip(TEXTS, tokenizer.encode_batch(TEXTS), strict=True):
        expected = own.encode(text)
        if "unigram" in str(SENTENCEPIECE[kind]) and ids != expected:
            # Among segmentations of equal score, as of 3000 times "x", rounding has the choice.
            scores = [sum(own.get_score(number) for number in numbers) for numbers in (ids, expected)]
            assert scores[0] == pytest.approx(scores[1], rel=1e-6)
        else:
            assert ids == expected
    assert (tokenizer.eod_id, tokenizer.bos_id) == (own.eos_id(), own.bos_id())
    assert tokenizer_format(path) == "sentencepiece"


def test_sentencepiece_rules_are_followed_but_for_lone_marks(tmp_path: Path):
    import sentencepiece

    path = sentencepiece_model(tmp_path, model_type="bpe")  # nmt_nfkc
    own = sentencepiece.SentencePieceProcessor(model_file=str(path))
    texts = [text for text in HARD_TEXTS if "\u0301start" not in text]
    assert load_tokenizer(path).encode_batch(texts) == [own.encode(text) for text in texts]


def test_a_sentencepiece_model_that_cannot_be_converted_is_refused(tmp_path: Path):
    path = sentencepiece_model(tmp_path, model_type="word")
    with pytest.raises(ConfigError, match="cannot be converted exactly: it is of type 3"):
        load_tokenizer(path)
    path = sentencepiece_model(tmp_path, **{**_LLAMA, "user_defined_symbols": ["<x>"]})
    with pytest.raises(ConfigError, match="user-defined pieces together with a space before the text"):
        load_tokenizer(path)


def test_every_cut_of_a_sentencepiece_model_is_refused_or_whole(tmp_path: Path):
    data = sentencepiece_model(tmp_path, **_LLAMA).read_bytes()
    for size in range(0, len(data) - 1, 997):
        (tmp_path / "cut.model").write_bytes(data[:size])
        with pytest.raises(ConfigError):
            load_tokenizer(tmp_path / "cut.model")


def test_what_is_no_tokenizer_is_not_taken_for_one(tmp_path: Path):
    assert not has_tokenizer(tmp_path)
    (tmp_path / "weights.model").write_bytes(b"\x80\x02binary")
    assert not has_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match="no tokenizer of a known format"):
        load_tokenizer(tmp_path / "weights.model")
    for name in ("a.tiktoken", "b.tiktoken"):
        write_rank_file(tmp_path / name, example_ranks())
    with pytest.raises(ConfigError, match=r"several tokenizers: a\.tiktoken, b\.tiktoken"):
        load_tokenizer(tmp_path)
