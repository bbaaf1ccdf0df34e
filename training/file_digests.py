"""Digests of a checkpoint's files. Never imports torch.

A run takes xxh3_128 of what it writes: damage is found as surely, at thirty times the rate of sha256, which alone would
take longer than a fast disk does (https://xxhash.com). What is written once, such as an import, has sha256;
the digests of a published artifact are sha256 in any case.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import xxhash

from contracts.digests import sha256_of

FAST = "xxh3_128"
SHA256 = "sha256"
_PIECE = 2**22


def differing_digest(path: Path, facts: Mapping[str, Any], *, sha256: Callable[[Path], str] = sha256_of) -> str | None:
    """Compare a file with the digest that was written down when it was made.

    Args:
        path: The file.
        facts: Of a manifest's `files`: {"bytes", "xxh3_128" or "sha256"}.
        sha256: How a sha256 is found; a store remembers those of files that did not change.

    Returns:
        Name of the digest that differs; None: the file is as it was.

    Raises:
        KeyError: No known digest was written down.
    """
    if FAST in facts:
        return None if _fast_digest(path) == facts[FAST] else FAST
    return None if sha256(path) == facts[SHA256] else SHA256


def _fast_digest(path: Path) -> str:
    digest, piece = xxhash.xxh3_128(), memoryview(bytearray(_PIECE))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(piece):
            digest.update(piece[:count])
    return digest.hexdigest()
