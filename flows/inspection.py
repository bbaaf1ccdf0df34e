"""Finds out what a path holds, and passes the question on to the stage that owns the format."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from contracts.artifact import MANIFEST, Artifact
from contracts.digests import damaged_files, manifest_contradictions
from contracts.errors import ConfigError, ShardlineError
from contracts.store import RECIPE


def kind_of_path(path: Path) -> str:
    """Say what a path holds: dataset, tokenizer, checkpoint, corpus, or an artifact of another kind.

    Raises:
        ConfigError: It holds nothing that Shardline knows, or does not exist.
    """
    if path.suffix in (".bin", ".idx") or path.with_name(f"{path.name}.idx").is_file():
        return "dataset"
    if path.name == "tokenizer.json":
        return "tokenizer"
    if not path.exists():
        raise ConfigError(f"{path} does not exist.")
    if path.is_dir():
        if any(path.glob("*.idx")):
            return "dataset"
        from conversion.detect import format_of

        if format_of(path) is not None:
            return "checkpoint"
    from preprocessing.tokenization.loading import has_tokenizer

    if has_tokenizer(path):
        return "tokenizer"
    raise ConfigError(
        f"{path} holds nothing that Shardline knows: no artifact, no .bin/.idx, no tokenizer, no checkpoint."
    )


def inspect_path(path: Path, artifact: Artifact | None) -> dict[str, Any]:
    """Return facts about a path as plain data; `artifact` adds what its manifest says."""
    path = path.absolute() if path.name == "" else path
    result: dict[str, Any] = {"path": str(path)}
    if artifact is not None:
        manifest = artifact.manifest
        result |= {
            "artifact": artifact.name,
            "kind": artifact.kind,
            "fingerprint": artifact.fingerprint,
            "content": manifest.content,
            "files": len(manifest.files),
            "bytes": sum(entry.size_bytes for entry in manifest.files),
            "inputs": {name: f"{entry.kind} {entry.fingerprint[:12]}" for name, entry in manifest.inputs.items()},
            "summary": dict(manifest.summary),
        }
    kind = artifact.kind if artifact is not None else kind_of_path(path)
    result.setdefault("kind", kind)
    return result | _details(kind, path)


def _details(kind: str, path: Path) -> dict[str, Any]:
    if kind == "dataset":
        from preprocessing.dataset.inspection import inspect_dataset

        return inspect_dataset(path)
    if kind == "tokenizer":
        from preprocessing.dataset.inspection import inspect_tokenizer

        return inspect_tokenizer(path)
    if kind in ("checkpoint", "model"):
        from conversion.inspection import inspect_checkpoint

        return inspect_checkpoint(path)
    return {}


def verify_path(path: Path, artifact: Artifact | None) -> tuple[list[str], list[str]]:
    """Re-read all of a path.

    Returns:
        problems: One line for each thing that is damaged.
        checked: What was looked at.
    """
    problems: list[str] = []
    checked: list[str] = []
    if artifact is not None:
        checked.append(f"{len(artifact.manifest.files)} files by digest")
        problems += [
            f"{path / name}: {'its bytes are not those of the manifest' if (path / name).exists() else 'missing'}"
            for name in damaged_files(artifact)
        ]
        problems += manifest_contradictions(artifact)
    elif (path / RECIPE).is_file():
        problems.append(f"{path} is unfinished: without {MANIFEST} its files cannot be checked by digest")
    kind = artifact.kind if artifact is not None else kind_of_path(path)
    try:
        what, found = _verify_kind(kind, path)
        checked += what
        problems += found
    except ShardlineError as error:
        problems.append(str(error))
    return list(dict.fromkeys(problems)), checked


def _verify_kind(kind: str, path: Path) -> tuple[list[str], list[str]]:
    """Check what only the format's owner understands; returns what was looked at, and the problems."""
    if kind == "dataset":
        from preprocessing.dataset.inspection import verify_dataset

        return [".idx against .bin, token ids against the vocabulary"], verify_dataset(path)
    if kind in ("checkpoint", "model"):
        from conversion.inspection import verify_checkpoint

        return ["tensors: names, shapes, files"], verify_checkpoint(path)
    if kind == "tokenizer":
        from preprocessing.tokenization.loading import load_tokenizer

        load_tokenizer(path)
        return ["the tokenizer loads"], []
    return [], []


def weight_differences(a: Path, b: Path) -> dict[str, Any]:
    """Compare the tensors of two checkpoints; {} if either path is none."""
    from conversion.detect import format_of
    from conversion.inspection import compare_checkpoints

    if not (a.is_dir() and b.is_dir()) or format_of(a) is None or format_of(b) is None:
        return {}
    return {"weights": compare_checkpoints(a, b)}


def render(value: Mapping[str, Any], indent: str = "") -> list[str]:
    """Write nested data as aligned lines for a person."""
    lines: list[str] = []
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            lines += [f"{indent}{key}:", *render(item, indent + "  ")]
        elif isinstance(item, list) and item and isinstance(item[0], Mapping):
            lines.append(f"{indent}{key}: ({', '.join(str(name) for name in item[0])})")
            lines += [f"{indent}  " + "  ".join(_short(v) for v in row.values()) for row in item]
        else:
            width = max(1, 26 - len(indent))
            lines.append(f"{indent}{key:<{width}} {_short(item) if item not in ({}, []) else '-'}")
    return lines


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
