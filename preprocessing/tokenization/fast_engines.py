"""The optional engines fastokens and gigatoken, and a bound on the memory of their caches.

Both are given the definition without special tokens, which makes those tokens' text plain text, and
without post-processor. Texts go in as lists and ids come out as arrays; their file readers are never
used.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from preprocessing.tokenization.reference_engine import Engine, Ids, Lengths, UnusableEngineError
from preprocessing.tokenization.tokenizer import Tokenizer

CACHE_BYTES = 192 * 2**20  # growth of the process after which a library is built anew (0.1 to 0.3 CPU-s)
BOUNDED_CACHE_BYTES = 384 * 2**20  # of a library that bounds its cache, at 220 MB
REBUILD_CHARACTERS = 16 * 2**20  # not more often than after so much text
BLIND_CHARACTERS = 256 * 2**20  # where the system does not say how large the process is

Encode = Callable[[Sequence[str]], tuple[Ids, Lengths]]


class LibraryEngine:
    """An optional library, built anew when the process has grown: ids do not depend on its cache.

    gigatoken 0.10.0 keeps every pre-token it ever saw (marcelroed/gigatoken#36); fastokens 0.3.5
    bounds its cache by itself.

    Args:
        build: Builds the library's tokenizer and returns its encoding function.
        cache_bytes: Growth of the resident memory that is allowed.
    """

    def __init__(self, name: str, build: Callable[[], Encode], *, cache_bytes: int = CACHE_BYTES) -> None:
        self.name = name
        self._build = build
        self._cache_bytes = cache_bytes
        self._limit = resident_bytes() + cache_bytes
        self._characters = 0
        self._encode: Encode | None = build()
        self.num_builds = 1

    def encode(self, texts: Sequence[str]) -> tuple[Ids, Lengths]:
        if self._encode is None or self._is_full():
            self._encode = None  # first freed, then built: never two at once
            give_memory_back()
            self._encode = self._build()
            self.num_builds += 1
            self._characters = 0
            # What the process holds besides may have grown; that is no reason to build anew for ever.
            self._limit = max(self._limit, resident_bytes() + self._cache_bytes // 2)
        self._characters += sum(map(len, texts))
        return self._encode(texts)

    def _is_full(self) -> bool:
        resident = resident_bytes()
        if not resident:
            return self._characters > BLIND_CHARACTERS
        return resident > self._limit and self._characters > REBUILD_CHARACTERS


def fastokens_engine(tokenizer: Tokenizer, *, cache_bytes: int = BOUNDED_CACHE_BYTES) -> Engine:
    """Return the engine of the `fastokens` package.

    Raises:
        UnusableEngineError: It does not take this tokenizer.
    """
    definition = engine_definition(tokenizer)

    def build() -> Encode:
        import fastokens

        inner = fastokens.Tokenizer.from_json_str(definition)

        def encode(texts: Sequence[str]) -> tuple[Ids, Lengths]:
            ids, offsets = inner.encode_batch_flat(list(texts))
            ends = np.frombuffer(offsets, dtype="<u8").astype(np.int64)
            return np.frombuffer(ids, dtype="<u4"), ends[1:] - ends[:-1]

        return encode

    return _built("fastokens", build, cache_bytes)


def gigatoken_engine(tokenizer: Tokenizer, *, cache_bytes: int = CACHE_BYTES) -> Engine:
    """Return the engine of the `gigatoken` package, single-threaded.

    Raises:
        UnusableEngineError: It does not take this tokenizer.
    """
    definition = engine_definition(tokenizer)

    def build() -> Encode:
        import gigatoken

        inner = gigatoken.Tokenizer.from_json(definition)

        def encode(texts: Sequence[str]) -> tuple[Ids, Lengths]:
            if not texts:
                return np.empty(0, dtype=np.uint32), np.empty(0, dtype=np.int64)
            layout = inner.encode_batch(list(texts), parallel=False).layout
            ends = np.asarray(layout.offsets.data, dtype=np.int64)
            return np.asarray(layout.content.data, dtype=np.uint32)[ends[0] : ends[-1]], ends[1:] - ends[:-1]

        return encode

    return _built("gigatoken", build, cache_bytes)


def _built(name: str, build: Callable[[], Encode], cache_bytes: int) -> Engine:
    try:
        return LibraryEngine(name, build, cache_bytes=cache_bytes)
    except Exception as error:  # each library raises types of its own for what it does not support
        raise UnusableEngineError(str(error).strip().splitlines()[0] if str(error).strip() else repr(error)) from error


def engine_definition(tokenizer: Tokenizer) -> str:
    """Return `tokenizer.json` as these libraries need it to treat text as text.

    Raises:
        UnusableEngineError: The model is no BPE: others have no check of every document, and Unigram models find
            special tokens in text.
    """
    data: dict[str, Any] = dict(tokenizer.data)
    kind = (data.get("model") or {}).get("type", "BPE")
    if kind != "BPE":
        raise UnusableEngineError(f"only BPE is run by optional engines, not {kind}")
    data["added_tokens"] = [token for token in data.get("added_tokens") or [] if not token.get("special")]
    data |= {"post_processor": None, "truncation": None, "padding": None}
    model = data.get("model")
    if isinstance(model, dict):
        data["model"] = {**model, **({"dropout": None} if "dropout" in model else {}), "vocab": _without_holes(model)}
    return json.dumps(data, ensure_ascii=False)


def _without_holes(model: Mapping[str, Any]) -> Any:
    """Give ids without token a name that no text has: fastokens refuses a vocabulary with holes (cl100k_base)."""
    vocab = model.get("vocab")
    if not isinstance(vocab, dict):
        return vocab
    taken = set(vocab.values())
    return vocab | {f"\ue000{number}": number for number in range(max(taken, default=0)) if number not in taken}


def resident_bytes() -> int:
    """Return the resident memory of this process; 0 where the system does not say."""
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0


def give_memory_back() -> None:
    """Ask the C library to return freed memory to the system, where it can."""
    import ctypes

    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)
