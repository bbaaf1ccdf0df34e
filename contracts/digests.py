"""Content digests: of raw files (remembered between runs) and of the files of an artifact."""

import contextlib
import hashlib
import json
import os
import re
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from contracts.artifact import MANIFEST, Artifact, FileEntry
from contracts.errors import ConfigError, InputError, ShardlineError
from contracts.files import write_atomically
from contracts.fingerprint import canonical_json
from contracts.json_text import parse_json

# Kept by the store beside an artifact's files; not part of it.
BOOKKEEPING = ("recipe.json", "progress.json", "attempts.jsonl", "result.json", MANIFEST)
# Files of an artifact that tell of the run and not of the result: digested, but no part of its content.
_RECORDS = ("logs/", "metrics.jsonl")
_RACY_S = 1.0
_DIGEST = re.compile(r"[0-9a-f]{64}")


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class DigestCache:
    """Remembers sha256 digests of files outside the store by (path, size, mtime_ns).

    The memory is a file of JSON lines that is only appended to, so that two processes may write
    at once; a broken line or a lost file costs hashing anew and nothing else.

    Args:
        path: The file of the memory. It is read once.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: dict[str, tuple[int, int, str]] | None = None

    def digest(self, file: Path) -> str:
        """Return the sha256 of one file.

        Raises:
            ConfigError: The file is missing or cannot be read.
            InputError: The file changed while it was read.
        """
        if self._known is None:
            self._known = self._read()
        try:
            before = file.stat()
            key = os.path.realpath(file)
            entry = self._known.get(key)
            if entry is not None and entry[:2] == (before.st_size, before.st_mtime_ns):
                return entry[2]
            value = sha256_of(file)
            after = file.stat()
        except OSError as error:
            raise ConfigError(f"{file}: cannot be read ({error.strerror or error}).") from error
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise InputError(f"{file} changed while it was read. Wait until its writer is done, then try again.")
        # A file written a moment ago may change again within one tick of its time stamp.
        if time.time() - before.st_mtime > _RACY_S:
            self._known[key] = (before.st_size, before.st_mtime_ns, value)
            self._append(key, self._known[key])
        return value

    def digest_all(self, files: Mapping[str, Path]) -> dict[str, str]:
        """Return the digest of each named file, several at a time; see `digest`."""
        if self._known is None:
            self._known = self._read()
        with ThreadPoolExecutor(max_workers=_threads()) as pool:
            return dict(zip(files, pool.map(self.digest, files.values()), strict=True))

    def _append(self, key: str, entry: tuple[int, int, str]) -> None:
        line = json.dumps([key, *entry]) + "\n"
        with contextlib.suppress(OSError):  # a read-only or full store still works, only slower
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab", buffering=0) as file:
                file.write(line.encode())

    def _read(self) -> dict[str, tuple[int, int, str]]:
        try:
            lines = self.path.read_bytes().splitlines()
        except OSError:
            return {}
        known: dict[str, tuple[int, int, str]] = {}
        for line in lines:
            with contextlib.suppress(ValueError, TypeError):
                key, size_bytes, mtime_ns, value = parse_json(line)
                if _DIGEST.fullmatch(value):
                    known[str(key)] = (int(size_bytes), int(mtime_ns), value)
        if len(lines) > 2 * len(known) + 1000:
            text = "".join(json.dumps([key, *entry]) + "\n" for key, entry in known.items())
            with contextlib.suppress(OSError):
                write_atomically(self.path, text, is_durable=False)
        return known


def digest_files(path: Path, known: Mapping[str, str] | None = None) -> tuple[FileEntry, ...]:
    """List the files below `path` with sizes and digests; locks and leftovers of writes stay out.

    Args:
        path: Folder of an artifact.
        known: Digests that the writer already has, by path relative to `path`; those files are not read.

    Raises:
        ShardlineError: A symbolic link leads out of the folder or nowhere, so a moved store would lose it.
        ValueError: A digest in `known` is no sha256 in hex.
    """
    known = known or {}
    if wrong := [name for name, value in known.items() if not _DIGEST.fullmatch(value)]:
        raise ValueError(f"The digest handed over for {wrong[0]} is no sha256 in hex: {known[wrong[0]]!r}.")
    files = sorted((_relative(file, path), file) for file in path.rglob("*") if not _is_folder(file, path))
    files = [(name, file) for name, file in files if not _is_transient(name)]
    unread = [file for name, file in files if name not in known]
    with ThreadPoolExecutor(max_workers=_threads()) as pool:
        found = dict(zip(unread, pool.map(sha256_of, unread), strict=True))
    return tuple(
        FileEntry(name, file.stat().st_size, found[file] if file in found else known[name]) for name, file in files
    )


def content_digest(files: Iterable[FileEntry]) -> str:
    """Digest the content of an artifact: paths and digests of its files, without records of the run."""
    lines = "".join(f"{entry.sha256}  {entry.path}\n" for entry in files if not entry.path.startswith(_RECORDS))
    return hashlib.sha256(lines.encode()).hexdigest()[:32]


def missing_files(artifact: Artifact) -> list[str]:
    """Name the files of an artifact that are gone or have another size; a quick check."""
    wrong = []
    for entry in artifact.manifest.files:
        try:
            size_bytes = (artifact.path / entry.path).stat().st_size
        except OSError:
            size_bytes = -1
        if size_bytes != entry.size_bytes:
            wrong.append(entry.path)
    return wrong


def damaged_files(artifact: Artifact) -> list[str]:
    """Re-read every file of an artifact and name those whose digest differs; a full check."""
    wrong = set(missing_files(artifact))
    entries = [entry for entry in artifact.manifest.files if entry.path not in wrong]
    with ThreadPoolExecutor(max_workers=_threads()) as pool:
        digests = pool.map(lambda entry: _digest_or_none(artifact.path / entry.path), entries)
        wrong.update(e.path for e, digest in zip(entries, digests, strict=True) if digest != e.sha256)
    return sorted(wrong)


def manifest_contradictions(artifact: Artifact) -> list[str]:
    """Say where a manifest contradicts itself or the recipe beside it."""
    manifest, found = artifact.manifest, []
    try:
        recipe = canonical_json(manifest.recipe.as_dict())
        if manifest.recipe.fingerprint != manifest.fingerprint:
            found.append(f"{artifact.path / MANIFEST}: its fingerprint is not that of its recipe")
    except ValueError as error:
        return [f"{artifact.path / MANIFEST}: its recipe has no canonical form ({error})"]
    if not (artifact.path / MANIFEST).read_bytes().endswith(b"\n"):
        found.append(f"{artifact.path / MANIFEST}: its last byte is missing")
    if content_digest(manifest.files) != manifest.content:
        found.append(f"{artifact.path / MANIFEST}: its content digest is not that of its files")
    try:
        is_same = (artifact.path / "recipe.json").read_bytes() == recipe.encode()
    except OSError:
        is_same = False
    if not is_same:
        found.append(f"{artifact.path / 'recipe.json'}: missing, or not the recipe of the manifest")
    return found


def _digest_or_none(path: Path) -> str | None:
    try:
        return sha256_of(path)
    except OSError:
        return None


def _relative(file: Path, root: Path) -> str:
    return file.relative_to(root).as_posix()


def _is_folder(file: Path, root: Path) -> bool:
    if file.is_symlink():
        target = Path(os.path.realpath(file))
        if not target.exists() or not target.is_relative_to(os.path.realpath(root)):
            raise ShardlineError(
                f"{file} is a symbolic link to {file.readlink()}, which is no part of the artifact. "
                "Copy the file, so that the artifact holds all that it needs."
            )
    return file.is_dir()


def _is_transient(name: str) -> bool:
    return name in BOOKKEEPING or name.startswith(".lock") or name.endswith(".tmp")


def _threads() -> int:
    return min(8, os.cpu_count() or 1)
