"""Vocabularies in separate files: GPT-2's `vocab.json` + `merges.txt`, and BERT's `vocab.txt`.

Each becomes the definition that `tokenizer.json` would hold. Lines end at "\\n" alone: tokens may hold
other characters that Python takes for the end of a line.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from contracts.errors import ConfigError
from contracts.json_text import parse_json
from preprocessing.tokenization.byte_level import byte_of_character

Definition = dict[str, Any]

SPECIAL_KEYS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def special_token(content: str, number: int) -> dict[str, Any]:
    """Return an entry of `added_tokens`."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": content, **flags, "special": True}


def definition_of(model: Mapping[str, Any], **parts: Any) -> Definition:
    """Return a whole `tokenizer.json` around a model."""
    empty = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"))
    return {"version": "1.0", **empty, "added_tokens": [], **parts, "model": dict(model)}


def gpt2_definition(vocab_path: Path, merges_path: Path, config: Mapping[str, Any]) -> Definition:
    """Read byte-level BPE from a vocabulary and its merges, as GPT-2, RoBERTa and BART keep it.

    Raises:
        ConfigError: A file is damaged, or the vocabulary is of another kind; names the file and line.
    """
    vocab = _vocab_of(vocab_path)
    if missing := [character for character in byte_of_character() if character not in vocab]:
        raise ConfigError(
            f"{vocab_path}: not a byte-level vocabulary: it lacks {len(missing)} of the 256 byte characters, "
            f"first {missing[0]!r}. Give the tokenizer's tokenizer.json instead."
        )
    merges = _merges_of(merges_path, vocab)
    made = {left + right for left, right in merges}
    named = {_content(config.get(key)) for key in SPECIAL_KEYS}
    special = [
        token
        for token in vocab
        if token in named or (token not in made and len(token) > 1 and token.startswith("<") and token.endswith(">"))
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": bool(config.get("add_prefix_space", False))}
    byte_level |= {"trim_offsets": True, "use_regex": True}
    return definition_of(
        {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [list(merge) for merge in merges],
        },
        added_tokens=sorted((special_token(t, vocab[t]) for t in special), key=lambda item: item["id"]),
        pre_tokenizer=byte_level,
        decoder=byte_level,
    )


def _content(value: Any) -> Any:
    return value.get("content") if isinstance(value, Mapping) else value


def _vocab_of(path: Path) -> dict[str, int]:
    try:
        data = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: the vocabulary cannot be read ({error}).") from error
    is_vocab = isinstance(data, dict) and all(type(number) is int and number >= 0 for number in data.values())
    if not is_vocab or not data:
        raise ConfigError(f"{path}: not a vocabulary; it must be one JSON object of tokens and their ids.")
    if len(set(data.values())) != len(data):
        raise ConfigError(f"{path}: two tokens have the same id.")
    return dict(data)


def _merges_of(path: Path, vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    merges: list[tuple[str, str]] = []
    for number, line in enumerate(text_lines(path), 1):
        if not line or (number == 1 and line.startswith("#version")):
            continue
        parts = line.split(" ")
        if len(parts) != 2 or not all(parts):
            raise ConfigError(f"{path}, line {number}: {line!r} is no merge; each line is two tokens and one space.")
        left, right = parts
        for token in (left, right, left + right):
            if token not in vocab:
                raise ConfigError(f"{path}, line {number}: the token {token!r} is not in the vocabulary beside it.")
        merges.append((left, right))
    return merges


def text_lines(path: Path) -> list[str]:
    """Return the lines of a file, without "\\n" and a "\\r" before it.

    Raises:
        ConfigError: It cannot be read, or is not UTF-8.
    """
    try:
        text = path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}).") from error
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    return lines[:-1] if lines and not lines[-1] else lines


def bert_definition(path: Path, config: Mapping[str, Any]) -> Definition:
    """Read WordPiece from BERT's `vocab.txt`: one token a line, its id the line's number from 0.

    `do_lower_case`, `strip_accents` and `tokenize_chinese_chars` come from tokenizer_config.json. Without
    it, a vocabulary without any capital letter counts as lower-cased.

    Raises:
        ConfigError: There is no unknown token.
    """
    tokens = text_lines(path)
    vocab = {token: number for number, token in enumerate(tokens)}  # of a token that stands twice, the last counts
    unknown = _content(config.get("unk_token")) or "[UNK]"
    if unknown not in vocab:
        raise ConfigError(f"{path}: not a WordPiece vocabulary; it has no unknown token {unknown!r}.")
    lower = config.get("do_lower_case")
    if lower is None:
        lower = not _has_capitals(tokens)
    named = [_content(config.get(key)) for key in SPECIAL_KEYS]
    usual = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<|endoftext|>")
    special = [token for token in vocab if token in usual or token in named]
    return definition_of(
        {
            "type": "WordPiece",
            "unk_token": unknown,
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": vocab,
        },
        added_tokens=[special_token(token, vocab[token]) for token in special],
        normalizer={
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": bool(config.get("tokenize_chinese_chars", True)),
            "strip_accents": config.get("strip_accents"),
            "lowercase": bool(lower),
        },
        pre_tokenizer={"type": "BertPreTokenizer"},
        decoder={"type": "WordPiece", "prefix": "##", "cleanup": True},
    )


def _has_capitals(tokens: Sequence[str]) -> bool:
    return any(token != token.lower() and not (token.startswith("[") and token.endswith("]")) for token in tokens)
