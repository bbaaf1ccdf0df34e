"""Requests to score: a continuation behind a context, encoded so that each scores at least one token."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contracts.errors import ConfigError, InputError
from contracts.json_text import parse_json
from preprocessing.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True)
class Request:
    """One continuation to score.

    Args:
        tokens: Context (at least the prefix token) and continuation.
        first_target: Place of the continuation's first token.
        was_split: Context and continuation were encoded apart, because a token spans both.
    """

    tokens: tuple[int, ...]
    first_target: int
    was_split: bool


def encode(tokenizer: Tokenizer, context: str, continuation: str) -> Request:
    """Encode a pair as one text where that is possible.

    White space at the end of the context moves to the continuation, where tokenizers put it. If the
    joined encoding does not begin with the context's tokens, or leaves the continuation none, both
    are encoded apart. An empty context is the end-of-document token.

    Raises:
        ValueError: The continuation has no token, or the context is empty and there is no prefix token.
    """
    stripped = context.rstrip()
    continuation = context[len(stripped) :] + continuation
    head = tokenizer.encode(stripped)
    if not head:
        if tokenizer.eod_id is None:
            raise ValueError("the context is empty, and the tokenizer has no end-of-document token to stand before it")
        head, tail, was_split = [tokenizer.eod_id], tokenizer.encode(continuation), False
    else:
        joined = tokenizer.encode(stripped + continuation)
        tail = joined[len(head) :]
        was_split = joined[: len(head)] != head or not tail
        if was_split:
            tail = tokenizer.encode(continuation)
    if not tail:
        raise ValueError("the continuation has no token, so there is nothing to score")
    return Request((*head, *tail), len(head), was_split)


def read_requests(path: Path, tokenizer: Tokenizer) -> list[Request]:
    """Read a JSONL file of `{"context": ..., "continuation": ...}`.

    Raises:
        ConfigError: The file cannot be read, or holds no request.
        InputError: A line is no such pair, or scores no token.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"--input {path}: cannot be read ({error.strerror}).") from error
    requests = list(_encoded(enumerate(lines, start=1), path, tokenizer))
    if not requests:
        raise ConfigError(
            f"--input {path}: holds no request. Write one JSON object with context and continuation a line."
        )
    return requests


def _encoded(lines: Iterable[tuple[int, bytes]], path: Path, tokenizer: Tokenizer) -> Iterable[Request]:
    for number, line in lines:
        if not line.strip():
            continue
        try:
            pair: Any = parse_json(line)
            if not isinstance(pair, Mapping):
                raise ValueError("it is no JSON object")
            texts = [pair.get(key) for key in ("context", "continuation")]
            if not all(isinstance(text, str) for text in texts):
                raise ValueError(f"context and continuation must both be texts; its keys are {', '.join(pair)}")
            yield encode(tokenizer, str(texts[0]), str(texts[1]))
        except ValueError as error:
            raise InputError(f"{path}, line {number}: {error}. Mend or remove the line.") from error
