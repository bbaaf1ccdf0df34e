"""The audit finds any id that does not belong, and costs no document."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ingest_cases import CASES
from tokenizer_texts import HARD_TEXTS, TRAINING_TEXTS, byte_level_definition, example_ranks, write_rank_file

from preprocessing.tokenization import audit
from preprocessing.tokenization.audit import ByteCheck, EngineRejectedError, audited_texts, first_difference
from preprocessing.tokenization.engines import ENGINES, make_engine
from preprocessing.tokenization.fast_engines import LibraryEngine, engine_definition
from preprocessing.tokenization.loading import load_tokenizer
from preprocessing.tokenization.patterns import (
    CL100K_BASE_PATTERN,
    CL100K_PATTERN,
    O200K_PATTERN,
    QWEN2_PATTERN,
)
from preprocessing.tokenization.reference_engine import Engine, ReferenceEngine, UnusableEngineError
from preprocessing.tokenization.tokenizer import Tokenizer

PATTERNS = {
    "gpt2": None,
    "cl100k_base": CL100K_BASE_PATTERN,
    "llama3": CL100K_PATTERN,
    "qwen2": QWEN2_PATTERN,
    "o200k_base": O200K_PATTERN,
}


@pytest.fixture(scope="module", params=list(PATTERNS))
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer(json.dumps(byte_level_definition(PATTERNS[request.param])), {}, request.param)


@pytest.mark.parametrize("name", list(ENGINES))
def test_every_engine_gives_the_reference_ids_or_says_that_it_cannot(tokenizer: Tokenizer, name: str):
    try:
        engine = make_engine(name, tokenizer)
    except UnusableEngineError as error:
        assert str(error)
        return
    for _ in range(2):  # the second time from its cache
        assert first_difference(engine, tokenizer, TRAINING_TEXTS) is None
        assert first_difference(engine, tokenizer, ["".join(HARD_TEXTS)]) is None
    ids, lengths = engine.encode([])
    assert (len(ids), len(lengths)) == (0, 0)


@pytest.fixture(scope="module")
def _fast() -> tuple[Tokenizer, list[Engine]]:
    tokenizer = Tokenizer(json.dumps(byte_level_definition()), {}, "test")
    return tokenizer, [make_engine(name, tokenizer) for name in ("gigatoken", "fastokens", "tiktoken")]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.lists(st.sampled_from(HARD_TEXTS[:-2]), max_size=12).map("".join), st.text()), max_size=6))
def test_fast_engines_give_the_reference_ids_of_any_text(_fast: tuple[Tokenizer, list[Engine]], texts: list[str]):
    tokenizer, engines = _fast
    encodable = [text.encode("utf-8", "replace").decode() for text in texts]
    for engine in engines:
        assert first_difference(engine, tokenizer, encodable) is None


@pytest.mark.parametrize("code_points", [range(0x3000), range(0x1F000, 0x20000)], ids=["common", "emoji"])
def test_engines_class_every_character_as_the_reference_does(tokenizer: Tokenizer, code_points: range):
    texts = [f"ab{chr(c)}{chr(c)}c {chr(c)}1 {chr(c)} .{chr(c)}\n{chr(c)}" for c in code_points]
    for name in ("gigatoken", "fastokens", "tiktoken"):
        try:
            engine = make_engine(name, tokenizer)
        except UnusableEngineError:
            continue
        assert first_difference(engine, tokenizer, texts) is None


@pytest.mark.parametrize("name", ["byte257", "byte257_nfc", "byte258_bos", "word65550", "tinymerge"])
@pytest.mark.parametrize("engine", list(ENGINES))
def test_other_tokenizers_are_run_rightly_or_not_at_all(name: str, engine: str):
    tokenizer = load_tokenizer(CASES / "_tokenizers" / name)
    try:
        made = make_engine(engine, tokenizer)
    except UnusableEngineError:
        return
    assert first_difference(made, tokenizer, ["abc", " a  b", "e\u0301", "w1 w65489 x", "a<|endoftext|>"]) is None


def test_ids_without_token_hinder_no_engine(tmp_path: Path):
    """The special tokens of cl100k_base stand apart from its ranks."""
    tokenizer = load_tokenizer(write_rank_file(tmp_path / "cl100k_base.tiktoken", example_ranks()))
    for name in ("fastokens", "tiktoken"):
        assert first_difference(make_engine(name, tokenizer), tokenizer, TRAINING_TEXTS) is None


def encoded(texts: list[str]) -> tuple[Tokenizer, tuple[np.ndarray, np.ndarray, bytes, np.ndarray]]:
    tokenizer = Tokenizer(json.dumps(byte_level_definition()), {}, "test")
    ids, lengths = ReferenceEngine(tokenizer).encode(texts)
    data = [text.encode() for text in texts]
    return tokenizer, (ids, lengths, b"".join(data), np.array([len(item) for item in data]))


@pytest.mark.parametrize("is_compiled", [False, True])
def test_the_byte_check_finds_every_single_changed_id(monkeypatch: pytest.MonkeyPatch, is_compiled: bool):
    monkeypatch.setattr(audit, "COMPILE_ABOVE", 0 if is_compiled else 10**9)
    texts = [*HARD_TEXTS[:-2], "the last"]
    tokenizer, (ids, lengths, data, sizes) = encoded(texts)
    check = ByteCheck.of(tokenizer)
    assert check is not None
    assert check.differing(ids, lengths, data, sizes) == []

    documents = np.repeat(np.arange(len(texts)), lengths)
    for place, document in enumerate(documents):
        for other in (ids[place] ^ 1, 2**32 - 1, tokenizer.vocab_size):
            spoiled = ids.copy()
            spoiled[place] = other
            assert check.differing(spoiled, lengths, data, sizes) == [document]


def test_tokenizers_that_lose_something_have_no_byte_check():
    assert ByteCheck.of(load_tokenizer(CASES / "_tokenizers" / "byte257_nfc")) is None
    assert ByteCheck.of(load_tokenizer(CASES / "_tokenizers" / "word65550")) is None


def test_long_documents_are_compared_in_windows():
    text = "".join(chr(97 + n % 26) for n in range(audit.WHOLE_CHARACTERS + 1))
    parts = audited_texts(text)
    assert len(parts) == 3
    assert (text.startswith(parts[0]), parts[1] in text, text.endswith(parts[2])) == (True, True, True)
    assert audited_texts(text[:-1]) == [text[:-1]]


def test_a_rejection_reaches_the_parent_process():
    error = pickle.loads(pickle.dumps(EngineRejectedError("fastokens", "a.jsonl, byte 7")))
    assert (error.engine, error.place) == ("fastokens", "a.jsonl, byte 7")


def test_special_tokens_are_hidden_from_engines_and_other_added_tokens_are_not():
    added = [{"id": 0, "content": "<|endoftext|>", "special": True}, {"id": 400, "content": "ab", "special": False}]
    tokenizer = Tokenizer(json.dumps(byte_level_definition(added_tokens=[])), {}, "test")
    tokenizer.data["added_tokens"] = added  # type: ignore[index]
    assert [token["content"] for token in json.loads(engine_definition(tokenizer))["added_tokens"]] == ["ab"]


def test_a_library_is_built_anew_when_the_process_has_grown(monkeypatch: pytest.MonkeyPatch):
    sizes = iter([100, 100, 150, 400, 120, 400, 150])
    monkeypatch.setattr("preprocessing.tokenization.fast_engines.resident_bytes", lambda: next(sizes))
    monkeypatch.setattr("preprocessing.tokenization.fast_engines.REBUILD_CHARACTERS", 5)
    empty = (np.empty(0, dtype=np.uint32), np.empty(0, dtype=np.int64))
    engine = LibraryEngine("test", lambda: lambda texts: empty, cache_bytes=200)
    for builds in (1, 1, 2, 2, 2):  # grown at the third call; at the fourth too little was encoded since
        engine.encode(["abcd"])
        assert engine.num_builds == builds
