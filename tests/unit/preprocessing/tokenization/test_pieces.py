"""Engines give the reference's ids for any text."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ingest_cases import CASES

from preprocessing.tokenization.engines import choose_engine
from preprocessing.tokenization.patterns import CL100K_PATTERN, QWEN2_PATTERN
from preprocessing.tokenization.pieces import PieceEngine, safe_pattern
from preprocessing.tokenization.tokenizer import Tokenizer

PATTERNS = {"gpt2": None, "llama3": CL100K_PATTERN, "qwen2": QWEN2_PATTERN}
HARD = [
    " ",
    "  ",
    "\n",
    "\n\n",
    "\t",
    "\r\n",
    "\x0b",
    "\x1c",
    "\x85",
    "\xa0",
    "\u3000",
    "\u2028",
    "a",
    "Z",
    "the",
    "0",
    "19",
]
HARD += [
    "'",
    "'s",
    "'LL",
    "'ſ",
    "_",
    ".",
    "(",
    "é",
    "e\u0301",
    "数据",
    "🙂",
    "Ω",
    "й",
    "٣",
    "½",
    " the",
    " (",
    "<|endoftext|>",
]


@pytest.fixture(scope="module", params=list(PATTERNS))
def _tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """A byte-level BPE tokenizer with merges, under each pattern."""
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers, trainers

    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<|endoftext|>"], show_progress=False)
    text = Path(json.__file__).read_text(encoding="utf-8") + "".join(HARD) * 20
    inner.train_from_iterator([text], trainer)
    definition: dict[str, Any] = json.loads(inner.to_str())
    if PATTERNS[request.param] is not None:
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        split = {
            "type": "Split",
            "pattern": {"Regex": PATTERNS[request.param]},
            "behavior": "Isolated",
            "invert": False,
        }
        definition["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, byte_level]}
    return Tokenizer(json.dumps(definition), {}, "test")


@settings(max_examples=300)
@given(st.lists(st.one_of(st.lists(st.sampled_from(HARD), max_size=30).map("".join), st.text(max_size=20)), max_size=8))
def test_pieces_give_the_ids_of_whole_texts(_tokenizer: Tokenizer, texts: list[str]):
    engine = choose_engine(_tokenizer)
    assert isinstance(engine, PieceEngine)
    encodable = [text.encode("utf-8", "replace").decode() for text in texts]

    for _ in range(2):  # the second time from the cache
        ids, lengths = engine.encode(encodable)
        found = [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])] if encodable else []
        assert found == _tokenizer.encode_batch(encodable)


@pytest.mark.parametrize("name", ["byte257", "byte257_nfc", "word65550"])
def test_other_tokenizers_are_given_whole_texts(name: str):
    assert safe_pattern(json.loads((CASES / "_tokenizers" / name / "tokenizer.json").read_text())) is None


def test_added_tokens_that_are_not_special_rule_pieces_out(_tokenizer: Tokenizer):
    added = {**_tokenizer.data, "added_tokens": [{"id": 400, "content": "foo bar", "special": False}]}
    assert safe_pattern(added) is None
