"""Byte-level tokenizers: the printable characters that stand for bytes, and the bytes of every token.

The table is GPT-2's (Radford et al. 2019, `bytes_to_unicode` of their encoder): printable bytes stand
for themselves, the others for the characters from U+0100 on.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

from preprocessing.tokenization.tokenizer import Tokenizer

_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))


@cache
def byte_of_character() -> Mapping[str, int]:
    """Return the byte that each of the 256 characters stands for."""
    others = [byte for byte in range(256) if byte not in _PRINTABLE]
    return {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + n): byte for n, byte in enumerate(others)}


@cache
def character_of_byte() -> Mapping[int, str]:
    return {byte: character for character, byte in byte_of_character().items()}


def written(token: bytes) -> str:
    """Write a token's bytes as `tokenizer.json` and `vocab.json` do."""
    characters = character_of_byte()
    return "".join(characters[byte] for byte in token)


def bytes_of(token: str) -> bytes | None:
    """Return the bytes that a token is written for; None if it holds other characters."""
    table = byte_of_character()
    try:
        return bytes(table[character] for character in token)
    except KeyError:
        return None


def normalizes(definition: Mapping[str, Any]) -> bool:
    """Say whether a definition has a normalizer that does something."""
    normalizer = definition.get("normalizer")
    return normalizer is not None and normalizer.get("normalizers") != []


def token_bytes(tokenizer: Tokenizer) -> list[bytes] | None:
    """Return the bytes of each id of a byte-level tokenizer that loses nothing, else None.

    An added token's bytes are those of its text. Ids without token have none.
    """
    data = tokenizer.data
    if normalizes(data) or not _is_byte_level(data.get("decoder")):
        return None
    table = [b""] * tokenizer.vocab_size
    added = {int(item["id"]): item["content"] for item in data.get("added_tokens") or []}
    for token, number in tokenizer.vocab.items():
        if number in added:
            continue
        found = bytes_of(token)
        if found is None:
            return None
        table[number] = found
    for number, content in added.items():
        table[number] = content.encode("utf-8", "surrogatepass")
    return table


def _is_byte_level(decoder: Mapping[str, Any] | None) -> bool:
    if decoder is None:
        return False
    steps = decoder.get("decoders") or [decoder]
    return len(steps) == 1 and steps[0].get("type") == "ByteLevel"
