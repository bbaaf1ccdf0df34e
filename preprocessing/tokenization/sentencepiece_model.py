"""SentencePiece `.model` files (Unigram and BPE), converted to a definition of the `tokenizers` library.

The file is a protocol buffer (`sentencepiece_model.proto`, Kudo and Richardson 2018, arXiv
1808.06226); the few fields that matter are read here, without the sentencepiece package. What
cannot be said exactly in the other library's terms is refused. The tests compare the result with
the package itself.
"""

import base64
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contracts.errors import ConfigError
from preprocessing.tokenization.vocabulary_files import Definition, definition_of, special_token

SPACE = "\u2581"
STRANGE = "\ue000"  # private use: in no vocabulary
UNIGRAM, BPE = 1, 2
NEVER = -1e5  # score of pieces that text never becomes: the library would find "</s>" in text otherwise
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


@dataclass(frozen=True)
class Piece:
    text: str
    score: float
    kind: int


@dataclass(frozen=True)
class Model:
    """What a `.model` file holds.

    Args:
        kind: UNIGRAM or BPE.
        pieces: By id.
        charsmap: Compiled normalization rules; empty: none.
        adds_prefix, squeezes, escapes: A space before the text; runs of spaces become one; a space becomes U+2581.
    """

    kind: int
    pieces: tuple[Piece, ...]
    has_bytes: bool
    charsmap: bytes
    adds_prefix: bool
    squeezes: bool
    escapes: bool
    is_space_last: bool


def read_model(data: bytes, name: str) -> Model:
    """Read a `.model` file.

    Raises:
        ConfigError: It is none, or damaged.
    """
    try:
        fields = list(_fields(data))
        pieces = tuple(_piece(value) for number, value in fields if number == 1 and isinstance(value, bytes))
        trainer, normalizer = (_last(fields, number) for number in (2, 3))
    except (ValueError, IndexError, struct.error) as error:
        raise ConfigError(f"{name}: not a SentencePiece model, or a damaged one ({error}).") from error
    if not pieces or not trainer or not normalizer:
        raise ConfigError(f"{name}: not a whole SentencePiece model: it lacks pieces, or how they are used.")
    return Model(
        kind=int(trainer.get(3, UNIGRAM)),
        pieces=pieces,
        has_bytes=bool(trainer.get(35, 0)),
        charsmap=bytes(normalizer.get(2, b"")),
        adds_prefix=bool(normalizer.get(3, 1)),
        squeezes=bool(normalizer.get(4, 1)),
        escapes=bool(normalizer.get(5, 1)),
        is_space_last=bool(trainer.get(24, 0)),
    )


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield number and value of each field of a message: varints as int, all others as bytes."""
    place = 0

    def varint() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = data[place]
            place += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
            if shift > 63:
                raise ValueError("a number of more than 64 bits")

    while place < len(data):
        key = varint()
        wire = key & 7
        if wire == 0:
            yield key >> 3, varint()
            continue
        if wire not in (1, 2, 5):
            raise ValueError(f"wire type {wire} at byte {place}")
        size = {1: 8, 5: 4}.get(wire) or varint() if wire != 2 else varint()
        if place + size > len(data):
            raise ValueError(f"it ends early, at byte {len(data)}")
        yield key >> 3, data[place : place + size]
        place += size


def _last(fields: list[tuple[int, int | bytes]], number: int) -> dict[int, Any]:
    found = [value for key, value in fields if key == number and isinstance(value, bytes)]
    return dict(_fields(found[-1])) if found else {}


def _piece(data: bytes) -> Piece:
    values: dict[int, Any] = dict(_fields(data))
    (score,) = struct.unpack("<f", values.get(2, b"\0\0\0\0"))
    return Piece(bytes(values.get(1, b"")).decode("utf-8"), score, int(values.get(3, NORMAL)))


def sentencepiece_definition(path: Path) -> tuple[Definition, dict[str, Any]]:
    """Convert a `.model` file; return the definition and the tokenizer's configuration.

    Raises:
        ConfigError: It is damaged, or cannot be converted exactly; says why.
    """
    try:
        model = read_model(path.read_bytes(), str(path))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error}).") from error
    if reason := _why_not(model):
        raise ConfigError(
            f"{path}: this SentencePiece model cannot be converted exactly: {reason}. "
            "Give the tokenizer's own tokenizer.json, if it has one."
        )
    added = [
        {
            **special_token(piece.text, number),
            "special": piece.kind != USER_DEFINED,
            "normalized": piece.kind == USER_DEFINED,  # matched after spaces have become U+2581
        }
        for number, piece in enumerate(model.pieces)
        if piece.kind in (CONTROL, UNKNOWN, USER_DEFINED)
    ]
    definition = definition_of(
        _unigram(model) if model.kind == UNIGRAM else _bpe(model),
        added_tokens=added,
        normalizer={"type": "Sequence", "normalizers": _normalizers(model)},
        pre_tokenizer=_pre_tokenizer(model),
        decoder={"type": "Sequence", "decoders": _decoders(model)},
    )
    control = {piece.text for piece in model.pieces if piece.kind == CONTROL}
    config = {key: token for key, token in (("bos_token", "<s>"), ("eos_token", "</s>")) if token in control}
    return definition, config


def _why_not(model: Model) -> str:
    texts = [piece.text for piece in model.pieces]
    if model.kind not in (UNIGRAM, BPE):
        return f"it is of type {model.kind}; only unigram (1) and bpe (2) are supported"
    if not model.escapes or model.is_space_last:
        return "it does not write spaces before words as U+2581"
    if sum(piece.kind == UNKNOWN for piece in model.pieces) != 1:
        return "it has not exactly one unknown piece"
    if len(set(texts)) != len(texts):
        return "a piece stands twice"
    if any(piece.kind == UNUSED for piece in model.pieces):
        return "it has unused pieces"
    if model.adds_prefix and any(piece.kind == USER_DEFINED for piece in model.pieces):
        return "it has user-defined pieces together with a space before the text"
    return ""


def _unigram(model: Model) -> dict[str, Any]:
    return {
        "type": "Unigram",
        "unk_id": next(n for n, piece in enumerate(model.pieces) if piece.kind == UNKNOWN),
        "vocab": [
            [piece.text, piece.score if piece.kind in (NORMAL, USER_DEFINED) else NEVER] for piece in model.pieces
        ],
        "byte_fallback": model.has_bytes,
    }


def _bpe(model: Model) -> dict[str, Any]:
    vocab = {piece.text: number for number, piece in enumerate(model.pieces)}
    unknown = next(piece.text for piece in model.pieces if piece.kind == UNKNOWN)
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": model.has_bytes,
        "ignore_merges": False,
        "vocab": vocab,
        "merges": _merges(model),
    }


def _merges(model: Model) -> list[list[str]]:
    """Return every pair that joins to a piece: SentencePiece joins any such neighbours, the highest score first."""
    joins = {piece.text: number for number, piece in enumerate(model.pieces) if piece.kind == NORMAL}
    merges = []
    for text, number in joins.items():
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in joins and right in joins:
                merges.append((-model.pieces[number].score, number, joins[left], joins[right], left, right))
    return [[left, right] for *_, left, right in sorted(merges)]


def _normalizers(model: Model) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = []
    if model.charsmap:
        steps.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(model.charsmap).decode()})
    if model.kind == UNIGRAM and not model.has_bytes:
        steps += _replaced_control(model)
    if model.squeezes:
        steps.append({"type": "Replace", "pattern": {"Regex": r"\A +| +\z|(?<= ) +"}, "content": ""})
    if model.adds_prefix:
        steps.append({"type": "Prepend", "prepend": SPACE})
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})
    return steps


def _replaced_control(model: Model) -> list[dict[str, Any]]:
    """Return steps that keep the text of control pieces from being them, where it has unknown characters.

    T5's model knows no "<": "</s>" in text is unknown, "/s", unknown, and so is what stands for it here.
    """
    known = {character for piece in model.pieces if piece.kind == NORMAL for character in piece.text}
    steps = []
    for piece in model.pieces:
        if piece.kind in (CONTROL, UNKNOWN) and not known.issuperset(piece.text) and STRANGE not in known:
            content = "".join(character if character in known else STRANGE for character in piece.text)
            steps.append({"type": "Replace", "pattern": {"String": piece.text}, "content": content})
    return steps


def _pre_tokenizer(model: Model) -> dict[str, Any] | None:
    """Cut before the spaces between words, where no piece crosses such a place: a cut there changes nothing."""
    if any(SPACE in piece.text.lstrip(SPACE) for piece in model.pieces):
        return None
    pattern = f"{SPACE}*[^{SPACE}]+|{SPACE}+"
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _decoders(model: Model) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}]
    if model.has_bytes:
        steps.append({"type": "ByteFallback"})
    steps.append({"type": "Fuse"})
    if model.adds_prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return steps
