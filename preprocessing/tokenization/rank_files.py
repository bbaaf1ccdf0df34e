"""tiktoken's files of ranks: one line a token, its bytes in base64 and its id.

A file holds neither the pattern nor the special tokens; these belong to an encoding, known by the
content of the file (OpenAI's own), by its name, or named by the user. Sources: `openai_public.py` of
tiktoken 0.14; `llama3/tokenizer.py` of Llama 3 (Meta).
"""

import base64
import binascii
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contracts.errors import ConfigError
from preprocessing.tokenization.byte_level import written
from preprocessing.tokenization.patterns import (
    CL100K_BASE_PATTERN,
    CL100K_PATTERN,
    GPT2_PATTERN,
    O200K_PATTERN,
    QWEN2_PATTERN,
)
from preprocessing.tokenization.vocabulary_files import Definition, definition_of, special_token

_END = "<|endoftext|>"
_FIM = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")


@dataclass(frozen=True)
class Encoding:
    """What a file of ranks does not say.

    Args:
        special: Special tokens and their ids.
        first_special: Id of the first of the `after` tokens; None: after the highest rank.
        after: Special tokens numbered in a row.
        eos: End-of-document token.
    """

    pattern: str
    special: Mapping[str, int]
    after: tuple[str, ...] = ()
    eos: str = _END
    bos: str | None = None


_LLAMA3 = (
    *("<|begin_of_text|>", "<|end_of_text|>"),
    *(f"<|reserved_special_token_{n}|>" for n in range(4)),
    *("<|start_header_id|>", "<|end_header_id|>", "<|reserved_special_token_4|>", "<|eot_id|>"),
    *(f"<|reserved_special_token_{n}|>" for n in range(5, 251)),
)

ENCODINGS: Mapping[str, Encoding] = {
    "gpt2": Encoding(GPT2_PATTERN, {_END: 50256}),
    "r50k_base": Encoding(GPT2_PATTERN, {_END: 50256}),
    "p50k_base": Encoding(GPT2_PATTERN, {_END: 50256}),
    "p50k_edit": Encoding(GPT2_PATTERN, {_END: 50256, **{name: 50281 + n for n, name in enumerate(_FIM)}}),
    "cl100k_base": Encoding(
        CL100K_BASE_PATTERN,
        {_END: 100257, **{name: 100258 + n for n, name in enumerate(_FIM)}, "<|endofprompt|>": 100276},
    ),
    "o200k_base": Encoding(O200K_PATTERN, {_END: 199999, "<|endofprompt|>": 200018}),
    "llama3": Encoding(CL100K_PATTERN, {}, _LLAMA3, eos="<|end_of_text|>", bos="<|begin_of_text|>"),
    "qwen2": Encoding(QWEN2_PATTERN, {}, (_END, "<|im_start|>", "<|im_end|>")),
}
"""Encodings by name."""

_OWN_FILES = {
    "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930": "r50k_base",
    "94b5ca7dff4d00767bc256fdd1b27e5b17361d7b8a5f968547f9f23eb70d2069": "p50k_base",
    "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7": "cl100k_base",
    "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d": "o200k_base",
}


def is_rank_file(head: bytes) -> bool:
    """Say whether a file that begins with `head` is one of ranks."""
    parts = head.partition(b"\n")[0].split()
    if len(parts) != 2 or not parts[1].isdigit():
        return False
    try:
        return bool(base64.b64decode(parts[0], validate=True))
    except binascii.Error:
        return False


def rank_definition(path: Path, encoding: str | None) -> tuple[Definition, dict[str, Any]]:
    """Read a file of ranks; return the definition and the tokenizer's configuration.

    Args:
        encoding: Name of its encoding; None: known by the file.

    Raises:
        ConfigError: The encoding is not known, or the file is damaged.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error}).") from error
    name = encoding or _OWN_FILES.get(hashlib.sha256(data).hexdigest()) or _named(path)
    if name is None or name not in ENCODINGS:
        known = ", ".join(ENCODINGS)
        raise ConfigError(
            f"{path}: a file of tiktoken ranks says neither pattern nor special tokens"
            + (f", and {name!r} is no known encoding." if name else ".")
            + f" Name its encoding ({known}): shardline tokenizer --load {path} --encoding NAME --output DIR"
        )
    ranks = _ranks_of(path, data)
    chosen = ENCODINGS[name]
    special = dict(chosen.special)
    special |= {token: max(ranks.values()) + 1 + n for n, token in enumerate(chosen.after)}
    if clash := set(special.values()) & set(ranks.values()):
        raise ConfigError(f"{path}: the id {min(clash)} is a rank of the file and a special token of {name}.")
    config = {"eos_token": chosen.eos} | ({"bos_token": chosen.bos} if chosen.bos else {})
    return _definition(ranks, chosen.pattern, special), config


def _named(path: Path) -> str | None:
    name = path.name.removesuffix(".tiktoken").removesuffix(".model")
    return {"qwen": "qwen2"}.get(name, name) if name in ENCODINGS or name == "qwen" else None


def _ranks_of(path: Path, data: bytes) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise ConfigError(f"{path}, line {number}: not a token in base64 and its rank.") from None
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing or len(set(ranks.values())) != len(ranks):
        why = f"the byte 0x{missing[0]:02x} has no token" if missing else "two tokens have the same rank"
        raise ConfigError(f"{path}: {why}.")
    return ranks


def _definition(ranks: Mapping[bytes, int], pattern: str, special: Mapping[str, int]) -> Definition:
    merges = merges_of_ranks(ranks)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    pre_tokenizer: dict[str, Any] = byte_level
    if pattern != GPT2_PATTERN:
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        pre_tokenizer = {"type": "Sequence", "pretokenizers": [split, {**byte_level, "use_regex": False}]}
    return definition_of(
        {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,  # tiktoken looks a whole pre-token up first
            # The library gives an added token its id only if the vocabulary has it; no merge leads there.
            "vocab": {written(token): rank for token, rank in ranks.items()} | dict(special),
            "merges": [[written(left), written(right)] for left, right in merges],
        },
        added_tokens=[special_token(token, number) for token, number in special.items()],
        pre_tokenizer=pre_tokenizer,
        decoder=byte_level,
    )


def merges_of_ranks(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Return every pair of tokens that join to a token, in the order in which tiktoken would join them.

    tiktoken joins any two neighbours whose bytes together are a token, the lowest rank first.
    """
    merges: list[tuple[int, int, int, bytes, bytes]] = []
    for token, rank in ranks.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ranks and right in ranks:
                merges.append((rank, ranks[left], ranks[right], left, right))
    return [(left, right) for *_, left, right in sorted(merges)]
