"""A finished artifact: a folder with a `manifest.json`, which exists if and only if it is complete."""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from contracts.errors import InputError
from contracts.fingerprint import SHORT_HEX, Recipe

MANIFEST = "manifest.json"
MANIFEST_FORMAT = 1
KINDS = ("corpus", "tokenizer", "dataset", "index", "checkpoint", "model", "evaluation", "report")
MODEL_KINDS = ("checkpoint", "model")


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
        data = {"format": MANIFEST_FORMAT, **asdict(self)}
        return json.dumps(_plain(data), indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str, source: Path) -> "Manifest":
        """Read a manifest.

        Raises:
            InputError: The text is no manifest of a known format.
        """
        try:
            data = json.loads(text)
            if not isinstance(data, dict):
                raise InputError(f"{source}: not a Shardline manifest (it holds a {type(data).__name__}).")
            if data.pop("format") != MANIFEST_FORMAT:
                raise InputError(f"{source}: a manifest of an unknown format. A newer Shardline wrote it; use that.")
            data["recipe"] = Recipe(**data["recipe"])
            data["inputs"] = {name: InputEntry(**entry) for name, entry in data["inputs"].items()}
            data["files"] = tuple(FileEntry(**entry) for entry in data["files"])
            return cls(**data)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{source}: not a Shardline manifest ({error}).") from error


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
