"""Documents divided by hash: a document stays on its side when others are added, removed or reordered."""

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]


def document_keys(digests: Sequence[bytes]) -> U64:
    """Return the first 8 bytes of each document's digest as a number: (documents,)."""
    joined = b"".join(digest[:8] for digest in digests)
    return np.frombuffer(joined, dtype=">u8").astype(np.uint64)


def token_keys(documents: Sequence[npt.NDArray[np.generic]]) -> U64:
    """Return keys of documents whose text is not known, by their token ids: (documents,).

    Ids are widened to 4 bytes, so that the token type of the file does not matter.
    """
    digests = [hashlib.blake2b(ids.astype("<u4").tobytes(), digest_size=8).digest() for ids in documents]
    return document_keys(digests)


def places(keys: U64, seed: int) -> npt.NDArray[np.float64]:
    """Map keys to [0, 1), evenly and independently for each seed: (documents,).

    SplitMix64's output function (Steele, Lea and Flood 2014, doi 10.1145/2660193.2660195) over key + seed.
    """
    with np.errstate(over="ignore"):
        value = keys + np.uint64(seed) * np.uint64(0x9E3779B97F4A7C15)
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        value = value ^ (value >> np.uint64(31))
    return (value >> np.uint64(11)).astype(np.float64) * 2.0**-53
