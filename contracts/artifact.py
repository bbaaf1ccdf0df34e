"""A finished artifact: a folder with a `manifest.json`, which exists if and only if it is complete."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from contracts.errors import InputError
from contracts.fingerprint import FINGERPRINT_HEX, SHORT_HEX, Recipe
from contracts.json_text import parse_json

MANIFEST = "manifest.json"
MANIFEST_FORMAT = 1
KINDS = ("corpus", "tokenizer", "dataset", "index", "checkpoint", "model", "evaluation", "report")
MODEL_KINDS = ("checkpoint", "model")
_FINGERPRINT = re.compile(f"[0-9a-f]{{{FINGERPRINT_HEX}}}")
_SHA256 = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class FileEntry:
    """One file of an artifact: path relative to its folder, size, and sha256 of its bytes."""

    path: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class InputEntry:
    """One input artifact as it was when it was used; `path` is relative to the store if inside it."""

    fingerprint: str
    kind: str
    path: str
    content: str


@dataclass(frozen=True)
class Manifest:
    """What `manifest.json` holds.

    Args:
        content: Digest over the files (paths and digests); differs from the fingerprint when a
            rebuild of the same recipe gave other bytes, which downstream calls `stale`.
        config: Full settings, with those that are no part of the identity.
        summary: Numbers and short texts that describe the result.
        provenance: Commit, host, versions, command line, times: recorded, never identity.
    """

    kind: str
    label: str
    fingerprint: str
    content: str
    recipe: Recipe
    config: Mapping[str, Any]
    inputs: Mapping[str, InputEntry]
    files: tuple[FileEntry, ...]
    summary: Mapping[str, Any]
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """Write a manifest; numbers that JSON does not know become the texts "nan", "inf", "-inf"."""
        data = _plain({"format": MANIFEST_FORMAT, **asdict(self)})
        data["sha256"] = _digest(data)
        return json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str, source: Path) -> "Manifest":
        """Read a manifest.

        Raises:
            InputError: The text is no manifest of a known format, or differs from what was written.
        """
        try:
            data = parse_json(text)
            if not isinstance(data, dict):
                raise InputError(f"{source}: not a Shardline manifest (it holds a {type(data).__name__}).")
            if data.pop("format") != MANIFEST_FORMAT:
                raise InputError(f"{source}: a manifest of an unknown format. A newer Shardline wrote it; use that.")
            written = data.pop("sha256", None)
            if written is not None and written != _digest({"format": MANIFEST_FORMAT, **data}):
                raise InputError(
                    f"{source}: damaged or edited: its content has another digest than when it was written. "
                    "Copy it from a backup, or remove the folder and run the stage again."
                )
            data["recipe"] = Recipe(**data["recipe"])
            data["inputs"] = {name: InputEntry(**entry) for name, entry in data["inputs"].items()}
            data["files"] = tuple(FileEntry(**entry) for entry in data["files"])
            manifest = cls(**data)
            manifest._require_sound()
            return manifest
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{source}: not a Shardline manifest ({error}).") from error

    def _require_sound(self) -> None:
        """Refuse values of wrong types, and files outside the artifact's own folder.

        Raises:
            ValueError: Says which.
        """
        if self.kind not in KINDS:
            raise ValueError(f"kind is {self.kind!r}")
        if self.label != legal_label(self.label):
            raise ValueError(f"label is {self.label!r}")
        for digest in (self.fingerprint, self.content, *(item.fingerprint for item in self.inputs.values())):
            if not _FINGERPRINT.fullmatch(digest):
                raise ValueError(f"{digest!r} is no fingerprint")
        for entry in self.files:
            parts = entry.path.split("/")
            if not parts[0] or ".." in parts or "\0" in entry.path:
                raise ValueError(f"the file {entry.path!r} is not inside the artifact")
            if type(entry.size_bytes) is not int or not _SHA256.fullmatch(entry.sha256):
                raise ValueError(f"the entry of the file {entry.path!r} has a wrong size or digest")
        for item in self.inputs.values():
            if item.kind not in KINDS or not isinstance(item.content, str) or "\0" in item.path:
                raise ValueError(f"the input {item.path!r} has a wrong kind, path or content")
        for name in ("config", "summary", "provenance"):
            if not isinstance(getattr(self, name), dict):
                raise ValueError(f"{name} is no group of settings")


@dataclass(frozen=True)
class Artifact:
    """A complete artifact on disk."""

    path: Path
    manifest: Manifest

    @property
    def kind(self) -> str:
        return self.manifest.kind

    @property
    def name(self) -> str:
        return f"{self.manifest.label}-{self.fingerprint[:SHORT_HEX]}"

    @property
    def fingerprint(self) -> str:
        return self.manifest.fingerprint

    @property
    def summary(self) -> Mapping[str, Any]:
        return self.manifest.summary


def read_artifact(path: Path) -> Artifact:
    """Read the artifact in the folder `path`.

    Raises:
        InputError: There is no manifest (the artifact is absent or unfinished), or it is damaged.
    """
    manifest = path / MANIFEST
    try:
        text = manifest.read_text(encoding="utf-8")
    except FileNotFoundError:
        if (path / "recipe.json").is_file():
            raise InputError(
                f"{path} is unfinished: it has no {MANIFEST} yet. Start its stage again; it goes on from there."
            ) from None
        raise InputError(f"{path} holds no artifact: it has no {MANIFEST}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{manifest}: cannot be read ({error}).") from error
    return Artifact(path, Manifest.from_json(text, manifest))


def _digest(data: Mapping[str, Any]) -> str:
    """Digest a manifest's data, so that a flipped bit anywhere in the file is seen when it is read."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def legal_label(label: str) -> str:
    """Make `label` safe as a part of a file name, keeping letters, digits, dot, dash, underscore."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", label).strip("-.")[:100].rstrip("-.") or "unnamed"


def _plain(value: Any) -> Any:
    """Turn numbers of numpy and torch, paths and tuples into what JSON can hold; NaN becomes "nan"."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        items = sorted(value, key=str) if isinstance(value, set | frozenset) else value
        return [_plain(item) for item in items]
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if value - value == 0 else str(value)
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    return str(value)
