"""How users name an artifact: by path, by name, or by the first digits of its fingerprint."""

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from contracts.artifact import KINDS, MANIFEST, Artifact, read_artifact
from contracts.errors import ConfigError
from contracts.files import folders_in
from contracts.fingerprint import SHORT_HEX

_MIN_DIGITS = 4


class Shelf(Protocol):
    """What a search needs of a store."""

    root: Path

    def artifacts(self) -> Iterator[Artifact]: ...

    def read_or_tell(self, path: Path) -> Artifact | None: ...


def find_artifact(store: Shelf, reference: str) -> Artifact:
    """Find an artifact; see `ArtifactStore.find`."""
    text = reference.strip().rstrip("/")
    path = as_path(text)
    if path is not None and path.is_dir() and (path / MANIFEST).exists():
        return read_artifact(path)
    found = _matches(store, text) if text else []
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(f"{item.kind}/{item.path.name}" for item in found[:10])
        raise ConfigError(f"{reference!r} fits several artifacts: {names}. Give more of the fingerprint.")
    if path is not None and path.is_dir():
        read_artifact(path)  # says whether it is unfinished or no artifact at all
    raise ConfigError(
        f"{_short(reference)} is no folder with an artifact and names none in the store {store.root.absolute()}. "
        f"Give a path, a name such as dataset/pile-0123456789ab, or {_MIN_DIGITS} or more digits of a fingerprint; "
        "or --store, if it lies in another one."
    )


def _matches(store: Shelf, text: str) -> list[Artifact]:
    """Look at names of folders first, so that one artifact among 10,000 is found without reading all."""
    kind, slash, name = text.rpartition("/")
    digits = name.lower()
    is_prefix = len(digits) >= _MIN_DIGITS and all(digit in "0123456789abcdef" for digit in digits)
    found = []
    for k in [k for k in KINDS if k == kind] if slash else KINDS:
        for folder in folders_in(store.root / k):
            short = folder.rpartition("-")[2]
            is_near = short.startswith(digits) or digits.startswith(short)
            if folder == name or (is_prefix and len(short) == SHORT_HEX and is_near):
                artifact = store.read_or_tell(store.root / k / folder)
                if artifact and (folder == name or artifact.fingerprint.startswith(digits)):
                    found.append(artifact)
    if found:
        return found
    return [  # folders that somebody renamed
        item
        for item in store.artifacts()
        if text in (item.name, f"{item.kind}/{item.name}")
        or (is_prefix and not slash and item.fingerprint.startswith(digits))
    ]


def as_path(text: str) -> Path | None:
    """Read a reference as a path to an artifact's folder or manifest; None if it cannot be one."""
    try:
        path = Path(text).expanduser()
        if text and path.exists():
            return path.parent if path.name == MANIFEST else path
    except (OSError, ValueError, RuntimeError):  # too long, a NUL byte, an unknown ~user
        pass
    return None


def _short(reference: str) -> str:
    return repr(reference if len(reference) <= 200 else f"{reference[:197]}...")
