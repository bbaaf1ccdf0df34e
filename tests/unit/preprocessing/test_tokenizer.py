"""Tokenizers: text is text, ids fit, and what is missing is said."""

import json
from pathlib import Path

import numpy as np
import pytest
from ingest_cases import CASES

from contracts.errors import ConfigError
from preprocessing.tokenization.loading import load_tokenizer
from preprocessing.tokenization.tokenizer import token_dtype

TOKENIZERS = CASES / "_tokenizers"


def test_a_special_token_in_a_text_is_its_characters():
    tokenizer = load_tokenizer(TOKENIZERS / "byte257")
    assert tokenizer.encode("a<|endoftext|>") == list(b"a<|endoftext|>")
    assert tokenizer.decode([*b"a", 256]) == "a<|endoftext|>"


def test_no_post_processor_adds_bos():
    assert load_tokenizer(TOKENIZERS / "byte258_bos").encode("ab") == [97, 98]


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path):
    data = json.loads((TOKENIZERS / "byte257" / "tokenizer.json").read_text())
    data["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    data["padding"] = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0}
    data["padding"] |= {"pad_type_id": 0, "pad_token": "x"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))

    assert load_tokenizer(tmp_path).encode_batch(["abcd", "e"]) == [[97, 98, 99, 100], [101]]


@pytest.mark.parametrize(
    ("name", "vocab_size", "eod"),
    [("byte257", 257, 256), ("byte256_noeos", 256, None), ("byte258_bos", 258, 256), ("word65550", 65550, 65490)],
)
def test_vocabulary_and_end_of_document_are_found(name: str, vocab_size: int, eod: int | None):
    tokenizer = load_tokenizer(TOKENIZERS / name / "tokenizer.json")
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (vocab_size, eod)


@pytest.mark.parametrize("eos", ["<s>", {"content": "<s>", "lstrip": False}])
def test_the_configured_end_goes_before_usual_names(tmp_path: Path, eos: object):
    (tmp_path / "tokenizer.json").write_bytes((TOKENIZERS / "byte258_bos" / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    assert load_tokenizer(tmp_path).eod_id == 257


@pytest.mark.parametrize(
    ("vocab_size", "name"), [(65499, "uint16"), (65500, "int32"), (65536, "int32"), (257, "uint16")]
)
def test_the_token_type_follows_megatrons_limit(vocab_size: int, name: str):
    assert token_dtype(vocab_size) == np.dtype(name)


def test_what_is_no_tokenizer_is_said(tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="not a tokenizer of the `tokenizers` library"):
        load_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match="there is no tokenizer here"):
        load_tokenizer(tmp_path / "nope")
