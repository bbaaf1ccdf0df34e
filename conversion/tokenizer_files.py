"""The files of the tokenizer that a checkpoint carries, and what they say; light: no torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from contracts.json_text import parse_json
from training.tokenizer_folder import tokenizer_folder

NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
)
_TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


def tokenizer_files(checkpoint: Path) -> dict[str, Path]:
    """Name the files of the tokenizer that a checkpoint carries; {} if it carries none."""
    folder = tokenizer_folder(checkpoint)
    if folder is None:
        return {}
    return {name: folder / name for name in NAMES if (folder / name).is_file()}


def special_token_ids(files: Mapping[str, Path]) -> dict[str, int]:
    """Read bos, eos and pad ids out of a tokenizer's files, for a config.json."""
    ids: dict[str, int] = {}
    tokenizer, config = _json(files.get("tokenizer.json")), _json(files.get("tokenizer_config.json"))
    vocab = (tokenizer.get("model") or {}).get("vocab") or {}
    known = {**(vocab if isinstance(vocab, dict) else {})}
    known |= {item["content"]: item["id"] for item in tokenizer.get("added_tokens") or ()}
    for key in _TOKEN_KEYS:
        token = config.get(key.removesuffix("_id"))
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str) and isinstance(known.get(token), int):
            ids[key] = known[token]
    return ids


def _json(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        data = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}
